//! What the caller and translated code exchange when that is entered and left.

#![expect(unsafe_code, reason = "generated code is entered")]

use crate::analysis::AccessCounts;
use crate::flags::FlagState;
use crate::unit::{EdgeId, UnitId};
use crate::vector::VectorLevel;

/// The caller's state when it enters translated code.
#[derive(Clone, Copy, Debug)]
pub struct EntryState {
    /// Cycles that the code may use before it must be left.
    pub budget: i64,
    /// Bases of FS and GS.
    pub segment_base: [u64; 2],
    /// The first argument of the callback.
    pub callback_data: usize,
    /// Where the code records branches.
    pub branches: RecordBuffer,
    /// Instructions that will have retired when the budget is used up, modulo 2^32.
    pub end_stamp: u32,
    /// Address of the guest's vector registers.
    ///
    /// 32 registers of 64 bytes, followed by 8 opmask registers of 8 bytes.
    pub vectors: usize,
    /// The vector registers that translated code may use.
    ///
    /// [`VectorLevel::None`] unless all floating-point exceptions of MXCSR are masked.
    pub vectors_allowed: VectorLevel,
    /// MXCSR.
    pub mxcsr: u32,
    /// Address of the guest's x87 state, as XSAVE stores it: 576 bytes, aligned to 64.
    pub x87: usize,
    /// Translated code may use the x87.
    ///
    /// False unless all x87 exceptions are masked and none is pending.
    pub x87_allowed: bool,
    /// The cache line of code that was fetched last.
    pub fetch_line: u64,
    /// The arithmetic flags, as LAHF and SETO AL leave them in AX.
    pub flags: u16,
}

/// Where translated code records branches.
#[derive(Clone, Copy, Debug)]
pub enum RecordBuffer {
    /// In the translator, as paths.
    Translator,
    /// In the caller's buffer: records of 24 bytes.
    Caller {
        /// Address of the next record.
        next: usize,
        /// Address of the record at which the buffer must be processed.
        end: usize,
    },
}

/// Where and why translated code was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitExit {
    /// Before an instruction that the caller must execute.
    Instruction {
        /// The unit.
        unit: UnitId,
        /// Index of the block.
        block: usize,
        /// Index of the instruction.
        index: usize,
    },
    /// At an edge that is not linked; [`Translator::link`](crate::Translator::link) can link it to a unit.
    Edge {
        /// RIP.
        rip: u64,
        /// The edge.
        edge: EdgeId,
    },
    /// At a direct jump to another page whose target is not in the jump cache.
    Jump {
        /// RIP.
        rip: u64,
    },
    /// At a jump to a unit that has more instructions than the budget has left.
    Budget {
        /// RIP.
        rip: u64,
        /// Instructions of that unit, if known.
        charge: Option<u32>,
    },
    /// After a branch was recorded for which the caller must process the records.
    Branches {
        /// RIP.
        rip: u64,
    },
}

/// The guest's state when translated code was left.
#[derive(Clone, Copy, Debug)]
pub struct Left {
    /// Where and why the code was left.
    pub exit: UnitExit,
    /// The rest of the budget.
    pub budget: i64,
    /// The values from which the arithmetic flags are computed.
    pub flags: FlagState,
    /// Address of the next record in the caller's buffer, for [`RecordBuffer::Caller`].
    pub branch_next: usize,
    /// Number of records of paths, for [`RecordBuffer::Translator`]: see [`Translator::expand`](crate::Translator::expand).
    pub paths: usize,
    /// MXCSR.
    pub mxcsr: u32,
    /// The cache line of code that was fetched last.
    pub fetch_line: u64,
    /// Instructions that accessed memory, if the units report accesses.
    pub accesses: AccessCounts,
}

/// Translated code that [`Translator::prepare`](crate::Translator::prepare) has made ready to run.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Entry {
    pub(crate) enter: u64,
}

impl Entry {
    /// Runs the code until it is left.
    ///
    /// # Safety
    /// - `registers` must point to the guest's 16 general registers in the order of their encoding,
    ///   valid for reads and writes.
    /// - The translator must not be borrowed, and must not be reset before this returns.
    /// - The pages that were passed to [`Translator::enter_page`](crate::Translator::enter_page) since the last flush must be
    ///   valid guest memory.
    /// - The caller's buffer of branches, if any, must have room up to its end.
    /// - The vector registers and the x87 state of [`EntryState`] must be valid for reads and writes,
    ///   and the header of the state must be zero but for its first byte.
    pub unsafe fn run(self, registers: *mut u64) {
        let enter = usize::try_from(self.enter).unwrap_or(0);
        let code = std::ptr::with_exposed_provenance::<u8>(enter);
        // SAFETY: the stub is a function with this signature.
        let enter: extern "sysv64" fn(*mut u64) = unsafe { std::mem::transmute(code) };
        enter(registers);
    }
}
