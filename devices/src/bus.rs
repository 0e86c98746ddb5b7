//! The port and MMIO buses, which route accesses to devices.
//!
//! Ranges are mapped while the machine is built and never change afterwards, so that lookups from
//! many vCPU threads need no lock; each device has its own mutex. An address that no device claims
//! reads as all ones, ignores writes, and is logged once for each port or page.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thiserror::Error;

/// Number of different unclaimed ports, and of pages, that are logged.
const REPORTED_MAX: usize = 1024;

/// Binary logarithm of the bytes of a page, the unit in which unclaimed MMIO is logged.
const PAGE_SHIFT: u32 = 12;

/// A device that is mapped at ranges of a bus.
pub trait Device: Send {
    /// Fills `data` (1, 2, 4 or, on MMIO, up to 8 bytes; little endian) from `offset`.
    fn read(&mut self, offset: u64, data: &mut [u8]);

    /// Writes `data` at `offset`.
    fn write(&mut self, offset: u64, data: &[u8]);
}

/// A bus's handle of a device; the VMM keeps another one of the concrete type.
pub type SharedDevice = Arc<Mutex<dyn Device>>;

/// Locks a device, also after a panic of a thread that held the lock.
pub fn lock<T: ?Sized>(device: &Mutex<T>) -> MutexGuard<'_, T> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A range that cannot be mapped.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum BusError {
    /// The range is empty or passes the end of the address space.
    #[error("the range of {len:#x} bytes at {base:#x} is empty or leaves the address space")]
    BadRange {
        /// First address.
        base: u64,
        /// Bytes.
        len: u64,
    },
    /// An address of the range is mapped to another device.
    #[error("the range of {len:#x} bytes at {base:#x} overlaps the one at {other:#x}")]
    Overlap {
        /// First address.
        base: u64,
        /// Bytes.
        len: u64,
        /// First address of the range mapped before.
        other: u64,
    },
}

struct DeviceRange {
    first: u64,
    last: u64,
    /// The offset of `first` that the device receives.
    first_offset: u64,
    device: SharedDevice,
}

/// Ranges in ascending order, none overlapping.
#[derive(Default)]
struct Ranges(Vec<DeviceRange>);

impl Ranges {
    fn map(&mut self, range: DeviceRange) -> Result<(), BusError> {
        let index = self.0.partition_point(|r| r.first < range.first);
        let next = self.0.get(index).filter(|r| r.first <= range.last);
        let before = index.checked_sub(1).and_then(|i| self.0.get(i));
        let before = before.filter(|r| r.last >= range.first);
        if let Some(other) = before.or(next) {
            return Err(BusError::Overlap {
                base: range.first,
                len: range.last - range.first + 1,
                other: other.first,
            });
        }
        self.0.insert(index, range);
        Ok(())
    }

    /// The device that claims all of `len` bytes at `addr`, and the offset it receives.
    fn find(&self, addr: u64, len: usize) -> Option<(&Mutex<dyn Device>, u64)> {
        let index = self.0.partition_point(|r| r.first <= addr).checked_sub(1)?;
        let range = self.0.get(index)?;
        let extra = u64::try_from(len).ok()?.checked_sub(1)?;
        let last = addr.checked_add(extra)?;
        (last <= range.last).then(|| {
            (
                range.device.as_ref(),
                range.first_offset + (addr - range.first),
            )
        })
    }
}

impl fmt::Debug for Ranges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.0.iter().map(|r| r.first..=r.last))
            .finish()
    }
}

/// The range of `len` bytes at `base` on a bus whose last address is `limit`.
fn mapped_range(
    base: u64,
    len: u64,
    first_offset: u64,
    limit: u64,
    device: SharedDevice,
) -> Result<DeviceRange, BusError> {
    let bad = BusError::BadRange { base, len };
    let extra = len.checked_sub(1).ok_or(bad)?;
    let last = base
        .checked_add(extra)
        .filter(|&last| last <= limit)
        .ok_or(bad)?;
    first_offset.checked_add(extra).ok_or(bad)?;
    Ok(DeviceRange {
        first: base,
        last,
        first_offset,
        device,
    })
}

/// The 16-bit I/O port space.
#[derive(Debug)]
pub struct PortBus {
    ranges: Ranges,
    /// One bit per port, set when an unclaimed access to it was logged.
    reported: Box<[AtomicU64; 1024]>,
    reports: AtomicUsize,
}

impl Default for PortBus {
    fn default() -> Self {
        Self::new()
    }
}

impl PortBus {
    /// A bus without devices.
    pub fn new() -> Self {
        Self {
            ranges: Ranges::default(),
            reported: Box::new([const { AtomicU64::new(0) }; 1024]),
            reports: AtomicUsize::new(0),
        }
    }

    /// Maps `len` ports at `base`; the device receives offsets from 0.
    ///
    /// # Errors
    /// The range is empty, passes port 0xffff, or overlaps a range mapped before.
    pub fn map(&mut self, base: u16, len: u16, device: SharedDevice) -> Result<(), BusError> {
        self.map_at(base, len, 0, device)
    }

