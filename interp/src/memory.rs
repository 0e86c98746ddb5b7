//! Guest memory as all virtual processors of a VM share it: where it lies in our address space, and
//! what is known of each page.

#![expect(unsafe_code, reason = "guest memory is reached through host pointers")]
#![expect(
    clippy::cast_possible_truncation,
    reason = "the host is 64-bit: usize holds a u64"
)]

use crate::transaction::shared::Shared;
use std::any::Any;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Bytes in a page.
pub(crate) const PAGE: u64 = 0x1000;

/// The page was written.
const DIRTY: u8 = 2;

/// A range of guest-physical memory to be used by a [`Memory`].
#[derive(Clone, Copy, Debug)]
pub struct RegionSpec {
    /// First guest-physical address, page-aligned.
    pub gpa: u64,
    /// Length in bytes, page-aligned.
    pub len: u64,
    /// Where it lies in our address space, page-aligned.
    pub host: *mut u8,
    /// False for ROM: writes go to [`crate::Platform::mmio_write`].
    pub writable: bool,
}

/// Why a [`Memory`] could not be made.
#[derive(Clone, Copy, Debug, thiserror::Error, PartialEq, Eq)]
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
}

#[derive(Debug, Default)]
struct PageState {
    /// One bit for each processor that has decoded code of this page: writes must be seen.
    code: AtomicU64,
    flags: AtomicU8,
}

#[derive(Debug)]
struct Region {
    gpa: u64,
    len: u64,
    host: NonNull<u8>,
    writable: bool,
    pages: Box<[PageState]>,
}

/// One page of RAM or ROM.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Page<'a> {
    /// The page's first byte in our address space.
    pub(crate) host: NonNull<u8>,
    pub(crate) writable: bool,
    state: &'a PageState,
}

impl Page<'_> {
    /// The processors that cache code of the page.
    pub(crate) fn code(&self) -> u64 {
        self.state.code.load(Ordering::Acquire)
    }

    pub(crate) fn set_dirty(&self) {
        if self.state.flags.load(Ordering::Relaxed) & DIRTY == 0 {
            self.state.flags.fetch_or(DIRTY, Ordering::Relaxed);
        }
    }
}

