//! The predictor and caches of one core, and the events that its instructions cause in them.

use hindsight_regs::rdt;

use super::UarchStateError;
use super::cache::{CacheAccess, CacheGeometry, CacheModel, LINE, LINE_SHIFT, LineRequest};
use super::hierarchy::{CacheLevel, CoreCaches, CoreCachesState};
use super::predictor::{Predictor, PredictorState};
use crate::branch::Branch;
use crate::pmu::events::{EventKind, EventTotals, Ring};
use crate::pmu::pebs::PebsData;
use crate::pmu::selection::SampledAccess;

/// One memory access of an instruction, within a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryAccess {
    /// Linear address.
    pub linear: u64,
    /// Guest-physical address.
    pub gpa: u64,
    /// Bytes, 1 or more.
    pub len: u32,
    /// Fetch, load or store.
    pub kind: CacheAccess,
    /// The address is memory, which caches hold; a device is not cached.
    pub cached: bool,
}

/// All memory accesses of one instruction.
#[derive(Clone, Copy, Debug)]
pub struct InstructionAccesses<'a> {
    /// The accesses, in order.
    pub accesses: &'a [MemoryAccess],
    /// The instruction is locked.
    pub locked: bool,
    /// The instruction retired; otherwise it was interrupted, and continues later.
    pub retired: bool,
}

/// RMID, capacity masks and delay of a processor's memory accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requester {
    /// The RMID to which lines are charged.
    pub rmid: u16,
    /// Mask of the L3 ways that data may fill.
    pub l3_data_ways: u32,
    /// Mask of the L3 ways that code may fill.
    pub l3_code_ways: u32,
    /// Mask of the L2 ways that data may fill.
    pub l2_data_ways: u32,
    /// Mask of the L2 ways that code may fill.
    pub l2_code_ways: u32,
    /// Percent by which requests beyond the core are delayed, 0 to 90.
    pub delay: u32,
}

impl Default for Requester {
    /// RMID 0, all ways, no delay.
    fn default() -> Self {
        Self {
            rmid: 0,
            l3_data_ways: CacheGeometry::L3.all_ways(),
            l3_code_ways: CacheGeometry::L3.all_ways(),
            l2_data_ways: CacheGeometry::L2.all_ways(),
            l2_code_ways: CacheGeometry::L2.all_ways(),
            delay: 0,
        }
    }
}

/// Where [`CoreUarch::access`] counts events.
#[derive(Debug)]
pub struct AccessEvents<'a> {
    /// The totals to add to.
    pub totals: &'a mut EventTotals,
    /// The ring of the instruction.
    pub ring: Ring,
    /// Latency in core cycles above which a load is late.
    pub late_threshold: u64,
}

impl AccessEvents<'_> {
    fn add(&mut self, kind: EventKind, count: u64) {
        self.totals.add(kind, self.ring, count);
    }

    /// Adds the events of an access in the caches.
    fn add_served(&mut self, access: CacheAccess, served: &ServedLines) {
        self.add(EventKind::LlcReference, served.references);
        self.add(EventKind::LlcMiss, served.misses);
        self.add(EventKind::L1Replacement, served.l1_fills);
        let (hit, miss) = offcore_kinds(access);
        self.add(hit, served.references - served.misses);
        self.add(miss, served.misses);
    }
}

/// Data source encodings of a PEBS record.
///
/// SDM Vol. 3B, "Data Source Encoding for Load Latency Record" and "Precise Store Facility".
mod source {
    use super::CacheLevel;

    pub(super) const STORE_HIT: u64 = 1;
    pub(super) const LOCKED: u64 = 1 << 5;

    pub(super) const fn of_load(level: CacheLevel) -> u64 {
        match level {
            CacheLevel::L1 => 0x1,
            CacheLevel::L2 => 0x3,
            CacheLevel::L3 => 0x4,
            // Memory of the own node. Encoding 0CH means the same, but Linux takes it for the
            // cache of another Skylake server.
            CacheLevel::Memory => 0xa,
        }
    }
}

