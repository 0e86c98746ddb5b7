//! Names that nearly every payload uses.

pub use crate::case::Ctx;
pub use crate::catch::{catch, user};
pub use crate::exception::CaughtException;
pub use crate::{
    case, check, check_eq, entry, need_feature, payload, require, require_eq, require_some, skip,
};
