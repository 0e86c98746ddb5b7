//! MSR_PERF_METRICS: what became of the slots that fixed counter 3 counts.
//!
//! SDM Vol. 3B, "Performance Metrics". The pipeline is a choice of this project: an instruction takes one
//! of the slots of its cycle to retire. The others are bad speculation if it is a mispredicted
//! branch, backend bound if one of its loads missed the L1, and else frontend bound. The slots of a
//! cycle in which nothing retires are backend bound. At the second level the slots that far branches
//! retire are heavy operations, all bad speculation is that of branches, the frontend bound slots of taken
//! branches wait for a fetch, and those of loads that missed for memory. Without the models of predictor and caches, nothing
//! is mispredicted and no load misses.

use hindsight_regs::pmu::{Metrics, global};

use super::counter::{GP, Pmu};
use super::events::{EventKind, EventKinds, EventTotals, Rings};

/// Index of the counter of slots: fixed counter 3.
const SLOTS_COUNTER: usize = GP + 3;
/// The value of a metric to which all slots belong.
const ALL: u64 = 255;
/// Instructions with a load that missed the L1.
const MISSED: EventKinds =
    EventKinds::of(&[EventKind::LoadL2, EventKind::LoadL3, EventKind::LoadMemory]);
/// Taken branches.
const TAKEN: EventKinds = EventKinds::of(&[
    EventKind::TakenConditional,
    EventKind::Jump,
    EventKind::Call,
    EventKind::Return,
    EventKind::Far,
]);
/// Taken branches that were mispredicted.
const MISPREDICTED_TAKEN: EventKinds = EventKinds::of(&[
    EventKind::MispredictedTaken,
    EventKind::MispredictedJump,
    EventKind::MispredictedCall,
]);
/// Far branches.
const FAR: EventKinds = EventKinds::of(&[EventKind::Far]);

/// The slots since MSR_PERF_METRICS was written, in parts of 1/255 of a slot.
///
/// Those that belong to no other class are frontend bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct SlotTotals {
    /// Slots whose uop retired.
    pub retiring: u64,
    /// Slots lost to mispredicted branches.
    pub bad_speculation: u64,
    /// Slots in which the back end accepted no uop.
    pub backend_bound: u64,
    /// All slots.
    pub total: u64,
    /// Retiring slots of heavy operations.
    pub heavy_operations: u64,
    /// Slots of bad speculation that are lost to mispredicted branches.
    pub branch_mispredicts: u64,
    /// Slots in which the fetch after a taken branch was late; some may not be frontend bound.
    pub fetch_latency: u64,
    /// Backend bound slots of loads that missed.
    pub memory_bound: u64,
}

impl SlotTotals {
    /// The fractions. Those of the first level add up to 255, or all are 0 if there was no slot.
    pub(super) fn metrics(&self) -> Metrics {
        if self.total == 0 {
            return Metrics::default();
        }
        let (mut left, mut rest) = (self.total, 255);
        let mut fraction = |part: u64| {
            let part = part.min(left);
            left -= part;
            let fraction = u128::from(part) * u128::from(ALL) / u128::from(self.total);
            let fraction = u8::try_from(fraction).unwrap_or(u8::MAX).min(rest);
            rest -= fraction;
            fraction
        };
        let retiring = fraction(self.retiring);
        let bad_speculation = fraction(self.bad_speculation);
        let backend_bound = fraction(self.backend_bound);
        let frontend_bound = rest;
        // A fraction of the second level is at most that of the first one.
        let part = |part: u64, whole: u8| {
            let fraction = u128::from(part) * u128::from(ALL) / u128::from(self.total);
            u8::try_from(fraction).unwrap_or(u8::MAX).min(whole)
        };
        Metrics {
            retiring,
            bad_speculation,
            frontend_bound,
            backend_bound,
            heavy_operations: part(self.heavy_operations, retiring),
            branch_mispredicts: part(self.branch_mispredicts, bad_speculation),
            fetch_latency: part(self.fetch_latency, frontend_bound),
            memory_bound: part(self.memory_bound, backend_bound),
        }
    }

    /// The totals of so many slots with these fractions.
    fn of(metrics: Metrics, slots: u64) -> Self {
        let part = |metric: u8| u64::from(metric).saturating_mul(slots);
        Self {
            retiring: part(metrics.retiring),
            bad_speculation: part(metrics.bad_speculation),
            backend_bound: part(metrics.backend_bound),
            total: ALL.saturating_mul(slots),
            heavy_operations: part(metrics.heavy_operations),
            branch_mispredicts: part(metrics.branch_mispredicts),
            fetch_latency: part(metrics.fetch_latency),
            memory_bound: part(metrics.memory_bound),
        }
    }
}

impl Pmu {
    /// MSR_PERF_METRICS.
    pub(super) fn metrics(&self) -> u64 {
        self.slots.metrics().bits() & self.model.perfmon.metrics_bits()
    }

