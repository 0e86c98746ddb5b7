//! The table of the processor's MSRs. SDM Vol. 4, "Model-Specific Registers (MSRs)".
//!
//! A row may cover a run of consecutive MSRs that behave alike. An MSR that no row covers does not
//! exist (rules MSR-39, MSR-48 and MSR-49): every access raises #GP(0).

mod rows;
#[cfg(test)]
mod tests;

use hindsight_regs::msr as regs;

use crate::facility::Facilities;
use crate::msr::config::MsrConfig;
use crate::state::ProcessorMsr;

pub use rows::{DEVICES_START, TABLE};

/// The model that serves accesses to an MSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// [`crate::tsc::Tsc`].
    Tsc,
    /// [`crate::branch::BranchUnit`].
    Branch,
    /// [`crate::pmu::Pmu`].
    Pmu,
    /// [`crate::rdt::Rdt`].
    Rdt,
    /// System-management mode: the number of SMIs.
    Smm,
    /// The local APIC, which is a device.
    Apic,
    /// The processor state itself, which every engine holds ([`crate::state::CpuState`]).
    Processor(ProcessorMsr),
    /// The table: a stored value without further behaviour.
    Stored,
    /// The table: always the reset value.
    Constant,
    /// The table: a write is a command without effect here, and a read raises #GP(0).
    Command,
}

/// The facilities without which an MSR does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// None: every processor has the MSR.
    Always,
    /// All of these.
    All(Facilities),
    /// At least one of these.
    Any(Facilities),
    /// All of these bits of CPUID.7.0:EDX.
    Speculation(u32),
}

/// The value of an MSR after RESET.
#[derive(Clone, Copy, Debug)]
pub enum ResetValue {
    /// The same value in every processor.
    Fixed(u64),
    /// A value that the configuration decides.
    Computed(fn(&MsrConfig) -> u64),
    /// 0 if the guest starts in firmware, and otherwise the value that firmware would have set.
    SetByFirmware(fn(&MsrConfig) -> u64),
}

/// What a write to an MSR may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WritePolicy {
    /// Every write raises #GP(0), even a write of 0.
    Fault,
    /// Every write is accepted and ignored.
    Ignored,
    /// A write raises #GP(0) if it sets any other bit than these.
    Bits {
        /// The bits that can be set in every processor.
        writable: u64,
        /// Further bits, by the facility that brings them.
        with: &'static [(Facilities, u64)],
    },
    /// As `Bits`: these bits can be set, and those of the address of a page.
    PageAddress(u64),
}

/// How KVM takes part while the guest runs under KVM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvmRole {
    /// The access exits; the model alone serves it.
    Intercepted,
    /// The access exits, and an accepted write must also reach KVM, because KVM applies the
    /// value while the guest runs.
    Mirrored,
    /// The guest accesses the register in KVM without an exit.
    Passthrough(KvmStateCall),
}

/// The call by which the state of a passthrough register moves in and out of KVM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvmStateCall {
    /// With the segment and control registers (KVM_GET_SREGS, KVM_SET_SREGS).
    SpecialRegisters,
    /// As an MSR (KVM_GET_MSRS, KVM_SET_MSRS): see [`KVM_STATE_MSRS`].
    Msr,
}

/// What must be brought up to date before an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdateBefore {
    /// Nothing.
    Nothing,
    /// The performance counters: [`super::Msrs::sync_counters`].
    Counters,
    /// The occupancy of the L3: [`super::Msrs::set_occupied_lines`].
    CacheOccupancy,
}

/// One row of the table: an MSR, or consecutive MSRs that behave alike.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct MsrSpec {
    /// First MSR number.
    pub index: u32,
    /// Number of consecutive MSRs that the row covers, 1 or more.
    pub count: u32,
    /// The manual's name.
    pub name: &'static str,
    /// The model that serves its accesses.
    pub owner: Owner,
    /// The processors that have it.
    pub presence: Presence,
    /// Value after RESET.
    pub reset: ResetValue,
    /// What a write may do.
    pub writes: WritePolicy,
    /// Bits whose writes are dropped: they keep their value, and are not checked as reserved.
    pub read_only: u64,
    /// Whether the fields hold values that exist; a write with others raises #GP(0).
    pub valid: fn(u64) -> bool,
    /// How KVM takes part.
    pub kvm: KvmRole,
    /// What must be brought up to date before an access.
    pub update: UpdateBefore,
}

impl MsrSpec {
    /// The MSR numbers of the row.
    pub fn indices(&self) -> std::ops::Range<u32> {
        self.index..self.index + self.count
    }

    /// Whether the row covers `index`.
    pub const fn covers(&self, index: u32) -> bool {
        index >= self.index && index - self.index < self.count
    }

