//! The pre-resolved operation: what the decoder makes of one instruction.

#![expect(unsafe_code, reason = "operations are reached through raw pointers")]
use crate::core::Core;
use std::cell::Cell;

/// Slots of [`Core::regs`] beyond the 16 general registers.
pub(crate) mod slot {
    /// Always zero: no base or no index.
    pub(crate) const ZERO: u8 = 16;
    /// RIP of the first instruction of the block that runs.
    pub(crate) const BLOCK_RIP: u8 = 17;
    /// First of six segment bases, as they count in the current mode.
    pub(crate) const SEG_BASE: u8 = 18;
}

/// Marks AH, CH, DH, BH in a register field.
pub(crate) const HIGH: u8 = 0x20;

/// Instead of the size 1: neither register is AH, CH, DH or BH.
pub(crate) const LOW: u8 = 0x81;

/// Executes one operation and answers the next one.
pub(crate) type Handler = fn(&mut Core, &Op) -> Next;

/// The operation to run next. Always points into a live block or at the exit operation.
pub(crate) type Next = *const Op;

/// One operation of a block.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Op {
    pub(crate) h: Handler,
    /// Immediate, or the distance of a branch target from the block's start.
    pub(crate) imm: u64,
    /// Displacement of the memory operand.
    pub(crate) disp: u64,
    /// Where a direct branch goes once it was resolved.
    pub(crate) link: Cell<Next>,
    /// Instructions of the block, in its first operation; [`DEAD`] when it must not run.
    pub(crate) count: Cell<u32>,
    /// How often the block was entered, in its first operation.
    pub(crate) runs: Cell<u64>,
    /// Index of the full instruction in the block cache.
    pub(crate) insn: u32,
    /// First (destination) register.
    pub(crate) d: u8,
    /// Second (source) register.
    pub(crate) s: u8,
    pub(crate) base: u8,
    pub(crate) index: u8,
    pub(crate) scale: u8,
    /// Segment of the memory operand, 0 to 5.
    pub(crate) seg: u8,
    /// Operand size in bytes.
    pub(crate) size: u8,
    /// Address size in bytes.
    pub(crate) asz: u8,
    /// Length of the instruction (of both, if two were fused).
    pub(crate) len: u8,
    /// Instructions from this one to the end of the block, itself included.
    pub(crate) left: u8,
    /// Offset from the block's start, in bytes.
    pub(crate) at: u16,
    /// Prefixes, see [`LOCK`], [`REP`], [`REPNE`].
    pub(crate) prefix: u8,
    /// How it can be fused with the instruction after it.
    pub(crate) fuse: u8,
}

/// Executes an operation, as the last thing a handler does: compiled to a jump, so that handlers
/// follow each other without a loop. Where the compiler makes it a call, the depth is bounded by the
/// instructions of a slice.
#[inline(always)]
pub(crate) fn run(c: &mut Core, op: Next) -> Next {
    // SAFETY: `op` is the operation after a handler's own one (every block ends in an operation
    // that leads elsewhere), or the first one of a live block. Blocks are only freed between
    // dispatches.
    unsafe { ((*op).h)(c, &*op) }
}

/// In [`Op::count`]: more than any budget.
pub(crate) const DEAD: u32 = u32::MAX;

pub(crate) const LOCK: u8 = 1;
pub(crate) const REP: u8 = 2;
pub(crate) const REPNE: u8 = 4;
/// There is a memory operand.
pub(crate) const MEM: u8 = 8;
/// A fused branch may remember the block it leads to.
pub(crate) const LINKABLE: u8 = 16;

impl Op {
    /// An operation that only leaves the block.
    pub(crate) fn new(h: Handler) -> Self {
        Self {
            h,
            imm: 0,
            disp: 0,
            link: Cell::new(std::ptr::null()),
            count: Cell::new(0),
            runs: Cell::new(0),
            insn: 0,
            d: 0,
            s: 0,
            base: slot::ZERO,
            index: slot::ZERO,
            scale: 0,
            seg: 3,
            size: 0,
            asz: 8,
            len: 0,
            left: 0,
            at: 0,
            prefix: 0,
            fuse: 0,
        }
    }

    /// Goes on to the operation after this one.
    #[inline(always)]
    pub(crate) fn go(&self, c: &mut Core) -> Next {
        run(c, std::ptr::from_ref(self).wrapping_add(1))
    }

    /// Link and distance of the operation after this one.
    #[inline(always)]
    pub(crate) fn after(&self) -> (Next, u64) {
        let next = std::ptr::from_ref(self).wrapping_add(1);
        // SAFETY: only asked by conditional branches, which have an operation after them.
        unsafe { ((*next).link.get(), (*next).imm) }
    }

    pub(crate) fn lock(&self) -> bool {
        self.prefix & LOCK != 0
    }
}
