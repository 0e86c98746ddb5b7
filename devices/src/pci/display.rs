//! The PCI function of the Bochs display adapter: QEMU, "QEMU Standard VGA".
//!
//! BAR 0 is the linear framebuffer, BAR 2 has the registers. Without EDID: the first KiB of BAR 2 reads as zeros.

use std::sync::{Arc, Mutex};

use super::{BarLayout, ConfigSpace, PciIdentity};
use crate::bus::{Device, lock};
use crate::vga::{VIDEO_MEMORY_LEN, Vga, VideoMemory};

/// The slot of the display: the last one, so that it moves no other device.
pub const DISPLAY_SLOT: u8 = 31;

const IDENTITY: PciIdentity = PciIdentity {
    vendor: 0x1234,
    device: 0x1111,
    class: 0x03_0000,
    revision: 2,
    subsystem_vendor: 0x1af4,
    subsystem: 0x1100,
};

const COMMAND: usize = 0x04;
/// I/O and memory space: the function answers at the ports of a VGA, and at its BARs.
const DECODES: u8 = 0x03;
/// I/O space, memory space and bus master.
const COMMAND_WRITABLE: u8 = 0x07;

/// The BARs.
const FRAMEBUFFER: usize = 0;
const REGISTERS: usize = 2;
/// Bytes of the BAR with the framebuffer.
const FRAMEBUFFER_LEN: u32 = 16 << 20;
const _: () = assert!(FRAMEBUFFER_LEN as usize == VIDEO_MEMORY_LEN);
/// Bytes of the BAR with the registers.
const REGISTERS_LEN: u32 = 0x1000;
/// Where they are in it: ports 3C0H to 3DFH, the DISPI registers, and those of QEMU.
const VGA_REGISTERS: std::ops::Range<u64> = 0x400..0x420;
const DISPI_REGISTERS: std::ops::Range<u64> = 0x500..0x516;
/// The size of QEMU's registers, and the byte order of pixels, which is fixed.
const QEMU_SIZE: u64 = 0x600;
const QEMU_BYTE_ORDER: u64 = 0x604;
const LITTLE_ENDIAN: u32 = 0x1e1e_1e1e;

/// A display adapter for the bus.
#[derive(Clone, Debug)]
pub struct PciDisplay {
    /// The registers, which are at ports too.
    pub vga: Arc<Mutex<Vga>>,
    /// The framebuffer.
    pub memory: VideoMemory,
    /// The BARs have addresses from the start: there is no firmware to assign them.
    pub assigned: bool,
}

/// The display adapter on the bus.
#[derive(Debug)]
pub(super) struct DisplayFunction {
    pub(super) space: ConfigSpace,
    vga: Arc<Mutex<Vga>>,
    memory: VideoMemory,
}

impl DisplayFunction {
    /// The function after reset. `registers` is the address of BAR 2, if BARs are assigned.
    pub(super) fn new(display: PciDisplay, registers: u32) -> Self {
        let mut space = ConfigSpace::new(IDENTITY);
        let [framebuffer, registers] = if display.assigned {
            space.set(COMMAND, &[DECODES]);
            [(display.memory.base() & 0xffff_ffff) as u32, registers]
        } else {
            [0; 2]
        };
        space.allow(COMMAND, &[COMMAND_WRITABLE]);
        let layout = |address, size| BarLayout { address, size };
        space.add_prefetchable_bar(FRAMEBUFFER, layout(framebuffer, FRAMEBUFFER_LEN));
        space.add_bar(REGISTERS, layout(registers, REGISTERS_LEN));
        Self {
            space,
            vga: display.vga,
            memory: display.memory,
        }
    }

