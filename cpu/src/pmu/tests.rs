use super::events::EventKind::{
    Call, Cycle, Far, Instruction, Jump, Load, NotTaken, Return, Store,
};
use super::events::EventKind::{TakenConditional, TscTick, Wake};
use super::pebs::{PebsDue, PebsSample};
use super::*;
use crate::branch::bts::DsMemory;
use crate::model::CpuModel;
use hindsight_regs::msr as regs;
use hindsight_regs::pmu::{EventSelect, global};
use hindsight_regs::vector::GpFault;
use proptest::prelude::*;

const PMC: u32 = regs::IA32_A_PMC0;
const SELECT: u32 = regs::IA32_PERFEVTSEL0;
const STATUS: u32 = regs::IA32_PERF_GLOBAL_STATUS;
const RESET: u32 = regs::IA32_PERF_GLOBAL_STATUS_RESET;
const FIXED: u32 = regs::IA32_FIXED_CTR0;

/// USR, OS and EN.
const ON: u64 = EventSelect::USR | EventSelect::OS | EventSelect::ENABLE;
const MAX: u64 = (1 << 48) - 1;
/// A DS area, and its PEBS buffer of four records.
const AREA: u64 = 0x1000;
const BASE: u64 = 0x2000;

/// A unit with an engine that stops after each event.
struct Rig {
    pmu: Pmu,
    totals: EventTotals,
    freeze: PmiFreeze,
}

impl Rig {
    fn new() -> Self {
        Self {
            pmu: Pmu::new(PmuConfig {
                tsc_hz: 2_500_000_000,
                pebs: true,
                uarch: true,
                counters: 4,
                model: CpuModel::SkylakeServer,
            }),
            totals: EventTotals::default(),
            freeze: PmiFreeze::default(),
        }
    }

    /// Counter 0 counts this event in both rings.
    fn counting(event: u8, umask: u8, bits: u64) -> Self {
        let mut rig = Self::new();
        rig.select(0, event, umask, ON | bits);
        rig
    }

    fn select(&mut self, counter: u32, event: u8, umask: u8, bits: u64) {
        let select = EventSelect::new(event, umask, bits);
        self.pmu.write(SELECT + counter, select.0);
    }

    fn report(&mut self, kind: EventKind, ring: Ring, count: u64) -> bool {
        self.totals.add(kind, ring, count);
        self.pmu.sync(&self.totals, self.freeze)
    }

    fn instructions(&mut self, count: u64) -> bool {
        self.report(Instruction, Ring::Os, count)
    }

    /// Sets counter 0 to overflow after `before_overflow` events.
    fn preset(&mut self, before_overflow: u64) {
        self.pmu.write(PMC, MAX + 1 - before_overflow);
    }

    fn pebs(&mut self, reset: u64, threshold: u64) -> Ds {
        self.pmu.write(regs::IA32_PEBS_ENABLE, 1);
        Ds::new(reset, threshold)
    }

    /// Stores the due record. Returns whether it requests a PMI.
    fn store(&mut self, ds: &mut Ds, eventing_rip: u64) -> bool {
        let sample = PebsSample {
            eventing_rip,
            tsc: 77,
            ..PebsSample::default()
        };
        let due = PebsDue {
            status: self.pmu.status(),
            records: self.pmu.due_records(),
            area: AREA,
            counters: self.pmu.due(),
            data: None,
        };
        assert_ne!(due.counters, 0, "a record is due");
        let stored = pebs::store(ds, &due, &sample);
        self.pmu.record_done(&stored, self.freeze)
    }

    fn record_due(&self) -> bool {
        self.pmu.due() != 0
    }
}

#[test]
fn in_tx_and_in_txcp_count_only_their_transactions() {
    use crate::transaction::{AbortCause, TransactionEvent};
    let mut rig = Rig::counting(0xc0, 0, EventSelect::IN_TX);
    rig.select(1, 0xc0, 0, ON);
    rig.select(2, 0xc0, 0, ON | EventSelect::IN_TXCP);
    for (inside, end) in [
        (10, TransactionEvent::Aborted(AbortCause::Conflict)),
        (20, TransactionEvent::Committed),
    ] {
        rig.instructions(1);
        rig.pmu.transaction(TransactionEvent::Begun);
        rig.instructions(inside);
        rig.pmu.transaction(end);
        rig.totals.add_transaction_event(end, Ring::Os);
    }
    rig.instructions(100);
    let counters = [0, 1, 2].map(|n| rig.pmu.read(PMC + n));
    assert_eq!(counters, [30, 132, 122]);
    use super::events::EventKind::{RtmAbort, RtmCapacity, RtmCommit, RtmConflict};
    let steps = [RtmAbort, RtmConflict, RtmCommit, RtmCapacity];
    let counts = steps.map(|kind| rig.totals.get(kind, Ring::Os));
    assert_eq!(counts, [1, 1, 1, 0]);
}

