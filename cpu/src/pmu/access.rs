//! MSRs of the unit and RDPMC, as of the last [`Pmu::sync`].

use hindsight_regs::msr as regs;
use hindsight_regs::pmu::pebs::DataConfig;
use hindsight_regs::pmu::{EventSelect, FixedControl, global};
use hindsight_regs::vector::GpFault;

use super::counter::{ALL, GP, Pmu, bit};

/// The bits of IA32_PERFEVTSELx that facility `rtm` brings.
pub(crate) const IN_TRANSACTIONS: u64 = EventSelect::IN_TX | EventSelect::IN_TXCP;
/// The bits of IA32_FIXED_CTR_CTRL that can be written in any model, without PEBS.
pub(crate) const ANY_FIXED_CONTROL: u64 = 0xffff;
/// The bits of IA32_FIXED_CTR_CTRL that adaptive PEBS brings.
pub(crate) const ADAPTIVE_FIXED: u64 = 0x1111_0000_0000;
/// The writable bits of IA32_PEBS_ENABLE in the default model.
pub(crate) const PEBS_ENABLE: u64 = 0xf_0000_000f;
/// IA32_PEBS_ENABLE.PS_EN: counter 3 samples stores with their addresses.
pub(crate) const PRECISE_STORE: u64 = 1 << 63;
/// The writable bits of MSR_PEBS_LD_LAT_THRESHOLD.
pub(crate) const LATENCY: u64 = 0xffff;
/// The writable bits of MSR_PEBS_FRONTEND.
pub(crate) const FRONTEND: u64 = 0x7f_ff17;
/// The writable bits of MSR_OFFCORE_RSP_0 and 1 (rule MSR-40), unless the model has others.
pub(crate) const OFFCORE: u64 = 0x3f_ffff_8fff;
/// The bits of MSR_OFFCORE_RSP_0 and 1 that can be written in any model.
pub(crate) const ANY_OFFCORE: u64 = 0x3f_ffff_ffff;

/// An MSR of the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PmuRegister {
    /// IA32_PMCx: a general-purpose counter, whose writes are sign-extended from 32 bits.
    Legacy(usize),
    /// IA32_A_PMCx or IA32_FIXED_CTRx: a counter whose writes have full width.
    Counter(usize),
    Select(usize),
    FixedControl,
    Metrics,
    GlobalControl,
    Status,
    StatusReset,
    StatusSet,
    InUse,
    PebsEnable,
    PebsDataConfig,
    LatencyThreshold,
    Frontend,
    Offcore(usize),
}

