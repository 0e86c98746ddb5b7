//! Runs batches on both sides, compares the results, and bisects to the first instruction that
//! differs.

use crate::layout::*;
use crate::rng::mix;
use crate::tally::{Mismatch, Tally};
use crate::user::batch::{Batch, InsnSlot, ResultSource};
use crate::user::build::build;
use crate::user::class::InsnClass;
use crate::user::interp::InterpRunner;
use crate::user::reference::{Reference, TierComparison};
use crate::user::stems::Stems;
use anyhow::Result;
use std::fmt::Write;

/// Runs of each batch: the same instructions on different state.
pub(super) const RUNS: u64 = 8;
/// Batches after which the interpreter gets a new vCPU, so that its code cache stays small.
const BATCHES_PER_VCPU: u64 = 128;

/// The two sides of a comparison, each with one region.
#[derive(Debug)]
pub struct UserComparer {
    reference: Reference,
    interp: InterpRunner,
    batches: u64,
    /// Instructions compared, by opcode.
    counts: Vec<u64>,
}

/// How a run on both sides ended, if its results differ.
#[derive(Debug)]
enum RunDifference {
    /// The interpreter could not run the batch.
    InterpFailed(String),
    /// Data or results differ.
    Results,
}

/// The seed of the batch with this number.
pub(super) fn batch_seed(class: InsnClass, seed: u64, index: u64) -> u64 {
    mix(mix(seed ^ (class as u64) << 56).wrapping_add(index))
}

impl UserComparer {
    /// Both sides; one comparer at a time in a process, because the region's addresses are fixed.
    ///
    /// # Errors
    /// If memory cannot be mapped.
    pub fn new(comparison: TierComparison) -> Result<Self> {
        let (reference, interp) = Reference::sides(comparison)?;
        Ok(Self {
            reference,
            interp,
            batches: 0,
            counts: Vec::new(),
        })
    }

