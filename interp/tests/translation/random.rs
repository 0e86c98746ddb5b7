//! Random numbers.

/// A small generator of random numbers.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::try_from(self.below(from.len() as u64)).unwrap_or(0)]
    }

    /// Returns a number that is often small, a power of two, or a limit of its range.
    pub fn value(&mut self) -> u64 {
        match self.below(5) {
            0 => self.below(4),
            1 => 1 << self.below(64),
            2 => (1_u64 << self.below(64)).wrapping_sub(1),
            3 => self.next() as u32 as u64,
            _ => self.next(),
        }
    }
}
