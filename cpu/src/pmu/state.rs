//! Saved state of the unit.

use hindsight_regs::pmu::global;
use hindsight_regs::pmu::pebs::DataConfig;
use thiserror::Error;

use super::access::{ANY_OFFCORE, FRONTEND, IN_TRANSACTIONS, LATENCY};
use super::counter::{ALL, GP, Pmu};
use super::events::EventTotals;
use super::metrics::SlotTotals;

/// Saved state of a [`Pmu`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PmuState {
    /// The general-purpose counters, then the fixed ones.
    pub counters: [u64; ALL],
    /// IA32_PERFEVTSELx.
    pub selects: [u64; GP],
    /// IA32_FIXED_CTR_CTRL.
    pub fixed_control: u64,
    /// IA32_PERF_GLOBAL_CTRL.
    pub global_control: u64,
    /// IA32_PERF_GLOBAL_STATUS.
    pub status: u64,
    /// What MSR_PERF_METRICS is made of.
    pub slots: SlotTotals,
    /// IA32_PEBS_ENABLE.
    pub pebs_enable: u64,
    /// MSR_PEBS_DATA_CFG.
    pub pebs_data_config: DataConfig,
    /// MSR_PEBS_LD_LAT_THRESHOLD.
    pub latency_threshold: u64,
    /// MSR_PEBS_FRONTEND.
    pub frontend: u64,
    /// MSR_OFFCORE_RSP_0 and 1.
    pub offcore: [u64; 2],
    /// PEBS counters that overflowed and take their record at the next event, as in
    /// IA32_PERF_GLOBAL_STATUS.
    pub armed: u64,
    /// PEBS counters whose record must be stored now.
    pub due: u64,
    /// The totals up to which the counters have counted; the engine's continue from them.
    #[cfg_attr(feature = "serde", serde(rename = "seen"))]
    pub counted: EventTotals,
}

/// A saved state that cannot be restored.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum PmuStateError {
    /// A register holds a value that no write could have left.
    #[error("saved {register} of the performance monitor holds an invalid value {value:#x}")]
    Value {
        /// The register.
        register: &'static str,
        /// The offending value.
        value: u64,
    },
}

impl Pmu {
    /// The state as plain data.
    pub const fn save(&self) -> PmuState {
        PmuState {
            counters: self.values,
            selects: self.selects,
            fixed_control: self.fixed_control,
            global_control: self.global_control,
            status: self.status,
            slots: self.slots,
            pebs_enable: self.pebs_enable,
            pebs_data_config: self.pebs_data_config,
            latency_threshold: self.latency_threshold,
            frontend: self.frontend,
            offcore: self.offcore,
            armed: self.armed,
            due: self.due,
            counted: self.counted,
        }
    }

    /// Checks that this unit can have this state.
    ///
    /// # Errors
    ///
    /// Names the first register that cannot have its value.
    pub fn check(&self, state: &PmuState) -> Result<(), PmuStateError> {
        let model = &self.model.pebs;
        let (pebs, data) = match self.config.pebs {
            true if model.is_extended() => (model.enable_bits(), DataConfig::WRITABLE),
            true => (model.enable_bits(), 0),
            false => (0, 0),
        };
        let check = |register, value: u64, mask: u64| {
            if value & !mask == 0 {
                Ok(())
            } else {
                Err(PmuStateError::Value { register, value })
            }
        };
        for value in state.counters {
            check("counter", value, self.counter_mask)?;
        }
        for value in state.selects {
            check(
                "event selection",
                value,
                self.model.select_bits() | IN_TRANSACTIONS,
            )?;
        }
        let perfmon = &self.model.perfmon;
        let counters = self.config.all_counters() | perfmon.metrics_in_global();
        if !perfmon.has_metrics() {
            check("number of slots", state.slots.total, 0)?;
        }
        let waiting = state.pebs_enable & model.counter_bits();
        check(
            "fixed counter control",
            state.fixed_control,
            self.model.fixed_control_bits(),
        )?;
        check("global control", state.global_control, counters)?;
        check("global status", state.status, global::SETTABLE | counters)?;
        check("PEBS enable", state.pebs_enable, pebs)?;
        check("PEBS data configuration", state.pebs_data_config.0, data)?;
        check("load latency threshold", state.latency_threshold, LATENCY)?;
        check("PEBS front end", state.frontend, FRONTEND)?;
        for value in state.offcore {
            check("offcore response", value, ANY_OFFCORE)?;
        }
        check("set of overflowed PEBS counters", state.armed, waiting)?;
        check("set of due PEBS counters", state.due, waiting)
    }

    /// Replaces the state by a saved one.
    ///
    /// # Errors
    ///
    /// Rejects a state that this unit cannot have; the unit is then unchanged.
    pub fn restore(&mut self, state: &PmuState) -> Result<(), PmuStateError> {
        self.check(state)?;
        self.values = state.counters;
        self.selects = state.selects;
        self.fixed_control = state.fixed_control;
        self.global_control = state.global_control;
        self.status = state.status;
        self.slots = state.slots;
        self.pebs_enable = state.pebs_enable;
        self.pebs_data_config = state.pebs_data_config;
        self.latency_threshold = state.latency_threshold;
        self.frontend = state.frontend;
        self.offcore = state.offcore;
        self.armed = state.armed;
        self.due = state.due;
        self.counted = state.counted;
        self.refresh();
        Ok(())
    }
}
