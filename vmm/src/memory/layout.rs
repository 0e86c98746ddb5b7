//! Where the guest's memory lies in its physical address space.
//!
//! RAM starts at 0 and runs up to the PCI hole at 3 GiB; what is left continues at 4 GiB. The first
//! MiB is RAM throughout, but the map that guests are given keeps its upper part for firmware: the
//! extended BIOS data area, and the ACPI tables at 0xe0000. ACPI Specification, "System Address Map
//! Interfaces". What the loaders put where is decided by [`crate::boot`], around the image.

use std::ops::Range;

use vm_memory::GuestAddress;

/// Start of the hole that holds MMIO: local APICs, I/O APIC, PCI.
pub const PCI_HOLE_START: u64 = 0xc000_0000;
/// End of the hole: 4 GiB, where RAM continues.
pub const PCI_HOLE_END: u64 = 0x1_0000_0000;
/// End of conventional memory. The last KiB below 640 KiB is the extended BIOS data area.
pub const CONVENTIONAL_END: u64 = 0x9_fc00;
/// End of the first MiB, where extended memory starts.
pub const EXTENDED_START: u64 = 0x10_0000;
/// The ACPI tables, with the RSDP where the ACPI Specification lets a BIOS put it.
pub const ACPI_AREA: Range<u64> = 0xe_0000..EXTENDED_START;
/// The least RAM in bytes: 1 MiB.
pub const MEMORY_MIN: u64 = EXTENDED_START;
/// The most RAM in bytes: 32 TiB, which with the hole stays within 46 address bits.
pub const MEMORY_MAX: u64 = 1 << 45;

const PAGE_SIZE: u64 = 0x1000;

/// Why a memory size is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Less than [`MEMORY_MIN`].
    #[error("{0:#x} bytes of guest memory are too few: the least is 0x100000 (1M)")]
    TooSmall(u64),
    /// More than [`MEMORY_MAX`].
    #[error("{0:#x} bytes of guest memory are too many: the most is 0x200000000000 (32T)")]
    TooLarge(u64),
    /// Not whole pages.
    #[error("{0:#x} bytes of guest memory are not a multiple of 0x1000 (a page)")]
    NotPages(u64),
    /// The ACPI tables are not within [`ACPI_AREA`], or the RSDP is not on a 16-byte boundary in them.
    #[error(
        "ACPI tables at {start:#x} up to {end:#x} with the RSDP at {rsdp:#x} are not within \
         0xe0000-0xfffff, or the RSDP is not a multiple of 0x10 within them"
    )]
    Acpi {
        /// First address of the tables.
        start: u64,
        /// The address behind them.
        end: u64,
        /// Address of the RSDP.
        rsdp: u64,
    },
}

/// Address range types. ACPI Specification, "Address Range Types".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MemoryKind {
    /// RAM for the guest's use.
    Ram = 1,
    /// Not for use.
    Reserved = 2,
}

/// An entry of the memory map that guests are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryMapEntry {
    /// First guest physical address.
    pub base: u64,
    /// Size in bytes.
    pub size: u64,
    /// What it is.
    pub kind: MemoryKind,
}

/// Where RAM lies, and where the ACPI tables are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    memory: u64,
    acpi: Option<Acpi>,
}

/// What [`Layout::with_acpi`] was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Acpi {
    start: u64,
    end: u64,
    rsdp: u64,
}

impl Layout {
    /// A layout for `memory` bytes of RAM: whole pages, [`MEMORY_MIN`] to [`MEMORY_MAX`].
    ///
    /// # Errors
    ///
    /// A size outside of these bounds.
    pub const fn new(memory: u64) -> Result<Self, LayoutError> {
        if memory < MEMORY_MIN {
            return Err(LayoutError::TooSmall(memory));
        }
        if memory > MEMORY_MAX {
            return Err(LayoutError::TooLarge(memory));
        }
        if !memory.is_multiple_of(PAGE_SIZE) {
            return Err(LayoutError::NotPages(memory));
        }
        Ok(Self { memory, acpi: None })
    }

    /// Says that `tables`, a part of [`ACPI_AREA`], holds the ACPI tables, with the RSDP at `rsdp`.
    /// The loaders pass that address on and keep images off the tables.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Acpi`]: the tables are not within the area, or the RSDP is not at a multiple of
    /// 16 within the tables.
    pub fn with_acpi(mut self, tables: Range<u64>, rsdp: u64) -> Result<Self, LayoutError> {
        let within = ACPI_AREA.start <= tables.start && tables.end <= ACPI_AREA.end;
        if !within || !tables.contains(&rsdp) || !rsdp.is_multiple_of(16) {
            return Err(LayoutError::Acpi {
                start: tables.start,
                end: tables.end,
                rsdp,
            });
        }
        self.acpi = Some(Acpi {
            start: tables.start,
            end: tables.end,
            rsdp,
        });
        Ok(self)
    }

    /// Where the ACPI tables are, if there are any.
    pub fn acpi(&self) -> Option<Range<u64>> {
        self.acpi.map(|acpi| acpi.start..acpi.end)
    }

