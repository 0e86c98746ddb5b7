//! Writes traces in the formats of other tools: [`export`] is the entry.

mod format;
mod json;
mod symbols;
mod text;

pub use format::{ExportError, ExportOptions, Format, Guest, export};
pub use symbols::{Function, FunctionTable, LocationError, image_hash};
