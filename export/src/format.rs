//! The formats, and the entry of the crate.

use std::io::{Read, Seek, Write};
use std::ops::RangeInclusive;

use hindsight_trace::{TraceError, TraceHeader, TraceReader};

use crate::error::ExportError;
use crate::flow::{Flow, is_contiguous};
use crate::input::{Guest, RecordStream};
use crate::{callgrind, drcov, firefox, flamegraph, json, lcov, perf, perfetto, text};

/// A format of another tool. The documentation of each is its help on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Format {
    /// A line for each record
    Text,
    /// A JSON object for each record, one a line
    Json,
    /// perf.data with branch stacks, for perf report and perf script
    Perf,
    /// Instructions by stack, a line each, for flame graph tools
    Folded,
    /// A flame graph (SVG)
    Flamegraph,
    /// Instructions and calls by line, for callgrind_annotate and kcachegrind
    Callgrind,
    /// Coverage by line, function and branch, for genhtml
    Lcov,
    /// Coverage by block, for disassemblers
    Drcov,
    /// A profile for the Firefox Profiler
    Firefox,
    /// A time line for Perfetto
    Perfetto,
}

impl Format {
    /// Whether the format is about all code of the run, by the image's functions, lines or blocks.
    const fn covers_code(self) -> bool {
        matches!(self, Self::Callgrind | Self::Lcov | Self::Drcov)
    }
}

/// Options of an export.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// The counts of retired instructions whose records are exported.
    pub range: RangeInclusive<u64>,
    /// For perf: a sample every so many branches, with the last 32 of them.
    pub every: u64,
}

impl Default for ExportOptions {
    fn default() -> Self {
        Self {
            range: 0..=u64::MAX,
            every: 32,
        }
    }
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
    let header = trace.header().clone();
    if format.covers_code() {
        if !is_contiguous(&header) {
            return Err(ExportError::NotContiguous);
        }
        if guest.image.is_empty() {
            return Err(ExportError::NoImage);
        }
    }
    let records = trace.records_within(options.range.clone());
    let mut stream = records.map(|record| record.inspect_err(|error| warn(error)).ok());
    write(&mut stream, &header, guest, (format, options), out)
}

fn write(
    stream: RecordStream<'_>,
    header: &TraceHeader,
    guest: &Guest,
    (format, options): (Format, &ExportOptions),
    out: &mut dyn Write,
) -> Result<(), ExportError> {
    let functions = &guest.functions;
    let flow = |stream| Flow::of(stream, functions, header);
    match format {
        Format::Text => text::write(stream, functions, out),
        Format::Json => json::write(stream, functions, out),
        Format::Perf => perf::write(stream, header, guest, options.every, out),
        Format::Folded => flamegraph::write_folded(&flow(stream).tree, functions, out),
        Format::Flamegraph => flamegraph::write_svg(&flow(stream).tree, functions, out),
        Format::Callgrind => callgrind::write(&flow(stream), guest, out),
        Format::Lcov => lcov::write(&flow(stream), guest, out),
        Format::Drcov => drcov::write(&flow(stream), guest, &header.image.path, out),
        Format::Firefox => firefox::write(stream, header, functions, out),
        Format::Perfetto => perfetto::write(stream, header, functions, out),
    }
}