    /// Maps `len` ports at `base`; the device receives port `base` as `first_offset`.
    ///
    /// A device with several port ranges is mapped once for each; with `first_offset` equal to
    /// `base` it receives port numbers.
    ///
    /// # Errors
    /// As [`PortBus::map`].
    pub fn map_at(
        &mut self,
        base: u16,
        len: u16,
        first_offset: u16,
        device: SharedDevice,
    ) -> Result<(), BusError> {
        let limit = u64::from(u16::MAX);
        self.ranges.map(mapped_range(
            base.into(),
            len.into(),
            first_offset.into(),
            limit,
            device,
        )?)
    }

    /// Executes IN of 1, 2 or 4 bytes: all ones if no device claims the whole access.
    pub fn read(&self, port: u16, data: &mut [u8]) {
        match self.ranges.find(port.into(), data.len()) {
            Some((device, offset)) if is_port_size(data.len()) => lock(device).read(offset, data),
            _ => {
                data.fill(0xff);
                self.report(port, "read");
            }
        }
    }

    /// Executes OUT of 1, 2 or 4 bytes: ignored if no device claims the whole access.
    pub fn write(&self, port: u16, data: &[u8]) {
        match self.ranges.find(port.into(), data.len()) {
            Some((device, offset)) if is_port_size(data.len()) => lock(device).write(offset, data),
            _ => self.report(port, "write"),
        }
    }

    /// Whether an unclaimed access to `port` was made.
    pub fn was_unclaimed(&self, port: u16) -> bool {
        let (word, bit) = self.reported_bit(port);
        word.load(Ordering::Relaxed) & bit != 0
    }

    fn reported_bit(&self, port: u16) -> (&AtomicU64, u64) {
        (&self.reported[usize::from(port >> 6)], 1 << (port & 63))
    }

    fn report(&self, port: u16, access: &'static str) {
        let (word, bit) = self.reported_bit(port);
        if word.fetch_or(bit, Ordering::Relaxed) & bit != 0 {
            return;
        }
        match self.reports.fetch_add(1, Ordering::Relaxed) {
            n if n < REPORTED_MAX => tracing::info!("{access} of port {port:#x}: no device"),
            REPORTED_MAX => tracing::info!("further ports without a device are not logged"),
            _ => {}
        }
    }
}

fn is_port_size(len: usize) -> bool {
    matches!(len, 1 | 2 | 4)
}

/// The guest-physical addresses that are not RAM.
#[derive(Debug, Default)]
pub struct MmioBus {
    ranges: Ranges,
    /// Numbers of the pages logged as unclaimed, at most [`REPORTED_MAX`].
    reported: Mutex<BTreeSet<u64>>,
}

impl MmioBus {
    /// A bus without devices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Maps `len` bytes at `base`; the device receives offsets from 0.
    ///
    /// # Errors
    /// The range is empty, passes the end of the address space, or overlaps a range mapped before.
    pub fn map(&mut self, base: u64, len: u64, device: SharedDevice) -> Result<(), BusError> {
        self.ranges
            .map(mapped_range(base, len, 0, u64::MAX, device)?)
    }

    /// Reads 1 to 8 bytes: all ones if no device claims the whole access.
    pub fn read(&self, addr: u64, data: &mut [u8]) {
        match self.ranges.find(addr, data.len()) {
            Some((device, offset)) if data.len() <= 8 => lock(device).read(offset, data),
            _ => {
                data.fill(0xff);
                self.report(addr, "read");
            }
        }
    }

    /// Writes 1 to 8 bytes: ignored if no device claims the whole access.
    pub fn write(&self, addr: u64, data: &[u8]) {
        match self.ranges.find(addr, data.len()) {
            Some((device, offset)) if data.len() <= 8 => lock(device).write(offset, data),
            _ => self.report(addr, "write"),
        }
    }

    /// The number of different pages that were logged as unclaimed.
    pub fn unclaimed_pages(&self) -> usize {
        lock(&self.reported).len()
    }

