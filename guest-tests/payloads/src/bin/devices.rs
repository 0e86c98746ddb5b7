//! The test device, fw_cfg, and ports and addresses without a device.

#![no_std]
#![no_main]

use hindsight_guest::insn;
use hindsight_guest::port::{inb, inl, inw, outb, outl, outw};
use hindsight_guest::prelude::*;

payload!("devices");

/// The 32-bit latch of the test device.
const LATCH: u16 = 0xe0;
/// The four byte latches.
const BYTES: u16 = 0xe8;
/// The address of the MMIO memory, and its size.
const MEMORY: u64 = 0xff00_0000;
const MEMORY_BYTES: u64 = 0x1_0000;
/// A port and an address without a device.
const NO_PORT: u16 = 0x5a00;
const NO_MEMORY: u64 = 0xf800_0000;
const DEBUG_CONSOLE: u16 = 0xe9;

fn read<T: Copy>(address: u64) -> T {
    // SAFETY: callers pass aligned addresses of device memory, which holds no Rust objects.
    unsafe { (address as *const T).read_volatile() }
}

fn write<T>(address: u64, value: T) {
    // SAFETY: as for `read`.
    unsafe { (address as *mut T).write_volatile(value) };
}

case! {
    name: "latch", cpl: [0], rules: [], needs: ["io-exit"],
    about: "the 32-bit latch stores bytes, words and doublewords",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU has no test device");
        }
        outl(LATCH, 0x1234_5678);
        check_eq!(inl(LATCH), 0x1234_5678, "the doubleword");
        check_eq!((inw(LATCH), inw(LATCH + 2)), (0x5678, 0x1234), "its words");
        check_eq!((inb(LATCH), inb(LATCH + 3)), (0x78, 0x12), "its outer bytes");
        outb(LATCH + 1, 0xaa);
        outw(LATCH + 2, 0xbbcc);
        check_eq!(inl(LATCH), 0xbbcc_aa78, "after a byte and a word");
        outl(LATCH, 0);
        check_eq!(inl(LATCH), 0, "after zero");
    }
}

case! {
    name: "byte_latches", cpl: [0], rules: [], needs: ["io-exit"],
    about: "each byte latch stores a byte, except the one at the port of the debug console",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU has no test device");
        }
        for (port, value) in [(BYTES, 0x11), (BYTES + 2, 0x33), (BYTES + 3, 0x44)] {
            outb(port, value);
            check_eq!(inb(port), value, "the byte");
        }
        check_eq!(inb(BYTES), 0x11, "the first byte after the others");
    }
}

case! {
    name: "string_io", cpl: [0], rules: [], needs: ["io-exit"],
    about: "REP OUTSB and REP INSB move RCX bytes",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU has no test device");
        }
        let out = *b"abcd";
        let mut read_back = [0_u8; 4];
        let (left_out, left_in): (u64, u64);
        // SAFETY: both buffers have four bytes, and RCX is 4.
        unsafe {
            core::arch::asm!("rep outsb", in("dx") BYTES, inout("rcx") 4_u64 => left_out,
                inout("rsi") out.as_ptr() => _, options(nostack));
            core::arch::asm!("rep insb", in("dx") BYTES, inout("rcx") 4_u64 => left_in,
                inout("rdi") read_back.as_mut_ptr() => _, options(nostack));
        }
        check_eq!((left_out, left_in), (0, 0), "RCX afterwards");
        check_eq!(read_back, *b"dddd", "the last byte, four times");
    }
}

