//! Guest memory in snapshots: the pages that are not zero, shared between snapshots.
//!
//! A snapshot costs only the pages that were written since the one before: unchanged pages share an
//! [`Arc`]. The interpreter's dirty marks say which pages were written, so only the first save
//! scans memory.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::Arc;

use hindsight_interp::Memory;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use crate::memory;

/// Bytes of a page.
pub const PAGE: usize = 4096;

/// The bytes of a page.
pub type PageBytes = [u8; PAGE];

/// Pages of a [`Chunk`].
const CHUNK_PAGES: usize = 64;
/// Bytes of guest memory that a chunk stands for.
const CHUNK: u64 = (CHUNK_PAGES * PAGE) as u64;

/// Neighbouring pages. `None` stands for zeros.
type Chunk = [Option<Arc<PageBytes>>; CHUNK_PAGES];

/// The pages of a guest that are not all zero, by guest-physical address.
///
/// A copy shares all chunks with the original. So copies and comparisons take time in proportion to
/// the chunks, and to the pages of those chunks that differ.
#[derive(Clone, Default)]
pub struct Pages {
    /// By the guest-physical address of their first page. None is empty.
    chunks: BTreeMap<u64, Arc<Chunk>>,
    /// The number of pages.
    count: usize,
}

/// The address of the chunk of a page, and the index of the page in it.
fn position(gpa: u64) -> (u64, usize) {
    let index = gpa % CHUNK / PAGE as u64;
    (gpa & !(CHUNK - 1), usize::try_from(index).unwrap_or(0))
}

/// The pages of a chunk at `base`, with their addresses.
fn pages_of(base: u64, chunk: &Chunk) -> impl Iterator<Item = (u64, &Arc<PageBytes>)> {
    let pages = (0_u64..).zip(chunk);
    pages.filter_map(move |(index, page)| Some((base + index * PAGE as u64, page.as_ref()?)))
}

impl Pages {
    /// The number of pages that are not all zero.
    pub const fn len(&self) -> usize {
        self.count
    }

    /// Whether all of memory is zero.
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Every page with its address, ascending.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &PageBytes)> {
        let chunks = self.chunks.iter();
        let pages = chunks.flat_map(|(&base, chunk)| pages_of(base, chunk));
        pages.map(|(gpa, page)| (gpa, &**page))
    }

    /// The page at `gpa`, if it is not all zero.
    pub fn get(&self, gpa: u64) -> Option<&PageBytes> {
        self.shared(gpa).map(|page| &**page)
    }

    fn shared(&self, gpa: u64) -> Option<&Arc<PageBytes>> {
        let (base, index) = position(gpa);
        self.chunks.get(&base)?.get(index)?.as_ref()
    }

    /// Addresses of the pages whose bytes differ, ascending.
    pub fn differing(&self, other: &Self) -> Vec<u64> {
        let mut pages: Vec<_> = self.unshared_addresses(other).collect();
        pages.retain(|&gpa| self.get(gpa) != other.get(gpa));
        pages.sort_unstable();
        pages
    }

    /// The number of pages that are not shared with `other`: what this snapshot costs in addition.
    pub fn unshared(&self, other: &Self) -> usize {
        self.own_pages(other).count()
    }

    /// Pages that are not shared with `other`.
    fn own_pages<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = u64> + 'a {
        let chunks = self.chunks.iter().filter(|(base, chunk)| {
            let same = other.chunks.get(base);
            same.is_none_or(|same| !Arc::ptr_eq(same, chunk))
        });
        let pages = chunks.flat_map(|(&base, chunk)| pages_of(base, chunk));
        pages.filter_map(|(gpa, page)| {
            let same = other.shared(gpa);
            let shared = same.is_some_and(|same| Arc::ptr_eq(same, page));
            (!shared).then_some(gpa)
        })
    }

    /// Sets the page at `gpa`. A page that is equal already stays shared.
    pub(crate) fn set(&mut self, gpa: u64, bytes: &PageBytes) {
        debug_assert!(gpa.is_multiple_of(PAGE as u64), "{gpa:#x} is not aligned");
        let zero = bytes.iter().all(|&byte| byte == 0);
        match self.shared(gpa) {
            None if zero => {}
            Some(old) if **old == *bytes => {}
            _ => self.replace(gpa, (!zero).then(|| Arc::new(*bytes))),
        }
    }

    /// Adds a page of a snapshot that is read; fails where no page can be, or one is already.
    pub(super) fn add(&mut self, gpa: u64, page: PageBytes) -> Result<(), String> {
        if !gpa.is_multiple_of(PAGE as u64) {
            return Err(format!("no page begins at {gpa:#x}"));
        }
        if self.shared(gpa).is_some() {
            return Err(format!("two pages at {gpa:#x}"));
        }
        self.replace(gpa, Some(Arc::new(page)));
        Ok(())
    }

    /// Replaces the page at `gpa`, or drops it.
    fn replace(&mut self, gpa: u64, page: Option<Arc<PageBytes>>) {
        let (base, index) = position(gpa);
        let empty = || Arc::new([const { None }; CHUNK_PAGES]);
        let chunk = Arc::make_mut(self.chunks.entry(base).or_insert_with(empty));
        let added = page.is_some();
        let old = chunk
            .get_mut(index)
            .and_then(|old| std::mem::replace(old, page));
        let is_empty = !added && chunk.iter().all(Option::is_none);
        self.count = self.count + usize::from(added) - usize::from(old.is_some());
        if is_empty {
            self.chunks.remove(&base);
        }
    }

    /// Addresses of the pages that the two do not share. Their bytes may still be equal.
    fn unshared_addresses<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = u64> + 'a {
        let changed = self.own_pages(other);
        let others = other.own_pages(self);
        changed.chain(others.filter(|&gpa| self.shared(gpa).is_none()))
    }
}

