//! `hindsight merge`: joins the reports of several runs.

mod command;
mod junit;
mod lcov;
mod merged;
mod stacks;
mod stat;

pub use command::{MergeArgs, merge, run};
pub use merged::MergedReport;
