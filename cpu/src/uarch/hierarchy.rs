//! The caches of one core, before the last level that it shares with the others.
//!
//! An access goes to the first level, for code or for data; what misses there to the second, and
//! what misses there to the third, which is the package's. A line is filled into every level that
//! missed. The third level does not include the others: what leaves it may stay in them.

use serde::{Deserialize, Serialize};

use super::ModelError;
use super::cache::{Cache, CacheState, Evicted, Geometry, Kind, Outcome, Request};

/// Where a line came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The first level.
    L1,
    /// The second level.
    L2,
    /// The last level.
    L3,
    /// Memory.
    Memory,
}

impl Level {
    /// Cycles until a load from there is complete.
    pub const fn latency(self) -> u16 {
        match self {
            Self::L1 => 5,
            Self::L2 => 14,
            Self::L3 => 60,
            Self::Memory => 240,
        }
    }
}

/// What became of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// Where the line was.
    pub level: Level,
    /// What happened in the last level, if the access came so far.
    pub last: Option<Outcome>,
    /// Dirty lines that went from the first and the second level to memory, as no later one had
    /// them. What leaves the last level is in [`Served::last`].
    pub written: [Option<Evicted>; 2],
}

/// The caches of one core.
#[derive(Clone, Debug)]
pub struct Hierarchy {
    code: Cache,
    data: Cache,
    second: Cache,
}

impl Default for Hierarchy {
    fn default() -> Self {
        Self {
            code: Cache::new(Geometry::L1),
            data: Cache::new(Geometry::L1),
            second: Cache::new(Geometry::L2),
        }
    }
}

impl Hierarchy {
    /// One access; `request` holds the capacity mask of `last`, the last level, and `second_ways`
    /// is that of the second.
    pub fn access(&mut self, last: &mut Cache, request: &Request, second_ways: u32) -> Served {
        let first = match request.kind {
            Kind::Code => &mut self.code,
            Kind::Load | Kind::Store => &mut self.data,
        };
        let filled = first.access(&Request {
            ways: u32::MAX,
            ..*request
        });
        let mut served = Served {
            level: Level::L1,
            last: None,
            written: [None; 2],
        };
        if filled.hit {
            return served;
        }
        if let Some(gone) = filled.evicted.filter(|gone| gone.dirty)
            && !self.second.write_back(gone.line)
            && !last.write_back(gone.line)
        {
            served.written[0] = Some(gone);
        }
        // The first level has the newest data; the others hear of a store when it comes back.
        let kind = match request.kind {
            Kind::Store => Kind::Load,
            kind => kind,
        };
        let filled = self.second.access(&Request {
            ways: second_ways,
            kind,
            ..*request
        });
        if filled.hit {
            served.level = Level::L2;
            return served;
        }
        if let Some(gone) = filled.evicted.filter(|gone| gone.dirty)
            && !last.write_back(gone.line)
        {
            served.written[1] = Some(gone);
        }
        let outcome = last.access(&Request { kind, ..*request });
        served.level = if outcome.hit {
            Level::L3
        } else {
            Level::Memory
        };
        served.last = Some(outcome);
        served
    }

    /// CLFLUSH and its like, in all levels; answers the line that goes to memory, if it was dirty
    /// anywhere.
    pub fn flush(&mut self, last: &mut Cache, line: u64) -> Option<Evicted> {
        let caches = [&mut self.code, &mut self.data, &mut self.second, last];
        let gone = caches.map(|cache| cache.flush(line));
        gone.into_iter().flatten().find(|gone| gone.dirty)
    }

    /// WBINVD and INVD, but for the last level.
    pub fn clear(&mut self) {
        for cache in [&mut self.code, &mut self.data, &mut self.second] {
            cache.clear(|_| ());
        }
    }

    /// No level was used yet.
    pub const fn is_cold(&self) -> bool {
        self.code.is_cold() && self.data.is_cold()
    }
}

/// Saved state of a [`Hierarchy`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HierarchyState {
    /// First level for code, first level for data, second level.
    pub caches: [CacheState; 3],
}

impl Default for HierarchyState {
    fn default() -> Self {
        Hierarchy::default().save()
    }
}

impl Hierarchy {
    /// Everything there is to save.
    pub fn save(&self) -> HierarchyState {
        HierarchyState {
            caches: [&self.code, &self.data, &self.second].map(Cache::save),
        }
    }

