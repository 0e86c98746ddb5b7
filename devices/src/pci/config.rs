//! The configuration space of a function: registers, what a write may change, and capabilities.

/// Bytes of the configuration space that conventional PCI has. ECAM reads zeros above.
const LEN: usize = 256;
const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const BARS: usize = 0x10;
const CAPABILITIES: usize = 0x34;
/// Offset of the first capability.
const CAPABILITIES_START: usize = 0x40;
/// Bit 3 of a memory BAR: prefetchable.
const PREFETCHABLE: u8 = 1 << 3;
/// Number of BARs in a type 0 header.
const BAR_COUNT: usize = 6;

/// COMMAND bit 1: the function answers at its memory BARs.
const MEMORY_SPACE: u16 = 1 << 1;
/// COMMAND bit 2: the function may access memory and send MSI.
const BUS_MASTER: u16 = 1 << 2;
/// COMMAND bit 10: INTx is disabled.
const INTERRUPT_DISABLE: u16 = 1 << 10;
/// STATUS bit 3: INTx is asserted inside the function.
const INTERRUPT_STATUS: u16 = 1 << 3;
/// STATUS bit 4: there is a list of capabilities.
const CAPABILITY_LIST: u16 = 1 << 4;

/// The IDs and the class of a PCI function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciIdentity {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Base class, subclass and programming interface, from bit 16 down.
    pub class: u32,
    /// Revision ID.
    pub revision: u8,
    /// Subsystem vendor ID.
    pub subsystem_vendor: u16,
    /// Subsystem ID.
    pub subsystem: u16,
}

/// A 32-bit memory BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarLayout {
    /// The address after reset.
    pub address: u32,
    /// Size in bytes, a power of two of at least 16.
    pub size: u32,
}

/// The configuration space of one function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigSpace {
    bytes: [u8; LEN],
    /// The bits that writes change.
    writable: [u8; LEN],
    bar_sizes: [u32; BAR_COUNT],
    /// Offset of the next capability, and of the byte that links to it.
    next_capability: (usize, usize),
}

impl ConfigSpace {
    /// A type 0 header without BARs and capabilities.
    pub fn new(identity: PciIdentity) -> Self {
        let mut space = Self {
            bytes: [0; LEN],
            writable: [0; LEN],
            bar_sizes: [0; BAR_COUNT],
            next_capability: (CAPABILITIES_START, CAPABILITIES),
        };
        space.set(0x00, &identity.vendor.to_le_bytes());
        space.set(0x02, &identity.device.to_le_bytes());
        let class = identity.class << 8 | u32::from(identity.revision);
        space.set(0x08, &class.to_le_bytes());
        space.set(0x2c, &identity.subsystem_vendor.to_le_bytes());
        space.set(0x2e, &identity.subsystem.to_le_bytes());
        let command = MEMORY_SPACE | BUS_MASTER | INTERRUPT_DISABLE;
        space.allow(COMMAND, &command.to_le_bytes());
        space
    }

    /// Adds pin INTA#. Interrupt Line is a scratch register for firmware.
    pub fn add_interrupt_pin(&mut self) {
        self.set(0x3c, &[0xff, 1]);
        self.allow(0x3c, &[0xff]);
    }

    /// Adds memory BAR number `index`, which decodes `bar.address` once the guest enables it.
    pub fn add_bar(&mut self, index: usize, bar: BarLayout) {
        debug_assert!(bar.size.is_power_of_two(), "a BAR's size is a power of two");
        debug_assert!(bar.size >= 16, "a memory BAR has at least 16 bytes");
        self.bar_sizes[index] = bar.size;
        self.set(BARS + 4 * index, &bar.address.to_le_bytes());
        self.allow(BARS + 4 * index, &(!(bar.size - 1)).to_le_bytes());
    }

    /// Like [`ConfigSpace::add_bar`], for memory whose reads have no side effects.
    pub fn add_prefetchable_bar(&mut self, index: usize, bar: BarLayout) {
        self.add_bar(index, bar);
        self.bytes[BARS + 4 * index] |= PREFETCHABLE;
    }

    /// Adds a capability: `body` follows its ID and link. Returns its offset.
    ///
    /// # Panics
    /// When the configuration space is full.
    pub fn add_capability(&mut self, id: u8, body: &[u8]) -> usize {
        let (offset, link) = self.next_capability;
        assert!(offset + 2 + body.len() <= LEN, "capabilities fit");
        let status = u16::from_le_bytes([self.bytes[STATUS], self.bytes[STATUS + 1]]);
        self.set(STATUS, &(status | CAPABILITY_LIST).to_le_bytes());
        self.bytes[link] = offset.to_le_bytes()[0];
        self.bytes[offset] = id;
        self.set(offset + 2, body);
        self.next_capability = ((offset + 2 + body.len()).next_multiple_of(4), offset + 1);
        offset
    }

