//! Values that the slots of a batch load: chosen when the batch is built, filled in before every
//! run.

#![expect(
    clippy::cast_possible_truncation,
    reason = "cells are cut to their width on purpose"
)]

use crate::layout::{DATA, DATA_LEN, READ_ONLY};
use crate::rng::Rng;

/// The kind of value that a cell of the parameters holds.
#[derive(Clone, Copy, Debug)]
pub(super) enum CellValue {
    /// Any integer.
    Random,
    /// Any odd integer: a mask that selects an element.
    Odd,
    /// A number below this one, sometimes negated.
    Small(u64),
    /// The count of a repeated string instruction, sometimes any integer.
    Count,
    /// A register of an address.
    Address(AddressValue),
    /// Flags for POPF.
    Flags,
    /// A vector register of this many bytes.
    Vector(usize),
    /// Indices of a gather or scatter, with elements of this many bytes.
    Indices(usize),
    /// A valid MXCSR, sometimes with unmasked exceptions.
    Mxcsr,
    /// The operand of LDMXCSR, sometimes one that raises #GP.
    LdmxcsrOperand,
    /// An MXCSR with all exceptions masked and any rounding mode.
    MaskedMxcsr,
    /// A valid FXSAVE image.
    Fxsave,
    /// An XSAVE image with the upper halves of YMM registers; sometimes its header raises #GP.
    Xsave,
    /// A mask of state components for EAX.
    Components,
    /// This value.
    Fixed(u64),
}

/// How a register contributes to an address.
#[derive(Clone, Copy, Debug)]
pub(super) struct AddressValue {
    /// What the instruction adds: displacement and segment base.
    pub(super) plus: u64,
    /// Cell of the index register and its scale.
    pub(super) index: Option<(u32, u64)>,
    /// How often the register is added: more than once if it is base and index.
    pub(super) times: u64,
    /// Alignment of most targets.
    pub(super) align: u64,
    /// All targets are aligned, because processors differ in what misalignment does.
    pub(super) strict: bool,
    /// Once in this many times the target cannot be accessed; 0 means never.
    pub(super) wild: u64,
    /// Addresses have 32 bits.
    pub(super) narrow: bool,
    /// Offset of the target in the region, if it is not in the data.
    pub(super) to: Option<u32>,
}

/// Bytes of the XSAVE images here: legacy region, header and YMM upper halves.
const XSAVE_LEN: u32 = 832;

impl CellValue {
    /// Bytes of the cell.
    pub(super) fn size(self) -> u32 {
        match self {
            Self::Vector(len) => len as u32,
            Self::Indices(_) => 64,
            Self::Fxsave => 512,
            Self::Xsave => XSAVE_LEN,
            _ => 8,
        }
    }

    /// Alignment of the cell.
    pub(super) fn align(self) -> u32 {
        match self {
            Self::Vector(_) | Self::Indices(_) | Self::Fxsave | Self::Xsave => 64,
            _ => 8,
        }
    }

    /// Fills a cell. `read_cell` reads cells that were filled before, by their offset in the
    /// region.
    pub(super) fn fill(
        self,
        rng: &mut Rng,
        base: u32,
        cell: &mut [u8],
        read_cell: impl Fn(u32) -> u64,
    ) {
        let v = match self {
            Self::Random => rng.value(),
            Self::Odd => rng.value() | 1,
            Self::Small(n) => {
                let v = rng.below(n);
                if rng.one_in(4) { v.wrapping_neg() } else { v }
            }
            Self::Count if rng.one_in(64) => rng.value(),
            Self::Count => rng.below(20),
            Self::Address(a) => a.choose(rng, base, read_cell),
            // What user code may set, but not TF, NT and AC; a signal handler would not keep ID.
            Self::Flags => rng.bits() & 0xcd5 | 2,
            Self::Mxcsr => random_mxcsr(rng).into(),
            // Bit 31 is reserved everywhere. Bit 17 is not: some processors have it.
            Self::LdmxcsrOperand if rng.one_in(8) => rng.bits() | 1 << 31,
            Self::LdmxcsrOperand => random_mxcsr(rng).into(),
            Self::MaskedMxcsr => 0x1f80 | rng.bits() & 0x6000,
            Self::Components => *rng.pick(&[7, 7, 7, 3, 4, 1, 2, 6, 5, 0]),
            Self::Fixed(v) => v,
            Self::Vector(_) | Self::Indices(_) | Self::Fxsave | Self::Xsave => {
                self.fill_wide(rng, cell);
                return;
            }
        };
        cell.copy_from_slice(&v.to_le_bytes());
    }

    fn fill_wide(self, rng: &mut Rng, cell: &mut [u8]) {
        for chunk in cell.chunks_exact_mut(8) {
            chunk.copy_from_slice(&rng.float().to_le_bytes());
        }
        match self {
            Self::Indices(4) => {
                for e in cell.chunks_exact_mut(4) {
                    let v = (rng.below(0x80) as u32).wrapping_sub(0x40);
                    e.copy_from_slice(&v.to_le_bytes());
                }
            }
            Self::Indices(_) => {
                for e in cell.chunks_exact_mut(8) {
                    let v = rng.below(0x80).wrapping_sub(0x40);
                    e.copy_from_slice(&v.to_le_bytes());
                }
            }
            Self::Fxsave => fill_fxsave(rng, cell),
            Self::Xsave => {
                fill_fxsave(rng, cell);
                cell[512..576].fill(0);
                cell[512] = *rng.pick(&[7, 7, 7, 7, 3, 4, 1, 2, 5, 6, 0]);
                if rng.one_in(16) {
                    // A header that raises #GP, if the bit is reserved.
                    cell[512 + rng.below(64) as usize] |= 1 << rng.below(8);
                }
            }
            _ => {}
        }
    }
}

