//! One self-contained page about a trace: time line, flame graph, branches, events and coverage.
//!
//! The page gets sums, not records: its size does not depend on the length of the run.

mod data;

use std::io::{Read, Seek, Write};

use hindsight_trace::{TraceError, TraceReader};

use crate::error::ExportError;
use crate::flow::Flow;
use crate::input::Guest;
use crate::timeline::SampledRun;
use data::PageData;

/// The template of the page. One of its lines is replaced by the data.
const PAGE: &str = include_str!("page.html");
const DATA_MARK: &str = "/*DATA*/";

/// Writes the page about `trace` to `out`. Damaged blocks are left out; `warn` is called for each.
///
/// # Errors
///
/// When the trace cannot be read, or the output cannot be written.
pub fn report<R: Read + Seek>(
    trace: &mut TraceReader<R>,
    guest: &Guest,
    out: &mut dyn Write,
    warn: &mut dyn FnMut(&TraceError),
) -> Result<(), ExportError> {
    let header = trace.header().clone();
    let functions = &guest.functions;
    let mut records = trace
        .records()
        .map(|record| record.inspect_err(|error| warn(error)).ok());
    let flow = Flow::of(&mut records, functions, &header);
    let mut records = trace.records().map(Result::ok);
    let run = SampledRun::of(&mut records, &header, functions);
    let data = PageData::new(&header, guest, &flow, &run);
    let json = serde_json::to_string(&data).map_err(std::io::Error::from)?;
    // Function names come from the guest: escape what could end the script element.
    let json = json
        .replace('<', "\\u003c")
        .replace(['\u{2028}', '\u{2029}'], " ");
    let (before, after) = PAGE.split_once(DATA_MARK).unwrap_or((PAGE, ""));
    out.write_all(before.as_bytes())?;
    out.write_all(json.as_bytes())?;
    out.write_all(after.as_bytes())?;
    Ok(())
}
