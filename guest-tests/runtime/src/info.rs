//! What the monitor hands over: `hvm_start_info` of the PVH boot ABI, and the command line.

use core::cell::UnsafeCell;

use crate::show::{Sink, Text};

const MAGIC: u32 = 0x336e_c578;
/// Offset of `cmdline_paddr` in `hvm_start_info`.
const COMMAND_LINE: usize = 24;
/// Offset of `rsdp_paddr`.
const RSDP: usize = 32;

/// The start info, by its physical address.
#[derive(Clone, Copy, Debug)]
pub struct StartInfo(*const u8);

impl StartInfo {
    pub(crate) fn at(address: u32) -> Self {
        Self(address as usize as *const u8)
    }

    fn field<T: Copy>(self, offset: usize) -> Option<T> {
        // SAFETY: the first 4 GiB are mapped, and the monitor put the structure there.
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
        // SAFETY: the monitor ended the text with a zero, so there is a first byte.
        self.command_line_address()
            .is_some_and(|text| unsafe { text.read() } != 0)
    }

    fn command_line_address(self) -> Option<*const u8> {
        let address: u64 = self.field(COMMAND_LINE)?;
        (address != 0).then_some(address as *const u8)
    }
}

struct CommandLine(UnsafeCell<Text<512>>);

// SAFETY: written once, before other processors start.
unsafe impl Sync for CommandLine {}

static COMMAND_LINE_TEXT: CommandLine = CommandLine(UnsafeCell::new(Text::new()));

/// Copies the command line, up to 512 bytes, out of memory that payloads may use otherwise.
pub fn keep_command_line(info: StartInfo) {
    let Some(mut at) = info.command_line_address() else {
        return;
    };
    // SAFETY: called before other processors start; the monitor ended the text with a zero.
    let text = unsafe { &mut *COMMAND_LINE_TEXT.0.get() };
    *text = Text::new();
    loop {
        // SAFETY: as above.
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

/// The command line kept before.
pub fn command_line() -> &'static str {
    // SAFETY: not written any more.
    unsafe { &*COMMAND_LINE_TEXT.0.get() }.as_str()
}

/// The value of the first word `key=value`.
pub fn option(key: &str) -> Option<&'static str> {
    command_line()
        .split(' ')
        .find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
}

/// Whether `word` stands alone on the command line.
pub fn flag(word: &str) -> bool {
    command_line().split(' ').any(|other| other == word)
}
