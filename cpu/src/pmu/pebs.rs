//! PEBS: the records of formats 0 to 4, and the buffer in guest memory.
//!
//! SDM Vol. 3B, "Processor Event Based Sampling (PEBS)" and "Debug Store (DS) Mechanism".

use hindsight_regs::branch::LBR_DEPTH;
use hindsight_regs::pmu::pebs::DataConfig;
use hindsight_regs::pmu::{global, pebs as layout};
use hindsight_regs::rflags::Rflags;

use super::counter::{ALL, PmiFreeze, Pmu, bit};
use super::selection::SampledAccess;
use crate::branch::bts::DsMemory;
use crate::model::PebsModel;

/// Words of a record of format 3.
const WORDS: usize = layout::RECORD / 8;

/// The records of a model: those of formats 0 to 2 are a prefix of format 3.
///
/// SDM Vol. 3B, tables "PEBS Record Format" of each generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PebsRecords {
    /// Bytes of a record.
    bytes: usize,
    /// Number of reset values in the DS management area.
    counters: usize,
    /// The field at 90H is IA32_PERF_GLOBAL_STATUS, and not the counters that overflowed.
    global_status: bool,
    /// Format 4: the groups of a record.
    adaptive: Option<DataConfig>,
    /// The latency of the memory group is two.
    cache_latency: bool,
}

impl PebsRecords {
    /// The records of this model.
    ///
    /// Those of format 4 have `groups`.
    const fn of(model: &PebsModel, groups: DataConfig) -> Self {
        let bytes = match model.format {
            0 => layout::record::COUNTERS,
            1 => layout::record::EVENTING_RIP,
            2 => layout::record::TSC,
            3 => layout::RECORD,
            _ => groups.record_bytes(),
        };
        Self {
            bytes,
            counters: match model.is_extended() {
                true => ALL,
                false => model.counters as usize,
            },
            global_status: model.format < 3,
            adaptive: match model.is_extended() {
                true => Some(groups),
                false => None,
            },
            cache_latency: model.cache_latency,
        }
    }

    /// Whether a record has entries of the LBR stack: [`PebsSample::lbr`] is needed.
    pub fn has_lbr(&self) -> bool {
        self.adaptive
            .is_some_and(|groups| groups.has(DataConfig::LBRS))
    }

    /// Whether a record has XMM registers: [`PebsSample::xmm`] is needed.
    pub fn has_xmm(&self) -> bool {
        self.adaptive
            .is_some_and(|groups| groups.has(DataConfig::XMMS))
    }
}

/// FROM, TO and INFO of the entries of an LBR stack, the newest one first; 0 in those that do not exist.
pub type PebsLbr = [[u64; 3]; LBR_DEPTH];

/// State of the processor after the eventing instruction, for a PEBS record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PebsSample {
    /// RFLAGS after the eventing instruction.
    pub rflags: u64,
    /// RIP after the eventing instruction.
    pub rip: u64,
    /// General registers after the eventing instruction, in the order of their encodings.
    pub gpr: [u64; 16],
    /// 64-bit mode; outside of it R8 to R15 and upper halves are 0 in the record (rule PEBS-28).
    pub long: bool,
    /// RIP of the eventing instruction.
    pub eventing_rip: u64,
    /// The time-stamp counter.
    pub tsc: u64,
    /// Abort information of a transaction that the event or its instruction aborted; otherwise 0.
    pub transaction: u64,
    /// XMM0 to XMM15, the low half of each first; those that do not exist in this mode are 0.
    ///
    /// For records with [`PebsRecords::has_xmm`].
    pub xmm: [[u64; 2]; 16],
    /// The LBR stack, for records with [`PebsRecords::has_lbr`].
    pub lbr: PebsLbr,
}

/// The data that the eventing instruction accessed.
///
/// SDM Vol. 3B, "Load Latency Performance Monitoring Facility".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PebsData {
    /// Linear address.
    pub address: u64,
    /// Data source encoding.
    pub source: u64,
    /// Latency in core cycles.
    pub latency: u64,
}

