use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const SMALL: CacheGeometry = CacheGeometry { sets: 3, ways: 4 };

fn load(line: u64) -> LineRequest {
    LineRequest {
        line,
        kind: CacheAccess::Load,
        rmid: 0,
        ways: u32::MAX,
    }
}

/// A reference model: a list for each set, newest line first.
#[derive(Default)]
struct ReferenceCache(HashMap<u64, Vec<(u64, u16, bool)>>);

impl ReferenceCache {
    fn access(&mut self, r: &LineRequest) -> CacheOutcome {
        let set = self.0.entry(r.line % u64::from(SMALL.sets)).or_default();
        let write = r.kind == CacheAccess::Store;
        if let Some(at) = set.iter().position(|e| e.0 == r.line) {
            let (line, rmid, dirty) = set.remove(at);
            set.insert(0, (line, rmid, dirty | write));
            return CacheOutcome {
                hit: true,
                evicted: None,
            };
        }
        let last = (set.len() == SMALL.ways as usize).then(|| set.pop().unwrap());
        set.insert(0, (r.line, r.rmid, write));
        CacheOutcome {
            hit: false,
            evicted: last.map(|(line, rmid, dirty)| EvictedLine { line, rmid, dirty }),
        }
    }
}

fn request() -> impl Strategy<Value = LineRequest> {
    let kind = prop_oneof![
        Just(CacheAccess::Code),
        Just(CacheAccess::Load),
        Just(CacheAccess::Store)
    ];
    (0_u64..40, kind, 0_u16..5).prop_map(|(line, kind, rmid)| LineRequest {
        line,
        kind,
        rmid,
        ways: u32::MAX,
    })
}

proptest! {
    #[test]
    fn replacement_is_lru(requests in prop::collection::vec(request(), 0..300)) {
        let (mut cache, mut reference) = (CacheModel::new(SMALL), ReferenceCache::default());
        for request in &requests {
            prop_assert_eq!(cache.access(request), reference.access(request));
        }
    }

    #[test]
    fn lines_are_charged_to_the_rmid_that_filled_them(
        requests in prop::collection::vec((request(), any::<bool>(), 0_u32..16), 0..300),
    ) {
        let mut cache = CacheModel::new(SMALL);
        let mut owned = [0_u64; 5];
        for (request, flush, ways) in requests {
            let removed = if flush {
                cache.flush(request.line)
            } else {
                let before = cache.save().lines.len();
                let outcome = cache.access(&LineRequest { ways, ..request });
                let filled = !outcome.hit && ways != 0;
                prop_assert_eq!(
                    cache.save().lines.len(),
                    before + usize::from(filled && outcome.evicted.is_none())
                );
                owned[usize::from(request.rmid)] += u64::from(filled);
                outcome.evicted
            };
            if let Some(removed) = removed {
                owned[usize::from(removed.rmid)] -= 1;
            }
            for (rmid, &lines) in (0..).zip(&owned) {
                prop_assert_eq!(cache.lines_of(rmid), lines);
            }
            let mut other = CacheModel::new(SMALL);
            prop_assert_eq!(other.restore(&cache.save()), Ok(()));
            prop_assert_eq!(other.save(), cache.save());
            for (rmid, &lines) in (0..).zip(&owned) {
                prop_assert_eq!(other.lines_of(rmid), lines);
            }
        }
    }

    /// Rule CAT-10.
    #[test]
    fn capacity_mask_limits_fills_to_its_ways(
        mine in prop::collection::vec(0_u64..40, 0..200),
        mask in 1_u32..16,
    ) {
        let mut cache = CacheModel::new(SMALL);
        for line in 100..112 {
            cache.access(&LineRequest { rmid: 1, ..load(line) });
        }
        for line in mine {
            cache.access(&LineRequest { rmid: 2, ways: mask, ..load(line) });
        }
        let mine = mask.count_ones() * SMALL.sets;
        prop_assert!(cache.lines_of(2) <= mine.into());
        prop_assert!(cache.lines_of(1) >= u64::from(12 - mine));
        for &(index, _, rmid, ..) in &cache.save().lines {
            if rmid == 2 {
                prop_assert!(mask >> (index % SMALL.ways) & 1 != 0);
            }
        }
    }
}

#[test]
fn loop_larger_than_the_cache_never_hits() {
    let mut cache = CacheModel::new(CacheGeometry::L3);
    let lines = u64::from(CacheGeometry::L3.sets) * u64::from(CacheGeometry::L3.ways);
    let mut misses = |n| {
        let mut count = 0;
        for _ in 0..2 {
            for line in 0..n {
                count += u64::from(!cache.access(&load(line)).hit);
            }
        }
        cache.clear(|_| ());
        count
    };
    assert_eq!(misses(lines), lines);
    // One line more than ways in every set: LRU always evicts the line that is needed next.
    assert_eq!(
        misses(lines + u64::from(CacheGeometry::L3.sets)) / 2,
        lines + 36864
    );
}

#[test]
fn dirty_lines_are_flagged_when_they_leave() {
    let mut cache = CacheModel::new(SMALL);
    assert!(cache.is_cold() && !cache.write_back(1));
    cache.access(&LineRequest {
        kind: CacheAccess::Store,
        rmid: 3,
        ..load(1)
    });
    cache.access(&load(2));
    cache.access(&load(3));
    assert!(cache.write_back(3) && !cache.write_back(4));
    let dirty = |line, rmid| EvictedLine {
        line,
        rmid,
        dirty: true,
    };
    assert_eq!(cache.flush(1), Some(dirty(1, 3)));
    assert_eq!(cache.flush(1), None);
    let mut written_back = Vec::new();
    cache.clear(|line| written_back.push(line));
    assert_eq!(written_back, [dirty(3, 0)]);
    assert!(cache.is_cold());
    assert_eq!(cache.lines_of(0), 0);
}

#[test]
fn geometries_have_the_sizes_of_the_processor() {
    let bytes = |g: CacheGeometry| u64::from(g.sets) * u64::from(g.ways) * u64::from(LINE);
    assert_eq!(bytes(CacheGeometry::L1), 32 << 10);
    assert_eq!(bytes(CacheGeometry::L2), 1 << 20);
    assert_eq!(bytes(CacheGeometry::L3), 99 << 18);
    assert_eq!(CacheGeometry::L3.all_ways(), 0x7ff);
    assert_eq!(CacheGeometry { sets: 1, ways: 32 }.all_ways(), u32::MAX);
}

#[test]
fn restore_rejects_invalid_states_and_changes_nothing() {
    let mut cache = CacheModel::new(SMALL);
    for line in 0..20 {
        cache.access(&load(line));
    }
    let good = cache.save();
    let rejected = |change: fn(&mut CacheState)| {
        let mut state = good.clone();
        change(&mut state);
        let mut other = cache.clone();
        assert!(other.restore(&state).is_err(), "{state:?}");
        assert_eq!(other.save(), good);
    };
    rejected(|s| s.cold = true);
    rejected(|s| s.lines[0].0 = 12);
    rejected(|s| s.lines[0].0 = s.lines[1].0);
    rejected(|s| s.lines[0].1 += 1);
    rejected(|s| s.lines[0].1 = u64::MAX);
    rejected(|s| s.lines[0].1 = s.lines[1].1);
    rejected(|s| s.lines[0].4 = 4);
    rejected(|s| s.lines[0].4 = s.lines[1].4);
}
