//! The local APIC of one processor: identity, priorities, self-interrupts, errors, x2APIC.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::apic::{self, read, write};
use hindsight_guest::insn;
use hindsight_guest::msr::{self, Fault, GP};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{
    ApicBase, ESR_ILLEGAL_REGISTER, ESR_SEND_ILLEGAL_VECTOR, ICR_ASSERT, ICR_SELF, LVT_MASKED,
    ApicRegister,
};
use hindsight_guest::regs::msr::IA32_APIC_BASE;
use hindsight_guest::trap::{self, Frame};
use hindsight_payloads::clock::wait_until;

payload!("apic");

const LOW: u8 = 0x51;
const HIGH: u8 = 0x91;

/// Vectors taken, the latest in the low byte.
static ORDER: AtomicU64 = AtomicU64::new(0);

fn note_vector(frame: &mut Frame) {
    let order = ORDER.load(Ordering::Acquire);
    ORDER.store(order << 8 | frame.vector, Ordering::Release);
    apic::eoi();
}

fn order() -> u64 {
    ORDER.load(Ordering::Acquire)
}

fn prepare() {
    ORDER.store(0, Ordering::Release);
    trap::set_handler(LOW, note_vector);
    trap::set_handler(HIGH, note_vector);
    apic::enable();
}

fn send_self(vector: u8) {
    apic::send(0, ICR_SELF | ICR_ASSERT | u32::from(vector));
}

/// Lets interrupts in until `condition` holds.
fn take_until(condition: impl Fn() -> bool) -> bool {
    insn::sti();
    let held = wait_until(500, condition);
    insn::cli();
    held
}

case! {
    name: "identity", cpl: [0], rules: [], needs: [],
    about: "base address, version and ID",
    fn body(_ctx) {
        check_eq!(msr::read(IA32_APIC_BASE), 0xfee0_0900, "IA32_APIC_BASE");
        let version = read(ApicRegister::VERSION);
        check_eq!(version & 0xf0, 0x10, "an integrated APIC");
        check!(version >> 16 & 0xff >= 5, "six LVT entries at least");
        check_eq!(apic::id(), 0, "the ID of the bootstrap processor");
    }
}

case! {
    name: "task_priority", cpl: [0], rules: [], needs: [],
    about: "TPR and CR8 are one register, and PPR follows",
    fn body(_ctx) {
        apic::enable();
        write(ApicRegister::TPR, 0x50);
        check_eq!(insn::read_cr8(), 5, "CR8");
        check_eq!(read(ApicRegister::PPR), 0x50, "PPR");
        insn::write_cr8(3);
        check_eq!(read(ApicRegister::TPR), 0x30, "TPR");
        check_eq!(read(ApicRegister::PPR), 0x30, "PPR");
        insn::write_cr8(0);
    }
}

case! {
    name: "self_interrupt", cpl: [0, 3], rules: [], needs: ["interrupt"], needs_cpl3: ["iretq-cpl3"],
    about: "an interrupt to oneself is taken, at each level",
    fn body(ctx) {
        prepare();
        send_self(LOW);
        insn::sti();
        let fault = ctx.run(|| { wait_until(500, || order() != 0); });
        insn::cli();
        check!(fault.is_none(), "no exception");
        check_eq!(order(), u64::from(LOW), "the vector taken");
    }
}

case! {
    name: "pending_and_in_service", cpl: [0], rules: [], needs: ["interrupt"],
    about: "a vector is in IRR until it is taken, then in ISR until EOI",
    fn body(_ctx) {
        fn look(frame: &mut Frame) {
            let vector = (frame.vector & 0xff) as u8;
            let seen = u64::from(apic::has_vector(ApicRegister::ISR, vector))
                | u64::from(apic::has_vector(ApicRegister::IRR, vector)) << 1;
            ORDER.store(seen | 0x100, Ordering::Release);
            apic::eoi();
        }
        prepare();
        trap::set_handler(LOW, look);
        send_self(LOW);
        check!(apic::has_vector(ApicRegister::IRR, LOW), "pending before");
        check!(take_until(|| order() != 0), "it is taken");
        check_eq!(order(), 0x101, "in service and not pending in the handler");
        check!(!apic::has_vector(ApicRegister::ISR, LOW), "not in service after EOI");
    }
}