    /// Compares one batch and adds the mismatches to the tally.
    ///
    /// # Errors
    /// If memory cannot be mapped.
    pub(super) fn compare_batch(
        &mut self,
        stems: &Stems,
        class: InsnClass,
        seed: u64,
        tally: &mut Tally,
    ) -> Result<()> {
        self.batches += 1;
        if self.batches.is_multiple_of(BATCHES_PER_VCPU) {
            self.interp.renew()?;
            self.reference.renew()?;
        }
        let batch = build(stems, class, seed, self.reference.base(), SLOTS);
        self.install(&batch);
        for run in 0..RUNS {
            if self.run_both(&batch, run).is_some() {
                let mismatch = self.find_mismatch(stems, &batch, run);
                tally.mismatches.push(mismatch);
                self.install(&batch);
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

    /// Moves the counts by opcode to a tally.
    pub(super) fn flush_counts(&mut self, tally: &mut Tally) {
        for (code, n) in iced_x86::Code::values().zip(&self.counts) {
            if *n > 0 {
                *tally.codes.entry(format!("{code:?}")).or_default() += n;
            }
        }
        self.counts.clear();
        let (translated, retired) = self.interp.retired();
        tally.translated += translated;
        tally.retired += retired;
    }

    /// Runs one batch again and describes its runs and its code.
    pub fn replay(&mut self, stems: &Stems, class: InsnClass, seed: u64) -> String {
        let batch = build(stems, class, seed, self.reference.base(), SLOTS);
        let mut text = String::new();
        self.install(&batch);
        for run in 0..RUNS {
            if self.run_both(&batch, run).is_some() {
                let mismatch = self.find_mismatch(stems, &batch, run);
                let _ = writeln!(
                    text,
                    "run {run}: {}: {}",
                    mismatch.text, mismatch.difference
                );
                self.install(&batch);
            } else {
                let _ = writeln!(text, "run {run}: equal");
            }
        }
        for slot in &batch.slots {
            let bytes = batch.bytes_of(slot);
            let _ = writeln!(text, "{:#x}: {bytes:02x?} {}", slot.rip, slot.text());
        }
        text
    }

    fn install(&mut self, batch: &Batch) {
        self.reference.install(batch);
        self.interp.install(batch);
        // Both logs start with the same contents, whatever earlier batches left.
        let log = LOG as usize..(LOG + LOG_LEN) as usize;
        self.interp.region()[log.clone()].copy_from_slice(&self.reference.region()[log]);
    }

    /// Runs an installed batch on both sides; `None` if all is equal.
    fn run_both(&mut self, batch: &Batch, run: u64) -> Option<RunDifference> {
        self.reference.fill(batch, run);
        let interp = self.interp.region();
        for (from, to) in [
            (DATA, DATA + DATA_LEN),
            (PARAMS, batch.values_end),
            (FAULTS, CURRENT),
        ] {
            let part = from as usize..to as usize;
            interp[part.clone()].copy_from_slice(&self.reference.region()[part]);
        }
        if let Err(e) = self.reference.run() {
            return Some(RunDifference::InterpFailed(e.to_string()));
        }
        if let Err(e) = self.interp.run() {
            return Some(RunDifference::InterpFailed(e.to_string()));
        }
        self.reference.clear_ignored(batch);
        let interp = self.interp.region();
        for &(at, len) in &batch.ignored {
            interp[at as usize..][..len as usize].fill(0);
        }
        let host = self.reference.region();
        let equal = batch
            .compared()
            .iter()
            .all(|&(from, to)| host[from..to] == interp[from..to]);
        (!equal).then_some(RunDifference::Results)
    }

    /// Bisects a batch that differs to its first instruction that does.
    fn find_mismatch(&mut self, stems: &Stems, batch: &Batch, run: u64) -> Mismatch {
        let (mut good, mut bad) = (0, batch.slots.len());
        while bad - good > 1 {
            let middle = good.midpoint(bad);
            let part = build(stems, batch.class, batch.seed, batch.base, middle);
            self.install(&part);
            if self.run_both(&part, run).is_some() {
                bad = middle;
            } else {
                good = middle;
            }
        }
        let part = build(stems, batch.class, batch.seed, batch.base, bad);
        self.install(&part);
        let mut difference = match self.run_both(&part, run) {
            None => "only together with the instructions after it".to_owned(),
            Some(RunDifference::InterpFailed(error)) => error,
            Some(RunDifference::Results) => self.describe_difference(&part, bad - 1),
        };
        difference.truncate(600);
        let slot = &part.slots[bad - 1];
        let text = format!("{:02x?} {}", part.bytes_of(slot), slot.text());
        Mismatch {
            seed: batch.seed,
            run,
            code: format!("{:?}", slot.insn.code()),
            text,
            difference,
        }
    }

    fn describe_difference(&mut self, batch: &Batch, index: usize) -> String {
        let names = self.reference.names();
        let (host, interp) = (self.reference.region(), self.interp.region());
        let mut text = String::new();
        let faults = [host, &*interp].map(|region| describe_fault(region, index));
        if faults[0] != faults[1] {
            let _ = write!(
                text,
                "exception: {} {}, {} {}; ",
                names[0], faults[0], names[1], faults[1]
            );
        } else if faults[0] != "none" {
            let _ = write!(text, "both {}; ", faults[0]);
        }
        let slot: &InsnSlot = &batch.slots[index];
        for result in &slot.results {
            let range = result.at as usize..(result.at + result.len) as usize;
            let (a, b) = (&host[range.clone()], &interp[range]);
            if a != b {
                let _ = write!(
                    text,
                    "{}: {}; ",
                    name(result.source),
                    describe_unequal(a, b, names)
                );
            }
        }
        for (from, to) in batch.compared() {
            if host[from..to] != interp[from..to] {
                let part = if from == DATA as usize { "data" } else { "log" };
                let _ = write!(
                    text,
                    "{part}: {}; ",
                    describe_unequal(&host[from..to], &interp[from..to], names)
                );
            }
        }
        text
    }
}

fn name(source: ResultSource) -> String {
    match source {
        ResultSource::Gpr(n) => {
            let r = iced_x86::Register::RAX + u32::from(n);
            format!("{r:?}").to_lowercase()
        }
        ResultSource::Vector(n) => format!("vector register {n}"),
        ResultSource::Opmask(n) => format!("k{n}"),
        ResultSource::Flags => "flags (AH, OF)".to_owned(),
        ResultSource::Mxcsr => "MXCSR".to_owned(),
        ResultSource::Fxsave => "FXSAVE image".to_owned(),
        ResultSource::Memory => "memory".to_owned(),
    }
}

/// The first difference between two slices, with some bytes from there on.
fn describe_unequal(host: &[u8], interp: &[u8], names: [&str; 2]) -> String {
    let differs = host.iter().zip(interp).position(|(a, b)| a != b);
    let at = differs.unwrap_or(0) & !7;
    let some = |side: &[u8]| {
        let end = (at + 16).min(side.len());
        format!("{:02x?}", &side[at..end])
    };
    format!(
        "at {at:#x} {} {}, {} {}",
        names[0],
        some(host),
        names[1],
        some(interp)
    )
}

fn describe_fault(region: &[u8], index: usize) -> String {
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