case! {
    name: "mmio_memory", cpl: [0, 3], rules: [], needs: ["mmio-exit"], needs_cpl3: ["iretq-cpl3"],
    about: "the MMIO memory stores bytes, words, doublewords and quadwords",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU has no test device");
        }
        let mut found = (0_u64, 0_u32, (0_u16, 0_u8));
        let fault = ctx.run(|| {
            write(MEMORY, 0x1122_3344_5566_7788_u64);
            write(MEMORY + 2, 0xaabb_u16);
            write(MEMORY + 7, 0xcc_u8);
            found = (read(MEMORY), read(MEMORY + 4), (read(MEMORY + 2), read(MEMORY + 7)));
        });
        check!(fault.is_none(), "no exception");
        check_eq!(found.0, 0xcc22_3344_aabb_7788, "the quadword");
        check_eq!(found.1, 0xcc22_3344, "the upper doubleword");
        check_eq!(found.2, (0xaabb, 0xcc), "the word and the byte");
    }
}

case! {
    name: "mmio_memory_end", cpl: [0], rules: [], needs: ["mmio-exit"],
    about: "the MMIO memory has exactly 64 KiB",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU has no test device");
        }
        let last = MEMORY + MEMORY_BYTES - 4;
        write(last, 0x0bad_cafe_u32);
        check_eq!(read::<u32>(last), 0x0bad_cafe, "the last doubleword");
        check_eq!(read::<u32>(last + 4), u32::MAX, "the one after it");
    }
}

case! {
    name: "debug_console", cpl: [0], rules: [], needs: ["io-exit"],
    about: "a read of the debug console returns E9H",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU has a debug console only by an option");
        }
        check_eq!(inb(DEBUG_CONSOLE), 0xe9, "the byte read");
        outb(DEBUG_CONSOLE, b'.');
    }
}

case! {
    name: "fw_cfg", cpl: [0], rules: [], needs: ["io-exit"],
    about: "fw_cfg has its signature, the number of CPUs, the size of memory, and a directory",
    fn body(_ctx) {
        outw(0x510, 0);
        check_eq!([0; 4].map(|_| inb(0x511)), *b"QEMU", "the signature");
        outw(0x510, 5);
        let cpus = u16::from_le_bytes([0; 2].map(|_| inb(0x511)));
        check!((1..=64).contains(&cpus), "the number of processors");
        outw(0x510, 3);
        let bytes = u64::from_le_bytes([0; 8].map(|_| inb(0x511)));
        check!(bytes >= 1 << 20, "the size of memory");
        outw(0x510, 0x19);
        let files = u32::from_be_bytes([0; 4].map(|_| inb(0x511)));
        check!(files < 256, "the number of files");
    }
}

case! {
    name: "unclaimed_ports", cpl: [0], rules: [], needs: ["io-exit"],
    about: "ports without a device read all ones and ignore writes",
    fn body(_ctx) {
        outb(NO_PORT, 1);
        outw(NO_PORT, 2);
        outl(NO_PORT, 3);
        check_eq!(inb(NO_PORT), u8::MAX, "a byte");
        check_eq!(inw(NO_PORT), u16::MAX, "a word");
        check_eq!(inl(NO_PORT), u32::MAX, "a doubleword");
    }
}

case! {
    name: "unclaimed_memory", cpl: [0], rules: [], needs: ["mmio-exit"],
    about: "addresses without a device read all ones and ignore writes",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU returns zeros");
        }
        write(NO_MEMORY, 1_u64);
        check_eq!(read::<u8>(NO_MEMORY), u8::MAX, "a byte");
        check_eq!(read::<u16>(NO_MEMORY), u16::MAX, "a word");
        check_eq!(read::<u32>(NO_MEMORY), u32::MAX, "a doubleword");
        check_eq!(read::<u64>(NO_MEMORY), u64::MAX, "a quadword");
    }
}

case! {
    name: "pci_is_empty", cpl: [0], rules: [], needs: ["io-exit"],
    about: "the configuration space of every PCI function reads all ones",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU has PCI devices");
        }
        for function in [0_u32, 1 << 11, 2 << 11, 31 << 11 | 7 << 8, 255 << 16] {
            outl(0xcf8, 1 << 31 | function);
            check_eq!(inl(0xcfc), u32::MAX, "vendor and device");
        }
        check_eq!(inl(0xcf8), 1 << 31 | 255 << 16, "the address register reads back");
    }
}
