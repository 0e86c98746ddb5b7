//! The end of a payload: one write to the debug exit port.

use crate::{insn, port};

/// The debug exit port, by the convention of QEMU's `isa-debug-exit` at iobase 0xf4.
pub const EXIT_PORT: u16 = 0xf4;

/// Ends the machine; the monitor's process status becomes `(code << 1) | 1`. Code 0 is a pass.
pub fn exit(code: u32) -> ! {
    port::outl(EXIT_PORT, code);
    loop {
        insn::cli();
        insn::hlt();
    }
}
