//! The time-stamp counter of one virtual processor. SDM Vol. 3B, "Time-Stamp Counter".
//!
//! The machine has one clock, in raw TSC ticks since it was created. A processor's TSC is that
//! clock plus [`Tsc::offset`]; writes to IA32_TIME_STAMP_COUNTER and IA32_TSC_ADJUST only change
//! the offset. The deadline timer is in the local APIC, which compares with this TSC.

/// Saved state of a [`Tsc`]; every value is valid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TscState {
    /// TSC minus clock ticks, modulo 2^64.
    pub offset: u64,
    /// IA32_TSC_ADJUST.
    pub adjust: u64,
    /// IA32_TSC_AUX.
    pub aux: u32,
}

/// TSC, TSC_ADJUST and TSC_AUX. The default is the state after RESET at clock tick 0: all zero.
#[derive(Clone, Debug, Default)]
pub struct Tsc {
    state: TscState,
}

impl Tsc {
    /// The TSC at clock tick `now`.
    pub const fn read(&self, now: u64) -> u64 {
        now.wrapping_add(self.state.offset)
    }

    /// TSC minus clock ticks, modulo 2^64.
    pub const fn offset(&self) -> u64 {
        self.state.offset
    }

    /// WRMSR IA32_TIME_STAMP_COUNTER at tick `now`; TSC_ADJUST changes by as much (rule ADJ-02).
    pub const fn write(&mut self, value: u64, now: u64) {
        let moved = value.wrapping_sub(self.read(now));
        self.shift(moved);
    }

    /// IA32_TSC_ADJUST.
    pub const fn adjust(&self) -> u64 {
        self.state.adjust
    }

    /// WRMSR IA32_TSC_ADJUST; the TSC changes by as much (rule ADJ-03).
    pub const fn write_adjust(&mut self, value: u64) {
        let moved = value.wrapping_sub(self.state.adjust);
        self.shift(moved);
    }

    const fn shift(&mut self, ticks: u64) {
        self.state.offset = self.state.offset.wrapping_add(ticks);
        self.state.adjust = self.state.adjust.wrapping_add(ticks);
    }

    /// IA32_TSC_AUX, which RDTSCP loads into ECX.
    pub const fn aux(&self) -> u32 {
        self.state.aux
    }

    /// WRMSR IA32_TSC_AUX.
    pub const fn write_aux(&mut self, value: u32) {
        self.state.aux = value;
    }

    /// The state as plain data.
    pub const fn save(&self) -> TscState {
        self.state
    }

    /// Replaces the state by a saved one.
    pub const fn restore(&mut self, state: &TscState) {
        self.state = *state;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn tsc_write_moves_adjust_by_the_same_amount() {
        let mut tsc = Tsc::default();
        tsc.write(5_000, 1_000);
        assert_eq!((tsc.read(1_000), tsc.adjust()), (5_000, 4_000));
    }

    #[test]
    fn adjust_write_moves_tsc_by_the_same_amount() {
        let mut tsc = Tsc::default();
        tsc.write_adjust(u64::MAX);
        assert_eq!((tsc.read(1_000), tsc.adjust()), (999, u64::MAX));
    }

    #[test]
    fn adjust_write_of_its_own_value_changes_nothing() {
        let mut tsc = Tsc::default();
        tsc.write(77, 3);
        let before = tsc.save();
        tsc.write_adjust(tsc.adjust());
        assert_eq!(tsc.save(), before);
    }

    #[test]
    fn tsc_wraps_to_zero_after_its_largest_value() {
        let mut tsc = Tsc::default();
        tsc.write(u64::MAX, 10);
        assert_eq!(tsc.read(11), 0);
    }

    proptest! {
        #[test]
        fn tsc_minus_adjust_is_independent_of_writes(
            writes in prop::collection::vec((any::<bool>(), any::<u64>(), 0..1000_u64), 0..50)
        ) {
            let mut tsc = Tsc::default();
            let mut now = 0;
            for (to_tsc, value, step) in writes {
                now += step;
                if to_tsc { tsc.write(value, now) } else { tsc.write_adjust(value) }
                prop_assert_eq!(tsc.read(now).wrapping_sub(tsc.adjust()), now);
                let mut other = Tsc::default();
                other.restore(&tsc.save());
                prop_assert_eq!(other.save(), tsc.save());
            }
        }
    }
}
