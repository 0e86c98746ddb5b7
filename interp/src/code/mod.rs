//! Decoded guest code: operations, blocks of operations, and the cache of blocks.
//!
//! This module is generic over the context `C` on which handlers work, so that it does not depend
//! on the processor's state.
//!
//! # Who may hold a pointer to an operation
//!
//! Only [`CodeCache::tidy`] frees blocks, and it frees all of them at once. Links between blocks
//! and the jump cache belong to the cache and are cleared with it. Outside the cache, there are two
//! kinds of pointers:
//!
//! - [`BlockOp`], [`InnerOp`], [`LastOp`] and [`LiveBlock`] have a lifetime during which their
//!   block is not freed. Handlers get them from [`LiveBlock::dispatch`].
//! - [`BlockEntry`] is a stored pointer without a lifetime. Only `unsafe` code can turn it into a
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
