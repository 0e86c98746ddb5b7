//! Saved state of the unit.

use hindsight_regs::pmu::{COUNTER_MASK, EventSelect, global};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::access::{FIXED_CONTROL, FRONTEND, LATENCY, PEBS_ENABLE, SELECT};
use super::counter::{ALL, GP, Pmu};
use super::events::EventTotals;

/// Saved state of a [`Pmu`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// IA32_PEBS_ENABLE.
    pub pebs_enable: u64,
    /// MSR_PEBS_LD_LAT_THRESHOLD.
    pub latency_threshold: u64,
    /// MSR_PEBS_FRONTEND.
    pub frontend: u64,
    /// PEBS counters that overflowed and wait for the next event.
    pub armed: u8,
    /// PEBS counters whose record is to be stored.
    pub due: u8,
    /// The totals up to which the counters have counted; those of the engine go on from there.
    pub seen: EventTotals,
}

/// Why a saved state was refused.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum PmuError {
    /// A register holds what no write could have left there.
    #[error("saved {register} of the performance monitor holds an impossible value {value:#x}")]
    Value {
        /// Which register.
        register: &'static str,
        /// The offending value.
        value: u64,
    },
}

impl Pmu {
    /// Everything there is to save.
    pub const fn save(&self) -> PmuState {
        PmuState {
            counters: self.values,
            selects: self.selects,
            fixed_control: self.fixed_control,
            global_control: self.global_control,
            status: self.status,
            pebs_enable: self.pebs_enable,
            latency_threshold: self.latency_threshold,
            frontend: self.frontend,
            armed: self.armed,
            due: self.due,
            seen: self.seen,
        }
    }

    /// Whether this unit can have this state.
    ///
    /// # Errors
    ///
    /// Names the first register that cannot.
    pub fn check(&self, state: &PmuState) -> Result<(), PmuError> {
        let pebs = if self.config.pebs { PEBS_ENABLE } else { 0 };
        let fits = |register, value: u64, mask: u64| {
            if value & !mask == 0 {
                Ok(())
            } else {
                Err(PmuError::Value { register, value })
            }
        };
        for value in state.counters {
            fits("counter", value, COUNTER_MASK)?;
        }
        for value in state.selects {
            let transactions = EventSelect::IN_TX | EventSelect::IN_TXCP;
            fits("event selection", value, SELECT | transactions)?;
        }
        let counters = self.config.all_counters();
        let waiting = state.pebs_enable & pebs & 0b1111;
        fits("fixed counter control", state.fixed_control, FIXED_CONTROL)?;
        fits("global control", state.global_control, counters)?;
        fits("global status", state.status, global::SETTABLE | counters)?;
        fits("PEBS enable", state.pebs_enable, pebs)?;
        fits("load latency threshold", state.latency_threshold, LATENCY)?;
        fits("PEBS front end", state.frontend, FRONTEND)?;
        fits(
            "set of overflowed PEBS counters",
            state.armed.into(),
            waiting,
        )?;
        fits("set of due PEBS counters", state.due.into(), waiting)
    }

    /// Takes over a saved state.
    ///
    /// # Errors
    ///
    /// Refuses a state that this unit cannot have; it is then as before.
    pub fn restore(&mut self, state: &PmuState) -> Result<(), PmuError> {
        self.check(state)?;
        self.values = state.counters;
        self.selects = state.selects;
        self.fixed_control = state.fixed_control;
        self.global_control = state.global_control;
        self.status = state.status;
        self.pebs_enable = state.pebs_enable;
        self.latency_threshold = state.latency_threshold;
        self.frontend = state.frontend;
        self.armed = state.armed;
        self.due = state.due;
        self.seen = state.seen;
        self.refresh();
        Ok(())
    }
}
