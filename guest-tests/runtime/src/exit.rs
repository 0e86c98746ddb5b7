//! The exit of a payload: one write to the debug exit port.

use crate::{insn, port};

/// The debug exit port: QEMU's `isa-debug-exit` at iobase 0xf4.
pub const EXIT_PORT: u16 = 0xf4;

/// Ends the machine; code 0 is a pass.
///
/// The exit status of the monitor is `(code << 1) | 1`.
pub fn exit(code: u32) -> ! {
    port::outl(EXIT_PORT, code);
    loop {
        insn::cli();
        insn::hlt();
    }
}
