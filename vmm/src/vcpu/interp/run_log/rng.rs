//! The random numbers of a deterministic vCPU.

/// The SplitMix64 generator, behind RDRAND and RDSEED.
#[derive(Clone, Debug)]
pub(super) struct SplitMix64 {
    pub(super) state: u64,
}

impl SplitMix64 {
    /// A generator for vCPU `id` of a machine with this seed: every vCPU has a sequence of its own.
    pub(super) fn for_vcpu(seed: u64, id: usize) -> Self {
        let mut state = seed;
        for _ in 0..=id {
            state = Self { state }.next_u64();
        }
        Self { state }
    }

    /// The next 64 bits.
    pub(super) const fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ self.state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_vcpu_and_every_seed_has_its_own_numbers() {
        let numbers = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(seed, id)| {
            let mut rng = SplitMix64::for_vcpu(seed, id);
            [rng.next_u64(), rng.next_u64()]
        });
        let mut all: Vec<_> = numbers.concat();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 8);
        let first = || SplitMix64::for_vcpu(0, 0).next_u64();
        assert_eq!(first(), first());
    }
}
