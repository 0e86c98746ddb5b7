//! Guest memory in snapshots: the pages that are not zero, shared between snapshots.
//!
//! A snapshot costs what was written since the one before: pages that did not change are the same
//! [`Arc`]. The interpreter's marks say which were written, so nothing is scanned but at the first
//! save.

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
pub type Page = [u8; PAGE];

/// The pages of a guest that are not all zero, by guest-physical address.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Pages(BTreeMap<u64, Arc<Page>>);

impl Pages {
    /// Pages kept.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// All of memory is zero.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Every page with its address, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &Page)> {
        self.0.iter().map(|(&gpa, page)| (gpa, &**page))
    }

    /// A page, if it is not all zero.
    pub fn get(&self, gpa: u64) -> Option<&Page> {
        self.0.get(&gpa).map(|page| &**page)
    }

    /// Addresses of pages that are not the same in both, in order.
    pub fn differing(&self, other: &Self) -> Vec<u64> {
        let mut pages: Vec<_> = self.differences(other).collect();
        pages.retain(|&gpa| self.get(gpa) != other.get(gpa));
        pages.sort_unstable();
        pages
    }

    /// How many pages are kept here that `other` does not share: what this snapshot costs beside
    /// the other one.
    pub fn unshared(&self, other: &Self) -> usize {
        let shared = |(gpa, page): &(&u64, &Arc<Page>)| {
            other.0.get(gpa).is_some_and(|same| Arc::ptr_eq(same, page))
        };
        self.0.len() - self.0.iter().filter(shared).count()
    }

    /// Keeps a page as it is now; a page of zeros is none.
    pub(crate) fn set(&mut self, gpa: u64, bytes: &Page) {
        if bytes.iter().all(|&byte| byte == 0) {
            self.0.remove(&gpa);
        } else if self.0.get(&gpa).is_none_or(|old| **old != *bytes) {
            self.0.insert(gpa, Arc::new(*bytes));
        }
    }

    /// Addresses at which the two differ, as far as sharing shows.
    fn differences<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = u64> + 'a {
        let changed = self.0.iter().filter_map(|(&gpa, page)| {
            let same = other.0.get(&gpa).is_some_and(|o| Arc::ptr_eq(o, page));
            (!same).then_some(gpa)
        });
        let gone = other.0.keys().copied();
        changed.chain(gone.filter(|gpa| !self.0.contains_key(gpa)))
    }
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pages({})", self.0.len())
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
        let mut pages = BTreeMap::new();
        for (gpa, bytes) in list {
            let len = bytes.len();
            let page = Page::try_from(bytes)
                .map_err(|_| de::Error::invalid_length(len, &"a page of 4096 bytes"))?;
            if pages.insert(gpa, Arc::new(page)).is_some() {
                return Err(de::Error::custom(format!("two pages at {gpa:#x}")));
            }
        }
        Ok(Self(pages))
    }
}

/// Saves and restores the memory of one machine.
#[derive(Debug)]
pub(crate) struct MemoryKeeper {
    ram: GuestMemoryMmap,
    marks: Arc<Memory>,
    /// What memory held when the marks were last cleared.
    base: Option<Pages>,
}

impl MemoryKeeper {
    /// For the memory `ram`, which the interpreter reaches as `marks`.
    pub(crate) fn new(ram: GuestMemoryMmap, marks: Arc<Memory>) -> Self {
        Self {
            ram,
            marks,
            base: None,
        }
    }

    /// The pages as they are now. Afterwards every processor must forget its translations: a page
    /// is marked when it enters a TLB for writing.
    pub(crate) fn save(&mut self) -> io::Result<Pages> {
        let base = match self.base.take() {
            Some(mut pages) => {
                for gpa in self.written() {
                    pages.set(gpa, &self.read(gpa)?);
                }
                pages
            }
            None => {
                self.written();
                self.scan()?
            }
        };
        self.base = Some(base.clone());
        Ok(base)
    }

    /// Sets memory to `pages`, which [`MemoryKeeper::accepts`]. Afterwards every processor must
    /// forget its translations.
    pub(crate) fn restore(&mut self, pages: &Pages) -> io::Result<()> {
        self.save()?;
        let now = self.base.take().unwrap_or_default();
        for gpa in pages.differences(&now) {
            let zeros = [0; PAGE];
            let bytes = pages.0.get(&gpa).map_or(&zeros, |page| &**page);
            self.ram
                .write_slice(bytes, GuestAddress(gpa))
                .map_err(io::Error::other)?;
            self.marks.changed(gpa, PAGE as u64);
        }
        self.written();
        self.base = Some(pages.clone());
        Ok(())
    }

