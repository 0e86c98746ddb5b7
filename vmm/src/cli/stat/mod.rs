//! `hindsight stat`: exact counts of a run, and their comparison with those of an earlier one.

mod args;
mod baseline;
mod command;
mod figures;
mod inputs;
mod session;

pub use args::StatArgs;
pub use command::run;
pub(super) use figures::Figures;