/// 64 KiB of memory with a DS area in it; writes are rejected above `end`.
struct Ds {
    bytes: Vec<u8>,
    end: u64,
}

impl Ds {
    fn new(reset: u64, threshold: u64) -> Self {
        let mut ds = Self {
            bytes: vec![0; 0x1_0000],
            end: 0x1_0000,
        };
        for (offset, value) in [
            (0x20, BASE),
            (0x28, BASE),
            (0x30, BASE + 4 * 200),
            (0x38, BASE + threshold * 200),
            (0x40, reset),
        ] {
            ds.put(AREA + offset, value);
        }
        ds
    }

    fn put(&mut self, at: u64, value: u64) {
        let at = usize::try_from(at).unwrap();
        self.bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }

    fn get(&self, at: u64) -> u64 {
        let at = usize::try_from(at).unwrap();
        u64::from_le_bytes(self.bytes[at..at + 8].try_into().unwrap())
    }

    fn index(&self) -> u64 {
        self.get(AREA + 0x28)
    }

    fn range(&self, at: u64, len: usize) -> Option<std::ops::Range<usize>> {
        let start = usize::try_from(at).ok()?;
        let end = start.checked_add(len)?;
        (end as u64 <= self.end).then_some(start..end)
    }
}

impl DsMemory for Ds {
    fn read(&mut self, linear: u64) -> Option<u64> {
        self.range(linear, 8).map(|_| self.get(linear))
    }

    fn writable(&mut self, linear: u64) -> bool {
        self.range(linear, 8).is_some()
    }

    fn write(&mut self, linear: u64, words: &[u64]) -> bool {
        let Some(range) = self.range(linear, 8 * words.len()) else {
            return false;
        };
        for (at, &word) in range.step_by(8).zip(words) {
            self.put(at as u64, word);
        }
        true
    }
}

/// Rules PMU-02, PMU-03.
#[test]
fn reset_enables_the_general_purpose_counters() {
    let pmu = Rig::new().pmu;
    assert_eq!(pmu.read(regs::IA32_PERF_GLOBAL_CTRL), 0xf);
    for index in [PMC, SELECT, FIXED, regs::IA32_FIXED_CTR_CTRL, STATUS] {
        assert_eq!(pmu.read(index), 0, "{index:#x}");
    }
}

/// Rules PMU-05, PMU-06, PMU-07.
#[test]
fn counter_counts_only_with_all_its_enables_set() {
    const EN: u64 = EventSelect::ENABLE;
    for (bits, global, status, in_os, in_user) in [
        (ON, 1, 0, 1, 1),
        (EN | EventSelect::OS, 1, 0, 1, 0),
        (EN | EventSelect::USR, 1, 0, 0, 1),
        (EN, 1, 0, 0, 0),
        (ON & !EN, 1, 0, 0, 0),
        (ON, 2, 0, 0, 0),
        (ON, 1, global::CTR_FRZ, 0, 0),
        (ON, 1, global::LBR_FRZ, 1, 1),
    ] {
        let mut rig = Rig::counting(0xc0, 0, 0);
        rig.select(0, 0xc0, 0, bits);
        rig.pmu.write(regs::IA32_PERF_GLOBAL_CTRL, global);
        rig.pmu.write(regs::IA32_PERF_GLOBAL_STATUS_SET, status);
        let _ = rig.report(Instruction, Ring::Os, 1);
        assert_eq!(rig.pmu.read(PMC), in_os, "{bits:#x} {global} {status:#x}");
        let _ = rig.report(Instruction, Ring::User, 1);
        assert_eq!(rig.pmu.read(PMC), in_os + in_user, "{bits:#x} {global}");
    }
}

#[test]
fn fixed_counters_count_instructions_and_cycles_by_ring() {
    let mut rig = Rig::new();
    // Counter 0 in ring 0, 1 in ring 3, 2 in both.
    rig.pmu.write(regs::IA32_FIXED_CTR_CTRL, 0x321);
    rig.pmu.write(regs::IA32_PERF_GLOBAL_CTRL, 0x7_0000_0000);
    for ring in [Ring::Os, Ring::User] {
        let _ = rig.report(Instruction, ring, 10);
        let _ = rig.report(Cycle, ring, 100);
        let _ = rig.report(TscTick, ring, 150);
    }
    let values = [0, 1, 2].map(|n| rig.pmu.read(FIXED + n));
    assert_eq!(values, [10, 100, 300]);
}

