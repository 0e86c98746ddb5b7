//! DMA of fw_cfg: a request of the guest reads or skips a part of an item.

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::FwCfg;
use crate::virtio::DmaMemory;

/// What the DMA address register reads as.
pub(super) const DMA_SIGNATURE: [u8; 8] = *b"QEMU CFG";

/// Bits of a request's control word.
const ERROR: u32 = 1 << 0;
const READ: u32 = 1 << 1;
const SKIP: u32 = 1 << 2;
const SELECT: u32 = 1 << 3;
const WRITE: u32 = 1 << 4;

/// Bytes of a request: control, length and address.
const REQUEST_LEN: usize = 16;
/// Bytes of zeros that are written at once.
const ZEROS: usize = 1 << 16;

/// A request in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DmaRequest {
    at: GuestAddress,
    control: u32,
    len: u32,
    target: GuestAddress,
}

impl DmaRequest {
    /// Reads the request at `address`; `None` if it is not in guest memory.
    pub(super) fn read(memory: &DmaMemory, address: u64) -> Option<Self> {
        let at = GuestAddress(address);
        if !memory.check_range(at, REQUEST_LEN) {
            return None;
        }
        let mut bytes = [0; REQUEST_LEN];
        memory.read_slice(&mut bytes, at).ok()?;
        let [c0, c1, c2, c3, l0, l1, l2, l3, target @ ..] = bytes;
        Some(Self {
            at,
            control: u32::from_be_bytes([c0, c1, c2, c3]),
            len: u32::from_be_bytes([l0, l1, l2, l3]),
            target: GuestAddress(u64::from_be_bytes(target)),
        })
    }

    /// Executes the request. Returns whether it succeeded; items cannot be written.
    pub(super) fn run(self, memory: &DmaMemory, device: &mut FwCfg) -> bool {
        if self.control & SELECT != 0 {
            let [high, low, ..] = self.control.to_be_bytes();
            device.select(u16::from_be_bytes([high, low]));
        }
        if self.control & READ != 0 {
            return self.copy(memory, device).is_some();
        }
        if self.control & WRITE != 0 {
            return false;
        }
        if self.control & SKIP != 0 {
            device.skip(self.len);
        }
        true
    }

    /// Copies the item, and zeros past its end; `None` if the target is not guest memory.
    fn copy(self, memory: &DmaMemory, device: &mut FwCfg) -> Option<()> {
        let len = usize::try_from(self.len).ok()?;
        if !memory.check_range(self.target, len) {
            return None;
        }
        let rest = device.rest();
        let item = &rest[..rest.len().min(len)];
        memory.write_slice(item, self.target).ok()?;
        let zeros = vec![0; ZEROS.min(len - item.len())];
        let mut written = item.len();
        while written < len {
            let part = &zeros[..zeros.len().min(len - written)];
            let at = self.target.0.checked_add(written as u64)?;
            memory.write_slice(part, GuestAddress(at)).ok()?;
            written += part.len();
        }
        device.skip(self.len);
        Some(())
    }

    /// Clears the request's control word, or sets its error bit.
    pub(super) fn complete(self, memory: &DmaMemory, done: bool) {
        let control = if done { 0 } else { ERROR };
        // The request was read from there, so this cannot fail.
        let _written = memory.write_slice(&control.to_be_bytes(), self.at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus::Device;
    use crate::fw_cfg::FW_CFG_DMA_OFFSET;
    use crate::virtio::test_driver::{MEMORY, memory};

    const END: u64 = MEMORY as u64;

    /// Runs a request at 0x100, and returns its control word afterwards.
    fn run(device: &mut FwCfg, memory: &DmaMemory, (control, len, target): (u32, u32, u64)) -> u32 {
        let at = GuestAddress(0x100);
        memory.write_slice(&control.to_be_bytes(), at).unwrap();
        memory
            .write_slice(&len.to_be_bytes(), GuestAddress(0x104))
            .unwrap();
        memory
            .write_slice(&target.to_be_bytes(), GuestAddress(0x108))
            .unwrap();
        device.write(4, &[0; 4]);
        device.write(8, &0x100_u32.to_be_bytes());
        let mut control = [0; 4];
        memory.read_slice(&mut control, at).unwrap();
        u32::from_be_bytes(control)
    }

    fn device(memory: &DmaMemory) -> FwCfg {
        FwCfg::new(1, END).with_dma(memory.clone())
    }

    #[test]
    fn dma_copies_the_selected_item_and_zeros_past_its_end() {
        let (memory, _) = memory();
        let mut device = device(&memory);
        memory
            .write_slice(&[0xff; 9], GuestAddress(0x1000))
            .unwrap();
        assert_eq!(run(&mut device, &memory, (READ | SELECT, 3, 0x1000)), 0);
        assert_eq!(run(&mut device, &memory, (READ, 5, 0x1003)), 0);
        let mut copied = [0; 9];
        memory
            .read_slice(&mut copied, GuestAddress(0x1000))
            .unwrap();
        assert_eq!(copied, *b"QEMU\0\0\0\0\xff");
    }

    #[test]
    fn dma_skips_and_continues_on_the_data_port() {
        let (memory, _) = memory();
        let mut device = device(&memory);
        assert_eq!(run(&mut device, &memory, (SKIP | SELECT, 2, 0)), 0);
        let mut byte = [0];
        device.read(1, &mut byte);
        assert_eq!(byte, *b"M");
    }

    #[test]
    fn dma_outside_of_memory_and_writes_of_items_set_the_error_bit() {
        let (memory, _) = memory();
        let mut device = device(&memory);
        let rows = [
            (READ | SELECT, 4, END - 2),
            (READ | SELECT, u32::MAX, 0x1000),
            (READ | SELECT, 4, u64::MAX),
            (WRITE | SELECT, 4, 0x1000),
        ];
        for row in rows {
            assert_eq!(run(&mut device, &memory, row), ERROR, "{row:x?}");
        }
        for address in [u64::MAX, END - 8, u64::MAX << 32] {
            let [high @ .., _, _, _, _] = address.to_be_bytes();
            device.write(4, &high);
            device.write(8, &address.to_be_bytes()[4..]);
        }
        assert_eq!(device.save().dma_address_high, 0);
    }

    #[test]
    fn dma_register_reads_its_signature_and_the_id_has_the_dma_bit() {
        let mut device = device(&memory().0);
        let mut signature = [0; 4];
        device.read(FW_CFG_DMA_OFFSET.into(), &mut signature);
        assert_eq!(&signature, b"QEMU");
        device.read(8, &mut signature);
        assert_eq!(&signature, b" CFG");
        device.write(0, &[1, 0]);
        let mut id = [0];
        device.read(1, &mut id);
        assert_eq!(id, [3]);
    }

    #[test]
    fn device_without_dma_ignores_the_address_register() {
        let mut device = FwCfg::new(1, END);
        device.write(4, &[1; 4]);
        device.write(8, &[1; 4]);
        assert_eq!(device.save().dma_address_high, 0);
    }
}