/// A valid MXCSR.
///
/// If overflow or underflow is unmasked, the inexact flag is set already: whether these exceptions
/// set it too depends on the result with an unbounded exponent, which the interpreter does not
/// compute.
pub(super) fn random_mxcsr(rng: &mut Rng) -> u32 {
    let v = any_mxcsr(rng);
    if v & 0xc00 != 0xc00 { v | 0x20 } else { v }
}

fn any_mxcsr(rng: &mut Rng) -> u32 {
    match rng.below(8) {
        0 => rng.bits() as u32 & 0xffff,
        1 | 2 => 0x1f80 | rng.bits() as u32 & 0xe07f,
        _ => 0x1f80 | rng.bits() as u32 & 0x6000,
    }
}

/// Makes an FXSAVE image of a cell that holds random floats: sets control words, tags and
/// registers.
fn fill_fxsave(rng: &mut Rng, cell: &mut [u8]) {
    let control: u16 = match rng.below(8) {
        0 => rng.bits() as u16 & 0x1f7f | 0x40,
        1 | 2 => 0x7f | (rng.bits() as u16 & 0xf00),
        _ => 0x37f,
    };
    let mut status = (rng.below(8) as u16) << 11;
    if rng.one_in(4) {
        status |= rng.bits() as u16 & 0x477f;
    }
    // ES and B are set if an exception is pending.
    if status & !control & 0x3f != 0 {
        status |= 0x8080;
    }
    let tags = if rng.one_in(4) { rng.byte() } else { 0xff };
    cell[..32].fill(0);
    cell[..2].copy_from_slice(&control.to_le_bytes());
    cell[2..4].copy_from_slice(&status.to_le_bytes());
    cell[4] = tags;
    cell[24..28].copy_from_slice(&random_mxcsr(rng).to_le_bytes());
    for reg in cell[32..160].chunks_exact_mut(16) {
        let (mantissa, exponent) = match rng.below(8) {
            0 => (rng.bits(), rng.bits() as u16),
            1 => (1 << 63, 0x7fff),
            2 => (0, 0),
            3 => (rng.bits() | 3 << 62, 0x7fff),
            _ => (
                rng.bits() & rng.bits().rotate_left(7) | 1 << 63,
                0x3fff - 20 + rng.below(40) as u16,
            ),
        };
        let sign = (rng.bits() as u16 & 1) << 15;
        reg[..8].copy_from_slice(&mantissa.to_le_bytes());
        reg[8..10].copy_from_slice(&(exponent ^ sign).to_le_bytes());
        reg[10..].fill(0);
    }
}

impl AddressValue {
    fn choose(self, rng: &mut Rng, base: u32, read_cell: impl Fn(u32) -> u64) -> u64 {
        let to = match self.to {
            Some(at) => u64::from(base + at),
            // Processors differ in which of two faults a vector operand raises that is misaligned
            // and at a non-canonical address.
            None if self.wild != 0 && rng.one_in(self.wild) => match self.wild(rng, base) {
                at if at >> 40 != 0 && self.align >= 16 || self.strict => at & !63,
                at => at,
            },
            None => self.data(rng, base),
        };
        let mut sum = self.plus;
        if let Some((cell, scale)) = self.index {
            sum = sum.wrapping_add(read_cell(cell).wrapping_mul(scale));
        }
        let v = to.wrapping_sub(sum);
        if self.narrow {
            // The upper half must have no effect.
            let v = (v as u32) / self.times as u32;
            return u64::from(v) | if rng.one_in(2) { rng.bits() << 32 } else { 0 };
        }
        v.cast_signed()
            .wrapping_div(self.times.cast_signed())
            .cast_unsigned()
    }

    /// An address in the data, often at the page boundary.
    fn data(self, rng: &mut Rng, base: u32) -> u64 {
        let at = match rng.below(3) {
            0 => 0x1000 - 64 + rng.below(128),
            _ => 0x400 + rng.below(u64::from(DATA_LEN) - 0x800),
        };
        let at = if !self.strict && rng.one_in(8) {
            at
        } else {
            at & !(self.align - 1)
        };
        u64::from(base + DATA) + at
    }

    /// An address at which no access, or no write, is possible.
    fn wild(self, rng: &mut Rng, base: u32) -> u64 {
        let region = u64::from(base);
        let end = region + u64::from(DATA + DATA_LEN);
        let edge = rng.below(32);
        match rng.below(if self.narrow { 5 } else { 9 }) {
            // Beyond the end, or across it.
            0 | 1 => (end - 16).wrapping_add(edge),
            // Across the beginning.
            2 => (region + u64::from(DATA) - 16).wrapping_add(edge),
            3 => rng.below(0x1000),
            4 => region + u64::from(READ_ONLY) + rng.below(0x1000),
            5 => (0x7fff_ffff_ffff_u64 - 16).wrapping_add(edge),
            6 => (0xffff_8000_0000_0000_u64 - 16).wrapping_add(edge),
            7 => rng.bits() | 1 << 62,
            _ => (u64::MAX - 16).wrapping_add(edge),
        }
    }
}