/// Rule PMU-08.
#[test]
fn legacy_counter_write_sign_extends_32_bits() {
    let mut pmu = Rig::new().pmu;
    for (written, read) in [
        (0xffff_fff0, 0xffff_ffff_fff0),
        (0x7fff_ffff, 0x7fff_ffff),
        (0x1234_5678_8000_0000, 0xffff_8000_0000),
        (0x1234_5678_0000_0001, 1),
    ] {
        pmu.write(regs::IA32_PMC0 + 3, written);
        assert_eq!(pmu.read(PMC + 3), read, "{written:#x}");
    }
}

/// Rules PMU-14, PMU-15.
#[test]
fn event_select_drops_pin_control_and_keeps_any_thread() {
    let mut pmu = Rig::new().pmu;
    pmu.write(SELECT, EventSelect::PIN | EventSelect::ANY_THREAD | 0xc0);
    assert_eq!(pmu.read(SELECT), EventSelect::ANY_THREAD | 0xc0);
}

/// Rules PMU-18, PMU-19.
#[test]
fn status_reset_clears_exactly_the_bits_written() {
    let mut pmu = Rig::new().pmu;
    pmu.write(regs::IA32_PERF_GLOBAL_STATUS_SET, 0x7c00_0007_0000_000f);
    pmu.write(RESET, 0x4000_0001_0000_0002);
    assert_eq!(pmu.read(STATUS), 0x3c00_0006_0000_000d);
    assert_eq!(pmu.read(RESET), 0);
    assert_eq!(pmu.read(regs::IA32_PERF_GLOBAL_STATUS_SET), 0);
}

/// Rules PMU-21, PMU-22, PMU-23.
#[test]
fn global_inuse_follows_the_controls() {
    let in_use = |index, value| {
        let mut pmu = Rig::new().pmu;
        pmu.write(index, value);
        pmu.read(regs::IA32_PERF_GLOBAL_INUSE)
    };
    assert_eq!(in_use(SELECT + 2, 0x3c), 1 << 2);
    assert_eq!(in_use(SELECT + 2, EventSelect::ENABLE), 0);
    assert_eq!(in_use(SELECT, EventSelect::INT), 1 << 63);
    assert_eq!(in_use(regs::IA32_FIXED_CTR_CTRL, 0x20), 1 << 33);
    assert_eq!(in_use(regs::IA32_FIXED_CTR_CTRL, 0x800), 1 << 63);
    assert_eq!(in_use(regs::IA32_PEBS_ENABLE, 8), 1 << 63);
}

/// Rules EVT-06, EVT-12, EVT-17.
#[test]
fn branch_event_counts_its_kinds() {
    // One of the first kind, two of the second, and so on.
    let kinds = [TakenConditional, NotTaken, Jump, Call, Return, Far];
    for (umask, expected) in [
        (0x00, 21),
        (0x01, 3),
        (0x02, 4),
        (0x04, 21),
        (0x08, 5),
        (0x10, 2),
        (0x20, 13),
        (0x40, 6),
        (0x80, 0),
    ] {
        let mut rig = Rig::counting(0xc4, umask, 0);
        for (kind, count) in kinds.into_iter().zip(1..) {
            let _ = rig.report(kind, Ring::User, count);
        }
        assert_eq!(rig.pmu.read(PMC), expected, "{umask:#x}");
    }
}

#[test]
fn mem_inst_retired_separates_loads_and_stores() {
    for (umask, expected) in [(0x81, 5), (0x82, 7), (0x11, 0)] {
        let mut rig = Rig::counting(0xd0, umask, 0);
        let _ = rig.report(Load, Ring::User, 5);
        let _ = rig.report(Store, Ring::User, 7);
        assert_eq!(rig.pmu.read(PMC), expected, "{umask:#x}");
    }
}

/// Rule EVT-05: a TSC of 2.5 GHz and a crystal of 25 MHz.
#[test]
fn crystal_cycles_accumulate_without_rounding_loss() {
    let mut rig = Rig::counting(0x3c, 1, 0);
    for _ in 0..1000 {
        let _ = rig.report(TscTick, Ring::Os, 33);
    }
    assert_eq!(rig.pmu.read(PMC), 330);
}

