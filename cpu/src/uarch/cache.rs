//! A set-associative cache: the lines that it holds, and the RMIDs that filled them.
//!
//! Lines are identified by guest-physical address; the model holds no data. Each line has the RMID
//! that filled it (SDM Vol. 3B, "Cache Monitoring Technology"), and a fill may be restricted to
//! some of the ways ("Cache Allocation Technology"). Replacement is exact LRU among these ways.

use super::UarchStateError;

/// Binary logarithm of the bytes in a line.
pub const LINE_SHIFT: u32 = 6;
/// Bytes in a line.
pub const LINE: u32 = 1 << LINE_SHIFT;

/// Sets and ways of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheGeometry {
    /// Sets, 1 or more. The set of a line is its number modulo this.
    pub sets: u32,
    /// Ways, 1 to 32.
    pub ways: u32,
}

impl CacheGeometry {
    /// The L1, for data or for code: 32 KiB.
    pub const L1: Self = Self { sets: 64, ways: 8 };
    /// The L2 of one core: 1 MiB.
    pub const L2: Self = Self {
        sets: 1024,
        ways: 16,
    };
    /// The L3, shared by the package: 24.75 MiB.
    pub const L3: Self = Self {
        sets: 36864,
        ways: 11,
    };

    /// The mask of all ways.
    pub const fn all_ways(self) -> u32 {
        u32::MAX >> (32 - self.ways)
    }

    const fn lines(self) -> usize {
        self.sets as usize * self.ways as usize
    }
}

/// Kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheAccess {
    /// An instruction fetch.
    Code,
    /// A data read.
    Load,
    /// A data write: the line becomes dirty.
    Store,
}

/// One access to one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineRequest {
    /// Guest-physical address, shifted right by [`LINE_SHIFT`].
    pub line: u64,
    /// Kind of the access.
    pub kind: CacheAccess,
    /// The RMID to which a fill is charged.
    pub rmid: u16,
    /// Mask of the ways that a fill may use; 0 fills nothing. A hit may be in any way.
    pub ways: u32,
}

/// A line that was evicted or flushed from a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvictedLine {
    /// Guest-physical address, shifted right by [`LINE_SHIFT`].
    pub line: u64,
    /// The RMID that filled it.
    pub rmid: u16,
    /// The line was written and must be written back.
    pub dirty: bool,
}

/// The outcome of an access to one cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheOutcome {
    /// The cache held the line.
    pub hit: bool,
    /// The line that the fill evicted.
    pub evicted: Option<EvictedLine>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct CacheLine {
    /// Line number + 1; 0 for an empty way.
    tag: u64,
    rmid: u16,
    dirty: bool,
    /// Number of other lines of the set that were used since this one.
    age: u8,
}

impl CacheLine {
    const fn line(&self) -> u64 {
        self.tag - 1
    }

    const fn evicted(&self) -> EvictedLine {
        EvictedLine {
            line: self.line(),
            rmid: self.rmid,
            dirty: self.dirty,
        }
    }
}

/// A cache. It allocates its memory at the first access.
#[derive(Clone, Debug)]
pub struct CacheModel {
    geometry: CacheGeometry,
    /// All sets one after another; empty before the first access.
    lines: Vec<CacheLine>,
    /// Index of the line used last: most accesses are to that line again.
    recent: usize,
    /// Number of lines by RMID.
    charged: Vec<u32>,
}

impl CacheModel {
    /// An empty cache.
    pub const fn new(geometry: CacheGeometry) -> Self {
        Self {
            geometry,
            lines: Vec::new(),
            recent: 0,
            charged: Vec::new(),
        }
    }

    /// Sets and ways.
    pub const fn geometry(&self) -> CacheGeometry {
        self.geometry
    }

    /// Whether the cache was not used since it was created or cleared.
    pub const fn is_cold(&self) -> bool {
        self.lines.is_empty()
    }

    /// Number of lines that are charged to an RMID.
    pub fn lines_of(&self, rmid: u16) -> u64 {
        self.charged.get(usize::from(rmid)).map_or(0, |&n| n.into())
    }

    /// Applies one access; a line that misses is filled.
    pub fn access(&mut self, request: &LineRequest) -> CacheOutcome {
        if self.lines.is_empty() {
            self.lines = vec![CacheLine::default(); self.geometry.lines()];
        }
        let write = request.kind == CacheAccess::Store;
        let hit = CacheOutcome {
            hit: true,
            evicted: None,
        };
        // Fast path: the line used last stays the newest of its set, so that no age changes.
        let recent = &mut self.lines[self.recent];
        if recent.tag == request.line + 1 && recent.age == 0 {
            recent.dirty |= write;
            return hit;
        }
        let start = self.start(request.line);
        let set = &mut self.lines[start..][..self.geometry.ways as usize];
        if let Some(way) = find(set, request.line) {
            touch(set, way);
            set[way].dirty |= write;
            self.recent = start + way;
            return hit;
        }
        let Some(way) = victim(set, request.ways) else {
            return CacheOutcome::default();
        };
        let evicted = (set[way].tag != 0).then(|| set[way].evicted());
        if evicted.is_none() {
            // An empty way counts as the oldest line.
            set[way].age = u8::MAX;
        }
        touch(set, way);
        set[way] = CacheLine {
            tag: request.line + 1,
            rmid: request.rmid,
            dirty: write,
            age: 0,
        };
        self.recent = start + way;
        if let Some(evicted) = &evicted {
            self.discharge(evicted.rmid);
        }
        self.charge(request.rmid);
        CacheOutcome {
            hit: false,
            evicted,
        }
    }

