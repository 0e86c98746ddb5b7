//! The state in which a blob starts.

use crate::legacy::blob::BlobLabel;
use crate::legacy::event::LegacyRegs;
use crate::legacy::layout::{BASE, STACK};

/// The mode in which a blob starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LegacyMode {
    /// Real-address mode; all segments are [`SEGMENT`](crate::legacy::SEGMENT).
    Real,
    /// Protected mode, 16-bit segments with base [`BASE`], at this CPL (0 or 3).
    Protected16(u8),
    /// Protected mode, flat 32-bit segments, at this CPL (0 or 3).
    Protected32(u8),
    /// Virtual-8086 mode; all segments are [`SEGMENT`](crate::legacy::SEGMENT).
    Virtual8086,
}

/// The paging mode under a blob; linear addresses equal physical ones. Not for real mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LegacyPaging {
    /// None.
    Off,
    /// 32-bit paging with 4 MiB pages: [`crate::legacy::LegacyMachine::directory`].
    Bits32,
    /// PAE paging, with the page directories of 64-bit mode:
    /// [`crate::legacy::LegacyMachine::pdpt`].
    Pae,
}

/// The state in which a blob starts.
#[derive(Clone, Copy, Debug)]
pub struct BlobStart {
    /// The first instruction.
    pub entry: BlobLabel,
    /// The mode.
    pub mode: LegacyMode,
    /// Paging.
    pub paging: LegacyPaging,
    /// EFLAGS; bit 1 and, in virtual-8086 mode, VM are added.
    pub eflags: u32,
    /// Bits of CR4 beyond what paging needs.
    pub cr4: u32,
    /// Bits of CR0 beyond PE, ET, NE and PG.
    pub cr0: u32,
    /// The stack pointer: of the blob's segment, or linear in flat segments.
    pub sp: u32,
    /// General registers.
    pub registers: LegacyRegs,
}

impl BlobStart {
    /// A start at `entry` without paging, with all flags clear and the stack pointer [`STACK`].
    pub fn at(mode: LegacyMode, entry: BlobLabel) -> Self {
        let flat = matches!(mode, LegacyMode::Protected32(_));
        Self {
            entry,
            mode,
            paging: LegacyPaging::Off,
            eflags: 0,
            cr4: 0,
            cr0: 0,
            sp: if flat { BASE + STACK } else { STACK },
            registers: LegacyRegs::default(),
        }
    }
}