/// Rules EVT-10, EVT-11, PMU-30, PMU-31.
#[test]
fn counter_masks_and_edges_count_only_in_known_combinations() {
    const INV: u64 = EventSelect::INVERT;
    const EDGE: u64 = EventSelect::EDGE;
    let cmask = |n: u64| n << 24;
    // Ten instructions, a hundred cycles, three wakes.
    for (counter, event, umask, bits, expected) in [
        (0, 0xc0, 0, INV | cmask(0x10), 100),
        (2, 0xc0, 0, INV | cmask(0x10), 100),
        (1, 0xc0, 1, INV | cmask(0x10), 100),
        (0, 0xc0, 1, INV | cmask(0x10), 0),
        (0, 0xc0, 0, INV | cmask(0x0a), 0),
        (0, 0xc0, 0, cmask(0x10), 0),
        (0, 0xc0, 0, cmask(1), 0),
        (0, 0xc0, 0, INV, 10),
        (0, 0xc0, 0, EDGE, 0),
        (0, 0x3c, 0, EDGE, 3),
        (0, 0x3c, 0, EDGE | cmask(1), 0),
        (0, 0xc4, 0, INV | cmask(0x10), 0),
        (1, 0xc0, 1, 0, 10),
        (0, 0xc0, 1, 0, 0),
        (0, 0xb7, 1, 0, 0),
    ] {
        let mut rig = Rig::new();
        rig.select(counter, event, umask, ON | bits);
        let _ = rig.instructions(10);
        let _ = rig.report(Cycle, Ring::User, 100);
        let _ = rig.report(Wake, Ring::Os, 3);
        let value = rig.pmu.read(PMC + counter);
        assert_eq!(value, expected, "{counter} {event:#x}/{umask:#x} {bits:#x}");
    }
}

/// Rules RDP-01, RDP-02, RDP-03, RDP-07.
#[test]
fn rdpmc_reads_four_general_and_three_fixed_counters() {
    let mut pmu = Rig::new().pmu;
    pmu.write(PMC + 3, 33);
    pmu.write(FIXED + 2, 22);
    assert_eq!(pmu.rdpmc(3), Ok(33));
    assert_eq!(pmu.rdpmc(0x4000_0002), Ok(22));
    for index in [4, 0x4000_0003, 0x8000_0000, 0x2000_0000, u32::MAX] {
        assert_eq!(pmu.rdpmc(index), Err(GpFault), "{index:#x}");
    }
}

/// Rules OVF-01 to OVF-04, FRZ-06.
#[test]
fn overflow_without_int_sets_status_and_continues_to_count() {
    let mut rig = Rig::counting(0xc0, 0, 0);
    rig.freeze = PmiFreeze {
        counters: true,
        lbrs: true,
    };
    rig.pmu.write(PMC, MAX);
    assert_eq!(rig.pmu.read(STATUS), 0);
    assert!(!rig.instructions(3));
    assert_eq!((rig.pmu.read(PMC), rig.pmu.read(STATUS)), (2, 1));
}

/// Rules OVF-05, OVF-07, OVF-14.
#[test]
fn simultaneous_overflows_request_one_pmi() {
    let mut rig = Rig::counting(0xc0, 0, EventSelect::INT);
    rig.pmu.write(regs::IA32_PERF_GLOBAL_CTRL, 1 | 1 << 32);
    rig.pmu.write(regs::IA32_FIXED_CTR_CTRL, 0xb);
    rig.preset(5);
    rig.pmu.write(FIXED, MAX - 4);
    assert!(!rig.instructions(4));
    assert_eq!(rig.pmu.limits().instructions.left(Ring::Os), 1);
    assert!(rig.instructions(1));
    assert_eq!(rig.pmu.read(STATUS), 1 | 1 << 32);
    // A second overflow, with the status bit still set.
    rig.preset(1);
    assert!(rig.instructions(1));
}

/// Rules FRZ-01 to FRZ-04, FRZ-12.
#[test]
fn pmi_request_applies_the_freezes_of_debugctl() {
    for (counters, lbrs) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut rig = Rig::counting(0xc0, 0, EventSelect::INT);
        rig.freeze = PmiFreeze { counters, lbrs };
        rig.preset(1);
        assert!(rig.instructions(1));
        let status = rig.pmu.read(STATUS);
        assert_eq!(status & global::CTR_FRZ != 0, counters);
        assert_eq!(status & global::LBR_FRZ != 0, lbrs);
        assert_eq!(rig.pmu.lbrs_frozen(), lbrs);
        let _ = rig.instructions(10);
        assert_eq!(rig.pmu.read(PMC), if counters { 0 } else { 10 });
        rig.pmu.write(RESET, global::CTR_FRZ | global::LBR_FRZ);
        let _ = rig.instructions(1);
        assert_eq!(rig.pmu.read(PMC), if counters { 1 } else { 11 });
    }
}

