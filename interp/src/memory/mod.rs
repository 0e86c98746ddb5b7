//! Guest memory, which all virtual processors of a VM share.
//!
//! Holds its regions in the host's address space, and the state of each page.

#![expect(
    unsafe_code,
    reason = "guest memory is described by host addresses, which become typed references here"
)]
#![expect(
    clippy::cast_possible_truncation,
    reason = "the host is 64-bit: usize holds a u64"
)]

mod allocation;
mod atomic;
mod handle;

use crate::transaction::shared::Shared;
use crate::width::Width;
use allocation::PageAllocation;
pub(crate) use atomic::{
    GuestBytes, GuestBytesMut, GuestMut, GuestRef, compare_exchange_pair, load_u64, store_record,
    store_u64,
};
pub(crate) use handle::{CodeChanges, MemoryHandle};
use std::any::Any;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Size of a page in bytes.
pub(crate) const PAGE: u64 = 0x1000;

/// Bit of [`PageState::flags`]: the page was written.
const DIRTY: u8 = 2;

/// Maximum number of entries in the log of code changes, which is then cleared.
const LOG_MAX: usize = 4096;

/// A range of guest-physical memory to be used by a [`Memory`].
#[derive(Clone, Copy, Debug)]
pub struct RegionSpec {
    /// First guest-physical address, page-aligned.
    pub gpa: u64,
    /// Length in bytes, a multiple of the page size.
    pub len: u64,
    /// Its address in the host's address space, page-aligned.
    pub host: *mut u8,
    /// False for ROM: writes go to [`crate::Bus::mmio_write`].
    pub writable: bool,
}

/// Why a [`Memory`] could not be created.
#[derive(Clone, Copy, Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryError {
    /// An address or length is not page-aligned, or the range wraps.
    #[error("the region at {0:#x} is not page-aligned")]
    Unaligned(u64),
    /// Two regions share an address.
    #[error("the region at {0:#x} overlaps another one")]
    Overlap(u64),
    /// A null host address.
    #[error("the region at {0:#x} has no host memory")]
    Null(u64),
    /// The host does not have enough memory.
    #[error("the host cannot allocate {0:#x} bytes of guest memory")]
    Allocation(u64),
}

#[derive(Debug, Default)]
struct PageState {
    /// One bit for each processor that has decoded code of this page.
    ///
    /// Writes to the page are reported to these processors.
    code_marks: AtomicU64,
    flags: AtomicU8,
}

/// A region that is in use.
///
/// Invariant: that of [`RegionSpec`], by the contract of [`Memory::new`].
#[derive(Debug)]
struct MappedRegion {
    gpa: u64,
    len: u64,
    host: NonNull<u8>,
    writable: bool,
    pages: Box<[PageState]>,
}

/// One page of RAM or ROM.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Page<'m> {
    /// The exposed host address of the page.
    host: u64,
    /// The page is RAM.
    pub(crate) writable: bool,
    state: &'m PageState,
}

impl<'m> Page<'m> {
    /// The host address of the page, for a TLB.
    pub(crate) fn host(&self) -> u64 {
        self.host
    }

    /// Returns one bit for each processor that caches code of the page.
    pub(crate) fn code_marks(&self) -> u64 {
        self.state.code_marks.load(Ordering::Acquire)
    }

    /// Marks the page as written.
    pub(crate) fn set_dirty(&self) {
        if self.state.flags.load(Ordering::Relaxed) & DIRTY == 0 {
            self.state.flags.fetch_or(DIRTY, Ordering::Relaxed);
        }
    }

    fn host_of(&self, gpa: u64, len: usize) -> u64 {
        let offset = gpa % PAGE;
        assert!(offset + len as u64 <= PAGE, "an access lies within a page");
        self.host + offset
    }

