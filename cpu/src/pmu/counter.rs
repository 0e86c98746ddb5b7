//! Counting: the counters, what makes them run, overflow, and the freeze that follows.

use hindsight_regs::pmu::{
    COUNTER_MASK, EventSelect, FIXED_COUNTERS, FixedControl, GP_COUNTERS, GP_COUNTERS_MAX, global,
};

use crate::transaction::Step;

use super::events::{DataOf, Event, EventTotals, Kinds, Precise, Rings};
use crate::cpuid::CRYSTAL_HZ;

/// General-purpose counters, if there are as many.
pub(super) const GP: usize = GP_COUNTERS_MAX as usize;
/// Counters that can take PEBS records: the first ones.
pub(super) const PEBS: usize = GP_COUNTERS as usize;
/// All counters: the general-purpose ones, then the fixed ones.
pub(super) const ALL: usize = GP + FIXED_COUNTERS as usize;

/// The bit of a counter in the global registers.
pub(super) const fn bit(counter: usize) -> u64 {
    if counter < GP {
        1 << counter
    } else {
        1 << (global::FIXED as usize + counter - GP)
    }
}

/// What the unit depends on besides its MSRs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmuConfig {
    /// Frequency of the TSC in Hz, not 0.
    pub tsc_hz: u64,
    /// There is PEBS.
    pub pebs: bool,
    /// A predictor and caches are modelled; otherwise their events count nothing.
    pub models: bool,
    /// General-purpose counters: 4 or 8.
    pub counters: u32,
}

impl PmuConfig {
    /// The bits of the counters that there are, in the global registers.
    pub(super) const fn all_counters(&self) -> u64 {
        if self.counters > GP_COUNTERS {
            global::COUNTERS | global::UPPER_COUNTERS
        } else {
            global::COUNTERS
        }
    }
}

/// What IA32_DEBUGCTL makes a request for an interrupt freeze.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Freeze {
    /// FREEZE_PERFMON_ON_PMI.
    pub counters: bool,
    /// FREEZE_LBRS_ON_PMI.
    pub lbrs: bool,
}

impl Freeze {
    /// What a value of IA32_DEBUGCTL says. SDM Vol. 3B, "Freezing LBR and Performance Counters on
    /// PMI".
    pub const fn by_debugctl(value: u64) -> Self {
        Self {
            counters: value & 1 << 12 != 0,
            lbrs: value & 1 << 11 != 0,
        }
    }
}

/// A counter that runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) event: Event,
    pub(super) rings: Rings,
    /// An overflow requests an interrupt.
    pub(super) interrupts: bool,
    /// An overflow leads to a PEBS record.
    pub(super) precise: Option<Precise>,
    /// What its records tell of the data.
    pub(super) data: Option<DataOf>,
    /// It counts in transactions only: IN_TX.
    pub(super) inside: bool,
    /// It does not count transactions that are aborted: IN_TXCP.
    pub(super) committed: bool,
}

/// The performance-monitoring unit of one processor.
#[derive(Clone, Debug)]
pub struct Pmu {
    pub(super) config: PmuConfig,
    /// 48 bits each.
    pub(super) values: [u64; ALL],
    pub(super) selects: [u64; GP],
    pub(super) fixed_control: u64,
    pub(super) global_control: u64,
    pub(super) status: u64,
    pub(super) pebs_enable: u64,
    pub(super) latency_threshold: u64,
    pub(super) frontend: u64,
    /// PEBS counters that overflowed and wait for the next event: bit n for counter n.
    pub(super) armed: u8,
    /// PEBS counters whose record must be stored now.
    pub(super) due: u8,
    /// What each counter counts while it runs; follows from the registers.
    pub(super) sources: [Option<Source>; ALL],
    /// The totals up to which the counters have counted.
    pub(super) seen: EventTotals,
    /// In a transaction: the counters at its start. Not part of the saved state, where there is none.
    pub(super) transaction: Option<[u64; ALL]>,
}

impl Pmu {
    /// The unit after RESET.
    pub fn new(config: PmuConfig) -> Self {
        Self {
            config,
            values: [0; ALL],
            selects: [0; GP],
            fixed_control: 0,
            // The general-purpose counters (rule PMU-03).
            global_control: config.all_counters() & 0xff,
            status: 0,
            pebs_enable: 0,
            latency_threshold: 0,
            frontend: 0,
            armed: 0,
            due: 0,
            sources: [None; ALL],
            seen: EventTotals::default(),
            transaction: None,
        }
    }

    /// INIT: PEBS is switched off, all else stays (rules PMU-04, RST-09).
    pub fn init(&mut self) {
        self.pebs_enable = 0;
        (self.armed, self.due) = (0, 0);
        self.refresh();
    }

