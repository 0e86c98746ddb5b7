//! What the processors of a package share: masks, delay values, and the traffic of each RMID.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use hindsight_regs::rdt::{self, Association};

use super::by_purpose;

/// Registers of L3 masks.
pub(super) const L3: usize = rdt::L3_COS as usize;
/// Registers of delay values.
pub(super) const DELAYS: usize = rdt::MBA_COS as usize;
/// RMIDs.
pub(super) const RMIDS: usize = rdt::MAX_RMID as usize + 1;
/// Bytes of a cache line.
pub(super) const LINE: u64 = 64;

/// What the processors of a machine share. Each value stands for itself, so that accesses of several
/// threads need no lock.
#[derive(Debug)]
pub struct Package {
    l3_masks: [AtomicU64; L3],
    delays: [AtomicU64; DELAYS],
    cdp: AtomicBool,
    /// Processors whose association is not 0.
    associated: AtomicU32,
    /// Processors with an L2 mask that is not full.
    narrowed: AtomicU32,
    /// See [`Package::in_use`].
    used: AtomicBool,
    /// There is a cache model that keeps the tallies.
    warm: AtomicBool,
    /// Lines that went to and from memory, by RMID.
    traffic: [AtomicU64; RMIDS],
}

impl Default for Package {
    fn default() -> Self {
        let full = rdt::full_mask(rdt::L3_MASK_BITS);
        Self {
            l3_masks: std::array::from_fn(|_| AtomicU64::new(full)),
            delays: std::array::from_fn(|_| AtomicU64::new(0)),
            cdp: AtomicBool::new(false),
            associated: AtomicU32::new(0),
            narrowed: AtomicU32::new(0),
            used: AtomicBool::new(false),
            warm: AtomicBool::new(false),
            traffic: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

impl Package {
    /// Whether software monitors or allocates: from the first association with an RMID or a class other
    /// than 0, or the first mask or delay that is not as after RESET, until software sets the last mask or
    /// delay back while no processor is associated. Context switches alone do not end it.
    pub fn in_use(&self) -> bool {
        self.used.load(Ordering::SeqCst)
    }

    pub(super) fn associated(&self, before: Association, after: Association) {
        match (before.0 != 0, after.0 != 0) {
            (false, true) => {
                self.associated.fetch_add(1, Ordering::SeqCst);
                self.used.store(true, Ordering::SeqCst);
            }
            (true, false) => {
                self.associated.fetch_sub(1, Ordering::SeqCst);
            }
            _ => {}
        }
    }

    /// A processor has an L2 mask that is not full, or has none any more.
    pub(super) fn narrowed(&self, before: bool, after: bool) {
        match (before, after) {
            (false, true) => {
                self.narrowed.fetch_add(1, Ordering::SeqCst);
                self.allocated();
            }
            (true, false) => {
                self.narrowed.fetch_sub(1, Ordering::SeqCst);
                self.allocated();
            }
            _ => {}
        }
    }

    /// A mask, a delay value or the use of masks was set.
    fn allocated(&self) {
        let used = !self.is_as_reset() || self.associated.load(Ordering::SeqCst) != 0;
        self.used.store(used, Ordering::SeqCst);
    }

    fn is_as_reset(&self) -> bool {
        let full = rdt::full_mask(rdt::L3_MASK_BITS);
        (0..L3).all(|cos| self.l3_mask(cos) == full)
            && (0..DELAYS).all(|cos| self.delay_value(cos) == 0)
            && !self.cdp()
            && self.narrowed.load(Ordering::SeqCst) == 0
    }

    /// IA32_L3_QOS_MASK_n of an `n` below 16.
    pub(super) fn l3_mask(&self, n: usize) -> u64 {
        self.l3_masks[n].load(Ordering::Relaxed)
    }

    pub(super) fn set_l3_mask(&self, n: usize, mask: u64) {
        self.l3_masks[n].store(mask, Ordering::Relaxed);
        self.allocated();
    }

    /// The L3 masks of a class for data and for code (rules CDP-03, CDP-07).
    pub(super) fn l3_masks(&self, cos: usize) -> (u64, u64) {
        let full = rdt::full_mask(rdt::L3_MASK_BITS);
        by_purpose(cos, self.cdp(), full, |n| {
            Some(self.l3_masks.get(n)?.load(Ordering::Relaxed))
        })
    }

    /// IA32_L2_QoS_Ext_BW_Thrtl_n of an `n` below 8, as written (rule MBA-06).
    pub(super) fn delay_value(&self, n: usize) -> u64 {
        self.delays[n].load(Ordering::Relaxed)
    }

    pub(super) fn set_delay(&self, n: usize, delay: u64) {
        self.delays[n].store(delay, Ordering::Relaxed);
        self.allocated();
    }

    /// The delay of a class as it is applied: rounded down (rule MBA-05), and none for a class with no
    /// register (rule MBA-08).
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
        self.allocated();
    }

    /// A cache model keeps the tallies from now on, or does not: traffic then stays where it was.
    pub fn set_warm(&self, warm: bool) {
        self.warm.store(warm, Ordering::SeqCst);
    }

    /// Whether a cache model keeps the tallies.
    pub fn is_warm(&self) -> bool {
        self.warm.load(Ordering::SeqCst)
    }

    /// So many lines went between the L3 and memory for `rmid`.
    pub fn moved(&self, rmid: u32, lines: u64) {
        let rmid = usize::try_from(rmid).unwrap_or(usize::MAX);
        if let Some(traffic) = self.traffic.get(rmid) {
            traffic.fetch_add(lines, Ordering::Relaxed);
        }
    }

    /// Traffic of `rmid` in units of [`rdt::UPSCALE`] bytes, as IA32_QM_CTR shows it. All of it is local:
    /// a machine has one package.
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
