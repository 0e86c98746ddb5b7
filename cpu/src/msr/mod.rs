//! The MSRs of one virtual processor: one table, and routing by index.
//!
//! [`table`] defines for each MSR which processors have it, who models it, what a write may change,
//! how KVM takes part, and what must be brought up to date before an access. It feeds the MSR
//! filter of KVM, the checks of [`Msrs::write`] and the saved state. A new MSR is one row, and the
//! code of its owner.

mod config;
mod counting;
mod smm;
mod state;
pub mod table;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use hindsight_regs::msr as regs;
use hindsight_regs::vector::GpFault;

pub use config::MsrConfig;
pub use smm::SmmSuspended;
pub use state::{MsrStateError, MsrsState};
pub use table::{
    KVM_STATE_MSRS, KvmRole, KvmStateCall, MsrSpec, Owner, Presence, ResetValue, UpdateBefore,
    WritePolicy, find,
};

use crate::armed::Armed;
use crate::branch::{Branch, BranchUnit, Observe};
use crate::facility::Facilities;
use crate::pmu::{Pmu, PmuConfig};
use crate::rdt::{Rdt, RdtPackage};
use crate::tsc::Tsc;

/// The outcome of a RDMSR. SDM Vol. 2B, "RDMSR—Read From Model Specific Register".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum RdmsrOutcome {
    /// The value for EDX:EAX.
    Value(u64),
    /// The guest gets #GP(0).
    Fault,
    /// The register belongs to the local APIC, which the caller must ask.
    Apic,
    /// The register is part of the processor state itself ([`crate::state::CpuState`]).
    Processor,
    /// No row of the table covers the register: the processor does not have it.
    Unclaimed,
}

/// The outcome of a WRMSR. SDM Vol. 2D, "WRMSR—Write to Model Specific Register".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum WrmsrOutcome {
    /// The write was accepted; the caller must apply the effect.
    Done(MsrEffect),
    /// The guest gets #GP(0); nothing changed.
    Fault,
    /// The register belongs to the local APIC, which the caller must ask.
    Apic,
    /// The register is part of the processor state itself ([`crate::state::CpuState`]).
    Processor,
    /// No row of the table covers the register: the processor does not have it.
    Unclaimed,
}

/// What the caller must do after an accepted WRMSR. Several effects can hold at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct MsrEffect {
    /// The TSC moved against the clock: KVM's offset and the deadline timer must follow.
    pub tsc_moved: bool,
    /// The armed facilities of these vCPUs changed, see [`Msrs::armed`].
    pub armed: Option<ArmedScope>,
    /// The register has this value, which KVM applies while the guest runs: it must also be set
    /// there.
    pub mirror: Option<u64>,
}

impl MsrEffect {
    /// No effect outside of the models.
    pub const NONE: Self = Self {
        tsc_moved: false,
        armed: None,
        mirror: None,
    };

    /// Only a value that must also be set in KVM.
    pub const fn mirror(value: u64) -> Self {
        Self {
            mirror: Some(value),
            ..Self::NONE
        }
    }

    /// Whether the caller has nothing to do.
    pub fn is_none(&self) -> bool {
        *self == Self::NONE
    }
}

/// The vCPUs whose armed facilities a WRMSR changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArmedScope {
    /// The vCPU that executed the WRMSR.
    Vcpu,
    /// All vCPUs of the package.
    Package,
}

/// State of the machine that the models need at an access.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Raw TSC ticks since the machine was created.
    pub ticks: u64,
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
    /// The values that RSM restores; `None` outside of system-management mode.
    suspended: Option<SmmSuspended>,
    /// Index and value of the stored MSRs, in table order.
    stored: Vec<(u32, u64)>,
}

impl Msrs {
    /// The MSRs of a processor alone in its package, after RESET.
    pub fn new(config: MsrConfig) -> Self {
        Self::in_package(config, Arc::default())
    }