    /// The bytes at `gpa`, which must be within the page.
    pub(crate) fn bytes(self, gpa: u64, len: usize) -> GuestBytes<'m> {
        // SAFETY: pages are those of mapped regions, whose memory lives as long as the `Memory`.
        unsafe { GuestBytes::new(self.host_of(gpa, len), len) }
    }

    /// Returns the bytes at `gpa`, within the page, for writing; `None` in ROM.
    pub(crate) fn bytes_mut(self, gpa: u64, len: usize) -> Option<GuestBytesMut<'m>> {
        let host = self.host_of(gpa, len);
        // SAFETY: as in `bytes`, and the page is writable.
        self.writable
            .then(|| unsafe { GuestBytesMut::new(host, len) })
    }

    /// The value at `gpa`, which must be within the page.
    fn value<T: Width>(self, gpa: u64) -> GuestRef<'m, T> {
        // SAFETY: as in `bytes`.
        unsafe { GuestRef::new(self.host_of(gpa, T::SIZE)) }
    }

    /// Returns the value at `gpa`, within the page, for writing; `None` in ROM.
    pub(crate) fn value_mut<T: Width>(self, gpa: u64) -> Option<GuestMut<'m, T>> {
        let host = self.host_of(gpa, T::SIZE);
        // SAFETY: as in `bytes`, and the page is writable.
        self.writable.then(|| unsafe { GuestMut::new(host) })
    }
}

/// The guest-physical memory of a VM, shared by its virtual processors and devices.
///
/// All accesses to it are atomic or made by single instructions of the host, so that processors on
/// several threads, devices and another hypervisor may use the memory at the same time.
#[derive(Debug)]
pub struct Memory {
    /// By ascending address.
    regions: Vec<MappedRegion>,
    /// Number of pages that became code pages: TLBs for writes must then be flushed.
    code_epoch: AtomicU64,
    log: Mutex<CodeLog>,
    /// Entries ever added to the log.
    log_len: AtomicU64,
    /// Processors made so far.
    processors: AtomicU64,
    /// Held by locked accesses that cross a cache line.
    pub(crate) split_lock: Mutex<()>,
    /// The transactions of all processors.
    pub(crate) shared: Shared,
    /// Keeps the regions mapped.
    _owner: Box<dyn Any + Send + Sync>,
}

/// Bytes of code pages that were written, in order.
#[derive(Debug, Default)]
struct CodeLog {
    /// Entries that were cleared.
    cleared: u64,
    /// Address and length.
    entries: Vec<(u64, usize)>,
}

// SAFETY: the host pointers are valid on every thread for as long as the owner lives (contract of
// `Memory::new`); all bookkeeping is atomic or behind a lock.
unsafe impl Send for Memory {}
// SAFETY: as for Send; guest memory itself is accessed by the functions of `atomic` only.
unsafe impl Sync for Memory {}