    fn report(&self, addr: u64, access: &'static str) {
        let mut pages = lock(&self.reported);
        if pages.len() >= REPORTED_MAX || !pages.insert(addr >> PAGE_SHIFT) {
            return;
        }
        tracing::info!("{access} of guest-physical address {addr:#x}: no device");
        if pages.len() == REPORTED_MAX {
            tracing::info!("further pages without a device are not logged");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that collects writes, and whose bytes read as the low byte of their offsets.
    #[derive(Default)]
    struct Collector {
        writes: Vec<(u64, Vec<u8>)>,
    }

    impl Device for Collector {
        fn read(&mut self, offset: u64, data: &mut [u8]) {
            for (byte, offset) in data.iter_mut().zip(offset..) {
                *byte = offset.to_le_bytes()[0];
            }
        }

        fn write(&mut self, offset: u64, data: &[u8]) {
            self.writes.push((offset, data.to_vec()));
        }
    }

    fn collector() -> Arc<Mutex<Collector>> {
        Arc::default()
    }

    fn ports(base: u16, len: u16) -> (PortBus, Arc<Mutex<Collector>>) {
        let device = collector();
        let mut bus = PortBus::new();
        bus.map(base, len, device.clone()).unwrap();
        (bus, device)
    }

    #[test]
    fn port_access_inside_a_range_reaches_the_device_with_its_offset() {
        let (bus, device) = ports(0x100, 8);
        let mut data = [0; 4];
        bus.read(0x104, &mut data);
        bus.write(0x107, &[9]);
        assert_eq!(data, [4, 5, 6, 7]);
        assert_eq!(device.lock().unwrap().writes, [(7, vec![9])]);
        assert!(!bus.was_unclaimed(0x104));
    }

    #[test]
    fn port_access_that_leaves_its_range_reads_ones_and_drops_writes() {
        let (bus, device) = ports(0x100, 8);
        let mut data = [0; 4];
        bus.read(0x106, &mut data);
        bus.write(0x106, &data);
        assert_eq!(data, [0xff; 4]);
        assert!(device.lock().unwrap().writes.is_empty());
        assert!(bus.was_unclaimed(0x106));
    }

    #[test]
    fn port_access_that_enters_a_range_from_below_is_unclaimed() {
        let (bus, device) = ports(0x100, 8);
        bus.write(0xff, &[1, 2]);
        assert!(device.lock().unwrap().writes.is_empty());
    }

    #[test]
    fn port_access_past_the_last_port_reads_ones() {
        let (bus, _) = ports(0xfffc, 4);
        let mut data = [0; 4];
        bus.read(0xfffd, &mut data);
        assert_eq!(data, [0xff; 4]);
        bus.read(0xfffc, &mut data);
        assert_eq!(
            data,
            [0xfc, 0xfd, 0xfe, 0xff].map(|b: u8| b.wrapping_sub(0xfc))
        );
    }

    #[test]
    fn port_access_of_an_odd_size_is_unclaimed() {
        let (bus, _) = ports(0x100, 8);
        let mut data = [0; 3];
        bus.read(0x100, &mut data);
        assert_eq!(data, [0xff; 3]);
        bus.read(0x100, &mut []);
        bus.write(0x100, &[0; 8]);
    }

    #[test]
    fn map_of_an_overlapping_range_fails() {
        let (mut bus, device) = ports(0x100, 8);
        for (base, len) in [(0xf9, 8), (0x107, 1), (0x100, 8), (0x102, 2), (0xf0, 0x20)] {
            let overlap = BusError::Overlap {
                base: u64::from(base),
                len: u64::from(len),
                other: 0x100,
            };
            assert_eq!(
                bus.map(base, len, device.clone()),
                Err(overlap),
                "{base:#x}"
            );
        }
        assert_eq!(bus.map(0xf8, 8, device.clone()), Ok(()));
        assert_eq!(bus.map(0x108, 8, device), Ok(()));
    }

    #[test]
    fn map_of_an_empty_or_too_long_range_fails() {
        let (mut bus, device) = ports(0x100, 8);
        assert!(bus.map(0x200, 0, device.clone()).is_err());
        assert!(bus.map(0xfff8, 9, device.clone()).is_err());
        let mut mmio = MmioBus::new();
        assert!(mmio.map(u64::MAX, 2, device.clone()).is_err());
        assert_eq!(mmio.map(u64::MAX, 1, device), Ok(()));
    }

    #[test]
    fn map_at_sets_the_first_offset() {
        let (mut bus, device) = ports(0x100, 8);
        bus.map_at(0x300, 2, 0x300, device.clone()).unwrap();
        bus.write(0x301, &[5]);
        assert_eq!(device.lock().unwrap().writes, [(0x301, vec![5])]);
    }

    #[test]
    fn mmio_access_of_eight_bytes_is_claimed_inside_its_range() {
        let device = collector();
        let mut bus = MmioBus::new();
        bus.map(0xff00_0000, 0x1_0000, device).unwrap();
        let mut data = [0; 8];
        bus.read(0xff00_fff8, &mut data);
        assert_eq!(data, [0xf8, 0xf9, 0xfa, 0xfb, 0xfc, 0xfd, 0xfe, 0xff]);
        bus.read(0xff00_fff9, &mut data);
        assert_eq!(data, [0xff; 8]);
        assert_eq!(bus.unclaimed_pages(), 1);
        bus.read(u64::MAX, &mut data);
        assert_eq!(data, [0xff; 8]);
    }

    #[test]
    fn logged_mmio_pages_are_bounded() {
        let bus = MmioBus::new();
        for page in 0..10 * u64::try_from(REPORTED_MAX).unwrap() {
            bus.write(page << PAGE_SHIFT, &[0]);
        }
        assert_eq!(bus.unclaimed_pages(), REPORTED_MAX);
    }

    #[test]
    fn concurrent_writes_all_reach_the_device() {
        let (bus, device) = ports(0x100, 8);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..100).for_each(|_| bus.write(0x100, &[1])));
            }
        });
        assert_eq!(device.lock().unwrap().writes.len(), 400);
    }
}
