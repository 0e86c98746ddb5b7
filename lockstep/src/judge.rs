//! Runs batches on both sides, compares, and finds the instruction that is to blame.

use crate::batch::{Batch, Slot, What};
use crate::class::Class;
use crate::guest::Guest;
use crate::layout::*;
use crate::native::Native;
use crate::rng::mix;
use crate::stems::Stems;
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Runs of each batch: the same instructions on other state.
pub const RUNS: u64 = 8;
/// Batches after which the interpreter starts afresh, so that what it keeps stays small.
const RENEW: u64 = 128;

/// An instruction whose results differ.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Mismatch {
    /// Seed of the batch, for a replay.
    pub seed: u64,
    /// Run of the batch.
    pub run: u64,
    /// Opcode, in the decoder's words.
    pub code: String,
    /// The instruction.
    pub text: String,
    /// What differs.
    pub what: String,
}

/// What was done.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Tally {
    /// Instructions executed and compared.
    pub cases: u64,
    /// The same by opcode.
    pub codes: BTreeMap<String, u64>,
    /// Batches with a difference.
    pub mismatches: Vec<Mismatch>,
}

/// Both sides.
#[derive(Debug)]
pub struct Judge {
    native: Native,
    guest: Guest,
    batches: u64,
    counts: Vec<u64>,
}

/// The seed of a batch.
pub fn batch_seed(class: Class, seed: u64, index: u64) -> u64 {
    mix(mix(seed ^ (class as u64) << 56).wrapping_add(index))
}

impl Judge {
    /// Both sides; one at a time in a process.
    ///
    /// # Errors
    /// When there is no memory for them.
    pub fn new() -> Result<Self> {
        let native = Native::new()?;
        let guest = Guest::new(native.base())?;
        Ok(Self {
            native,
            guest,
            batches: 0,
            counts: Vec::new(),
        })
    }

