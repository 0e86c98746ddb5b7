use super::*;
use crate::branch::BranchClass;
use proptest::prelude::*;

/// Linear addresses are this much above guest-physical ones.
const UP: u64 = 0xffff_8000_0000_0000;

struct Rig {
    core: CoreUarch,
    l3: CacheModel,
    totals: EventTotals,
    requester: Requester,
}

impl Rig {
    fn new() -> Self {
        Self {
            core: CoreUarch::default(),
            l3: CacheModel::new(CacheGeometry::L3),
            totals: EventTotals::default(),
            requester: Requester::default(),
        }
    }

    /// Executes an instruction with these accesses; returns the value of [`CoreUarch::access`].
    fn instruction(&mut self, accesses: &[MemoryAccess], locked: bool) -> u64 {
        let instruction = InstructionAccesses {
            accesses,
            locked,
            retired: true,
        };
        let events = AccessEvents {
            totals: &mut self.totals,
            ring: Ring::User,
            late_threshold: 30,
        };
        self.core
            .access(&instruction, Some(&mut self.l3), &self.requester, events)
    }

    /// Asserts that exactly these events happened since the last call.
    fn assert_events(&mut self, expected: &[(EventKind, u64)]) {
        let mut totals = EventTotals::default();
        for &(kind, count) in expected {
            totals.add(kind, Ring::User, count);
        }
        assert_eq!(std::mem::take(&mut self.totals), totals, "{expected:?}");
    }
}

fn events(totals: &mut EventTotals, ring: Ring) -> AccessEvents<'_> {
    AccessEvents {
        totals,
        ring,
        late_threshold: 0,
    }
}

fn access(gpa: u64, len: u32, kind: CacheAccess) -> MemoryAccess {
    MemoryAccess {
        linear: gpa + UP,
        gpa,
        len,
        kind,
        cached: true,
    }
}

#[test]
fn load_counts_the_level_that_serves_it() {
    let mut rig = Rig::new();
    let load = [access(0x1000, 8, CacheAccess::Load)];
    assert_eq!(rig.instruction(&load, false), 1);
    rig.assert_events(&[
        (EventKind::Load, 1),
        (EventKind::LoadMemory, 1),
        (EventKind::LateLoad, 1),
        (EventKind::LlcReference, 1),
        (EventKind::LlcMiss, 1),
        (EventKind::OffcoreReadMiss, 1),
        (EventKind::L1Replacement, 1),
    ]);
    let expected = PebsData {
        address: UP + 0x1000,
        source: 0xa,
        latency: 240,
    };
    assert_eq!(rig.core.data(SampledAccess::Load), expected);
    assert_eq!(rig.core.data(SampledAccess::Store), PebsData::default());
    rig.instruction(&load, false);
    rig.assert_events(&[(EventKind::Load, 1), (EventKind::LoadL1, 1)]);
    let expected = PebsData {
        source: 1,
        latency: 5,
        ..expected
    };
    assert_eq!(rig.core.data(SampledAccess::Load), expected);
    // Eight more lines in its set of the L1.
    for n in 1..=8 {
        rig.instruction(&[access(0x1000 + n * 0x1000, 8, CacheAccess::Load)], false);
    }
    rig.totals = EventTotals::default();
    rig.instruction(&load, false);
    rig.assert_events(&[
        (EventKind::Load, 1),
        (EventKind::LoadL2, 1),
        (EventKind::L1Replacement, 1),
    ]);
}

#[test]
fn code_fetch_counts_l3_events_only() {
    let mut rig = Rig::new();
    rig.instruction(&[access(0x1000, 1, CacheAccess::Code)], false);
    rig.assert_events(&[
        (EventKind::LlcReference, 1),
        (EventKind::LlcMiss, 1),
        (EventKind::OffcoreCodeMiss, 1),
    ]);
}

