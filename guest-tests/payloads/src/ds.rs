//! The DS management area and the BTS buffer.

use core::cell::UnsafeCell;

use hindsight_guest::prelude::*;
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::msr::{IA32_DS_AREA, IA32_MISC_ENABLE};
use hindsight_guest::{insn, msr};

use crate::branch::{BranchList, TakenBranch};

/// Bytes of a BTS record.
pub const RECORD_BYTES: u64 = 24;

/// Why a case is skipped without the facility.
pub const ABSENT: &str = "CPUID and IA32_MISC_ENABLE report no 64-bit branch trace store";

/// Whether the processor has 64-bit BTS with the filters by privilege level.
pub fn present() -> bool {
    insn::has(Feature::DS)
        && insn::has(Feature::DTES64)
        && insn::has(Feature::DS_CPL)
        && msr::read(IA32_MISC_ENABLE) & (1 << 11) == 0
}

/// The DS management area in 64-bit format.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DsArea {
    /// Address of the BTS buffer.
    pub base: u64,
    /// Address of the next record.
    pub index: u64,
    /// Address of the first byte after the buffer.
    pub maximum: u64,
    /// Address at which an interrupt is requested.
    pub threshold: u64,
    /// For PEBS: base, index, maximum, threshold, four counter resets; then 32 reserved bytes.
    pub pebs: [u64; 12],
}

/// A BTS record.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BtsRecord {
    /// Source, linear.
    pub from: u64,
    /// Destination, linear.
    pub to: u64,
    /// Bit 4: predicted.
    pub flags: u64,
}

/// Bytes of the buffer, including those around it that must not change.
pub const BUFFER: usize = 8192;

/// Pages for the management area and the BTS buffer.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct DsPages {
    area: UnsafeCell<[u8; 4096]>,
    buffer: UnsafeCell<[u8; BUFFER]>,
}

// SAFETY: one CPU at a time accesses it, by volatile accesses and by its stores of records.
unsafe impl Sync for DsPages {}

/// The byte with which the buffer is filled before a run.
pub const FILL: u8 = 0xa5;

impl DsPages {
    /// An area of zeros.
    pub const fn new() -> Self {
        Self {
            area: UnsafeCell::new([0; 4096]),
            buffer: UnsafeCell::new([0; BUFFER]),
        }
    }

    /// Address of the management area.
    pub fn area_address(&self) -> u64 {
        self.area.get() as u64
    }

    /// Address of the first byte of the buffer's pages.
    pub fn buffer_address(&self) -> u64 {
        self.buffer.get() as u64
    }

    /// Reads the management area.
    pub fn area(&self) -> DsArea {
        // SAFETY: the page has space for the area. The access is volatile because the processor
        // writes the area too.
        unsafe { self.area.get().cast::<DsArea>().read_volatile() }
    }

    /// Writes the management area.
    pub fn set_area(&self, area: DsArea) {
        // SAFETY: as for `area`.
        unsafe { self.area.get().cast::<DsArea>().write_volatile(area) };
    }

    /// The byte at `offset` of the buffer's pages.
    pub fn byte(&self, offset: usize) -> u8 {
        assert!(offset < BUFFER, "the offset is outside the buffer");
        // SAFETY: the assertion keeps the offset inside the buffer.
        unsafe { self.buffer.get().cast::<u8>().add(offset).read_volatile() }
    }

    /// The record at address `at`, which is inside the buffer.
    pub fn record(&self, at: u64) -> BtsRecord {
        let offset = at.wrapping_sub(self.buffer_address());
        assert!(
            offset <= BUFFER as u64 - RECORD_BYTES,
            "the record is outside the buffer"
        );
        // SAFETY: the assertion keeps the record inside the buffer; the read may be unaligned.
        unsafe { (at as *const BtsRecord).read_unaligned() }
    }

    /// Prepares the buffer for `count` records, writes IA32_DS_AREA, and returns the area.
    ///
    /// The buffer is filled with [`FILL`], the threshold is the maximum, and all fields for PEBS have
    /// the value 5A5AH.
    pub fn arm(&self, count: u64) -> DsArea {
        self.arm_at(self.buffer_address(), count)
    }

    /// Like [`arm`](Self::arm), with the buffer at `base`.
    pub fn arm_at(&self, base: u64, count: u64) -> DsArea {
        // SAFETY: the pages have this length, and no branch is stored now.
        unsafe { self.buffer.get().cast::<u8>().write_bytes(FILL, BUFFER) };
        let area = DsArea {
            base,
            index: base,
            maximum: base + count * RECORD_BYTES,
            threshold: base + count * RECORD_BYTES,
            pebs: [0x5a5a; 12],
        };
        self.set_area(area);
        msr::write(IA32_DS_AREA, self.area_address());
        area
    }

    /// The records from the base up to the index.
    pub fn records(&self) -> BranchList {
        let area = self.area();
        let mut list = BranchList::new();
        let mut at = area.base;
        while at + RECORD_BYTES <= area.index.min(area.base + 160 * RECORD_BYTES) {
            let record = self.record(at);
            list.push(TakenBranch::new(record.from, record.to, 0));
            at += RECORD_BYTES;
        }
        list
    }

    /// Checks that exactly the records `expected` were stored, from the index of `before` on.
    ///
    /// It checks the index, that nothing else changed in the area or the buffer, and that all flags
    /// are 0.
    pub fn check_stored(&self, before: &DsArea, expected: &[TakenBranch]) -> bool {
        let end = before.index + expected.len() as u64 * RECORD_BYTES;
        let after = DsArea {
            index: end,
            ..*before
        };
        let mut equal = check_eq!(
            self.area().index.wrapping_sub(before.base),
            end - before.base,
            "offset of the index from the base"
        );
        equal &= check!(
            DsArea {
                index: end,
                ..self.area()
            } == after,
            "other fields of the area unchanged"
        );
        for (n, expected) in expected.iter().enumerate() {
            let found = self.record(before.index + n as u64 * RECORD_BYTES);
            equal &= check_eq!(
                (n as u64, (found.from, found.to)),
                (n as u64, expected.pair()),
                "record: number, from, to"
            );
            equal &= check_eq!(found.flags, 0, "flags of the record");
        }
        let first = usize::try_from(before.index - self.buffer_address()).unwrap_or(0);
        let last = usize::try_from(end - self.buffer_address()).unwrap_or(0);
        let untouched = (0..BUFFER).all(|n| (first..last).contains(&n) || self.byte(n) == FILL);
        equal & check!(untouched, "rest of the buffer unchanged")
    }
}

impl Default for DsPages {
    fn default() -> Self {
        Self::new()
    }
}

/// Ends the case as skipped without the branch trace store.
#[macro_export]
macro_rules! need_bts {
    ($ctx:expr) => {
        if !$crate::ds::present() {
            hindsight_guest::skip!($ctx, $crate::ds::ABSENT);
        }
    };
}