impl PartialEq for Pages {
    fn eq(&self, other: &Self) -> bool {
        self.count == other.count
            && self
                .own_pages(other)
                .all(|gpa| self.get(gpa) == other.get(gpa))
    }
}

impl Eq for Pages {}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pages({})", self.count)
    }
}

impl Serialize for Pages {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter().map(|(gpa, page)| (gpa, page.as_slice())))
    }
}

impl<'de> Deserialize<'de> for Pages {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let list = Vec::<(u64, Vec<u8>)>::deserialize(deserializer)?;
        let mut pages = Self::default();
        for (gpa, bytes) in list {
            let len = bytes.len();
            let page = PageBytes::try_from(bytes)
                .map_err(|_| de::Error::invalid_length(len, &"a page of 4096 bytes"))?;
            pages.add(gpa, page).map_err(de::Error::custom)?;
        }
        Ok(pages)
    }
}

/// Saves and restores the memory of one machine. No vCPU may run meanwhile.
#[derive(Debug)]
pub(crate) struct MemorySaver {
    ram: GuestMemoryMmap,
    /// The interpreters' view of `ram`, which has the dirty marks.
    interp: Arc<Memory>,
    /// The contents of memory when the dirty marks were last cleared.
    base: Option<Pages>,
}

impl MemorySaver {
    /// A saver for `ram`, which the interpreters access through `interp`.
    pub(crate) fn new(ram: GuestMemoryMmap, interp: Arc<Memory>) -> Self {
        Self {
            ram,
            interp,
            base: None,
        }
    }

    /// The current pages.
    ///
    /// Afterwards the caller flushes the TLB of every vCPU: a page is marked dirty when a TLB entry
    /// for writing is filled.
    pub(crate) fn save(&mut self) -> io::Result<Pages> {
        let base = match self.base.take() {
            Some(mut pages) => {
                for gpa in self.take_dirty() {
                    pages.set(gpa, &self.read(gpa)?);
                }
                pages
            }
            None => {
                self.take_dirty();
                self.scan()?
            }
        };
        self.base = Some(base.clone());
        Ok(base)
    }

    /// Sets memory to `pages`, all of which are in it ([`MemorySaver::misplaced`]).
    ///
    /// Afterwards the caller flushes the TLB of every vCPU.
    pub(crate) fn restore(&mut self, pages: &Pages) -> io::Result<()> {
        debug_assert_eq!(self.misplaced(pages), None, "the caller checks the pages");
        self.save()?;
        let now = self.base.take().unwrap_or_default();
        for gpa in pages.unshared_addresses(&now) {
            let zeros = [0; PAGE];
            let bytes = pages.get(gpa).unwrap_or(&zeros);
            self.ram
                .write_slice(bytes, GuestAddress(gpa))
                .map_err(io::Error::other)?;
            self.interp.changed(gpa, PAGE as u64);
        }
        self.take_dirty();
        self.base = Some(pages.clone());
        Ok(())
    }

    /// The first page that is not in this memory.
    pub(crate) fn misplaced(&self, pages: &Pages) -> Option<u64> {
        let fits = |gpa: u64| self.ram.check_range(GuestAddress(gpa), PAGE);
        let mut addresses = pages.iter().map(|(gpa, _)| gpa);
        addresses.find(|&gpa| !fits(gpa))
    }

    /// Reads and clears the dirty marks.
    fn take_dirty(&self) -> Vec<u64> {
        let mut dirty = Vec::new();
        self.interp.take_dirty(|gpa| dirty.push(gpa));
        dirty
    }

