//! A set of vectors: the form of the ISR, TMR and IRR.

use hindsight_regs::apic::VECTOR_MIN;

/// One bit for each of the 256 vectors, in eight 32-bit registers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct VectorSet(pub [u32; 8]);

impl VectorSet {
    /// The highest vector of the set.
    pub fn highest(&self) -> Option<u8> {
        let words = (0_u8..8).zip(&self.0).rev();
        let (word, bits) = words.into_iter().find(|&(_, &bits)| bits != 0)?;
        Some(word * 32 + (bits.ilog2() & 31) as u8)
    }

    /// The priority class of the highest vector in bits 7:4; 0 if the set is empty.
    pub(super) fn highest_class(&self) -> u8 {
        self.highest().unwrap_or(0) & PRIORITY_CLASS
    }

    /// Whether the set contains a vector.
    pub fn contains(&self, vector: u8) -> bool {
        self.0[usize::from(vector >> 5)] & (1 << (vector & 31)) != 0
    }

    /// Adds or removes a vector, which is not an illegal one.
    pub(super) fn set(&mut self, vector: u8, value: bool) {
        debug_assert!(
            vector >= VECTOR_MIN,
            "vector {vector} is illegal in an APIC"
        );
        let word = &mut self.0[usize::from(vector >> 5)];
        *word = *word & !(1 << (vector & 31)) | u32::from(value) << (vector & 31);
    }

    /// Whether the set contains one of the illegal vectors 0 to 15.
    pub(super) fn has_illegal(&self) -> bool {
        self.0[0] & ((1 << VECTOR_MIN) - 1) != 0
    }
}

/// Bits of a vector or a priority that make its class. SDM Vol. 3A, "Task and Processor
/// Priorities".
pub(super) const PRIORITY_CLASS: u8 = 0xf0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn highest_vector_is_found_across_the_registers() {
        let mut set = VectorSet::default();
        assert_eq!((set.highest(), set.highest_class()), (None, 0));
        for vector in [0x10, 0x3f, 0x40, 0xff] {
            set.set(vector, true);
            assert_eq!(set.highest(), Some(vector));
            assert!(set.contains(vector) && !set.has_illegal());
        }
        set.set(0xff, false);
        assert_eq!((set.highest(), set.highest_class()), (Some(0x40), 0x40));
        assert!(VectorSet([1 << 15, 0, 0, 0, 0, 0, 0, 0]).has_illegal());
    }
}
