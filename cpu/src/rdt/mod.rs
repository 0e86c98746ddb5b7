//! Resource Director Technology of one virtual processor: monitoring and allocation.
//!
//! Monitoring is CMT and MBM, allocation CAT, CDP and MBA. SDM Vol. 3B, "Intel Resource Director
//! Technology (Intel RDT)".
//!
//! [`Rdt`] holds the registers of one processor, [`RdtPackage`] those that all processors share.
//! The cache model gives them their meaning: it asks [`Rdt::class`] how to treat an access, and
//! keeps the tallies of the [`RdtPackage`].

mod package;
mod state;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use hindsight_regs::msr as regs;
use hindsight_regs::rdt::{self, Association, QmEventSelect, counter, event};
use hindsight_regs::vector::GpFault;

pub use package::RdtPackage;
pub use state::{RdtPackageState, RdtState, RdtStateError};

use crate::facility::Facilities;

/// Number of L2 mask registers.
const L2: usize = rdt::L2_COS as usize;

/// An MSR of resource control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RdtRegister {
    L3Config,
    L2Config,
    Select,
    Counter,
    Association,
    L3Mask(usize),
    L2Mask(usize),
    Delay(usize),
}

impl RdtRegister {
    fn of(index: u32) -> Option<Self> {
        let from = |first: u32, count: u32| {
            let at = index.checked_sub(first).filter(|&at| at < count)?;
            usize::try_from(at).ok()
        };
        Some(match index {
            regs::IA32_L3_QOS_CFG => Self::L3Config,
            regs::IA32_L2_QOS_CFG => Self::L2Config,
            regs::IA32_QM_EVTSEL => Self::Select,
            regs::IA32_QM_CTR => Self::Counter,
            regs::IA32_PQR_ASSOC => Self::Association,
            _ => from(regs::IA32_L3_QOS_MASK_0, rdt::L3_COS)
                .map(Self::L3Mask)
                .or_else(|| from(regs::IA32_L2_QOS_MASK_0, rdt::L2_COS).map(Self::L2Mask))
                .or_else(|| {
                    from(regs::IA32_L2_QOS_EXT_BW_THRTL_0, rdt::MBA_COS).map(Self::Delay)
                })?,
        })
    }
}

/// How the memory accesses of a processor are treated, as its association says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceClass {
    /// The RMID to which fills and traffic are charged.
    pub rmid: u32,
    /// Mask of the L3 ways that data may fill.
    pub l3_data: u64,
    /// Mask of the L3 ways that code may fill.
    pub l3_code: u64,
    /// Capacity mask of the L2 for data; 0 without L2 CAT.
    pub l2_data: u64,
    /// Capacity mask of the L2 for code; 0 without L2 CAT.
    pub l2_code: u64,
    /// Percent by which requests beyond the core are delayed: 0 to 90, in steps of 10.
    pub delay: u32,
}

/// The resource control registers of one processor.
#[derive(Debug)]
pub struct Rdt {
    facilities: Facilities,
    package: Arc<RdtPackage>,
    assoc: Association,
    /// IA32_QM_EVTSEL of this processor (rule CMT-10).
    select: QmEventSelect,
    /// IA32_L2_QOS_MASK_n: each processor is a core with its own L2 (rule L2C-06).
    l2_masks: [u64; L2],
    l2_cdp: bool,
    /// L3 lines of the monitored RMID, as of the last [`Rdt::set_occupied_lines`].
    occupied_lines: u64,
}

impl Clone for Rdt {
    /// Makes another processor of the same package, with the same registers.
    fn clone(&self) -> Self {
        let mut clone = Self::new(self.facilities, self.package.clone());
        clone.set_association(self.assoc);
        clone.set_l2_masks(self.l2_masks);
        (clone.select, clone.l2_cdp) = (self.select, self.l2_cdp);
        clone
    }
}

impl Drop for Rdt {
    fn drop(&mut self) {
        self.set_association(Association::default());
        self.set_l2_masks([rdt::full_mask(rdt::L2_MASK_BITS); L2]);
    }
}

impl Rdt {
    /// The registers after RESET.
    pub fn new(facilities: Facilities, package: Arc<RdtPackage>) -> Self {
        Self {
            facilities,
            package,
            assoc: Association::default(),
            select: QmEventSelect::default(),
            l2_masks: [rdt::full_mask(rdt::L2_MASK_BITS); L2],
            l2_cdp: false,
            occupied_lines: 0,
        }
    }

    /// The registers and tallies that all processors share.
    pub const fn package(&self) -> &Arc<RdtPackage> {
        &self.package
    }

    /// IA32_PQR_ASSOC.
    pub const fn association(&self) -> Association {
        self.assoc
    }

    fn has(&self, facility: Facilities) -> bool {
        self.facilities.intersects(facility)
    }

    /// Whether cache and traffic must be modelled, see [`RdtPackage::in_use`].
    pub fn is_armed(&self) -> bool {
        self.package.in_use()
    }

    /// How the memory accesses of this processor are treated.
    pub fn class(&self) -> ServiceClass {
        let cos = usize::try_from(self.assoc.cos()).unwrap_or(usize::MAX);
        let (l3_data, l3_code) = self.package.l3_masks(cos);
        let (l2_data, l2_code) = if self.has(Facilities::L2CAT) {
            let full = rdt::full_mask(rdt::L2_MASK_BITS);
            by_purpose(cos, self.l2_cdp, full, |n| self.l2_masks.get(n).copied())
        } else {
            (0, 0)
        };
        ServiceClass {
            rmid: self.assoc.rmid(),
            l3_data,
            l3_code,
            l2_data,
            l2_code,
            delay: self.package.delay(cos),
        }
    }

