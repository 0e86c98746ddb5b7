//! Networks of guests: a user network without privileges, by the program passt.

mod passt;
mod spec;

pub use passt::{NetError, NetLink, open};
pub use spec::NetSpec;
