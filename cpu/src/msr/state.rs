//! Saved state of [`Msrs`].

use thiserror::Error;

use super::{Msrs, SmmSuspended, find};
use crate::branch::{BranchState, BranchStateError};
use crate::pmu::{PmuState, PmuStateError};
use crate::rdt::{RdtState, RdtStateError};
use crate::tsc::TscState;

/// Saved state of [`Msrs`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct MsrsState {
    /// The time-stamp counter.
    pub tsc: TscState,
    /// Branch recording.
    pub branch: BranchState,
    /// The performance-monitoring unit.
    pub pmu: PmuState,
    /// Resource monitoring and allocation.
    pub rdt: RdtState,
    /// MSR_SMI_COUNT.
    pub smis: u32,
    /// In system-management mode: the values that RSM restores.
    pub suspended: Option<SmmSuspended>,
    /// (index, value) of every stored MSR, in table order.
    pub stored: Vec<(u32, u64)>,
}

/// A saved state that cannot be restored.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum MsrStateError {
    /// The saved list does not have the table's MSRs.
    #[error("saved MSRs do not match this processor: expected {expected} values, found {found}")]
    Shape {
        /// Values that this processor has.
        expected: usize,
        /// Values in the saved state.
        found: usize,
    },
    /// Branch recording is in an invalid state.
    #[error(transparent)]
    Branch(#[from] BranchStateError),
    /// A register holds a value that no write could have left.
    #[error("saved MSR {index:#x} holds an invalid value {value:#x}")]
    Value {
        /// MSR number.
        index: u32,
        /// The offending value.
        value: u64,
    },
    /// The performance-monitoring unit is in an invalid state.
    #[error(transparent)]
    Pmu(#[from] PmuStateError),
    /// Resource monitoring and allocation is in an invalid state.
    #[error(transparent)]
    Rdt(#[from] RdtStateError),
}

impl Msrs {
    /// The state as plain data.
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

    /// Replaces the state by a saved one.
    ///
    /// # Errors
    ///
    /// Rejects a state that this processor cannot have; the MSRs are then unchanged.
    pub fn restore(&mut self, state: &MsrsState) -> Result<(), MsrStateError> {
        self.check_stored(state)?;
        self.pmu.check(&state.pmu)?;
        self.rdt.check(&state.rdt)?;
        self.check_suspended(state.suspended)?;
        // Last of the checks: it restores as well.
        self.branch.restore(&state.branch)?;
        self.pmu.restore(&state.pmu)?;
        self.rdt.restore(&state.rdt)?;
        self.update_cache_tracking();
        self.smis = state.smis;
        self.suspended = state.suspended;
        self.update_lbr_freeze();
        self.tsc.restore(&state.tsc);
        self.stored.clone_from(&state.stored);
        Ok(())
    }

    fn check_stored(&self, state: &MsrsState) -> Result<(), MsrStateError> {
        let saved = state.stored.iter().map(|&(index, _)| index);
        if !saved.eq(self.stored.iter().map(|&(index, _)| index)) {
            let (expected, found) = (self.stored.len(), state.stored.len());
            return Err(MsrStateError::Shape { expected, found });
        }
        for &(index, value) in &state.stored {
            let spec = find(index).expect("the indices were compared above");
            let fixed = spec.read_only & (value ^ spec.reset_value(&self.config));
            let reserved = value & !spec.read_only & spec.reserved_bits(index, &self.config);
            if fixed != 0 || reserved != 0 || !(spec.valid)(value) {
                return Err(MsrStateError::Value { index, value });
            }
        }
        Ok(())
    }
}