impl PebsData {
    /// The data with two latencies: that of the instruction, and in bits 47:32 that of the cache.
    ///
    /// Nothing but the load takes time, so they are the same. They saturate at 16 bits.
    fn with_cache_latency(self) -> Self {
        let latency = self.latency.min(0xffff);
        Self {
            latency: latency | latency << 32,
            ..self
        }
    }
}

/// Encoding numbers of the registers, in record order.
const ORDER: [usize; 16] = [0, 3, 1, 2, 6, 7, 5, 4, 8, 9, 10, 11, 12, 13, 14, 15];

/// The words of the basic group.
mod basic {
    /// The groups of the record, and its bytes from this bit on.
    pub(super) const SIZE_SHIFT: u32 = 48;
}

/// The bits of RFLAGS in a record: no reserved ones (rule PEBS-27).
const RFLAGS: u64 = Rflags::all().bits();

impl PebsSample {
    /// The record of format 3 with this value of the field at 90H and this data.
    pub fn record(&self, counters: u64, data: Option<PebsData>) -> [u64; WORDS] {
        use layout::record as at;
        let mut record = [0; WORDS];
        let mask = if self.long { u64::MAX } else { 0xffff_ffff };
        record[at::RFLAGS / 8] = self.rflags & RFLAGS;
        record[at::RIP / 8] = self.rip;
        for (position, &register) in ORDER.iter().enumerate() {
            if self.long || register < 8 {
                record[at::REGISTERS / 8 + position] = self.gpr[register] & mask;
            }
        }
        record[at::COUNTERS / 8] = counters;
        let data = data.unwrap_or_default();
        record[at::ADDRESS / 8] = data.address;
        record[at::SOURCE / 8] = data.source;
        record[at::LATENCY / 8] = data.latency;
        record[at::EVENTING_RIP / 8] = self.eventing_rip;
        record[at::TX / 8] = self.transaction;
        record[at::TSC / 8] = self.tsc;
        record
    }

    /// The record of format 4 with these groups.
    ///
    /// SDM Vol. 3B, "Adaptive PEBS".
    pub fn adaptive_record(
        &self,
        groups: DataConfig,
        counters: u64,
        data: Option<PebsData>,
    ) -> Vec<u64> {
        let bytes = groups.record_bytes();
        let format = groups.0 | (bytes as u64) << basic::SIZE_SHIFT;
        let mut record = Vec::with_capacity(bytes / 8);
        record.extend([format, self.eventing_rip, counters, self.tsc]);
        if groups.has(DataConfig::MEMORY) {
            let data = data.unwrap_or_default();
            record.extend([data.address, data.source, data.latency, self.transaction]);
        }
        if groups.has(DataConfig::GPRS) {
            record.extend([self.rflags & RFLAGS, self.rip]);
            // Rule PEBS-28.
            let mask = if self.long { u64::MAX } else { 0xffff_ffff };
            record.extend(self.gpr.iter().enumerate().map(|(register, value)| {
                if self.long || register < 8 {
                    value & mask
                } else {
                    0
                }
            }));
        }
        if groups.has(DataConfig::XMMS) {
            record.extend(self.xmm.as_flattened());
        }
        let entries = self.lbr.iter().copied().chain(std::iter::repeat([0; 3]));
        record.extend(entries.take(groups.lbr_entries()).flatten());
        debug_assert_eq!(8 * record.len(), bytes, "the groups have their sizes");
        record
    }
}

/// A PEBS record that must be stored now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PebsDue {
    /// IA32_DS_AREA.
    pub area: u64,
    /// The counters that overflowed, as in IA32_PERF_GLOBAL_STATUS.
    pub counters: u64,
    /// IA32_PERF_GLOBAL_STATUS.
    pub status: u64,
    /// The format of the record.
    pub records: PebsRecords,
    /// The data that it describes.
    pub data: Option<PebsData>,
}

/// The outcome of [`store`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PebsOutcome {
    /// The index is at or above the threshold (rule PEBS-08).
    pub at_threshold: bool,
    /// The reset values of the counters; `None` if an access would fault, and nothing was stored
    /// (rule DS-06).
    pub reset: Option<[u64; ALL]>,
}

