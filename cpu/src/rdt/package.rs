//! The registers and tallies that the processors of a package share.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use hindsight_regs::rdt::{self, Association};

use super::by_purpose;

/// Number of L3 mask registers.
pub(super) const L3: usize = rdt::L3_COS as usize;
/// Number of delay value registers.
pub(super) const DELAYS: usize = rdt::MBA_COS as usize;
/// Number of RMIDs.
pub(super) const RMIDS: usize = rdt::MAX_RMID as usize + 1;
/// Bytes of a cache line.
pub(super) const LINE: u64 = 64;

/// L3 masks, delay values and the traffic of each RMID, shared by all processors of a machine.
///
/// The values are independent of each other, so that accesses of several threads need no lock.
#[derive(Debug)]
pub struct RdtPackage {
    l3_masks: [AtomicU64; L3],
    delays: [AtomicU64; DELAYS],
    cdp: AtomicBool,
    /// Number of processors whose association is not 0.
    associated: AtomicU32,
    /// Number of processors with an L2 mask that is not full.
    restricted: AtomicU32,
    /// See [`RdtPackage::in_use`].
    used: AtomicBool,
    /// A cache model keeps the tallies.
    tracked: AtomicBool,
    /// Cache lines moved between L3 and memory, by RMID.
    traffic: [AtomicU64; RMIDS],
}