    /// RDMSR of an MSR of resource control; 0 for any other.
    pub fn read(&self, index: u32) -> u64 {
        match RdtRegister::of(index) {
            Some(RdtRegister::L3Config) => u64::from(self.package.cdp()),
            Some(RdtRegister::L2Config) => u64::from(self.l2_cdp),
            Some(RdtRegister::Select) => self.select.0,
            Some(RdtRegister::Counter) => self.counter(),
            Some(RdtRegister::Association) => self.assoc.0,
            Some(RdtRegister::L3Mask(cos)) => self.package.l3_mask(cos),
            Some(RdtRegister::L2Mask(cos)) => self.l2_masks[cos],
            Some(RdtRegister::Delay(cos)) => self.package.delay_value(cos),
            None => 0,
        }
    }

    /// IA32_QM_CTR (rules CMT-03 to CMT-09).
    fn counter(&self) -> u64 {
        let (select, needs) = match self.select.event() {
            event::OCCUPANCY => (event::OCCUPANCY, Facilities::CMT),
            bandwidth @ (event::TOTAL | event::LOCAL) => (bandwidth, Facilities::MBM),
            _ => return counter::ERROR,
        };
        if !self.has(needs) {
            return counter::ERROR;
        }
        if !self.package.is_tracked() {
            return counter::UNAVAILABLE;
        }
        match select {
            // Occupancy is rounded up to whole units.
            event::OCCUPANCY => self
                .occupied_lines
                .saturating_mul(package::LINE)
                .div_ceil(rdt::UPSCALE.into()),
            _ => self.package.bandwidth(self.select.rmid()),
        }
    }

    /// The RMID whose occupancy IA32_QM_CTR shows; `None` if it shows no occupancy.
    pub fn monitored_rmid(&self) -> Option<u32> {
        (self.select.event() == event::OCCUPANCY).then(|| self.select.rmid())
    }

    /// Sets the number of L3 lines that are charged to the [`Rdt::monitored_rmid`].
    pub const fn set_occupied_lines(&mut self, lines: u64) {
        self.occupied_lines = lines;
    }

    /// WRMSR of an MSR of resource control. The caller has checked reserved bits.
    ///
    /// # Errors
    ///
    /// [`GpFault`] for an illegal value, and for an MSR that is not of resource control; nothing
    /// changed.
    pub fn write(&mut self, index: u32, value: u64) -> Result<(), GpFault> {
        match RdtRegister::of(index) {
            Some(RdtRegister::L3Config) => self.package.set_cdp(value & rdt::CDP_ENABLE != 0),
            Some(RdtRegister::L2Config) => self.l2_cdp = value & rdt::CDP_ENABLE != 0,
            // Rule CMT-02.
            Some(RdtRegister::Select) if QmEventSelect(value).rmid() <= rdt::MAX_RMID => {
                self.select = QmEventSelect(value);
            }
            Some(RdtRegister::Association) if self.may_associate(Association(value)) => {
                self.set_association(Association(value));
            }
            Some(RdtRegister::L3Mask(cos)) if rdt::is_capacity_mask(value, rdt::L3_MASK_BITS) => {
                self.package.set_l3_mask(cos, value);
            }
            Some(RdtRegister::L2Mask(cos)) if rdt::is_capacity_mask(value, rdt::L2_MASK_BITS) => {
                let mut masks = self.l2_masks;
                masks[cos] = value;
                self.set_l2_masks(masks);
            }
            // Rule MBA-04.
            Some(RdtRegister::Delay(cos)) if value <= u64::from(rdt::MBA_MAX) => {
                self.package.set_delay(cos, value);
            }
            _ => return Err(GpFault),
        }
        Ok(())
    }

    /// Whether RMID and class of service exist; only number 0 exists of what CPUID does not
    /// enumerate.
    ///
    /// Rules RDT-05 and RDT-06.
    fn may_associate(&self, assoc: Association) -> bool {
        let rmids = if self.has(Facilities::CMT.union(Facilities::MBM)) {
            rdt::MAX_RMID
        } else {
            0
        };
        let classes = [
            (Facilities::L3CAT, rdt::L3_COS),
            (Facilities::L2CAT, rdt::L2_COS),
            (Facilities::MBA, rdt::MBA_COS),
        ];
        let classes = classes
            .into_iter()
            .filter(|&(facility, _)| self.has(facility));
        let classes = classes.map(|(_, count)| count).max().unwrap_or(1);
        assoc.rmid() <= rmids && assoc.cos() < classes
    }

    fn set_association(&mut self, assoc: Association) {
        debug_assert!(assoc.rmid() <= rdt::MAX_RMID, "the RMID was checked");
        let before = std::mem::replace(&mut self.assoc, assoc);
        self.package.count_association(before, assoc);
    }

    fn set_l2_masks(&mut self, masks: [u64; L2]) {
        let full = rdt::full_mask(rdt::L2_MASK_BITS);
        let restricts = |masks: [u64; L2]| masks.iter().any(|&mask| mask != full);
        let before = std::mem::replace(&mut self.l2_masks, masks);
        self.package
            .count_l2_masks(restricts(before), restricts(masks));
    }
}

/// The masks of a class for data and for code; `mask` reads mask register `n`.
///
/// With CDP, a class whose pair of masks does not exist has the full one (rule CDP-07).
fn by_purpose(cos: usize, cdp: bool, full: u64, mask: impl Fn(usize) -> Option<u64>) -> (u64, u64) {
    if !cdp {
        let both = mask(cos).unwrap_or(full);
        return (both, both);
    }
    let data = cos.checked_mul(2).and_then(&mask);
    let code = cos.checked_mul(2).and_then(|n| mask(n + 1));
    (data.unwrap_or(full), code.unwrap_or(full))
}