    /// Takes over a saved state.
    ///
    /// # Errors
    ///
    /// Refuses what no accesses could have led to; the caches are then as before.
    pub fn restore(&mut self, state: &HierarchyState) -> Result<(), ModelError> {
        let mut new = Self::default();
        let caches = [&mut new.code, &mut new.data, &mut new.second];
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

    fn request(line: u64, kind: Kind) -> Request {
        Request {
            line,
            kind,
            rmid: 0,
            ways: u32::MAX,
        }
    }

    #[test]
    fn what_was_used_is_found_as_near_as_it_fits() {
        let (mut core, mut last) = (Hierarchy::default(), Cache::new(Geometry::L3));
        let mut pass = |lines: u64| -> Vec<Level> {
            let one = |line| core.access(&mut last, &request(line, Kind::Load), u32::MAX);
            (0..lines).map(one).map(|served| served.level).collect()
        };
        assert!(pass(512).iter().all(|&level| level == Level::Memory));
        assert!(pass(512).iter().all(|&level| level == Level::L1));
        assert!(pass(16384).iter().all(|&level| level >= Level::L1));
        assert!(pass(16384).iter().all(|&level| level == Level::L2));
        pass(100_000);
        assert!(pass(100_000).iter().all(|&level| level == Level::L3));
    }

    #[test]
    fn code_and_data_share_all_but_the_first_level() {
        let (mut core, mut last) = (Hierarchy::default(), Cache::new(Geometry::L3));
        let mut level = |kind| {
            let served = core.access(&mut last, &request(7, kind), u32::MAX);
            served.level
        };
        assert_eq!(level(Kind::Code), Level::Memory);
        assert_eq!(level(Kind::Load), Level::L2);
        assert_eq!(level(Kind::Store), Level::L1);
        assert_eq!(level(Kind::Code), Level::L1);
    }

    #[test]
    fn other_cores_share_the_last_level() {
        let mut cores = [Hierarchy::default(), Hierarchy::default()];
        let mut last = Cache::new(Geometry::L3);
        let levels = cores.each_mut().map(|core| {
            core.access(&mut last, &request(9, Kind::Load), u32::MAX)
                .level
        });
        assert_eq!(levels, [Level::Memory, Level::L3]);
    }

    #[test]
    fn a_flushed_line_is_nowhere() {
        let (mut core, mut last) = (Hierarchy::default(), Cache::new(Geometry::L3));
        core.access(&mut last, &request(1, Kind::Store), u32::MAX);
        core.access(&mut last, &request(2, Kind::Load), u32::MAX);
        assert_eq!(core.flush(&mut last, 1).map(|gone| gone.line), Some(1));
        assert_eq!(core.flush(&mut last, 2), None);
        let again = core.access(&mut last, &request(1, Kind::Load), u32::MAX);
        assert_eq!(again.level, Level::Memory);
        core.clear();
        assert!(core.is_cold());
    }

    proptest! {
        /// No store is lost on its way to memory, and nothing else is written there.
        #[test]
        fn what_was_written_is_written_back(
            accesses in prop::collection::vec((0_u64..64, any::<bool>()), 0..2000),
        ) {
            let (mut core, mut last) = (Hierarchy::default(), Cache::new(Geometry { sets: 1, ways: 4 }));
            let (mut ever, mut pending) = (HashSet::new(), HashSet::new());
            for (n, store) in accesses {
                // All in one set of every level.
                let line = n * 1024;
                let kind = if store { Kind::Store } else { Kind::Load };
                let served = core.access(&mut last, &request(line, kind), 0b11);
                let evicted = served.last.and_then(|last| last.evicted).filter(|gone| gone.dirty);
                for gone in served.written.into_iter().flatten().chain(evicted) {
                    prop_assert!(ever.contains(&gone.line));
                    pending.remove(&gone.line);
                }
                if store {
                    ever.insert(line);
                    pending.insert(line);
                }
            }
            for line in pending {
                prop_assert!(core.flush(&mut last, line).is_some_and(|gone| gone.line == line));
            }
        }

        #[test]
        fn it_can_be_saved_and_goes_on_as_it_would(
            accesses in prop::collection::vec((0_u64..2000, 0_usize..3), 0..400),
            at in 0_usize..400,
        ) {
            let small = Cache::new(Geometry { sets: 64, ways: 4 });
            let (mut one, mut two) = (Hierarchy::default(), Hierarchy::default());
            let mut last = [small.clone(), small];
            let kinds = [Kind::Code, Kind::Load, Kind::Store];
            for (i, (line, kind)) in accesses.into_iter().enumerate() {
                if i == at {
                    let mut restored = Hierarchy::default();
                    prop_assert_eq!(restored.restore(&two.save()), Ok(()));
                    two = restored;
                }
                let r = request(line, kinds[kind]);
                let served = one.access(&mut last[0], &r, u32::MAX);
                prop_assert_eq!(served, two.access(&mut last[1], &r, u32::MAX));
            }
        }
    }
}
