//! The counters: what makes them run, overflow, and the freeze that follows.

use hindsight_regs::branch::DebugCtl;
use hindsight_regs::pmu::pebs::DataConfig;
use hindsight_regs::pmu::{EventSelect, FIXED_COUNTERS_MAX, FixedControl, GP_COUNTERS_MAX, global};

use super::access;
use super::events::{EventKinds, EventTotals, Rings};
use super::metrics::SlotTotals;
use super::selection::{PRECISE_STORE, PebsTiming, PmuEvent, SampledAccess};
use crate::model::{CpuModel, ModelDefinition};
use crate::transaction::TransactionEvent;

/// Number of general-purpose counters that a unit can have.
pub(super) const GP: usize = GP_COUNTERS_MAX as usize;
/// Number of all counters: the general-purpose ones, then the fixed ones.
pub(super) const ALL: usize = GP + FIXED_COUNTERS_MAX as usize;

/// The bit of a counter in the global registers.
pub(super) const fn bit(counter: usize) -> u64 {
    if counter < GP {
        1 << counter
    } else {
        1 << (global::FIXED as usize + counter - GP)
    }
}

/// Per-machine constants behind the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmuConfig {
    /// Frequency of the TSC in Hz, not 0.
    pub tsc_hz: u64,
    /// PEBS exists.
    pub pebs: bool,
    /// A branch predictor and caches are modelled; otherwise their events count nothing.
    pub uarch: bool,
    /// Number of general-purpose counters: 2, 4 or 8.
    pub counters: u32,
    /// The processor model, which has the events.
    pub model: CpuModel,
}

impl PmuConfig {
    /// The bits of the existing counters in the global registers.
    pub(super) fn all_counters(&self) -> u64 {
        let perfmon = self.model.definition().perfmon;
        perfmon.counters_in_global(self.counters)
    }
}

/// What a request for a PMI freezes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PmiFreeze {
    /// FREEZE_PERFMON_ON_PMI.
    pub counters: bool,
    /// FREEZE_LBRS_ON_PMI.
    pub lbrs: bool,
}

impl PmiFreeze {
    /// The freezes that IA32_DEBUGCTL selects.
    ///
    /// SDM Vol. 3B, "Freezing LBR and Performance Counters on PMI".
    pub const fn from_debugctl(ctl: DebugCtl) -> Self {
        Self {
            counters: ctl.contains(DebugCtl::FREEZE_PERFMON_ON_PMI),
            lbrs: ctl.contains(DebugCtl::FREEZE_LBRS_ON_PMI),
        }
    }
}

/// What a running counter counts, and what its overflow does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RunningCounter {
    pub(super) event: PmuEvent,
    pub(super) rings: Rings,
    /// An overflow requests an interrupt.
    pub(super) interrupts: bool,
    /// An overflow leads to a PEBS record, taken then.
    pub(super) precise: Option<PebsTiming>,
    /// The access that its PEBS records describe.
    pub(super) data: Option<SampledAccess>,
    /// Its PEBS records have the groups of MSR_PEBS_DATA_CFG.
    pub(super) adaptive: bool,
    /// IN_TX: it counts inside transactions only.
    pub(super) in_tx: bool,
    /// IN_TXCP: a transactional abort subtracts what the counter counted in the transaction.
    pub(super) in_txcp: bool,
}

/// The performance-monitoring unit of one processor.
#[derive(Clone, Debug)]
pub struct Pmu {
    pub(super) config: PmuConfig,
    pub(super) model: &'static ModelDefinition,
    /// The bits of a counter.
    pub(super) counter_mask: u64,
    /// Within `counter_mask`.
    pub(super) values: [u64; ALL],
    pub(super) selects: [u64; GP],
    pub(super) fixed_control: u64,
    pub(super) global_control: u64,
    pub(super) status: u64,
    /// What MSR_PERF_METRICS is made of.
    pub(super) slots: SlotTotals,
    pub(super) pebs_enable: u64,
    pub(super) pebs_data_config: DataConfig,
    pub(super) latency_threshold: u64,
    pub(super) frontend: u64,
    /// MSR_OFFCORE_RSP_0 and 1.
    pub(super) offcore: [u64; 2],
    /// PEBS counters that overflowed and take their record at the next event, by [`bit`].
    pub(super) armed: u64,
    /// PEBS counters whose record must be stored now.
    pub(super) due: u64,
    /// The counters that run; derived from the registers.
    pub(super) running: [Option<RunningCounter>; ALL],
    /// The totals up to which the counters have counted.
    pub(super) counted: EventTotals,
    /// Inside a transaction: the counters at its start. Not saved: no transaction outlives a run.
    pub(super) transaction: Option<[u64; ALL]>,
}

