//! The local APIC of one CPU: identity, priorities, self-IPIs, errors, x2APIC mode.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::apic::{self, read, write};
use hindsight_guest::exception::TrapFrame;
use hindsight_guest::insn;
use hindsight_guest::msr::{self, GP, MsrFault};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{
    ApicBase, ApicRegister, ESR_ILLEGAL_REGISTER, ESR_SEND_ILLEGAL_VECTOR, ICR_ASSERT, ICR_SELF,
    LVT_MASKED,
};
use hindsight_guest::regs::msr::IA32_APIC_BASE;
use hindsight_guest::trap;
use hindsight_payloads::clock::wait_until;

payload!("apic");

const LOW: u8 = 0x51;
const HIGH: u8 = 0x91;

/// Vectors delivered, the latest in the low byte.
static ORDER: AtomicU64 = AtomicU64::new(0);

fn record_vector(frame: &mut TrapFrame) {
    let order = ORDER.load(Ordering::Acquire);
    ORDER.store(order << 8 | frame.vector, Ordering::Release);
    apic::eoi();
}

fn order() -> u64 {
    ORDER.load(Ordering::Acquire)
}

fn prepare() {
    ORDER.store(0, Ordering::Release);
    trap::set_handler(LOW, record_vector);
    trap::set_handler(HIGH, record_vector);
    apic::enable();
}

fn send_self(vector: u8) {
    apic::send(0, ICR_SELF | ICR_ASSERT | u32::from(vector));
}

/// Enables interrupts until `condition` holds; returns false if it does not within 500 ms.
fn open_until(condition: impl Fn() -> bool) -> bool {
    insn::sti();
    let holds = wait_until(500, condition);
    insn::cli();
    holds
}

case! {
    name: "identity", cpl: [0], rules: [], needs: [],
    about: "base address, version and ID",
    fn body(_ctx) {
        check_eq!(msr::read(IA32_APIC_BASE), 0xfee0_0900, "IA32_APIC_BASE");
        let version = read(ApicRegister::VERSION);
        check_eq!(version & 0xf0, 0x10, "version of an integrated APIC");
        check!(version >> 16 & 0xff >= 5, "at least six LVT entries");
        check_eq!(apic::id(), 0, "APIC ID of the bootstrap processor");
    }
}

case! {
    name: "task_priority", cpl: [0], rules: [], needs: [],
    about: "TPR and CR8 are one register, and PPR follows it",
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
    about: "a self-IPI is delivered at each level",
    fn body(ctx) {
        prepare();
        send_self(LOW);
        insn::sti();
        let fault = ctx.run(|| { wait_until(500, || order() != 0); });
        insn::cli();
        check!(fault.is_none(), "no exception");
        check_eq!(order(), u64::from(LOW), "vector delivered");
    }
}

case! {
    name: "pending_and_in_service", cpl: [0], rules: [], needs: ["interrupt"],
    about: "a vector is in IRR until it is delivered, then in ISR until EOI",
    fn body(_ctx) {
        fn record_registers(frame: &mut TrapFrame) {
            let vector = (frame.vector & 0xff) as u8;
            let bits = u64::from(apic::has_vector(ApicRegister::ISR, vector))
                | u64::from(apic::has_vector(ApicRegister::IRR, vector)) << 1;
            ORDER.store(bits | 0x100, Ordering::Release);
            apic::eoi();
        }
        prepare();
        trap::set_handler(LOW, record_registers);
        send_self(LOW);
        check!(apic::has_vector(ApicRegister::IRR, LOW), "in IRR before");
        check!(open_until(|| order() != 0), "interrupt delivered");
        check_eq!(order(), 0x101, "in ISR and not in IRR in the handler");
        check!(!apic::has_vector(ApicRegister::ISR, LOW), "not in ISR after EOI");
    }
}

case! {
    name: "priority_order", cpl: [0], rules: [], needs: ["interrupt"],
    about: "of two pending interrupts, the higher vector is delivered first",
    fn body(_ctx) {
        prepare();
        send_self(LOW);
        send_self(HIGH);
        check!(open_until(|| order() > 0xff), "both delivered");
        check_eq!(order(), u64::from(HIGH) << 8 | u64::from(LOW), "order");
    }
}