case! {
    name: "priority_order", cpl: [0], rules: [], needs: ["interrupt"],
    about: "of two pending interrupts the higher vector comes first",
    fn body(_ctx) {
        prepare();
        send_self(LOW);
        send_self(HIGH);
        check!(take_until(|| order() > 0xff), "both are taken");
        check_eq!(order(), u64::from(HIGH) << 8 | u64::from(LOW), "in order");
    }
}

/// A higher TPR holds the lower of two interrupts back until `lower` lowers it.
fn held_back_until(lower: fn()) {
    prepare();
    write(ApicRegister::TPR, u32::from(LOW & 0xf0));
    send_self(LOW);
    send_self(HIGH);
    check!(take_until(|| order() != 0), "the higher one is taken");
    check_eq!(order(), u64::from(HIGH), "and only that one");
    lower();
    check!(take_until(|| order() > 0xff), "the lower one follows");
    check_eq!(order(), u64::from(HIGH) << 8 | u64::from(LOW), "in order");
}

case! {
    name: "priority_threshold", cpl: [0], rules: [], needs: ["interrupt"],
    about: "TPR holds interrupts of its class and below back; lowering it lets them in",
    fn body(_ctx) {
        held_back_until(|| write(ApicRegister::TPR, 0));
    }
}

// A host that sends no notice when CR8 falls sends none when its guest opens the window either.
case! {
    name: "priority_threshold_cr8", cpl: [0], rules: [], needs: ["interrupt", "irq-window-cpl0"],
    about: "the same by CR8, which need not exit",
    fn body(_ctx) {
        held_back_until(|| insn::write_cr8(0));
    }
}

case! {
    name: "software_disable", cpl: [0], rules: [], needs: [],
    about: "clearing SVR's enable bit masks the LVT entries, which then stay masked",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG leaves them unmasked");
        }
        apic::enable();
        write(ApicRegister::LVT_TIMER, u32::from(LOW));
        write(ApicRegister::SVR, 0xff);
        check_eq!(read(ApicRegister::LVT_TIMER), LVT_MASKED | u32::from(LOW), "the timer entry");
        write(ApicRegister::LVT_TIMER, u32::from(LOW));
        check_eq!(read(ApicRegister::LVT_TIMER) & LVT_MASKED, LVT_MASKED, "it cannot be unmasked");
        apic::enable();
        write(ApicRegister::LVT_TIMER, LVT_MASKED);
    }
}

case! {
    name: "illegal_vector", cpl: [0], rules: [], needs: [],
    about: "sending vector 5 sets a bit of ESR, which reads after a write",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG does not detect it");
        }
        apic::enable();
        write(ApicRegister::LVT_ERROR, LVT_MASKED);
        write(ApicRegister::ESR, 0);
        write(ApicRegister::ESR, 0);
        check_eq!(read(ApicRegister::ESR), 0, "no error at first");
        send_self(5);
        write(ApicRegister::ESR, 0);
        check_eq!(read(ApicRegister::ESR), ESR_SEND_ILLEGAL_VECTOR, "after sending");
        write(ApicRegister::ESR, 0);
        check_eq!(read(ApicRegister::ESR), 0, "cleared by the next write");
    }
}

case! {
    name: "illegal_register", cpl: [0], rules: [], needs: [],
    about: "an access to a reserved register sets a bit of ESR",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG reports it at once");
        }
        apic::enable();
        write(ApicRegister::LVT_ERROR, LVT_MASKED);
        write(ApicRegister::ESR, 0);
        write(ApicRegister::ESR, 0);
        read(ApicRegister(0x040));
        write(ApicRegister::ESR, 0);
        check_eq!(read(ApicRegister::ESR), ESR_ILLEGAL_REGISTER, "after the read");
        write(ApicRegister::ESR, 0);
    }
}

case! {
    name: "lvt_performance", cpl: [0], rules: ["RST-11"], needs: [],
    about: "the LVT entry of the counters is masked after reset, and keeps its fields",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "firmware ran before");
        }
        check_eq!(read(ApicRegister::LVT_PMC), LVT_MASKED, "after reset");
        apic::enable();
        write(ApicRegister::LVT_PMC, LVT_MASKED | 0x4ef);
        check_eq!(read(ApicRegister::LVT_PMC), LVT_MASKED | 0x4ef, "NMI, masked");
        write(ApicRegister::LVT_PMC, LVT_MASKED);
    }
}

