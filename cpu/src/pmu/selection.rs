//! What an event selection counts: the encodings of the processor's events.
//!
//! SDM Vol. 3B, "Pre-defined Architectural Performance Events". The event table is part of the
//! model's file ([`crate::model`]).

use hindsight_regs::pmu::EventSelect;

use super::events::{EventKind, EventKinds};
use crate::model::ModelDefinition;

/// The instruction at which the PEBS record of an overflowed counter is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PebsTiming {
    /// The next occurrence of the event (rule PEBS-03).
    Next,
    /// The instruction that overflows, or the first boundary after it.
    Here,
}

/// The access of an instruction whose address a PEBS record holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
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
    /// The slots of a cycle, if the counter counts them and not cycles; otherwise 0.
    pub slots: u32,
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
            slots: 0,
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

    /// An event of a model's table.
    pub(crate) fn new(
        kinds: EventKinds,
        crystal: bool,
        precise: bool,
        data: Option<SampledAccess>,
    ) -> Self {
        Self {
            kinds,
            crystal,
            slots: 0,
            precise: precise.then_some(PebsTiming::Next),
            data,
        }
    }
}

/// A row of a model's event table (rules EVT-01 to EVT-12).
///
/// Selections without a row count nothing (rule EVT-09).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventRow {
    /// The name in the manual.
    pub name: String,
    /// Event select and unit mask.
    pub select: (u8, u8),
    /// What a counter counts.
    pub event: PmuEvent,
}

/// The requests that MSR_OFFCORE_RSP_x selects. What it selects of the responses depends on the model.
mod offcore {
    pub(super) const DATA_READ: u64 = 1 << 0;
    pub(super) const OWNERSHIP: u64 = 1 << 1;
    pub(super) const CODE_READ: u64 = 1 << 2;
}

/// The kinds that offcore response events count with this MSR_OFFCORE_RSP_x.
fn offcore_kinds(select: u64, model: &ModelDefinition) -> EventKinds {
    use EventKind as K;
    let has = |bits| select & bits != 0;
    let responses = &model.offcore;
    let any = has(responses.any);
    let snooped = responses.no_snoop == 0 || has(responses.no_snoop);
    let hit = any || has(responses.hit) && snooped;
    let miss = any || has(responses.memory) && snooped;
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

/// The counter that has INST_RETIRED.PREC_DIST, C0H/01H; with extended PEBS it is fixed counter 0.
const PREC_DIST_COUNTER: usize = 1;
/// MEM_TRANS_RETIRED.PRECISE_STORE of Sandy Bridge and Ivy Bridge.
pub(super) const PRECISE_STORE: (u8, u8) = (0xcd, 0x02);
/// The counter that has it.
const PRECISE_STORE_COUNTER: usize = 3;
/// The counter that has MEM_TRANS_RETIRED.STORE_SAMPLE of Sapphire Rapids, which has the same selection.
const STORE_SAMPLE_COUNTER: usize = 0;
/// The counter mask with which perf selects cycles: more than can retire in one cycle.
const ALL_CYCLES_MASK: u8 = 0x10;

const fn store_counter(model: &ModelDefinition) -> usize {
    if model.pebs.precise_store {
        PRECISE_STORE_COUNTER
    } else {
        STORE_SAMPLE_COUNTER
    }
}

impl PmuEvent {
    /// What general-purpose counter `counter` counts with this selection, once it is enabled.
    ///
    /// `offcore` is MSR_OFFCORE_RSP_0 and 1, and `model` has the event table.
    pub fn selected(
        select: EventSelect,
        counter: usize,
        offcore: &[u64; 2],
        model: &ModelDefinition,
    ) -> Self {
        let (event, umask) = match (select.event(), select.umask()) {
            // In Nehalem and Westmere, both masks select INST_RETIRED.ANY_P.
            (0xc0, 0x01) if !model.has_prec_dist() && !model.has_event((0xc0, 0x01)) => {
                (0xc0, 0x00)
            }
            selected => selected,
        };
        let distributed =
            counter == PREC_DIST_COUNTER && model.has_prec_dist() && !model.pebs.is_extended();
        let instructions = event == 0xc0 && (umask == 0x00 || (umask == 0x01 && distributed));
        let edge = select.has(EventSelect::EDGE);
        let inverted = select.has(EventSelect::INVERT);
        match (select.cmask(), edge) {
            // INV without a counter mask compares nothing (rule PMU-30).
            (0, false) if instructions && umask == 0x01 => {
                Self::precise(EventKinds::INSTRUCTIONS, PebsTiming::Here)
            }
            // OFFCORE_RESPONSE (rule EVT-15).
            (0, false) if model.offcore.events.contains(&(event, umask)) => {
                let second = model.offcore.events[1] == (event, umask);
                Self::plain(offcore_kinds(offcore[usize::from(second)], model))
            }
            // Stores are sampled in one counter.
            (0, false) if (event, umask) == PRECISE_STORE && counter != store_counter(model) => {
                Self::default()
            }
            (0, false) => model
                .events
                .iter()
                .find(|row| row.select == (event, umask))
                .map_or_else(Self::default, |row| row.event),
            // Fewer than 16 instructions retire in every cycle (rule EVT-10).
            (ALL_CYCLES_MASK, false)
                if inverted
                    && (instructions || model.perfmon.cycle_event == Some((event, umask))) =>
            {
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

    /// What fixed counter `index`, 0 to 3, counts: instructions, core cycles, ticks of the TSC, slots.
    ///
    /// A cycle has this number of slots.
    pub const fn fixed(index: usize, slots: u32) -> Self {
        let event = Self::plain(match index {
            0 => EventKinds::INSTRUCTIONS,
            1 | 3 => EventKinds::CYCLES,
            _ => EventKinds::TSC_TICKS,
        });
        Self {
            slots: if index == 3 { slots } else { 0 },
            ..event
        }
    }

    /// What one of the events adds to a counter.
    pub(super) const fn weight(&self) -> u64 {
        if self.slots == 0 {
            1
        } else {
            self.slots as u64
        }
    }
}
