//! Boot information from the monitor: `hvm_start_info` of the PVH boot ABI, and the command line.

use core::cell::UnsafeCell;

use crate::show::{TextBuffer, TextSink};

const MAGIC: u32 = 0x336e_c578;
/// Offset of `cmdline_paddr` in `hvm_start_info`.
const COMMAND_LINE: usize = 24;
/// Offset of `rsdp_paddr`.
const RSDP: usize = 32;

/// The start info in guest memory.
#[derive(Clone, Copy, Debug)]
pub struct StartInfo(*const u8);

impl StartInfo {
    pub(crate) fn at(address: u32) -> Self {
        Self(address as usize as *const u8)
    }

    fn field<T: Copy>(self, offset: usize) -> Option<T> {
        // SAFETY: the address has 32 bits and the first 4 GiB are mapped. The magic number shows
        // that the monitor put the structure there.
        unsafe {
            (self.0.cast::<u32>().read_unaligned() == MAGIC)
                .then(|| self.0.add(offset).cast::<T>().read_unaligned())
        }
    }

    /// Physical address of the ACPI RSDP, or 0.
    pub fn rsdp(self) -> u64 {
        self.field(RSDP).unwrap_or(0)
    }

    /// Whether the monitor passed a command line that is not empty.
    pub fn has_command_line(self) -> bool {
        // SAFETY: the PVH boot ABI ends the text with a zero, so it has a first byte.
        self.command_line_address()
            .is_some_and(|text| unsafe { text.read() } != 0)
    }

    fn command_line_address(self) -> Option<*const u8> {
        let address: u64 = self.field(COMMAND_LINE)?;
        (address != 0).then_some(address as *const u8)
    }
}

struct CommandLine(UnsafeCell<TextBuffer<512>>);

// SAFETY: only `copy_command_line` writes it, before other CPUs start.
unsafe impl Sync for CommandLine {}

static COMMAND_LINE_TEXT: CommandLine = CommandLine(UnsafeCell::new(TextBuffer::new()));

/// Copies the command line, up to 512 bytes, from memory that payloads may overwrite.
pub fn copy_command_line(info: StartInfo) {
    let Some(mut at) = info.command_line_address() else {
        return;
    };
    // SAFETY: `run::init` calls this before other CPUs start and before the first reader.
    let text = unsafe { &mut *COMMAND_LINE_TEXT.0.get() };
    *text = TextBuffer::new();
    loop {
        // SAFETY: the PVH boot ABI ends the text with a zero, at which the loop stops.
        let byte = unsafe { at.read() };
        if byte == 0 {
            return;
        }
        if let Ok(one) = core::str::from_utf8(&[byte]) {
            text.put(one);
        }
        // SAFETY: as above.
        at = unsafe { at.add(1) };
    }
}

/// The command line that [`copy_command_line`] copied.
pub fn command_line() -> &'static str {
    // SAFETY: after `copy_command_line` nothing writes it.
    unsafe { &*COMMAND_LINE_TEXT.0.get() }.as_str()
}

/// The value of the first word `key=value`.
pub fn option(key: &str) -> Option<&'static str> {
    command_line()
        .split(' ')
        .find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
}

/// Whether `word` is one of the words of the command line.
pub fn flag(word: &str) -> bool {
    command_line().split(' ').any(|other| other == word)
}
