//! The formats, and what their writers get.

use std::io::{self, Read, Seek, Write};
use std::ops::RangeInclusive;

use hindsight_trace::{Record, TraceError, TraceReader};
use thiserror::Error;

use crate::symbols::FunctionTable;
use crate::{json, text};

/// The records of a trace; `None` where some are missing, because a block is damaged.
pub(crate) type RecordStream<'a> = &'a mut dyn Iterator<Item = Option<Record>>;

/// A format of another tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A line for each record.
    Text,
    /// A JSON object for each record, one a line.
    Json,
}

/// What is known of the guest beyond the trace.
#[derive(Debug, Default)]
pub struct Guest {
    /// Its functions.
    pub functions: FunctionTable,
    /// The ELF image, for its debug information; empty if there is none.
    pub image: Vec<u8>,
}

/// What is exported, and how.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// The counts of retired instructions whose records are exported.
    pub range: RangeInclusive<u64>,
}

impl Default for ExportOptions {
    fn default() -> Self {
        Self {
            range: 0..=u64::MAX,
        }
    }
}

/// Why a trace cannot be exported.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The trace cannot be read.
    #[error("the trace cannot be read")]
    Trace(#[from] TraceError),
    /// The output cannot be written.
    #[error("the output cannot be written")]
    Output(#[from] io::Error),
}

/// Writes `trace` in `format` to `out`. Damaged blocks are left out; `warn` is called for each.
///
/// # Errors
///
/// When the trace lacks what the format needs, or the output cannot be written.
pub fn export<R: Read + Seek>(
    trace: &mut TraceReader<R>,
    guest: &Guest,
    (format, options): (Format, &ExportOptions),
    out: &mut dyn Write,
    warn: &mut dyn FnMut(&TraceError),
) -> Result<(), ExportError> {
    let records = trace.records_within(options.range.clone());
    let mut stream = records.map(|record| record.inspect_err(|error| warn(error)).ok());
    match format {
        Format::Text => text::write(&mut stream, &guest.functions, out),
        Format::Json => json::write(&mut stream, &guest.functions, out),
    }
}