    fn read(&self, gpa: u64) -> io::Result<PageBytes> {
        let mut page = [0; PAGE];
        let read = self.ram.read_slice(&mut page, GuestAddress(gpa));
        read.map(|()| page).map_err(io::Error::other)
    }

    fn scan(&self) -> io::Result<Pages> {
        let mut pages = Pages::default();
        memory::nonzero_pages(&self.ram, |offset, bytes| {
            let gpa = memory::offset_to_address(&self.ram, offset);
            if let (Some(gpa), Ok(page)) = (gpa, bytes.try_into()) {
                pages.set(gpa, page);
            }
        })?;
        Ok(pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saver() -> MemorySaver {
        let ranges = [(GuestAddress(0), 0x10_000), (GuestAddress(1 << 32), 0x4000)];
        let ram = memory::allocate(&ranges, false).unwrap();
        let interp = Arc::new(memory::interp_memory(&ram).unwrap());
        MemorySaver::new(ram, interp)
    }

    #[test]
    fn later_save_copies_written_pages_and_shares_the_rest() {
        let mut saver = saver();
        assert!(saver.interp.write(0x1000, b"one"));
        assert!(saver.interp.write((1 << 32) + 0x3000, b"two"));
        let first = saver.save().unwrap();
        let addresses: Vec<_> = first.iter().map(|(gpa, _)| gpa).collect();
        assert_eq!(addresses, [0x1000, (1 << 32) + 0x3000]);
        assert!(saver.interp.write(0x1000, b"One"));
        let second = saver.save().unwrap();
        assert_eq!(second.unshared(&first), 1);
        assert_eq!(second, saver.scan().unwrap());
    }

    #[test]
    fn restore_brings_back_earlier_and_later_contents() {
        let mut saver = saver();
        assert!(saver.interp.write(0x1000, b"one"));
        let first = saver.save().unwrap();
        assert!(saver.interp.write(0x1000, &[0; 3]));
        assert!(saver.interp.write(0x5ffe, b"across"));
        let second = saver.save().unwrap();
        assert!(saver.interp.write(0x9000, b"later"));
        for pages in [&first, &second, &first] {
            saver.restore(pages).unwrap();
            assert_eq!(&saver.scan().unwrap(), pages);
            assert_eq!(&saver.save().unwrap(), pages);
        }
    }

    #[test]
    fn copies_share_all_pages_until_one_is_set() {
        let mut pages = Pages::default();
        for gpa in (0..1000 * CHUNK).step_by(PAGE * 40) {
            pages.set(gpa, &[1; PAGE]);
        }
        let mut copy = pages.clone();
        assert_eq!((copy.unshared(&pages), copy == pages), (0, true));
        copy.set(0, &[0; PAGE]);
        copy.set(PAGE as u64, &[2; PAGE]);
        copy.set(CHUNK * 5 + PAGE as u64 * 7, &[3; PAGE]);
        copy.set(CHUNK * 2000, &[4; PAGE]);
        assert_eq!(copy.len(), pages.len() + 2);
        assert_eq!(copy.unshared(&pages), 3);
        let differing = copy.differing(&pages);
        assert_eq!(differing.len(), 4);
        assert!(copy != pages && differing == pages.differing(&copy));
        for (gpa, page) in differing.iter().map(|&gpa| (gpa, pages.get(gpa))) {
            copy.set(gpa, page.unwrap_or(&[0; PAGE]));
        }
        assert!(copy == pages);
    }

    #[test]
    fn misplaced_finds_pages_outside_of_memory() {
        let saver = saver();
        for gpa in [0x10_000, u64::MAX - 0xfff] {
            let mut pages = Pages::default();
            pages.set(gpa, &[1; PAGE]);
            assert_eq!(saver.misplaced(&pages), Some(gpa));
        }
        assert_eq!(saver.misplaced(&Pages::default()), None);
    }

    #[test]
    fn serialized_pages_round_trip_and_short_or_duplicate_pages_are_refused() {
        let mut pages = Pages::default();
        pages.set(0x2000, &[7; PAGE]);
        let text = serde_json::to_string(&pages).unwrap();
        assert_eq!(serde_json::from_str::<Pages>(&text).unwrap(), pages);
        assert!(serde_json::from_str::<Pages>("[[4096,[1,2,3]]]").is_err());
        let unaligned = text.replace("8192", "8193");
        assert!(serde_json::from_str::<Pages>(&unaligned).is_err());
        let entry = text.trim_matches(['[', ']']);
        let double = format!("[[{entry}]],[{entry}]]]");
        assert!(serde_json::from_str::<Pages>(&double).is_err());
    }
}