impl PmuRegister {
    fn of(index: u32) -> Option<Self> {
        let from = |first: u32, count: usize| {
            let at = usize::try_from(index.checked_sub(first)?).ok()?;
            (at < count).then_some(at)
        };
        Some(match index {
            regs::IA32_FIXED_CTR_CTRL => Self::FixedControl,
            regs::MSR_PERF_METRICS => Self::Metrics,
            regs::IA32_PERF_GLOBAL_CTRL => Self::GlobalControl,
            regs::IA32_PERF_GLOBAL_STATUS => Self::Status,
            regs::IA32_PERF_GLOBAL_STATUS_RESET => Self::StatusReset,
            regs::IA32_PERF_GLOBAL_STATUS_SET => Self::StatusSet,
            regs::IA32_PERF_GLOBAL_INUSE => Self::InUse,
            regs::IA32_PEBS_ENABLE => Self::PebsEnable,
            regs::MSR_PEBS_DATA_CFG => Self::PebsDataConfig,
            regs::MSR_PEBS_LD_LAT_THRESHOLD => Self::LatencyThreshold,
            regs::MSR_PEBS_FRONTEND => Self::Frontend,
            regs::MSR_OFFCORE_RSP_0 => Self::Offcore(0),
            regs::MSR_OFFCORE_RSP_1 => Self::Offcore(1),
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
        match PmuRegister::of(index) {
            Some(PmuRegister::Legacy(counter) | PmuRegister::Counter(counter)) => {
                self.values[counter]
            }
            Some(PmuRegister::Select(counter)) => self.selects[counter],
            Some(PmuRegister::FixedControl) => self.fixed_control,
            Some(PmuRegister::Metrics) => self.metrics(),
            Some(PmuRegister::GlobalControl) => self.global_control,
            Some(PmuRegister::Status) => self.status,
            Some(PmuRegister::InUse) => self.in_use(),
            Some(PmuRegister::PebsEnable) => self.pebs_enable,
            Some(PmuRegister::PebsDataConfig) => self.pebs_data_config.0,
            Some(PmuRegister::LatencyThreshold) => self.latency_threshold,
            Some(PmuRegister::Frontend) => self.frontend,
            Some(PmuRegister::Offcore(n)) => self.offcore[n],
            // Rule PMU-19.
            Some(PmuRegister::StatusReset | PmuRegister::StatusSet) | None => 0,
        }
    }

    /// WRMSR of an MSR of the unit; any other is ignored. The caller has checked reserved bits.
    pub fn write(&mut self, index: u32, value: u64) {
        match PmuRegister::of(index) {
            // Rule PMU-08: 32 bits, extended by their sign.
            Some(PmuRegister::Legacy(counter)) => {
                let low = value & 0xffff_ffff;
                let sign = (low >> 31).wrapping_neg() << 32;
                self.write_counter(counter, low | sign);
            }
            Some(PmuRegister::Counter(counter)) => self.write_counter(counter, value),
            Some(PmuRegister::Select(counter)) => {
                self.selects[counter] = value & !EventSelect::PIN;
                self.disarm(counter);
            }
            Some(PmuRegister::FixedControl) => self.fixed_control = value,
            Some(PmuRegister::Metrics) => self.write_metrics(value),
            Some(PmuRegister::GlobalControl) => self.global_control = value,
            Some(PmuRegister::StatusReset) => self.status &= !value,
            Some(PmuRegister::StatusSet) => self.status |= value,
            Some(PmuRegister::PebsEnable) => self.write_pebs_enable(value),
            Some(PmuRegister::PebsDataConfig) => self.pebs_data_config = DataConfig(value),
            Some(PmuRegister::LatencyThreshold) => self.latency_threshold = value,
            Some(PmuRegister::Frontend) => self.frontend = value,
            Some(PmuRegister::Offcore(n)) => self.offcore[n] = value,
            Some(PmuRegister::Status | PmuRegister::InUse) | None => {}
        }
        self.refresh();
    }

    fn write_counter(&mut self, counter: usize, value: u64) {
        debug_assert!(counter < ALL, "no such counter");
        self.values[counter] = value & self.counter_mask;
        self.disarm(counter);
    }

    fn write_pebs_enable(&mut self, value: u64) {
        self.pebs_enable = value;
        self.armed &= value;
        self.due &= value;
    }

    /// Discards the overflow of a PEBS counter that is set up anew.
    const fn disarm(&mut self, counter: usize) {
        self.armed &= !bit(counter);
        self.due &= !bit(counter);
    }

    /// RDPMC. SDM Vol. 2B, "RDPMC—Read Performance-Monitoring Counters".
    ///
    /// # Errors
    ///
    /// [`GpFault`] for a counter that does not exist (rules RDP-01 to RDP-03).
    pub fn rdpmc(&self, index: u32) -> Result<u64, GpFault> {
        const FIXED: u32 = 0x4000_0000;
        const METRICS: u32 = 0x2000_0000;
        if index == METRICS && self.model.perfmon.has_metrics() {
            return Ok(self.metrics());
        }
        let counter = match index.checked_sub(FIXED) {
            Some(fixed) if fixed < self.model.perfmon.fixed_counters => GP + fixed as usize,
            None if index < self.config.counters => index as usize,
            _ => return Err(GpFault),
        };
        self.values.get(counter).copied().ok_or(GpFault)
    }

    /// IA32_PERF_GLOBAL_INUSE (rules PMU-21 to PMU-23).
    fn in_use(&self) -> u64 {
        let mut value = 0;
        let mut interrupts = self.pebs_enable & self.model.pebs.counter_bits() != 0;
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