#[test]
fn limits_come_from_counters_that_interrupt() {
    let mut rig = Rig::counting(0xc0, 0, 0);
    rig.preset(5);
    assert_eq!(rig.pmu.limits(), PmuLimits::NONE);
    rig.select(1, 0xc4, 1, ON & !EventSelect::OS | EventSelect::INT);
    rig.pmu.write(PMC + 1, MAX);
    let limits = rig.pmu.limits();
    assert_eq!(limits.branches.left(Ring::User), 1);
    assert_eq!(limits.branches.left(Ring::Os), u64::MAX);
    assert_eq!(limits.instructions, EventQuota::NONE);
    assert_eq!(
        rig.pmu.needs(),
        PmuNeeds::COUNTING | PmuNeeds::BRANCHES | PmuNeeds::NOT_TAKEN
    );
}

#[test]
fn quota_of_both_rings_is_spent_by_either_ring() {
    let mut rig = Rig::counting(0xc0, 0, EventSelect::INT);
    rig.preset(100);
    rig.select(1, 0xc0, 0, ON & !EventSelect::USR | EventSelect::INT);
    rig.pmu.write(PMC + 1, MAX - 49);
    let mut quota = rig.pmu.limits().instructions;
    assert_eq!((quota.left(Ring::Os), quota.left(Ring::User)), (50, 100));
    quota.spend(Ring::User, 60);
    assert_eq!((quota.left(Ring::Os), quota.left(Ring::User)), (40, 40));
}

#[test]
fn unit_is_set_up_while_a_counter_is_enabled() {
    for (event, bits, set_up) in [
        (0x3c, ON, true),
        (0xc0, ON & !EventSelect::USR, true),
        (0xc0, ON & !EventSelect::ENABLE, false),
        // An event that counts nothing: RDPMC may read the counter.
        (0xb7, ON, true),
    ] {
        let mut rig = Rig::new();
        rig.select(0, event, 0, bits);
        assert_eq!(rig.pmu.is_set_up(), set_up, "{event:#x} {bits:#x}");
        // Overflow handlers toggle the global enables.
        rig.pmu.write(regs::IA32_PERF_GLOBAL_CTRL, 0);
        assert_eq!(rig.pmu.is_set_up(), set_up, "{event:#x} {bits:#x}");
        assert!(rig.pmu.needs().is_empty());
    }
}

/// Rules PEBS-03, PEBS-04, PEBS-05, PEBS-06, PEBS-07, PEBS-12, PEBS-13, OP-25.
#[test]
fn pebs_takes_its_record_at_the_event_after_the_overflow() {
    let mut rig = Rig::counting(0xc0, 0, 0);
    let mut ds = rig.pebs(MAX - 9, 4);
    rig.preset(3);
    assert!(!rig.instructions(3));
    assert_eq!(rig.pmu.read(STATUS), 1);
    assert_eq!(rig.pmu.limits().instructions.left(Ring::Os), 1);
    assert!(!rig.instructions(1));
    assert!(rig.record_due());
    assert!(!rig.store(&mut ds, 0xabc));
    assert_eq!(ds.index(), BASE + 200);
    assert_eq!(ds.get(BASE + 0x90), 1);
    assert_eq!(ds.get(BASE + 0xb0), 0xabc);
    assert_eq!(ds.get(BASE + 0xc0), 77);
    assert_eq!((rig.pmu.read(PMC), rig.pmu.read(STATUS)), (MAX - 9, 0));
    assert_eq!(rig.pmu.limits().instructions.left(Ring::Os), 10);
}

/// Rule PEBS-03.
#[test]
fn prec_dist_takes_its_record_at_the_overflowing_instruction() {
    let mut rig = Rig::new();
    rig.select(1, 0xc0, 1, ON);
    rig.pmu.write(regs::IA32_PEBS_ENABLE, 2);
    rig.pmu.write(PMC + 1, MAX - 2);
    assert!(rig.pmu.limits().last_alone);
    let _ = rig.instructions(2);
    assert!(!rig.record_due());
    let _ = rig.instructions(1);
    assert!(rig.record_due());
}

/// Rules PEBS-08, PEBS-11, PEBS-31.
#[test]
fn pebs_threshold_sets_ds_buffer_and_requests_a_pmi() {
    let mut rig = Rig::counting(0xc0, 0, 0);
    rig.freeze.counters = true;
    let mut ds = rig.pebs(MAX, 2);
    rig.preset(1);
    let _ = rig.instructions(2);
    assert!(!rig.store(&mut ds, 0));
    assert_eq!(rig.pmu.read(STATUS), 0);
    let _ = rig.instructions(2);
    assert!(rig.store(&mut ds, 0));
    assert_eq!(ds.index(), BASE + 400);
    assert_eq!(rig.pmu.read(STATUS), 1 << 62 | global::CTR_FRZ);
    rig.pmu.write(RESET, 1 << 62);
    assert_eq!(rig.pmu.read(STATUS), global::CTR_FRZ);
}

