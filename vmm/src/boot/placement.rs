//! Where each part of an image goes in guest memory.
//!
//! The parts of the image have fixed addresses and are placed first; the rest is fitted around
//! them. No two parts ever overlap. Guest memory is written after everything was placed.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::boot::BootError;
use crate::boot::error::MemoryHint;
use crate::memory::layout::{CONVENTIONAL_END, Layout};

/// A part of guest memory that a loader filled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedPart {
    /// Name for messages: `segment 0`, `initrd`, `page tables`.
    pub name: String,
    /// Guest physical addresses.
    pub range: Range<u64>,
}

/// Which of the free addresses to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fit {
    Lowest,
    Highest,
}

/// The end and the contents of a part.
struct PartContents<'a> {
    name: String,
    end: u64,
    data: Cow<'a, [u8]>,
}

/// The parts placed so far.
pub(super) struct Placement<'a> {
    ram_end: u64,
    /// By start address; neighbours never overlap.
    parts: BTreeMap<u64, PartContents<'a>>,
}

impl<'a> Placement<'a> {
    /// A placement that has only the ACPI tables, if there are any.
    pub(super) fn new(layout: &Layout) -> Self {
        let mut parts = BTreeMap::new();
        if let Some(tables) = layout.acpi() {
            let acpi = PartContents {
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

    /// Whether the `size` bytes at `start` are RAM that no part occupies.
    pub(super) fn is_free(&self, start: u64, size: u64) -> bool {
        let end = start.saturating_add(size);
        let before = self.parts.range(..end).next_back();
        end <= self.ram_end && before.is_none_or(|(_, part)| part.end <= start)
    }

    /// Places `size` bytes at `start`: `data`, then zeros.
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
        debug_assert!(data.len() as u64 <= size, "the data are a part of {name}");
        let end = match start.checked_add(size) {
            Some(end) if end <= self.ram_end => end,
            end => {
                return Err(BootError::NotInRam {
                    name,
                    start,
                    size,
                    hint: MemoryHint::to_reach(end),
                });
            }
        };
        // The last part that starts below `end` is the only one that can overlap.
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
        self.parts.insert(start, PartContents { name, end, data });
        Ok(())
    }

    /// Places `data` at a multiple of `align` (a power of two) within `within`. Returns the
    /// address.
    pub(super) fn fit(
        &mut self,
        name: impl Into<String>,
        data: impl Into<Cow<'a, [u8]>>,
        align: u64,
        within: Range<u64>,
        fit: Fit,
    ) -> Result<u64, BootError> {
        let data = data.into();
        let size = data.len() as u64;
        self.fit_sized(name, size, data, align, within, fit)
    }

    /// Like [`Self::fit`], with `size` bytes: `data`, then zeros.
    pub(super) fn fit_sized(
        &mut self,
        name: impl Into<String>,
        size: u64,
        data: impl Into<Cow<'a, [u8]>>,
        align: u64,
        within: Range<u64>,
        fit: Fit,
    ) -> Result<u64, BootError> {
        debug_assert!(align.is_power_of_two(), "{align:#x} is not an alignment");
        let name = name.into();
        if size == 0 {
            return Err(BootError::EmptyPart { name });
        }
        let in_ram = within.start..within.end.min(self.ram_end);
        let Some(start) = self.find(size, align, &in_ram, fit) else {
            return Err(self.does_not_fit(name, size, align, &within));
        };
        self.fixed(name, start, size, data)?;
        Ok(start)
    }

    /// Why [`Self::fit_sized`] found no free memory.
    fn does_not_fit(&self, name: String, size: u64, align: u64, within: &Range<u64>) -> BootError {
        if within.end < self.ram_end {
            return BootError::Occupied {
                name,
                size,
                start: within.start,
                last: within.end.saturating_sub(1),
            };
        }
        // With RAM up to `end`, the part fits above all others.
        let highest = self.parts.values().map(|part| part.end).max();
        let lowest = within.start.max(highest.unwrap_or(0));
        let end = lowest
            .checked_next_multiple_of(align)
            .and_then(|start| start.checked_add(size))
            .filter(|&end| within.end == self.ram_end || end <= within.end);
        BootError::DoesNotFit {
            name,
            size,
            start: within.start,
            hint: MemoryHint::to_reach(end),
        }
    }

    /// Places a structure of the boot protocol in conventional memory, above the real-mode
    /// interrupt table and the BIOS data area. Returns the address.
    pub(super) fn structure(
        &mut self,
        name: impl Into<String>,
        data: impl Into<Cow<'a, [u8]>>,
        align: u64,
    ) -> Result<u64, BootError> {
        self.fit(name, data, align, 0x1000..CONVENTIONAL_END, Fit::Lowest)
    }

    /// Replaces the data of the part at `start` by as many bytes.
    pub(super) fn fill(&mut self, start: u64, data: Vec<u8>) {
        if let Some(part) = self.parts.get_mut(&start) {
            debug_assert_eq!(part.data.len(), data.len(), "{} keeps its size", part.name);
            part.data = Cow::Owned(data);
        }
    }

    /// Whether `address` is within a part.
    pub(super) fn covers(&self, address: u64) -> bool {
        self.parts
            .range(..=address)
            .next_back()
            .is_some_and(|(_, part)| address < part.end)
    }

    fn find(&self, size: u64, align: u64, within: &Range<u64>, fit: Fit) -> Option<u64> {
        let fit_in = |free: Range<u64>| match fit {
            Fit::Lowest => {
                let start = free.start.checked_next_multiple_of(align)?;
                (start.checked_add(size)? <= free.end).then_some(start)
            }
            Fit::Highest => {
                let start = free.end.checked_sub(size)? & !(align - 1);
                (start >= free.start).then_some(start)
            }
        };
        let clamp = |address: u64| address.clamp(within.start, within.end.max(within.start));
        let ends = std::iter::once(0).chain(self.parts.values().map(|part| part.end));
        let starts = self.parts.keys().copied().chain([u64::MAX]);
        let mut free = ends.zip(starts).map(|(from, to)| clamp(from)..clamp(to));
        match fit {
            Fit::Lowest => free.find_map(fit_in),
            Fit::Highest => free.filter_map(fit_in).last(),
        }
    }

    /// Writes all parts to guest memory. Returns them in ascending order.
    pub(super) fn write(self, memory: &GuestMemoryMmap) -> Result<Vec<PlacedPart>, BootError> {
        let mut placed = Vec::with_capacity(self.parts.len());
        for (start, part) in self.parts {
            if let Err(source) = memory.write_slice(&part.data, GuestAddress(start)) {
                return Err(BootError::Write {
                    name: part.name,
                    start,
                    source,
                });
            }
            placed.push(PlacedPart {
                name: part.name,
                range: start..part.end,
            });
        }
        Ok(placed)
    }
}
