//! Text on COM1, without allocation.

use core::fmt;
use core::sync::atomic::{AtomicBool, Ordering};

use crate::port;

const COM1: u16 = 0x3f8;
const FIFO_CONTROL: u16 = COM1 + 2;
const LINE_STATUS: u16 = COM1 + 5;
/// Line status: the transmit FIFO is empty.
const THRE: u8 = 1 << 5;
const FIFO_BYTES: usize = 16;

static LOCK: AtomicBool = AtomicBool::new(false);

/// Turns the FIFO on. Text is written in bursts of its size, with one look at the status for each.
pub fn init() {
    port::outb(FIFO_CONTROL, 1);
}

/// Writes `text` to the line.
pub fn write(text: &str) {
    for burst in text.as_bytes().chunks(FIFO_BYTES) {
        while port::inb(LINE_STATUS) & THRE == 0 {}
        for &byte in burst {
            port::outb(COM1, byte);
        }
    }
}

/// Runs `f` while no other CPU writes. Must not be nested.
pub fn locked(f: impl FnOnce()) {
    while LOCK.swap(true, Ordering::Acquire) {
        core::hint::spin_loop();
    }
    f();
    LOCK.store(false, Ordering::Release);
}

/// COM1 as a sink of formatted text.
#[derive(Clone, Copy, Debug)]
pub struct Serial;

impl fmt::Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        write(text);
        Ok(())
    }
}
