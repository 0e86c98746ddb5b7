//! The operation: one decoded instruction, or two fused ones, ready to execute.

#![expect(unsafe_code, reason = "handlers reach operations through raw pointers")]

use crate::registers::Reg;
use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::NonNull;

/// Executes an operation that is not the last of its block.
pub(crate) type InnerHandler<C> = for<'b> fn(&mut C, InnerOp<'b, C>) -> Next<C>;

/// Executes the last operation of a block.
///
/// It continues with another block, or leaves the dispatch loop.
pub(crate) type LastHandler<C> = for<'b> fn(&mut C, LastOp<'b, C>) -> Next<C>;

/// A handler of either kind, as an operation stores it.
type StoredHandler<C> = for<'b> unsafe fn(&mut C, BlockOp<'b, C>) -> Next<C>;

/// How an operation is executed.
#[derive(Debug)]
pub(crate) enum Handler<C> {
    /// The handler may continue with the next operation of the block.
    Inner(InnerHandler<C>),
    /// The handler does not continue in the block.
    Last(LastHandler<C>),
}

impl<C> Clone for Handler<C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for Handler<C> {}

/// Operand size for byte operations without AH, CH, DH or BH; with those it is 1.
pub(crate) const LOW: u8 = 0x81;

/// Value of [`Op::count`] in a dead block: more than any budget.
pub(crate) const DEAD: u32 = u32::MAX;

/// Bit of [`Op::prefix`]: LOCK.
pub(crate) const LOCK: u8 = 1;
/// Bit of [`Op::prefix`]: REP or REPE.
pub(crate) const REP: u8 = 2;
/// Bit of [`Op::prefix`]: REPNE.
pub(crate) const REPNE: u8 = 4;
/// Bit of [`Op::prefix`]: there is a memory operand.
pub(crate) const MEM: u8 = 8;
/// Bit of [`Op::prefix`]: a fused branch may be linked to the block of its target.
pub(crate) const LINKABLE: u8 = 16;

/// One operation of a block. It fills a cache line of the host.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Op<C> {
    handler: Cell<StoredHandler<C>>,
    /// Immediate, or the distance of a branch target from the start of the block.
    pub(crate) imm: u64,
    /// Displacement of the memory operand.
    pub(crate) disp: u64,
    /// The block at the target of a direct branch, once that was looked up.
    link: Cell<Option<BlockEntry<C>>>,
    /// In the first operation of a block: how often the block was entered.
    runs: Cell<u64>,
    /// In the first operation of a block: its number of instructions, or [`DEAD`].
    count: Cell<u32>,
    /// Index of the full instruction in [`super::CodeCache::insns`].
    pub(crate) insn: u32,
    /// First (destination) register.
    pub(crate) dst: Reg,
    /// Second (source) register.
    pub(crate) src: Reg,
    /// Base register of the memory operand.
    pub(crate) base: Reg,
    /// Index register of the memory operand.
    pub(crate) index: Reg,
    /// Binary logarithm of the index register's factor, 0 to 3.
    pub(crate) scale: u8,
    /// The slot of the base of the memory operand's segment: see [`Op::set_segment`].
    pub(crate) seg_base: Reg,
    /// Operand size in bytes.
    pub(crate) size: u8,
    /// Address size in bytes.
    pub(crate) address_size: u8,
    /// Length of the instruction in bytes; of both, if two were fused.
    pub(crate) len: u8,
    /// Instructions from this one to the end of the block, itself included.
    pub(crate) remaining: u8,
    /// Offset of the instruction from the start of the block, in bytes.
    pub(crate) offset: u16,
    /// [`LOCK`], [`REP`], [`REPNE`], [`MEM`], [`LINKABLE`].
    pub(crate) prefix: u8,
    /// How the operation can be fused with the next one: see `ops::fused`.
    pub(crate) fuse: u8,
    /// Whether the handler is a [`LastHandler`].
    is_last: bool,
}

impl<C> Op<C> {
    /// Creates an operation with this handler and no operands.
    pub(crate) fn new(handler: Handler<C>) -> Self {
        let (handler, is_last) = stored(handler);
        Self {
            handler: Cell::new(handler),
            imm: 0,
            disp: 0,
            link: Cell::new(None),
            runs: Cell::new(0),
            count: Cell::new(0),
            insn: 0,
            dst: Reg::Rax,
            src: Reg::Rax,
            base: Reg::Zero,
            index: Reg::Zero,
            scale: 0,
            seg_base: Reg::DsBase,
            size: 0,
            address_size: 8,
            len: 0,
            remaining: 0,
            offset: 0,
            prefix: 0,
            fuse: 0,
            is_last,
        }
    }

