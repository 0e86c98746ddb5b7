//! A decoded block: its operations, and what the cache needs to find and check it.

#![expect(
    unsafe_code,
    reason = "operations are owned through a raw pointer, because handlers hold pointers into them"
)]

use super::op::{BlockEntry, DEAD, Handler, Next, Op};
use std::ptr::NonNull;

/// The operations of a block. The last one has a `LastHandler`.
///
/// Handlers hold pointers into them, so no unique reference to them may exist. Moving a `Box` would
/// create one.
#[derive(Debug)]
struct OpSlice<C>(NonNull<[Op<C>]>);

impl<C> OpSlice<C> {
    fn new(ops: Vec<Op<C>>) -> Self {
        assert!(
            ops.last().is_some_and(Op::is_last),
            "a block ends in an operation that leads elsewhere"
        );
        let ops = Box::into_raw(ops.into_boxed_slice());
        // SAFETY: `Box::into_raw` never returns null.
        Self(unsafe { NonNull::new_unchecked(ops) })
    }

    fn get(&self) -> &[Op<C>] {
        // SAFETY: only `new` allocates and only `drop` frees them, and all references are shared.
        unsafe { self.0.as_ref() }
    }
}

impl<C> Drop for OpSlice<C> {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` as a box, and not used after this.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// Pages that a block depends on, besides the one in which it begins.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BlockPages {
    /// Guest-physical address of the second page, if the last instruction reaches into it.
    pub(crate) second: Option<u64>,
    /// Linear address of the page, if the block ends before a breakpoint in it.
    pub(crate) linear: Option<u64>,
}

/// A decoded block.
#[derive(Debug)]
pub(crate) struct Block<C> {
    ops: OpSlice<C>,
    /// Guest-physical address and mode, as `CodeCache::id` combines them.
    pub(super) id: u64,
    /// Guest-physical address of the second page, if the last instruction reaches into it.
    pub(crate) second_page: Option<u64>,
    /// [`BlockPages::linear`].
    pub(crate) linear_page: Option<u64>,
    /// Length of the code in bytes.
    pub(crate) len: u16,
    /// The bytes from which the block was decoded.
    pub(crate) code: Box<[u8]>,
    /// Numbers of its instructions' mnemonics.
    ///
    /// There may be more instructions than operations, because two may be fused.
    mnemonics: Box<[u16]>,
    /// The value of [`Op::count`] in its first operation while the block is live.
    count: u32,
    /// Whether it is dead until it has been compared with memory.
    pub(super) suspect: bool,
}

impl<C> Block<C> {
    /// Creates a block from `ops`, the last of which ends the block.
    pub(super) fn new(
        id: u64,
        code: Box<[u8]>,
        pages: BlockPages,
        (ops, mnemonics): (Vec<Op<C>>, Vec<u16>),
    ) -> Self {
        let len = u16::try_from(code.len()).unwrap_or(u16::MAX);
        let ops = OpSlice::new(ops);
        let count = ops.get().first().map_or(0, Op::count);
        debug_assert_eq!(usize::try_from(count).ok(), Some(mnemonics.len()));
        debug_assert!(count != 0 && count != DEAD, "a block has instructions");
        Self {
            ops,
            id,
            second_page: pages.second,
            linear_page: pages.linear,
            len,
            code,
            mnemonics: mnemonics.into(),
            count,
            suspect: false,
        }
    }

    /// Creates a block that must not run.
    pub(super) fn dead() -> Self {
        let op = Op::new(Handler::Last(|_, _| Next::EXIT));
        op.set_count(1);
        let block = Self::new(
            0,
            Box::default(),
            BlockPages::default(),
            (vec![op], vec![0]),
        );
        block.kill();
        block
    }

    /// Returns the entry of the block: a pointer to its first operation.
    pub(crate) fn entry(&self) -> BlockEntry<C> {
        BlockEntry::new(self.ops.0.cast())
    }

    /// Returns its operations.
    pub(crate) fn ops(&self) -> &[Op<C>] {
        self.ops.get()
    }

    pub(super) fn mnemonics(&self) -> &[u16] {
        &self.mnemonics
    }

    /// Whether the block is live, that is, may run.
    pub(crate) fn is_live(&self) -> bool {
        self.ops().first().is_some_and(|op| op.count() != DEAD)
    }

    /// Marks the block dead: every link to it then fails at its entry.
    pub(super) fn kill(&self) {
        if let Some(first) = self.ops().first() {
            first.set_count(DEAD);
        }
    }

    /// Makes a suspect block live again, after its code was found unchanged in memory.
    pub(super) fn revive(&mut self) {
        debug_assert!(self.suspect);
        self.suspect = false;
        if let Some(first) = self.ops().first() {
            first.set_count(self.count);
        }
    }
}
