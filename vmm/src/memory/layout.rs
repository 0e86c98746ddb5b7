//! The layout of guest memory in the physical address space.
//!
//! RAM starts at 0 and extends to the PCI hole at 3 GiB; the rest continues at 4 GiB. The first MiB
//! is RAM throughout, but the memory map for guests reserves its upper part for firmware: the
//! extended BIOS data area, and the ACPI tables at 0xe0000. ACPI Specification, "System Address Map
//! Interfaces". [`crate::boot`] decides where an image and its structures go.

use std::ops::Range;

use hindsight_devices::pci::{FIRMWARE_WINDOW_BASE, FIRMWARE_WINDOW_END};
use hindsight_devices::test_device::{TEST_MEMORY_BASE, TEST_MEMORY_LEN};
use hindsight_devices::vga::VIDEO_MEMORY_LEN;
use vm_memory::GuestAddress;

use crate::memory::ByteSize;

/// Port to which the handlers in low memory write the vector of a call that no BIOS serves.
pub const BIOS_CALL_PORT: u16 = 0x5e0;

/// Start of the hole for MMIO: local APICs, I/O APIC, PCI.
pub const PCI_HOLE_START: u64 = 0xc000_0000;
/// End of the hole: 4 GiB, where RAM continues.
pub const PCI_HOLE_END: u64 = 0x1_0000_0000;
const _: () = assert!(
    PCI_HOLE_START == hindsight_cpu::msr::table::DEVICES_START,
    "the MTRRs make the hole uncacheable"
);
/// End of conventional memory. The last KiB below 640 KiB is the extended BIOS data area.
pub const CONVENTIONAL_END: u64 = 0x9_fc00;
/// End of the first MiB, where extended memory starts.
pub const EXTENDED_START: u64 = 0x10_0000;
/// The area of the ACPI tables, in which the ACPI Specification allows the RSDP.
pub const ACPI_AREA: Range<u64> = 0xe_0000..EXTENDED_START;
/// The least firmware in bytes: 64 KiB, a real-mode segment.
pub const FIRMWARE_MIN: u64 = 0x1_0000;
/// The most firmware in bytes: 16 MiB less the 64 KiB of the test device at 0xff00_0000.
pub const FIRMWARE_MAX: u64 = 0xff_0000;
const _: () = assert!(
    PCI_HOLE_END - FIRMWARE_MAX >= TEST_MEMORY_BASE + TEST_MEMORY_LEN,
    "firmware leaves the test device accessible"
);
/// The most bytes of firmware of which a copy is below 1 MiB.
pub const FIRMWARE_COPY_MAX: u64 = 0x2_0000;
/// The least RAM in bytes: 1 MiB.
pub const MEMORY_MIN: u64 = EXTENDED_START;
/// The most RAM in bytes: 32 TiB, which with the hole stays within 46 address bits.
pub const MEMORY_MAX: u64 = 1 << 45;

/// The video memory where no firmware assigns addresses, and where SeaBIOS assigns one.
const VIDEO_WITHOUT_FIRMWARE: u64 = 0xd000_0000;
const VIDEO_OF_SEABIOS: u64 = 0xfd00_0000;
/// The signature of a firmware volume, with which images of UEFI begin, and its offset.
const FV_SIGNATURE: &[u8] = b"_FVH";
const FV_SIGNATURE_AT: usize = 40;

const PAGE_SIZE: u64 = 0x1000;

/// Why a memory size is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Less than [`MEMORY_MIN`].
    #[error("{} of guest memory is too little: use --memory 1M or more", ByteSize(*.0))]
    TooSmall(u64),
    /// More than [`MEMORY_MAX`].
    #[error("{} of guest memory is too much: use --memory 32T or less", ByteSize(*.0))]
    TooLarge(u64),
    /// Not whole pages.
    #[error("{0:#x} bytes of guest memory are not whole pages: use a multiple of 4K for --memory")]
    NotPages(u64),
    /// The tables are not within [`ACPI_AREA`], or the RSDP is not in them on a 16-byte boundary.
    #[error(
        "ACPI tables at {start:#x} up to {end:#x} with the RSDP at {rsdp:#x} are not within \
         0xe0000-0xfffff, or the RSDP is not in them at a multiple of 0x10"
    )]
    Acpi {
        /// First address of the tables.
        start: u64,
        /// The first address after them.
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
    /// Reserved for firmware.
    Reserved = 2,
}