/// Rules PEBS-09, PEBS-10.
#[test]
fn full_pebs_buffer_drops_the_record_and_reloads_the_counter() {
    let mut rig = Rig::counting(0xc0, 0, 0);
    let mut ds = rig.pebs(MAX - 6, 1);
    ds.put(AREA + 0x28, BASE + 601);
    rig.preset(1);
    let _ = rig.instructions(2);
    assert!(!rig.store(&mut ds, 0));
    assert_eq!(ds.index(), BASE + 601);
    assert_eq!(rig.pmu.read(PMC), MAX - 6);
    assert!(ds.bytes[0x2000..].iter().all(|&b| b == 0));
}

/// Rule DS-06.
#[test]
fn pebs_record_that_would_fault_is_dropped() {
    let mut rig = Rig::counting(0xc0, 0, 0);
    let mut ds = rig.pebs(MAX, 1);
    ds.end = BASE + 199;
    rig.preset(1);
    let _ = rig.instructions(2);
    assert!(!rig.store(&mut ds, 0));
    assert_eq!(ds.index(), BASE);
    assert!(!rig.record_due(), "the record does not stay due");
    for index in [u64::MAX, u64::MAX - 199, 1 << 63] {
        ds.put(AREA + 0x28, index);
        ds.put(AREA + 0x30, u64::MAX);
        rig.preset(1);
        let _ = rig.instructions(2);
        assert!(!rig.store(&mut ds, 0));
    }
}

/// Rules PEBS-16, PEBS-18.
#[test]
fn pebs_on_imprecise_events_takes_no_record() {
    for (event, umask, bits) in [
        (0x3c, 0, 0),
        (0xc0, 0, EventSelect::ANY_THREAD),
        (0xc0, 0, EventSelect::EDGE),
        (0xb7, 1, 0),
    ] {
        let mut rig = Rig::counting(event, umask, bits);
        rig.pmu.write(regs::IA32_PEBS_ENABLE, 1);
        rig.preset(1);
        let _ = rig.instructions(5);
        let _ = rig.report(Cycle, Ring::Os, 5);
        assert!(!rig.record_due(), "{event:#x}");
    }
}

/// Rule PEBS-21.
#[test]
fn pebs_counter_with_int_requests_a_pmi_after_its_record() {
    let mut rig = Rig::counting(0xc0, 0, EventSelect::INT);
    let mut ds = rig.pebs(MAX, 4);
    rig.preset(1);
    assert!(!rig.instructions(1));
    assert!(!rig.instructions(1));
    assert!(rig.store(&mut ds, 0));
    assert_eq!(rig.pmu.read(STATUS) & 1 << 62, 0);
}

/// Rules PEBS-06, PEBS-12.
#[test]
fn pebs_counters_due_together_share_one_record() {
    let mut rig = Rig::counting(0xc0, 0, 0);
    rig.select(3, 0xc4, 0, ON);
    rig.pmu.write(regs::IA32_PEBS_ENABLE, 9);
    let mut ds = Ds::new(MAX - 1, 4);
    ds.put(AREA + 0x58, MAX - 7);
    rig.preset(1);
    rig.pmu.write(PMC + 3, MAX);
    for _ in 0..2 {
        rig.totals.add(Jump, Ring::Os, 1);
        let _ = rig.instructions(1);
    }
    let _ = rig.store(&mut ds, 0);
    assert_eq!(ds.get(BASE + 0x90), 9);
    assert_eq!(
        (rig.pmu.read(PMC), rig.pmu.read(PMC + 3)),
        (MAX - 1, MAX - 7)
    );
}

/// Rules PEBS-27, PEBS-28.
#[test]
fn pebs_record_orders_registers_as_in_the_manual() {
    let mut sample = PebsSample {
        rflags: u64::MAX,
        rip: 0x5000,
        gpr: std::array::from_fn(|n| 0xff00_0000_0000 + n as u64),
        long: true,
        ..PebsSample::default()
    };
    let record = sample.record(1, None);
    // RAX, RBX, RCX, RDX, RSI, RDI, RBP, RSP, R8.
    let found: Vec<u64> = record[2..11].iter().map(|word| word & 0xffff).collect();
    assert_eq!(found, [0, 3, 1, 2, 6, 7, 5, 4, 8]);
    assert_eq!(record[..2], [0x3f_7fd7, 0x5000]);
    sample.long = false;
    let record = sample.record(1, None);
    assert_eq!(record[3], 3);
    assert_eq!(record[10..18], [0; 8]);
}

