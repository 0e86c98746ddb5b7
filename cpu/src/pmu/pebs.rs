//! PEBS: the record of format 3, and storing it in the guest's buffer.
//! SDM Vol. 3B, "Processor Event Based Sampling (PEBS)" and "Debug Store (DS) Mechanism".

use hindsight_regs::pmu::{COUNTER_MASK, global, pebs as layout};

use super::counter::{Freeze, PEBS, Pmu, bit};
use super::events::DataOf;
use crate::branch::bts::DsMemory;

/// Words of a record.
const WORDS: usize = layout::RECORD / 8;

/// The processor after the eventing instruction, for a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// RFLAGS after it.
    pub rflags: u64,
    /// RIP after it.
    pub rip: u64,
    /// General registers after it, in the order of their encoding: RAX, RCX, RDX, RBX, RSP and on.
    pub gpr: [u64; 16],
    /// The processor is in 64-bit mode: otherwise R8 to R15 and upper halves are 0 (rule PEBS-28).
    pub long: bool,
    /// RIP of the eventing instruction.
    pub eventing_rip: u64,
    /// The time-stamp counter.
    pub tsc: u64,
    /// About the transaction that was aborted for it or just before it; otherwise 0.
    pub transaction: u64,
}

/// What a record tells of the data that the instruction accessed; SDM Vol. 3B, "Load Latency
/// Performance Monitoring Facility".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Data {
    /// Linear address.
    pub address: u64,
    /// Where it came from, as encoded in the record.
    pub source: u64,
    /// Core cycles that it took.
    pub latency: u64,
}

/// Encoding numbers of the registers, in the order of the record.
const ORDER: [usize; 16] = [0, 3, 1, 2, 6, 7, 5, 4, 8, 9, 10, 11, 12, 13, 14, 15];

/// RFLAGS without reserved bits (rule PEBS-27).
const RFLAGS: u64 = 0x3f_7fd7;

impl Sample {
    /// The record, about the counters in `counters`, and about this data.
    pub fn record(&self, counters: u8, data: Option<Data>) -> [u64; WORDS] {
        use layout::record as at;
        let mut record = [0; WORDS];
        let mask = if self.long { u64::MAX } else { 0xffff_ffff };
        record[at::RFLAGS / 8] = self.rflags & RFLAGS;
        record[at::RIP / 8] = self.rip;
        for (place, &register) in ORDER.iter().enumerate() {
            if self.long || register < 8 {
                record[at::REGISTERS / 8 + place] = self.gpr[register] & mask;
            }
        }
        record[at::COUNTERS / 8] = counters.into();
        let data = data.unwrap_or_default();
        record[at::ADDRESS / 8] = data.address;
        record[at::SOURCE / 8] = data.source;
        record[at::LATENCY / 8] = data.latency;
        record[at::EVENTING_RIP / 8] = self.eventing_rip;
        record[at::TX / 8] = self.transaction;
        record[at::TSC / 8] = self.tsc;
        record
    }
}

/// A record that is to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Due {
    /// IA32_DS_AREA.
    pub area: u64,
    /// The counters it is about: bit n for counter n.
    pub counters: u8,
    /// The data it tells of.
    pub data: Option<Data>,
}

/// How storing a record ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// The index has reached or passed the threshold (rule PEBS-08).
    pub at_threshold: bool,
    /// The reset values of the counters; `None` where an access would have faulted, and nothing
    /// was done (rule DS-06).
    pub reset: Option<[u64; PEBS]>,
}

/// Stores the record that is due, if there is room below the maximum (rule PEBS-09).
pub fn store(memory: &mut impl DsMemory, due: &Due, sample: &Sample) -> Stored {
    try_store(memory, due, sample).unwrap_or_default()
}

fn try_store(memory: &mut impl DsMemory, due: &Due, sample: &Sample) -> Option<Stored> {
    let at = |offset: u64| due.area.wrapping_add(offset);
    let index = memory.read(at(layout::INDEX))?;
    let maximum = memory.read(at(layout::MAXIMUM))?;
    let threshold = memory.read(at(layout::THRESHOLD))?;
    let mut reset = [0; PEBS];
    for (offset, value) in (layout::RESET..).step_by(8).zip(&mut reset) {
        *value = memory.read(at(offset))?;
    }
    let mut stored = Stored {
        at_threshold: false,
        reset: Some(reset),
    };
    let end = index.checked_add(layout::RECORD as u64);
    if let Some(end) = end.filter(|&end| end <= maximum) {
        let record = sample.record(due.counters, due.data);
        if !memory.writable(at(layout::INDEX)) || !memory.write(index, &record) {
            return None;
        }
        if !memory.write(at(layout::INDEX), &[end]) {
            return None;
        }
        stored.at_threshold = end >= threshold;
    }
    Some(stored)
}

impl Pmu {
    /// The counters whose record is to be stored now: bit n for counter n.
    pub const fn due(&self) -> u8 {
        self.due
    }

    /// Which access the record that is due tells of: that of the first counter with one.
    pub fn due_data(&self) -> Option<DataOf> {
        let sources = (0..PEBS).filter(|n| self.due >> n & 1 != 0);
        let mut data = sources.filter_map(|n| self.sources[n]?.data);
        data.next()
    }

    /// Cycles above which a load counts as late: MSR_PEBS_LD_LAT_THRESHOLD.
    pub const fn latency_threshold(&self) -> u64 {
        self.latency_threshold
    }

    /// The record that was due is stored, or cannot be: reloads the counters. Answers whether an
    /// interrupt is requested (rules PEBS-06 to PEBS-12, PEBS-21).
    #[must_use]
    pub fn stored(&mut self, stored: &Stored, freeze: Freeze) -> bool {
        let due = core::mem::take(&mut self.due);
        let overflowed = core::mem::take(&mut self.armed) | due;
        let mut pmi = stored.at_threshold;
        for n in (0..PEBS).filter(|n| overflowed >> n & 1 != 0) {
            pmi |= self.sources[n].is_some_and(|source| source.interrupts);
            if let Some(reset) = stored.reset {
                self.values[n] = reset[n] & COUNTER_MASK;
                self.status &= !bit(n);
            }
        }
        if stored.at_threshold {
            self.status |= global::DS_BUFFER;
        }
        if pmi {
            self.freeze(freeze);
        }
        pmi
    }
}