/// An entry of the memory map that loaders pass to guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryMapEntry {
    /// First guest physical address.
    pub base: u64,
    /// Size in bytes.
    pub size: u64,
    /// Whether guests may use it.
    pub kind: MemoryKind,
}

/// Where RAM and the ACPI tables are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    memory: u64,
    acpi: Option<AcpiArea>,
    /// Bytes of firmware, which ends at 4 GiB; 0 if there is none.
    firmware: u64,
    /// Address of the video memory, if there is any.
    video: Option<u64>,
}

/// The arguments of [`Layout::with_acpi`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AcpiArea {
    start: u64,
    end: u64,
    rsdp: u64,
}

impl Layout {
    /// A layout for `memory` bytes of RAM: whole pages, [`MEMORY_MIN`] to [`MEMORY_MAX`].
    ///
    /// # Errors
    ///
    /// The size is outside of these bounds.
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
        Ok(Self {
            memory,
            acpi: None,
            firmware: 0,
            video: None,
        })
    }

    /// Adds `size` bytes of firmware: whole pages, [`FIRMWARE_MIN`] to [`FIRMWARE_MAX`].
    #[must_use]
    pub fn with_firmware(mut self, size: u64) -> Self {
        debug_assert!(
            (FIRMWARE_MIN..=FIRMWARE_MAX).contains(&size),
            "the loader checks the size of firmware"
        );
        self.firmware = size;
        self
    }

    /// Adds the video memory at `base`: see [`video_base`].
    #[must_use]
    pub fn with_video(mut self, base: u64) -> Self {
        debug_assert!(
            self.low_end() <= base && base + VIDEO_MEMORY_LEN as u64 <= FIRMWARE_WINDOW_END,
            "the video memory is between RAM and firmware"
        );
        self.video = Some(base);
        self
    }

    /// Address of the video memory, if there is any.
    pub const fn video(&self) -> Option<u64> {
        self.video
    }

    /// The read-only memory of the firmware, if there is one.
    pub fn firmware(&self) -> Option<Range<u64>> {
        (self.firmware != 0).then(|| PCI_HOLE_END - self.firmware..PCI_HOLE_END)
    }

    /// Adds the ACPI tables at `tables`, a part of [`ACPI_AREA`], with the RSDP at `rsdp`.
    ///
    /// The loaders pass the RSDP's address to guests, and refuse images that overlap the tables.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Acpi`]: the tables are not within the area, or the RSDP is not in the tables
    /// at a multiple of 16.
    pub fn with_acpi(mut self, tables: Range<u64>, rsdp: u64) -> Result<Self, LayoutError> {
        let within = ACPI_AREA.start <= tables.start && tables.end <= ACPI_AREA.end;
        if !within || !tables.contains(&rsdp) || !rsdp.is_multiple_of(16) {
            return Err(LayoutError::Acpi {
                start: tables.start,
                end: tables.end,
                rsdp,
            });
        }
        self.acpi = Some(AcpiArea {
            start: tables.start,
            end: tables.end,
            rsdp,
        });
        Ok(self)
    }

    /// The address range of the ACPI tables, if there are any.
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

    /// The ranges of RAM, video memory and firmware: address and size in bytes, as
    /// `GuestMemoryMmap::from_ranges` takes them.
    pub fn ram(&self) -> Vec<(GuestAddress, usize)> {
        let video = self.video.map(|base| base..base + VIDEO_MEMORY_LEN as u64);
        std::iter::once(0..self.low_end())
            .chain(video)
            .chain(self.firmware())
            .chain(self.high())
            .map(|range| (GuestAddress(range.start), to_usize(range.end - range.start)))
            .collect()
    }

    /// The memory map for firmware, which reserves what it uses itself.
    pub fn firmware_map(&self) -> Vec<MemoryMapEntry> {
        let ranges = std::iter::once(0..self.low_end()).chain(self.high());
        let entry = |range: Range<u64>| MemoryMapEntry {
            base: range.start,
            size: range.end - range.start,
            kind: MemoryKind::Ram,
        };
        ranges.map(entry).collect()
    }

    /// The memory map for the guest, ascending and without overlaps.
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
        debug_assert!(
            map.windows(2)
                .all(|pair| pair[0].base + pair[0].size <= pair[1].base),
            "the map is ascending and without overlaps"
        );
        map
    }
}