case! {
    name: "x2apic", cpl: [0], rules: ["CPU-03"], needs: ["msr-exit", "interrupt"],
    about: "the switch to x2APIC mode, interrupts there, and the way back",
    fn body(ctx) {
        need_feature!(ctx, X2APIC);
        prepare();
        let version = read(ApicRegister::VERSION);
        apic::enter_x2apic();
        check_eq!(msr::read(IA32_APIC_BASE), 0xfee0_0d00, "IA32_APIC_BASE");
        check_eq!(apic::id(), 0, "the ID has 32 bits");
        check_eq!(read(ApicRegister::VERSION), version, "the version");
        check_eq!(read(ApicRegister::SVR) & 0x100, 0x100, "still enabled");
        send_self(LOW);
        check!(take_until(|| order() != 0), "by the ICR, it is taken");
        write(ApicRegister::SELF_IPI, u32::from(HIGH));
        check!(take_until(|| order() > 0xff), "by SELF IPI, it is taken");
        check_eq!(order(), u64::from(LOW) << 8 | u64::from(HIGH), "the vectors");
        apic::leave_x2apic();
        check_eq!(msr::read(IA32_APIC_BASE), 0xfee0_0900, "IA32_APIC_BASE afterwards");
        check_eq!(read(ApicRegister::SVR), 0xff, "disabling reset the APIC");
    }
}

case! {
    // Under KVM, CPUID is KVM's.
    name: "disabled", cpl: [0], rules: [], needs: ["guestbp-io"],
    about: "CPUID shows no APIC while IA32_APIC_BASE disables it",
    fn body(_ctx) {
        let shown = || insn::cpuid(1, 0).edx >> 9 & 1;
        check_eq!(shown(), 1, "enabled");
        msr::write(IA32_APIC_BASE, 0xfee0_0900 & !ApicBase::EN.bits());
        check_eq!(shown(), 0, "disabled");
        msr::write(IA32_APIC_BASE, 0xfee0_0900);
        check_eq!(shown(), 1, "enabled again");
    }
}

case! {
    name: "x2apic_refused", cpl: [0], rules: ["MSR-27"], needs: ["msr-exit"],
    about: "illegal mode changes, absent registers and reserved bits raise #GP(0)",
    fn body(ctx) {
        need_feature!(ctx, X2APIC);
        let base = 0xfee0_0900 & !ApicBase::EN.bits();
        check_eq!(msr::read_safe(ApicRegister::ID.x2apic_msr()), Err(GP), "registers in xAPIC mode");
        check_eq!(msr::write_safe(IA32_APIC_BASE, base | ApicBase::EXTD.bits()), Err(GP), "EXTD without EN");
        apic::enter_x2apic();
        check_eq!(msr::write_safe(IA32_APIC_BASE, 0xfee0_0900), Err(GP), "from x2APIC to xAPIC");
        for register in [ApicRegister::DFR, ApicRegister::ICR_HIGH, ApicRegister(0x040), ApicRegister(0x3f0 + 0x10)] {
            check_eq!(msr::read_safe(register.x2apic_msr()), Err(GP), "read of an absent register");
        }
        check_eq!(msr::read_safe(ApicRegister::EOI.x2apic_msr()), Err(GP), "read of EOI");
        check_eq!(msr::read_safe(ApicRegister::SELF_IPI.x2apic_msr()), Err(GP), "read of SELF IPI");
        check_eq!(msr::write_safe(ApicRegister::ID.x2apic_msr(), 0), Err(GP), "write of ID");
        check_eq!(msr::write_safe(ApicRegister::VERSION.x2apic_msr(), 0), Err(GP), "write of the version");
        check_eq!(msr::write_safe(ApicRegister::EOI.x2apic_msr(), 1), Err(GP), "EOI of 1");
        check_eq!(msr::write_safe(ApicRegister::ESR.x2apic_msr(), 1), Err(GP), "ESR of 1");
        check_eq!(msr::write_safe(ApicRegister::TPR.x2apic_msr(), 0x100), Err(GP), "TPR, bit 8");
        let pmc = ApicRegister::LVT_PMC.x2apic_msr();
        check_eq!(msr::write_safe(pmc, 1 << 17), Err(GP), "LVT entry of the counters, bit 17");
        check_eq!(msr::write_safe(pmc, 0x1_04ff), Ok::<(), Fault>(()), "the same, legal");
        check_eq!(msr::read_safe(pmc), Ok::<u64, Fault>(0x1_04ff), "read back");
        apic::leave_x2apic();
    }
}