impl Default for RdtPackage {
    fn default() -> Self {
        let full = rdt::full_mask(rdt::L3_MASK_BITS);
        Self {
            l3_masks: std::array::from_fn(|_| AtomicU64::new(full)),
            delays: std::array::from_fn(|_| AtomicU64::new(0)),
            cdp: AtomicBool::new(false),
            associated: AtomicU32::new(0),
            restricted: AtomicU32::new(0),
            used: AtomicBool::new(false),
            tracked: AtomicBool::new(false),
            traffic: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

impl RdtPackage {
    /// Whether software uses monitoring or allocation.
    ///
    /// Use begins with the first association other than 0, or the first mask or delay value that
    /// differs from RESET. It ends when software resets the last mask or delay value while no
    /// processor is associated. Context switches alone do not end it.
    pub fn in_use(&self) -> bool {
        self.used.load(Ordering::SeqCst)
    }

    /// Counts a processor whose association changed.
    pub(super) fn count_association(&self, before: Association, after: Association) {
        match (before.0 != 0, after.0 != 0) {
            (false, true) => {
                self.associated.fetch_add(1, Ordering::SeqCst);
                self.used.store(true, Ordering::SeqCst);
            }
            (true, false) => {
                let processors = self.associated.fetch_sub(1, Ordering::SeqCst);
                debug_assert!(processors != 0, "every association is counted once");
            }
            _ => {}
        }
    }

    /// Counts a processor that has, or no longer has, an L2 mask that is not full.
    pub(super) fn count_l2_masks(&self, before: bool, after: bool) {
        match (before, after) {
            (false, true) => {
                self.restricted.fetch_add(1, Ordering::SeqCst);
                self.update_use();
            }
            (true, false) => {
                let processors = self.restricted.fetch_sub(1, Ordering::SeqCst);
                debug_assert!(processors != 0, "every processor is counted once");
                self.update_use();
            }
            _ => {}
        }
    }

    /// Updates [`RdtPackage::in_use`] after a change of masks or delay values.
    fn update_use(&self) {
        let used = !self.masks_are_reset() || self.associated.load(Ordering::SeqCst) != 0;
        self.used.store(used, Ordering::SeqCst);
    }

    fn masks_are_reset(&self) -> bool {
        let full = rdt::full_mask(rdt::L3_MASK_BITS);
        (0..L3).all(|cos| self.l3_mask(cos) == full)
            && (0..DELAYS).all(|cos| self.delay_value(cos) == 0)
            && !self.cdp()
            && self.restricted.load(Ordering::SeqCst) == 0
    }

    /// IA32_L3_QOS_MASK_n; `n` is below 16.
    pub(super) fn l3_mask(&self, n: usize) -> u64 {
        self.l3_masks[n].load(Ordering::Relaxed)
    }

    pub(super) fn set_l3_mask(&self, n: usize, mask: u64) {
        debug_assert!(
            rdt::is_capacity_mask(mask, rdt::L3_MASK_BITS),
            "the mask was checked"
        );
        self.l3_masks[n].store(mask, Ordering::Relaxed);
        self.update_use();
    }

    /// The L3 masks of a class for data and for code (rules CDP-03, CDP-07).
    pub(super) fn l3_masks(&self, cos: usize) -> (u64, u64) {
        let full = rdt::full_mask(rdt::L3_MASK_BITS);
        by_purpose(cos, self.cdp(), full, |n| {
            Some(self.l3_masks.get(n)?.load(Ordering::Relaxed))
        })
    }

    /// IA32_L2_QoS_Ext_BW_Thrtl_n as written (rule MBA-06); `n` is below 8.
    pub(super) fn delay_value(&self, n: usize) -> u64 {
        self.delays[n].load(Ordering::Relaxed)
    }

    pub(super) fn set_delay(&self, n: usize, delay: u64) {
        debug_assert!(delay <= rdt::MBA_MAX.into(), "the delay value was checked");
        self.delays[n].store(delay, Ordering::Relaxed);
        self.update_use();
    }

    /// The delay of a class in percent, rounded down to the step of the hardware (rule MBA-05).
    ///
    /// A class without a register has no delay (rule MBA-08).
    pub(super) fn delay(&self, cos: usize) -> u32 {
        let value = self
            .delays
            .get(cos)
            .map_or(0, |delay| delay.load(Ordering::Relaxed));
        let value = u32::try_from(value).unwrap_or(0);
        value - value % rdt::MBA_STEP
    }

    pub(super) fn cdp(&self) -> bool {
        self.cdp.load(Ordering::Relaxed)
    }

    pub(super) fn set_cdp(&self, on: bool) {
        self.cdp.store(on, Ordering::Relaxed);
        self.update_use();
    }

    /// Sets whether a cache model counts occupancy and traffic. If not, the traffic no longer changes.
    pub fn set_tracked(&self, tracked: bool) {
        self.tracked.store(tracked, Ordering::SeqCst);
    }

    /// Whether a cache model keeps the tallies.
    pub fn is_tracked(&self) -> bool {
        self.tracked.load(Ordering::SeqCst)
    }

    /// Adds lines that moved between L3 and memory for `rmid`.
    pub fn add_traffic(&self, rmid: u32, lines: u64) {
        let rmid = usize::try_from(rmid).unwrap_or(usize::MAX);
        if let Some(traffic) = self.traffic.get(rmid) {
            traffic.fetch_add(lines, Ordering::Relaxed);
        }
    }

    /// Traffic of `rmid` as IA32_QM_CTR shows it, in units of [`rdt::UPSCALE`] bytes.
    ///
    /// All traffic is local, because a machine has one package.
    pub(super) fn bandwidth(&self, rmid: u32) -> u64 {
        let rmid = usize::try_from(rmid).unwrap_or(usize::MAX);
        let lines = self.traffic.get(rmid);
        let lines = lines.map_or(0, |lines| lines.load(Ordering::Relaxed));
        (lines.saturating_mul(LINE) / u64::from(rdt::UPSCALE)) & rdt::BANDWIDTH_MASK
    }

    pub(super) fn traffic(&self) -> Vec<u64> {
        let traffic = self.traffic.iter();
        traffic.map(|t| t.load(Ordering::Relaxed)).collect()
    }

    pub(super) fn set_traffic(&self, traffic: &[u64]) {
        for (to, &from) in self.traffic.iter().zip(traffic) {
            to.store(from, Ordering::Relaxed);
        }
    }
}
