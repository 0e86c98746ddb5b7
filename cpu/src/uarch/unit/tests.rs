use super::*;
use crate::branch::BranchClass;
use crate::pmu::events::Kind as Event;

/// Linear addresses are this much above guest-physical ones.
const UP: u64 = 0xffff_8000_0000_0000;

struct Rig {
    unit: Unit,
    last: Cache,
    totals: EventTotals,
    who: Who,
}

impl Rig {
    fn new() -> Self {
        Self {
            unit: Unit::default(),
            last: Cache::new(Geometry::L3),
            totals: EventTotals::default(),
            who: Who::default(),
        }
    }

    /// An instruction with these accesses; answers what [`Unit::access`] does.
    fn instruction(&mut self, touches: &[Touch], locked: bool) -> u64 {
        let accesses = Accesses {
            touches,
            locked,
            retired: true,
        };
        let told = (&mut self.totals, Ring::User, 30);
        self.unit
            .access(&accesses, Some(&mut self.last), &self.who, told)
    }

    /// How often each of these happened, and no others did.
    fn happened(&mut self, expected: &[(Event, u64)]) {
        let mut totals = EventTotals::default();
        for &(kind, count) in expected {
            totals.add(kind, Ring::User, count);
        }
        assert_eq!(std::mem::take(&mut self.totals), totals, "{expected:?}");
    }
}

fn touch(gpa: u64, len: u32, kind: Kind) -> Touch {
    Touch {
        linear: gpa + UP,
        gpa,
        len,
        kind,
        cached: true,
    }
}

#[test]
fn a_load_is_served_from_where_the_line_is() {
    let mut rig = Rig::new();
    let load = [touch(0x1000, 8, Kind::Load)];
    assert_eq!(rig.instruction(&load, false), 1);
    rig.happened(&[
        (Event::Load, 1),
        (Event::LoadMemory, 1),
        (Event::LateLoad, 1),
        (Event::LastReference, 1),
        (Event::LastMiss, 1),
    ]);
    let expected = Data {
        address: UP + 0x1000,
        source: 0xa,
        latency: 240,
    };
    assert_eq!(rig.unit.data(DataOf::Load), expected);
    assert_eq!(rig.unit.data(DataOf::Store), Data::default());
    rig.instruction(&load, false);
    rig.happened(&[(Event::Load, 1), (Event::LoadL1, 1)]);
    let expected = Data {
        source: 1,
        latency: 5,
        ..expected
    };
    assert_eq!(rig.unit.data(DataOf::Load), expected);
    // Eight lines more in its set of the first level.
    for n in 1..=8 {
        rig.instruction(&[touch(0x1000 + n * 0x1000, 8, Kind::Load)], false);
    }
    rig.totals = EventTotals::default();
    rig.instruction(&load, false);
    rig.happened(&[(Event::Load, 1), (Event::LoadL2, 1)]);
}

#[test]
fn code_counts_in_the_last_level_only() {
    let mut rig = Rig::new();
    rig.instruction(&[touch(0x1000, 1, Kind::Code)], false);
    rig.happened(&[(Event::LastReference, 1), (Event::LastMiss, 1)]);
}

#[test]
fn the_furthest_of_several_loads_counts() {
    let mut rig = Rig::new();
    rig.instruction(&[touch(0x1000, 8, Kind::Load)], false);
    rig.totals = EventTotals::default();
    let two = [touch(0x1000, 8, Kind::Load), touch(0x2000, 8, Kind::Load)];
    rig.instruction(&two, false);
    assert_eq!(rig.unit.data(DataOf::Load).address, UP + 0x2000);
    assert_eq!(rig.totals.get(Event::Load, Ring::User), 1);
    assert_eq!(rig.totals.get(Event::LoadMemory, Ring::User), 1);
    assert_eq!(rig.totals.get(Event::LoadL1, Ring::User), 0);
}

#[test]
fn splits_and_locks() {
    let mut rig = Rig::new();
    let both = [touch(0x103c, 8, Kind::Load), touch(0x103c, 8, Kind::Store)];
    assert_eq!(rig.instruction(&both, true), 2, "two lines came");
    for kind in [
        Event::Load,
        Event::Store,
        Event::LockedLoad,
        Event::LockedStore,
        Event::SplitLoad,
        Event::SplitStore,
    ] {
        assert_eq!(rig.totals.get(kind, Ring::User), 1, "{kind:?}");
    }
    // A store after the load of the same line hits.
    assert_eq!(rig.unit.data(DataOf::Store).source, 1 | 1 << 5);
    assert_eq!(rig.unit.data(DataOf::Load).source, 0xa | 1 << 5);
}