    /// The MSRs of a processor of `package`, after RESET.
    pub fn in_package(config: MsrConfig, package: Arc<RdtPackage>) -> Self {
        let stored = table::stored_indices()
            .map(|(spec, index)| (index, spec.reset_value(&config)))
            .collect();
        Self {
            config,
            tsc: Tsc::default(),
            branch: BranchUnit::new(config.facilities, config.model),
            pmu: Pmu::new(PmuConfig {
                tsc_hz: config.tsc_hz,
                pebs: config.facilities.contains(Facilities::PEBS),
                uarch: config.uarch,
                counters: config.model.definition().gp_counters(config.facilities),
                model: config.model,
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

    /// Returns what an engine must report to the models, and what it must do itself.
    pub fn observe(&self) -> Observe {
        let mut observe = self.branch.observe();
        if self.suspended.is_some() {
            // Rules DS-12 and SMF-08.
            observe.bts = None;
        }
        self.add_counted_branches(observe)
    }

    /// Records the branches that an engine reported, in order.
    pub fn record_branches(&mut self, branches: &[Branch]) {
        self.branch.record(branches);
    }

    /// Accounts for branches that an engine did not report: see [`Observe::newest`].
    pub fn skip_branches(&mut self, count: u64) {
        self.branch.skip(count);
    }

    /// Clears IA32_DEBUGCTL.LBR and .BTF, before a #DB is delivered (rule DCTL-06).
    pub fn debug_exception(&mut self) {
        self.branch.debug_exception();
    }

    /// RDMSR of MSR `index`.
    ///
    /// The caller has brought up to date what [`MsrSpec::update`](field@MsrSpec::update) names.
    pub fn read(&self, index: u32, now: Now) -> RdmsrOutcome {
        let Some(spec) = find(index) else {
            return RdmsrOutcome::Unclaimed;
        };
        if !spec.is_present(index, &self.config) {
            return RdmsrOutcome::Fault;
        }
        match spec.owner {
            Owner::Tsc => RdmsrOutcome::Value(self.read_tsc(index, now)),
            Owner::Branch if !self.branch.has(index) => RdmsrOutcome::Fault,
            Owner::Branch => RdmsrOutcome::Value(self.branch.read(index)),
            Owner::Pmu => RdmsrOutcome::Value(self.pmu.read(index)),
            Owner::Rdt => RdmsrOutcome::Value(self.rdt.read(index)),
            Owner::Smm => RdmsrOutcome::Value(self.smis.into()),
            Owner::Command => RdmsrOutcome::Fault,
            Owner::Constant => RdmsrOutcome::Value(spec.reset_value(&self.config)),
            Owner::Stored => RdmsrOutcome::Value(self.stored[self.stored_position(index)].1),
            Owner::Apic => RdmsrOutcome::Apic,
            Owner::Processor(_) => RdmsrOutcome::Processor,
        }
    }

    /// WRMSR of `value` to MSR `index`.
    ///
    /// The caller has brought up to date what [`MsrSpec::update`](field@MsrSpec::update) names.
    pub fn write(&mut self, index: u32, value: u64, now: Now) -> WrmsrOutcome {
        let Some(spec) = find(index) else {
            return WrmsrOutcome::Unclaimed;
        };
        if !spec.is_present(index, &self.config) || !spec.accepts(index, value, &self.config) {
            return WrmsrOutcome::Fault;
        }
        match spec.owner {
            Owner::Apic => return WrmsrOutcome::Apic,
            Owner::Processor(_) => return WrmsrOutcome::Processor,
            _ => {}
        }
        let armed = self.armed();
        let Ok(mut effect) = self.write_owner(spec, index, value, now) else {
            return WrmsrOutcome::Fault;
        };
        if self.armed() != armed {
            // What resource control arms is shared by the package; all else is the vCPU's own.
            effect.armed = Some(match spec.owner {
                Owner::Rdt => ArmedScope::Package,
                _ => ArmedScope::Vcpu,
            });
        }
        if spec.kvm == KvmRole::Mirrored
            && let RdmsrOutcome::Value(value) = self.read(index, now)
        {
            effect.mirror = Some(value);
        }
        WrmsrOutcome::Done(effect)
    }

    /// Passes an accepted write to the owner of its row, which is in this crate.
    fn write_owner(
        &mut self,
        spec: &MsrSpec,
        index: u32,
        value: u64,
        now: Now,
    ) -> Result<MsrEffect, GpFault> {
        let mut effect = MsrEffect::NONE;
        match spec.owner {
            Owner::Tsc => effect.tsc_moved = self.write_tsc(index, value, now),
            Owner::Branch if !self.branch.has(index) => return Err(GpFault),
            Owner::Branch => self.branch.write(index, value)?,
            Owner::Pmu => {
                self.pmu.write(index, value);
                self.update_lbr_freeze();
            }
            Owner::Rdt => {
                self.rdt.write(index, value)?;
                self.update_cache_tracking();
            }
            Owner::Stored => {
                let position = self.stored_position(index);
                let stored = &mut self.stored[position].1;
                *stored = (value & !spec.read_only) | (*stored & spec.read_only);
            }
            Owner::Smm | Owner::Constant | Owner::Command | Owner::Apic | Owner::Processor(_) => {}
        }
        Ok(effect)
    }

    /// The facilities that the MSRs arm. For those of DR7 see [`Armed::from_dr7`].
    pub fn armed(&self) -> Armed {
        let mut armed = Armed::from_debugctl(self.branch.debugctl());
        armed.set(Armed::LBR, self.branch.is_enabled());
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

    /// Writes an MSR of the TSC. Returns whether the TSC moved.
    fn write_tsc(&mut self, index: u32, value: u64, now: Now) -> bool {
        match index {
            regs::IA32_TIME_STAMP_COUNTER => self.tsc.write(value, now.ticks),
            regs::IA32_TSC_ADJUST => self.tsc.write_adjust(value),
            _ => {
                #[expect(clippy::cast_possible_truncation, reason = "bits 63:32 are reserved")]
                self.tsc.write_aux(value as u32);
                return false;
            }
        }
        true
    }

    fn stored_position(&self, index: u32) -> usize {
        self.stored
            .binary_search_by_key(&index, |&(i, _)| i)
            .expect("`new` made an entry for every stored row")
    }

    /// Applies INIT: IA32_DEBUGCTL is cleared (rule DCTL-11), PEBS is disabled, all else stays.
    pub fn init(&mut self) {
        self.pmu.init();
        self.branch.init();
    }

    /// Index and value of every MSR that must be set in KVM before the vCPU first runs.
    ///
    /// The MSRs of the local APIC are not among them.
    pub fn mirrored(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        // None of them depends on the time.
        let now = Now { ticks: 0 };
        table::TABLE
            .iter()
            .filter(|spec| spec.kvm == KvmRole::Mirrored)
            .flat_map(MsrSpec::indices)
            .filter_map(move |index| match self.read(index, now) {
                RdmsrOutcome::Value(value) => Some((index, value)),
                _ => None,
            })
    }
}