/// The guest-physical memory of a VM.
#[derive(Debug)]
pub struct Memory {
    regions: Vec<Region>,
    /// Counts pages that became code pages: write TLBs must be emptied.
    code_epoch: AtomicU64,
    /// Bytes of code pages that changed, in order, since `log.0`.
    log: Mutex<(u64, Vec<(u64, usize)>)>,
    /// Entries ever put into the log.
    log_len: AtomicU64,
    /// Processors made so far.
    processors: AtomicU64,
    /// Taken by locked accesses that cross a cache line.
    pub(crate) split_lock: Mutex<()>,
    /// The transactions of all processors.
    pub(crate) shared: Shared,
    /// Keeps the host memory mapped; dropped with `self`.
    _owner: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: the host pointers are valid on every thread for the life of the value (contract of
// `Memory::new`); all bookkeeping is atomic or behind a lock.
unsafe impl Send for Memory {}
// SAFETY: as for Send; guest memory itself is shared by nature, as between real processors.
unsafe impl Sync for Memory {}

impl Memory {
    /// Uses memory that others own.
    ///
    /// # Safety
    /// Every region's host range must stay mapped, readable and (if writable) writable, for as long
    /// as the value lives, and no Rust reference into it may exist meanwhile.
    ///
    /// # Errors
    /// [`MemoryError`] for regions that are unaligned or overlap.
    pub unsafe fn new(specs: &[RegionSpec]) -> Result<Self, MemoryError> {
        let mut regions: Vec<Region> = Vec::new();
        for spec in specs {
            let end = spec.gpa.checked_add(spec.len);
            let host = spec.host.addr() as u64;
            if !(spec.gpa | spec.len | host).is_multiple_of(PAGE) || end.is_none() {
                return Err(MemoryError::Unaligned(spec.gpa));
            }
            let host = NonNull::new(spec.host).ok_or(MemoryError::Null(spec.gpa))?;
            if spec.len == 0 {
                continue;
            }
            regions.push(Region {
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
            log: Mutex::new((0, Vec::new())),
            log_len: AtomicU64::new(0),
            processors: AtomicU64::new(0),
            split_lock: Mutex::new(()),
            shared: Shared::new(),
            _owner: None,
        })
    }

    /// Keeps `owner`, which holds the host memory mapped, alive as long as the value.
    #[must_use]
    pub fn with_owner(self, owner: impl Any + Send + Sync) -> Self {
        Self {
            _owner: Some(Arc::new(owner)),
            ..self
        }
    }

    /// The page that holds a guest-physical address, if it is RAM or ROM.
    pub(crate) fn page(&self, gpa: u64) -> Option<Page<'_>> {
        let region = self
            .regions
            .iter()
            .find(|r| gpa.wrapping_sub(r.gpa) < r.len)?;
        let offset = (gpa - region.gpa) & !(PAGE - 1);
        // SAFETY: `offset` is below the region's length, so the result lies in the mapped range.
        let host = unsafe { region.host.add(offset as usize) };
        let state = &region.pages[(offset / PAGE) as usize];
        Some(Page {
            host,
            writable: region.writable,
            state,
        })
    }

    /// A host pointer to `len` bytes at `gpa`, all within one page of RAM or ROM.
    fn bytes(&self, gpa: u64, len: usize) -> Option<NonNull<u8>> {
        let page = self.page(gpa)?;
        let offset = (gpa % PAGE) as usize;
        // SAFETY: the offset stays within the page.
        (offset + len <= PAGE as usize).then(|| unsafe { page.host.add(offset) })
    }

    /// Copies guest-physical bytes; false if they are not all RAM or ROM.
    pub fn read(&self, gpa: u64, data: &mut [u8]) -> bool {
        let mut done = 0;
        while done < data.len() {
            let at = gpa.wrapping_add(done as u64);
            let chunk = (data.len() - done).min((PAGE - at % PAGE) as usize);
            let Some(host) = self.bytes(at, chunk) else {
                return false;
            };
            // SAFETY: `host` is valid for `chunk` bytes; guest memory never overlaps `data`.
            unsafe {
                std::ptr::copy_nonoverlapping(host.as_ptr(), data[done..].as_mut_ptr(), chunk);
            }
            done += chunk;
        }
        true
    }

    /// Writes guest-physical bytes, as a device or a loader does; false if they are not all RAM.
    /// Cached code of the pages is given up.
    pub fn write(&self, gpa: u64, data: &[u8]) -> bool {
        let mut done = 0;
        while done < data.len() {
            let at = gpa.wrapping_add(done as u64);
            let chunk = (data.len() - done).min((PAGE - at % PAGE) as usize);
            let Some(host) = self.bytes(at, chunk) else {
                return false;
            };
            // SAFETY: as in `read`; ROM too is mapped writable for loaders only if the owner says
            // so, hence the check below.
            if !self.page(at).is_some_and(|p| p.writable) {
                return false;
            }
            // SAFETY: `host` is valid and writable for `chunk` bytes.
            unsafe { std::ptr::copy_nonoverlapping(data[done..].as_ptr(), host.as_ptr(), chunk) };
            done += chunk;
        }
        self.changed(gpa, data.len() as u64);
        true
    }

    /// Must be called after something other than the interpreter wrote guest memory: processors
    /// give up what they decoded there.
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
                if page.code() != 0 {
                    self.code_written(at, PAGE as usize);
                }
            }
            let Some(next) = at.checked_add(PAGE) else {
                break;
            };
            at = next;
        }
    }

    /// Reads and clears the dirty marks; calls `f` with the address of every written page.
    pub fn take_dirty(&self, mut f: impl FnMut(u64)) {
        for region in &self.regions {
            for (gpa, page) in (region.gpa..).step_by(PAGE as usize).zip(&region.pages) {
                if page.flags.fetch_and(!DIRTY, Ordering::Relaxed) & DIRTY != 0 {
                    f(gpa);
                }
            }
        }
    }

    /// The bit of a new processor. Beyond 63 they share one, which is never taken off a page.
    pub(crate) fn join(&self) -> u64 {
        1 << self.processors.fetch_add(1, Ordering::Relaxed).min(63)
    }

    /// Marks a page as holding code that processor `who` decoded. If it is the first, all write
    /// TLBs must be emptied.
    pub(crate) fn mark_code(&self, gpa: u64, who: u64) {
        let Some(page) = self.page(gpa) else { return };
        if page.state.code.fetch_or(who, Ordering::AcqRel) == 0 {
            self.code_epoch.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Processor `who` has no code of the page any more.
    pub(crate) fn unmark_code(&self, gpa: u64, who: u64) {
        if who != 1 << 63
            && let Some(page) = self.page(gpa)
        {
            page.state.code.fetch_and(!who, Ordering::AcqRel);
        }
    }

    pub(crate) fn code_epoch(&self) -> u64 {
        self.code_epoch.load(Ordering::Acquire)
    }

    /// Bytes of a code page changed: tells all processors.
    pub(crate) fn code_written(&self, gpa: u64, len: usize) {
        let mut log = self
            .log
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if log.1.len() >= 4096 {
            log.0 += log.1.len() as u64;
            log.1.clear();
        }
        log.1.push((gpa, len));
        self.log_len.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn log_len(&self) -> u64 {
        self.log_len.load(Ordering::Acquire)
    }

    /// Changes logged since entry `seen`, or None if some were forgotten.
    pub(crate) fn log_since(&self, seen: u64) -> Option<Vec<(u64, usize)>> {
        let log = self
            .log
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let from = seen.checked_sub(log.0)?;
        log.1.get(from as usize..).map(<[_]>::to_vec)
    }

    /// A page-table entry of 8 or 4 bytes; all ones where there is no memory.
    pub(crate) fn read_entry(&self, gpa: u64, wide: bool) -> u64 {
        let len = if wide { 8 } else { 4 };
        let Some(host) = self.bytes(gpa, len) else {
            return u64::MAX;
        };
        // SAFETY: `host` is valid for `len` bytes and aligned to `len` (entries are).
        unsafe {
            if wide {
                AtomicU64::from_ptr(host.as_ptr().cast()).load(Ordering::Relaxed)
            } else {
                AtomicU32::from_ptr(host.as_ptr().cast())
                    .load(Ordering::Relaxed)
                    .into()
            }
        }
    }

    /// Sets accessed and dirty bits in an entry if it still holds `old`; false if it changed.
    pub(crate) fn mark_entry(&self, gpa: u64, wide: bool, old: u64, set: u64) -> bool {
        let Some(host) = self.bytes(gpa, if wide { 8 } else { 4 }) else {
            return true;
        };
        let Some(page) = self.page(gpa).filter(|p| p.writable) else {
            return true;
        };
        page.set_dirty();
        let new = old | set;
        // SAFETY: `host` is valid, writable and aligned to the entry's size.
        let done = unsafe {
            if wide {
                AtomicU64::from_ptr(host.as_ptr().cast())
                    .compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
            } else {
                AtomicU32::from_ptr(host.as_ptr().cast())
                    .compare_exchange(old as u32, new as u32, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
            }
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
    fn regions_that_overlap_are_refused() {
        let mut ram = vec![0_u8; 0x4000];
        let host = ram.as_mut_ptr().map_addr(|a| (a + 0xfff) & !0xfff);
        let spec = |gpa| RegionSpec {
            gpa,
            len: 0x2000,
            host,
            writable: true,
        };
        // SAFETY: refused, so never used.
        let result = unsafe { Memory::new(&[spec(0x1000), spec(0x2000)]) };
        assert_eq!(result.err(), Some(MemoryError::Overlap(0x2000)));
    }

    #[test]
    fn write_to_code_page_reaches_the_log() {
        let mut ram = vec![0_u8; 0x3000];
        let host = ram.as_mut_ptr().map_addr(|a| (a + 0xfff) & !0xfff);
        let spec = RegionSpec {
            gpa: 0,
            len: 0x2000,
            host,
            writable: true,
        };
        // SAFETY: `ram` outlives `memory` and is not touched meanwhile.
        let memory = unsafe { Memory::new(&[spec]) }.unwrap();
        let who = memory.join();
        memory.mark_code(0x1000, who);
        assert!(memory.write(0xfff, &[1, 2]));
        assert_eq!(memory.log_since(0), Some(vec![(0x1000, 0x1000)]));
        memory.unmark_code(0x1000, who);
        assert!(memory.write(0xfff, &[1, 2]));
        assert_eq!(memory.log_len(), 1);
        assert!(!memory.write(0x1fff, &[1, 2]));
    }
}
