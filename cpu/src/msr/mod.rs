//! The MSRs of one virtual processor: one table, and routing by index.
//!
//! [`table`] says, per MSR, who models it, what a write may change and how KVM takes part. It feeds
//! the KVM MSR filter, the checks of [`Msrs::write`] and the saved state.

mod counting;
mod smm;
pub mod table;

use std::sync::Arc;

use hindsight_regs::msr as regs;
use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use smm::Suspended;
pub use table::{MsrSpec, OnKvm, Owner, find};

use crate::armed::Armed;
use crate::branch::{Branch, BranchState, BranchStateError, BranchUnit, Observe};
use crate::facility::Facilities;
use crate::pmu::{Pmu, PmuConfig, PmuError, PmuState};
use crate::rdt::{Package, Rdt, RdtError, RdtState};
use crate::tsc::{Tsc, TscState};

/// What a RDMSR gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum RdmsrOutcome {
    /// The value for EDX:EAX.
    Value(u64),
    /// The guest asked for #GP(0).
    Fault,
    /// The local APIC answers.
    Apic,
    /// Part of the processor state itself ([`crate::state::NativeMsrs`] and friends).
    Processor,
    /// In no row of the table: the processor does not have it.
    Unclaimed,
}

/// What a WRMSR does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum WrmsrOutcome {
    /// Done; what must follow.
    Done(Effect),
    /// The guest asked for #GP(0); nothing changed.
    Fault,
    /// The local APIC takes it.
    Apic,
    /// Part of the processor state itself.
    Processor,
    /// In no row of the table: the processor does not have it.
    Unclaimed,
}

/// What must follow an accepted WRMSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing outside of the models.
    None,
    /// The TSC moved against the clock: the native offset and the deadline timer follow.
    TscMoved,
    /// The value acts natively: it must also reach KVM.
    Mirror(u64),
    /// What is armed changed, see [`Msrs::armed`]: the machine may have to run another way.
    Armed,
    /// As [`Effect::Armed`], on all processors of the package.
    PackageArmed,
}

/// What the machine knows that the models need at an access.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Raw TSC ticks since the machine was created.
    pub ticks: u64,
}

/// Per-machine constants behind the MSRs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MsrConfig {
    /// What the processor has.
    pub facilities: Facilities,
    /// Frequency of the TSC in Hz.
    pub tsc_hz: u64,
    /// A branch predictor and caches are modelled, see [`crate::uarch`].
    pub models: bool,
}

/// Saved state of [`Msrs`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MsrsState {
    /// The time-stamp counter.
    pub tsc: TscState,
    /// Branch recording.
    pub branch: BranchState,
    /// The performance-monitoring unit.
    pub pmu: PmuState,
    /// Resource monitoring and allocation.
    pub rdt: RdtState,
    /// System-management interrupts so far.
    pub smis: u32,
    /// In system-management mode: what RSM restores.
    pub suspended: Option<Suspended>,
    /// (index, value) of every stored MSR, in table order.
    pub stored: Vec<(u32, u64)>,
}

