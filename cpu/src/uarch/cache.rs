//! A set-associative cache: which lines are in it, and who brought them in.
//!
//! Lines are known by guest-physical address; there is no data. Each line carries the RMID that
//! brought it in (SDM Vol. 3B, "Cache Occupancy Monitoring Technology"), and a fill may be kept to
//! some of the ways ("Cache Allocation Technology"). Replacement is exact LRU among these ways.

use serde::{Deserialize, Serialize};

use super::ModelError;

/// Binary logarithm of the bytes in a line.
pub const LINE_SHIFT: u32 = 6;
/// Bytes in a line.
pub const LINE: u32 = 1 << LINE_SHIFT;

/// How a cache is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Sets, 1 or more. The set of a line is its number modulo this.
    pub sets: u32,
    /// Ways, 1 to 32.
    pub ways: u32,
}

impl Geometry {
    /// First level, for data or for code: 32 KiB.
    pub const L1: Self = Self { sets: 64, ways: 8 };
    /// Second level, of one core: 1 MiB.
    pub const L2: Self = Self {
        sets: 1024,
        ways: 16,
    };
    /// Third and last level, shared by the package: 24.75 MiB.
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

/// What an access is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A fetch of code.
    Code,
    /// A read of data.
    Load,
    /// A write of data: the line becomes dirty.
    Store,
}

/// One access to one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Guest-physical address, shifted right by [`LINE_SHIFT`].
    pub line: u64,
    /// What for.
    pub kind: Kind,
    /// Who: the line is charged to it if it is filled now.
    pub rmid: u16,
    /// Ways that a fill may use. With none the line is not kept; a hit may be in any way.
    pub ways: u32,
}

/// A line that left a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evicted {
    /// Which.
    pub line: u64,
    /// Who had brought it in.
    pub rmid: u16,
    /// It was written, and goes to the next level.
    pub dirty: bool,
}

/// What became of an access.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The line was there.
    pub hit: bool,
    /// Which line it took the place of.
    pub evicted: Option<Evicted>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Entry {
    /// Line number + 1; 0: empty.
    tag: u64,
    rmid: u16,
    dirty: bool,
    /// How many lines of the set were used since.
    age: u8,
}

impl Entry {
    const fn line(&self) -> u64 {
        self.tag - 1
    }

    const fn leave(&self) -> Evicted {
        Evicted {
            line: self.line(),
            rmid: self.rmid,
            dirty: self.dirty,
        }
    }
}

/// A cache. It takes memory when it is first used.
#[derive(Clone, Debug)]
pub struct Cache {
    geometry: Geometry,
    entries: Vec<Entry>,
    /// Place of the line used last: most accesses are to that line again.
    recent: usize,
    /// Lines by who brought them in.
    owned: Vec<u32>,
}

impl Cache {
    /// An empty cache.
    pub const fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            entries: Vec::new(),
            recent: 0,
            owned: Vec::new(),
        }
    }

    /// How it is built.
    pub const fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// It was not used since it was made or cleared.
    pub const fn is_cold(&self) -> bool {
        self.entries.is_empty()
    }

    /// How many lines are charged to this RMID.
    pub fn lines_of(&self, rmid: u16) -> u64 {
        self.owned.get(usize::from(rmid)).map_or(0, |&n| n.into())
    }

    /// One access; a line that was not there is filled in.
    pub fn access(&mut self, request: &Request) -> Outcome {
        if self.entries.is_empty() {
            self.entries = vec![Entry::default(); self.geometry.lines()];
        }
        let write = request.kind == Kind::Store;
        let hit = Outcome {
            hit: true,
            evicted: None,
        };
        // The newest line of its set stays that: there is no order to change.
        let recent = &mut self.entries[self.recent];
        if recent.tag == request.line + 1 && recent.age == 0 {
            recent.dirty |= write;
            return hit;
        }
        let start = self.start(request.line);
        let set = &mut self.entries[start..][..self.geometry.ways as usize];
        if let Some(way) = find(set, request.line) {
            touch(set, way);
            set[way].dirty |= write;
            self.recent = start + way;
            return hit;
        }
        let Some(way) = victim(set, request.ways) else {
            return Outcome::default();
        };
        let evicted = (set[way].tag != 0).then(|| set[way].leave());
        if evicted.is_none() {
            // As if it had been the oldest of the lines.
            set[way].age = u8::MAX;
        }
        touch(set, way);
        set[way] = Entry {
            tag: request.line + 1,
            rmid: request.rmid,
            dirty: write,
            age: 0,
        };
        self.recent = start + way;
        if let Some(evicted) = &evicted {
            self.disown(evicted.rmid);
        }
        self.own(request.rmid);
        Outcome {
            hit: false,
            evicted,
        }
    }

    /// A dirty line comes from the level before. `false`: it is not here, and goes on.
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

    /// CLFLUSH and its like: the line leaves, if it was there.
    pub fn flush(&mut self, line: u64) -> Option<Evicted> {
        if self.is_cold() {
            return None;
        }
        let set = self.set(line);
        let way = find(set, line)?;
        let gone = std::mem::take(&mut set[way]);
        for entry in set.iter_mut().filter(|entry| entry.age > gone.age) {
            entry.age -= 1;
        }
        self.disown(gone.rmid);
        Some(gone.leave())
    }

    /// WBINVD: all lines leave. `gone` is told of each that must be written to memory.
    pub fn clear(&mut self, mut gone: impl FnMut(Evicted)) {
        let entries = std::mem::take(&mut self.entries);
        self.owned.clear();
        for entry in entries.iter().filter(|entry| entry.tag != 0 && entry.dirty) {
            gone(entry.leave());
        }
    }

    /// Place of the first way of a line's set.
    fn start(&self, line: u64) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "below the count of sets")]
        let set = (line % u64::from(self.geometry.sets)) as usize;
        set * self.geometry.ways as usize
    }

    fn set(&mut self, line: u64) -> &mut [Entry] {
        let start = self.start(line);
        &mut self.entries[start..][..self.geometry.ways as usize]
    }

    fn own(&mut self, rmid: u16) {
        let rmid = usize::from(rmid);
        if rmid >= self.owned.len() {
            self.owned.resize(rmid + 1, 0);
        }
        self.owned[rmid] += 1;
    }

    fn disown(&mut self, rmid: u16) {
        self.owned[usize::from(rmid)] -= 1;
    }
}