    /// Replaces the handler.
    pub(crate) fn set_handler(&mut self, handler: Handler<C>) {
        let (handler, is_last) = stored(handler);
        self.handler.set(handler);
        self.is_last = is_last;
    }

    /// Whether the handler is one for the last operation of a block.
    pub(crate) fn is_last(&self) -> bool {
        self.is_last
    }

    /// Sets the segment of the memory operand, 0 to 5.
    pub(crate) fn set_segment(&mut self, seg: u8) {
        debug_assert!(seg < 6);
        self.seg_base = Reg::segment_base(seg.into());
    }

    /// Returns the segment of the memory operand, 0 to 5.
    pub(crate) fn segment(&self) -> usize {
        self.seg_base.segment()
    }

    /// Whether the instruction has a LOCK prefix.
    pub(crate) fn lock(&self) -> bool {
        self.prefix & LOCK != 0
    }

    /// Whether the instruction has a memory operand.
    pub(crate) fn is_mem(&self) -> bool {
        self.prefix & MEM != 0
    }

    /// Returns how often the block was entered that begins with this operation.
    pub(crate) fn runs(&self) -> u64 {
        self.runs.get()
    }

    /// Adds runs, modulo 2^64, to the block that begins with this operation.
    pub(crate) fn add_runs(&self, runs: u64) {
        self.runs.set(self.runs.get().wrapping_add(runs));
    }

    /// Returns the instructions of the block that begins here, or [`DEAD`].
    pub(crate) fn count(&self) -> u32 {
        self.count.get()
    }

    /// Sets the value that [`Op::count`] returns.
    pub(crate) fn set_count(&self, count: u32) {
        self.count.set(count);
    }

    /// Returns the operation's address, which identifies it until it is freed.
    pub(crate) fn id(&self) -> OpId {
        OpId(std::ptr::from_ref(self).addr())
    }

    #[cfg(test)]
    pub(crate) fn handler_address(&self) -> usize {
        self.handler.get() as usize
    }
}

/// A handler that [`BlockOp::replace_handler`] replaced, or one for any operation.
#[derive(Debug)]
pub(crate) struct ReplacedHandler<C>(StoredHandler<C>);

impl<C> ReplacedHandler<C> {
    /// Wraps a handler that can execute any operation.
    pub(crate) fn any(handler: for<'a> fn(&mut C, BlockOp<'a, C>) -> Next<C>) -> Self {
        Self(handler)
    }
}

impl<C> Clone for ReplacedHandler<C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for ReplacedHandler<C> {}

/// Identifies an operation until it is freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct OpId(usize);

fn stored<C>(handler: Handler<C>) -> (StoredHandler<C>, bool) {
    // SAFETY: `InnerOp` and `LastOp` are transparent wrappers of `BlockOp`, so the function types
    // have the same ABI. A stored handler is called only by `BlockOp::execute`, with the operation
    // that it belongs to, whose block puts it where its kind demands (`OpSlice::new`).
    unsafe {
        match handler {
            Handler::Inner(handler) => (
                std::mem::transmute::<InnerHandler<C>, StoredHandler<C>>(handler),
                false,
            ),
            Handler::Last(handler) => (
                std::mem::transmute::<LastHandler<C>, StoredHandler<C>>(handler),
                true,
            ),
        }
    }
}

/// A pointer to an operation of a block that is not freed during `'b`.
#[repr(transparent)]
pub(crate) struct BlockOp<'b, C> {
    /// Points into the operations of a block, with provenance over all of them.
    op: NonNull<Op<C>>,
    block: PhantomData<&'b Op<C>>,
}

impl<C> Clone for BlockOp<'_, C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for BlockOp<'_, C> {}

impl<C> Deref for BlockOp<'_, C> {
    type Target = Op<C>;

    #[inline(always)]
    fn deref(&self) -> &Op<C> {
        // SAFETY: by the type's invariant the operation is not freed, and no unique reference to an
        // operation of a block ever exists.
        unsafe { self.op.as_ref() }
    }
}

