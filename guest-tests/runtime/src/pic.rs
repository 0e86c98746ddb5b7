//! The pair of 8259A interrupt controllers.

use crate::port;

/// Command port of the first controller; the next port is its data port.
pub const MASTER: u16 = 0x20;
/// Command port of the second controller.
pub const SLAVE: u16 = 0xa0;

/// Initialises both controllers: line n raises the vector `base + n`, and all lines are masked.
///
/// They are edge triggered and cascaded on line 2.
pub fn init(base: u8) {
    for (controller, first, wiring) in [(MASTER, base, 1 << 2), (SLAVE, base + 8, 2)] {
        port::outb(controller, 0x11); // ICW1: edge, cascade, ICW4 follows
        port::outb(controller + 1, first); // ICW2: vectors
        port::outb(controller + 1, wiring); // ICW3
        port::outb(controller + 1, 1); // ICW4: 8086 mode
        port::outb(controller + 1, 0xff);
    }
}

/// Masks every line.
pub fn mask_all() {
    port::outb(MASTER + 1, 0xff);
    port::outb(SLAVE + 1, 0xff);
}

/// Unmasks `line`, 0 to 15, and for a line of the second controller the cascade too.
pub fn unmask(line: u8) {
    let (controller, bit) = if line < 8 {
        (MASTER, line)
    } else {
        (SLAVE, line - 8)
    };
    let mask = port::inb(controller + 1);
    port::outb(controller + 1, mask & !(1 << bit));
    if line >= 8 {
        unmask(2);
    }
}

/// Sends EOI for the interrupt of `line`.
pub fn eoi(line: u8) {
    if line >= 8 {
        port::outb(SLAVE, 0x20);
    }
    port::outb(MASTER, 0x20);
}

/// Whether `line` is set in the interrupt request register of its controller.
pub fn requested(line: u8) -> bool {
    let (controller, bit) = if line < 8 {
        (MASTER, line)
    } else {
        (SLAVE, line - 8)
    };
    port::outb(controller, 0x0a);
    port::inb(controller) & (1 << bit) != 0
}