/// Rules PMU-04, RST-09.
#[test]
fn init_disables_pebs_and_keeps_the_rest() {
    let mut rig = Rig::counting(0xc0, 0, 0);
    let _ = rig.pebs(0, 4);
    let _ = rig.instructions(5);
    rig.pmu.init();
    assert_eq!(rig.pmu.read(regs::IA32_PEBS_ENABLE), 0);
    assert_eq!(rig.pmu.read(PMC), 5);
    assert_ne!(rig.pmu.read(SELECT), 0);
}

#[test]
fn restore_rejects_invalid_values_and_keeps_the_old_state() {
    let mut rig = Rig::counting(0xc0, 0, 0);
    let before = rig.pmu.save();
    let spoil: [fn(&mut PmuState); 5] = [
        |s| s.counters[6] = 1 << 48,
        |s| s.selects[0] = 1 << 40,
        |s| s.status = 1 << 63,
        |s| s.pebs_enable = 1 << 4,
        |s| s.armed = 2,
    ];
    for (row, spoil) in spoil.into_iter().enumerate() {
        let mut state = before;
        spoil(&mut state);
        assert!(rig.pmu.restore(&state).is_err(), "row {row}");
        assert_eq!(rig.pmu.save(), before);
    }
}

fn any_kind() -> impl Strategy<Value = EventKind> {
    prop::sample::select(vec![
        Instruction,
        TakenConditional,
        NotTaken,
        Call,
        Far,
        Cycle,
        Load,
    ])
}

proptest! {
    /// An engine that keeps within the limits stops at every overflow that interrupts: the counter
    /// is exactly 0 after the `sync` that finds the overflow.
    #[test]
    fn limits_stop_the_engine_at_the_exact_overflow(
        selects in prop::array::uniform4((0..5_usize, any::<[bool; 3]>())),
        left in prop::array::uniform4(1..200_u64),
        steps in prop::collection::vec((any::<bool>(), 1..80_u64), 1..60),
    ) {
        const EVENTS: [(u8, u8); 5] = [(0xc0, 0), (0xc4, 0), (0xc4, 1), (0xc4, 0x20), (0xc4, 0x40)];
        let mut rig = Rig::new();
        for (n, ((event, [os, usr, int]), left)) in (0..).zip(selects.into_iter().zip(left)) {
            let mut bits = EventSelect::ENABLE;
            let flags = [(os, EventSelect::OS), (usr, EventSelect::USR), (int, EventSelect::INT)];
            for (on, bit) in flags {
                bits |= if on { bit } else { 0 };
            }
            rig.select(n, EVENTS[event].0, EVENTS[event].1, bits);
            rig.pmu.write(PMC + n, MAX + 1 - left);
        }
        for (user, requested) in steps {
            let ring = if user { Ring::User } else { Ring::Os };
            let limits = rig.pmu.limits();
            let allowed = limits.instructions.left(ring).min(limits.branches.left(ring));
            prop_assert!(allowed >= 1);
            // Every instruction of this engine is a conditional branch.
            let count = requested.min(allowed);
            let before: Vec<u64> = (0..4).map(|n| rig.pmu.read(PMC + n)).collect();
            rig.totals.add(TakenConditional, ring, count);
            let occurred = rig.report(Instruction, ring, count);
            let mut interrupts = false;
            for (n, &before) in (0..).zip(&before) {
                let value = rig.pmu.read(PMC + n);
                let int = EventSelect(rig.pmu.read(SELECT + n)).has(EventSelect::INT);
                if value < before && int {
                    prop_assert_eq!(value, 0);
                    interrupts = true;
                }
            }
            prop_assert_eq!(occurred, interrupts);
        }
    }

    #[test]
    fn any_writes_and_events_leave_a_state_that_restores_to_itself(
        steps in prop::collection::vec((0..12_u32, any::<u64>(), any_kind(), any::<u64>()), 0..60)
    ) {
        const INDICES: [u32; 12] = [
            0xc1, 0xc4, 0x186, 0x187, 0x309, 0x30b, 0x38d, 0x38f, 0x390, 0x391, 0x3f1, 0x4c2,
        ];
        let masks = [u64::MAX, u64::MAX, 0xffff_ffff, 0xffff_ffff, MAX, MAX, 0xfff, 0x7_0000_000f,
            global::RESETTABLE, global::SETTABLE, 0xf_0000_000f, MAX];
        let mut rig = Rig::new();
        for (row, value, kind, count) in steps {
            let row = row as usize;
            rig.pmu.write(INDICES[row], value & masks[row]);
            let _ = rig.report(kind, Ring::User, count);
            let mut other = Rig::new().pmu;
            prop_assert_eq!(other.restore(&rig.pmu.save()), Ok(()));
            prop_assert_eq!(other.save(), rig.pmu.save());
            prop_assert_eq!(other.limits(), rig.pmu.limits());
        }
    }
}