impl Pmu {
    /// The unit after RESET.
    pub fn new(config: PmuConfig) -> Self {
        debug_assert!(
            matches!(config.counters, 2 | 4 | 8),
            "2, 4 or 8 general-purpose counters"
        );
        let model = config.model.definition();
        Self {
            config,
            model,
            counter_mask: model.perfmon.counter_mask(),
            values: [0; ALL],
            selects: [0; GP],
            fixed_control: 0,
            // The general-purpose counters (rule PMU-03).
            global_control: config.all_counters() & 0xff,
            status: 0,
            slots: SlotTotals::default(),
            pebs_enable: 0,
            pebs_data_config: DataConfig(0),
            latency_threshold: 0,
            frontend: 0,
            offcore: [0; 2],
            armed: 0,
            due: 0,
            running: [None; ALL],
            counted: EventTotals::default(),
            transaction: None,
        }
    }

    /// Applies INIT: PEBS is disabled, all else stays (rules PMU-04, RST-09).
    pub fn init(&mut self) {
        self.pebs_enable = 0;
        (self.armed, self.due) = (0, 0);
        self.refresh();
    }

    /// Advances the counters to `totals`. Returns whether they request a PMI.
    ///
    /// Several overflows at once request one PMI. [`Pmu::due`] may change too.
    #[must_use]
    pub fn sync(&mut self, totals: &EventTotals, freeze: PmiFreeze) -> bool {
        let mut pmi = false;
        for counter in 0..ALL {
            let Some(source) = self.running[counter] else {
                continue;
            };
            if source.in_tx && self.transaction.is_none() {
                continue;
            }
            debug_assert!(self.values[counter] <= self.counter_mask, "no such value");
            let new = self.count(&source, totals);
            if new != 0 {
                pmi |= self.advance(counter, &source, new);
            }
        }
        self.count_metrics(totals);
        self.counted = *totals;
        if pmi {
            self.freeze(freeze);
        }
        pmi
    }

    /// Begins or ends a transaction, at the totals of the last [`Pmu::sync`].
    pub fn transaction(&mut self, event: TransactionEvent) {
        let start = self.transaction.take();
        match (event, start) {
            (TransactionEvent::Begun, _) => self.transaction = Some(self.values),
            (TransactionEvent::Aborted(_), Some(start)) => {
                let counters = self.values.iter_mut().zip(&start).zip(&self.running);
                for ((value, start), source) in counters {
                    if source.is_some_and(|source| source.in_txcp) {
                        *value = *start;
                    }
                }
            }
            _ => {}
        }
    }

    /// Events of a counter since the last [`Pmu::sync`].
    fn count(&self, source: &RunningCounter, totals: &EventTotals) -> u64 {
        let RunningCounter { event, rings, .. } = *source;
        let (new, old) = (
            totals.sum(event.kinds, rings),
            self.counted.sum(event.kinds, rings),
        );
        if event.crystal {
            return self.crystal(new).wrapping_sub(self.crystal(old));
        }
        new.wrapping_sub(old).wrapping_mul(event.weight())
    }

