//! `hindsight test`.

mod args;
mod command;
mod report_console;

pub use args::TestArgs;
pub use command::{HarnessHost, builtin_images, builtin_jobs, run, run_job, run_with};
