//! Saved state of the registers. What is in the modelled cache is not saved: it is cold afterwards.

use hindsight_regs::rdt::{self, Association, QmEventSelect};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::package::{DELAYS, L3, RMIDS};
use super::{L2, Package, Rdt};

/// Saved state of a [`Rdt`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RdtState {
    /// IA32_PQR_ASSOC.
    pub association: u64,
    /// IA32_QM_EVTSEL.
    pub select: u64,
    /// IA32_L2_QOS_MASK_n.
    pub l2_masks: [u64; L2],
    /// IA32_L2_QOS_CFG.
    pub l2_cdp: bool,
    /// What all processors share; each has it in its state.
    pub package: PackageState,
}

/// Saved state of a [`Package`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackageState {
    /// IA32_L3_QOS_MASK_n.
    pub l3_masks: [u64; L3],
    /// IA32_L2_QoS_Ext_BW_Thrtl_n.
    pub delays: [u64; DELAYS],
    /// IA32_L3_QOS_CFG.
    pub cdp: bool,
    /// Lines that went to and from memory, by RMID.
    pub traffic: Vec<u64>,
}

/// Why a saved state was refused.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum RdtError {
    /// A register holds what no write could have left there.
    #[error("saved {register} of resource control holds an impossible value {value:#x}")]
    Value {
        /// Which register.
        register: &'static str,
        /// The offending value.
        value: u64,
    },
    /// The list of RMIDs is not this processor's.
    #[error("saved traffic is of {found} RMIDs, not of {RMIDS}")]
    Rmids {
        /// How many there are.
        found: usize,
    },
}

impl Rdt {
    /// Everything there is to save.
    pub fn save(&self) -> RdtState {
        RdtState {
            association: self.assoc.0,
            select: self.select.0,
            l2_masks: self.l2_masks,
            l2_cdp: self.l2_cdp,
            package: self.package.save(),
        }
    }

    /// Whether this processor can have this state.
    ///
    /// # Errors
    ///
    /// Names the first register that cannot.
    pub fn check(&self, state: &RdtState) -> Result<(), RdtError> {
        let fits = |register, value: u64, good: bool| {
            if good {
                Ok(())
            } else {
                Err(RdtError::Value { register, value })
            }
        };
        let (assoc, select) = (Association(state.association), QmEventSelect(state.select));
        let good = assoc.0 & !Association::WRITABLE == 0 && self.may_associate(assoc);
        fits("association", assoc.0, good)?;
        let good = select.0 & !QmEventSelect::WRITABLE == 0 && select.rmid() <= rdt::MAX_RMID;
        fits("event selection", select.0, good)?;
        for mask in state.l2_masks {
            let good = rdt::is_capacity_mask(mask, rdt::L2_MASK_BITS);
            fits("L2 mask", mask, good)?;
        }
        for mask in state.package.l3_masks {
            let good = rdt::is_capacity_mask(mask, rdt::L3_MASK_BITS);
            fits("L3 mask", mask, good)?;
        }
        for delay in state.package.delays {
            fits("delay", delay, delay <= u64::from(rdt::MBA_MAX))?;
        }
        match state.package.traffic.len() {
            RMIDS => Ok(()),
            found => Err(RdtError::Rmids { found }),
        }
    }

    /// Takes over a saved state.
    ///
    /// # Errors
    ///
    /// Refuses a state that this processor cannot have; it is then as before.
    pub fn restore(&mut self, state: &RdtState) -> Result<(), RdtError> {
        self.check(state)?;
        self.set_association(Association(state.association));
        self.select = QmEventSelect(state.select);
        self.set_l2_masks(state.l2_masks);
        self.l2_cdp = state.l2_cdp;
        self.package.restore(&state.package);
        Ok(())
    }
}

impl Package {
    fn save(&self) -> PackageState {
        PackageState {
            l3_masks: std::array::from_fn(|n| self.l3_mask(n)),
            delays: std::array::from_fn(|n| self.delay_value(n)),
            cdp: self.cdp(),
            traffic: self.traffic(),
        }
    }

    fn restore(&self, state: &PackageState) {
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