impl Memory {
    /// Uses memory that `owner` keeps mapped.
    ///
    /// # Safety
    /// As long as `owner` lives, the host range of every region must stay mapped, readable and, if
    /// the region is writable, writable. While this value or a processor that has it is used, no
    /// Rust reference to the bytes may be used.
    ///
    /// # Errors
    /// [`MemoryError`] for regions that are unaligned or overlap.
    pub unsafe fn new(
        specs: &[RegionSpec],
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Self, MemoryError> {
        let mut regions: Vec<MappedRegion> = Vec::new();
        for spec in specs {
            let end = spec.gpa.checked_add(spec.len);
            let host = spec.host.expose_provenance() as u64;
            if !(spec.gpa | spec.len | host).is_multiple_of(PAGE) || end.is_none() {
                return Err(MemoryError::Unaligned(spec.gpa));
            }
            let host = NonNull::new(spec.host).ok_or(MemoryError::Null(spec.gpa))?;
            if spec.len == 0 {
                continue;
            }
            regions.push(MappedRegion {
                gpa: spec.gpa,
                len: spec.len,
                host,
                writable: spec.writable,
                pages: (0..spec.len / PAGE).map(|_| PageState::default()).collect(),
            });
        }
        regions.sort_by_key(|r| r.gpa);
        if let Some(pair) = regions.windows(2).find(|p| p[0].gpa + p[0].len > p[1].gpa) {
            return Err(MemoryError::Overlap(pair[1].gpa));
        }
        Ok(Self {
            regions,
            code_epoch: AtomicU64::new(0),
            log: Mutex::default(),
            log_len: AtomicU64::new(0),
            processors: AtomicU64::new(0),
            split_lock: Mutex::new(()),
            shared: Shared::new(),
            _owner: owner,
        })
    }

    /// Allocates zeroed RAM for ranges of guest-physical addresses.
    ///
    /// Each range is a first address and a length in bytes, both page-aligned.
    ///
    /// # Errors
    /// [`MemoryError`] for ranges that are unaligned or overlap, and if the host does not have
    /// enough memory.
    pub fn allocate(ranges: &[(u64, u64)]) -> Result<Self, MemoryError> {
        let mut allocations = Vec::new();
        let mut specs = Vec::new();
        for &(gpa, len) in ranges {
            if !len.is_multiple_of(PAGE) {
                return Err(MemoryError::Unaligned(gpa));
            }
            let Some(allocation) = PageAllocation::new(len) else {
                return Err(MemoryError::Allocation(len));
            };
            specs.push(RegionSpec {
                gpa,
                len,
                host: allocation.host(),
                writable: true,
            });
            allocations.push(allocation);
        }
        // SAFETY: an allocation is its owner's alone, lives as long, and gives out no reference.
        unsafe { Self::new(&specs, Box::new(allocations)) }
    }

    /// Returns the regions by ascending address, to map the memory into a hypervisor.
    ///
    /// The host addresses stay valid as long as this value lives. A writer to them must report its
    /// writes while the guest runs in the interpreter: see [`Memory::changed`].
    pub fn regions(&self) -> impl Iterator<Item = RegionSpec> + '_ {
        self.regions.iter().map(|region| RegionSpec {
            gpa: region.gpa,
            len: region.len,
            host: region.host.as_ptr(),
            writable: region.writable,
        })
    }

