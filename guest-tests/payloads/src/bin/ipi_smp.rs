//! The start of application processors, and interprocessor interrupts (IPIs).

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU32, Ordering};

use hindsight_guest::apic;
use hindsight_guest::exception::TrapFrame;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{
    ApicRegister, ICR_ALL, ICR_ASSERT, ICR_LOGICAL, ICR_NMI, ICR_OTHERS, ICR_SELF,
};
use hindsight_guest::trap;
use hindsight_guest::{insn, smp};

payload!("ipi_smp");

const VECTOR: u8 = 0x61;

static IDS: AtomicU32 = AtomicU32::new(0);
static TAKEN: [AtomicU32; 64] = [const { AtomicU32::new(0) }; 64];
static READY: AtomicU32 = AtomicU32::new(0);

fn count(_: &mut TrapFrame) {
    let index = hindsight_guest::cpu::current().index;
    TAKEN[index].fetch_add(1, Ordering::AcqRel);
    apic::eoi();
}

fn count_nmi(_: &mut TrapFrame) {
    let index = hindsight_guest::cpu::current().index;
    TAKEN[index].fetch_add(1, Ordering::AcqRel);
}

fn report_id(_: usize) {
    IDS.fetch_or(1 << apic::id(), Ordering::AcqRel);
}

/// Waits with interrupts enabled until one was delivered.
fn receive(index: usize) {
    READY.fetch_add(1, Ordering::AcqRel);
    while TAKEN[index].load(Ordering::Acquire) == 0 {
        insn::sti_hlt();
        insn::cli();
    }
}

fn start_receivers(cpus: usize) {
    TAKEN
        .iter()
        .for_each(|taken| taken.store(0, Ordering::Release));
    READY.store(0, Ordering::Release);
    (1..cpus).for_each(|index| smp::run(index, receive));
    while (READY.load(Ordering::Acquire) as usize) < cpus - 1 {
        insn::pause();
    }
}

fn wait_receivers(cpus: usize) {
    (1..cpus).for_each(smp::wait);
}

fn taken(index: usize) -> u32 {
    TAKEN[index].load(Ordering::Acquire)
}

fn all_start(cpus: usize) {
    require!(smp::start(cpus), "every CPU started after INIT and SIPI");
    IDS.store(0, Ordering::Release);
    report_id(0);
    smp::run_all(cpus, report_id);
    let expected = if cpus == 32 {
        u32::MAX
    } else {
        (1 << cpus) - 1
    };
    check_eq!(IDS.load(Ordering::Acquire), expected, "set of APIC IDs");
}

fn broadcast(cpus: usize) {
    require!(smp::start(cpus), "every CPU started");
    trap::set_handler(VECTOR, count);
    start_receivers(cpus);
    apic::send(0, ICR_OTHERS | ICR_ASSERT | u32::from(VECTOR));
    wait_receivers(cpus);
    for index in 1..cpus {
        check_eq!(taken(index), 1, "count of interrupts of another CPU");
    }
    insn::sti();
    insn::pause();
    insn::cli();
    check_eq!(taken(0), 0, "count of interrupts of the sender");
}

case! {
    name: "start_2", cpl: [0], rules: [], needs: [], vcpus: 2, timeout_ms: 5000,
    about: "INIT and SIPI start a second CPU, which has its own APIC ID",
    fn body(_ctx) { all_start(2); }
}

case! {
    name: "start_4", cpl: [0], rules: [], needs: [], vcpus: 4, timeout_ms: 5000,
    about: "INIT and SIPI start four CPUs",
    fn body(_ctx) { all_start(4); }
}

case! {
    name: "start_8", cpl: [0], rules: [], needs: [], vcpus: 8, timeout_ms: 10000,
    about: "INIT and SIPI start eight CPUs",
    fn body(_ctx) { all_start(8); }
}

