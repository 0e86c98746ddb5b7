//! Trace files: damaged ones are reported, and reading one ends.
#![no_main]

use std::io::Cursor;

use hindsight_trace::TraceReader;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(mut reader) = TraceReader::new(Cursor::new(bytes)) else {
        return;
    };
    let _ = reader.processes(&mut |_| {}).len();
    let _ = reader.records().take(1 << 20).count();
});
