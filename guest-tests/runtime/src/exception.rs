//! Exceptions as data: the registers at an event, a caught exception, and a log of resumed ones.

use crate::insn;
use crate::show::{Show, TextSink, decimal, hex};
use hindsight_regs::vector::Vector;

/// The registers at an event, as the entry stub and the processor pushed them.
///
/// A handler may change them; the return loads them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the fields are registers")]
pub struct TrapFrame {
    pub r15: u64,
    pub r14: u64,
    pub r13: u64,
    pub r12: u64,
    pub r11: u64,
    pub r10: u64,
    pub r9: u64,
    pub r8: u64,
    pub rdi: u64,
    pub rsi: u64,
    pub rbp: u64,
    pub rbx: u64,
    pub rdx: u64,
    pub rcx: u64,
    pub rax: u64,
    pub vector: u64,
    pub error: u64,
    pub rip: u64,
    pub cs: u64,
    pub rflags: u64,
    pub rsp: u64,
    pub ss: u64,
}

/// An exception, with the state that the processor reported for it.
#[derive(Clone, Copy, Debug)]
pub struct CaughtException {
    /// Vector, 0 to 31.
    pub vector: u8,
    /// Error code; 0 for vectors without one.
    pub error: u64,
    /// Saved RIP.
    pub rip: u64,
    /// Saved CS.
    pub cs: u64,
    /// Saved RFLAGS.
    pub rflags: u64,
    /// CR2; meaningful for #PF only.
    pub cr2: u64,
    /// DR6; read for #DB only, else 0.
    pub dr6: u64,
    /// All saved registers.
    pub frame: TrapFrame,
}

impl CaughtException {
    pub(crate) fn of(frame: &TrapFrame) -> Self {
        Self {
            vector: (frame.vector & 0xff) as u8,
            error: frame.error,
            rip: frame.rip,
            cs: frame.cs,
            rflags: frame.rflags,
            cr2: if frame.vector == Vector::PF.0.into() {
                insn::read_cr2()
            } else {
                0
            },
            dr6: if frame.vector == Vector::DB.0.into() {
                insn::read_dr6()
            } else {
                0
            },
            frame: *frame,
        }
    }

    /// Privilege level of the interrupted code.
    pub fn cpl(&self) -> u8 {
        (self.cs & 3) as u8
    }

    /// Vector and error code, the two that most checks compare.
    pub fn code(&self) -> (u8, u64) {
        (self.vector, self.error)
    }
}

impl Show for CaughtException {
    fn show(&self, out: &mut dyn TextSink) {
        out.put("vector:");
        decimal(u64::from(self.vector), out);
        for (name, value) in [(",error:", self.error), (",rip:", self.rip)] {
            out.put(name);
            hex(value, out);
        }
        if self.vector == Vector::DB.0 {
            out.put(",dr6:");
            hex(self.dr6, out);
        }
        if self.vector == Vector::PF.0 {
            out.put(",cr2:");
            hex(self.cr2, out);
        }
    }
}

/// Maximum number of events that an [`ExceptionLog`] holds; later ones are only counted.
pub const LOG_EVENTS: usize = 64;

/// Exceptions that were resumed, in order.
#[derive(Clone, Copy, Debug)]
pub struct ExceptionLog {
    events: [CaughtException; LOG_EVENTS],
    count: usize,
}

impl ExceptionLog {
    pub(crate) fn clear(&mut self) {
        self.count = 0;
    }

    /// How many exceptions there were, including those beyond [`LOG_EVENTS`].
    pub fn count(&self) -> usize {
        self.count
    }

    /// The first [`LOG_EVENTS`] exceptions.
    pub fn events(&self) -> &[CaughtException] {
        &self.events[..self.count.min(LOG_EVENTS)]
    }

    pub(crate) fn push(&mut self, exception: CaughtException) {
        if let Some(entry) = self.events.get_mut(self.count) {
            *entry = exception;
        }
        self.count += 1;
    }
}