case! {
    name: "fixed", cpl: [0], rules: [], needs: ["interrupt", "hlt-exit"], vcpus: 2, timeout_ms: 5000,
    about: "a fixed IPI wakes a CPU from HLT",
    fn body(_ctx) {
        require!(smp::start(2), "the second CPU started");
        trap::set_handler(VECTOR, count);
        start_receivers(2);
        apic::send(1, ICR_ASSERT | u32::from(VECTOR));
        wait_receivers(2);
        check_eq!(taken(1), 1, "count of interrupts");
    }
}

case! {
    name: "logical", cpl: [0], rules: [], needs: ["interrupt", "hlt-exit"], vcpus: 2, timeout_ms: 5000,
    about: "a fixed IPI to a logical destination in the flat model is delivered to that CPU only",
    fn body(_ctx) {
        require!(smp::start(2), "the second CPU started");
        trap::set_handler(VECTOR, count);
        smp::run_all(2, |_| {
            apic::write(ApicRegister::DFR, u32::MAX);
            apic::write(ApicRegister::LDR, 0b10 << 24);
        });
        apic::write(ApicRegister::DFR, u32::MAX);
        apic::write(ApicRegister::LDR, 0b01 << 24);
        start_receivers(2);
        apic::send(0b10, ICR_LOGICAL | ICR_ASSERT | u32::from(VECTOR));
        wait_receivers(2);
        check_eq!(taken(1), 1, "count of interrupts of the destination");
        check_eq!(taken(0), 0, "count of interrupts of the sender");
    }
}

case! {
    name: "nmi", cpl: [0], rules: [], needs: ["nmi", "hlt-exit"], vcpus: 2, timeout_ms: 5000,
    about: "an NMI is delivered to a CPU whose interrupts are disabled",
    fn body(_ctx) {
        require!(smp::start(2), "the second CPU started");
        trap::set_handler(2, count_nmi);
        TAKEN[1].store(0, Ordering::Release);
        READY.store(0, Ordering::Release);
        smp::run(1, |index| {
            READY.store(1, Ordering::Release);
            while taken(index) == 0 {
                insn::pause();
            }
        });
        while READY.load(Ordering::Acquire) == 0 {
            insn::pause();
        }
        apic::send(1, ICR_NMI | ICR_ASSERT);
        wait_receivers(2);
        check_eq!(taken(1), 1, "count of NMIs");
    }
}

case! {
    name: "broadcast_2", cpl: [0], rules: [], needs: ["interrupt", "hlt-exit"], vcpus: 2, timeout_ms: 5000,
    about: "the shorthand `all excluding self` with two CPUs",
    fn body(_ctx) { broadcast(2); }
}

case! {
    name: "broadcast_4", cpl: [0], rules: [], needs: ["interrupt", "hlt-exit"], vcpus: 4, timeout_ms: 5000,
    about: "the shorthand `all excluding self` with four CPUs",
    fn body(_ctx) { broadcast(4); }
}

case! {
    name: "broadcast_8", cpl: [0], rules: [], needs: ["interrupt", "hlt-exit"], vcpus: 8, timeout_ms: 10000,
    about: "the shorthand `all excluding self` with eight CPUs",
    fn body(_ctx) { broadcast(8); }
}

case! {
    name: "all_and_self", cpl: [0], rules: [], needs: ["interrupt", "hlt-exit"], vcpus: 2, timeout_ms: 5000,
    about: "the shorthands `all including self` and `self`",
    fn body(_ctx) {
        require!(smp::start(2), "the second CPU started");
        trap::set_handler(VECTOR, count);
        start_receivers(2);
        apic::send(0, ICR_ALL | ICR_ASSERT | u32::from(VECTOR));
        wait_receivers(2);
        insn::sti();
        while taken(0) == 0 {
            insn::pause();
        }
        check_eq!((taken(0), taken(1)), (1, 1), "count of interrupts of each CPU");
        apic::send(0, ICR_SELF | ICR_ASSERT | u32::from(VECTOR));
        while taken(0) == 1 {
            insn::pause();
        }
        insn::cli();
        check_eq!((taken(0), taken(1)), (2, 1), "count of interrupts of each CPU, one more for the sender");
    }
}
