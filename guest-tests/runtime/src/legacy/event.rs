//! Events in the legacy modes, and what to do after them.

/// Actions after an event was logged.
pub mod action {
    /// The run ends.
    pub const END: u8 = 0;
    /// The interrupted code continues; DR6 is reset after a #DB.
    pub const RESUME: u8 = 1;
    /// Like `RESUME`, with RF set.
    pub const RESUME_RF: u8 = 2;
    /// Like `RESUME`, with TF clear.
    pub const RESUME_NO_TF: u8 = 3;
    /// Like `RESUME`, `n` bytes further; `n` is below 16.
    pub const fn skip(n: u8) -> u8 {
        0x10 | (n & 0xf)
    }
}

/// General registers, in the order in which PUSHA stores them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are registers")]
pub struct LegacyRegs {
    pub edi: u32,
    pub esi: u32,
    pub ebp: u32,
    /// ESP, which is not loaded at the start and has no meaning in an event.
    pub skipped: u32,
    pub ebx: u32,
    pub edx: u32,
    pub ecx: u32,
    pub eax: u32,
}

/// An exception or interrupt, as the entry stub recorded it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LegacyEvent {
    /// Vector.
    pub vector: u32,
    /// Error code, 0 without one.
    pub error: u32,
    /// Saved EIP or IP.
    pub eip: u32,
    /// Saved CS.
    pub cs: u32,
    /// Saved EFLAGS, or FLAGS in real mode.
    pub eflags: u32,
    /// The interrupted stack pointer.
    pub esp: u32,
    /// The interrupted SS.
    pub ss: u32,
    /// CR2.
    pub cr2: u32,
    /// DR6 for #DB, else 0.
    pub dr6: u32,
    /// DR7 for #DB, else 0.
    pub dr7: u32,
    /// The interrupted GS, FS, ES, DS.
    pub segments: [u32; 4],
    /// General registers.
    pub registers: LegacyRegs,
    /// The task register; 0 in real mode.
    pub tr: u32,
    /// CR0.
    pub cr0: u32,
}

impl LegacyEvent {
    /// Vector and EIP, which most checks compare.
    pub fn vector_and_eip(&self) -> (u32, u32) {
        (self.vector, self.eip)
    }

    /// Vector and error code.
    pub fn code(&self) -> (u32, u32) {
        (self.vector, self.error)
    }
}

/// Maximum number of events that are logged; the next one ends the run.
pub const EVENTS: usize = 64;
