//! `hindsight trace`: runs a guest and writes what its processors do to a file.

mod args;
mod command;
mod requested;
mod session;

pub use args::TraceArgs;
pub(super) use args::TraceOptions;
pub(super) use args::count;
pub use command::run;
pub(super) use requested::RequestedTrace;
pub(super) use session::RunTrace;