    /// The rings whose slots the metrics count; `None` if they do not count.
    pub(super) fn metrics_rings(&self) -> Option<Rings> {
        let on = self.global_control & global::PERF_METRICS != 0;
        let source = self.running[SLOTS_COUNTER].filter(|_| on)?;
        Some(source.rings)
    }

    /// Adds the slots since the last [`Pmu::sync`].
    pub(super) fn count_metrics(&mut self, totals: &EventTotals) {
        let Some(rings) = self.metrics_rings() else {
            return;
        };
        let new = |kinds| {
            totals
                .sum(kinds, rings)
                .wrapping_sub(self.counted.sum(kinds, rings))
        };
        let cycles = new(EventKinds::CYCLES);
        let instructions = new(EventKinds::INSTRUCTIONS);
        let modelled = |kinds| if self.config.uarch { new(kinds) } else { 0 };
        let (mispredicted, missed) = (modelled(EventKinds::MISPREDICTED), modelled(MISSED));
        let fetched = new(TAKEN).saturating_sub(modelled(MISPREDICTED_TAKEN));
        let heavy = new(FAR);
        let width = u64::from(self.model.perfmon.slots);
        let stalled = cycles.saturating_sub(instructions);
        let lost = |count: u64| count.saturating_mul(width - 1);
        let backend_bound = lost(missed).saturating_add(stalled.saturating_mul(width));
        let slots = &mut self.slots;
        for (part, new) in [
            (&mut slots.retiring, instructions),
            (&mut slots.bad_speculation, lost(mispredicted)),
            (&mut slots.backend_bound, backend_bound),
            (&mut slots.total, cycles.saturating_mul(width)),
            (&mut slots.heavy_operations, heavy),
            (&mut slots.branch_mispredicts, lost(mispredicted)),
            (&mut slots.fetch_latency, lost(fetched)),
            (&mut slots.memory_bound, lost(missed)),
        ] {
            *part = part.saturating_add(new.saturating_mul(ALL));
        }
    }

