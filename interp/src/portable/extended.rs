//! Numbers in the x87's double extended format, and how results are rounded to it.

/// An 80-bit value: sign and exponent, significand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extended {
    pub(super) head: u16,
    pub(super) significand: u64,
}

pub(super) const IE: u16 = 1;
pub(super) const DE: u16 = 1 << 1;
pub(super) const ZE: u16 = 1 << 2;
pub(super) const OE: u16 = 1 << 3;
pub(super) const UE: u16 = 1 << 4;
pub(super) const PE: u16 = 1 << 5;

/// Bias of the exponent for a significand of the form 0.1xxx, which [`Exact`] has.
pub(super) const BIAS: i64 = 16382;
/// Offset of a result's exponent where overflow or underflow is unmasked.
const WRAP: i64 = 24576;
const TOP: u64 = 1 << 63;

/// What kind of value it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Zero,
    /// Denormal or pseudo-denormal.
    Denormal,
    Normal,
    Infinity,
    QuietNan,
    SignallingNan,
    /// An encoding that the processor does not accept.
    Unsupported,
}

impl Extended {
    /// The real indefinite, a quiet NaN.
    pub(super) const INDEFINITE: Self = Self {
        head: 0xffff,
        significand: 3 << 62,
    };
    pub(super) const ONE: Self = Self {
        head: 0x3fff,
        significand: TOP,
    };

    pub(super) fn from_bytes(b: &[u8]) -> Self {
        Self {
            head: b
                .get(8..10)
                .and_then(|b| b.try_into().ok())
                .map_or(0, u16::from_le_bytes),
            significand: b
                .get(..8)
                .and_then(|b| b.try_into().ok())
                .map_or(0, u64::from_le_bytes),
        }
    }

    pub(super) fn to_bytes(self) -> [u8; 10] {
        let mut b = [0; 10];
        b[..8].copy_from_slice(&self.significand.to_le_bytes());
        b[8..].copy_from_slice(&self.head.to_le_bytes());
        b
    }

    pub(super) fn zero(negative: bool) -> Self {
        Self {
            head: u16::from(negative) << 15,
            significand: 0,
        }
    }

    pub(super) fn infinity(negative: bool) -> Self {
        Self {
            head: u16::from(negative) << 15 | 0x7fff,
            significand: TOP,
        }
    }

    pub(super) fn negative(self) -> bool {
        self.head >> 15 != 0
    }

    pub(super) fn kind(self) -> Kind {
        let integer = self.significand & TOP != 0;
        match (self.head & 0x7fff, integer, self.significand << 1) {
            (0, _, _) if self.significand == 0 => Kind::Zero,
            (0, ..) => Kind::Denormal,
            (_, false, _) => Kind::Unsupported,
            (0x7fff, true, 0) => Kind::Infinity,
            (0x7fff, true, f) if f >> 63 != 0 => Kind::QuietNan,
            (0x7fff, true, _) => Kind::SignallingNan,
            _ => Kind::Normal,
        }
    }

    pub(super) fn quieted(self) -> Self {
        Self {
            significand: self.significand | 1 << 62,
            ..self
        }
    }

    /// A finite number other than zero as significand with its highest bit set, and the exponent of
    /// 0.1xxx.
    pub(super) fn parts(self) -> (u64, i64) {
        let shift = self.significand.leading_zeros();
        let exponent = i64::from((self.head & 0x7fff).max(1));
        (
            self.significand << shift,
            exponent - BIAS - i64::from(shift),
        )
    }
}

/// A result before it is rounded: 0.1xxx * 2^exponent, with a flag for what lies beyond 128 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Exact {
    pub(super) negative: bool,
    pub(super) exponent: i64,
    /// The highest bit is set.
    pub(super) bits: u128,
    pub(super) more: bool,
}

/// A rounded result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rounded {
    pub(super) value: Extended,
    /// Exceptions that came up.
    pub(super) flags: u16,
    /// The magnitude was rounded up: C1.
    pub(super) up: bool,
}

impl Exact {
    /// Rounds to 64 bits as the control word says.
    ///
    /// SDM Vol. 1, "Rounding", "Numeric Overflow Exception (#O)", "Numeric Underflow Exception
    /// (#U)".
    pub(super) fn round(self, fcw: u16) -> Rounded {
        let (mut significand, mut up, inexact) = self.cut(0, fcw);
        let carried = up && significand == 0;
        let mut exponent = self.exponent + BIAS + i64::from(carried);
        if carried {
            significand = TOP;
        }
        let mut flags = if inexact { PE } else { 0 };
        if exponent >= 0x7fff {
            if fcw & OE != 0 {
                return self.overflow(fcw);
            }
            flags |= OE;
            exponent -= WRAP;
        } else if exponent <= 0 {
            if fcw & UE == 0 {
                flags |= UE;
                exponent += WRAP;
            } else {
                let shift = u32::try_from(1 - self.exponent - BIAS).unwrap_or(200);
                let inexact;
                (significand, up, inexact) = self.cut(shift, fcw);
                flags = if inexact { UE | PE } else { 0 };
                // Rounding may have made it the smallest normal number.
                exponent = i64::from(significand & TOP != 0);
            }
        }
        // What is still out of range after wrapping cannot come up: all results here are within it.
        let exponent = u16::try_from(exponent.clamp(0, 0x7ffe)).unwrap_or(0);
        Rounded {
            value: Extended {
                head: u16::from(self.negative) << 15 | exponent,
                significand,
            },
            flags,
            up,
        }
    }

