//! What the processors of a machine know of each other's transactions: which lines each one has
//! read and written, and what it has written.
//!
//! A transaction's stores stay here until it commits, so that memory never holds what may yet be
//! undone. While any transaction is open, every processor asks here before each access; none does
//! otherwise. So the processor that begins one waits until no other accesses memory without asking:
//! each says in its [`Seat`] how it does.

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
/// The first level of data cache, which holds what a transaction has written: 32 KiB in 8 ways.
const WRITE_SETS: usize = 64;
const WRITE_WAYS: u8 = 8;
/// The second level, which holds what it has read: 1 MiB in 16 ways.
const READ_SETS: usize = 1024;
const READ_WAYS: u8 = 16;

/// How long a transaction waits for the other processors before it gives up.
const PATIENCE: Duration = Duration::from_millis(10);

/// The processor runs no guest code.
const OUTSIDE: u8 = 0;
/// It accesses memory without asking.
const FAST: u8 = 1;
/// It asks before each access.
const CAREFUL: u8 = 2;

/// What the others see of a processor.
#[derive(Debug)]
pub(crate) struct Seat(AtomicU8);

impl Seat {
    /// The processor goes on running guest code. Answers whether it must ask before each access.
    #[inline]
    pub(crate) fn run(&self, shared: &Shared) -> bool {
        let closed = || shared.open.load(Ordering::SeqCst) == 0;
        if closed() {
            if self.0.load(Ordering::Relaxed) == FAST {
                return false;
            }
            // A transaction that begins now either sees this, or is seen here.
            self.0.store(FAST, Ordering::SeqCst);
            if closed() {
                return false;
            }
        }
        self.0.store(CAREFUL, Ordering::SeqCst);
        true
    }

    /// The processor does not run guest code any more.
    pub(crate) fn leave(&self) {
        self.0.store(OUTSIDE, Ordering::SeqCst);
    }
}

/// Why a transaction cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// Somebody else accessed one of its lines.
    Conflict,
    /// It has written more than the first level of cache holds.
    Writes,
    /// It has read more than the second level holds.
    Reads,
}

/// What a transaction has written of a line.
#[derive(Clone, Debug)]
struct Written {
    bytes: [u8; LINE],
    /// One bit for each byte.
    mask: u64,
}

/// An open transaction.
#[derive(Debug)]
struct Region {
    seat: Arc<Seat>,
    lost: bool,
    reads: HashSet<u64>,
    writes: HashMap<u64, Written>,
    read_sets: Box<[u8; READ_SETS]>,
    write_sets: [u8; WRITE_SETS],
}

/// The transactions of all processors of a machine.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Open transactions.
    open: AtomicU32,
    seats: Mutex<Vec<Weak<Seat>>>,
    regions: Mutex<Vec<Region>>,
}

/// Keeps transactions from going on while memory is accessed.
#[derive(Debug)]
pub(crate) struct Held<'a>(#[expect(dead_code, reason = "it is held")] MutexGuard<'a, Vec<Region>>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The lines of an access within a page: number, first byte in the line, range of the data.
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

/// One more line in its set; false if there is no room.
fn enter(sets: &mut [u8], ways: u8, line: u64) -> bool {
    let len = sets.len() as u64;
    match sets.get_mut((line % len) as usize) {
        Some(used) if *used < ways => {
            *used += 1;
            true
        }
        _ => false,
    }
}

impl Region {
    fn new(seat: Arc<Seat>) -> Self {
        Self {
            seat,
            lost: false,
            reads: HashSet::new(),
            writes: HashMap::new(),
            read_sets: Box::new([0; READ_SETS]),
            write_sets: [0; WRITE_SETS],
        }
    }

    /// Somebody else accesses a line.
    fn disturb(&mut self, line: u64, write: bool) {
        self.lost |= self.writes.contains_key(&line) || (write && self.reads.contains(&line));
    }

