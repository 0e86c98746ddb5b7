//! The files that a client can read. No client can write them.
//!
//! | file | contents |
//! | --- | --- |
//! | `/kernel` | the symbols of the guest's Linux kernel |
//! | `/vmcore` | the guest as a core file |
//! | `/proc/1/smaps` | the linear addresses that the selected vCPU maps, which gdb's `generate-core-file` reads |

use std::fmt::Write as _;

use crate::cancel::CancelFlag;
use crate::core_file::{CoreFile, prstatus};
use crate::debugger::{DebugError, Debugger};
use crate::kernel;
use crate::memory::LinearMemory;
use crate::memory::page_tables::{MappedRanges, NO_EXECUTE, PagingForm, SameRange, WRITABLE};
use crate::target::PhysicalMemory;

/// Maximum number of ranges of addresses that a client is shown.
const RANGES_MAX: usize = 1 << 14;

/// A file that a client has open.
#[derive(Debug)]
pub(crate) enum ClientFile {
    /// Contents that are made when the file is opened.
    Bytes(Vec<u8>),
    /// The core file, whose memory is read as the client reads the file.
    Core(CoreFile),
}

impl ClientFile {
    /// Opens a file. `None` if no file has this name, or the guest has no kernel with symbols.
    ///
    /// # Errors
    ///
    /// When the machine runs or has ended.
    pub(crate) fn open(debugger: &mut Debugger, name: &[u8]) -> Result<Option<Self>, DebugError> {
        let (vcpu, cancel) = (debugger.selected, debugger.cancel.clone());
        Ok(match name {
            b"/kernel" | b"kernel" => {
                let linear = debugger.linear_memory(vcpu)?;
                kernel::symbol_file(&linear, &|| cancel.is_set()).map(Self::Bytes)
            }
            b"/vmcore" | b"vmcore" => {
                let mut threads = Vec::new();
                for (vcpu, number) in (0..debugger.vcpu_count()).zip(0..) {
                    threads.push(prstatus(number, debugger.state(vcpu)?));
                }
                let linear = debugger.linear_memory(0)?;
                Some(Self::Core(CoreFile::new(&linear, &threads, &cancel)))
            }
            b"/proc/1/smaps" => {
                let linear = debugger.linear_memory(vcpu)?;
                Some(Self::Bytes(maps(&linear, &cancel).into_bytes()))
            }
            _ => None,
        })
    }

    /// The length of the file in bytes.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Core(core) => core.len(),
        }
    }

    /// Reads from `offset` on, and returns the number of bytes: 0 at the end.
    pub(crate) fn read(
        &self,
        memory: &dyn PhysicalMemory,
        offset: u64,
        buffer: &mut [u8],
    ) -> usize {
        match self {
            Self::Bytes(bytes) => {
                let from = usize::try_from(offset).unwrap_or(usize::MAX);
                let rest = bytes.get(from..).unwrap_or(&[]);
                let len = rest.len().min(buffer.len());
                buffer[..len].copy_from_slice(&rest[..len]);
                len
            }
            Self::Core(core) => core.read(memory, offset, buffer),
        }
    }
}

/// Lists the linear addresses that map RAM, in the format of Linux's `/proc/PID/maps`.
fn maps(linear: &LinearMemory<'_>, cancel: &CancelFlag) -> String {
    let ranges = match PagingForm::new(linear.state) {
        Some(form) => {
            let search = (SameRange::Physical, RANGES_MAX);
            MappedRanges::find(linear.memory, &form, search, cancel).found
        }
        None => Vec::new(),
    };
    let mut text = String::new();
    let mut line = |start: u64, len: u64, rights: &str| {
        // The last page of all has no end that such a line can name.
        let end = start.saturating_add(len);
        let _ = writeln!(text, "{start:08x}-{end:08x} {rights} 00000000 00:00 0");
    };
    let ram = linear.memory.ram();
    for range in ranges.iter().flat_map(|range| range.in_ram(ram)) {
        let rights = match (range.rights & WRITABLE != 0, range.rights & NO_EXECUTE == 0) {
            (true, true) => "rwxp",
            (true, false) => "rw-p",
            (false, true) => "r-xp",
            (false, false) => "r--p",
        };
        line(range.start, range.len, rights);
    }
    if PagingForm::new(linear.state).is_none() {
        for range in ram {
            line(range.start, range.end - range.start, "rwxp");
        }
    }
    text
}
