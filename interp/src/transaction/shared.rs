//! The open transactions of all processors of a machine.
//!
//! Each has the lines that it has read and written, and its stores. The stores stay here until the
//! transaction commits, so memory never holds a store that may be undone.
//!
//! While a transaction is open, every processor checks each of its memory accesses for a conflict
//! here. While none is open, no processor does. The processor that begins a transaction therefore
//! waits until all others check their accesses: each publishes in its [`AccessState`] whether it
//! does.

#![expect(
    clippy::cast_possible_truncation,
    reason = "offsets in a line and numbers of sets are small"
)]

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Binary logarithm of the length of a cache line.
const LINE_SHIFT: u32 = 6;
/// Bytes of a cache line.
const LINE: usize = 1 << LINE_SHIFT;
/// The L1 data cache, which must hold the lines that a transaction has written: 32 KiB, 8 ways.
const WRITE_SETS: usize = 64;
const WRITE_WAYS: u8 = 8;
/// The L2 cache, which must hold the lines that it has read: 1 MiB, 16 ways.
const READ_SETS: usize = 1024;
const READ_WAYS: u8 = 16;

/// How long XBEGIN waits for the other processors to check their accesses, before it aborts.
const BEGIN_TIMEOUT: Duration = Duration::from_millis(10);

/// The processor runs no guest code.
const OUTSIDE: u8 = 0;
/// The processor accesses memory without checking for conflicts.
const UNCHECKED: u8 = 1;
/// The processor checks each access for a conflict.
const CHECKED: u8 = 2;

/// How a processor accesses memory at present, for the other processors to read.
#[derive(Debug)]
pub(crate) struct AccessState(AtomicU8);

impl AccessState {
    /// Publishes that the processor runs guest code. Returns whether it must check its accesses.
    #[inline]
    pub(crate) fn run(&self, shared: &Shared) -> bool {
        let closed = || shared.open.load(Ordering::SeqCst) == 0;
        if closed() {
            if self.0.load(Ordering::Relaxed) == UNCHECKED {
                return false;
            }
            // Either a transaction that begins now reads this store, or `closed` returns false
            // below.
            self.0.store(UNCHECKED, Ordering::SeqCst);
            if closed() {
                return false;
            }
        }
        self.0.store(CHECKED, Ordering::SeqCst);
        true
    }

    /// Publishes that the processor no longer runs guest code.
    pub(crate) fn leave(&self) {
        self.0.store(OUTSIDE, Ordering::SeqCst);
    }
}

/// Why a memory access aborts a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessAbort {
    /// Another processor or a device accessed one of its lines.
    Conflict,
    /// It has written more than the L1 data cache holds.
    Writes,
    /// It has read more than the L2 cache holds.
    Reads,
}

/// The bytes of a line that a transaction has written.
#[derive(Clone, Debug)]
struct Written {
    bytes: [u8; LINE],
    /// One bit for each byte.
    mask: u64,
}

/// An open transaction.
#[derive(Debug)]
struct OpenTransaction {
    access_state: Arc<AccessState>,
    /// Another access won a conflict with this transaction, which must abort.
    lost: bool,
    reads: HashSet<u64>,
    writes: HashMap<u64, Written>,
    read_sets: Box<[u8; READ_SETS]>,
    write_sets: [u8; WRITE_SETS],
}

/// The transactions of all processors of a machine.
#[derive(Debug)]
pub(crate) struct Shared {
    /// The number of open transactions.
    open: AtomicU32,
    access_states: Mutex<Vec<Weak<AccessState>>>,
    regions: Mutex<Vec<OpenTransaction>>,
}

/// Holds all transactions until it is dropped: none can access memory or commit.
#[derive(Debug)]
pub(crate) struct TransactionHold<'a>(
    #[expect(dead_code, reason = "it is held")] MutexGuard<'a, Vec<OpenTransaction>>,
);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The cache lines of an access within a page.
///
/// Each is its number, the offset of the access in it, and the range of the data that it holds.
fn lines(gpa: u64, len: usize) -> impl Iterator<Item = (u64, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        (done < len).then(|| {
            let at = gpa.wrapping_add(done as u64);
            let offset = (at % LINE as u64) as usize;
            let part = done..len.min(done + LINE - offset);
            done = part.end;
            (at >> LINE_SHIFT, offset, part)
        })
    })
}

