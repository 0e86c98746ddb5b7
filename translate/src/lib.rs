//! Translates x86-64 code of a guest into x86-64 code of the host.
//!
//! There is no intermediate representation. The translator copies each guest instruction, renames
//! its registers, and replaces its memory operand by the host address of the guest's memory. A unit
//! ends before an instruction that the translator does not support. The caller, an interpreter,
//! executes that instruction and may enter translated code again after it.
//!
//! - A [`UnitSource`] holds the blocks to translate together: blocks of one page, each the likely
//!   successor of the previous one. [`Translator::translate`] generates a unit from it.
//! - [`Translator::prepare`], [`Entry::run`] and [`Translator::left`] run a unit. The unit jumps to
//!   other units until the caller must act; [`UnitExit`] says why.
//! - Entering a unit subtracts all of its instructions from the budget. Each exit adds back those
//!   that did not execute, so the budget is exact at every exit.
//! - Translated code accesses memory through a small TLB, which a [`Callback`] fills. Pages with
//!   side effects are never entered into it: an access to one leaves the unit before the
//!   instruction.
//! - The arithmetic flags stay in the host's RFLAGS while only translated code reads them. For
//!   exits, the unit stores the values from which the caller computes the flags: [`FlagState`].
//!
//! No address of the code memory is both writable and executable: see the documentation of the
//! module `arena`.

mod analysis;
mod arena;
mod asm;
mod emit;
mod entry;
mod flag_stubs;
mod flags;
mod layout;
mod paths;
mod stubs;
mod tables;
mod translator;
mod unit;
mod vector;
mod vector_stubs;
mod x87;

pub use analysis::{
    AccessCounts, AccessFormat, BranchFormat, BranchKind, FlagEffects, Follow, GuestBlock,
    GuestInstruction, RecordKind, UnitSource,
};
pub use entry::{Entry, EntryState, Left, RecordBuffer, UnitExit};
pub use flags::{FlagKind, FlagState, FlagStep};
pub use layout::Rights;
pub use paths::{BranchWords, RECORDED_BRANCHES};
pub use tables::{JumpKeys, TlbKey};
pub use translator::{Callback, Translator};
pub use unit::{EdgeId, NotTranslated, Unit, UnitAccess, UnitBlock, UnitId};
pub use vector::VectorLevel;
pub use vector_stubs::wide_moves;
pub use x87::is_x87;
