//! The state of a local APIC as plain data, and the conditions that make it valid.

use hindsight_regs::apic::{
    ApicBase, DEFAULT_BASE, Esr, Icr, LapicTimerMode, LvtEntry, PAGE_SIZE, Svr, TimerDivide,
};

use super::LapicFeatures;
use super::regs::{self, lvt};
use super::vectors::VectorSet;

/// The state of a local APIC.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct LapicState {
    /// IA32_APIC_BASE.
    pub apic_base: u64,
    /// Task priority.
    pub tpr: u8,
    /// Logical destination, of xAPIC mode.
    pub ldr: u32,
    /// Destination format, of xAPIC mode.
    pub dfr: u32,
    /// Spurious-interrupt vector: the vector and [`Svr`].
    pub svr: u32,
    /// In service, by vector.
    pub isr: VectorSet,
    /// Level-triggered, by vector.
    pub tmr: VectorSet,
    /// Requested, by vector.
    pub irr: VectorSet,
    /// Error status as software reads it, see [`Esr`].
    pub esr: u32,
    /// Errors since software last wrote the ESR.
    pub errors: u32,
    /// Interrupt command.
    pub icr: Icr,
    /// Local vector table: timer, thermal, performance counter, LINT0, LINT1, error.
    pub lvt: [LvtEntry; lvt::COUNT],
    /// The timer's initial count.
    pub initial_count: u32,
    /// The timer's divide configuration.
    pub divide: TimerDivide,
    /// The crystal's count at which the timer's count reaches 0; `None` if the timer is stopped.
    pub zero_at: Option<u64>,
    /// IA32_TSC_DEADLINE; 0 if not armed.
    pub tsc_deadline: u64,
    /// Guest TSC less clock ticks.
    pub tsc_offset: u64,
    /// Levels of the LINT0 and LINT1 pins.
    pub lint: [bool; 2],
    /// An ExtINT message is pending.
    pub ext_int: bool,
    /// An NMI is pending.
    pub nmi: bool,
    /// A further NMI arrived while one was pending.
    #[cfg_attr(feature = "serde", serde(default))]
    pub second_nmi: bool,
    /// An SMI is pending.
    pub smi: bool,
    /// An INIT is pending.
    pub init: bool,
    /// The vector of a pending start-up IPI.
    pub sipi: Option<u8>,
    /// The processor waits for a start-up IPI.
    pub wait_for_sipi: bool,
}

impl LapicState {
    /// The state after RESET. SDM Vol. 3A, "Local APIC State After Power-Up or Reset".
    pub(super) fn reset(bsp: bool) -> Self {
        let bsp_flag = if bsp {
            ApicBase::BSP
        } else {
            ApicBase::empty()
        };
        Self {
            apic_base: DEFAULT_BASE | (ApicBase::EN | bsp_flag).bits(),
            tpr: 0,
            ldr: 0,
            dfr: u32::MAX,
            svr: 0xff,
            isr: VectorSet::default(),
            tmr: VectorSet::default(),
            irr: VectorSet::default(),
            esr: 0,
            errors: 0,
            icr: Icr(0),
            lvt: [LvtEntry(LvtEntry::MASKED); lvt::COUNT],
            initial_count: 0,
            divide: TimerDivide(0),
            zero_at: None,
            tsc_deadline: 0,
            tsc_offset: 0,
            lint: [false; 2],
            ext_int: false,
            nmi: false,
            second_nmi: false,
            smi: false,
            init: false,
            sipi: None,
            wait_for_sipi: !bsp,
        }
    }

    /// The flags of IA32_APIC_BASE.
    pub(super) fn base_flags(&self) -> ApicBase {
        ApicBase::of(self.apic_base)
    }

    /// The flags of the spurious-interrupt vector register.
    pub(super) fn svr_flags(&self) -> Svr {
        Svr::from_bits_truncate(self.svr)
    }

    /// Whether an APIC with these features can be in this state.
    pub(super) fn is_valid(&self, features: LapicFeatures) -> bool {
        let vectors = [&self.isr, &self.irr, &self.tmr];
        let software_enabled = self.svr_flags().contains(Svr::ENABLE);
        let lvt_valid = (0..lvt::COUNT).all(|index| {
            let entry = self.lvt[index];
            let read_only = if regs::is_lint(index) {
                LvtEntry::REMOTE_IRR
            } else {
                0
            };
            entry.0 & !(regs::lvt_writable(index, features) | read_only) == 0
                && (software_enabled || entry.is_masked())
                && (!entry.remote_irr() || entry.is_level())
        });
        let deadline_mode = self.lvt[lvt::TIMER].timer_mode() == LapicTimerMode::TscDeadline;
        apic_base_is_legal(self.apic_base, features)
            && self.ldr & !regs::LDR_WRITABLE == 0
            && self.dfr & regs::DFR_ONES == regs::DFR_ONES
            && self.svr & !regs::SVR_WRITABLE == 0
            && vectors.iter().all(|vectors| !vectors.has_illegal())
            && Esr::from_bits(self.esr).is_some()
            && Esr::from_bits(self.errors).is_some()
            && self.icr.0 & u64::from(!regs::ICR_WRITABLE) == 0
            && lvt_valid
            && self.divide.0 & !TimerDivide::MASK == 0
            && (deadline_mode || self.tsc_deadline == 0)
            && (!deadline_mode || self.zero_at.is_none())
    }
}

/// Whether a value of IA32_APIC_BASE has no reserved bit and an existing mode.
pub(super) fn apic_base_is_legal(value: u64, features: LapicFeatures) -> bool {
    let physical = 1_u64
        .checked_shl(features.physical_address_bits.into())
        .map_or(u64::MAX, |limit| limit - 1);
    let mut flags = ApicBase::BSP | ApicBase::EN;
    flags.set(ApicBase::EXTD, features.x2apic);
    let defined = physical & !(PAGE_SIZE - 1) | flags.bits();
    let mode = ApicBase::of(value);
    value & !defined == 0 && (!mode.contains(ApicBase::EXTD) || mode.contains(ApicBase::EN))
}