    /// WRMSR to MSR_PERF_METRICS: fractions of the slots that fixed counter 3 has counted.
    ///
    /// The fraction that is frontend bound follows from the others. 0 begins anew.
    pub(super) fn write_metrics(&mut self, value: u64) {
        self.slots = match value {
            0 => SlotTotals::default(),
            value => {
                let slots = self.values[SLOTS_COUNTER].max(1);
                SlotTotals::of(Metrics::from_bits(value), slots)
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::CpuModel;
    use crate::pmu::{PmiFreeze, PmuConfig, PmuNeeds, Ring};
    use hindsight_regs::msr as regs;

    /// A unit whose slots and metrics count at CPL 0.
    fn pmu(uarch: bool) -> Pmu {
        pmu_of(CpuModel::IcelakeServer, uarch)
    }

    fn pmu_of(model: CpuModel, uarch: bool) -> Pmu {
        let mut pmu = Pmu::new(PmuConfig {
            tsc_hz: 2_500_000_000,
            pebs: true,
            uarch,
            counters: 8,
            model,
        });
        pmu.write(regs::IA32_FIXED_CTR_CTRL, 0x1000);
        pmu.write(
            regs::IA32_PERF_GLOBAL_CTRL,
            global::FIXED_3 | global::PERF_METRICS,
        );
        pmu
    }

    /// 100 cycles with 80 instructions, of which 5 are mispredicted and 10 miss; and as many at CPL 3.
    fn totals() -> EventTotals {
        let mut totals = EventTotals::default();
        for (kind, count) in [
            (EventKind::Cycle, 100),
            (EventKind::Instruction, 80),
            (EventKind::MispredictedNotTaken, 2),
            (EventKind::MispredictedJump, 3),
            (EventKind::LoadL1, 7),
            (EventKind::LoadL2, 4),
            (EventKind::LoadMemory, 6),
        ] {
            totals.add(kind, Ring::Os, count);
            totals.add(kind, Ring::User, 1000 * count);
        }
        totals
    }

    fn sync(pmu: &mut Pmu, totals: &EventTotals) -> u64 {
        let _ = pmu.sync(totals, PmiFreeze::default());
        pmu.read(regs::MSR_PERF_METRICS)
    }

    #[test]
    fn slots_belong_to_the_classes_of_the_pipeline() {
        // Of 500 slots 80 retire, 20 are bad speculation, 100 + 40 backend bound.
        let expected = Metrics {
            retiring: 40,
            bad_speculation: 10,
            backend_bound: 71,
            frontend_bound: 134,
            ..Metrics::default()
        };
        let mut pmu = pmu(true);
        let found = sync(&mut pmu, &totals());
        assert_eq!(Metrics::from_bits(found), expected);
        assert_eq!(pmu.read(regs::IA32_FIXED_CTR0 + 3), 500);
        assert_eq!(pmu.rdpmc(0x2000_0000), Ok(found));
        assert!(pmu.needs().contains(PmuNeeds::PREDICTOR | PmuNeeds::CACHES));
    }

    #[test]
    fn without_the_models_only_cycles_without_an_instruction_are_lost() {
        let mut pmu = pmu(false);
        let expected = Metrics {
            retiring: 40,
            bad_speculation: 0,
            backend_bound: 51,
            frontend_bound: 164,
            ..Metrics::default()
        };
        let found = sync(&mut pmu, &totals());
        assert_eq!(Metrics::from_bits(found), expected);
        assert!(
            !pmu.needs()
                .intersects(PmuNeeds::PREDICTOR | PmuNeeds::CACHES)
        );
    }

    /// Rule GEN-35.
    #[test]
    fn second_level_is_part_of_the_first() {
        let mut totals = totals();
        for (kind, count) in [
            (EventKind::TakenConditional, 8),
            (EventKind::Jump, 6),
            (EventKind::Far, 2),
        ] {
            totals.add(kind, Ring::Os, count);
            totals.add(kind, Ring::User, 1000 * count);
        }
        let mut pmu = pmu_of(CpuModel::SapphireRapids, true);
        // Of 600 slots 80 retire, 25 are bad speculation, 120 + 50 backend bound. Of 16 taken branches 13
        // are not mispredicted.
        let expected = Metrics {
            retiring: 34,
            bad_speculation: 10,
            backend_bound: 72,
            frontend_bound: 139,
            heavy_operations: 0,
            branch_mispredicts: 10,
            fetch_latency: 27,
            memory_bound: 21,
        };
        let found = sync(&mut pmu, &totals);
        assert_eq!(Metrics::from_bits(found), expected);
        assert_eq!(pmu.read(regs::IA32_FIXED_CTR0 + 3), 600);
        assert_eq!(pmu.rdpmc(0x2000_0000), Ok(found));
        pmu.write(regs::MSR_PERF_METRICS, found);
        assert_eq!(pmu.read(regs::MSR_PERF_METRICS), found);
        let saved = pmu.save();
        let mut other = pmu_of(CpuModel::SapphireRapids, true);
        other.restore(&saved).unwrap();
        assert_eq!(other.read(regs::MSR_PERF_METRICS), found);
    }

    #[test]
    fn metrics_stand_still_unless_both_enables_are_set() {
        for (control, global) in [
            (0x1000, global::FIXED_3),
            (0x1000, global::PERF_METRICS),
            (0, global::FIXED_3 | global::PERF_METRICS),
        ] {
            let mut pmu = pmu(true);
            pmu.write(regs::IA32_FIXED_CTR_CTRL, control);
            pmu.write(regs::IA32_PERF_GLOBAL_CTRL, global);
            assert_eq!(sync(&mut pmu, &totals()), 0, "{control:#x} {global:#x}");
            assert!(!pmu.needs().contains(PmuNeeds::PREDICTOR));
        }
        let mut frozen = pmu(true);
        frozen.write(regs::IA32_PERF_GLOBAL_STATUS_SET, global::CTR_FRZ);
        assert_eq!(sync(&mut frozen, &totals()), 0);
    }

    #[test]
    fn written_metrics_are_those_of_the_slots_counted() {
        let mut pmu = pmu(true);
        pmu.write(regs::IA32_FIXED_CTR0 + 3, 500);
        pmu.write(regs::MSR_PERF_METRICS, 0x33_99_00_33);
        assert_eq!(pmu.read(regs::MSR_PERF_METRICS), 0x3399_0033);
        // As many slots again, of which none but 80 and 140 are retiring and backend bound.
        let found = Metrics::from_bits(sync(&mut pmu, &totals()));
        assert_eq!(
            (found.retiring, found.bad_speculation, found.backend_bound),
            (45, 5, 61)
        );
        let saved = pmu.save();
        let mut other = self::pmu(true);
        other.restore(&saved).unwrap();
        assert_eq!(other.save(), saved);
        assert_eq!(other.read(regs::MSR_PERF_METRICS), found.bits());
        pmu.write(regs::MSR_PERF_METRICS, 0);
        assert_eq!(pmu.read(regs::MSR_PERF_METRICS), 0);
    }

    #[test]
    fn any_saved_totals_give_metrics_that_add_up() {
        for totals in [
            [u64::MAX; 4],
            [u64::MAX, 0, 0, 1],
            [0, 0, 0, u64::MAX],
            [1, 2, 3, 7],
        ] {
            let [retiring, bad_speculation, backend_bound, total] = totals;
            let metrics = SlotTotals {
                retiring,
                bad_speculation,
                backend_bound,
                total,
                heavy_operations: u64::MAX,
                branch_mispredicts: u64::MAX,
                fetch_latency: u64::MAX,
                memory_bound: u64::MAX,
            }
            .metrics();
            let bytes = metrics.bits().to_le_bytes();
            let sum: u32 = bytes[..4].iter().copied().map(u32::from).sum();
            assert_eq!(sum, 255, "{totals:?}");
            assert!(
                bytes[4..]
                    .iter()
                    .zip(&bytes[..4])
                    .all(|(part, all)| part <= all)
            );
        }
    }
}
