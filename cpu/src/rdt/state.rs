//! Saved state of the resource control registers.

use hindsight_regs::rdt::{self, Association, QmEventSelect};
use thiserror::Error;

use super::package::{DELAYS, L3, RMIDS};
use super::{L2, Rdt, RdtPackage};

/// Saved state of a [`Rdt`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RdtState {
    /// IA32_PQR_ASSOC.
    pub association: u64,
    /// IA32_QM_EVTSEL.
    pub select: u64,
    /// IA32_L2_QOS_MASK_n.
    pub l2_masks: [u64; L2],
    /// IA32_L2_QOS_CFG.
    pub l2_cdp: bool,
    /// The shared registers; the state of every processor contains them.
    pub package: RdtPackageState,
}

/// Saved state of a [`RdtPackage`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RdtPackageState {
    /// IA32_L3_QOS_MASK_n.
    pub l3_masks: [u64; L3],
    /// IA32_L2_QoS_Ext_BW_Thrtl_n.
    pub delays: [u64; DELAYS],
    /// IA32_L3_QOS_CFG.
    pub cdp: bool,
    /// Cache lines moved between L3 and memory, by RMID.
    pub traffic: Vec<u64>,
}

/// A saved state that cannot be restored.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum RdtStateError {
    /// A register holds a value that no write could have left.
    #[error("saved {register} of resource control holds an invalid value {value:#x}")]
    Value {
        /// The register.
        register: &'static str,
        /// The offending value.
        value: u64,
    },
    /// The list of RMIDs has another length than this processor's.
    #[error("saved traffic has {found} RMIDs, this processor has {RMIDS}")]
    Rmids {
        /// Number of RMIDs in the saved state.
        found: usize,
    },
}

impl Rdt {
    /// The state as plain data.
    pub fn save(&self) -> RdtState {
        RdtState {
            association: self.assoc.0,
            select: self.select.0,
            l2_masks: self.l2_masks,
            l2_cdp: self.l2_cdp,
            package: self.package.save(),
        }
    }

    /// Checks that this processor can have this state.
    ///
    /// # Errors
    ///
    /// Names the first register that cannot have its value.
    pub fn check(&self, state: &RdtState) -> Result<(), RdtStateError> {
        let check = |register, value: u64, possible: bool| {
            if possible {
                Ok(())
            } else {
                Err(RdtStateError::Value { register, value })
            }
        };
        let (assoc, select) = (Association(state.association), QmEventSelect(state.select));
        let possible = assoc.0 & !Association::WRITABLE == 0 && self.may_associate(assoc);
        check("association", assoc.0, possible)?;
        let possible = select.0 & !QmEventSelect::WRITABLE == 0 && select.rmid() <= rdt::MAX_RMID;
        check("event selection", select.0, possible)?;
        for mask in state.l2_masks {
            let possible = rdt::is_capacity_mask(mask, rdt::L2_MASK_BITS);
            check("L2 mask", mask, possible)?;
        }
        for mask in state.package.l3_masks {
            let possible = rdt::is_capacity_mask(mask, rdt::L3_MASK_BITS);
            check("L3 mask", mask, possible)?;
        }
        for delay in state.package.delays {
            check("delay", delay, delay <= u64::from(rdt::MBA_MAX))?;
        }
        match state.package.traffic.len() {
            RMIDS => Ok(()),
            found => Err(RdtStateError::Rmids { found }),
        }
    }

    /// Replaces the state by a saved one, also the shared part.
    ///
    /// # Errors
    ///
    /// Rejects a state that this processor cannot have; nothing has then changed.
    pub fn restore(&mut self, state: &RdtState) -> Result<(), RdtStateError> {
        self.check(state)?;
        self.set_association(Association(state.association));
        self.select = QmEventSelect(state.select);
        self.set_l2_masks(state.l2_masks);
        self.l2_cdp = state.l2_cdp;
        self.package.restore(&state.package);
        Ok(())
    }
}

impl RdtPackage {
    fn save(&self) -> RdtPackageState {
        RdtPackageState {
            l3_masks: std::array::from_fn(|n| self.l3_mask(n)),
            delays: std::array::from_fn(|n| self.delay_value(n)),
            cdp: self.cdp(),
            traffic: self.traffic(),
        }
    }

    fn restore(&self, state: &RdtPackageState) {
        for (n, &mask) in state.l3_masks.iter().enumerate() {
            self.set_l3_mask(n, mask);
        }
        for (n, &delay) in state.delays.iter().enumerate() {
            self.set_delay(n, delay);
        }
        self.set_cdp(state.cdp);
        self.set_traffic(&state.traffic);
    }
}
