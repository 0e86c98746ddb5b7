//! PEBS: the record of format 3, and storing it in the guest's buffer.
//! SDM Vol. 3B, "Processor Event Based Sampling (PEBS)" and "Debug Store (DS) Mechanism".

use hindsight_regs::pmu::{COUNTER_MASK, pebs as layout};

use super::counter::{Freeze, GP, Occurred, Pmu, bit};

pub use hindsight_regs::pmu::pebs::RECORD;

/// A store to the DS area would fault: the record is dropped (rule DS-06).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unmapped;

/// Guest memory as the DS mechanism sees it: linear addresses through the current page tables, with
/// supervisor privilege, with no exception (rules DS-04, DS-06, DS-07).
pub trait DsMemory {
    /// Reads bytes.
    ///
    /// # Errors
    ///
    /// [`Unmapped`] where the processor would fault.
    fn read(&mut self, linear: u64, data: &mut [u8]) -> Result<(), Unmapped>;

    /// Writes bytes, all or none.
    ///
    /// # Errors
    ///
    /// [`Unmapped`] where the processor would fault; nothing is written then.
    fn write(&mut self, linear: u64, data: &[u8]) -> Result<(), Unmapped>;
}

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
}

/// Encoding numbers of the registers, in the order of the record.
const ORDER: [usize; 16] = [0, 3, 1, 2, 6, 7, 5, 4, 8, 9, 10, 11, 12, 13, 14, 15];

/// RFLAGS without reserved bits (rule PEBS-27).
const RFLAGS: u64 = 0x3f_7fd7;

impl Sample {
    /// The record, about the counters in `counters`.
    pub fn record(&self, counters: u8) -> [u8; RECORD] {
        use layout::record as at;
        let mut record = [0; RECORD];
        let mut put = |offset: usize, value: u64| {
            record[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
        };
        let mask = if self.long { u64::MAX } else { 0xffff_ffff };
        put(at::RFLAGS, self.rflags & RFLAGS);
        put(at::RIP, self.rip);
        for (place, &register) in ORDER.iter().enumerate() {
            if self.long || register < 8 {
                put(at::REGISTERS + 8 * place, self.gpr[register] & mask);
            }
        }
        put(at::COUNTERS, counters.into());
        put(at::EVENTING_RIP, self.eventing_rip);
        put(at::TSC, self.tsc);
        record
    }
}

/// The PEBS half of the DS buffer management area, as it is now (rules DS-09, DS-10).
struct Buffer {
    index: u64,
    maximum: u64,
    threshold: u64,
    reset: [u64; GP],
}

impl Buffer {
    fn read(memory: &mut impl DsMemory, area: u64) -> Result<Self, Unmapped> {
        // Base, index, maximum, threshold, and the reset values.
        let mut bytes = [0; 8 * (4 + GP)];
        memory.read(area.wrapping_add(layout::BASE), &mut bytes)?;
        let (fields, _) = bytes.as_chunks::<8>();
        let field = |offset: u64| {
            let at = usize::try_from((offset - layout::BASE) / 8).unwrap_or(0);
            u64::from_le_bytes(fields[at])
        };
        Ok(Self {
            index: field(layout::INDEX),
            maximum: field(layout::MAXIMUM),
            threshold: field(layout::THRESHOLD),
            reset: core::array::from_fn(|n| field(layout::RESET + 8 * n as u64)),
        })
    }

    /// Stores a record, if it fits below the maximum, and advances the index.
    fn store(
        &mut self,
        memory: &mut impl DsMemory,
        area: u64,
        record: &[u8; RECORD],
    ) -> Result<Stored, Unmapped> {
        let Some(next) = self.index.checked_add(RECORD as u64) else {
            return Ok(Stored::Full);
        };
        if next > self.maximum {
            return Ok(Stored::Full);
        }
        memory.write(self.index, record)?;
        memory.write(area.wrapping_add(layout::INDEX), &next.to_le_bytes())?;
        self.index = next;
        Ok(if next >= self.threshold {
            Stored::Threshold
        } else {
            Stored::Below
        })
    }
}

/// How storing a record ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stored {
    /// There was no room (rule PEBS-09).
    Full,
    /// The index is below the threshold.
    Below,
    /// The index has reached or passed the threshold (rule PEBS-08).
    Threshold,
}

impl Pmu {
    /// Stores the record that is due, in the DS area at `area`, reloads the counters and asks for
    /// the interrupts that follow (rules PEBS-05 to PEBS-12, PEBS-21).
    pub fn store_record(
        &mut self,
        memory: &mut impl DsMemory,
        area: u64,
        sample: &Sample,
        freeze: Freeze,
    ) -> Occurred {
        let due = core::mem::take(&mut self.due);
        if due == 0 {
            return Occurred::default();
        }
        let overflowed = core::mem::take(&mut self.armed) | due;
        let mut pmi = (0..GP).any(|n| {
            let source = self.sources[n];
            overflowed >> n & 1 != 0 && source.is_some_and(|source| source.interrupts)
        });
        let stored = Buffer::read(memory, area).and_then(|mut buffer| {
            let stored = buffer.store(memory, area, &sample.record(due))?;
            self.reload(overflowed, &buffer.reset);
            Ok(stored)
        });
        if stored == Ok(Stored::Threshold) {
            self.status |= hindsight_regs::pmu::global::DS_BUFFER;
            pmi = true;
        }
        if pmi {
            self.freeze(freeze);
        }
        Occurred { pmi, record: false }
    }

    /// Reloads the counters that overflowed; their status bits go (rules PEBS-06, PEBS-07).
    fn reload(&mut self, overflowed: u8, reset: &[u64; GP]) {
        for (n, &value) in reset.iter().enumerate() {
            if overflowed >> n & 1 != 0 {
                self.values[n] = value & COUNTER_MASK;
                self.status &= !bit(n);
            }
        }
    }
}