    /// Ticks of the crystal in `ticks` of the TSC, modulo 2^64 (rule EVT-05).
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the crystal is slower than the TSC; what is lost counts modulo 2^64"
    )]
    fn crystal(&self, ticks: u64) -> u64 {
        let hz = u128::from(self.model.reference_hz);
        (u128::from(ticks) * hz / u128::from(self.config.tsc_hz.max(1))) as u64
    }

    /// Adds `new` events to a counter. Returns whether it requests a PMI.
    fn advance(&mut self, counter: usize, source: &RunningCounter, new: u64) -> bool {
        let sum = self.values[counter].saturating_add(new);
        let overflow = sum > self.counter_mask;
        self.values[counter] = sum & self.counter_mask;
        if overflow {
            self.status |= bit(counter);
        }
        let Some(precise) = source.precise else {
            return overflow && source.interrupts;
        };
        let this = bit(counter);
        // A counter that was armed before this event records it.
        self.due |= self.armed & this;
        if overflow {
            self.armed |= this;
            if precise == PebsTiming::Here || sum & self.counter_mask != 0 {
                self.due |= this;
            }
        }
        // A PEBS counter interrupts after its record (rule PEBS-21).
        false
    }

    /// Applies the freezes of a PMI that this unit or branch trace store requests.
    ///
    /// Rules FRZ-01, FRZ-02 and FRZ-07.
    pub fn freeze(&mut self, freeze: PmiFreeze) {
        if self.freezes_by_status() {
            if freeze.counters {
                self.status |= global::CTR_FRZ;
            }
            if freeze.lbrs {
                self.status |= global::LBR_FRZ;
            }
        } else if freeze.counters {
            self.global_control = 0;
        }
        self.refresh();
    }

    /// Whether a freeze sets status bits, from version 4 on, and not clears enable bits.
    pub(crate) fn freezes_by_status(&self) -> bool {
        self.model.perfmon.version >= 4
    }

    /// IA32_PERF_GLOBAL_STATUS.
    pub(crate) const fn status(&self) -> u64 {
        self.status
    }

    /// Whether the LBR stack is frozen: IA32_PERF_GLOBAL_STATUS.LBR_FRZ.
    pub const fn lbrs_frozen(&self) -> bool {
        self.status & global::LBR_FRZ != 0
    }

    /// Derives the running counters from the registers.
    pub(super) fn refresh(&mut self) {
        let frozen = self.status & global::CTR_FRZ != 0;
        for counter in 0..ALL {
            let on = !frozen && self.global_control & bit(counter) != 0;
            self.running[counter] = self.selected(counter).filter(|_| on);
        }
    }

    /// What a counter counts if the global registers enable it.
    pub(super) fn selected(&self, counter: usize) -> Option<RunningCounter> {
        let source = if counter < GP {
            self.general(counter)?
        } else {
            let index = counter - GP;
            let control = FixedControl::of(self.fixed_control, index);
            let adaptive = self.fixed_control & FixedControl::adaptive_record(index);
            RunningCounter {
                event: PmuEvent::fixed(index, self.model.perfmon.slots),
                rings: Rings {
                    os: control.has(FixedControl::OS),
                    user: control.has(FixedControl::USR),
                },
                interrupts: control.has(FixedControl::PMI),
                precise: self.extended_pebs(counter).then_some(PebsTiming::Here),
                data: None,
                adaptive: adaptive != 0,
                in_tx: false,
                in_txcp: false,
            }
        };
        (!source.rings.is_empty() && source.event != PmuEvent::default()).then_some(source)
    }

    /// Whether a counter takes PEBS records of any event.
    const fn extended_pebs(&self, counter: usize) -> bool {
        self.model.pebs.is_extended() && self.pebs_enable & bit(counter) != 0
    }

    fn general(&self, counter: usize) -> Option<RunningCounter> {
        let select = EventSelect(self.selects[counter]);
        if !select.has(EventSelect::ENABLE) {
            return None;
        }
        let mut event = PmuEvent::selected(select, counter, &self.offcore, self.model);
        if !self.config.uarch && event.kinds.intersects(EventKinds::MODELLED) {
            event = PmuEvent::default();
        }
        let of_store =
            self.model.pebs.precise_store && (select.event(), select.umask()) == PRECISE_STORE;
        let has_data = !of_store || self.pebs_enable & access::PRECISE_STORE != 0;
        let pebs = self.pebs_enable & bit(counter) != 0 && !select.has(EventSelect::ANY_THREAD);
        // Extended PEBS takes records of events that are not precise, too.
        let timing = match event.precise {
            None if self.model.pebs.is_extended() => Some(PebsTiming::Here),
            timing => timing,
        };
        Some(RunningCounter {
            event,
            rings: Rings {
                os: select.has(EventSelect::OS),
                user: select.has(EventSelect::USR),
            },
            interrupts: select.has(EventSelect::INT),
            precise: timing.filter(|_| pebs),
            data: event.data.filter(|_| pebs && has_data),
            adaptive: select.has(EventSelect::ADAPTIVE_RECORD),
            in_tx: select.has(EventSelect::IN_TX),
            in_txcp: select.has(EventSelect::IN_TXCP),
        })
    }
}