    /// Runs a batch and judges it.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn batch(
        &mut self,
        stems: &Stems,
        class: Class,
        seed: u64,
        tally: &mut Tally,
    ) -> Result<()> {
        self.batches += 1;
        if self.batches.is_multiple_of(RENEW) {
            self.guest.renew()?;
        }
        let batch = Batch::new(stems, class, seed, self.native.base(), SLOTS);
        self.load(&batch);
        for run in 0..RUNS {
            if self.same(&batch, run).is_some() {
                let found = self.blame(stems, &batch, run);
                tally.mismatches.push(found);
                self.load(&batch);
            }
        }
        tally.cases += RUNS * batch.slots.len() as u64;
        for slot in &batch.slots {
            let at = slot.insn.code() as usize;
            if self.counts.len() <= at {
                self.counts.resize(at + 1, 0);
            }
            self.counts[at] += RUNS;
        }
        Ok(())
    }

    /// Adds the counts by opcode to a tally.
    pub fn tell(&mut self, tally: &mut Tally) {
        for (code, n) in iced_x86::Code::values().zip(&self.counts) {
            if *n > 0 {
                *tally.codes.entry(format!("{code:?}")).or_default() += n;
            }
        }
        self.counts.clear();
    }

    /// Replays one run and tells all about it.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn replay(&mut self, stems: &Stems, class: Class, seed: u64) -> Result<String> {
        let batch = Batch::new(stems, class, seed, self.native.base(), SLOTS);
        let mut text = String::new();
        self.load(&batch);
        for run in 0..RUNS {
            if self.same(&batch, run).is_some() {
                let found = self.blame(stems, &batch, run);
                let _ = writeln!(text, "run {run}: {}: {}", found.text, found.what);
                self.load(&batch);
            } else {
                let _ = writeln!(text, "run {run}: equal");
            }
        }
        for slot in &batch.slots {
            let bytes = batch.bytes_of(slot);
            let _ = writeln!(text, "{:#x}: {bytes:02x?} {}", slot.rip, slot.text());
        }
        Ok(text)
    }

    fn load(&mut self, batch: &Batch) {
        batch.install(self.native.region());
        batch.install(self.guest.region());
        // What other batches left must not count.
        let log = LOG as usize..(LOG + LOG_LEN) as usize;
        let (host, guest) = (self.native.region(), self.guest.region());
        guest[log.clone()].copy_from_slice(&host[log]);
        self.guest.code_changed();
    }

    /// Runs on both sides; None if all is equal, else what the interpreter could not do, if so.
    fn same(&mut self, batch: &Batch, run: u64) -> Option<String> {
        let host = self.native.region();
        batch.fill(run, host);
        let guest = self.guest.region();
        for (from, to) in [
            (DATA, DATA + DATA_LEN),
            (PARAMS, batch.values_end),
            (FAULTS, CURRENT),
        ] {
            let part = from as usize..to as usize;
            guest[part.clone()].copy_from_slice(&host[part]);
        }
        self.native.run(batch);
        if let Err(e) = self.guest.run(batch) {
            return Some(e.to_string());
        }
        let (host, guest) = (self.native.region(), self.guest.region());
        for side in [&mut *host, &mut *guest] {
            for &(at, len) in &batch.ignored {
                side[at as usize..][..len as usize].fill(0);
            }
        }
        let equal = batch
            .compared()
            .iter()
            .all(|&(from, to)| host[from..to] == guest[from..to]);
        (!equal).then(String::new)
    }

    /// Bisects to the first instruction that differs.
    fn blame(&mut self, stems: &Stems, batch: &Batch, run: u64) -> Mismatch {
        let (mut good, mut bad) = (0, batch.slots.len());
        while bad - good > 1 {
            let middle = good.midpoint(bad);
            let part = Batch::new(stems, batch.class, batch.seed, batch.base, middle);
            self.load(&part);
            if self.same(&part, run).is_some() {
                bad = middle;
            } else {
                good = middle;
            }
        }
        let part = Batch::new(stems, batch.class, batch.seed, batch.base, bad);
        self.load(&part);
        let result = self.same(&part, run);
        let mut what = match result {
            None => "only together with what follows".to_owned(),
            Some(problem) if !problem.is_empty() => problem,
            Some(_) => self.differences(&part, bad - 1),
        };
        what.truncate(600);
        let slot = &part.slots[bad - 1];
        let text = format!("{:02x?} {}", part.bytes_of(slot), slot.text());
        Mismatch {
            seed: batch.seed,
            run,
            code: format!("{:?}", slot.insn.code()),
            text,
            what,
        }
    }

    fn differences(&mut self, batch: &Batch, index: usize) -> String {
        let (host, guest) = (self.native.region(), self.guest.region());
        let mut text = String::new();
        let faults = [&*host, &*guest].map(|side| fault(side, index));
        if faults[0] != faults[1] {
            let _ = write!(text, "exception: host {}, ours {}; ", faults[0], faults[1]);
        } else if faults[0] != "none" {
            let _ = write!(text, "both {}; ", faults[0]);
        }
        let slot: &Slot = &batch.slots[index];
        for note in &slot.notes {
            let range = note.at as usize..(note.at + note.len) as usize;
            let (a, b) = (&host[range.clone()], &guest[range]);
            if a != b {
                let _ = write!(text, "{}: {}; ", name(note.what), unequal(a, b));
            }
        }
        for (from, to) in batch.compared() {
            if host[from..to] != guest[from..to] {
                let part = if from == DATA as usize {
                    "data"
                } else {
                    "notes"
                };
                let _ = write!(
                    text,
                    "{part}: {}; ",
                    unequal(&host[from..to], &guest[from..to])
                );
            }
        }
        text
    }
}

fn name(what: What) -> String {
    match what {
        What::Gpr(n) => {
            let r = iced_x86::Register::RAX + u32::from(n);
            format!("{r:?}").to_lowercase()
        }
        What::Vector(n) => format!("vector register {n}"),
        What::Opmask(n) => format!("k{n}"),
        What::Flags => "flags (AH, OF)".to_owned(),
        What::Mxcsr => "MXCSR".to_owned(),
        What::Fx => "FXSAVE image".to_owned(),
        What::Memory => "memory".to_owned(),
    }
}

/// Where two pieces first differ, with some bytes from there.
fn unequal(host: &[u8], ours: &[u8]) -> String {
    let at = host.iter().zip(ours).position(|(a, b)| a != b).unwrap_or(0);
    let at = at & !7;
    let some = |side: &[u8]| {
        let end = (at + 16).min(side.len());
        format!("{:02x?}", &side[at..end])
    };
    format!("at {at:#x} host {}, ours {}", some(host), some(ours))
}

fn fault(region: &[u8], index: usize) -> String {
    let at = FAULTS as usize + index * FAULT_LEN as usize;
    let vector = region[at];
    if vector == 0 {
        return "none".to_owned();
    }
    let word = |i: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&region[at + i * 8..][..8]);
        u64::from_le_bytes(bytes)
    };
    format!(
        "vector {} error {:#x} cr2 {:#x} rip {:#x}",
        vector - 1,
        word(0) >> 32,
        word(1),
        word(2)
    )
}
