//! The six arithmetic flags, computed when they are read.
//!
//! An operation stores its operands and result; a flag is derived when something reads it. Operands
//! are stored sign-extended, so that one formula serves every operand width.

#![expect(
    clippy::cast_possible_truncation,
    reason = "PF is the parity of the low byte"
)]

use crate::width::Width;
use hindsight_regs::rflags::Rflags;

/// CF, PF, AF, ZF, SF and OF.
pub(crate) const ARITHMETIC: Rflags = Rflags::CF
    .union(Rflags::PF)
    .union(Rflags::AF)
    .union(Rflags::ZF)
    .union(Rflags::SF)
    .union(Rflags::OF);

/// `flag` if `on`, else no flag.
#[inline(always)]
pub(crate) fn flag_if(on: bool, flag: Rflags) -> Rflags {
    if on { flag } else { Rflags::empty() }
}

/// How the flags follow from the fields of [`LazyFlags`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
enum FlagSource {
    /// All six flags are in `a`.
    Explicit,
    /// `a + b (+ carry) = r`.
    Add,
    /// `a - b (- borrow) = r`.
    Sub,
    /// CF, OF, AF are in `a`; SF, ZF, PF follow from `r`.
    Result,
}

/// The arithmetic flags, as the operands and the result of the operation that set them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LazyFlags {
    source: FlagSource,
    a: u64,
    b: u64,
    r: u64,
}

impl Default for LazyFlags {
    fn default() -> Self {
        Self::explicit(Rflags::empty())
    }
}

impl LazyFlags {
    /// The arithmetic flags among `flags`.
    #[inline(always)]
    pub(crate) const fn explicit(flags: Rflags) -> Self {
        Self {
            source: FlagSource::Explicit,
            a: flags.bits() & ARITHMETIC.bits(),
            b: 0,
            r: 0,
        }
    }

    /// The flags of `a + b = r`, with or without a carry in.
    #[inline(always)]
    pub(crate) fn add<T: Width>(a: T, b: T, r: T) -> Self {
        Self {
            source: FlagSource::Add,
            a: a.sext(),
            b: b.sext(),
            r: r.sext(),
        }
    }

    /// The flags of `a - b = r`, with or without a borrow in.
    #[inline(always)]
    pub(crate) fn sub<T: Width>(a: T, b: T, r: T) -> Self {
        Self {
            source: FlagSource::Sub,
            a: a.sext(),
            b: b.sext(),
            r: r.sext(),
        }
    }

    /// SF, ZF and PF of a result; `rest` holds CF, OF and AF.
    #[inline(always)]
    pub(crate) fn result<T: Width>(r: T, rest: Rflags) -> Self {
        debug_assert!((Rflags::CF | Rflags::OF | Rflags::AF).contains(rest));
        Self {
            source: FlagSource::Result,
            a: rest.bits(),
            b: 0,
            r: r.sext(),
        }
    }

    /// The same flags with those of `mask` set or cleared.
    pub(crate) fn with(self, mask: Rflags, on: bool) -> Self {
        let mut flags = self.rflags();
        flags.set(mask, on);
        Self::explicit(flags)
    }

    #[inline(always)]
    pub(crate) fn cf(self) -> bool {
        let Self { a, b, r, .. } = self;
        match self.source {
            FlagSource::Explicit | FlagSource::Result => a & Rflags::CF.bits() != 0,
            FlagSource::Add => ((a & b) | ((a | b) & !r)) >> 63 != 0,
            FlagSource::Sub => ((!a & b) | ((!a | b) & r)) >> 63 != 0,
        }
    }

    #[inline(always)]
    pub(crate) fn zf(self) -> bool {
        match self.source {
            FlagSource::Explicit => self.a & Rflags::ZF.bits() != 0,
            _ => self.r == 0,
        }
    }

    #[inline(always)]
    fn sf(self) -> bool {
        match self.source {
            FlagSource::Explicit => self.a & Rflags::SF.bits() != 0,
            _ => self.r >> 63 != 0,
        }
    }

    #[inline(always)]
    fn of(self) -> bool {
        let Self { a, b, r, .. } = self;
        match self.source {
            FlagSource::Explicit | FlagSource::Result => a & Rflags::OF.bits() != 0,
            FlagSource::Add => ((a ^ r) & (b ^ r)) >> 63 != 0,
            FlagSource::Sub => ((a ^ b) & (a ^ r)) >> 63 != 0,
        }
    }

