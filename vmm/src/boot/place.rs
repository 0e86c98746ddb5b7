//! Who occupies which guest memory.
//!
//! Parts of the image have fixed addresses and come first; the rest is fitted in around them. No two
//! parts ever overlap. Guest memory is written once everything has its place.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::boot::BootError;
use crate::memory::layout::{CONVENTIONAL_END, Layout};

/// A part of the guest's memory that a loader filled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// What it is: `segment 0`, `initrd`, `page tables`.
    pub name: String,
    /// Guest physical addresses.
    pub range: Range<u64>,
}

/// Which end of the free memory to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Take {
    Lowest,
    Highest,
}

struct Part<'a> {
    name: String,
    end: u64,
    data: Cow<'a, [u8]>,
}

/// The parts placed so far.
pub(super) struct Places<'a> {
    ram_end: u64,
    /// By start address; neighbours never overlap.
    parts: BTreeMap<u64, Part<'a>>,
}

impl<'a> Places<'a> {
    /// Nothing but the ACPI tables, if there are any.
    pub(super) fn new(layout: &Layout) -> Self {
        let mut parts = BTreeMap::new();
        if let Some(tables) = layout.acpi() {
            let acpi = Part {
                name: "the ACPI tables".to_owned(),
                end: tables.end,
                data: Cow::Borrowed(&[][..]),
            };
            parts.insert(tables.start, acpi);
        }
        Self {
            ram_end: layout.low_end(),
            parts,
        }
    }

    /// End of the RAM below the PCI hole.
    pub(super) const fn ram_end(&self) -> u64 {
        self.ram_end
    }

    /// Places `size` bytes at `start`, `data` first and zeros behind it.
    pub(super) fn fixed(
        &mut self,
        name: impl Into<String>,
        start: u64,
        size: u64,
        data: impl Into<Cow<'a, [u8]>>,
    ) -> Result<(), BootError> {
        let (name, data) = (name.into(), data.into());
        if size == 0 {
            return Err(BootError::EmptyPart { name });
        }
        debug_assert!(data.len() as u64 <= size);
        let end = match start.checked_add(size) {
            Some(end) if end <= self.ram_end => end,
            _ => {
                return Err(BootError::NotInRam {
                    name,
                    start,
                    size,
                    ram_end: self.ram_end,
                });
            }
        };
        // The last part that starts below our end is the only one that can reach into us.
        if let Some((&other_start, other)) = self.parts.range(..end).next_back()
            && other.end > start
        {
            return Err(BootError::Overlap {
                name,
                start,
                last: end - 1,
                other: other.name.clone(),
                other_start,
                other_last: other.end - 1,
            });
        }
        self.parts.insert(start, Part { name, end, data });
        Ok(())
    }

    /// Places `data` on a multiple of `align` (a power of two) somewhere in `within`.
    pub(super) fn fit(
        &mut self,
        name: impl Into<String>,
        data: impl Into<Cow<'a, [u8]>>,
        align: u64,
        within: Range<u64>,
        take: Take,
    ) -> Result<u64, BootError> {
        let data = data.into();
        let size = data.len() as u64;
        self.fit_sized(name, size, data, align, within, take)
    }

    /// As [`Self::fit`], with `size` bytes of which `data` are the first.
    pub(super) fn fit_sized(
        &mut self,
        name: impl Into<String>,
        size: u64,
        data: impl Into<Cow<'a, [u8]>>,
        align: u64,
        within: Range<u64>,
        take: Take,
    ) -> Result<u64, BootError> {
        let name = name.into();
        if size == 0 {
            return Err(BootError::EmptyPart { name });
        }
        let within = within.start..within.end.min(self.ram_end);
        let Some(start) = self.find(size, align, &within, take) else {
            return Err(BootError::NoRoom {
                name,
                size,
                start: within.start,
                last: within.end.saturating_sub(1),
            });
        };
        self.fixed(name, start, size, data)?;
        Ok(start)
    }

    /// Places a structure of the boot protocol in conventional memory, above the real-mode
    /// interrupt table and the BIOS data area.
    pub(super) fn structure(
        &mut self,
        name: impl Into<String>,
        data: impl Into<Cow<'a, [u8]>>,
        align: u64,
    ) -> Result<u64, BootError> {
        self.fit(name, data, align, 0x1000..CONVENTIONAL_END, Take::Lowest)
    }

    /// Replaces the data of the part at `start` by as many bytes.
    pub(super) fn fill(&mut self, start: u64, data: Vec<u8>) {
        if let Some(part) = self.parts.get_mut(&start) {
            debug_assert_eq!(part.data.len(), data.len());
            part.data = Cow::Owned(data);
        }
    }

    /// Whether `address` is within a part that is already placed.
    pub(super) fn covers(&self, address: u64) -> bool {
        self.parts
            .range(..=address)
            .next_back()
            .is_some_and(|(_, part)| address < part.end)
    }

    fn find(&self, size: u64, align: u64, within: &Range<u64>, take: Take) -> Option<u64> {
        // Fits `size` bytes into the free range, or not.
        let fit = |free: Range<u64>| match take {
            Take::Lowest => {
                let start = free.start.checked_next_multiple_of(align)?;
                (start.checked_add(size)? <= free.end).then_some(start)
            }
            Take::Highest => {
                let start = free.end.checked_sub(size)? & !(align - 1);
                (start >= free.start).then_some(start)
            }
        };
        let clamp = |address: u64| address.clamp(within.start, within.end.max(within.start));
        let ends = std::iter::once(0).chain(self.parts.values().map(|part| part.end));
        let starts = self.parts.keys().copied().chain([u64::MAX]);
        let mut free = ends.zip(starts).map(|(from, to)| clamp(from)..clamp(to));
        match take {
            Take::Lowest => free.find_map(fit),
            Take::Highest => free.filter_map(fit).last(),
        }
    }

    /// Writes everything to guest memory.
    pub(super) fn write(self, memory: &GuestMemoryMmap) -> Result<Vec<Placed>, BootError> {
        let mut placed = Vec::with_capacity(self.parts.len());
        for (start, part) in self.parts {
            if let Err(source) = memory.write_slice(&part.data, GuestAddress(start)) {
                return Err(BootError::Write {
                    name: part.name,
                    start,
                    source,
                });
            }
            placed.push(Placed {
                name: part.name,
                range: start..part.end,
            });
        }
        Ok(placed)
    }
}