impl<'b, C> BlockOp<'b, C> {
    /// # Safety
    /// `op` must point into the operations of a block, with provenance over all of them, and the
    /// block must not be freed during `'b`.
    #[inline(always)]
    pub(super) unsafe fn new(op: NonNull<Op<C>>) -> Self {
        Self {
            op,
            block: PhantomData,
        }
    }

    pub(super) fn as_ptr(self) -> NonNull<Op<C>> {
        self.op
    }

    /// Returns the block that the operation is linked to.
    #[inline(always)]
    pub(crate) fn link(self) -> Option<LiveBlock<'b, C>> {
        // SAFETY: a link points to a block of the same cache (`CodeCache::link_pending`). The cache
        // frees all of its blocks at once, so not during `'b`.
        self.link.get().map(|entry| unsafe { entry.live() })
    }

    /// Returns the block of an entry that was read from the same cache.
    ///
    /// # Safety
    /// The entry must have been read during `'b`, from the cache that contains this operation's
    /// block.
    #[inline(always)]
    pub(crate) unsafe fn live_sibling(self, entry: BlockEntry<C>) -> LiveBlock<'b, C> {
        // SAFETY: a cache frees all of its blocks at once, so not during `'b`. The caller
        // guarantees the rest.
        unsafe { entry.live() }
    }

    /// Replaces the operation's handler by one that gets the operation unchanged.
    ///
    /// Returns the old handler.
    pub(crate) fn replace_handler(
        self,
        handler: for<'a> fn(&mut C, BlockOp<'a, C>) -> Next<C>,
    ) -> ReplacedHandler<C> {
        ReplacedHandler(self.handler.replace(handler))
    }

    /// Executes the operation with a handler that was replaced.
    #[inline(always)]
    pub(crate) fn execute_replaced(self, c: &mut C, handler: ReplacedHandler<C>) -> Next<C> {
        // SAFETY: the handler can execute any operation, or it was this operation's own: its only
        // user stores it with the operation's identity.
        unsafe { (handler.0)(c, self) }
    }

    /// Returns the operation at an index in the block that begins with this operation.
    ///
    /// # Safety
    /// The block must have more than `index` operations.
    pub(crate) unsafe fn at(self, index: usize) -> Self {
        // SAFETY: the caller guarantees that the index is within the block, and the pointer has
        // provenance over all of its operations.
        unsafe { Self::new(self.op.add(index)) }
    }

    /// Makes the dispatch loop execute the operation next.
    pub(crate) fn next(self) -> Next<C> {
        Next(Some(self.op))
    }

    /// Restores a handler that was replaced.
    pub(crate) fn restore_handler(self, handler: ReplacedHandler<C>) {
        self.handler.set(handler.0);
    }

    pub(super) fn set_link(self, entry: BlockEntry<C>) {
        self.link.set(Some(entry));
    }

    /// Executes the operation by a tail call of its handler.
    ///
    /// The caller must return what this returns.
    #[inline(always)]
    fn execute(self, c: &mut C) -> Next<C> {
        // SAFETY: the handler is called with its own operation, and a block ends in a `LastHandler`
        // (`OpSlice::new`).
        unsafe { (self.handler.get())(c, self) }
    }

    /// Executes the operation now or makes the dispatch loop execute it: see [`Next`].
    #[inline(always)]
    fn run(self, c: &mut C) -> Next<C> {
        if cfg!(any(miri, hindsight_trampoline)) {
            Next(Some(self.op))
        } else {
            self.execute(c)
        }
    }
}

/// An operation that is not the last of its block.
#[repr(transparent)]
pub(crate) struct InnerOp<'b, C>(BlockOp<'b, C>);

impl<C> Clone for InnerOp<'_, C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for InnerOp<'_, C> {}

impl<'b, C> Deref for InnerOp<'b, C> {
    type Target = BlockOp<'b, C>;

    #[inline(always)]
    fn deref(&self) -> &BlockOp<'b, C> {
        &self.0
    }
}

impl<'b, C> InnerOp<'b, C> {
    /// Returns the next operation of the block.
    #[inline(always)]
    pub(crate) fn next_op(self) -> BlockOp<'b, C> {
        // SAFETY: only an `InnerHandler` gets an `InnerOp`, and a block ends in a `LastHandler`
        // (`OpSlice::new`): another operation follows in the same allocation.
        unsafe { BlockOp::new(self.0.op.add(1)) }
    }

    /// Executes the next operation. A handler must call this last.
    #[inline(always)]
    pub(crate) fn go(self, c: &mut C) -> Next<C> {
        self.next_op().run(c)
    }
}