    /// The first page that is not aligned or not in this memory.
    pub(crate) fn misplaced(&self, pages: &Pages) -> Option<u64> {
        let fits = |gpa: u64| {
            gpa.is_multiple_of(PAGE as u64) && self.ram.check_range(GuestAddress(gpa), PAGE)
        };
        pages.0.keys().copied().find(|&gpa| !fits(gpa))
    }

    /// Takes the marks.
    fn written(&self) -> Vec<u64> {
        let mut written = Vec::new();
        self.marks.take_dirty(|gpa| written.push(gpa));
        written
    }

    fn read(&self, gpa: u64) -> io::Result<Page> {
        let mut page = [0; PAGE];
        let read = self.ram.read_slice(&mut page, GuestAddress(gpa));
        read.map(|()| page).map_err(io::Error::other)
    }

    fn scan(&self) -> io::Result<Pages> {
        let mut pages = Pages::default();
        memory::nonzero_pages(&self.ram, |offset, bytes| {
            if let (Some(gpa), Ok(page)) = (memory::address(&self.ram, offset), bytes.try_into()) {
                pages.set(gpa, page);
            }
        })?;
        Ok(pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keeper() -> MemoryKeeper {
        let ranges = [(GuestAddress(0), 0x10_000), (GuestAddress(1 << 32), 0x4000)];
        let ram = memory::allocate(&ranges, false).unwrap();
        let marks = Arc::new(memory::for_interpreter(&ram).unwrap());
        MemoryKeeper::new(ram, marks)
    }

    #[test]
    fn later_save_takes_what_was_written_and_shares_the_rest() {
        let mut keeper = keeper();
        assert!(keeper.marks.write(0x1000, b"one"));
        assert!(keeper.marks.write((1 << 32) + 0x3000, b"two"));
        let first = keeper.save().unwrap();
        let places: Vec<_> = first.iter().map(|(gpa, _)| gpa).collect();
        assert_eq!(places, [0x1000, (1 << 32) + 0x3000]);
        assert!(keeper.marks.write(0x1000, b"One"));
        let second = keeper.save().unwrap();
        assert_eq!(second.unshared(&first), 1);
        assert_eq!(second, keeper.scan().unwrap());
    }

    #[test]
    fn restored_memory_is_what_was_saved_forwards_and_backwards() {
        let mut keeper = keeper();
        assert!(keeper.marks.write(0x1000, b"one"));
        let first = keeper.save().unwrap();
        assert!(keeper.marks.write(0x1000, &[0; 3]));
        assert!(keeper.marks.write(0x5ffe, b"across"));
        let second = keeper.save().unwrap();
        assert!(keeper.marks.write(0x9000, b"later"));
        for pages in [&first, &second, &first] {
            keeper.restore(pages).unwrap();
            assert_eq!(&keeper.scan().unwrap(), pages);
            assert_eq!(&keeper.save().unwrap(), pages);
        }
    }

    #[test]
    fn pages_outside_of_memory_are_found() {
        let keeper = keeper();
        for gpa in [0x10_000, 0x1001, u64::MAX - 0xfff] {
            let pages = Pages(BTreeMap::from([(gpa, Arc::new([1; PAGE]))]));
            assert_eq!(keeper.misplaced(&pages), Some(gpa));
        }
        assert_eq!(keeper.misplaced(&Pages::default()), None);
    }

    #[test]
    fn pages_survive_serialization_and_short_or_double_ones_are_refused() {
        let mut pages = Pages::default();
        pages.set(0x2000, &[7; PAGE]);
        let text = serde_json::to_string(&pages).unwrap();
        assert_eq!(serde_json::from_str::<Pages>(&text).unwrap(), pages);
        assert!(serde_json::from_str::<Pages>("[[4096,[1,2,3]]]").is_err());
        let entry = text.trim_matches(['[', ']']);
        let double = format!("[[{entry}]],[{entry}]]]");
        assert!(serde_json::from_str::<Pages>(&double).is_err());
    }
}