/// Whether memory at `address` is firmware: all other memory is below or from 4 GiB on.
pub fn is_firmware(address: u64) -> bool {
    (PCI_HOLE_END - FIRMWARE_MAX..PCI_HOLE_END).contains(&address)
}

/// The address of the video memory in a machine with `memory` bytes of RAM.
///
/// Guests access it there without exits. It is where `firmware`, if there is one, assigns the BAR: UEFI at the
/// start of its window, SeaBIOS near the end.
pub fn video_base(memory: u64, firmware: Option<&[u8]>) -> u64 {
    match firmware {
        None => VIDEO_WITHOUT_FIRMWARE,
        Some(image)
            if image
                .get(FV_SIGNATURE_AT..)
                .is_some_and(|rest| rest.starts_with(FV_SIGNATURE)) =>
        {
            let window = memory.clamp(FIRMWARE_WINDOW_BASE, PCI_HOLE_START);
            window.next_multiple_of(VIDEO_MEMORY_LEN as u64)
        }
        Some(_) => VIDEO_OF_SEABIOS,
    }
}

/// Converts to `usize`, which has 64 bits on x86-64 hosts.
#[expect(clippy::cast_possible_truncation, reason = "x86-64 hosts only")]
pub(crate) const fn to_usize(value: u64) -> usize {
    value as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn layout_of_one_mib_has_conventional_memory_only() {
        let layout = Layout::new(0x10_0000).unwrap();
        assert_eq!(layout.ram(), [(GuestAddress(0), 0x10_0000)]);
        let map = layout.memory_map();
        assert_eq!(map.len(), 2);
        assert_eq!((map[0].base, map[0].size), (0, 0x9_fc00));
        assert_eq!((map[1].base, map[1].size), (0x9_fc00, 0x6_0400));
    }

    #[test]
    fn layout_of_three_gib_ends_at_the_hole() {
        let layout = Layout::new(3 * GIB).unwrap();
        assert_eq!(layout.low_end(), 0xc000_0000);
        assert_eq!(layout.high(), None);
    }

    #[test]
    fn ram_beyond_three_gib_continues_at_four() {
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
    fn firmware_is_memory_below_four_gib_that_no_map_lists() {
        let layout = Layout::new(4 * GIB).unwrap().with_firmware(0x4_0000);
        let starts: Vec<_> = layout.ram().iter().map(|range| range.0.0).collect();
        assert_eq!(starts, [0, 0xfffc_0000, 0x1_0000_0000]);
        let firmware: Vec<_> = starts.into_iter().filter(|&at| is_firmware(at)).collect();
        assert_eq!(firmware, [0xfffc_0000]);
        let map = layout.firmware_map();
        assert_eq!(map.len(), 2);
        assert_eq!((map[0].base, map[0].size), (0, 0xc000_0000));
        assert_eq!((map[1].base, map[1].size), (0x1_0000_0000, GIB));
    }

    #[test]
    fn video_memory_is_where_firmware_assigns_it() {
        let bios = vec![0; 0x4_0000];
        let mut uefi = bios.clone();
        uefi[40..44].copy_from_slice(b"_FVH");
        let rows = [
            (GIB, None, 0xd000_0000),
            (GIB, Some(&bios), 0xfd00_0000),
            (GIB, Some(&uefi), 0x8000_0000),
            ((2 * GIB) + 0x1000, Some(&uefi), 0x8100_0000),
            (8 * GIB, Some(&uefi), 0xc000_0000),
        ];
        for (memory, firmware, base) in rows {
            let at = video_base(memory, firmware.map(Vec::as_slice));
            assert_eq!(at, base, "{memory:#x}");
            let layout = Layout::new(memory).unwrap();
            let layout = layout.with_video(at).with_firmware(0x4_0000);
            let ranges = layout.ram();
            assert!(ranges.contains(&(GuestAddress(base), 16 << 20)));
            assert!(ranges.is_sorted(), "{ranges:?}");
            assert!(!is_firmware(base));
            assert!(layout.memory_map().iter().all(|e| e.base != base));
        }
    }

    #[test]
    fn acpi_tables_outside_of_the_acpi_area_are_refused() {
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