#[test]
fn furthest_of_several_loads_counts() {
    let mut rig = Rig::new();
    rig.instruction(&[access(0x1000, 8, CacheAccess::Load)], false);
    rig.totals = EventTotals::default();
    let two = [
        access(0x1000, 8, CacheAccess::Load),
        access(0x2000, 8, CacheAccess::Load),
    ];
    rig.instruction(&two, false);
    assert_eq!(rig.core.data(SampledAccess::Load).address, UP + 0x2000);
    assert_eq!(rig.totals.get(EventKind::Load, Ring::User), 1);
    assert_eq!(rig.totals.get(EventKind::LoadMemory, Ring::User), 1);
    assert_eq!(rig.totals.get(EventKind::LoadL1, Ring::User), 0);
}

#[test]
fn split_and_locked_accesses_are_counted() {
    let mut rig = Rig::new();
    let both = [
        access(0x103c, 8, CacheAccess::Load),
        access(0x103c, 8, CacheAccess::Store),
    ];
    assert_eq!(rig.instruction(&both, true), 2, "two lines were referenced");
    for kind in [
        EventKind::Load,
        EventKind::Store,
        EventKind::LockedLoad,
        EventKind::LockedStore,
        EventKind::SplitLoad,
        EventKind::SplitStore,
    ] {
        assert_eq!(rig.totals.get(kind, Ring::User), 1, "{kind:?}");
    }
    // A store after the load of the same line hits.
    assert_eq!(rig.core.data(SampledAccess::Store).source, 1 | 1 << 5);
    assert_eq!(rig.core.data(SampledAccess::Load).source, 0xa | 1 << 5);
}

#[test]
fn pebs_data_without_caches_has_an_address_and_no_source() {
    let mut rig = Rig::new();
    let accesses = [access(0x1000, 8, CacheAccess::Store)];
    let instruction = InstructionAccesses {
        accesses: &accesses,
        locked: false,
        retired: true,
    };
    let events = events(&mut rig.totals, Ring::User);
    rig.core
        .access(&instruction, None, &Requester::default(), events);
    rig.assert_events(&[(EventKind::Store, 1)]);
    let expected = PebsData {
        address: UP + 0x1000,
        ..PebsData::default()
    };
    assert_eq!(rig.core.data(SampledAccess::Store), expected);
    assert!(rig.core.caches_are_cold() && rig.l3.is_cold());
}

#[test]
fn device_access_is_not_cached_and_unretired_load_is_not_counted() {
    let mut rig = Rig::new();
    let device = [MemoryAccess {
        cached: false,
        ..access(0xfee0_0000, 4, CacheAccess::Load)
    }];
    rig.instruction(&device, false);
    rig.assert_events(&[(EventKind::Load, 1)]);
    let accesses = [access(0x1000, 8, CacheAccess::Load)];
    let instruction = InstructionAccesses {
        accesses: &accesses,
        locked: false,
        retired: false,
    };
    let events = events(&mut rig.totals, Ring::User);
    let l3 = Some(&mut rig.l3);
    rig.core
        .access(&instruction, l3, &Requester::default(), events);
    rig.assert_events(&[
        (EventKind::LlcReference, 1),
        (EventKind::LlcMiss, 1),
        (EventKind::OffcoreReadMiss, 1),
        (EventKind::L1Replacement, 1),
    ]);
    assert_eq!(rig.core.data(SampledAccess::Load).address, UP + 0xfee0_0000);
}

#[test]
fn lines_are_charged_to_the_requester() {
    let mut rig = Rig::new();
    let requester = Requester {
        rmid: 7,
        l3_data_ways: 1,
        ..Requester::default()
    };
    for n in 0..3 {
        // All in one set of the L3.
        let accesses = [access(n * 36864 * 64, 8, CacheAccess::Load)];
        let instruction = InstructionAccesses {
            accesses: &accesses,
            locked: false,
            retired: true,
        };
        let events = events(&mut rig.totals, Ring::Os);
        rig.core
            .access(&instruction, Some(&mut rig.l3), &requester, events);
    }
    assert_eq!(rig.l3.lines_of(7), 1, "the mask has one way");
}