/// Stores the PEBS record that is due, if it fits below the absolute maximum (rule PEBS-09).
pub fn store(memory: &mut impl DsMemory, due: &PebsDue, sample: &PebsSample) -> PebsOutcome {
    try_store(memory, due, sample).unwrap_or_default()
}

fn try_store(
    memory: &mut impl DsMemory,
    due: &PebsDue,
    sample: &PebsSample,
) -> Option<PebsOutcome> {
    let at = |offset: u64| due.area.wrapping_add(offset);
    let index = memory.read(at(layout::INDEX))?;
    let maximum = memory.read(at(layout::MAXIMUM))?;
    let threshold = memory.read(at(layout::THRESHOLD))?;
    let mut reset = [0; ALL];
    let values = reset.iter_mut().take(due.records.counters);
    for (offset, value) in (layout::RESET..).step_by(8).zip(values) {
        *value = memory.read(at(offset))?;
    }
    let mut outcome = PebsOutcome {
        at_threshold: false,
        reset: Some(reset),
    };
    let end = index.checked_add(due.records.bytes as u64);
    if let Some(end) = end.filter(|&end| end <= maximum) {
        let counters = match due.records.global_status {
            true => due.status,
            false => due.counters,
        };
        let (fixed, adaptive);
        let record = match due.records.adaptive {
            Some(groups) => {
                let mut data = due.data;
                if due.records.cache_latency {
                    data = data.map(PebsData::with_cache_latency);
                }
                adaptive = sample.adaptive_record(groups, counters, data);
                &adaptive[..]
            }
            None => {
                fixed = sample.record(counters, due.data);
                &fixed[..due.records.bytes / 8]
            }
        };
        if !memory.writable(at(layout::INDEX)) || !memory.write(index, record) {
            return None;
        }
        if !memory.write(at(layout::INDEX), &[end]) {
            return None;
        }
        outcome.at_threshold = end >= threshold;
    }
    Some(outcome)
}

impl Pmu {
    /// The counters whose record must be stored now, as in IA32_PERF_GLOBAL_STATUS.
    pub const fn due(&self) -> u64 {
        self.due
    }

    /// The format of the record that is due.
    ///
    /// Of several counters, one that is adaptive makes the record so. The counters may have been
    /// frozen since the record became due.
    pub fn due_records(&self) -> PebsRecords {
        let mut due = (0..ALL).filter(|&n| self.due & bit(n) != 0);
        let groups = match due.any(|n| self.selected(n).is_some_and(|source| source.adaptive)) {
            true => self.pebs_data_config,
            false => DataConfig(0),
        };
        PebsRecords::of(&self.model.pebs, groups)
    }

    /// The access that the due record describes: that of the first counter with one.
    pub fn due_access(&self) -> Option<SampledAccess> {
        let due = (0..ALL).filter(|&n| self.due & bit(n) != 0);
        let mut data = due.filter_map(|n| self.selected(n)?.data);
        data.next()
    }

    /// Latency in core cycles above which a load is late: MSR_PEBS_LD_LAT_THRESHOLD.
    pub const fn latency_threshold(&self) -> u64 {
        self.latency_threshold
    }

    /// Reloads the counters of the record that was due. Returns whether it requests a PMI.
    ///
    /// Rules PEBS-06 to PEBS-12 and PEBS-21.
    #[must_use]
    pub fn record_done(&mut self, outcome: &PebsOutcome, freeze: PmiFreeze) -> bool {
        let due = core::mem::take(&mut self.due);
        let overflowed = core::mem::take(&mut self.armed) | due;
        let mut pmi = outcome.at_threshold;
        for n in (0..ALL).filter(|&n| overflowed & bit(n) != 0) {
            pmi |= self.running[n].is_some_and(|source| source.interrupts);
            if let Some(reset) = outcome.reset {
                self.values[n] = reset[n] & self.counter_mask;
                self.status &= !bit(n);
            }
        }
        if outcome.at_threshold {
            self.status |= global::DS_BUFFER;
        }
        if pmi {
            self.freeze(freeze);
        }
        pmi
    }
}