/// Rules EVT-15, MSR-40.
#[test]
fn offcore_response_counts_the_requests_and_responses_that_its_register_selects() {
    use super::events::EventKind::{
        OffcoreCodeHit, OffcoreCodeMiss, OffcoreOwnHit, OffcoreOwnMiss, OffcoreReadHit,
        OffcoreReadMiss,
    };
    const ANY_SNOOP: u64 = 0x3f_8000_0000;
    let reads_and_stores = |select| {
        let mut counts = [0; 2];
        for (count, (event, register)) in counts.iter_mut().zip([
            (0xb7, regs::MSR_OFFCORE_RSP_0),
            (0xbb, regs::MSR_OFFCORE_RSP_1),
        ]) {
            let mut rig = Rig::new();
            rig.select(0, event, 1, ON);
            // The counter is enabled before its register is written.
            rig.pmu.write(register, select);
            assert_eq!(rig.pmu.read(register), select);
            for (kind, n) in [
                (OffcoreReadHit, 1),
                (OffcoreReadMiss, 10),
                (OffcoreOwnHit, 100),
                (OffcoreOwnMiss, 1000),
                (OffcoreCodeHit, 10_000),
                (OffcoreCodeMiss, 100_000),
            ] {
                let _ = rig.report(kind, Ring::User, n);
            }
            *count = rig.pmu.read(PMC);
        }
        assert_eq!(counts[0], counts[1], "{select:#x}");
        counts[0]
    };
    // What Linux selects for LLC-loads, LLC-load-misses, LLC-stores and node-load-misses.
    assert_eq!(reads_and_stores(1 | 1 << 16 | ANY_SNOOP), 11);
    assert_eq!(reads_and_stores(1 | 0xf << 26 | 1 << 17 | ANY_SNOOP), 10);
    assert_eq!(reads_and_stores(1 << 1 | 1 << 16 | ANY_SNOOP), 1100);
    assert_eq!(
        reads_and_stores(1 | 0b111 << 27 | ANY_SNOOP),
        0,
        "memory of other sockets"
    );
    assert_eq!(reads_and_stores(0b111 | 0xf << 18 | 1 << 31), 10_101);
    assert_eq!(reads_and_stores(1 | 1 << 26), 0, "no result of a snoop");
    assert_eq!(reads_and_stores(1 << 7 | 1 << 16), 0, "prefetches");
    assert_eq!(reads_and_stores(0), 0);
}

/// Rules EVT-07, EVT-08.
#[test]
fn events_of_the_uarch_models_count_only_with_them() {
    use super::events::EventKind::{
        L1Replacement, LateLoad, LlcMiss, LlcReference, LoadL1, LoadL3, LoadMemory,
    };
    use super::events::EventKind::{
        MispredictedCall, MispredictedJump, MispredictedNotTaken, MispredictedTaken,
    };
    for (event, umask, kinds) in [
        (0x2e, 0x4f, &[LlcReference][..]),
        (0x2e, 0x41, &[LlcMiss]),
        (0x51, 0x01, &[L1Replacement]),
        (
            0xc5,
            0x00,
            &[
                MispredictedTaken,
                MispredictedNotTaken,
                MispredictedJump,
                MispredictedCall,
            ],
        ),
        (0xc5, 0x01, &[MispredictedTaken, MispredictedNotTaken]),
        (0xc5, 0x02, &[MispredictedCall]),
        (
            0xc5,
            0x20,
            &[MispredictedTaken, MispredictedJump, MispredictedCall],
        ),
        (0xcd, 0x01, &[LateLoad]),
        (0xd1, 0x01, &[LoadL1]),
        (0xd1, 0x10, &[LoadL3, LoadMemory]),
    ] {
        for uarch in [true, false] {
            let mut rig = Rig::new();
            rig.pmu.config.uarch = uarch;
            rig.select(0, event, umask, ON);
            rig.preset(1);
            rig.pmu.write(PMC, 0);
            for &kind in kinds {
                let _ = rig.report(kind, Ring::User, 3);
            }
            let _ = rig.instructions(5);
            let expected = if uarch { 3 * kinds.len() as u64 } else { 0 };
            assert_eq!(rig.pmu.read(PMC), expected, "{event:#x} {umask:#x}");
            let modelled = PmuNeeds::PREDICTOR | PmuNeeds::CACHES;
            assert_eq!(rig.pmu.needs().intersects(modelled), uarch);
        }
    }
}

mod adaptive;
