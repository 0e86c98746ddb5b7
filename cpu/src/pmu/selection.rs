//! What an event selection counts: the encodings of the processor's events.
//!
//! SDM Vol. 3B, "Pre-defined Architectural Performance Events", and the event list of
//! first-generation Xeon Scalable processors.

use hindsight_regs::pmu::EventSelect;

use super::events::{EventKind, EventKinds};

/// The instruction at which the PEBS record of an overflowed counter is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PebsTiming {
    /// The next occurrence of the event (rule PEBS-03).
    Next,
    /// The instruction that overflows, or the first boundary after it.
    Here,
}

/// The access of an instruction whose address a PEBS record holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampledAccess {
    /// The load.
    Load,
    /// The store.
    Store,
}

/// The event that a counter counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PmuEvent {
    /// The counter counts the sum of these kinds.
    pub kinds: EventKinds,
    /// The counter counts at the rate of the crystal, not of the TSC.
    pub crystal: bool,
    /// When PEBS takes its record; `None` if the event is not precise.
    pub precise: Option<PebsTiming>,
    /// The access that its PEBS records describe.
    pub data: Option<SampledAccess>,
}

impl PmuEvent {
    /// An event without PEBS.
    pub const fn plain(kinds: EventKinds) -> Self {
        Self {
            kinds,
            crystal: false,
            precise: None,
            data: None,
        }
    }

    const fn precise(kinds: EventKinds, timing: PebsTiming) -> Self {
        Self {
            precise: Some(timing),
            ..Self::plain(kinds)
        }
    }

    const fn with_data(kinds: &[EventKind], data: SampledAccess) -> Self {
        Self {
            data: Some(data),
            ..Self::precise(EventKinds::of(kinds), PebsTiming::Next)
        }
    }
}

/// A row of the event table: event select, unit mask, and what they count.
type EventRow = (u8, u8, PmuEvent);

/// The events that count something (rules EVT-01 to EVT-12); all others count nothing (EVT-09).
#[rustfmt::skip]
const EVENTS: &[EventRow] = {
    use EventKind as K;
    const fn plain(event: u8, umask: u8, kind: EventKind) -> EventRow {
        (event, umask, PmuEvent::plain(EventKinds::of(&[kind])))
    }
    const fn precise(event: u8, umask: u8, kinds: EventKinds) -> EventRow {
        (event, umask, PmuEvent::precise(kinds, PebsTiming::Next))
    }
    const fn load(event: u8, umask: u8, kinds: &[EventKind]) -> EventRow {
        (event, umask, PmuEvent::with_data(kinds, SampledAccess::Load))
    }
    const fn store(umask: u8, kind: EventKind) -> EventRow {
        (0xd0, umask, PmuEvent::with_data(&[kind], SampledAccess::Store))
    }
    const CRYSTAL: PmuEvent = PmuEvent { crystal: true, ..PmuEvent::plain(EventKinds::CYCLES) };
    &[
        // CPU_CLK_UNHALTED
        plain(0x3c, 0x00, K::Cycle),
        (0x3c, 0x01, CRYSTAL),
        // INST_RETIRED
        precise(0xc0, 0x00, EventKinds::INSTRUCTIONS),
        // BR_INST_RETIRED
        precise(0xc4, 0x00, EventKinds::BRANCHES),
        precise(0xc4, 0x01, EventKinds::CONDITIONAL),
        precise(0xc4, 0x02, EventKinds::of(&[K::Call])),
        precise(0xc4, 0x04, EventKinds::BRANCHES),
        precise(0xc4, 0x08, EventKinds::of(&[K::Return])),
        precise(0xc4, 0x10, EventKinds::of(&[K::NotTaken])),
        precise(0xc4, 0x20, EventKinds::NEAR_TAKEN),
        precise(0xc4, 0x40, EventKinds::of(&[K::Far])),
        // LONGEST_LAT_CACHE
        plain(0x2e, 0x4f, K::LlcReference),
        plain(0x2e, 0x41, K::LlcMiss),
        // L1D.REPLACEMENT
        plain(0x51, 0x01, K::L1Replacement),
        // BR_MISP_RETIRED
        precise(0xc5, 0x00, EventKinds::MISPREDICTED),
        precise(0xc5, 0x01, EventKinds::of(&[K::MispredictedTaken, K::MispredictedNotTaken])),
        precise(0xc5, 0x02, EventKinds::of(&[K::MispredictedCall])),
        precise(0xc5, 0x04, EventKinds::MISPREDICTED),
        precise(0xc5, 0x20, EventKinds::MISPREDICTED_TAKEN),
        // MEM_TRANS_RETIRED, MEM_INST_RETIRED, MEM_LOAD_RETIRED
        load(0xcd, 0x01, &[K::LateLoad]),
        load(0xd0, 0x21, &[K::LockedLoad]),
        store(0x22, K::LockedStore),
        load(0xd0, 0x41, &[K::SplitLoad]),
        store(0x42, K::SplitStore),
        load(0xd0, 0x81, &[K::Load]),
        store(0x82, K::Store),
        load(0xd1, 0x01, &[K::LoadL1]),
        load(0xd1, 0x02, &[K::LoadL2]),
        load(0xd1, 0x04, &[K::LoadL3]),
        load(0xd1, 0x08, &[K::LoadL2, K::LoadL3, K::LoadMemory]),
        load(0xd1, 0x10, &[K::LoadL3, K::LoadMemory]),
        load(0xd1, 0x20, &[K::LoadMemory]),
        // RTM_RETIRED, TX_MEM
        plain(0xc9, 0x01, K::RtmStart),
        plain(0xc9, 0x02, K::RtmCommit),
        precise(0xc9, 0x04, EventKinds::of(&[K::RtmAbort])),
        plain(0x54, 0x01, K::RtmConflict),
        plain(0x54, 0x02, K::RtmCapacity),
    ]
};