    /// Returns the upper 64 bits after a shift to the right, rounded.
    ///
    /// Also returns whether they were rounded up (to zero on a carry), and whether the result is
    /// inexact.
    fn cut(self, shift: u32, fcw: u16) -> (u64, bool, bool) {
        let (bits, lost) = match shift {
            0 => (self.bits, 0),
            1..=127 => (self.bits >> shift, self.bits << (128 - shift)),
            _ => (0, self.bits),
        };
        let keep = u64::try_from(bits >> 64).unwrap_or(0);
        let rest = bits << 64;
        let more = self.more || lost != 0;
        let inexact = rest != 0 || more;
        let half = 1_u128 << 127;
        let up = match fcw >> 10 & 3 {
            0 => rest > half || (rest == half && (more || keep & 1 != 0)),
            1 => inexact && self.negative,
            2 => inexact && !self.negative,
            _ => false,
        };
        (keep.wrapping_add(u64::from(up)), up, inexact)
    }

    /// Infinity, or the largest number where the rounding leads away from infinity.
    fn overflow(self, fcw: u16) -> Rounded {
        let up = match fcw >> 10 & 3 {
            0 => true,
            1 => self.negative,
            2 => !self.negative,
            _ => false,
        };
        let largest = Extended {
            head: u16::from(self.negative) << 15 | 0x7ffe,
            significand: u64::MAX,
        };
        Rounded {
            value: if up {
                Extended::infinity(self.negative)
            } else {
                largest
            },
            flags: OE | PE,
            up,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEAREST: u16 = 0x37f;

    fn exact(exponent: i64, bits: u128, more: bool) -> Exact {
        Exact {
            negative: false,
            exponent,
            bits,
            more,
        }
    }

    #[test]
    fn ties_go_to_even_and_a_carry_to_the_next_binade() {
        let tie = exact(1, u128::from(TOP) << 64 | 1 << 63, false).round(NEAREST);
        assert_eq!((tie.value, tie.flags, tie.up), (Extended::ONE, PE, false));
        let above = exact(1, u128::from(TOP) << 64 | 1 << 63, true).round(NEAREST);
        assert_eq!((above.value.significand, above.up), (TOP + 1, true));
        let carry = exact(1, u128::MAX, false).round(NEAREST);
        assert_eq!((carry.value.head, carry.value.significand), (0x4000, TOP));
    }

    #[test]
    fn directed_rounding_follows_the_sign() {
        let value = exact(1, u128::from(TOP) << 64, true);
        assert_eq!(value.round(0x77f).value, Extended::ONE, "down");
        assert_eq!(value.round(0xb7f).value.significand, TOP + 1, "up");
        let negative = Exact {
            negative: true,
            ..value
        };
        assert_eq!(
            negative.round(0x77f).value.significand,
            TOP + 1,
            "down, below zero"
        );
        assert_eq!(negative.round(0xf7f).value.significand, TOP, "to zero");
    }

    #[test]
    fn tiny_results_become_denormal_or_are_scaled() {
        let tiny = exact(-16400, 3 << 126, false);
        let masked = tiny.round(NEAREST);
        assert_eq!((masked.value.head, masked.flags), (0, 0), "exact");
        assert_eq!(masked.value.significand, 3 << (62 - 19));
        let unmasked = tiny.round(NEAREST & !UE);
        assert_eq!((unmasked.value.head, unmasked.flags), (24576 - 18, UE));
        let lost = exact(-17000, 3 << 126, false).round(NEAREST);
        assert_eq!((lost.value, lost.flags), (Extended::zero(false), UE | PE));
    }

    #[test]
    fn huge_results_become_infinite_or_are_scaled() {
        let huge = exact(16500, 1 << 127, false);
        assert_eq!(huge.round(NEAREST).value, Extended::infinity(false));
        assert_eq!(huge.round(0xf7f).value.head, 0x7ffe);
        let unmasked = huge.round(NEAREST & !OE);
        assert_eq!(
            (unmasked.value.head, unmasked.flags),
            (16500 + 16382 - 24576, OE)
        );
    }
}