/// The furthest access of one kind.
#[derive(Clone, Copy, Debug)]
struct FurthestAccess {
    address: u64,
    /// The level that served it; `None` if no cache was modelled.
    level: Option<CacheLevel>,
    /// An access of this kind crossed a cache line.
    split: bool,
}

/// The furthest accesses of the instruction that retired last.
#[derive(Clone, Copy, Debug, Default)]
struct LastInstruction {
    load: Option<FurthestAccess>,
    store: Option<FurthestAccess>,
    locked: bool,
}

/// The lines of one access: the furthest level that served any, and the L3 references and misses.
struct ServedLines {
    level: CacheLevel,
    references: u64,
    misses: u64,
    /// Lines that were filled into the L1 for data.
    l1_fills: u64,
}

/// The kinds of requests to the L3 for an access: those that hit it, and those that missed it.
const fn offcore_kinds(access: CacheAccess) -> (EventKind, EventKind) {
    match access {
        CacheAccess::Load => (EventKind::OffcoreReadHit, EventKind::OffcoreReadMiss),
        CacheAccess::Store => (EventKind::OffcoreOwnHit, EventKind::OffcoreOwnMiss),
        CacheAccess::Code => (EventKind::OffcoreCodeHit, EventKind::OffcoreCodeMiss),
    }
}

/// The branch predictor and the caches of one core.
#[derive(Clone, Debug, Default)]
pub struct CoreUarch {
    predictor: Predictor,
    caches: CoreCaches,
    last: LastInstruction,
    /// RMIDs of lines that moved to or from memory since [`CoreUarch::take_memory_traffic`].
    memory_traffic: Vec<u16>,
    /// Cycles by which requests were delayed since [`CoreUarch::take_delay_cycles`].
    delay_cycles: u64,
    /// Loads of [`CoreUarch::access_line`] beyond the L1, since [`CoreUarch::count_block`].
    far_loads: u64,
}

impl CoreUarch {
    /// Marks the mispredicted branches, and learns. Branches that were not taken must be included.
    pub fn resolve(&mut self, branches: &mut [Branch]) {
        self.predictor.resolve(branches);
    }

    /// Applies the memory accesses of one instruction, and counts their events.
    ///
    /// `l3` is the last level of cache; with `None`, no cache is modelled. Returns the greatest
    /// number of events of one kind, at least 1.
    pub fn access(
        &mut self,
        instruction: &InstructionAccesses<'_>,
        mut l3: Option<&mut CacheModel>,
        requester: &Requester,
        mut events: AccessEvents<'_>,
    ) -> u64 {
        let mut last = LastInstruction {
            locked: instruction.locked,
            ..LastInstruction::default()
        };
        let (mut references, mut fills) = (0, 0);
        for access in instruction.accesses {
            let level = l3.as_deref_mut().filter(|_| access.cached).map(|l3| {
                let served = self.access_lines(access, l3, requester);
                events.add_served(access.kind, &served);
                (references, fills) = (references + served.references, fills + served.l1_fills);
                served.level
            });
            last.merge(access, level);
        }
        if instruction.retired {
            last.count(&mut events);
            self.last = last;
        }
        references.max(fills).max(1)
    }

    /// Applies an access of an instruction that retires in a block, within one line, and counts its
    /// events in the caches.
    ///
    /// [`CoreUarch::count_block`] must follow, which counts the instruction.
    pub fn access_line(
        &mut self,
        access: &MemoryAccess,
        l3: Option<&mut CacheModel>,
        requester: &Requester,
        mut events: AccessEvents<'_>,
    ) {
        let Some(l3) = l3.filter(|_| access.cached) else {
            return;
        };
        let served = self.access_lines(access, l3, requester);
        events.add_served(access.kind, &served);
        if access.kind == CacheAccess::Load
            && let Some(kind) = far_load_event(served.level)
        {
            events.add(kind, 1);
            let late = u64::from(served.level.latency()) > events.late_threshold;
            events.add(EventKind::LateLoad, late.into());
            self.far_loads += 1;
        }
    }

