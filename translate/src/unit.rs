//! Units of translated code.

use crate::analysis::{AccessFormat, BranchFormat};
use crate::layout::Rights;
use crate::vector::VectorLevel;

/// Identifies a unit; valid until [`Translator::reset`](crate::Translator::reset).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitId(pub(crate) u32);

impl UnitId {
    /// The unit's number; units are numbered from 0.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Identifies an edge; valid until [`Translator::reset`](crate::Translator::reset).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EdgeId(pub(crate) u32);

/// Why a unit was not translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotTranslated {
    /// The unit would have too few instructions to be worth entering.
    ///
    /// If the instruction that ends it, which the caller must execute, is in the first block, the
    /// value is the index of that instruction.
    TooShort(Option<usize>),
    /// The code memory is full; [`Translator::reset`](crate::Translator::reset) empties it.
    Full,
}

/// The memory access of an exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitAccess {
    /// Size in bytes.
    pub size: u8,
    /// Whether the instruction writes.
    pub write: bool,
    /// Whether the instruction reads.
    pub read: bool,
    /// Whether the instruction retires once the access has been found.
    pub retires: bool,
}

/// A guest block that a unit contains.
#[derive(Clone, Copy, Debug)]
pub struct UnitBlock {
    /// RIP of its first instruction.
    pub rip: u64,
    /// Number of its instructions.
    pub count: u32,
}

/// A unit: a piece of translated code.
#[derive(Debug)]
pub struct Unit {
    /// The guest blocks of the unit.
    ///
    /// The code begins at the instruction [`Unit::start`] of the first block. It may end before the
    /// end of the last block, at an instruction that the caller must execute.
    pub blocks: Vec<UnitBlock>,
    /// Index in the first block of the instruction at which the code begins.
    pub start: usize,
    /// Index of the instruction that ends the code because the caller must execute it.
    ///
    /// `None` unless that instruction is in the first block.
    pub stop: Option<usize>,
    /// The rights with which the unit accesses memory.
    pub rights: Rights,
    /// How the unit records branches; `None` if it records none.
    pub branch_format: Option<BranchFormat>,
    /// How the unit reports accesses; `None` if it does not.
    pub access_format: Option<AccessFormat>,
    /// The vector registers that the unit uses.
    pub vectors: VectorLevel,
    /// Instructions of all blocks: what other units subtract from the budget.
    pub(crate) charge: u32,
    /// Entry addresses for other units.
    ///
    /// `code` checks that the vector registers are loaded, `loaded` is for units that have loaded
    /// them, and `entry` is for the caller.
    pub(crate) code: u64,
    pub(crate) loaded: u64,
    pub(crate) entry: u64,
    pub(crate) sees_flags: bool,
    pub(crate) incoming: Vec<u32>,
}

impl Unit {
    /// Instructions of all blocks but the first.
    ///
    /// The caller has charged the first block already, and charges these before it enters the unit.
    pub fn charge_beyond_first(&self) -> u32 {
        self.charge - self.blocks.first().map_or(0, |b| b.count)
    }

    /// Instructions of all blocks, without those before [`Unit::start`].
    pub fn charge_from_start(&self) -> u32 {
        self.charge - u32::try_from(self.start).unwrap_or(0)
    }

    /// Instructions of a block from `index` to its end.
    pub fn rest_of_block(&self, block: usize, index: usize) -> i64 {
        let count = self.blocks.get(block).map_or(0, |b| i64::from(b.count));
        count - i64::try_from(index).unwrap_or(count)
    }
}