    /// Sets bytes, whether or not guests may.
    pub fn set(&mut self, offset: usize, bytes: &[u8]) {
        self.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    /// Lets guests change the bits of `mask` at `offset`.
    pub fn allow(&mut self, offset: usize, mask: &[u8]) {
        self.writable[offset..offset + mask.len()].copy_from_slice(mask);
    }

    /// The little-endian number of 4 bytes at `offset`; bytes after the end are zero.
    pub fn dword(&self, offset: usize) -> u32 {
        let mut bytes = [0; 4];
        self.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Reads registers; those after the first 256 bytes are zero.
    pub fn read(&self, offset: usize, data: &mut [u8]) {
        for (byte, at) in data.iter_mut().zip(offset..) {
            *byte = self.bytes.get(at).copied().unwrap_or(0);
        }
    }

    /// A guest's write: changes the bits that are writable.
    pub fn write(&mut self, offset: usize, data: &[u8]) {
        for (&new, at) in data.iter().zip(offset..) {
            if let (Some(byte), Some(&mask)) = (self.bytes.get_mut(at), self.writable.get(at)) {
                *byte = *byte & !mask | new & mask;
            }
        }
    }

    fn command(&self) -> u16 {
        u16::from_le_bytes([self.bytes[COMMAND], self.bytes[COMMAND + 1]])
    }

    /// Whether the function may access memory and send messages.
    pub fn is_bus_master(&self) -> bool {
        self.command() & BUS_MASTER != 0
    }

    /// Whether the guest has disabled INTx.
    pub fn intx_disabled(&self) -> bool {
        self.command() & INTERRUPT_DISABLE != 0
    }

    /// Shows in the status register whether the function asserts INTx.
    pub fn set_interrupt_status(&mut self, asserted: bool) {
        let [low, _] = INTERRUPT_STATUS.to_le_bytes();
        self.bytes[STATUS] = self.bytes[STATUS] & !low | if asserted { low } else { 0 };
    }

    /// The BAR that decodes all of `len` bytes at `address`, and the offset in it.
    pub fn decode(&self, address: u64, len: usize) -> Option<(usize, u64)> {
        if self.command() & MEMORY_SPACE == 0 {
            return None;
        }
        let bars = self.bar_sizes.iter().enumerate();
        bars.filter(|(_, size)| **size != 0)
            .find_map(|(index, &size)| {
                let base = self.dword(BARS + 4 * index) & !(size - 1);
                let offset = address.checked_sub(u64::from(base))?;
                let end = offset.checked_add(len as u64)?;
                (end <= u64::from(size)).then_some((index, offset))
            })
    }

    /// All registers.
    pub fn save(&self) -> Vec<u8> {
        self.bytes.to_vec()
    }

    /// Restores the registers that guests can change; the others stay.
    pub fn restore(&mut self, saved: &[u8]) {
        let end = saved.len().min(LEN);
        self.write(0, &saved[..end]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> ConfigSpace {
        let mut space = ConfigSpace::new(PciIdentity {
            vendor: 0x1af4,
            device: 0x1042,
            class: 0x01_8000,
            revision: 1,
            subsystem_vendor: 0x1af4,
            subsystem: 0x40,
        });
        space.add_bar(
            1,
            BarLayout {
                address: 0xc000_4000,
                size: 0x1000,
            },
        );
        space
    }

    #[test]
    fn header_has_the_layout_of_the_specification() {
        let space = space();
        assert_eq!(space.dword(0x00), 0x1042_1af4);
        assert_eq!(space.dword(0x08), 0x0180_0001);
        assert_eq!(space.dword(0x2c), 0x0040_1af4);
        assert_eq!(space.dword(0x0c), 0, "type 0, one function");
        assert_eq!(space.dword(0x100), 0, "no extended capability");
    }

    #[test]
    fn bar_answers_sizing_and_moves() {
        let mut space = space();
        assert_eq!(space.decode(0xc000_4000, 4), None, "memory space is off");
        space.write(0x04, &[2, 0]);
        assert_eq!(space.decode(0xc000_4ffc, 4), Some((1, 0xffc)));
        assert_eq!(space.decode(0xc000_4ffd, 4), None);
        space.write(0x14, &[0xff; 4]);
        assert_eq!(space.dword(0x14), 0xffff_f000);
        space.write(0x10, &[0xff; 4]);
        assert_eq!(space.dword(0x10), 0, "there is no BAR 0");
        space.write(0x14, &0xd000_0000_u32.to_le_bytes());
        assert_eq!(space.decode(0xd000_0010, 2), Some((1, 0x10)));
    }

    #[test]
    fn capabilities_are_linked_in_order() {
        let mut space = space();
        assert_eq!(space.dword(0x04) >> 16, 0);
        assert_eq!(space.add_capability(9, &[1, 2, 3]), 0x40);
        assert_eq!(space.add_capability(0x11, &[4]), 0x48);
        assert_eq!(space.dword(0x04) >> 16, 0x10);
        assert_eq!(space.dword(0x34), 0x40);
        assert_eq!(space.dword(0x40), 0x0201_4809);
        assert_eq!(space.dword(0x48), 0x0004_0011);
    }

    #[test]
    fn restored_registers_keep_what_guests_cannot_change() {
        let mut space = space();
        space.restore(&[0xff; 256]);
        assert_eq!(space.dword(0x00), 0x1042_1af4);
        assert_eq!(space.dword(0x04), 0x0406);
        space.restore(&[0; 7]);
        assert_eq!(space.dword(0x04), 0);
    }
}
