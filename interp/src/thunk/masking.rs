//! Masked memory operands: determines which elements an instruction accesses.
//!
//! Under a write mask, most instructions access only the elements that the mask selects. The other
//! elements are neither read nor written, cannot fault, and trigger no breakpoint. Instructions of
//! the exception classes whose names end in "NF" (no fault suppression) access the whole operand.
//! SDM Vol. 2A, "Exception Classifications of EVEX-Encoded Instructions", and "VMASKMOV",
//! "VPMASKMOV".
//!
//! Older revisions of the manual list VPCONFLICTD and VPCONFLICTQ in class E4, and VPMOVWB,
//! VPMOVSWB and VPMOVUSWB in E6NF. This module puts them in E4NF and E6, as Intel's XED and AMD
//! family 1AH do.

#[cfg(test)]
mod tests;

use super::vectors::Vectors;
use iced_x86::{Instruction, Mnemonic as M, OpKind, TupleType};

/// How a masked instruction accesses its memory operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Masking {
    source: MaskSource,
    order: Order,
    /// Size of an element in memory, in bytes.
    pub(super) element: usize,
    /// Number of elements in memory.
    count: usize,
    /// Number of elements in the result, and so of mask bits that are used.
    lanes: usize,
    /// Whether elements that are masked off cannot fault.
    ///
    /// If not, only a store has a `Masking`: it checks the whole operand, and writes the elements
    /// that the mask selects.
    pub(super) suppresses: bool,
}

/// Where the mask is read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MaskSource {
    /// An opmask register.
    Opmask(usize),
    /// The highest bits of the elements of a vector register.
    SignBits(usize),
}

/// Which element in memory a bit of the mask selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// The element with the bit's number, modulo the number of elements in memory.
    ///
    /// A broadcast has fewer elements in memory than in the result.
    Each,
    /// The set bits select the first elements, without gaps.
    Packed,
}

impl Masking {
    /// Returns the masking of an instruction's memory operand.
    ///
    /// Returns `None` if the instruction accesses the whole operand.
    pub(super) fn of(i: &Instruction) -> Option<Self> {
        let source = match i.mnemonic() {
            M::Vmaskmovps | M::Vmaskmovpd | M::Vpmaskmovd | M::Vpmaskmovq => {
                MaskSource::SignBits(i.op1_register().number())
            }
            _ if i.has_op_mask() => MaskSource::Opmask(i.op_mask().number()),
            _ => return None,
        };
        let stores = i.op0_kind() == OpKind::Memory;
        let suppresses = suppresses_faults(i);
        if !suppresses && !stores {
            return None;
        }
        let element = element_size(i);
        let whole = i.op_code().memory_size().size();
        let lanes = if repeats_memory(i.mnemonic()) {
            i.op0_register().size() / element
        } else {
            whole / element
        };
        Some(Self {
            source,
            order: if packs(i.mnemonic()) {
                Order::Packed
            } else {
                Order::Each
            },
            element,
            count: i.memory_size().size() / element,
            lanes,
            suppresses,
        })
    }

    /// Returns the elements in memory that the instruction accesses, as a bit mask.
    pub(super) fn elements(&self, vectors: &Vectors) -> u64 {
        self.select(match self.source {
            MaskSource::Opmask(k) => vectors.k[k & 7],
            MaskSource::SignBits(v) => sign_bits(&vectors.zmm[v & 31], self.element),
        })
    }

    fn select(&self, mask: u64) -> u64 {
        let mask = mask & low_bits(self.lanes);
        match self.order {
            Order::Packed => low_bits(mask.count_ones() as usize),
            Order::Each => (0..self.lanes)
                .step_by(self.count.max(1))
                .fold(0, |all, first| all | mask >> first & low_bits(self.count)),
        }
    }
}

/// Returns a mask of the lowest `n` of 64 bits.
pub(super) fn low_bits(n: usize) -> u64 {
    if n >= 64 { u64::MAX } else { (1 << n) - 1 }
}

fn sign_bits(register: &[u8; 64], element: usize) -> u64 {
    register
        .chunks_exact(element)
        .enumerate()
        .fold(0, |bits, (n, e)| {
            let set = e.last().is_some_and(|top| top & 0x80 != 0);
            bits | u64::from(set) << n
        })
}

/// Returns the bytes of memory that one bit of the mask selects.
///
/// If an instruction can broadcast, that is the size of a broadcast element: VPDPBUSD multiplies
/// bytes, but its mask selects doublewords.
fn element_size(i: &Instruction) -> usize {
    use TupleType as T;
    match i.op_code().tuple_type() {
        T::N8b4 | T::N16b4 | T::N32b4 | T::N64b4 => 4,
        T::N16b8 | T::N32b8 | T::N64b8 => 8,
        _ => i.memory_size().element_size().max(1),
    }
}

