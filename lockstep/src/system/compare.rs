//! Runs system batches in KVM and in the interpreter, compares, and bisects to the first case that
//! differs.

use crate::layout::SLOTS;
use crate::rng::mix;
use crate::system::batch::SystemBatch;
use crate::system::build::build;
use crate::system::class::SystemClass;
use crate::system::interp::SystemInterpRunner;
use crate::system::kvm::KvmRunner;
use crate::system::ram::BatchEnd;
use crate::tally::{Mismatch, Tally};
use anyhow::Result;

/// KVM and the interpreter.
#[derive(Debug)]
pub struct SystemComparer {
    kvm: KvmRunner,
    interp: SystemInterpRunner,
}

/// The seed of the batch with this number.
pub(super) fn batch_seed(seed: u64, class: SystemClass, index: u64) -> u64 {
    mix(mix(seed ^ (class as u64) << 48).wrapping_add(index))
}

impl SystemComparer {
    /// Both engines.
    ///
    /// # Errors
    /// If KVM cannot be used, or memory cannot be mapped.
    pub fn new() -> Result<Self> {
        Ok(Self {
            kvm: KvmRunner::new()?,
            interp: SystemInterpRunner::new()?,
        })
    }

    /// Compares one batch, and bisects a difference to its case.
    ///
    /// With the digest of the interpreter's results, only KVM runs, unless its results have another
    /// digest.
    ///
    /// # Errors
    /// If an engine cannot be made.
    pub fn compare_batch(
        &mut self,
        class: SystemClass,
        seed: u64,
        expected: Option<u64>,
        tally: &mut Tally,
    ) -> Result<()> {
        let batch = build(class, seed, SLOTS);
        tally.cases += batch.slots.len() as u64;
        for slot in &batch.slots {
            *tally.codes.entry(slot.code().to_owned()).or_default() += 1;
        }
        let equal = match expected {
            Some(digest) => self.kvm_agrees(&batch, digest)?,
            None => self.difference(&batch)?.is_none(),
        };
        if !equal {
            let mismatch = self.find_mismatch(class, seed, batch.slots.len())?;
            tally.mismatches.push(mismatch);
        }
        Ok(())
    }

    /// Whether the results of KVM have this digest.
    fn kvm_agrees(&mut self, batch: &SystemBatch, expected: u64) -> Result<bool> {
        let end = self.kvm.run(batch);
        let agrees = match &end {
            Ok(end) => self.kvm.ram().digest(batch, *end) == expected,
            Err(_) => false,
        };
        if !matches!(end, Ok(BatchEnd::Done)) {
            self.kvm = KvmRunner::new()?;
        }
        Ok(agrees)
    }

    /// Runs a batch on both and describes the difference; `None` if all is equal, also if both shut
    /// down.
    fn difference(&mut self, batch: &SystemBatch) -> Result<Option<String>> {
        let (kvm_end, interp_end) = (self.kvm.run(batch), self.interp.run(batch));
        let text = match (&kvm_end, &interp_end) {
            (Ok(kvm), Ok(interp)) => self.describe_difference(batch, *kvm, *interp),
            (Err(e), _) | (_, Err(e)) => e.to_string(),
        };
        if !matches!(kvm_end, Ok(BatchEnd::Done)) {
            self.kvm = KvmRunner::new()?;
        }
        if interp_end.is_err() {
            self.interp = SystemInterpRunner::new()?;
        }
        Ok((!text.is_empty()).then_some(text))
    }

    /// Describes the first difference of each compared part; empty if all is equal.
    fn describe_difference(
        &self,
        batch: &SystemBatch,
        kvm_end: BatchEnd,
        interp_end: BatchEnd,
    ) -> String {
        let (kvm, interp) = (self.kvm.ram().bytes(), self.interp.ram().bytes());
        let mut text = String::new();
        if kvm_end != interp_end {
            text += &format!("end: KVM {kvm_end:?}, interpreter {interp_end:?}; ");
        }
        for (name, from, to) in batch.kernel.compared(batch) {
            let (a, b) = (&kvm[from..to], &interp[from..to]);
            if let Some(at) = a.iter().zip(b).position(|(a, b)| a != b) {
                let at = at & !7;
                let end = (at + 32).min(a.len());
                text += &format!(
                    "{name} at {at:#x}: KVM {:02x?}, interpreter {:02x?}; ",
                    &a[at..end],
                    &b[at..end]
                );
            }
        }
        text
    }

    /// Bisects a batch that differs to its first case that does.
    fn find_mismatch(&mut self, class: SystemClass, seed: u64, slots: usize) -> Result<Mismatch> {
        let (mut good, mut bad) = (0, slots);
        while bad - good > 1 {
            let middle = good.midpoint(bad);
            if self.difference(&build(class, seed, middle))?.is_some() {
                bad = middle;
            } else {
                good = middle;
            }
        }
        let part = build(class, seed, bad);
        let mut difference = self
            .difference(&part)?
            .unwrap_or_else(|| "not in a second run".to_owned());
        difference.truncate(900);
        let slot = &part.slots[bad - 1];
        Ok(Mismatch {
            seed,
            run: bad as u64 - 1,
            code: slot.code().to_owned(),
            text: slot.text.clone(),
            difference,
        })
    }
}