fn find(set: &[Entry], line: u64) -> Option<usize> {
    set.iter().position(|entry| entry.tag == line + 1)
}

/// The way for a new line: an empty one, or the one used longest ago.
fn victim(set: &[Entry], ways: u32) -> Option<usize> {
    let allowed = |way: &usize| ways >> way & 1 != 0;
    let ways = || (0..set.len()).filter(allowed);
    ways()
        .find(|&way| set[way].tag == 0)
        .or_else(|| ways().max_by_key(|&way| set[way].age))
}

/// Makes a way the one used last.
fn touch(set: &mut [Entry], way: usize) {
    let age = set[way].age;
    for entry in set.iter_mut().filter(|e| e.tag != 0 && e.age < age) {
        entry.age += 1;
    }
    set[way].age = 0;
}

/// Saved state of a [`Cache`]: its lines, by place.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheState {
    /// The cache holds nothing, not even memory.
    pub cold: bool,
    /// Set times ways plus way, line, RMID, dirty, age; places ascend.
    pub lines: Vec<(u32, u64, u16, bool, u8)>,
}

impl Cache {
    /// Everything there is to save.
    pub fn save(&self) -> CacheState {
        let used = (0..).zip(&self.entries).filter(|(_, e)| e.tag != 0);
        CacheState {
            cold: self.is_cold(),
            lines: used
                .map(|(place, e)| (place, e.line(), e.rmid, e.dirty, e.age))
                .collect(),
        }
    }

    /// Takes over a saved state.
    ///
    /// # Errors
    ///
    /// Refuses what no accesses could have led to; the cache is then as before.
    pub fn restore(&mut self, state: &CacheState) -> Result<(), ModelError> {
        let wrong = |why| {
            let model = "cache";
            Err(ModelError { model, why })
        };
        let mut new = Self::new(self.geometry);
        if state.cold {
            if !state.lines.is_empty() {
                return wrong("lines in one that was never used");
            }
            *self = new;
            return Ok(());
        }
        let Geometry { sets, ways } = self.geometry;
        new.entries = vec![Entry::default(); self.geometry.lines()];
        for &(place, line, rmid, dirty, age) in &state.lines {
            let Some(tag) = line.checked_add(1) else {
                return wrong("no such line");
            };
            match new.entries.get_mut(place as usize) {
                Some(entry) if entry.tag == 0 => {
                    *entry = Entry {
                        tag,
                        rmid,
                        dirty,
                        age,
                    };
                }
                _ => return wrong("no such place"),
            }
            if line % u64::from(sets) != u64::from(place / ways) {
                return wrong("a line in another's set");
            }
            new.own(rmid);
        }
        if !new.entries.chunks(ways as usize).all(is_ordered) {
            return wrong("a set without an order");
        }
        *self = new;
        Ok(())
    }
}

/// The lines of a set are different ones, and their ages a permutation.
fn is_ordered(set: &[Entry]) -> bool {
    let used: Vec<_> = set.iter().filter(|entry| entry.tag != 0).collect();
    let each_once = |n: usize| used.iter().filter(|e| usize::from(e.age) == n).count() == 1;
    let mut tags: Vec<_> = used.iter().map(|entry| entry.tag).collect();
    tags.sort_unstable();
    tags.dedup();
    tags.len() == used.len() && (0..used.len()).all(each_once)
}

#[cfg(test)]
mod tests;
