//! Resource Director Technology of one virtual processor: monitoring (CMT, MBM) and allocation (CAT,
//! CDP, MBA). SDM Vol. 3B, "Intel Resource Director Technology (Intel RDT)".
//!
//! [`Rdt`] holds what is a processor's own, [`Package`] what all processors of the machine share. What
//! the numbers mean is the matter of the cache model, which asks [`Rdt::class`] how to treat an access
//! and keeps the [`Package`]'s tallies.

mod package;
mod state;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use hindsight_regs::msr as regs;
use hindsight_regs::rdt::{self, Association, QmEventSelect, counter, event};

pub use package::Package;
pub use state::{PackageState, RdtError, RdtState};

use crate::facility::Facilities;

/// Registers of L2 masks.
const L2: usize = rdt::L2_COS as usize;

/// What an MSR number means here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Register {
    L3Config,
    L2Config,
    Select,
    Counter,
    Association,
    L3Mask(usize),
    L2Mask(usize),
    Delay(usize),
}

impl Register {
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

/// How the accesses of a processor are treated, as its association says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Class {
    /// What its fills and its traffic are charged to.
    pub rmid: u32,
    /// L3 ways that data may be filled into.
    pub l3_data: u64,
    /// L3 ways that code may be filled into.
    pub l3_code: u64,
    /// L2 ways that data may be filled into; 0 where there is no L2 CAT.
    pub l2_data: u64,
    /// L2 ways that code may be filled into; 0 where there is no L2 CAT.
    pub l2_code: u64,
    /// Percent by which requests beyond the core are held back: 0 to 90, in steps of 10.
    pub delay: u32,
}

/// The registers of one processor.
#[derive(Debug)]
pub struct Rdt {
    facilities: Facilities,
    package: Arc<Package>,
    assoc: Association,
    /// IA32_QM_EVTSEL, which each processor has for itself (rule CMT-10).
    select: QmEventSelect,
    /// Each core has an L2 of its own, and each processor is one (rule L2C-06).
    l2_masks: [u64; L2],
    l2_cdp: bool,
    /// Lines of the monitored RMID, as they were told last.
    occupied: u64,
}

impl Clone for Rdt {
    /// Another processor of the same package.
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
    pub fn new(facilities: Facilities, package: Arc<Package>) -> Self {
        Self {
            facilities,
            package,
            assoc: Association::default(),
            select: QmEventSelect::default(),
            l2_masks: [rdt::full_mask(rdt::L2_MASK_BITS); L2],
            l2_cdp: false,
            occupied: 0,
        }
    }

    /// What all processors share.
    pub const fn package(&self) -> &Arc<Package> {
        &self.package
    }

    /// IA32_PQR_ASSOC.
    pub const fn association(&self) -> Association {
        self.assoc
    }

    fn has(&self, facility: Facilities) -> bool {
        self.facilities.intersects(facility)
    }

    /// Whether cache and traffic must be modelled: see [`Package::in_use`].
    pub fn is_armed(&self) -> bool {
        self.package.in_use()
    }

    /// How an access of this processor is treated.
    pub fn class(&self) -> Class {
        let cos = usize::try_from(self.assoc.cos()).unwrap_or(usize::MAX);
        let (l3_data, l3_code) = self.package.l3_masks(cos);
        let (l2_data, l2_code) = if self.has(Facilities::L2CAT) {
            let full = rdt::full_mask(rdt::L2_MASK_BITS);
            by_purpose(cos, self.l2_cdp, full, |n| self.l2_masks.get(n).copied())
        } else {
            (0, 0)
        };
        Class {
            rmid: self.assoc.rmid(),
            l3_data,
            l3_code,
            l2_data,
            l2_code,
            delay: self.package.delay(cos),
        }
    }

    /// RDMSR; 0 for an MSR that is not one of these.
    pub fn read(&self, index: u32) -> u64 {
        match Register::of(index) {
            Some(Register::L3Config) => u64::from(self.package.cdp()),
            Some(Register::L2Config) => u64::from(self.l2_cdp),
            Some(Register::Select) => self.select.0,
            Some(Register::Counter) => self.counter(),
            Some(Register::Association) => self.assoc.0,
            Some(Register::L3Mask(cos)) => self.package.l3_mask(cos),
            Some(Register::L2Mask(cos)) => self.l2_masks[cos],
            Some(Register::Delay(cos)) => self.package.delay_value(cos),
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
        if !self.package.is_warm() {
            return counter::UNAVAILABLE;
        }
        match select {
            // A unit that is begun is one.
            event::OCCUPANCY => self
                .occupied
                .saturating_mul(package::LINE)
                .div_ceil(rdt::UPSCALE.into()),
            _ => self.package.bandwidth(self.select.rmid()),
        }
    }

    /// The RMID whose occupancy the next read of IA32_QM_CTR shows, if it shows one.
    pub fn monitored(&self) -> Option<u32> {
        (self.select.event() == event::OCCUPANCY).then(|| self.select.rmid())
    }

    /// How many lines the [`Rdt::monitored`] RMID has in the L3 now.
    pub const fn set_occupied(&mut self, lines: u64) {
        self.occupied = lines;
    }

    /// WRMSR of a value whose reserved bits were checked; `false` asks for #GP(0), and nothing changed.
    #[must_use]
    pub fn write(&mut self, index: u32, value: u64) -> bool {
        match Register::of(index) {
            Some(Register::L3Config) => self.package.set_cdp(value & rdt::CDP_ENABLE != 0),
            Some(Register::L2Config) => self.l2_cdp = value & rdt::CDP_ENABLE != 0,
            // Rule CMT-02.
            Some(Register::Select) if QmEventSelect(value).rmid() <= rdt::MAX_RMID => {
                self.select = QmEventSelect(value);
            }
            Some(Register::Association) if self.may_associate(Association(value)) => {
                self.set_association(Association(value));
            }
            Some(Register::L3Mask(cos)) if rdt::is_capacity_mask(value, rdt::L3_MASK_BITS) => {
                self.package.set_l3_mask(cos, value);
            }
            Some(Register::L2Mask(cos)) if rdt::is_capacity_mask(value, rdt::L2_MASK_BITS) => {
                let mut masks = self.l2_masks;
                masks[cos] = value;
                self.set_l2_masks(masks);
            }
            // Rule MBA-04.
            Some(Register::Delay(cos)) if value <= u64::from(rdt::MBA_MAX) => {
                self.package.set_delay(cos, value);
            }
            _ => return false,
        }
        true
    }

    /// Rules RDT-05 and RDT-06. Of what is not enumerated, only number 0 exists.
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
        let before = std::mem::replace(&mut self.assoc, assoc);
        self.package.associated(before, assoc);
    }

    fn set_l2_masks(&mut self, masks: [u64; L2]) {
        let full = rdt::full_mask(rdt::L2_MASK_BITS);
        let narrow = |masks: [u64; L2]| masks.iter().any(|&mask| mask != full);
        let before = std::mem::replace(&mut self.l2_masks, masks);
        self.package.narrowed(narrow(before), narrow(masks));
    }
}

/// The masks of a class for data and for code. With CDP, a class whose pair of masks does not exist has
/// the full one (rule CDP-07).
fn by_purpose(cos: usize, cdp: bool, full: u64, mask: impl Fn(usize) -> Option<u64>) -> (u64, u64) {
    if !cdp {
        let both = mask(cos).unwrap_or(full);
        return (both, both);
    }
    let data = cos.checked_mul(2).and_then(&mask);
    let code = cos.checked_mul(2).and_then(|n| mask(n + 1));
    (data.unwrap_or(full), code.unwrap_or(full))
}