    /// Address of the RSDP, if there are ACPI tables.
    pub fn rsdp(&self) -> Option<u64> {
        self.acpi.map(|acpi| acpi.rsdp)
    }

    /// Bytes of RAM.
    pub const fn memory(&self) -> u64 {
        self.memory
    }

    /// End of the RAM below the PCI hole.
    pub const fn low_end(&self) -> u64 {
        if self.memory < PCI_HOLE_START {
            self.memory
        } else {
            PCI_HOLE_START
        }
    }

    /// The RAM above 4 GiB, if there is any.
    pub const fn high(&self) -> Option<Range<u64>> {
        let size = self.memory - self.low_end();
        if size == 0 {
            return None;
        }
        Some(PCI_HOLE_END..PCI_HOLE_END + size)
    }

    /// The RAM as address and size in bytes, in the form that `GuestMemoryMmap::from_ranges` takes.
    pub fn ram(&self) -> Vec<(GuestAddress, usize)> {
        std::iter::once(0..self.low_end())
            .chain(self.high())
            .map(|range| (GuestAddress(range.start), to_usize(range.end - range.start)))
            .collect()
    }

    /// The memory map for the guest, in ascending order and without overlaps.
    pub fn memory_map(&self) -> Vec<MemoryMapEntry> {
        let entry = |range: Range<u64>, kind| MemoryMapEntry {
            base: range.start,
            size: range.end - range.start,
            kind,
        };
        let mut map = vec![
            entry(0..CONVENTIONAL_END, MemoryKind::Ram),
            entry(CONVENTIONAL_END..EXTENDED_START, MemoryKind::Reserved),
        ];
        if self.low_end() > EXTENDED_START {
            map.push(entry(EXTENDED_START..self.low_end(), MemoryKind::Ram));
        }
        map.extend(self.high().map(|range| entry(range, MemoryKind::Ram)));
        map
    }
}

/// `usize` has 64 bits on the only host architecture, x86-64.
#[expect(clippy::cast_possible_truncation, reason = "x86-64 hosts only")]
pub(crate) const fn to_usize(value: u64) -> usize {
    value as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn one_mib_has_conventional_memory_only() {
        let layout = Layout::new(0x10_0000).unwrap();
        assert_eq!(layout.ram(), [(GuestAddress(0), 0x10_0000)]);
        let map = layout.memory_map();
        assert_eq!(map.len(), 2);
        assert_eq!((map[0].base, map[0].size), (0, 0x9_fc00));
        assert_eq!((map[1].base, map[1].size), (0x9_fc00, 0x6_0400));
    }

    #[test]
    fn three_gib_end_at_the_hole() {
        let layout = Layout::new(3 * GIB).unwrap();
        assert_eq!(layout.low_end(), 0xc000_0000);
        assert_eq!(layout.high(), None);
    }

    #[test]
    fn a_page_beyond_three_gib_continues_at_four() {
        let layout = Layout::new(3 * GIB + 0x1000).unwrap();
        assert_eq!(
            layout.ram(),
            [
                (GuestAddress(0), 0xc000_0000),
                (GuestAddress(0x1_0000_0000), 0x1000)
            ]
        );
        assert_eq!(
            layout.memory_map()[3],
            MemoryMapEntry {
                base: 0x1_0000_0000,
                size: 0x1000,
                kind: MemoryKind::Ram
            }
        );
    }

    #[test]
    fn sizes_out_of_bounds_are_refused() {
        let cases = [
            (0, LayoutError::TooSmall(0)),
            (0xf_f000, LayoutError::TooSmall(0xf_f000)),
            (0x10_0001, LayoutError::NotPages(0x10_0001)),
            (
                MEMORY_MAX + 0x1000,
                LayoutError::TooLarge(MEMORY_MAX + 0x1000),
            ),
            (u64::MAX, LayoutError::TooLarge(u64::MAX)),
        ];
        for (memory, error) in cases {
            assert_eq!(Layout::new(memory), Err(error), "{memory:#x}");
        }
    }

    #[test]
    fn acpi_tables_outside_of_their_area_are_refused() {
        let layout = Layout::new(GIB).unwrap();
        let good = layout.with_acpi(0xe_0000..0xe_1000, 0xe_0ff0).unwrap();
        assert_eq!(
            (good.rsdp(), good.acpi()),
            (Some(0xe_0ff0), Some(0xe_0000..0xe_1000))
        );
        let rows = [
            (0xd_fff0..0xe_1000, 0xe_0000),
            (0xe_0000..0x10_0010, 0xe_0000),
            (0xe_0000..0xe_1000, 0xe_0008),
            (0xe_0000..0xe_1000, 0xe_1000),
            (0xe_0000..0xe_0000, 0xe_0000),
        ];
        for (tables, rsdp) in rows {
            assert!(
                layout.with_acpi(tables.clone(), rsdp).is_err(),
                "{tables:x?}"
            );
        }
    }
}