    /// Counts the instructions of a block that load and that store, none of them locked or across
    /// lines.
    ///
    /// Those accesses that were not passed to [`CoreUarch::access_line`] were to the line of their
    /// set that was used last, which stores had written before: they change nothing. `cached` says
    /// whether caches are modelled.
    pub fn count_block(
        &mut self,
        loads: u64,
        stores: u64,
        cached: bool,
        mut events: AccessEvents<'_>,
    ) {
        events.add(EventKind::Load, loads);
        events.add(EventKind::Store, stores);
        let far = std::mem::take(&mut self.far_loads);
        debug_assert!(far <= loads, "each of them is an instruction that retired");
        if cached {
            let near = loads.wrapping_sub(far);
            events.add(EventKind::LoadL1, near);
            if u64::from(CacheLevel::L1.latency()) > events.late_threshold {
                events.add(EventKind::LateLoad, near);
            }
        }
    }

    /// Applies one access to all lines that it touches.
    fn access_lines(
        &mut self,
        access: &MemoryAccess,
        l3: &mut CacheModel,
        requester: &Requester,
    ) -> ServedLines {
        debug_assert!(access.len != 0, "an access has at least one byte");
        let (l3_ways, l2_ways) = match access.kind {
            CacheAccess::Code => (requester.l3_code_ways, requester.l2_code_ways),
            CacheAccess::Load | CacheAccess::Store => {
                (requester.l3_data_ways, requester.l2_data_ways)
            }
        };
        let mut all = ServedLines {
            level: CacheLevel::L1,
            references: 0,
            misses: 0,
            l1_fills: 0,
        };
        let end = access.gpa + u64::from(access.len.max(1)) - 1;
        for line in access.gpa >> LINE_SHIFT..=end >> LINE_SHIFT {
            let request = LineRequest {
                line,
                kind: access.kind,
                rmid: requester.rmid,
                ways: l3_ways,
            };
            let served = self.caches.access(l3, &request, l2_ways);
            all.level = all.level.max(served.level);
            let is_fill = access.kind != CacheAccess::Code && served.level > CacheLevel::L1;
            all.l1_fills += u64::from(is_fill);
            if served.level == CacheLevel::Memory {
                self.memory_traffic.push(requester.rmid);
                all.misses += 1;
            }
            let evicted = served.l3.and_then(|l3| l3.evicted);
            let written_back = served.written_back.into_iter().chain([evicted]).flatten();
            let dirty = written_back.filter(|line| line.dirty).map(|line| line.rmid);
            self.memory_traffic.extend(dirty);
            if served.level >= CacheLevel::L3 {
                self.delay_cycles += delay_cycles(served.level, requester.delay);
                all.references += 1;
            }
        }
        all
    }

    /// Calls `each` with the RMID of every line that moved to or from memory since the last call.
    pub fn take_memory_traffic(&mut self, each: impl FnMut(u16)) {
        self.memory_traffic.drain(..).for_each(each);
    }

    /// Core cycles by which requests beyond the core were delayed since the last call.
    pub const fn take_delay_cycles(&mut self) -> u64 {
        std::mem::replace(&mut self.delay_cycles, 0)
    }

    /// The data of a PEBS record about the instruction that retired last.
    pub fn data(&self, access: SampledAccess) -> PebsData {
        let (furthest, is_load) = match access {
            SampledAccess::Load => (self.last.load, true),
            SampledAccess::Store => (self.last.store, false),
        };
        let Some(FurthestAccess { address, level, .. }) = furthest else {
            return PebsData::default();
        };
        let locked = if self.last.locked { source::LOCKED } else { 0 };
        let (source, latency) = match level {
            None => (0, 0),
            Some(level) if is_load => (source::of_load(level) | locked, level.latency().into()),
            Some(CacheLevel::L1) => (source::STORE_HIT | locked, 0),
            Some(_) => (locked, 0),
        };
        PebsData {
            address,
            source,
            latency,
        }
    }