/// What MSR_OFFCORE_RSP_x selects of the requests to the L3.
///
/// SDM Vol. 3B, "Off-core Response Performance Monitoring", and the event list of first-generation
/// Xeon Scalable processors. There are no prefetches and no other sockets, and no request is snooped
/// in another core.
mod offcore {
    pub(super) const DATA_READ: u64 = 1 << 0;
    pub(super) const OWNERSHIP: u64 = 1 << 1;
    pub(super) const CODE_READ: u64 = 1 << 2;
    /// All responses; the other bits of the response do not matter.
    pub(super) const ANY_RESPONSE: u64 = 1 << 16;
    /// The L3 had the line: in the states M, E, S and F.
    pub(super) const L3_HIT: u64 = 0xf << 18;
    /// Memory of this socket had it.
    pub(super) const LOCAL_MEMORY: u64 = 1 << 26;
    /// The results of snoops: none was needed for any of these requests.
    pub(super) const NO_SNOOP: u64 = 0b11 << 31;
}

/// The kinds that offcore response events count with this MSR_OFFCORE_RSP_x.
fn offcore_kinds(select: u64) -> EventKinds {
    use EventKind as K;
    let has = |bits| select & bits != 0;
    let any = has(offcore::ANY_RESPONSE);
    let snooped = has(offcore::NO_SNOOP);
    let hit = any || has(offcore::L3_HIT) && snooped;
    let miss = any || has(offcore::LOCAL_MEMORY) && snooped;
    let requests = [
        (offcore::DATA_READ, K::OffcoreReadHit, K::OffcoreReadMiss),
        (offcore::OWNERSHIP, K::OffcoreOwnHit, K::OffcoreOwnMiss),
        (offcore::CODE_READ, K::OffcoreCodeHit, K::OffcoreCodeMiss),
    ];
    let mut kinds = EventKinds::NONE;
    for (_, on_hit, on_miss) in requests.into_iter().filter(|&(request, ..)| has(request)) {
        for (counted, kind) in [(hit, on_hit), (miss, on_miss)] {
            if counted {
                kinds = kinds.union(EventKinds::of(&[kind]));
            }
        }
    }
    kinds
}

/// The counter that has INST_RETIRED.PREC_DIST, C0H/01H.
const PREC_DIST_COUNTER: usize = 1;
/// The counter mask with which perf selects cycles: more than can retire in one cycle.
const ALL_CYCLES_MASK: u8 = 0x10;

impl PmuEvent {
    /// What general-purpose counter `counter` counts with this selection, once it is enabled.
    ///
    /// `offcore` is MSR_OFFCORE_RSP_0 and 1.
    pub fn selected(select: EventSelect, counter: usize, offcore: &[u64; 2]) -> Self {
        let (event, umask) = (select.event(), select.umask());
        let instructions =
            event == 0xc0 && (umask == 0x00 || (umask == 0x01 && counter == PREC_DIST_COUNTER));
        let edge = select.has(EventSelect::EDGE);
        let inverted = select.has(EventSelect::INVERT);
        match (select.cmask(), edge) {
            // INV without a counter mask compares nothing (rule PMU-30).
            (0, false) if instructions && umask == 0x01 => {
                Self::precise(EventKinds::INSTRUCTIONS, PebsTiming::Here)
            }
            // OFFCORE_RESPONSE (rule EVT-15).
            (0, false) if (event, umask) == (0xb7, 0x01) => Self::plain(offcore_kinds(offcore[0])),
            (0, false) if (event, umask) == (0xbb, 0x01) => Self::plain(offcore_kinds(offcore[1])),
            (0, false) => EVENTS
                .iter()
                .find(|row| (row.0, row.1) == (event, umask))
                .map_or_else(Self::default, |row| row.2),
            // Fewer than 16 instructions retire in every cycle (rule EVT-10).
            (ALL_CYCLES_MASK, false) if instructions && inverted => {
                Self::precise(EventKinds::CYCLES, PebsTiming::Here)
            }
            // The edges of "not halted" (rule EVT-11).
            (0, true) if (event, umask) == (0x3c, 0x00) => {
                Self::plain(EventKinds::of(&[EventKind::Wake]))
            }
            // Other combinations count nothing (rule PMU-31).
            _ => Self::default(),
        }
    }

    /// What fixed counter `index`, 0 to 2, counts: instructions, core cycles, TSC cycles.
    pub const fn fixed(index: usize) -> Self {
        Self::plain(match index {
            0 => EventKinds::INSTRUCTIONS,
            _ => EventKinds::CYCLES,
        })
    }
}