/// The last operation of a block.
#[repr(transparent)]
pub(crate) struct LastOp<'b, C>(BlockOp<'b, C>);

impl<C> Clone for LastOp<'_, C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for LastOp<'_, C> {}

impl<'b, C> Deref for LastOp<'b, C> {
    type Target = BlockOp<'b, C>;

    #[inline(always)]
    fn deref(&self) -> &BlockOp<'b, C> {
        &self.0
    }
}

/// A pointer to a block's first operation, as links and the jump cache store it.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct BlockEntry<C>(NonNull<Op<C>>);

impl<C> Clone for BlockEntry<C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for BlockEntry<C> {}

impl<C> PartialEq for BlockEntry<C> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<C> BlockEntry<C> {
    /// Creates the entry of the block whose operations begin at `first`.
    pub(super) fn new(first: NonNull<Op<C>>) -> Self {
        Self(first)
    }

    /// Returns the block as one that is not freed during `'b`.
    ///
    /// # Safety
    /// The block must not have been freed since the entry was read from its cache, and must not be
    /// freed during `'b`.
    #[inline(always)]
    pub(crate) unsafe fn live<'b>(self) -> LiveBlock<'b, C> {
        // SAFETY: an entry is made from the first operation of a block, with provenance over all of
        // its operations. The caller guarantees the rest.
        LiveBlock(unsafe { BlockOp::new(self.0) })
    }
}

/// A block that is not freed during `'b`.
#[repr(transparent)]
pub(crate) struct LiveBlock<'b, C>(BlockOp<'b, C>);

impl<C> Clone for LiveBlock<'_, C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for LiveBlock<'_, C> {}

impl<'b, C> LiveBlock<'b, C> {
    /// Returns the number of instructions in the block, or [`DEAD`].
    #[inline(always)]
    pub(crate) fn count(self) -> u32 {
        self.0.count.get()
    }

    /// Counts a run of the block, and returns its number of runs.
    #[inline(always)]
    pub(crate) fn count_run(self) -> u64 {
        let runs = self.0.runs.get().wrapping_add(1);
        self.0.runs.set(runs);
        runs
    }

    /// Returns the block's first operation.
    pub(crate) fn first_op(self) -> BlockOp<'b, C> {
        self.0
    }

    /// Executes the block. A handler must call this last.
    #[inline(always)]
    pub(crate) fn go(self, c: &mut C) -> Next<C> {
        self.0.run(c)
    }

    /// Executes operations from the block's first one until a handler leaves the loop.
    pub(crate) fn dispatch(self, c: &mut C) {
        let mut next = self.0.execute(c);
        while let Some(op) = next.0 {
            // SAFETY: a handler returned the pointer, from an operation or a block that stays
            // allocated until blocks are freed, which no handler does.
            next = unsafe { BlockOp::new(op) }.execute(c);
        }
    }
}

/// A handler's result: the operation to execute next, or none to leave the loop.
///
/// Normally a handler executes the next operation itself, as its last call. The compiler turns this
/// tail call into a jump, so that handlers follow each other without a loop, and
/// [`LiveBlock::dispatch`] only sees the last result. Without tail calls (no optimization,
/// sanitizers, Miri), the stack would grow with each operation. There handlers return the next
/// operation instead (cfg `hindsight_trampoline`, which the build script sets).
#[must_use]
#[repr(transparent)]
pub(crate) struct Next<C>(Option<NonNull<Op<C>>>);

impl<C> Next<C> {
    /// Leaves the dispatch loop.
    pub(crate) const EXIT: Self = Self(None);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn op_fills_one_cache_line() {
        assert_eq!((size_of::<Op<()>>(), align_of::<Op<()>>()), (64, 64));
    }

    #[test]
    fn handler_kind_is_kept() {
        fn inner(c: &mut u8, o: InnerOp<'_, u8>) -> Next<u8> {
            *c += 1;
            o.go(c)
        }
        fn last(c: &mut u8, _: LastOp<'_, u8>) -> Next<u8> {
            *c += 10;
            Next::EXIT
        }
        let mut op = Op::new(Handler::Inner(inner));
        assert!(!op.is_last());
        op.set_handler(Handler::Last(last));
        assert!(op.is_last());
    }
}
