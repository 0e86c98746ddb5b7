//! The unit's MSRs and RDPMC, as of the last [`Pmu::sync`].

use hindsight_regs::msr as regs;
use hindsight_regs::pmu::{COUNTER_MASK, EventSelect, FIXED_COUNTERS, FixedControl, global};

use super::counter::{ALL, GP, Pmu, bit};

/// What may be written to IA32_PERFEVTSELx; pin control is dropped.
pub(crate) const SELECT: u64 = 0xffff_ffff & !EventSelect::PIN;
/// What may be written to IA32_FIXED_CTR_CTRL.
pub(crate) const FIXED_CONTROL: u64 = 0xfff;
/// What may be written to IA32_PEBS_ENABLE.
pub(crate) const PEBS_ENABLE: u64 = 0xf_0000_000f;
/// What may be written to MSR_PEBS_LD_LAT_THRESHOLD.
pub(crate) const LATENCY: u64 = 0xffff;
/// What may be written to MSR_PEBS_FRONTEND.
pub(crate) const FRONTEND: u64 = 0x7f_ff17;

/// What an MSR number means to the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Register {
    /// A general-purpose counter, by the number whose writes are cut to 32 bits.
    Legacy(usize),
    /// A counter whose writes are of full width.
    Counter(usize),
    Select(usize),
    FixedControl,
    GlobalControl,
    Status,
    StatusReset,
    StatusSet,
    InUse,
    PebsEnable,
    LatencyThreshold,
    Frontend,
}

impl Register {
    fn of(index: u32) -> Option<Self> {
        let from = |first: u32, count: usize| {
            let at = usize::try_from(index.checked_sub(first)?).ok()?;
            (at < count).then_some(at)
        };
        Some(match index {
            regs::IA32_FIXED_CTR_CTRL => Self::FixedControl,
            regs::IA32_PERF_GLOBAL_CTRL => Self::GlobalControl,
            regs::IA32_PERF_GLOBAL_STATUS => Self::Status,
            regs::IA32_PERF_GLOBAL_STATUS_RESET => Self::StatusReset,
            regs::IA32_PERF_GLOBAL_STATUS_SET => Self::StatusSet,
            regs::IA32_PERF_GLOBAL_INUSE => Self::InUse,
            regs::IA32_PEBS_ENABLE => Self::PebsEnable,
            regs::MSR_PEBS_LD_LAT_THRESHOLD => Self::LatencyThreshold,
            regs::MSR_PEBS_FRONTEND => Self::Frontend,
            _ => from(regs::IA32_PMC0, GP)
                .map(Self::Legacy)
                .or_else(|| from(regs::IA32_A_PMC0, GP).map(Self::Counter))
                .or_else(|| from(regs::IA32_PERFEVTSEL0, GP).map(Self::Select))
                .or_else(|| Some(Self::Counter(GP + from(regs::IA32_FIXED_CTR0, ALL - GP)?)))?,
        })
    }
}

impl Pmu {
    /// RDMSR of an MSR of the unit; 0 for any other.
    pub fn read(&self, index: u32) -> u64 {
        match Register::of(index) {
            Some(Register::Legacy(counter) | Register::Counter(counter)) => self.values[counter],
            Some(Register::Select(counter)) => self.selects[counter],
            Some(Register::FixedControl) => self.fixed_control,
            Some(Register::GlobalControl) => self.global_control,
            Some(Register::Status) => self.status,
            Some(Register::InUse) => self.in_use(),
            Some(Register::PebsEnable) => self.pebs_enable,
            Some(Register::LatencyThreshold) => self.latency_threshold,
            Some(Register::Frontend) => self.frontend,
            // Rule PMU-19.
            Some(Register::StatusReset | Register::StatusSet) | None => 0,
        }
    }

    /// WRMSR of an MSR of the unit, whose reserved bits were checked; nothing for any other.
    pub fn write(&mut self, index: u32, value: u64) {
        match Register::of(index) {
            // Rule PMU-08: 32 bits, extended by their sign.
            Some(Register::Legacy(counter)) => {
                let low = value & 0xffff_ffff;
                let sign = (low >> 31).wrapping_neg() << 32;
                self.write_counter(counter, low | sign);
            }
            Some(Register::Counter(counter)) => self.write_counter(counter, value),
            Some(Register::Select(counter)) => {
                self.selects[counter] = value & !EventSelect::PIN;
                self.disarm(counter);
            }
            Some(Register::FixedControl) => self.fixed_control = value,
            Some(Register::GlobalControl) => self.global_control = value,
            Some(Register::StatusReset) => self.status &= !value,
            Some(Register::StatusSet) => self.status |= value,
            Some(Register::PebsEnable) => self.write_pebs_enable(value),
            Some(Register::LatencyThreshold) => self.latency_threshold = value,
            Some(Register::Frontend) => self.frontend = value,
            Some(Register::Status | Register::InUse) | None => {}
        }
        self.refresh();
    }

    fn write_counter(&mut self, counter: usize, value: u64) {
        self.values[counter] = value & COUNTER_MASK;
        self.disarm(counter);
    }

    fn write_pebs_enable(&mut self, value: u64) {
        self.pebs_enable = value;
        let on = value.to_le_bytes()[0];
        self.armed &= on;
        self.due &= on;
    }

    /// A PEBS counter that is set up anew forgets its overflow.
    const fn disarm(&mut self, counter: usize) {
        if counter < GP {
            self.armed &= !(1 << counter);
            self.due &= !(1 << counter);
        }
    }

    /// RDPMC; `None` asks for #GP(0) (rules RDP-01 to RDP-03).
    pub fn rdpmc(&self, index: u32) -> Option<u64> {
        const FIXED: u32 = 0x4000_0000;
        let counter = match index.checked_sub(FIXED) {
            Some(fixed) if fixed < FIXED_COUNTERS => GP + usize::try_from(fixed).ok()?,
            Some(_) => return None,
            None if index < self.config.counters => usize::try_from(index).ok()?,
            None => return None,
        };
        self.values.get(counter).copied()
    }

    /// IA32_PERF_GLOBAL_INUSE (rules PMU-21 to PMU-23).
    fn in_use(&self) -> u64 {
        let mut value = 0;
        let mut interrupts = self.pebs_enable & 0b1111 != 0;
        for (counter, &select) in self.selects.iter().enumerate() {
            let select = EventSelect(select);
            if select.event() != 0 {
                value |= bit(counter);
            }
            interrupts |= select.has(EventSelect::INT);
        }
        for counter in GP..ALL {
            let control = FixedControl::of(self.fixed_control, counter - GP);
            if control.0 & (FixedControl::OS | FixedControl::USR) != 0 {
                value |= bit(counter);
            }
            interrupts |= control.has(FixedControl::PMI);
        }
        if interrupts {
            value |= global::PMI_IN_USE;
        }
        value
    }
}
