//! Decoded guest code: operations, blocks of operations, and the cache that owns the blocks.
//!
//! Everything here is generic over the context `C` that handlers work on, so that nothing here knows
//! the processor's state.
//!
//! # Who may hold a pointer to an operation
//!
//! Blocks are freed by [`CodeCache::tidy`] only, all of them at once. Links between blocks and the
//! jump cache are part of the cache and go with them. What leaves the cache is of two kinds:
//!
//! - [`BlockOp`], [`InnerOp`], [`LastOp`] and [`LiveBlock`] have a lifetime during which their block
//!   is not freed. Handlers get them from [`LiveBlock::dispatch`].
//! - [`BlockEntry`] is a stored pointer without a lifetime. Only `unsafe` turns it into a
//!   [`LiveBlock`].

mod block;
mod cache;
mod mix;
mod op;

pub(crate) use block::{Block, BlockPages};
pub(crate) use cache::{AddressHasher, CodeCache};
pub(crate) use mix::mnemonic_number;
pub(crate) use op::{
    BlockEntry, BlockOp, DEAD, Handler, InnerHandler, InnerOp, LINKABLE, LOCK, LOW, LastHandler,
    LastOp, LiveBlock, MEM, Next, Op, OpId, REP, REPNE, ReplacedHandler,
};