    fn read(&mut self, line: u64) -> Result<(), Loss> {
        if self.reads.insert(line) && !enter(&mut *self.read_sets, READ_WAYS, line) {
            return Err(Loss::Reads);
        }
        Ok(())
    }

    fn write(&mut self, line: u64, offset: usize, data: &[u8]) -> Result<(), Loss> {
        let known = self.writes.contains_key(&line);
        if !known && !enter(&mut self.write_sets, WRITE_WAYS, line) {
            return Err(Loss::Writes);
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

    /// Puts what was written over bytes that were read from memory.
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

/// The region of a processor, with the accesses to these lines made known to all others.
fn own<'a>(
    regions: &'a mut [Region],
    seat: &Arc<Seat>,
    (gpa, len): (u64, usize),
    write: bool,
) -> Result<&'a mut Region, Loss> {
    let mut own = None;
    for region in regions {
        if Arc::ptr_eq(&region.seat, seat) {
            if region.lost {
                return Err(Loss::Conflict);
            }
            own = Some(region);
        } else {
            // Who comes later wins, as with the processor's own caches.
            lines(gpa, len).for_each(|(line, ..)| region.disturb(line, write));
        }
    }
    own.ok_or(Loss::Conflict)
}

impl Shared {
    pub(crate) fn new() -> Self {
        Self {
            open: AtomicU32::new(0),
            seats: Mutex::default(),
            regions: Mutex::default(),
        }
    }

    /// A place for one more processor.
    pub(crate) fn join(&self) -> Arc<Seat> {
        let seat = Arc::new(Seat(AtomicU8::new(OUTSIDE)));
        let mut seats = lock(&self.seats);
        seats.retain(|other| other.strong_count() != 0);
        seats.push(Arc::downgrade(&seat));
        seat
    }

    /// Opens a transaction; false, with nothing done, if another processor did not come round to
    /// asking before its accesses in time.
    pub(crate) fn begin(&self, seat: &Arc<Seat>) -> bool {
        lock(&self.regions).push(Region::new(Arc::clone(seat)));
        self.open.fetch_add(1, Ordering::SeqCst);
        // Two that begin at once must not wait for each other.
        seat.0.store(CAREFUL, Ordering::SeqCst);
        let seats: Vec<_> = lock(&self.seats).iter().filter_map(Weak::upgrade).collect();
        let until = Instant::now() + PATIENCE;
        for other in seats {
            while other.0.load(Ordering::SeqCst) == FAST {
                if Instant::now() >= until {
                    self.end(seat);
                    return false;
                }
                std::thread::yield_now();
            }
        }
        true
    }