/// Checks that TPR holds the lower of two interrupts back until `lower` lowers TPR.
fn held_back_until(lower: fn()) {
    prepare();
    write(ApicRegister::TPR, u32::from(LOW & 0xf0));
    send_self(LOW);
    send_self(HIGH);
    check!(open_until(|| order() != 0), "the higher vector delivered");
    check_eq!(order(), u64::from(HIGH), "only the higher vector");
    lower();
    check!(open_until(|| order() > 0xff), "the lower vector delivered");
    check_eq!(order(), u64::from(HIGH) << 8 | u64::from(LOW), "order");
}

case! {
    name: "priority_threshold", cpl: [0], rules: [], needs: ["interrupt"],
    about: "TPR holds back interrupts of its priority class and below; a lower TPR lets them through",
    fn body(_ctx) {
        held_back_until(|| write(ApicRegister::TPR, 0));
    }
}

// A host that does not exit when CR8 falls does not exit when the interrupt window opens either.
case! {
    name: "priority_threshold_cr8", cpl: [0], rules: [], needs: ["interrupt", "irq-window-cpl0"],
    about: "the same with CR8, a write of which need not exit",
    fn body(_ctx) {
        held_back_until(|| insn::write_cr8(0));
    }
}

case! {
    name: "software_disable", cpl: [0], rules: [], needs: [],
    about: "clearing the enable bit of SVR masks the LVT entries, which then cannot be unmasked",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG leaves the LVT entries unmasked");
        }
        apic::enable();
        write(ApicRegister::LVT_TIMER, u32::from(LOW));
        write(ApicRegister::SVR, 0xff);
        check_eq!(read(ApicRegister::LVT_TIMER), LVT_MASKED | u32::from(LOW), "LVT timer entry");
        write(ApicRegister::LVT_TIMER, u32::from(LOW));
        check_eq!(read(ApicRegister::LVT_TIMER) & LVT_MASKED, LVT_MASKED, "LVT timer entry after a write that unmasks it");
        apic::enable();
        write(ApicRegister::LVT_TIMER, LVT_MASKED);
    }
}

case! {
    name: "illegal_vector", cpl: [0], rules: [], needs: [],
    about: "sending vector 5 sets a bit of ESR, which a write makes readable",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG does not detect illegal vectors");
        }
        apic::enable();
        write(ApicRegister::LVT_ERROR, LVT_MASKED);
        write(ApicRegister::ESR, 0);
        write(ApicRegister::ESR, 0);
        check_eq!(read(ApicRegister::ESR), 0, "ESR at first");
        send_self(5);
        write(ApicRegister::ESR, 0);
        check_eq!(read(ApicRegister::ESR), ESR_SEND_ILLEGAL_VECTOR, "ESR after sending");
        write(ApicRegister::ESR, 0);
        check_eq!(read(ApicRegister::ESR), 0, "ESR after the next write");
    }
}

case! {
    name: "illegal_register", cpl: [0], rules: [], needs: [],
    about: "an access to a reserved register sets a bit of ESR",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG sets ESR without a write");
        }
        apic::enable();
        write(ApicRegister::LVT_ERROR, LVT_MASKED);
        write(ApicRegister::ESR, 0);
        write(ApicRegister::ESR, 0);
        read(ApicRegister(0x040));
        write(ApicRegister::ESR, 0);
        check_eq!(read(ApicRegister::ESR), ESR_ILLEGAL_REGISTER, "ESR after the read");
        write(ApicRegister::ESR, 0);
    }
}

case! {
    name: "lvt_performance", cpl: [0], rules: ["RST-11"], needs: [],
    about: "the LVT entry of the performance counters is masked after RESET and keeps its fields",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "the firmware has changed it");
        }
        check_eq!(read(ApicRegister::LVT_PMC), LVT_MASKED, "LVT entry after RESET");
        apic::enable();
        write(ApicRegister::LVT_PMC, LVT_MASKED | 0x4ef);
        check_eq!(read(ApicRegister::LVT_PMC), LVT_MASKED | 0x4ef, "LVT entry: NMI, masked");
        write(ApicRegister::LVT_PMC, LVT_MASKED);
    }
}