    /// Moves the counters up to `totals`. Answers whether one interrupt is requested, through the
    /// LVT entry for performance monitoring; [`Pmu::due`] may have changed too.
    #[must_use]
    pub fn sync(&mut self, totals: &EventTotals, freeze: Freeze) -> bool {
        let mut pmi = false;
        for counter in 0..ALL {
            let Some(source) = self.sources[counter] else {
                continue;
            };
            if source.inside && self.transaction.is_none() {
                continue;
            }
            let new = self.count(&source, totals);
            if new != 0 {
                pmi |= self.advance(counter, &source, new);
            }
        }
        self.seen = *totals;
        if pmi {
            self.freeze(freeze);
        }
        pmi
    }

    /// A transaction begins or ends, at the totals seen last.
    pub fn transaction(&mut self, step: Step) {
        let start = self.transaction.take();
        match (step, start) {
            (Step::Begun, _) => self.transaction = Some(self.values),
            (Step::Aborted(_), Some(start)) => {
                let counters = self.values.iter_mut().zip(&start).zip(&self.sources);
                for ((value, start), source) in counters {
                    if source.is_some_and(|source| source.committed) {
                        *value = *start;
                    }
                }
            }
            _ => {}
        }
    }

    /// Events of a counter between the totals seen last and these.
    fn count(&self, source: &Source, totals: &EventTotals) -> u64 {
        let Source { event, rings, .. } = *source;
        let (new, old) = (
            totals.sum(event.kinds, rings),
            self.seen.sum(event.kinds, rings),
        );
        if event.crystal {
            return self.crystal(new).wrapping_sub(self.crystal(old));
        }
        new.wrapping_sub(old)
    }

    /// Ticks of the crystal in as many ticks of the TSC (rule EVT-05).
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the crystal is slower than the TSC; what is lost counts modulo 2^64"
    )]
    fn crystal(&self, ticks: u64) -> u64 {
        (u128::from(ticks) * u128::from(CRYSTAL_HZ) / u128::from(self.config.tsc_hz.max(1))) as u64
    }

    /// Adds to a counter; answers whether an interrupt is requested.
    fn advance(&mut self, counter: usize, source: &Source, new: u64) -> bool {
        let sum = self.values[counter].saturating_add(new);
        let overflow = sum > COUNTER_MASK;
        self.values[counter] = sum & COUNTER_MASK;
        if overflow {
            self.status |= bit(counter);
        }
        let Some(precise) = source.precise else {
            return overflow && source.interrupts;
        };
        // Bits of PEBS counters: the general-purpose ones only.
        let this = 1_u8 << counter;
        // Armed before this event: the event is the one to record.
        self.due |= self.armed & this;
        if overflow {
            self.armed |= this;
            if precise == Precise::Here || sum & COUNTER_MASK != 0 {
                self.due |= this;
            }
        }
        // The interrupt of a PEBS counter comes after its record (rule PEBS-21).
        false
    }

    /// A request for an interrupt was made, here or by branch trace store: freezes what
    /// IA32_DEBUGCTL says (rules FRZ-01, FRZ-02, FRZ-07).
    pub fn freeze(&mut self, freeze: Freeze) {
        if freeze.counters {
            self.status |= global::CTR_FRZ;
        }
        if freeze.lbrs {
            self.status |= global::LBR_FRZ;
        }
        self.refresh();
    }

    /// LBR_FRZ: the LBR stack does not record.
    pub const fn lbrs_frozen(&self) -> bool {
        self.status & global::LBR_FRZ != 0
    }

    /// Finds out what runs, after a change of the registers.
    pub(super) fn refresh(&mut self) {
        let frozen = self.status & global::CTR_FRZ != 0;
        for counter in 0..ALL {
            let on = !frozen && self.global_control & bit(counter) != 0;
            self.sources[counter] = self.selected(counter).filter(|_| on);
        }
    }

    /// What a counter counts once the global registers let it.
    pub(super) fn selected(&self, counter: usize) -> Option<Source> {
        let source = if counter < GP {
            self.general(counter)?
        } else {
            let control = FixedControl::of(self.fixed_control, counter - GP);
            Source {
                event: Event::fixed(counter - GP),
                rings: Rings {
                    os: control.has(FixedControl::OS),
                    user: control.has(FixedControl::USR),
                },
                interrupts: control.has(FixedControl::PMI),
                precise: None,
                data: None,
                inside: false,
                committed: false,
            }
        };
        (!source.rings.is_empty() && source.event != Event::default()).then_some(source)
    }

    fn general(&self, counter: usize) -> Option<Source> {
        let select = EventSelect(self.selects[counter]);
        if !select.has(EventSelect::ENABLE) {
            return None;
        }
        let mut event = Event::selected(select, counter);
        if !self.config.models && event.kinds.meets(Kinds::MODELLED) {
            event = Event::default();
        }
        let pebs = self.pebs_enable >> counter & 1 != 0 && !select.has(EventSelect::ANY_THREAD);
        Some(Source {
            event,
            rings: Rings {
                os: select.has(EventSelect::OS),
                user: select.has(EventSelect::USR),
            },
            interrupts: select.has(EventSelect::INT),
            precise: event.precise.filter(|_| pebs),
            data: event.data.filter(|_| pebs),
            inside: select.has(EventSelect::IN_TX),
            committed: select.has(EventSelect::IN_TXCP),
        })
    }
}