    /// Whether a processor of this configuration has MSR `index` of the row.
    pub fn is_present(&self, index: u32, config: &MsrConfig) -> bool {
        let facilities = match self.presence {
            Presence::Always => true,
            Presence::All(facilities) => config.facilities.contains(facilities),
            Presence::Any(facilities) => config.facilities.intersects(facilities),
            Presence::Speculation(bits) => config.speculation & bits == bits,
        };
        facilities && !config.model.definition().lacks_msr(index)
    }

    /// Value after RESET in this configuration.
    pub fn reset_value(&self, config: &MsrConfig) -> u64 {
        match self.reset {
            ResetValue::Fixed(value) => value,
            ResetValue::Computed(value) => value(config),
            ResetValue::SetByFirmware(_) if config.firmware => 0,
            ResetValue::SetByFirmware(value) => value(config),
        }
    }

    /// The bits of MSR `index` that raise #GP(0) when set, in this configuration.
    pub fn reserved_bits(&self, index: u32, config: &MsrConfig) -> u64 {
        let limit = config.model.definition().writable_bits(index);
        let reserved = match self.writes {
            WritePolicy::Fault => u64::MAX,
            WritePolicy::Ignored => 0,
            WritePolicy::Bits { writable, with } => !(writable | config.facilities.bits_of(with)),
            WritePolicy::PageAddress(low) => !(low | page_address(config)),
        };
        reserved | !limit.unwrap_or(u64::MAX)
    }

    /// Whether a write of `value` to MSR `index` passes the checks that are common to all MSRs.
    pub fn accepts(&self, index: u32, value: u64, config: &MsrConfig) -> bool {
        match self.writes {
            WritePolicy::Fault => false,
            WritePolicy::Ignored => true,
            WritePolicy::Bits { .. } | WritePolicy::PageAddress(_) => {
                value & self.reserved_bits(index, config) & !self.read_only == 0
                    && (self.valid)(value)
            }
        }
    }
}

/// The bits of a page's address: 12 up to the width of physical addresses.
pub(super) const fn page_address(config: &MsrConfig) -> u64 {
    let bits = if config.physical_bits < 52 {
        config.physical_bits
    } else {
        52
    };
    ((1 << bits) - 1) & !0xfff
}

/// The row that covers MSR `index`; `None` if no processor has the MSR.
pub fn find(index: u32) -> Option<&'static MsrSpec> {
    let after = TABLE.partition_point(|spec| spec.index <= index);
    let spec = TABLE.get(after.checked_sub(1)?)?;
    spec.covers(index).then_some(spec)
}

/// Row and MSR number of every MSR whose value the table stores, by index.
pub(super) fn stored_indices() -> impl Iterator<Item = (&'static MsrSpec, u32)> {
    TABLE
        .iter()
        .filter(|spec| spec.owner == Owner::Stored)
        .flat_map(|spec| spec.indices().map(move |index| (spec, index)))
}

/// The part of the processor state that moves in and out of KVM as the MSR of this row.
const fn kvm_state_msr(spec: &MsrSpec) -> Option<ProcessorMsr> {
    match (spec.owner, spec.kvm) {
        (Owner::Processor(msr), KvmRole::Passthrough(KvmStateCall::Msr)) => Some(msr),
        _ => None,
    }
}

const fn count_kvm_state_msrs() -> usize {
    let (mut count, mut row) = (0, 0);
    while row < TABLE.len() {
        if kvm_state_msr(&TABLE[row]).is_some() {
            count += 1;
        }
        row += 1;
    }
    count
}

/// Number and part of the processor state of each MSR that moves with KVM_GET_MSRS and
/// KVM_SET_MSRS.
pub const KVM_STATE_MSRS: [(u32, ProcessorMsr); count_kvm_state_msrs()] = {
    let mut msrs = [(0, ProcessorMsr::Pat); count_kvm_state_msrs()];
    let (mut filled, mut row) = (0, 0);
    while row < TABLE.len() {
        if let Some(msr) = kvm_state_msr(&TABLE[row]) {
            msrs[filled] = (TABLE[row].index, msr);
            filled += 1;
        }
        row += 1;
    }
    msrs
};

/// Number of consecutive x2APIC MSRs that the APIC serves.
const X2APIC_MSRS: u32 =
    hindsight_regs::apic::X2APIC_MSR_LAST - hindsight_regs::apic::X2APIC_MSR_FIRST + 1;

const _: () = assert!(
    regs::IA32_X2APIC_BASE == hindsight_regs::apic::X2APIC_MSR_FIRST,
    "the two names of one MSR agree"
);