/// Counts one more line in its cache set. Returns false if all ways of the set are taken.
fn count_line(sets: &mut [u8], ways: u8, line: u64) -> bool {
    let len = sets.len() as u64;
    match sets.get_mut((line % len) as usize) {
        Some(used) if *used < ways => {
            *used += 1;
            true
        }
        _ => false,
    }
}

impl OpenTransaction {
    fn new(access_state: Arc<AccessState>) -> Self {
        Self {
            access_state,
            lost: false,
            reads: HashSet::new(),
            writes: HashMap::new(),
            read_sets: Box::new([0; READ_SETS]),
            write_sets: [0; WRITE_SETS],
        }
    }

    /// Handles an access of another processor or a device to a line.
    fn conflict_with(&mut self, line: u64, write: bool) {
        self.lost |= self.writes.contains_key(&line) || (write && self.reads.contains(&line));
    }

    fn read(&mut self, line: u64) -> Result<(), AccessAbort> {
        if self.reads.insert(line) && !count_line(&mut *self.read_sets, READ_WAYS, line) {
            return Err(AccessAbort::Reads);
        }
        Ok(())
    }

    fn write(&mut self, line: u64, offset: usize, data: &[u8]) -> Result<(), AccessAbort> {
        let known = self.writes.contains_key(&line);
        if !known && !count_line(&mut self.write_sets, WRITE_WAYS, line) {
            return Err(AccessAbort::Writes);
        }
        let written = self.writes.entry(line).or_insert(Written {
            bytes: [0; LINE],
            mask: 0,
        });
        for (n, &byte) in data.iter().enumerate() {
            if let Some(target) = written.bytes.get_mut(offset + n) {
                *target = byte;
                written.mask |= 1 << (offset + n);
            }
        }
        Ok(())
    }

    /// Replaces bytes that were read from memory by those that the transaction has written.
    fn overlay(&self, line: u64, offset: usize, data: &mut [u8]) {
        if let Some(written) = self.writes.get(&line) {
            let own = written.bytes.iter().enumerate().skip(offset);
            for (byte, (at, &new)) in data.iter_mut().zip(own) {
                if written.mask >> at & 1 != 0 {
                    *byte = new;
                }
            }
        }
    }
}

/// Returns the open transaction of a processor that accesses these bytes.
///
/// Other transactions that conflict with the access lose and must abort.
fn begin_access<'a>(
    regions: &'a mut [OpenTransaction],
    access_state: &Arc<AccessState>,
    (gpa, len): (u64, usize),
    write: bool,
) -> Result<&'a mut OpenTransaction, AccessAbort> {
    let mut own = None;
    for region in regions {
        if Arc::ptr_eq(&region.access_state, access_state) {
            if region.lost {
                return Err(AccessAbort::Conflict);
            }
            own = Some(region);
        } else {
            // The later access wins, as with the caches of a processor.
            lines(gpa, len).for_each(|(line, ..)| region.conflict_with(line, write));
        }
    }
    own.ok_or(AccessAbort::Conflict)
}

impl Shared {
    pub(crate) fn new() -> Self {
        Self {
            open: AtomicU32::new(0),
            access_states: Mutex::default(),
            regions: Mutex::default(),
        }
    }

    /// Adds a processor, which does not run guest code yet.
    pub(crate) fn add_processor(&self) -> Arc<AccessState> {
        let access_state = Arc::new(AccessState(AtomicU8::new(OUTSIDE)));
        let mut access_states = lock(&self.access_states);
        access_states.retain(|other| other.strong_count() != 0);
        access_states.push(Arc::downgrade(&access_state));
        access_state
    }

    /// Opens a transaction.
    ///
    /// Returns false, and opens none, if another processor does not begin to check its accesses
    /// within [`BEGIN_TIMEOUT`].
    pub(crate) fn begin(&self, access_state: &Arc<AccessState>) -> bool {
        lock(&self.regions).push(OpenTransaction::new(Arc::clone(access_state)));
        self.open.fetch_add(1, Ordering::SeqCst);
        // Two processors that begin at once must not wait for each other.
        access_state.0.store(CHECKED, Ordering::SeqCst);
        let access_states: Vec<_> = lock(&self.access_states)
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        let until = Instant::now() + BEGIN_TIMEOUT;
        for other in access_states {
            while other.0.load(Ordering::SeqCst) == UNCHECKED {
                if Instant::now() >= until {
                    self.end(access_state);
                    return false;
                }
                std::thread::yield_now();
            }
        }
        true
    }

