//! The L1 and L2 caches of one core, and their use of the shared L3.
//!
//! An access goes to the L1, for code or for data; a miss continues to the L2, and from it to the
//! L3 of the package. A line is filled into every level that missed. The L3 is not inclusive: a
//! line that it evicts may stay in the other levels.

use super::UarchStateError;
use super::cache::{
    CacheAccess, CacheGeometry, CacheModel, CacheOutcome, CacheState, EvictedLine, LineRequest,
};

/// The level that served an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CacheLevel {
    /// The first level, of one core.
    L1,
    /// The second level, of one core.
    L2,
    /// The third and l3 level, of the package.
    L3,
    /// Memory.
    Memory,
}

impl CacheLevel {
    /// Core cycles that a load from this level takes.
    pub const fn latency(self) -> u16 {
        match self {
            Self::L1 => 5,
            Self::L2 => 14,
            Self::L3 => 60,
            Self::Memory => 240,
        }
    }
}

/// How an access was served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServedLine {
    /// The level that had the line.
    pub level: CacheLevel,
    /// The outcome in the L3, if the access reached it.
    pub l3: Option<CacheOutcome>,
    /// Dirty lines that the L1 and the L2 wrote to memory, because no later level had them. The
    /// line that the L3 evicts is in [`ServedLine::l3`].
    pub written_back: [Option<EvictedLine>; 2],
}

/// The L1 and L2 caches of one core.
#[derive(Clone, Debug)]
pub struct CoreCaches {
    code: CacheModel,
    data: CacheModel,
    l2: CacheModel,
}

impl Default for CoreCaches {
    fn default() -> Self {
        Self {
            code: CacheModel::new(CacheGeometry::L1),
            data: CacheModel::new(CacheGeometry::L1),
            l2: CacheModel::new(CacheGeometry::L2),
        }
    }
}

impl CoreCaches {
    /// Applies one access; `request` has the mask of ways of the L3, and `l2_ways` is that of the
    /// L2.
    pub fn access(
        &mut self,
        l3: &mut CacheModel,
        request: &LineRequest,
        l2_ways: u32,
    ) -> ServedLine {
        let l1 = match request.kind {
            CacheAccess::Code => &mut self.code,
            CacheAccess::Load | CacheAccess::Store => &mut self.data,
        };
        let filled = l1.access(&LineRequest {
            ways: u32::MAX,
            ..*request
        });
        let mut served = ServedLine {
            level: CacheLevel::L1,
            l3: None,
            written_back: [None; 2],
        };
        if filled.hit {
            return served;
        }
        if let Some(evicted) = filled.evicted.filter(|line| line.dirty)
            && !self.l2.write_back(evicted.line)
            && !l3.write_back(evicted.line)
        {
            served.written_back[0] = Some(evicted);
        }
        // The L1 has the newest data; the line becomes dirty elsewhere when the L1 writes it back.
        let kind = match request.kind {
            CacheAccess::Store => CacheAccess::Load,
            kind => kind,
        };
        let filled = self.l2.access(&LineRequest {
            ways: l2_ways,
            kind,
            ..*request
        });
        if filled.hit {
            served.level = CacheLevel::L2;
            return served;
        }
        if let Some(evicted) = filled.evicted.filter(|line| line.dirty)
            && !l3.write_back(evicted.line)
        {
            served.written_back[1] = Some(evicted);
        }
        let outcome = l3.access(&LineRequest { kind, ..*request });
        served.level = if outcome.hit {
            CacheLevel::L3
        } else {
            CacheLevel::Memory
        };
        served.l3 = Some(outcome);
        served
    }

    /// Flushes a line from all levels: CLFLUSH and its like.
    ///
    /// Returns the line that is written to memory, if it was dirty in any level.
    pub fn flush(&mut self, l3: &mut CacheModel, line: u64) -> Option<EvictedLine> {
        let caches = [&mut self.code, &mut self.data, &mut self.l2, l3];
        let flushed = caches.map(|cache| cache.flush(line));
        flushed.into_iter().flatten().find(|line| line.dirty)
    }

    /// Empties the caches of the core, but not the L3: WBINVD and INVD.
    pub fn clear(&mut self) {
        for cache in [&mut self.code, &mut self.data, &mut self.l2] {
            cache.clear(|_| ());
        }
    }

    /// Whether no cache of the core has been used yet.
    pub const fn is_cold(&self) -> bool {
        self.code.is_cold() && self.data.is_cold()
    }
}

/// Saved state of a [`CoreCaches`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct CoreCachesState {
    /// L1 for code, L1 for data, L2.
    pub caches: [CacheState; 3],
}

impl Default for CoreCachesState {
    fn default() -> Self {
        CoreCaches::default().save()
    }
}

impl CoreCaches {
    /// The state as plain data.
    pub fn save(&self) -> CoreCachesState {
        CoreCachesState {
            caches: [&self.code, &self.data, &self.l2].map(CacheModel::save),
        }
    }

