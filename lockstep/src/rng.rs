//! Random numbers, and values at which instructions have edge cases.

/// xorshift64*, which gives the same numbers for a seed on every machine.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    /// A generator for any seed; seeds that differ by 1 give unrelated numbers.
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Self(mix(seed) | 1);
        rng.bits();
        rng
    }

    /// 64 random bits.
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `n`, which must not be 0.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        (self.bits() >> 33) % n
    }

    /// True once in `n` times.
    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// A random byte.
    pub(crate) fn byte(&mut self) -> u8 {
        self.bits().to_le_bytes()[5]
    }

    /// One of the elements of a list that is not empty.
    pub(crate) fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        let at = self.below(list.len() as u64);
        &list[usize::try_from(at).unwrap_or(0)]
    }

    /// An integer, often 0, all ones, a power of two, or another edge case.
    pub(crate) fn value(&mut self) -> u64 {
        let v = self.bits();
        match self.below(12) {
            0 => 0,
            1 => u64::MAX,
            2 => 1 << self.below(64),
            3 => (1 << self.below(64)) - 1,
            4 => v & 0xff,
            5 => v & 0xffff_ffff,
            6 => 0x8000_0000,
            7 => 0x7fff_ffff,
            _ => v,
        }
    }

    /// Eight bytes that are often a double or two floats, of moderate size or special values.
    pub(crate) fn float(&mut self) -> u64 {
        const DOUBLES: [u64; 8] = [
            0,
            1 << 63,
            0x7ff0_0000_0000_0000,
            0xfff0_0000_0000_0000,
            0x7ff8_0000_0000_0001,
            0x7ff0_0000_0000_0001,
            1,
            0x3ff0_0000_0000_0000,
        ];
        const FLOATS: [u64; 8] = [
            0,
            0x8000_0000,
            0x7f80_0000,
            0x7fc0_0001,
            0x7f80_0001,
            1,
            0x7f7f_ffff,
            0x3f80_0000,
        ];
        const BOTH: u64 = 0x1_0000_0001;
        match self.below(8) {
            0 => small(self.bits()).to_bits(),
            1 => u64::from(small_float(self.bits()).to_bits()) * BOTH,
            2 => *self.pick(&DOUBLES),
            3 => *self.pick(&FLOATS) | *self.pick(&FLOATS) << 32,
            4 => self.value(),
            _ => self.bits(),
        }
    }
}

/// A double of moderate size.
fn small(bits: u64) -> f64 {
    let n = i32::from_le_bytes([bits.to_le_bytes()[2], bits.to_le_bytes()[3], 0, 0]);
    f64::from(n - 0x8000) / 64.0
}

/// A float of moderate size.
fn small_float(bits: u64) -> f32 {
    let [low, high, ..] = bits.to_le_bytes();
    f32::from(i16::from_le_bytes([low, high])) * 0.37
}

/// SplitMix64's finalizer: inputs that differ by 1 give unrelated outputs.
pub(crate) fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