    /// Closes the transaction of a processor without its stores, if it has one.
    pub(crate) fn end(&self, access_state: &Arc<AccessState>) {
        let mut regions = lock(&self.regions);
        let before = regions.len();
        regions.retain(|region| !Arc::ptr_eq(&region.access_state, access_state));
        if regions.len() < before {
            self.open.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Whether the transaction of a processor has lost a conflict.
    pub(crate) fn is_lost(&self, access_state: &Arc<AccessState>) -> bool {
        let regions = lock(&self.regions);
        let own = regions
            .iter()
            .find(|r| Arc::ptr_eq(&r.access_state, access_state));
        own.is_none_or(|region| region.lost)
    }

    /// Loads within a page for a transaction. `load` reads the bytes from memory.
    pub(crate) fn read(
        &self,
        access_state: &Arc<AccessState>,
        gpa: u64,
        data: &mut [u8],
        load: impl FnOnce(&mut [u8]),
    ) -> Result<(), AccessAbort> {
        let mut regions = lock(&self.regions);
        let region = begin_access(&mut regions, access_state, (gpa, data.len()), false)?;
        load(data);
        for (line, offset, part) in lines(gpa, data.len()) {
            region.read(line)?;
            if let Some(data) = data.get_mut(part) {
                region.overlay(line, offset, data);
            }
        }
        Ok(())
    }

    /// Stores within a page for a transaction.
    pub(crate) fn write(
        &self,
        access_state: &Arc<AccessState>,
        gpa: u64,
        data: &[u8],
    ) -> Result<(), AccessAbort> {
        let mut regions = lock(&self.regions);
        let region = begin_access(&mut regions, access_state, (gpa, data.len()), true)?;
        for (line, offset, part) in lines(gpa, data.len()) {
            region.write(line, offset, data.get(part).unwrap_or_default())?;
        }
        Ok(())
    }

    /// Whether the processor's transaction has written any of these bytes' lines.
    pub(crate) fn wrote(&self, access_state: &Arc<AccessState>, gpa: u64, len: usize) -> bool {
        let regions = lock(&self.regions);
        let own = regions
            .iter()
            .find(|r| Arc::ptr_eq(&r.access_state, access_state));
        own.is_some_and(|region| {
            lines(gpa, len).any(|(line, ..)| region.writes.contains_key(&line))
        })
    }

    /// Commits a transaction; all of its stores become visible at once.
    ///
    /// `store` writes each of them to memory.
    pub(crate) fn commit(
        &self,
        access_state: &Arc<AccessState>,
        mut store: impl FnMut(u64, &[u8]),
    ) -> Result<(), AccessAbort> {
        let mut regions = lock(&self.regions);
        let at = regions
            .iter()
            .position(|r| Arc::ptr_eq(&r.access_state, access_state));
        let Some(region) = at.map(|at| regions.swap_remove(at)) else {
            return Err(AccessAbort::Conflict);
        };
        let result = if region.lost {
            Err(AccessAbort::Conflict)
        } else {
            // Sort by address, because the order of the map is random.
            let mut writes: Vec<_> = region.writes.iter().collect();
            writes.sort_unstable_by_key(|(line, _)| **line);
            for (line, written) in writes {
                runs(written.mask, |from, to| {
                    let bytes = written.bytes.get(from..to).unwrap_or_default();
                    store((line << LINE_SHIFT) + from as u64, bytes);
                });
            }
            Ok(())
        };
        self.open.fetch_sub(1, Ordering::SeqCst);
        result
    }

    /// Prepares an access outside of transactions.
    ///
    /// Transactions that conflict with it lose, and none continues until the returned guard is
    /// dropped.
    pub(crate) fn hold(&self, gpa: u64, len: usize, write: bool) -> TransactionHold<'_> {
        let mut regions = lock(&self.regions);
        for region in regions.iter_mut() {
            lines(gpa, len).for_each(|(line, ..)| region.conflict_with(line, write));
        }
        TransactionHold(regions)
    }

    /// Handles a write by a device or a page walk: transactions that conflict lose.
    pub(crate) fn written(&self, gpa: u64, len: usize) {
        if self.open.load(Ordering::SeqCst) != 0 {
            drop(self.hold(gpa, len, true));
        }
    }
}

/// Calls `f` with the first bit and the bit after the last one of each run of ones.
fn runs(mask: u64, mut f: impl FnMut(usize, usize)) {
    let mut at = 0;
    while at < LINE {
        let rest = mask >> at;
        if rest == 0 {
            return;
        }
        let from = at + rest.trailing_zeros() as usize;
        let to = from + (mask >> from).trailing_ones() as usize;
        f(from, to);
        at = to;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Shared, Arc<AccessState>, Arc<AccessState>) {
        let shared = Shared::new();
        let (one, other) = (shared.add_processor(), shared.add_processor());
        (shared, one, other)
    }

    fn committed(
        shared: &Shared,
        access_state: &Arc<AccessState>,
    ) -> Result<Vec<(u64, Vec<u8>)>, AccessAbort> {
        let mut stores = Vec::new();
        shared.commit(access_state, |gpa, data| stores.push((gpa, data.to_vec())))?;
        Ok(stores)
    }

    #[test]
    fn mask_is_split_into_runs_of_ones() {
        let mut found = Vec::new();
        for mask in [0, 1, u64::MAX, 0b0110_1000, 1 << 63] {
            runs(mask, |from, to| found.push((from, to)));
        }
        assert_eq!(found, [(0, 1), (0, 64), (3, 4), (5, 7), (63, 64)]);
    }

    #[test]
    fn stores_are_visible_to_their_transaction_and_to_memory_after_commit() {
        let (shared, one, _) = pair();
        assert!(shared.begin(&one));
        assert_eq!(shared.write(&one, 0x103e, &[1, 2, 3]), Ok(()));
        let mut data = [0; 4];
        let loaded = shared.read(&one, 0x103f, &mut data, |data| data.fill(9));
        assert_eq!((loaded, data), (Ok(()), [2, 3, 9, 9]));
        let stores = vec![(0x103e, vec![1, 2]), (0x1040, vec![3])];
        assert_eq!(committed(&shared, &one), Ok(stores));
        assert!(!one.run(&shared), "no transaction is open any more");
    }

    #[test]
    fn later_access_wins_a_conflict() {
        for (first, second, lost) in [
            (false, false, false),
            (false, true, true),
            (true, false, true),
            (true, true, true),
        ] {
            let (shared, one, other) = pair();
            assert!(shared.begin(&one) && shared.begin(&other));
            for (access_state, write) in [(&one, first), (&other, second)] {
                let done = if write {
                    shared.write(access_state, 0x1000, &[1])
                } else {
                    shared.read(access_state, 0x1038, &mut [0; 8], |_| ())
                };
                assert_eq!(done, Ok(()));
            }
            assert_eq!(shared.is_lost(&one), lost, "{first} {second}");
            assert!(!shared.is_lost(&other));
            assert_eq!(committed(&shared, &one).is_err(), lost);
            assert!(committed(&shared, &other).is_ok());
        }
    }

    #[test]
    fn access_outside_of_transactions_makes_them_lose() {
        for (write, lost) in [(false, false), (true, true)] {
            let (shared, one, _) = pair();
            assert!(shared.begin(&one));
            assert_eq!(shared.read(&one, 0x2000, &mut [0], |_| ()), Ok(()));
            drop(shared.hold(0x203f, 1, write));
            assert_eq!(shared.is_lost(&one), lost);
        }
        let (shared, one, _) = pair();
        assert!(shared.begin(&one));
        assert_eq!(shared.write(&one, 0x2000, &[1]), Ok(()));
        drop(shared.hold(0x2001, 1, false));
        assert_eq!(shared.write(&one, 0x3000, &[1]), Err(AccessAbort::Conflict));
        shared.end(&one);
        shared.end(&one);
        assert!(!one.run(&shared));
    }

    #[test]
    fn ways_of_a_set_are_the_capacity() {
        let (shared, one, _) = pair();
        assert!(shared.begin(&one));
        for line in 0..8 {
            assert_eq!(shared.write(&one, line << 12, &[1]), Ok(()));
        }
        assert_eq!(shared.write(&one, 0x7fff, &[1]), Ok(()), "another set");
        assert_eq!(shared.write(&one, 0x8000, &[1]), Err(AccessAbort::Writes));
        for line in 0..16 {
            assert_eq!(shared.read(&one, line << 16, &mut [0], |_| ()), Ok(()));
        }
        let more = shared.read(&one, 16 << 16, &mut [0], |_| ());
        assert_eq!(more, Err(AccessAbort::Reads));
    }

    #[test]
    fn begin_times_out_while_a_processor_does_not_check_its_accesses() {
        let (shared, one, other) = pair();
        assert!(!other.run(&shared));
        assert!(!shared.begin(&one));
        other.leave();
        assert!(shared.begin(&one));
        assert!(other.run(&shared), "it asks from now on");
        shared.end(&one);
        assert!(!other.run(&shared));
    }
}
