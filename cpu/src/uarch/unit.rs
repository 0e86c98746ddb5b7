//! The models of one processor together: what an instruction did to them, and what it did by them.

use hindsight_regs::rdt;
use serde::{Deserialize, Serialize};

use super::ModelError;
use super::cache::{Cache, Geometry, Kind, LINE, LINE_SHIFT, Request};
use super::hierarchy::{Hierarchy, HierarchyState, Level};
use super::predictor::{Predictor, PredictorState};
use crate::branch::Branch;
use crate::pmu::Ring;
use crate::pmu::events::{self, DataOf, EventTotals};
use crate::pmu::pebs::Data;

/// One access of an instruction, within a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch {
    /// Linear address.
    pub linear: u64,
    /// Guest-physical address.
    pub gpa: u64,
    /// Bytes, 1 or more.
    pub len: u32,
    /// What for.
    pub kind: Kind,
    /// It is memory; a device is in no cache.
    pub cached: bool,
}

/// What an instruction accessed.
#[derive(Clone, Copy, Debug)]
pub struct Accesses<'a> {
    /// Its accesses, in order.
    pub touches: &'a [Touch],
    /// It locked the bus.
    pub locked: bool,
    /// It retired; otherwise it stopped on its way, and goes on later.
    pub retired: bool,
}

/// On whose behalf a processor accesses memory, and which ways of the caches that one may fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Who {
    /// Whom lines are charged to.
    pub rmid: u16,
    /// Ways of the last level, for data.
    pub data: u32,
    /// Ways of the last level, for code.
    pub code: u32,
    /// Ways of the second level, for data.
    pub second_data: u32,
    /// Ways of the second level, for code.
    pub second_code: u32,
    /// Percent by which its requests beyond the core are held back, 0 to 90.
    pub delay: u32,
}

impl Default for Who {
    /// Nobody in particular, and all ways.
    fn default() -> Self {
        Self {
            rmid: 0,
            data: Geometry::L3.all_ways(),
            code: Geometry::L3.all_ways(),
            second_data: Geometry::L2.all_ways(),
            second_code: Geometry::L2.all_ways(),
            delay: 0,
        }
    }
}

/// Source encodings of a record. SDM Vol. 3B, "Data Source Encoding for Load Latency Record" and
/// "Precise Store Facility".
mod source {
    use super::Level;

    pub(super) const STORE_HIT: u64 = 1;
    pub(super) const LOCKED: u64 = 1 << 5;

    pub(super) const fn of_load(level: Level) -> u64 {
        match level {
            Level::L1 => 0x1,
            Level::L2 => 0x3,
            Level::L3 => 0x4,
            // From memory of its own node. Encoding 0CH would say so too, but Linux takes it for the cache of another
            // Skylake server.
            Level::Memory => 0xa,
        }
    }
}

/// The furthest access of one kind.
#[derive(Clone, Copy, Debug)]
struct Furthest {
    address: u64,
    /// None: the caches were not asked.
    level: Option<Level>,
    /// It lay in two lines.
    split: bool,
}

/// What the instruction that retired last did.
#[derive(Clone, Copy, Debug, Default)]
struct Last {
    load: Option<Furthest>,
    store: Option<Furthest>,
    locked: bool,
}

/// The models of one processor.
#[derive(Clone, Debug, Default)]
pub struct Unit {
    predictor: Predictor,
    caches: Hierarchy,
    last: Last,
    /// RMIDs of the lines that went to or from memory, until they are asked for.
    moved: Vec<u16>,
    /// Cycles by which requests were held back, until they are asked for.
    held_back: u64,
}

impl Unit {
    /// Finds out which branches were mispredicted; those that were not taken must be among them.
    pub fn resolve(&mut self, branches: &mut [Branch]) {
        self.predictor.resolve(branches);
    }

    /// An instruction accessed memory: adds the events to `totals`. `last` is the last level of
    /// cache, if what the caches do is wanted; `threshold` in cycles makes a load late. Answers how
    /// many events of one kind there were at most, at least 1.
    pub fn access(
        &mut self,
        accesses: &Accesses<'_>,
        mut last: Option<&mut Cache>,
        who: &Who,
        (totals, ring, threshold): (&mut EventTotals, Ring, u64),
    ) -> u64 {
        let mut furthest = Last {
            locked: accesses.locked,
            ..Last::default()
        };
        let mut references = 0;
        for touch in accesses.touches {
            let level = last.as_deref_mut().filter(|_| touch.cached).map(|last| {
                let (level, came, missed) = self.touch(touch, last, who);
                totals.add(events::Kind::LastReference, ring, came);
                totals.add(events::Kind::LastMiss, ring, missed);
                references += came;
                level
            });
            let split = touch.linear % u64::from(LINE) + u64::from(touch.len) > u64::from(LINE);
            let kept = match touch.kind {
                Kind::Code => continue,
                Kind::Load => &mut furthest.load,
                Kind::Store => &mut furthest.store,
            };
            let (before, was_split) = kept.map_or((None, false), |k| (k.level, k.split));
            if kept.is_none() || level > before {
                *kept = Some(Furthest {
                    address: touch.linear,
                    level,
                    split,
                });
            }
            if let Some(kept) = kept {
                kept.split |= was_split || split;
            }
        }
        if accesses.retired {
            furthest.tell(totals, ring, threshold);
            self.last = furthest;
        }
        references.max(1)
    }