    fn pf(self) -> bool {
        match self.source {
            FlagSource::Explicit => self.a & Rflags::PF.bits() != 0,
            _ => (self.r as u8).count_ones().is_multiple_of(2),
        }
    }

    fn af(self) -> bool {
        match self.source {
            FlagSource::Explicit | FlagSource::Result => self.a & Rflags::AF.bits() != 0,
            FlagSource::Add | FlagSource::Sub => (self.a ^ self.b ^ self.r) & 0x10 != 0,
        }
    }

    /// All six flags, computed.
    pub(crate) fn rflags(self) -> Rflags {
        if self.source == FlagSource::Explicit {
            return Rflags::from_bits_retain(self.a);
        }
        flag_if(self.cf(), Rflags::CF)
            | flag_if(self.pf(), Rflags::PF)
            | flag_if(self.af(), Rflags::AF)
            | flag_if(self.zf(), Rflags::ZF)
            | flag_if(self.sf(), Rflags::SF)
            | flag_if(self.of(), Rflags::OF)
    }

    /// Whether condition `CC` holds, as Jcc, SETcc and CMOVcc encode it in 4 bits.
    #[inline(always)]
    pub(crate) fn condition<const CC: u8>(self) -> bool {
        let Self { source, a, r, .. } = self;
        let holds = match CC >> 1 {
            0 => self.of(),
            1 => self.cf(),
            2 => self.zf(),
            3 => match source {
                FlagSource::Explicit => a & Rflags::CF.union(Rflags::ZF).bits() != 0,
                _ => r == 0 || self.cf(),
            },
            4 => self.sf(),
            5 => self.pf(),
            6 => self.sf() != self.of(),
            _ => self.zf() || self.sf() != self.of(),
        };
        holds ^ (CC & 1 != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Flags of an 8-bit addition or subtraction, from their definitions.
    fn expected(a: u8, b: u8, subtract: bool) -> Rflags {
        let (signed_a, signed_b) = (i16::from(a.cast_signed()), i16::from(b.cast_signed()));
        let (r, carry, signed, half) = if subtract {
            let (r, borrow) = a.overflowing_sub(b);
            (r, borrow, signed_a - signed_b, (a & 15) < (b & 15))
        } else {
            let (r, carry) = a.overflowing_add(b);
            (r, carry, signed_a + signed_b, (a & 15) + (b & 15) > 15)
        };
        flag_if(carry, Rflags::CF)
            | flag_if(half, Rflags::AF)
            | flag_if(r == 0, Rflags::ZF)
            | flag_if(r >> 7 != 0, Rflags::SF)
            | flag_if(r.count_ones() % 2 == 0, Rflags::PF)
            | flag_if(!(-128..=127).contains(&signed), Rflags::OF)
    }

    #[test]
    fn flags_of_all_byte_additions_and_subtractions_match_their_definitions() {
        for a in 0..=u8::MAX {
            for b in 0..=u8::MAX {
                let sum = LazyFlags::add(a, b, a.wrapping_add(b));
                assert_eq!(sum.rflags(), expected(a, b, false), "{a} + {b}");
                let difference = LazyFlags::sub(a, b, a.wrapping_sub(b));
                assert_eq!(difference.rflags(), expected(a, b, true), "{a} - {b}");
            }
        }
    }

    #[test]
    fn conditions_of_lazy_and_explicit_flags_agree() {
        for (a, b) in [(0_u8, 0), (1, 2), (2, 1), (0x80, 1), (0x7f, 0xff), (5, 5)] {
            let lazy = LazyFlags::sub(a, b, a.wrapping_sub(b));
            let explicit = LazyFlags::explicit(lazy.rflags());
            macro_rules! agree {
                ($($cc:literal)*) => {
                    $(assert_eq!(lazy.condition::<$cc>(), explicit.condition::<$cc>());)*
                };
            }
            agree!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
        }
    }

    #[test]
    fn with_changes_only_the_given_flags() {
        let flags = LazyFlags::result(0_u32, Rflags::OF).with(Rflags::CF, true);
        let expected = Rflags::OF | Rflags::ZF | Rflags::PF | Rflags::CF;
        assert_eq!(flags.rflags(), expected);
        assert_eq!(flags.with(ARITHMETIC, false).rflags(), Rflags::empty());
    }
}