    /// Takes a dirty line from the level before. Returns `false` if the cache does not hold it.
    pub fn write_back(&mut self, line: u64) -> bool {
        if self.is_cold() {
            return false;
        }
        let set = self.set(line);
        let Some(way) = find(set, line) else {
            return false;
        };
        set[way].dirty = true;
        true
    }

    /// Flushes a line. Returns it if the cache held it.
    pub fn flush(&mut self, line: u64) -> Option<EvictedLine> {
        if self.is_cold() {
            return None;
        }
        let set = self.set(line);
        let way = find(set, line)?;
        let flushed = std::mem::take(&mut set[way]);
        for line in set.iter_mut().filter(|line| line.age > flushed.age) {
            line.age -= 1;
        }
        self.discharge(flushed.rmid);
        Some(flushed.evicted())
    }

    /// Invalidates every line: WBINVD. Calls `write_back` for each dirty one.
    pub fn clear(&mut self, mut write_back: impl FnMut(EvictedLine)) {
        let lines = std::mem::take(&mut self.lines);
        self.charged.clear();
        for line in lines.iter().filter(|line| line.tag != 0 && line.dirty) {
            write_back(line.evicted());
        }
    }

    /// Index of the first way of a line's set.
    fn start(&self, line: u64) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "below the count of sets")]
        let set = (line % u64::from(self.geometry.sets)) as usize;
        debug_assert!(set < self.geometry.sets as usize, "no such set");
        set * self.geometry.ways as usize
    }

    fn set(&mut self, line: u64) -> &mut [CacheLine] {
        let start = self.start(line);
        &mut self.lines[start..][..self.geometry.ways as usize]
    }

    fn charge(&mut self, rmid: u16) {
        let rmid = usize::from(rmid);
        if rmid >= self.charged.len() {
            self.charged.resize(rmid + 1, 0);
        }
        self.charged[rmid] += 1;
    }

    fn discharge(&mut self, rmid: u16) {
        let lines = &mut self.charged[usize::from(rmid)];
        debug_assert!(*lines != 0, "every line is charged to its RMID once");
        *lines -= 1;
    }
}

fn find(set: &[CacheLine], line: u64) -> Option<usize> {
    set.iter().position(|held| held.tag == line + 1)
}

/// The way for a new line among `ways`: an empty one, or the least recently used.
fn victim(set: &[CacheLine], ways: u32) -> Option<usize> {
    let allowed = |way: &usize| ways >> way & 1 != 0;
    let ways = || (0..set.len()).filter(allowed);
    ways()
        .find(|&way| set[way].tag == 0)
        .or_else(|| ways().max_by_key(|&way| set[way].age))
}

/// Makes a way the most recently used of its set.
fn touch(set: &mut [CacheLine], way: usize) {
    let age = set[way].age;
    for line in set.iter_mut().filter(|e| e.tag != 0 && e.age < age) {
        line.age += 1;
    }
    set[way].age = 0;
}

/// Saved state of a [`CacheModel`]: its lines, by index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct CacheState {
    /// The cache was never used.
    pub cold: bool,
    /// Index (set times ways plus way), line, RMID, dirty, age; indices ascend.
    pub lines: Vec<(u32, u64, u16, bool, u8)>,
}

impl CacheModel {
    /// The state as plain data.
    pub fn save(&self) -> CacheState {
        let used = (0..).zip(&self.lines).filter(|(_, e)| e.tag != 0);
        CacheState {
            cold: self.is_cold(),
            lines: used
                .map(|(index, e)| (index, e.line(), e.rmid, e.dirty, e.age))
                .collect(),
        }
    }

    /// Replaces the state by a saved one.
    ///
    /// # Errors
    ///
    /// Rejects a state that no accesses lead to; nothing has then changed.
    pub fn restore(&mut self, state: &CacheState) -> Result<(), UarchStateError> {
        let wrong = |flaw| {
            let model = "cache";
            Err(UarchStateError { model, flaw })
        };
        let mut new = Self::new(self.geometry);
        if state.cold {
            if !state.lines.is_empty() {
                return wrong("it holds lines but was never used");
            }
            *self = new;
            return Ok(());
        }
        let CacheGeometry { sets, ways } = self.geometry;
        new.lines = vec![CacheLine::default(); self.geometry.lines()];
        for &(index, line, rmid, dirty, age) in &state.lines {
            let Some(tag) = line.checked_add(1) else {
                return wrong("a line number is out of range");
            };
            match new.lines.get_mut(index as usize) {
                Some(free) if free.tag == 0 => {
                    *free = CacheLine {
                        tag,
                        rmid,
                        dirty,
                        age,
                    };
                }
                _ => return wrong("a line is at no free index"),
            }
            if line % u64::from(sets) != u64::from(index / ways) {
                return wrong("a line is in the wrong set");
            }
            new.charge(rmid);
        }
        if !new.lines.chunks(ways as usize).all(is_ordered) {
            return wrong("the ages of a set are no order");
        }
        *self = new;
        Ok(())
    }
}

/// Whether the lines of a set are distinct, and their ages a permutation.
fn is_ordered(set: &[CacheLine]) -> bool {
    let used: Vec<_> = set.iter().filter(|line| line.tag != 0).collect();
    let each_once = |n: usize| used.iter().filter(|e| usize::from(e.age) == n).count() == 1;
    let mut tags: Vec<_> = used.iter().map(|line| line.tag).collect();
    tags.sort_unstable();
    tags.dedup();
    tags.len() == used.len() && (0..used.len()).all(each_once)
}

#[cfg(test)]
mod tests;
