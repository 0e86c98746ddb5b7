//! The binary formats of IEEE 754, and the classes of their numbers.

/// A binary format of IEEE 754.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FloatFormat {
    pub(super) exponent_bits: u32,
    pub(super) fraction_bits: u32,
}

pub(super) const F16: FloatFormat = FloatFormat {
    exponent_bits: 5,
    fraction_bits: 10,
};
pub(super) const F32: FloatFormat = FloatFormat {
    exponent_bits: 8,
    fraction_bits: 23,
};
pub(super) const F64: FloatFormat = FloatFormat {
    exponent_bits: 11,
    fraction_bits: 52,
};

impl FloatFormat {
    /// Returns the size of a number in bytes.
    pub(super) const fn size(self) -> usize {
        (1 + self.exponent_bits + self.fraction_bits) as usize / 8
    }
    /// Returns the sign bit.
    pub(super) const fn sign(self) -> u64 {
        1 << (self.exponent_bits + self.fraction_bits)
    }
    pub(super) const fn infinity(self) -> u64 {
        ((1 << self.exponent_bits) - 1) << self.fraction_bits
    }
    pub(super) const fn fraction(self) -> u64 {
        (1 << self.fraction_bits) - 1
    }
    /// Returns the bit that distinguishes quiet NaNs.
    pub(super) const fn quiet(self) -> u64 {
        1 << (self.fraction_bits - 1)
    }
    /// Returns the real indefinite, the NaN of invalid operations.
    pub(super) const fn indefinite(self) -> u64 {
        self.sign() | self.infinity() | self.quiet()
    }
    pub(super) const fn bias(self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }
    pub(super) const fn is_nan(self, v: u64) -> bool {
        v & !self.sign() > self.infinity()
    }
    pub(super) const fn is_signaling(self, v: u64) -> bool {
        self.is_nan(v) && v & self.quiet() == 0
    }
    pub(super) const fn is_infinite(self, v: u64) -> bool {
        v & !self.sign() == self.infinity()
    }
    pub(super) const fn is_zero(self, v: u64) -> bool {
        v & !self.sign() == 0
    }
    pub(super) const fn is_denormal(self, v: u64) -> bool {
        v & self.infinity() == 0 && v & self.fraction() != 0
    }
    pub(super) const fn is_negative(self, v: u64) -> bool {
        v & self.sign() != 0
    }
    /// Returns 1.0.
    pub(super) const fn one(self) -> u64 {
        self.bias().cast_unsigned() as u64 * (1 << self.fraction_bits)
    }
    /// Returns a magnitude with a sign.
    pub(super) fn with_sign(self, negative: bool, v: u64) -> u64 {
        if negative { self.sign() | v } else { v }
    }
}
