//! `hindsight test`.

mod args;
mod command;
mod report_console;

pub use args::TestArgs;
pub use command::{HarnessHost, run, run_with};