    /// One access to all the lines it lies in: how far it went, and how many of them came to the
    /// last level, and further.
    fn touch(&mut self, touch: &Touch, last: &mut Cache, who: &Who) -> (Level, u64, u64) {
        let (ways, second) = match touch.kind {
            Kind::Code => (who.code, who.second_code),
            Kind::Load | Kind::Store => (who.data, who.second_data),
        };
        let (mut furthest, mut came, mut missed) = (Level::L1, 0, 0);
        let end = touch.gpa + u64::from(touch.len.max(1)) - 1;
        for line in touch.gpa >> LINE_SHIFT..=end >> LINE_SHIFT {
            let request = Request {
                line,
                kind: touch.kind,
                rmid: who.rmid,
                ways,
            };
            let served = self.caches.access(last, &request, second);
            furthest = furthest.max(served.level);
            if served.level == Level::Memory {
                self.moved.push(who.rmid);
            }
            let left = served.last.and_then(|last| last.evicted);
            let written = served.written.into_iter().chain([left]).flatten();
            self.moved
                .extend(written.filter(|gone| gone.dirty).map(|gone| gone.rmid));
            if served.level >= Level::L3 {
                self.held_back += held_back(served.level, who.delay);
            }
            came += u64::from(served.level >= Level::L3);
            missed += u64::from(served.level == Level::Memory);
        }
        (furthest, came, missed)
    }

    /// Calls `each` with the RMID of every line that went to or from memory since the last call.
    pub fn take_moved(&mut self, each: impl FnMut(u16)) {
        self.moved.drain(..).for_each(each);
    }

    /// Cycles by which requests beyond the core were held back since the last call.
    pub const fn take_held_back(&mut self) -> u64 {
        std::mem::replace(&mut self.held_back, 0)
    }

    /// What a PEBS record tells of the instruction that retired last.
    pub fn data(&self, of: DataOf) -> Data {
        let (furthest, is_load) = match of {
            DataOf::Load => (self.last.load, true),
            DataOf::Store => (self.last.store, false),
        };
        let Some(Furthest { address, level, .. }) = furthest else {
            return Data::default();
        };
        let locked = if self.last.locked { source::LOCKED } else { 0 };
        let (source, latency) = match level {
            None => (0, 0),
            Some(level) if is_load => (source::of_load(level) | locked, level.latency().into()),
            Some(Level::L1) => (source::STORE_HIT | locked, 0),
            Some(_) => (locked, 0),
        };
        Data {
            address,
            source,
            latency,
        }
    }

    /// CLFLUSH and its like.
    pub fn flush(&mut self, last: &mut Cache, gpa: u64) {
        self.caches.flush(last, gpa >> LINE_SHIFT);
    }

    /// WBINVD and INVD, but for the last level.
    pub fn flush_all(&mut self) {
        self.caches.clear();
    }

    /// The caches were not used yet.
    pub const fn caches_are_cold(&self) -> bool {
        self.caches.is_cold()
    }
}

impl Last {
    /// Counts an instruction.
    fn tell(&self, totals: &mut EventTotals, ring: Ring, threshold: u64) {
        let mut add = |kind, is| totals.add(kind, ring, u64::from(is));
        if let Some(load) = self.load {
            add(events::Kind::Load, true);
            add(events::Kind::LockedLoad, self.locked);
            add(events::Kind::SplitLoad, load.split);
            if let Some(level) = load.level {
                add(
                    events::Kind::LateLoad,
                    u64::from(level.latency()) > threshold,
                );
                let kind = match level {
                    Level::L1 => events::Kind::LoadL1,
                    Level::L2 => events::Kind::LoadL2,
                    Level::L3 => events::Kind::LoadL3,
                    Level::Memory => events::Kind::LoadMemory,
                };
                add(kind, true);
            }
        }
        if let Some(store) = self.store {
            add(events::Kind::Store, true);
            add(events::Kind::LockedStore, self.locked);
            add(events::Kind::SplitStore, store.split);
        }
    }
}

/// Cycles by which a delay value holds back one request that a level beyond the core serves. With
/// `delay` percent, of which the rest is left, it takes `100 / (100 - delay)` times as long as without:
/// 9 times its latency longer at 90. SDM Vol. 3B, "Memory Bandwidth Allocation".
fn held_back(level: Level, delay: u32) -> u64 {
    let delay = u64::from(delay.min(rdt::MBA_MAX));
    u64::from(level.latency()) * delay / (100 - delay)
}

/// Saved state of a [`Unit`], between two instructions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnitState {
    /// The predictor.
    pub predictor: PredictorState,
    /// The caches.
    pub caches: HierarchyState,
}

impl Unit {
    /// Everything there is to save.
    pub fn save(&self) -> UnitState {
        UnitState {
            predictor: self.predictor.save(),
            caches: self.caches.save(),
        }
    }

    /// Takes over a saved state.
    ///
    /// # Errors
    ///
    /// Refuses what cannot be; the unit is then as before.
    pub fn restore(&mut self, state: &UnitState) -> Result<(), ModelError> {
        let mut new = Self::default();
        new.predictor.restore(&state.predictor)?;
        new.caches.restore(&state.caches)?;
        *self = new;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
