//! Input for a deterministic machine, and the log that makes a run with input repeatable.

mod deliver;
mod feed;
mod log;
mod queue;

pub use feed::InputFeed;
pub use log::{ENTRY_MAX, InputEvent, InputLog, InputLogError, LoggedInput, LoggedMachine};
pub use queue::InputQueue;
