//! What the slots of a batch load: decided when it is built, filled anew for every run.

#![expect(
    clippy::cast_possible_truncation,
    reason = "cells are cut to their width on purpose"
)]

use crate::layout::{DATA, DATA_LEN, READ_ONLY};
use crate::rng::Rng;

/// What a cell of the parameters holds.
#[derive(Clone, Copy, Debug)]
pub enum Value {
    /// Any integer.
    Random,
    /// Any odd integer: a mask that selects an element.
    Odd,
    /// Less than this, at times negative.
    Small(u64),
    /// Iterations of a string instruction, at times far too many.
    Count,
    /// A register that leads to the data.
    Address(Address),
    /// Flags for POPF.
    Flags,
    /// A vector register of this many bytes.
    Vector(usize),
    /// Indices of a gather, with elements of this many bytes.
    Indices(usize),
    /// A valid MXCSR, at times with unmasked exceptions.
    Mxcsr,
    /// The operand of LDMXCSR: at times one that faults.
    Loaded,
    /// The MXCSR of RESET with some rounding.
    Masked,
    /// A valid FXSAVE image.
    Fx,
    /// A valid XSAVE image, followed by the upper halves of YMM registers.
    Xsave,
    /// Mask of components for EAX.
    Components,
    /// This.
    Fixed(u64),
}

/// How a register makes an address.
#[derive(Clone, Copy, Debug)]
pub struct Address {
    /// What the instruction adds: displacement and segment base.
    pub plus: u64,
    /// Cell of the index register and its scale.
    pub index: Option<(u32, u64)>,
    /// How often the register counts: more than once if it is base and index.
    pub times: u64,
    /// Alignment of the target, mostly.
    pub align: u64,
    /// Always: processors differ in what misalignment does.
    pub strict: bool,
    /// Once in so many times the target cannot be accessed; 0 never.
    pub wild: u64,
    /// Addresses have 32 bits.
    pub narrow: bool,
    /// Where to, if not into the data: an offset in the region.
    pub to: Option<u32>,
}

/// Bytes of an XSAVE image here: legacy region, header, YMM upper halves.
pub const XSAVE_LEN: u32 = 832;

impl Value {
    /// Bytes of the cell.
    pub fn size(self) -> u32 {
        match self {
            Self::Vector(len) => len as u32,
            Self::Indices(_) => 64,
            Self::Fx => 512,
            Self::Xsave => XSAVE_LEN,
            _ => 8,
        }
    }

    /// Alignment of the cell.
    pub fn align(self) -> u32 {
        match self {
            Self::Vector(_) | Self::Indices(_) | Self::Fx | Self::Xsave => 64,
            _ => 8,
        }
    }

    /// Fills the cell at `at` of the region. `region` reads cells that were filled before.
    pub fn fill(self, rng: &mut Rng, base: u32, cell: &mut [u8], index: impl Fn(u32) -> u64) {
        let v = match self {
            Self::Random => rng.value(),
            Self::Odd => rng.value() | 1,
            Self::Small(n) => {
                let v = rng.below(n);
                if rng.one_in(4) { v.wrapping_neg() } else { v }
            }
            Self::Count if rng.one_in(64) => rng.value(),
            Self::Count => rng.below(20),
            Self::Address(a) => a.choose(rng, base, index),
            // What user code may set, but not TF, NT and AC; a signal handler would not keep ID.
            Self::Flags => rng.bits() & 0xcd5 | 2,
            Self::Mxcsr => mxcsr(rng).into(),
            // Some processors have the bit 17 that is reserved here.
            Self::Loaded if rng.one_in(8) => rng.bits() | 1 << 31,
            Self::Loaded => mxcsr(rng).into(),
            Self::Masked => 0x1f80 | rng.bits() & 0x6000,
            Self::Components => *rng.pick(&[7, 7, 7, 3, 4, 1, 2, 6, 5, 0]),
            Self::Fixed(v) => v,
            Self::Vector(_) | Self::Indices(_) | Self::Fx | Self::Xsave => {
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
            Self::Fx => fx(rng, cell),
            Self::Xsave => {
                fx(rng, cell);
                cell[512..576].fill(0);
                cell[512] = *rng.pick(&[7, 7, 7, 7, 3, 4, 1, 2, 5, 6, 0]);
                if rng.one_in(16) {
                    // A header that faults.
                    cell[512 + rng.below(64) as usize] |= 1 << rng.below(8);
                }
            }
            _ => {}
        }
    }
}

/// A valid MXCSR. Where overflow or underflow is unmasked, the sticky inexact flag is set already:
/// whether they raise that flag too shows only with an unbounded exponent, and the interpreter
/// cannot tell.
pub fn mxcsr(rng: &mut Rng) -> u32 {
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

/// Makes an FXSAVE image of floats: control words, tags and registers.
fn fx(rng: &mut Rng, cell: &mut [u8]) {
    let control: u16 = match rng.below(8) {
        0 => rng.bits() as u16 & 0x1f7f | 0x40,
        1 | 2 => 0x7f | (rng.bits() as u16 & 0xf00),
        _ => 0x37f,
    };
    let mut status = (rng.below(8) as u16) << 11;
    if rng.one_in(4) {
        status |= rng.bits() as u16 & 0x477f;
    }
    // ES and B as the exceptions ask for.
    if status & !control & 0x3f != 0 {
        status |= 0x8080;
    }
    let tags = if rng.one_in(4) { rng.byte() } else { 0xff };
    cell[..32].fill(0);
    cell[..2].copy_from_slice(&control.to_le_bytes());
    cell[2..4].copy_from_slice(&status.to_le_bytes());
    cell[4] = tags;
    cell[24..28].copy_from_slice(&mxcsr(rng).to_le_bytes());
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

impl Address {
    fn choose(self, rng: &mut Rng, base: u32, index: impl Fn(u32) -> u64) -> u64 {
        let to = match self.to {
            Some(at) => u64::from(base + at),
            // Which of two faults a misaligned vector operand at an address that is not canonical
            // raises differs between processors.
            None if self.wild != 0 && rng.one_in(self.wild) => match self.wild(rng, base) {
                at if at >> 40 != 0 && self.align >= 16 || self.strict => at & !63,
                at => at,
            },
            None => self.data(rng, base),
        };
        let mut sum = self.plus;
        if let Some((cell, scale)) = self.index {
            sum = sum.wrapping_add(index(cell).wrapping_mul(scale));
        }
        let v = to.wrapping_sub(sum);
        if self.narrow {
            // The upper half must not count.
            let v = (v as u32) / self.times as u32;
            return u64::from(v) | if rng.one_in(2) { rng.bits() << 32 } else { 0 };
        }
        v.cast_signed()
            .wrapping_div(self.times.cast_signed())
            .cast_unsigned()
    }

    /// Somewhere in the data, often at the page boundary.
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

    /// Where no access, or no write, is possible.
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