case! {
    name: "x2apic", cpl: [0], rules: ["CPU-03"], needs: ["msr-exit", "interrupt"],
    about: "the switch to x2APIC mode, interrupts in it, and the switch back",
    fn body(ctx) {
        need_feature!(ctx, X2APIC);
        prepare();
        let version = read(ApicRegister::VERSION);
        apic::enter_x2apic();
        check_eq!(msr::read(IA32_APIC_BASE), 0xfee0_0d00, "IA32_APIC_BASE");
        check_eq!(apic::id(), 0, "APIC ID of 32 bits");
        check_eq!(read(ApicRegister::VERSION), version, "version");
        check_eq!(read(ApicRegister::SVR) & 0x100, 0x100, "enable bit of SVR");
        send_self(LOW);
        check!(open_until(|| order() != 0), "interrupt by ICR delivered");
        write(ApicRegister::SELF_IPI, u32::from(HIGH));
        check!(open_until(|| order() > 0xff), "interrupt by SELF IPI delivered");
        check_eq!(order(), u64::from(LOW) << 8 | u64::from(HIGH), "vectors delivered");
        apic::leave_x2apic();
        check_eq!(msr::read(IA32_APIC_BASE), 0xfee0_0900, "IA32_APIC_BASE afterwards");
        check_eq!(read(ApicRegister::SVR), 0xff, "SVR, which disabling the APIC has reset");
    }
}

case! {
    // Under KVM, KVM computes CPUID.
    name: "disabled", cpl: [0], rules: [], needs: ["guestbp-io"],
    about: "CPUID reports no APIC while IA32_APIC_BASE disables it",
    fn body(_ctx) {
        let reported = || insn::cpuid(1, 0).edx >> 9 & 1;
        check_eq!(reported(), 1, "CPUID, enabled");
        msr::write(IA32_APIC_BASE, 0xfee0_0900 & !ApicBase::EN.bits());
        check_eq!(reported(), 0, "CPUID, disabled");
        msr::write(IA32_APIC_BASE, 0xfee0_0900);
        check_eq!(reported(), 1, "CPUID, enabled again");
    }
}

case! {
    name: "x2apic_refused", cpl: [0], rules: ["MSR-27"], needs: ["msr-exit"],
    about: "illegal mode changes, absent registers and reserved bits raise #GP(0)",
    fn body(ctx) {
        need_feature!(ctx, X2APIC);
        let base = 0xfee0_0900 & !ApicBase::EN.bits();
        check_eq!(msr::read_safe(ApicRegister::ID.x2apic_msr()), Err(GP), "x2APIC register in xAPIC mode");
        check_eq!(msr::write_safe(IA32_APIC_BASE, base | ApicBase::EXTD.bits()), Err(GP), "EXTD without EN");
        apic::enter_x2apic();
        check_eq!(msr::write_safe(IA32_APIC_BASE, 0xfee0_0900), Err(GP), "direct change from x2APIC to xAPIC mode");
        for register in [ApicRegister::DFR, ApicRegister::ICR_HIGH, ApicRegister(0x040), ApicRegister(0x3f0 + 0x10)] {
            check_eq!(msr::read_safe(register.x2apic_msr()), Err(GP), "read of an absent register");
        }
        check_eq!(msr::read_safe(ApicRegister::EOI.x2apic_msr()), Err(GP), "read of EOI");
        check_eq!(msr::read_safe(ApicRegister::SELF_IPI.x2apic_msr()), Err(GP), "read of SELF IPI");
        check_eq!(msr::write_safe(ApicRegister::ID.x2apic_msr(), 0), Err(GP), "write of ID");
        check_eq!(msr::write_safe(ApicRegister::VERSION.x2apic_msr(), 0), Err(GP), "write of the version");
        check_eq!(msr::write_safe(ApicRegister::EOI.x2apic_msr(), 1), Err(GP), "EOI of 1");
        check_eq!(msr::write_safe(ApicRegister::ESR.x2apic_msr(), 1), Err(GP), "ESR of 1");
        check_eq!(msr::write_safe(ApicRegister::TPR.x2apic_msr(), 0x100), Err(GP), "TPR with bit 8");
        let pmc = ApicRegister::LVT_PMC.x2apic_msr();
        check_eq!(msr::write_safe(pmc, 1 << 17), Err(GP), "LVT entry of the counters with bit 17");
        check_eq!(msr::write_safe(pmc, 0x1_04ff), Ok::<(), MsrFault>(()), "legal write of that entry");
        check_eq!(msr::read_safe(pmc), Ok::<u64, MsrFault>(0x1_04ff), "value read back");
        apic::leave_x2apic();
    }
}
