//! The records of processes: names, forks and mappings, as the kernel writes them for perf.

use hindsight_trace::{LoggedMapping, ProcessEvent, ProcessRecord, TraceHeader};

use super::{Fields, MISC_KERNEL, MISC_USER, RECORD_COMM, RECORD_FORK, RECORD_MMAP, RECORD_MMAP2};
use crate::symbols::make_printable;
use crate::timeline::nanoseconds;

/// PERF_RECORD_MISC_COMM_EXEC.
const MISC_EXEC: u16 = 1 << 13;
/// PERF_RECORD_MISC_MMAP_BUILD_ID.
const MISC_BUILD_ID: u16 = 1 << 14;
/// The name of the kernel's mapping, by which perf knows it.
const KERNEL: &str = "[kernel.kallsyms]_text";
/// Bytes of a build ID in a record.
const BUILD_ID_LEN: usize = 20;

/// Bytes of a build ID in hexadecimal; `None` if it is empty or malformed.
fn build_id_bytes(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks_exact(2).take(BUILD_ID_LEN);
    let bytes = digits.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok());
    bytes
        .collect::<Option<Vec<_>>>()
        .filter(|bytes| !bytes.is_empty())
}

fn map(record: &ProcessRecord, map: &LoggedMapping, time: u64) -> Vec<u8> {
    let (mut fields, mut misc) = (Fields::default(), MISC_USER);
    fields.u32(map.tgid).u32(map.tgid);
    fields.u64(map.start).u64(map.len).u64(map.offset);
    match build_id_bytes(&map.build_id) {
        Some(bytes) => {
            misc |= MISC_BUILD_ID;
            fields
                .0
                .extend([u8::try_from(bytes.len()).unwrap_or(0), 0, 0, 0]);
            fields.0.extend(&bytes);
            fields
                .0
                .resize(fields.0.len() + BUILD_ID_LEN - bytes.len(), 0);
        }
        // Device, inode and its generation.
        None => {
            fields.u32(0).u32(0).u64(0).u64(0);
        }
    }
    // PROT_READ and PROT_EXEC; MAP_PRIVATE.
    fields.u32(5).u32(2);
    let mut path = if map.path == "[anon]" {
        "//anon".to_owned()
    } else {
        map.path.clone()
    };
    make_printable(&mut path);
    fields
        .text(&path)
        .sample_id((map.tgid, map.tgid), record.cpu, time);
    fields.record(RECORD_MMAP2, misc)
}

/// Code of the kernel as a mapping of all processes.
fn kernel_code(
    record: &ProcessRecord,
    (start, len): (u64, u64),
    offset: u64,
    name: &str,
    time: u64,
) -> Vec<u8> {
    let mut fields = Fields::default();
    fields.u32(u32::MAX).u32(0).u64(start).u64(len).u64(offset);
    fields.text(name).sample_id((0, 0), record.cpu, time);
    fields.record(RECORD_MMAP, MISC_KERNEL)
}

fn comm(
    (pid, tgid): (u32, u32),
    name: &str,
    misc: u16,
    record: &ProcessRecord,
    time: u64,
) -> Vec<u8> {
    let mut fields = Fields::default();
    fields.u32(tgid).u32(pid).text(name);
    fields.sample_id((tgid, pid), record.cpu, time);
    fields.record(RECORD_COMM, misc)
}

/// The records of the log; empty if it has no kernel.
pub(super) fn records(header: &TraceHeader, log: &[ProcessRecord]) -> Vec<u8> {
    let mut data = Vec::new();
    for record in log {
        let time = nanoseconds(record.ticks, header);
        match &record.event {
            ProcessEvent::Kernel { base, functions } => {
                let last = functions.iter().map(|function| function.0).max();
                let len = last.unwrap_or(0).saturating_add(4096);
                data.extend(kernel_code(record, (*base, len), *base, KERNEL, 0));
            }
            ProcessEvent::Name { pid, tgid, name } => {
                data.extend(comm((*pid, *tgid), name, 0, record, time));
            }
            ProcessEvent::Exec { tgid, name } => {
                data.extend(comm((*tgid, *tgid), name, MISC_EXEC, record, time));
            }
            ProcessEvent::Fork { parent, tgid, pid } => {
                let mut fields = Fields::default();
                fields
                    .u32(*tgid)
                    .u32(*parent)
                    .u32(*pid)
                    .u32(*parent)
                    .u64(time);
                fields.sample_id((*parent, *parent), record.cpu, time);
                data.extend(fields.record(RECORD_FORK, 0));
            }
            ProcessEvent::Map(mapping) => data.extend(map(record, mapping, time)),
            ProcessEvent::Module {
                name, start, len, ..
            } => {
                let name = format!("[{name}]");
                data.extend(kernel_code(record, (*start, *len), 0, &name, time));
            }
            ProcessEvent::File { .. } | ProcessEvent::Truncated {} => {}
        }
    }
    data
}