#[test]
fn flushed_line_is_loaded_from_memory() {
    let mut rig = Rig::new();
    let load = [access(0x1008, 8, CacheAccess::Load)];
    rig.instruction(&load, false);
    rig.core.flush(&mut rig.l3, 0x1030);
    rig.instruction(&load, false);
    assert_eq!(rig.totals.get(EventKind::LoadMemory, Ring::User), 2);
}

#[test]
fn restored_state_equals_the_saved_one() {
    let mut rig = Rig::new();
    let mut branches = [Branch::new(BranchClass::Conditional, 0x1000, 0x2000); 40];
    rig.core.resolve(&mut branches);
    assert!(branches[0].mispredicted && !branches[39].mispredicted);
    rig.instruction(&[access(0x1000, 8, CacheAccess::Load)], false);
    let mut other = CoreUarch::default();
    assert_eq!(other.restore(&rig.core.save()), Ok(()));
    assert_eq!(other.save(), rig.core.save());
    let mut bad = rig.core.save();
    bad.caches.caches[1].lines[0].4 = 9;
    assert!(other.restore(&bad).is_err());
    assert_eq!(other.save(), rig.core.save());
}

/// Rules MBA-05 and MBA-07.
#[test]
fn delay_grows_with_its_value_for_requests_beyond_the_core() {
    let mut cycles = Vec::new();
    for delay in (0..=90).step_by(10) {
        let mut rig = Rig::new();
        rig.requester.delay = delay;
        // From memory, and then from the L1.
        for expected in [240 * u64::from(delay) / u64::from(100 - delay), 0] {
            rig.instruction(&[access(0x1000, 8, CacheAccess::Load)], false);
            assert_eq!(rig.core.take_delay_cycles(), expected, "{delay}");
            assert_eq!(rig.core.take_delay_cycles(), 0, "returned once");
            cycles.extend((expected != 0).then_some(expected));
        }
    }
    assert_eq!((cycles.len(), cycles.last()), (9, Some(&(9 * 240))));
    assert!(cycles.is_sorted());
}

/// Rule MBA-07.
#[test]
fn l3_hit_is_delayed_less_than_an_l3_miss() {
    let mut rig = Rig::new();
    rig.requester.delay = 50;
    // More lines than the L2 holds, all in the L3.
    let pass = |rig: &mut Rig| {
        for line in 0..20_000 {
            rig.instruction(&[access(line * 64, 8, CacheAccess::Load)], false);
        }
        rig.core.take_delay_cycles()
    };
    assert_eq!(pass(&mut rig), 20_000 * 240);
    assert_eq!(pass(&mut rig), 20_000 * 60);
}

proptest! {
    /// Accesses to the newest line of a set need no call, if the line is dirty or they are loads.
    #[test]
    fn accesses_of_a_block_count_like_those_of_its_instructions(
        accesses in prop::collection::vec((0_u64..200, any::<bool>()), 1..3000),
    ) {
        let (mut one, mut block) = (Rig::new(), Rig::new());
        let mut newest = [(u64::MAX, false); 64];
        let (mut loads, mut stores) = (0, 0);
        for (line, store) in accesses {
            let kind = if store { CacheAccess::Store } else { CacheAccess::Load };
            let access = access(line * 64 + 8, 8, kind);
            one.instruction(&[access], false);
            loads += u64::from(!store);
            stores += u64::from(store);
            let entry = &mut newest[usize::try_from(line % 64).unwrap_or(0)];
            let known = entry.0 == line && (entry.1 || !store);
            if !known {
                *entry = (line, store || *entry == (line, true));
                block.core.access_line(
                    &access,
                    Some(&mut block.l3),
                    &block.requester,
                    AccessEvents { totals: &mut block.totals, ring: Ring::User, late_threshold: 30 },
                );
            }
        }
        let events = AccessEvents { totals: &mut block.totals, ring: Ring::User, late_threshold: 30 };
        block.core.count_block(loads, stores, true, events);
        prop_assert_eq!(&block.totals, &one.totals);
        prop_assert_eq!(block.core.save(), one.core.save());
        prop_assert_eq!(block.l3.save(), one.l3.save());
    }
}
