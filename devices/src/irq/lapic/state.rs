//! The state of a local APIC as plain data, and what makes it valid.

use serde::{Deserialize, Serialize};

use super::LapicFeatures;
use super::regs::{self, lvt};

/// The state of a local APIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LapicState {
    /// IA32_APIC_BASE.
    pub apic_base: u64,
    /// Task priority.
    pub tpr: u8,
    /// Logical destination, of xAPIC mode.
    pub ldr: u32,
    /// Destination format, of xAPIC mode.
    pub dfr: u32,
    /// Spurious-interrupt vector.
    pub svr: u32,
    /// In service, by vector.
    pub isr: [u32; 8],
    /// Level-triggered, by vector.
    pub tmr: [u32; 8],
    /// Requested, by vector.
    pub irr: [u32; 8],
    /// Error status, as software reads it.
    pub esr: u32,
    /// Errors since software last wrote the ESR.
    pub errors: u32,
    /// Interrupt command.
    pub icr: u64,
    /// Local vector table: timer, thermal, performance counter, LINT0, LINT1, error.
    pub lvt: [u32; 6],
    /// Timer's initial count.
    pub initial_count: u32,
    /// Timer's divide configuration.
    pub divide: u32,
    /// The crystal's count at which the timer's count reaches 0; `None` if it does not run.
    pub zero_at: Option<u64>,
    /// IA32_TSC_DEADLINE; 0 if not armed.
    pub tsc_deadline: u64,
    /// Guest TSC less clock ticks.
    pub tsc_offset: u64,
    /// Levels of the LINT0 and LINT1 pins.
    pub lint: [bool; 2],
    /// An ExtINT message has come.
    pub ext_int: bool,
    /// An NMI waits for the processor.
    pub nmi: bool,
    /// An SMI waits for the processor.
    pub smi: bool,
    /// An INIT waits for the processor.
    pub init: bool,
    /// A start-up IPI waits for the processor.
    pub sipi: Option<u8>,
    /// The processor waits for a start-up IPI.
    pub wait_for_sipi: bool,
}

impl LapicState {
    /// After RESET. SDM Vol. 3A, "Local APIC State After Power-Up or Reset".
    pub(super) fn reset(bsp: bool) -> Self {
        let bsp_bit = if bsp { regs::BASE_BSP } else { 0 };
        Self {
            apic_base: regs::BASE_ADDRESS | regs::BASE_ENABLE | bsp_bit,
            tpr: 0,
            ldr: 0,
            dfr: u32::MAX,
            svr: 0xff,
            isr: [0; 8],
            tmr: [0; 8],
            irr: [0; 8],
            esr: 0,
            errors: 0,
            icr: 0,
            lvt: [lvt::MASKED; 6],
            initial_count: 0,
            divide: 0,
            zero_at: None,
            tsc_deadline: 0,
            tsc_offset: 0,
            lint: [false; 2],
            ext_int: false,
            nmi: false,
            smi: false,
            init: false,
            sipi: None,
            wait_for_sipi: !bsp,
        }
    }

    /// Whether an APIC with these features can be in this state.
    pub(super) fn is_valid(&self, features: LapicFeatures) -> bool {
        let no_low_vectors = [self.isr, self.irr, self.tmr]
            .iter()
            .all(|bits| bits[0] & 0xffff == 0);
        let software_enabled = self.svr & regs::SVR_ENABLE != 0;
        let lvt_valid = (0..6).all(|index| {
            let entry = self.lvt[index];
            let pin = index == lvt::LINT0 || index == lvt::LINT1;
            let remote = if pin { lvt::REMOTE_IRR } else { 0 };
            entry & !(lvt_writable(index, features) | remote) == 0
                && (software_enabled || entry & lvt::MASKED != 0)
                && (entry & lvt::REMOTE_IRR == 0 || entry & lvt::LEVEL != 0)
        });
        let deadline_mode = (self.lvt[lvt::TIMER] >> 17) & 3 == 2;
        apic_base_is_legal(self.apic_base, features)
            && self.ldr & 0x00ff_ffff == 0
            && self.dfr & 0x0fff_ffff == 0x0fff_ffff
            && self.svr & !regs::SVR_WRITABLE == 0
            && no_low_vectors
            && self.esr & !0xe0 == 0
            && self.errors & !0xe0 == 0
            && self.icr & u64::from(!regs::ICR_WRITABLE) == 0
            && lvt_valid
            && self.divide & !0b1011 == 0
            && (deadline_mode || self.tsc_deadline == 0)
            && (!deadline_mode || self.zero_at.is_none())
    }
}

/// What software may write to an LVT entry.
pub(super) fn lvt_writable(index: usize, features: LapicFeatures) -> u32 {
    if index == lvt::TIMER && !features.tsc_deadline {
        lvt::WRITABLE[index] & !lvt::TIMER_DEADLINE
    } else {
        lvt::WRITABLE[index]
    }
}

/// No reserved bit of IA32_APIC_BASE is set, and its mode exists.
pub(super) fn apic_base_is_legal(value: u64, features: LapicFeatures) -> bool {
    let physical = 1_u64
        .checked_shl(features.physical_address_bits.into())
        .map_or(u64::MAX, |b| b - 1);
    let mut defined = (physical & !0xfff) | regs::BASE_BSP | regs::BASE_ENABLE;
    if features.x2apic {
        defined |= regs::BASE_X2APIC;
    }
    value & !defined == 0 && (value & regs::BASE_X2APIC == 0 || value & regs::BASE_ENABLE != 0)
}
