//! Interrupt lines through the 8259 pair and the I/O APIC; the test device drives them.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::exception::TrapFrame;
use hindsight_guest::ioapic::{self, ACTIVE_LOW, LEVEL, MASKED, REMOTE_IRR};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::ApicRegister;
use hindsight_guest::trap;
use hindsight_guest::{apic, insn, pic, port};
use hindsight_payloads::clock::{wait, wait_until};

payload!("ioapic_pic");

/// Port of the test device that drives interrupt line 0.
const LINES: u16 = 0x2000;
const PIC_BASE: u8 = 0x20;
/// Lines that no other device drives, one on each PIC.
const LINE: u8 = 5;
const HIGH_LINE: u8 = 11;
const VECTOR: u8 = 0x64;

static TAKEN: AtomicU64 = AtomicU64::new(0);

fn taken() -> u64 {
    TAKEN.load(Ordering::Acquire)
}

fn drive(line: u8, level: u8) {
    port::outb(LINES + u16::from(line), level);
}

fn count_pic(frame: &mut TrapFrame) {
    TAKEN.fetch_add(1, Ordering::AcqRel);
    pic::eoi((frame.vector & 0xff) as u8 - PIC_BASE);
}

fn count_apic(_: &mut TrapFrame) {
    TAKEN.fetch_add(1, Ordering::AcqRel);
    apic::eoi();
}

/// Lowers the line before the EOI, like a driver that serves its device.
fn serve_level(_: &mut TrapFrame) {
    TAKEN.fetch_add(1, Ordering::AcqRel);
    drive(HIGH_LINE, 0);
    apic::eoi();
}

fn prepare_pic() {
    TAKEN.store(0, Ordering::Release);
    drive(LINE, 0);
    drive(HIGH_LINE, 0);
    apic::enable();
    apic::write(ApicRegister::LVT_LINT0, 0b111 << 8); // ExtINT
    pic::init(PIC_BASE);
    trap::set_handler(PIC_BASE + LINE, count_pic);
    trap::set_handler(PIC_BASE + HIGH_LINE, count_pic);
}

fn prepare_ioapic(handler: fn(&mut TrapFrame), flags: u64) {
    TAKEN.store(0, Ordering::Release);
    drive(HIGH_LINE, 0);
    pic::mask_all();
    apic::enable();
    trap::set_handler(VECTOR, handler);
    ioapic::set_entry(HIGH_LINE, u64::from(VECTOR) | flags);
}

/// Enables interrupts for 2 ms.
fn open() {
    insn::sti();
    wait(2);
    insn::cli();
}

/// Enables interrupts until one was delivered; returns false if none was within 500 ms.
fn open_until_taken() -> bool {
    insn::sti();
    let delivered = wait_until(500, || taken() != 0);
    insn::cli();
    delivered
}

case! {
    name: "pic_edge", cpl: [0], rules: [], needs: ["interrupt", "io-exit"],
    about: "a rising edge on either PIC raises one interrupt; a line that stays high raises no more",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU has no test device");
        }
        for line in [LINE, HIGH_LINE] {
            prepare_pic();
            pic::unmask(line);
            drive(line, 1);
            check!(open_until_taken(), "interrupt delivered");
            open();
            check_eq!(taken(), 1, "count of interrupts while the line stays high");
            drive(line, 0);
            drive(line, 1);
            open();
            check_eq!(taken(), 2, "count of interrupts after the next edge");
            drive(line, 0);
            pic::mask_all();
        }
        apic::disable();
    }
}

case! {
    name: "pic_masked", cpl: [0], rules: [], needs: ["interrupt", "io-exit"],
    about: "a request of a masked line stays in the request register until the line is unmasked",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU has no test device");
        }
        prepare_pic();
        drive(LINE, 1);
        open();
        check_eq!(taken(), 0, "count of interrupts while masked");
        check!(pic::requested(LINE), "request while masked");
        pic::unmask(LINE);
        check!(open_until_taken(), "interrupt delivered after unmasking");
        drive(LINE, 0);
        pic::mask_all();
        apic::disable();
    }
}

case! {
    name: "ioapic_registers", cpl: [0], rules: [], needs: ["mmio-exit"],
    about: "the I/O APIC has 24 pins, and redirection entries read back",
    fn body(_ctx) {
        let version = ioapic::read(ioapic::VERSION);
        check_eq!(version >> 16 & 0xff, 23, "number of the last pin");
        let entry = 0x01_u64 << 56 | MASKED | LEVEL | ACTIVE_LOW | 0x71;
        ioapic::set_entry(HIGH_LINE, entry);
        check_eq!(ioapic::entry(HIGH_LINE), entry, "entry");
        ioapic::set_entry(HIGH_LINE, MASKED);
        check_eq!(ioapic::entry(HIGH_LINE), MASKED, "masked entry");
    }
}

case! {
    name: "ioapic_edge", cpl: [0], rules: [], needs: ["interrupt", "mmio-exit"],
    about: "an edge pin raises one interrupt for each rising edge",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU has no test device");
        }
        prepare_ioapic(count_apic, 0);
        drive(HIGH_LINE, 1);
        check!(open_until_taken(), "interrupt delivered");
        open();
        check_eq!(taken(), 1, "count of interrupts while the line stays high");
        drive(HIGH_LINE, 0);
        drive(HIGH_LINE, 1);
        open();
        check_eq!(taken(), 2, "count of interrupts after the next edge");
        drive(HIGH_LINE, 0);
        ioapic::set_entry(HIGH_LINE, MASKED);
        apic::disable();
    }
}

case! {
    name: "ioapic_level", cpl: [0], rules: [], needs: ["interrupt", "mmio-exit"],
    about: "a level-triggered pin interrupts until the line falls; remote IRR is set until the EOI",
    fn body(ctx) {
        fn stay_asserted(_: &mut TrapFrame) {
            // At the third interrupt the device is served.
            if TAKEN.fetch_add(1, Ordering::AcqRel) == 2 {
                drive(HIGH_LINE, 0);
            }
            apic::eoi();
        }
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU has no test device");
        }
        prepare_ioapic(serve_level, LEVEL);
        drive(HIGH_LINE, 1);
        check_eq!(ioapic::entry(HIGH_LINE) & REMOTE_IRR, REMOTE_IRR, "remote IRR while pending");
        check!(open_until_taken(), "interrupt delivered");
        open();
        check_eq!(taken(), 1, "count of interrupts, device served");
        check_eq!(ioapic::entry(HIGH_LINE) & REMOTE_IRR, 0, "remote IRR after the EOI");
        prepare_ioapic(stay_asserted, LEVEL);
        drive(HIGH_LINE, 1);
        insn::sti();
        wait_until(500, || taken() >= 3);
        insn::cli();
        open();
        check_eq!(taken(), 3, "count of interrupts, one after each EOI while the line is high");
        ioapic::set_entry(HIGH_LINE, MASKED);
        apic::disable();
    }
}

case! {
    name: "ioapic_masked", cpl: [0], rules: [], needs: ["interrupt", "mmio-exit"],
    about: "a request of a masked level-triggered pin is delivered when the pin is unmasked",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU has no test device");
        }
        prepare_ioapic(serve_level, LEVEL | MASKED);
        drive(HIGH_LINE, 1);
        open();
        check_eq!(taken(), 0, "count of interrupts while masked");
        ioapic::set_entry(HIGH_LINE, u64::from(VECTOR) | LEVEL);
        check!(open_until_taken(), "interrupt delivered after unmasking");
        ioapic::set_entry(HIGH_LINE, MASKED);
        apic::disable();
    }
}
