//! Translates x86-64 code of a guest into x86-64 code of the host.
//!
//! The guest's instructions are executed as they are, with other registers and with the host's
//! address in place of their memory operand: there is no intermediate form. What this crate does not
//! translate it leaves to its caller, an interpreter, which continues exactly at that instruction and
//! enters translated code again behind it.
//!
//! - A [`UnitSource`] is what is translated together: blocks of one page, each the likely successor
//!   of the one before it. [`Translator::translate`] makes a unit of it.
//! - [`Translator::prepare`], [`Entry::run`] and [`Translator::left`] run it, and others that it leads
//!   to, until something has to be done by the caller: [`UnitExit`].
//! - Instructions are counted against a budget, a whole unit at a time; what a unit did not execute
//!   is given back, so that the count is exact at each exit.
//! - Memory is reached through a small TLB, which a [`Callback`] fills. What has side effects is never
//!   entered; accesses to it leave the unit before their instruction.
//! - The arithmetic flags stay in the host's while nothing else sees them. For exits, what they follow
//!   from is stored: [`FlagState`].
//!
//! Generated code is executable where it cannot be written: see the documentation of its memory.

mod analysis;
mod arena;
mod asm;
mod emit;
mod flags;
mod layout;
mod stubs;
mod translator;
mod vector;
mod vector_stubs;

pub use analysis::{
    BranchFormat, BranchKind, FlagEffects, Follow, GuestBlock, GuestInstruction, UnitSource,
};
pub use flags::{FlagKind, FlagState, FlagStep};
pub use layout::Rights;
pub use translator::{
    Callback, EdgeId, Entry, EntryState, Left, NotTranslated, Translator, Unit, UnitBlock,
    UnitExit, UnitId,
};
pub use vector::VectorLevel;