    /// Flushes the line of `gpa` from all levels: CLFLUSH and its like.
    pub fn flush(&mut self, l3: &mut CacheModel, gpa: u64) {
        self.caches.flush(l3, gpa >> LINE_SHIFT);
    }

    /// Empties the caches of the core, but not the L3: WBINVD and INVD.
    pub fn flush_all(&mut self) {
        self.caches.clear();
    }

    /// Whether the caches have not been used yet.
    pub const fn caches_are_cold(&self) -> bool {
        self.caches.is_cold()
    }
}

impl LastInstruction {
    /// Keeps an access if it is the furthest of its kind so far.
    fn merge(&mut self, access: &MemoryAccess, level: Option<CacheLevel>) {
        let split = access.linear % u64::from(LINE) + u64::from(access.len) > u64::from(LINE);
        let furthest = match access.kind {
            CacheAccess::Code => return,
            CacheAccess::Load => &mut self.load,
            CacheAccess::Store => &mut self.store,
        };
        let replaces = furthest.is_none_or(|before| level > before.level);
        let split = split || furthest.is_some_and(|before| before.split);
        if replaces {
            *furthest = Some(FurthestAccess {
                address: access.linear,
                level,
                split,
            });
        } else if let Some(furthest) = furthest {
            furthest.split = split;
        }
    }

    /// Counts the events of the instruction.
    fn count(&self, events: &mut AccessEvents<'_>) {
        let threshold = events.late_threshold;
        let mut add = |kind, happened| events.add(kind, u64::from(happened));
        if let Some(load) = self.load {
            add(EventKind::Load, true);
            add(EventKind::LockedLoad, self.locked);
            add(EventKind::SplitLoad, load.split);
            if let Some(level) = load.level {
                add(EventKind::LateLoad, u64::from(level.latency()) > threshold);
                add(far_load_event(level).unwrap_or(EventKind::LoadL1), true);
            }
        }
        if let Some(store) = self.store {
            add(EventKind::Store, true);
            add(EventKind::LockedStore, self.locked);
            add(EventKind::SplitStore, store.split);
        }
    }
}

/// The event of a load that a level beyond the L1 served.
const fn far_load_event(level: CacheLevel) -> Option<EventKind> {
    match level {
        CacheLevel::L1 => None,
        CacheLevel::L2 => Some(EventKind::LoadL2),
        CacheLevel::L3 => Some(EventKind::LoadL3),
        CacheLevel::Memory => Some(EventKind::LoadMemory),
    }
}

/// Core cycles by which a delay value delays one request that `level` serves.
///
/// With `delay` percent, a request takes `100 / (100 - delay)` times as long as without: at 90, it
/// is delayed by 9 times its latency. SDM Vol. 3B, "Memory Bandwidth Allocation".
fn delay_cycles(level: CacheLevel, delay: u32) -> u64 {
    debug_assert!(delay <= rdt::MBA_MAX, "delay values are checked by WRMSR");
    let delay = u64::from(delay.min(rdt::MBA_MAX));
    u64::from(level.latency()) * delay / (100 - delay)
}

/// Saved state of a [`CoreUarch`], between two instructions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct CoreUarchState {
    /// The branch predictor.
    pub predictor: PredictorState,
    /// The caches of the core.
    pub caches: CoreCachesState,
}

impl CoreUarch {
    /// The state as plain data.
    pub fn save(&self) -> CoreUarchState {
        CoreUarchState {
            predictor: self.predictor.save(),
            caches: self.caches.save(),
        }
    }

    /// Replaces the state by a saved one.
    ///
    /// # Errors
    ///
    /// Rejects an invalid state; nothing has then changed.
    pub fn restore(&mut self, state: &CoreUarchState) -> Result<(), UarchStateError> {
        let mut new = Self::default();
        new.predictor.restore(&state.predictor)?;
        new.caches.restore(&state.caches)?;
        *self = new;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