    /// The page that contains a guest-physical address, if it is RAM or ROM.
    pub(crate) fn page(&self, gpa: u64) -> Option<Page<'_>> {
        let region = self
            .regions
            .iter()
            .find(|r| gpa.wrapping_sub(r.gpa) < r.len)?;
        let offset = (gpa - region.gpa) & !(PAGE - 1);
        debug_assert!(offset < region.len);
        let host = region.host.as_ptr().wrapping_add(offset as usize);
        Some(Page {
            host: host.expose_provenance() as u64,
            writable: region.writable,
            state: &region.pages[(offset / PAGE) as usize],
        })
    }

    /// Reads guest-physical bytes; false if they are not all RAM or ROM.
    pub fn read(&self, gpa: u64, data: &mut [u8]) -> bool {
        let mut done = 0;
        while done < data.len() {
            let at = gpa.wrapping_add(done as u64);
            let chunk = (data.len() - done).min((PAGE - at % PAGE) as usize);
            let Some(page) = self.page(at) else {
                return false;
            };
            page.bytes(at, chunk).read(&mut data[done..done + chunk]);
            done += chunk;
        }
        true
    }

    /// Reads a little-endian number of 8 bytes; `None` if they are not all RAM or ROM.
    pub fn read_u64(&self, gpa: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(gpa, &mut bytes)
            .then(|| u64::from_le_bytes(bytes))
    }

    /// Writes guest-physical bytes, as a device or a loader does.
    ///
    /// Returns false if they are not all RAM. Decoded code of the pages is dropped.
    pub fn write(&self, gpa: u64, data: &[u8]) -> bool {
        let mut done = 0;
        while done < data.len() {
            let at = gpa.wrapping_add(done as u64);
            let chunk = (data.len() - done).min((PAGE - at % PAGE) as usize);
            let Some(bytes) = self.page(at).and_then(|page| page.bytes_mut(at, chunk)) else {
                return false;
            };
            bytes.write(&data[done..done + chunk]);
            done += chunk;
        }
        self.changed(gpa, data.len() as u64);
        true
    }

    /// Reports that something other than the interpreter wrote `len` bytes at `gpa`.
    ///
    /// Processors then drop the code that they decoded there.
    pub fn changed(&self, gpa: u64, len: u64) {
        if len == 0 {
            return;
        }
        self.shared.written(gpa, len as usize);
        let mut at = gpa & !(PAGE - 1);
        let end = gpa.saturating_add(len);
        while at < end {
            if let Some(page) = self.page(at) {
                page.set_dirty();
                if page.code_marks() != 0 {
                    self.code_written(at, PAGE as usize);
                }
            }
            let Some(next) = at.checked_add(PAGE) else {
                break;
            };
            at = next;
        }
    }

    /// Calls `f` with the address of every page that was written since the last call.
    ///
    /// Addresses are guest-physical. Each processor must then flush its translations: see
    /// [`crate::Vcpu::forget_translations`].
    pub fn take_dirty(&self, mut f: impl FnMut(u64)) {
        for region in &self.regions {
            for (gpa, page) in (region.gpa..).step_by(PAGE as usize).zip(&region.pages) {
                let dirty = page.flags.load(Ordering::Relaxed) & DIRTY != 0;
                if dirty && page.flags.fetch_and(!DIRTY, Ordering::Relaxed) & DIRTY != 0 {
                    f(gpa);
                }
            }
        }
    }

    /// Returns the code mark of a new processor.
    ///
    /// Processors after the 63rd share one, which is never removed from a page.
    fn join(&self) -> u64 {
        1 << self.processors.fetch_add(1, Ordering::Relaxed).min(63)
    }

    /// Marks a page: the processor with this mark has decoded code of it.
    ///
    /// If it is the first one, all TLBs for writes must be flushed.
    fn mark_code(&self, gpa: u64, mark: u64) {
        debug_assert!(mark.is_power_of_two());
        let Some(page) = self.page(gpa) else { return };
        if page.state.code_marks.fetch_or(mark, Ordering::AcqRel) == 0 {
            self.code_epoch.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Removes the mark of a processor that no longer caches code of the page.
    fn unmark_code(&self, gpa: u64, mark: u64) {
        if mark != 1 << 63
            && let Some(page) = self.page(gpa)
        {
            page.state.code_marks.fetch_and(!mark, Ordering::AcqRel);
        }
    }

    fn code_epoch(&self) -> u64 {
        self.code_epoch.load(Ordering::Acquire)
    }

    /// Reports to all processors that bytes of a code page changed.
    pub(crate) fn code_written(&self, gpa: u64, len: usize) {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.entries.len() >= LOG_MAX {
            log.cleared += log.entries.len() as u64;
            log.entries.clear();
        }
        log.entries.push((gpa, len));
        self.log_len.fetch_add(1, Ordering::AcqRel);
    }

    fn log_len(&self) -> u64 {
        self.log_len.load(Ordering::Acquire)
    }

    /// Changes logged since entry `position`; `None` if some were cleared.
    fn log_since(&self, position: u64) -> Option<Vec<(u64, usize)>> {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let from = position.checked_sub(log.cleared)?;
        log.entries.get(from as usize..).map(<[_]>::to_vec)
    }

    /// Reads a paging-structure entry; an address without memory reads as all ones.
    ///
    /// It has 8 bytes, or 4 if not `wide`.
    pub(crate) fn read_entry(&self, gpa: u64, wide: bool) -> u64 {
        debug_assert!(gpa.is_multiple_of(if wide { 8 } else { 4 }));
        match self.page(gpa) {
            None => u64::MAX,
            Some(page) if wide => page.value::<u64>(gpa).load(),
            Some(page) => page.value::<u32>(gpa).load().into(),
        }
    }

    /// Sets bits of a paging-structure entry, if it still is `old`.
    ///
    /// Returns false if it has changed. Entries in ROM and outside of memory stay as they are.
    pub(crate) fn mark_entry(&self, gpa: u64, wide: bool, old: u64, bits: u64) -> bool {
        debug_assert!(gpa.is_multiple_of(if wide { 8 } else { 4 }));
        let Some(page) = self.page(gpa).filter(|page| page.writable) else {
            return true;
        };
        page.set_dirty();
        let new = old | bits;
        let done = if wide {
            let entry = page.value_mut::<u64>(gpa);
            entry.is_some_and(|entry| entry.compare_exchange(old, new))
        } else {
            let entry = page.value_mut::<u32>(gpa);
            entry.is_some_and(|entry| entry.compare_exchange(old as u32, new as u32))
        };
        if done {
            self.shared.written(gpa, 1);
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_or_unaligned_regions_are_refused() {
        let refused = |ranges: &[(u64, u64)]| Memory::allocate(ranges).err();
        let overlap = refused(&[(0x1000, 0x2000), (0x2000, 0x2000)]);
        assert_eq!(overlap, Some(MemoryError::Overlap(0x2000)));
        let unaligned = refused(&[(0x1000, 0x800)]);
        assert_eq!(unaligned, Some(MemoryError::Unaligned(0x1000)));
        assert_eq!(refused(&[(0x1000, 0x1000), (0x2000, 0x1000)]), None);
    }

    #[test]
    fn regions_are_listed_by_ascending_address() {
        let memory = Memory::allocate(&[(0x4000, 0x1000), (0, 0x2000)]).unwrap();
        let regions = memory.regions().map(|r| (r.gpa, r.len, r.writable));
        let expected = [(0, 0x2000, true), (0x4000, 0x1000, true)];
        assert!(regions.eq(expected));
        assert!(memory.regions().all(|region| !region.host.is_null()));
    }

    #[test]
    fn owner_lives_as_long_as_the_memory() {
        let alive = std::sync::Arc::new(());
        let owner = Box::new(alive.clone());
        // SAFETY: no memory is described.
        let memory = unsafe { Memory::new(&[], owner) }.unwrap();
        assert_eq!(std::sync::Arc::strong_count(&alive), 2);
        drop(memory);
        assert_eq!(std::sync::Arc::strong_count(&alive), 1);
    }

    #[test]
    fn reads_and_writes_cross_pages_but_not_the_end() {
        let memory = Memory::allocate(&[(0, 0x1000), (0x1000, 0x1000)]).unwrap();
        assert!(memory.write(0xffe, &[1, 2, 3, 4]));
        let mut data = [0; 6];
        assert!(memory.read(0xffd, &mut data));
        assert_eq!(data, [0, 1, 2, 3, 4, 0]);
        assert_eq!(memory.read_u64(0xffe), Some(0x0403_0201));
        assert_eq!(memory.read_u64(0x1ff9), None);
        assert!(!memory.read(0x1ffe, &mut data) && !memory.write(0x1fff, &[1, 2]));
        let mut dirty = Vec::new();
        memory.take_dirty(|gpa| dirty.push(gpa));
        assert_eq!(dirty, [0, 0x1000]);
    }

    #[test]
    fn write_to_code_page_is_logged_while_it_is_marked() {
        let memory = Memory::allocate(&[(0, 0x2000)]).unwrap();
        let mark = memory.join();
        memory.mark_code(0x1000, mark);
        assert!(memory.write(0xfff, &[1, 2]));
        assert_eq!(memory.log_since(0), Some(vec![(0x1000, 0x1000)]));
        memory.unmark_code(0x1000, mark);
        assert!(memory.write(0xfff, &[1, 2]));
        assert_eq!(memory.log_len(), 1);
    }

    #[test]
    fn log_that_was_cleared_is_unknown() {
        let memory = Memory::allocate(&[]).unwrap();
        for _ in 0..=LOG_MAX {
            memory.code_written(0x1000, 1);
        }
        assert_eq!(memory.log_since(0), None);
        assert_eq!(memory.log_since(LOG_MAX as u64), Some(vec![(0x1000, 1)]));
    }

    #[test]
    fn entry_is_marked_only_if_it_is_unchanged() {
        let memory = Memory::allocate(&[(0, 0x1000)]).unwrap();
        assert!(memory.write(8, &0x7007_u64.to_le_bytes()));
        assert!(!memory.mark_entry(8, true, 0x7003, 0x20));
        assert!(memory.mark_entry(8, true, 0x7007, 0x20));
        assert_eq!(memory.read_entry(8, true), 0x7027);
        assert!(memory.mark_entry(8, false, 0x7027, 0x40));
        assert_eq!(memory.read_entry(8, false), 0x7067);
        assert_eq!(memory.read_entry(0x5000, true), u64::MAX);
    }
}