/// Whether the memory operand is repeated to fill the result.
fn repeats_memory(m: M) -> bool {
    matches!(
        m,
        M::Vbroadcastss
            | M::Vbroadcastsd
            | M::Vbroadcastf32x2
            | M::Vbroadcastf32x4
            | M::Vbroadcastf32x8
            | M::Vbroadcastf64x2
            | M::Vbroadcastf64x4
            | M::Vbroadcasti32x2
            | M::Vbroadcasti32x4
            | M::Vbroadcasti32x8
            | M::Vbroadcasti64x2
            | M::Vbroadcasti64x4
            | M::Vpbroadcastb
            | M::Vpbroadcastw
            | M::Vpbroadcastd
            | M::Vpbroadcastq
    )
}

/// Whether the elements in memory are contiguous, whatever the mask selects.
fn packs(m: M) -> bool {
    matches!(
        m,
        M::Vcompressps
            | M::Vcompresspd
            | M::Vpcompressb
            | M::Vpcompressw
            | M::Vpcompressd
            | M::Vpcompressq
            | M::Vexpandps
            | M::Vexpandpd
            | M::Vpexpandb
            | M::Vpexpandw
            | M::Vpexpandd
            | M::Vpexpandq
    )
}

/// Whether elements that are masked off cannot fault.
fn suppresses_faults(i: &Instruction) -> bool {
    match i.mnemonic() {
        // These are of class E4NF with the count in memory, and of class E4 with the data in
        // memory.
        M::Vpsllw
        | M::Vpslld
        | M::Vpsllq
        | M::Vpsrlw
        | M::Vpsrld
        | M::Vpsrlq
        | M::Vpsraw
        | M::Vpsrad
        | M::Vpsraq => i.op2_kind() != OpKind::Memory,
        m => !(is_e4nf_or_e5nf(m) || is_e6nf(m)),
    }
}

/// Whether the instruction is of class E4NF or E5NF.
///
/// Shifts by a count in memory are left out.
fn is_e4nf_or_e5nf(m: M) -> bool {
    matches!(
        m,
        M::Valignd
            | M::Valignq
            | M::Vdbpsadbw
            | M::Vgf2p8affineinvqb
            | M::Vgf2p8affineqb
            | M::Vmovddup
            | M::Vmovshdup
            | M::Vmovsldup
            | M::Vpackssdw
            | M::Vpacksswb
            | M::Vpackusdw
            | M::Vpackuswb
            | M::Vpalignr
            | M::Vpconflictd
            | M::Vpconflictq
            | M::Vpermb
            | M::Vpermd
            | M::Vpermw
            | M::Vpermq
            | M::Vpermpd
            | M::Vpermps
            | M::Vpermi2b
            | M::Vpermi2d
            | M::Vpermi2pd
            | M::Vpermi2ps
            | M::Vpermi2q
            | M::Vpermi2w
            | M::Vpermt2b
            | M::Vpermt2d
            | M::Vpermt2pd
            | M::Vpermt2ps
            | M::Vpermt2q
            | M::Vpermt2w
            | M::Vpermilpd
            | M::Vpermilps
            | M::Vpmaddubsw
            | M::Vpmaddwd
            | M::Vpmultishiftqb
            | M::Vpshufb
            | M::Vpshufd
            | M::Vpshufhw
            | M::Vpshuflw
            | M::Vpunpckhbw
            | M::Vpunpckhdq
            | M::Vpunpckhqdq
            | M::Vpunpckhwd
            | M::Vpunpcklbw
            | M::Vpunpckldq
            | M::Vpunpcklqdq
            | M::Vpunpcklwd
            | M::Vshuff32x4
            | M::Vshuff64x2
            | M::Vshufi32x4
            | M::Vshufi64x2
            | M::Vshufpd
            | M::Vshufps
            | M::Vunpckhpd
            | M::Vunpckhps
            | M::Vunpcklpd
            | M::Vunpcklps
    )
}

/// Whether the instruction is of class E6NF.
fn is_e6nf(m: M) -> bool {
    matches!(
        m,
        M::Vextractf32x4
            | M::Vextractf32x8
            | M::Vextractf64x2
            | M::Vextractf64x4
            | M::Vextracti32x4
            | M::Vextracti32x8
            | M::Vextracti64x2
            | M::Vextracti64x4
            | M::Vinsertf32x4
            | M::Vinsertf32x8
            | M::Vinsertf64x2
            | M::Vinsertf64x4
            | M::Vinserti32x4
            | M::Vinserti32x8
            | M::Vinserti64x2
            | M::Vinserti64x4
    )
}