    /// Forgets the transaction of a processor, if it has one.
    pub(crate) fn end(&self, seat: &Arc<Seat>) {
        let mut regions = lock(&self.regions);
        let before = regions.len();
        regions.retain(|region| !Arc::ptr_eq(&region.seat, seat));
        if regions.len() < before {
            self.open.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Somebody else accessed a line of the processor's transaction.
    pub(crate) fn is_lost(&self, seat: &Arc<Seat>) -> bool {
        let regions = lock(&self.regions);
        let own = regions.iter().find(|r| Arc::ptr_eq(&r.seat, seat));
        own.is_none_or(|region| region.lost)
    }

    /// A load of a transaction, within a page; `load` reads memory itself.
    pub(crate) fn read(
        &self,
        seat: &Arc<Seat>,
        gpa: u64,
        data: &mut [u8],
        load: impl FnOnce(&mut [u8]),
    ) -> Result<(), Loss> {
        let mut regions = lock(&self.regions);
        let region = own(&mut regions, seat, (gpa, data.len()), false)?;
        load(data);
        for (line, offset, part) in lines(gpa, data.len()) {
            region.read(line)?;
            if let Some(data) = data.get_mut(part) {
                region.overlay(line, offset, data);
            }
        }
        Ok(())
    }

    /// A store of a transaction, within a page.
    pub(crate) fn write(&self, seat: &Arc<Seat>, gpa: u64, data: &[u8]) -> Result<(), Loss> {
        let mut regions = lock(&self.regions);
        let region = own(&mut regions, seat, (gpa, data.len()), true)?;
        for (line, offset, part) in lines(gpa, data.len()) {
            region.write(line, offset, data.get(part).unwrap_or_default())?;
        }
        Ok(())
    }

    /// Whether the processor's transaction has written any of these bytes' lines.
    pub(crate) fn wrote(&self, seat: &Arc<Seat>, gpa: u64, len: usize) -> bool {
        let regions = lock(&self.regions);
        let own = regions.iter().find(|r| Arc::ptr_eq(&r.seat, seat));
        own.is_some_and(|region| {
            lines(gpa, len).any(|(line, ..)| region.writes.contains_key(&line))
        })
    }

    /// Ends a transaction whose stores all become visible at once: `store` makes each of them.
    pub(crate) fn commit(
        &self,
        seat: &Arc<Seat>,
        mut store: impl FnMut(u64, &[u8]),
    ) -> Result<(), Loss> {
        let mut regions = lock(&self.regions);
        let at = regions.iter().position(|r| Arc::ptr_eq(&r.seat, seat));
        let Some(region) = at.map(|at| regions.swap_remove(at)) else {
            return Err(Loss::Conflict);
        };
        let result = if region.lost {
            Err(Loss::Conflict)
        } else {
            // In the order of addresses, whatever order the map has.
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

    /// Before an access that is not part of a transaction: those that it disturbs are lost, and none
    /// goes on before the answer is dropped.
    pub(crate) fn hold(&self, gpa: u64, len: usize, write: bool) -> Held<'_> {
        let mut regions = lock(&self.regions);
        for region in regions.iter_mut() {
            lines(gpa, len).for_each(|(line, ..)| region.disturb(line, write));
        }
        Held(regions)
    }

    /// Memory was written by a device, or by the processor's page walk.
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

    fn pair() -> (Shared, Arc<Seat>, Arc<Seat>) {
        let shared = Shared::new();
        let (one, other) = (shared.join(), shared.join());
        (shared, one, other)
    }

    fn committed(shared: &Shared, seat: &Arc<Seat>) -> Result<Vec<(u64, Vec<u8>)>, Loss> {
        let mut stores = Vec::new();
        shared.commit(seat, |gpa, data| stores.push((gpa, data.to_vec())))?;
        Ok(stores)
    }

    #[test]
    fn runs_of_a_mask() {
        let mut found = Vec::new();
        for mask in [0, 1, u64::MAX, 0b0110_1000, 1 << 63] {
            runs(mask, |from, to| found.push((from, to)));
        }
        assert_eq!(found, [(0, 1), (0, 64), (3, 4), (5, 7), (63, 64)]);
    }

    #[test]
    fn stores_are_seen_by_their_transaction_and_come_out_at_its_end() {
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
    fn who_comes_later_wins() {
        for (first, second, lost) in [
            (false, false, false),
            (false, true, true),
            (true, false, true),
            (true, true, true),
        ] {
            let (shared, one, other) = pair();
            assert!(shared.begin(&one) && shared.begin(&other));
            for (seat, write) in [(&one, first), (&other, second)] {
                let done = if write {
                    shared.write(seat, 0x1000, &[1])
                } else {
                    shared.read(seat, 0x1038, &mut [0; 8], |_| ())
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
    fn plain_accesses_and_devices_disturb() {
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
        assert_eq!(shared.write(&one, 0x3000, &[1]), Err(Loss::Conflict));
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
        assert_eq!(shared.write(&one, 0x8000, &[1]), Err(Loss::Writes));
        for line in 0..16 {
            assert_eq!(shared.read(&one, line << 16, &mut [0], |_| ()), Ok(()));
        }
        let more = shared.read(&one, 16 << 16, &mut [0], |_| ());
        assert_eq!(more, Err(Loss::Reads));
    }

    #[test]
    fn a_processor_that_never_asks_is_waited_for_in_vain_but_not_for_ever() {
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