#[test]
fn without_caches_there_is_an_address_and_no_source() {
    let mut rig = Rig::new();
    let touches = [touch(0x1000, 8, Kind::Store)];
    let accesses = Accesses {
        touches: &touches,
        locked: false,
        retired: true,
    };
    let told = (&mut rig.totals, Ring::User, 0);
    rig.unit.access(&accesses, None, &Who::default(), told);
    rig.happened(&[(Event::Store, 1)]);
    let expected = Data {
        address: UP + 0x1000,
        ..Data::default()
    };
    assert_eq!(rig.unit.data(DataOf::Store), expected);
    assert!(rig.unit.caches_are_cold() && rig.last.is_cold());
}

#[test]
fn what_does_not_retire_is_not_counted_and_a_device_is_not_cached() {
    let mut rig = Rig::new();
    let device = [Touch {
        cached: false,
        ..touch(0xfee0_0000, 4, Kind::Load)
    }];
    rig.instruction(&device, false);
    rig.happened(&[(Event::Load, 1)]);
    let touches = [touch(0x1000, 8, Kind::Load)];
    let accesses = Accesses {
        touches: &touches,
        locked: false,
        retired: false,
    };
    let told = (&mut rig.totals, Ring::User, 0);
    let last = Some(&mut rig.last);
    rig.unit.access(&accesses, last, &Who::default(), told);
    rig.happened(&[(Event::LastReference, 1), (Event::LastMiss, 1)]);
    assert_eq!(rig.unit.data(DataOf::Load).address, UP + 0xfee0_0000);
}

#[test]
fn lines_are_charged_to_who_asks() {
    let mut rig = Rig::new();
    let who = Who {
        rmid: 7,
        data: 1,
        ..Who::default()
    };
    for n in 0..3 {
        // All in one set of the last level.
        let touches = [touch(n * 36864 * 64, 8, Kind::Load)];
        let accesses = Accesses {
            touches: &touches,
            locked: false,
            retired: true,
        };
        let told = (&mut rig.totals, Ring::Os, 0);
        rig.unit.access(&accesses, Some(&mut rig.last), &who, told);
    }
    assert_eq!(rig.last.lines_of(7), 1, "the mask has one way");
}

#[test]
fn flushed_lines_come_from_memory() {
    let mut rig = Rig::new();
    let load = [touch(0x1008, 8, Kind::Load)];
    rig.instruction(&load, false);
    rig.unit.flush(&mut rig.last, 0x1030);
    rig.instruction(&load, false);
    assert_eq!(rig.totals.get(Event::LoadMemory, Ring::User), 2);
}

#[test]
fn branches_learn_and_states_go_round() {
    let mut rig = Rig::new();
    let mut branches = [Branch {
        from: 0x1000,
        to: 0x2000,
        at: 0,
        class: BranchClass::Conditional,
        cpl: 0,
        to_cpl: 0,
        mispredicted: false,
    }; 40];
    rig.unit.resolve(&mut branches);
    assert!(branches[0].mispredicted && !branches[39].mispredicted);
    rig.instruction(&[touch(0x1000, 8, Kind::Load)], false);
    let mut other = Unit::default();
    assert_eq!(other.restore(&rig.unit.save()), Ok(()));
    assert_eq!(other.save(), rig.unit.save());
    let mut bad = rig.unit.save();
    bad.caches.caches[1].lines[0].4 = 9;
    assert!(other.restore(&bad).is_err());
    assert_eq!(other.save(), rig.unit.save());
}

/// Rules MBA-05 and MBA-07: the larger the delay value, the longer requests beyond the core take, and only those.
#[test]
fn requests_beyond_the_core_are_held_back_by_the_delay() {
    let mut cycles = Vec::new();
    for delay in (0..=90).step_by(10) {
        let mut rig = Rig::new();
        rig.who.delay = delay;
        // From memory, and then from the first level.
        for expected in [240 * u64::from(delay) / u64::from(100 - delay), 0] {
            rig.instruction(&[touch(0x1000, 8, Kind::Load)], false);
            assert_eq!(rig.unit.take_held_back(), expected, "{delay}");
            assert_eq!(rig.unit.take_held_back(), 0, "told once");
            cycles.extend((expected != 0).then_some(expected));
        }
    }
    assert_eq!((cycles.len(), cycles.last()), (9, Some(&(9 * 240))));
    assert!(cycles.is_sorted());
}

/// Rule MBA-07: a hit in the last level is held back by less than a miss.
#[test]
fn what_the_last_level_serves_is_held_back_by_its_latency() {
    let mut rig = Rig::new();
    rig.who.delay = 50;
    // More lines than the second level has, all in the last.
    let pass = |rig: &mut Rig| {
        for line in 0..20_000 {
            rig.instruction(&[touch(line * 64, 8, Kind::Load)], false);
        }
        rig.unit.take_held_back()
    };
    assert_eq!(pass(&mut rig), 20_000 * 240);
    assert_eq!(pass(&mut rig), 20_000 * 60);
}
