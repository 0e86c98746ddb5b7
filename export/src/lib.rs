//! Writes traces in the formats of other tools: [`export`] is the entry.

mod callgrind;
mod code;
mod drcov;
mod elf;
mod error;
mod firefox;
mod flamegraph;
mod flow;
mod format;
mod functions;
mod input;
mod json;
mod lcov;
mod lines;
mod perf;
mod perfetto;
mod process_costs;
mod report;
mod spaces;
mod stack;
mod symbols;
mod text;
mod timeline;

pub use elf::{CodeSegment, ElfCode};
pub use error::ExportError;
pub use format::{ExportOptions, Format, export};
pub use functions::{FunctionCost, function_costs};
pub use input::Guest;
pub use process_costs::{ProcessCost, process_costs};
pub use report::report;
pub use spaces::HostFiles;
pub use symbols::{Function, FunctionTable, LocationError, image_hash};
