//! Coverage in the format of DynamoRIO's drcov, version 2, which disassemblers' plugins read.

use std::collections::BTreeSet;
use std::io::Write;

use crate::code::execution;
use crate::error::ExportError;
use crate::flow::Flow;
use crate::input::Guest;

/// Writes the code that was executed, as blocks of one module.
pub(crate) fn write(
    flow: &Flow,
    guest: &Guest,
    path: &str,
    out: &mut dyn Write,
) -> Result<(), ExportError> {
    let counts = execution(flow, &guest.image)?;
    let file = object::File::parse(guest.image.as_slice())?;
    let (base, end) = bounds(&file);
    let mut blocks = BTreeSet::new();
    for span in flow.spans.keys() {
        // The last instruction begins before the end of the span.
        let last = counts.range(span.start..span.end).next_back();
        let Some((address, executed)) = last else {
            continue;
        };
        let Some(start) = span
            .start
            .checked_sub(base)
            .and_then(|start| u32::try_from(start).ok())
        else {
            continue;
        };
        let len = address + u64::from(executed.len) - span.start;
        blocks.insert((start, u16::try_from(len).unwrap_or(u16::MAX)));
    }
    writeln!(out, "DRCOV VERSION: 2\nDRCOV FLAVOR: drcov")?;
    writeln!(out, "Module Table: version 2, count 1")?;
    writeln!(out, "Columns: id, base, end, entry, path")?;
    writeln!(
        out,
        " 0, {base:#018x}, {end:#018x}, {:#018x}, {path}",
        object::Object::entry(&file)
    )?;
    writeln!(out, "BB Table: {} bbs", blocks.len())?;
    for (start, len) in blocks {
        out.write_all(&start.to_le_bytes())?;
        out.write_all(&len.to_le_bytes())?;
        // The module.
        out.write_all(&[0, 0])?;
    }
    Ok(())
}

/// The first address of the image's segments, and the first one after them.
fn bounds(file: &object::File<'_>) -> (u64, u64) {
    use object::{Object, ObjectSegment};
    let starts = file.segments().map(|segment| segment.address());
    let ends = file
        .segments()
        .map(|segment| segment.address().saturating_add(segment.size()));
    (starts.min().unwrap_or(0), ends.max().unwrap_or(0))
}