/// Why a saved state was refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum MsrError {
    /// The saved list is not the table's.
    #[error("saved MSRs do not match this processor: expected {expected} values, found {found}")]
    Shape {
        /// Values this processor has.
        expected: usize,
        /// Values in the saved state.
        found: usize,
    },
    /// Branch recording in an impossible state.
    #[error(transparent)]
    Branch(#[from] BranchStateError),
    /// A value that no write could have left there.
    #[error("saved MSR {index:#x} holds an impossible value {value:#x}")]
    Value {
        /// MSR number.
        index: u32,
        /// The offending value.
        value: u64,
    },
    /// The performance-monitoring unit cannot be in that state.
    #[error(transparent)]
    Pmu(#[from] PmuError),
    /// Resource monitoring and allocation cannot be in that state.
    #[error(transparent)]
    Rdt(#[from] RdtError),
}

/// The MSRs of one virtual processor that are not part of its plain state.
#[derive(Clone, Debug)]
pub struct Msrs {
    config: MsrConfig,
    tsc: Tsc,
    branch: BranchUnit,
    pmu: Pmu,
    rdt: Rdt,
    /// MSR_SMI_COUNT.
    smis: u32,
    suspended: Option<Suspended>,
    /// Values of the stored MSRs, in table order.
    stored: Vec<(u32, u64)>,
}

impl Msrs {
    /// The MSRs of a processor alone in its package, after RESET.
    pub fn new(config: MsrConfig) -> Self {
        Self::in_package(config, Arc::default())
    }

    /// The MSRs of a processor of `package`, after RESET.
    pub fn in_package(config: MsrConfig, package: Arc<Package>) -> Self {
        let stored = table::stored_indices()
            .map(|(spec, index)| (index, spec.reset_value(index, &config)))
            .collect();
        Self {
            config,
            tsc: Tsc::default(),
            branch: BranchUnit::new(config.facilities),
            pmu: Pmu::new(PmuConfig {
                tsc_hz: config.tsc_hz,
                pebs: config.facilities.contains(Facilities::PEBS),
                models: config.models,
                counters: config.facilities.gp_counters(),
            }),
            rdt: Rdt::new(config.facilities, package),
            smis: 0,
            suspended: None,
            stored,
        }
    }

    /// The time-stamp counter.
    pub const fn tsc(&self) -> &Tsc {
        &self.tsc
    }

    /// Branch recording.
    pub const fn branch(&self) -> &BranchUnit {
        &self.branch
    }

    /// Resource monitoring and allocation.
    pub const fn rdt(&self) -> &Rdt {
        &self.rdt
    }

    /// What an engine must report and do.
    pub fn observe(&self) -> Observe {
        let mut observe = self.branch.observe();
        if self.suspended.is_some() {
            // Rules DS-12 and SMF-08.
            observe.store = None;
        }
        self.with_counted_branches(observe)
    }

    /// Takes what an engine observed, in order.
    pub fn branches(&mut self, branches: &[Branch]) {
        self.branch.record(branches);
    }

    /// A #DB is about to be delivered: IA32_DEBUGCTL.LBR and .BTF are cleared (rule DCTL-06).
    pub fn debug_exception(&mut self) {
        self.branch.debug_exception();
    }

    /// RDMSR. SDM Vol. 2B, "RDMSR—Read From Model Specific Register".
    pub fn read(&self, index: u32, now: Now) -> RdmsrOutcome {
        let Some(spec) = find(index) else {
            return RdmsrOutcome::Unclaimed;
        };
        if !spec.present(&self.config) {
            return RdmsrOutcome::Fault;
        }
        match spec.owner {
            Owner::Tsc => RdmsrOutcome::Value(self.read_tsc(index, now)),
            Owner::Branch => RdmsrOutcome::Value(self.branch.read(index)),
            Owner::Pmu => RdmsrOutcome::Value(self.pmu.read(index)),
            Owner::Rdt => RdmsrOutcome::Value(self.rdt.read(index)),
            Owner::Constant if index == regs::MSR_SMI_COUNT => {
                RdmsrOutcome::Value(self.smis.into())
            }
            Owner::Constant => RdmsrOutcome::Value(spec.reset_value(index, &self.config)),
            Owner::Stored => RdmsrOutcome::Value(self.stored[self.slot(index)].1),
            Owner::Apic => RdmsrOutcome::Apic,
            Owner::Processor => RdmsrOutcome::Processor,
        }
    }

    /// WRMSR. SDM Vol. 2D, "WRMSR—Write to Model Specific Register".
    pub fn write(&mut self, index: u32, value: u64, now: Now) -> WrmsrOutcome {
        let Some(spec) = find(index) else {
            return WrmsrOutcome::Unclaimed;
        };
        if !spec.present(&self.config) || !spec.accepts(value, &self.config) {
            return WrmsrOutcome::Fault;
        }
        let armed = self.armed();
        let effect = match spec.owner {
            Owner::Tsc => self.write_tsc(index, value, now),
            Owner::Branch if self.branch.write(index, value) => Effect::None,
            Owner::Branch => return WrmsrOutcome::Fault,
            Owner::Pmu => {
                self.pmu.write(index, value);
                self.follow_freeze();
                Effect::None
            }
            Owner::Rdt if self.rdt.write(index, value) => {
                self.follow_use();
                if self.armed() == armed {
                    Effect::None
                } else {
                    Effect::PackageArmed
                }
            }
            Owner::Rdt => return WrmsrOutcome::Fault,
            Owner::Constant => Effect::None,
            Owner::Stored => self.write_stored(spec, index, value),
            Owner::Apic => return WrmsrOutcome::Apic,
            Owner::Processor => return WrmsrOutcome::Processor,
        };
        WrmsrOutcome::Done(match effect {
            Effect::None if self.armed() != armed => Effect::Armed,
            effect => effect,
        })
    }

    /// What the MSRs arm. Breakpoints are not theirs: see [`Armed::by_dr7`].
    pub fn armed(&self) -> Armed {
        let mut armed = Armed::by_debugctl(self.branch.debugctl());
        armed.set(Armed::PMU, self.pmu.is_set_up());
        armed.set(Armed::PEBS, self.pmu.takes_records());
        armed.set(Armed::RDT, self.rdt.is_armed());
        armed
    }

    fn read_tsc(&self, index: u32, now: Now) -> u64 {
        match index {
            regs::IA32_TIME_STAMP_COUNTER => self.tsc.read(now.ticks),
            regs::IA32_TSC_ADJUST => self.tsc.adjust(),
            _ => u64::from(self.tsc.aux()),
        }
    }

    fn write_tsc(&mut self, index: u32, value: u64, now: Now) -> Effect {
        match index {
            regs::IA32_TIME_STAMP_COUNTER => self.tsc.write(value, now.ticks),
            regs::IA32_TSC_ADJUST => self.tsc.write_adjust(value),
            _ => {
                #[expect(clippy::cast_possible_truncation, reason = "bits 63:32 are reserved")]
                self.tsc.write_aux(value as u32);
                return Effect::Mirror(value);
            }
        }
        Effect::TscMoved
    }

    fn write_stored(&mut self, spec: &MsrSpec, index: u32, value: u64) -> Effect {
        let slot = self.slot(index);
        let old = self.stored[slot].1;
        let new = (value & !spec.read_only) | (old & spec.read_only);
        self.stored[slot].1 = new;
        match spec.on_kvm {
            OnKvm::Mirrored => Effect::Mirror(new),
            OnKvm::Filtered | OnKvm::Passthrough => Effect::None,
        }
    }

    fn slot(&self, index: u32) -> usize {
        self.stored
            .binary_search_by_key(&index, |&(i, _)| i)
            .expect("every stored row has a slot since `new`")
    }

    /// Applies INIT: IA32_DEBUGCTL is cleared (rule DCTL-11), PEBS is off; all else stays.
    pub fn init(&mut self) {
        self.pmu.init();
        self.branch.init();
    }

    /// Every value that acts natively, to be set in KVM before the processor first runs.
    pub fn mirrored(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        let stored =
            self.stored.iter().copied().filter(|&(index, _)| {
                find(index).is_some_and(|spec| spec.on_kvm == OnKvm::Mirrored)
            });
        stored.chain([(regs::IA32_TSC_AUX, u64::from(self.tsc.aux()))])
    }

    /// Everything there is to save.
    pub fn save(&self) -> MsrsState {
        MsrsState {
            tsc: self.tsc.save(),
            branch: self.branch.save(),
            pmu: self.pmu.save(),
            rdt: self.rdt.save(),
            smis: self.smis,
            suspended: self.suspended,
            stored: self.stored.clone(),
        }
    }

    /// Takes over a saved state.
    ///
    /// # Errors
    ///
    /// Refuses a state that this processor cannot have; the MSRs are then as before.
    pub fn restore(&mut self, state: &MsrsState) -> Result<(), MsrError> {
        let same = state
            .stored
            .iter()
            .map(|&(i, _)| i)
            .eq(self.stored.iter().map(|&(i, _)| i));
        if !same {
            let (expected, found) = (self.stored.len(), state.stored.len());
            return Err(MsrError::Shape { expected, found });
        }
        for &(index, value) in &state.stored {
            let spec = find(index).expect("the indices were compared above");
            let fixed = spec.read_only & (value ^ spec.reset_value(index, &self.config));
            if fixed != 0 || value & !spec.read_only & spec.reserved_bits(&self.config) != 0 {
                return Err(MsrError::Value { index, value });
            }
        }
        self.pmu.check(&state.pmu)?;
        self.rdt.check(&state.rdt)?;
        self.check_suspended(state.suspended)?;
        self.branch.restore(&state.branch)?;
        self.pmu.restore(&state.pmu)?;
        self.rdt.restore(&state.rdt)?;
        self.follow_use();
        self.smis = state.smis;
        self.suspended = state.suspended;
        self.follow_freeze();
        self.tsc.restore(&state.tsc);
        self.stored.clone_from(&state.stored);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