    /// Replaces the state by a saved one.
    ///
    /// # Errors
    ///
    /// Rejects a state that no accesses lead to; nothing has then changed.
    pub fn restore(&mut self, state: &CoreCachesState) -> Result<(), UarchStateError> {
        let mut new = Self::default();
        let caches = [&mut new.code, &mut new.data, &mut new.l2];
        for (cache, state) in caches.into_iter().zip(&state.caches) {
            cache.restore(state)?;
        }
        *self = new;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn request(line: u64, kind: CacheAccess) -> LineRequest {
        LineRequest {
            line,
            kind,
            rmid: 0,
            ways: u32::MAX,
        }
    }

    #[test]
    fn working_set_is_served_by_the_smallest_cache_that_holds_it() {
        let (mut core, mut l3) = (CoreCaches::default(), CacheModel::new(CacheGeometry::L3));
        let mut pass = |lines: u64| -> Vec<CacheLevel> {
            let one = |line| core.access(&mut l3, &request(line, CacheAccess::Load), u32::MAX);
            (0..lines).map(one).map(|served| served.level).collect()
        };
        assert!(pass(512).iter().all(|&level| level == CacheLevel::Memory));
        assert!(pass(512).iter().all(|&level| level == CacheLevel::L1));
        assert!(pass(16384).iter().all(|&level| level >= CacheLevel::L1));
        assert!(pass(16384).iter().all(|&level| level == CacheLevel::L2));
        pass(100_000);
        assert!(pass(100_000).iter().all(|&level| level == CacheLevel::L3));
    }

    #[test]
    fn code_and_data_share_all_levels_but_the_l1() {
        let (mut core, mut l3) = (CoreCaches::default(), CacheModel::new(CacheGeometry::L3));
        let mut level = |kind| {
            let served = core.access(&mut l3, &request(7, kind), u32::MAX);
            served.level
        };
        assert_eq!(level(CacheAccess::Code), CacheLevel::Memory);
        assert_eq!(level(CacheAccess::Load), CacheLevel::L2);
        assert_eq!(level(CacheAccess::Store), CacheLevel::L1);
        assert_eq!(level(CacheAccess::Code), CacheLevel::L1);
    }

    #[test]
    fn cores_share_the_l3() {
        let mut cores = [CoreCaches::default(), CoreCaches::default()];
        let mut l3 = CacheModel::new(CacheGeometry::L3);
        let levels = cores.each_mut().map(|core| {
            core.access(&mut l3, &request(9, CacheAccess::Load), u32::MAX)
                .level
        });
        assert_eq!(levels, [CacheLevel::Memory, CacheLevel::L3]);
    }

    #[test]
    fn flushed_line_is_in_no_level() {
        let (mut core, mut l3) = (CoreCaches::default(), CacheModel::new(CacheGeometry::L3));
        core.access(&mut l3, &request(1, CacheAccess::Store), u32::MAX);
        core.access(&mut l3, &request(2, CacheAccess::Load), u32::MAX);
        assert_eq!(core.flush(&mut l3, 1).map(|flushed| flushed.line), Some(1));
        assert_eq!(core.flush(&mut l3, 2), None);
        let again = core.access(&mut l3, &request(1, CacheAccess::Load), u32::MAX);
        assert_eq!(again.level, CacheLevel::Memory);
        core.clear();
        assert!(core.is_cold());
    }

    proptest! {
        /// No store is lost before it reaches memory, and no other line is written there.
        #[test]
        fn dirty_lines_are_written_back_exactly_once(
            accesses in prop::collection::vec((0_u64..64, any::<bool>()), 0..2000),
        ) {
            let mut core = CoreCaches::default();
            let mut l3 = CacheModel::new(CacheGeometry { sets: 1, ways: 4 });
            let (mut ever, mut pending) = (HashSet::new(), HashSet::new());
            for (n, store) in accesses {
                // All in one set of every level.
                let line = n * 1024;
                let kind = if store { CacheAccess::Store } else { CacheAccess::Load };
                let served = core.access(&mut l3, &request(line, kind), 0b11);
                let evicted = served.l3.and_then(|l3| l3.evicted).filter(|line| line.dirty);
                for written in served.written_back.into_iter().flatten().chain(evicted) {
                    prop_assert!(ever.contains(&written.line));
                    pending.remove(&written.line);
                }
                if store {
                    ever.insert(line);
                    pending.insert(line);
                }
            }
            for line in pending {
                prop_assert!(core.flush(&mut l3, line).is_some_and(|flushed| flushed.line == line));
            }
        }

        #[test]
        fn restored_caches_continue_like_the_original(
            accesses in prop::collection::vec((0_u64..2000, 0_usize..3), 0..400),
            at in 0_usize..400,
        ) {
            let small = CacheModel::new(CacheGeometry { sets: 64, ways: 4 });
            let (mut one, mut two) = (CoreCaches::default(), CoreCaches::default());
            let mut l3 = [small.clone(), small];
            let kinds = [CacheAccess::Code, CacheAccess::Load, CacheAccess::Store];
            for (i, (line, kind)) in accesses.into_iter().enumerate() {
                if i == at {
                    let mut restored = CoreCaches::default();
                    prop_assert_eq!(restored.restore(&two.save()), Ok(()));
                    two = restored;
                }
                let r = request(line, kinds[kind]);
                let served = one.access(&mut l3[0], &r, u32::MAX);
                prop_assert_eq!(served, two.access(&mut l3[1], &r, u32::MAX));
            }
        }
    }
}
