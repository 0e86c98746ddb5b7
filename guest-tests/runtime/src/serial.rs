//! Text on COM1, without allocation.

use core::fmt;
use core::sync::atomic::{AtomicBool, Ordering};

use crate::port;
use crate::show::TextSink;

/// First port of COM1.
const BASE: u16 = 0x3f8;
const FIFO_CONTROL: u16 = BASE + 2;
const LINE_STATUS: u16 = BASE + 5;
/// Line status: the transmit FIFO is empty.
const THRE: u8 = 1 << 5;
const FIFO_BYTES: usize = 16;

static LOCK: AtomicBool = AtomicBool::new(false);

/// Enables the FIFO, so that the status is read once for 16 bytes of text.
pub fn init() {
    port::outb(FIFO_CONTROL, 1);
}

/// Writes `text` to the line.
pub fn write(text: &str) {
    for burst in text.as_bytes().chunks(FIFO_BYTES) {
        while port::inb(LINE_STATUS) & THRE == 0 {}
        for &byte in burst {
            port::outb(BASE, byte);
        }
    }
}

/// Runs `f` while no other CPU writes; calls must not be nested.
pub fn locked(f: impl FnOnce()) {
    while LOCK.swap(true, Ordering::Acquire) {
        core::hint::spin_loop();
    }
    f();
    LOCK.store(false, Ordering::Release);
}

/// COM1 as a destination of text.
#[derive(Clone, Copy, Debug)]
pub struct Com1;

impl TextSink for Com1 {
    fn put(&mut self, text: &str) {
        write(text);
    }
}

impl fmt::Write for Com1 {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        write(text);
        Ok(())
    }
}