    /// Reads a BAR.
    pub(super) fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        match (bar, offset) {
            (FRAMEBUFFER, _) => self.memory.read(offset, data),
            (_, QEMU_SIZE) => fill(data, 8),
            (_, QEMU_BYTE_ORDER) => fill(data, LITTLE_ENDIAN),
            _ if VGA_REGISTERS.contains(&offset) => {
                lock(&self.vga).read(offset - VGA_REGISTERS.start, data);
            }
            _ if DISPI_REGISTERS.contains(&offset) => {
                let index = (offset - DISPI_REGISTERS.start) / 2;
                let value = lock(&self.vga).read_dispi((index & 0xffff) as u16);
                fill(data, value.into());
            }
            _ => data.fill(0),
        }
    }

    /// Writes to a BAR.
    pub(super) fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) {
        if bar == FRAMEBUFFER {
            self.memory.write(offset, data);
        } else if VGA_REGISTERS.contains(&offset) {
            lock(&self.vga).write(offset - VGA_REGISTERS.start, data);
        } else if DISPI_REGISTERS.contains(&offset)
            && let &[low, high, ..] = data
        {
            let index = (offset - DISPI_REGISTERS.start) / 2;
            let value = u16::from_le_bytes([low, high]);
            lock(&self.vga).write_dispi((index & 0xffff) as u16, value);
        }
    }
}

/// Fills `data` with the bytes of a register, and zeros after them.
fn fill(data: &mut [u8], value: u32) {
    let bytes = value.to_le_bytes().into_iter().chain(std::iter::repeat(0));
    for (to, from) in data.iter_mut().zip(bytes) {
        *to = from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vga::ScreenMode;
    use crate::vga::memory::tests::{BASE, video_memory};

    fn function(assigned: bool) -> DisplayFunction {
        let memory = video_memory();
        let display = PciDisplay {
            vga: Arc::new(Mutex::new(Vga::with_memory(memory.clone()))),
            memory,
            assigned,
        };
        DisplayFunction::new(display, 0xc00f_8000)
    }

    fn read<const N: usize>(function: &DisplayFunction, bar: usize, offset: u64) -> [u8; N] {
        let mut data = [0; N];
        function.bar_read(bar, offset, &mut data);
        data
    }

    #[test]
    fn function_is_the_vga_that_drivers_know() {
        let mut function = function(true);
        assert_eq!(function.space.dword(0), 0x1111_1234);
        assert_eq!(function.space.dword(8), 0x0300_0002);
        assert_eq!(function.space.dword(0x10), 0xd000_0008, "prefetchable");
        assert_eq!(function.space.dword(0x18), 0xc00f_8000);
        assert_eq!(function.space.decode(BASE, 8), Some((0, 0)));
        function.space.write(0x10, &[0xff; 4]);
        assert_eq!(function.space.dword(0x10), 0xff00_0008, "16 MiB");
        let unassigned = super::tests::function(false);
        assert_eq!(unassigned.space.dword(0x10), 8);
        assert_eq!(unassigned.space.dword(4), 0);
    }

    #[test]
    fn registers_answer_in_their_bar() {
        let function = function(true);
        assert_eq!(read(&function, 2, 0x500), 0xb0c5_u16.to_le_bytes());
        assert_eq!(read(&function, 2, 0x514), 256_u16.to_le_bytes());
        assert_eq!(read(&function, 2, 0x600), 8_u32.to_le_bytes());
        assert_eq!(read(&function, 2, 0x604), LITTLE_ENDIAN.to_le_bytes());
        assert_eq!(read(&function, 2, 0), [0; 8], "no EDID");
        for (offset, value) in [(0x502, 640_u16), (0x504, 480), (0x506, 32), (0x508, 0x41)] {
            function.bar_write(2, offset, &value.to_le_bytes());
        }
        assert!(matches!(
            lock(&function.vga).mode(),
            ScreenMode::Graphics(_)
        ));
        // Port 3C2H, which reads back at 3CCH.
        function.bar_write(2, 0x402, &[0xe3]);
        assert_eq!(read(&function, 2, 0x40c), [0xe3]);
    }

    #[test]
    fn framebuffer_answers_in_its_bar() {
        let function = function(true);
        function.bar_write(0, 0x10_0000, &[1, 2, 3, 4]);
        assert_eq!(read(&function, 0, 0x10_0002), [3, 4]);
        let mut data = [0; 4];
        function.memory.read(0x10_0000, &mut data);
        assert_eq!(data, [1, 2, 3, 4]);
    }
}
