//! INIT and branch recording.
//!
//! A second CPU writes the MSRs, gets INIT, starts again, and reports what the MSRs hold.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::prelude::*;
use hindsight_guest::regs::msr as reg;
use hindsight_guest::{msr, smp};
use hindsight_payloads::branch::{BTF, BTINT, BTS, BTS_OFF_OS, BTS_OFF_USR, TR, other_bits};
use hindsight_payloads::ds::{self, DsPages};
use hindsight_payloads::{need_bts, need_lbr};

payload!("branch_init");

static PAGES: DsPages = DsPages::new();

/// MSRs that INIT does not change, each with a value of its own.
const UNCHANGED: [(u32, u64); 9] = [
    (reg::MSR_LASTBRANCH_0_FROM_IP, 0x1111_1111),
    (reg::MSR_LASTBRANCH_0_FROM_IP + 31, 0xffff_8000_2222_2222),
    (reg::MSR_LASTBRANCH_0_TO_IP, 0x3333_3333),
    (reg::MSR_LASTBRANCH_0_TO_IP + 31, 0x7fff_4444_4444),
    (reg::MSR_LBR_INFO_0 + 13, 0x8000_0000_0000_5555),
    (reg::MSR_LASTBRANCH_TOS, 21),
    (reg::MSR_LBR_SELECT, 0x155),
    (reg::MSR_LER_FROM_LIP, 0x6666_6666),
    (reg::MSR_LER_TO_LIP, 0x7777_7777),
];

static FOUND: [AtomicU64; UNCHANGED.len()] = [const { AtomicU64::new(0) }; UNCHANGED.len()];
static FOUND_DEBUGCTL: AtomicU64 = AtomicU64::new(0);
static FOUND_AREA: AtomicU64 = AtomicU64::new(0);

fn prepare(_index: usize) {
    for (index, value) in UNCHANGED {
        msr::write(index, value);
    }
    // LBR stays clear, because recorded branches would overwrite the entries.
    let bts = TR | BTINT | BTS_OFF_OS | BTS_OFF_USR;
    let bts = if ds::present() { bts } else { 0 };
    msr::write(reg::IA32_DEBUGCTL, BTF | bts | other_bits());
}

fn report(_index: usize) {
    for ((index, _), found) in UNCHANGED.iter().zip(&FOUND) {
        found.store(msr::read(*index), Ordering::Release);
    }
    FOUND_DEBUGCTL.store(msr::read(reg::IA32_DEBUGCTL), Ordering::Release);
    if ds::present() {
        FOUND_AREA.store(msr::read(reg::IA32_DS_AREA), Ordering::Release);
    }
}

/// Runs `work` on the second CPU and waits for its end.
fn run_on_second(work: smp::CpuWork) {
    smp::run(1, work);
    smp::wait(1);
}

case! {
    name: "registers", cpl: [0],
    rules: ["DCTL-11", "LBR-31", "LSEL-08", "LER-05", "RST-06", "RST-07", "OP-24"], needs: [],
    vcpus: 2, timeout_ms: 10000,
    about: "INIT clears IA32_DEBUGCTL and keeps the LBR stack, its filter and LER",
    fn body(ctx) {
        need_lbr!(ctx);
        require!(smp::start(2), "the second CPU started");
        run_on_second(prepare);
        run_on_second(report);
        check!(FOUND_DEBUGCTL.load(Ordering::Acquire) != 0, "IA32_DEBUGCTL before INIT");
        require!(smp::restart(1), "the second CPU started again");
        run_on_second(report);
        check_eq!(FOUND_DEBUGCTL.load(Ordering::Acquire), 0, "IA32_DEBUGCTL after INIT");
        for ((index, value), found) in UNCHANGED.iter().zip(&FOUND) {
            check_eq!((*index, found.load(Ordering::Acquire)), (*index, *value), "MSR after INIT");
        }
    }
}

fn trace(_index: usize) {
    msr::write(reg::IA32_DS_AREA, PAGES.area_address());
    msr::write(reg::IA32_DEBUGCTL, TR | BTS);
}

case! {
    name: "debug_store", cpl: [0], rules: ["DS-12", "RST-09", "DCTL-11", "OP-24"], needs: [],
    vcpus: 2, timeout_ms: 10000,
    about: "INIT ends BTS and keeps IA32_DS_AREA",
    fn body(ctx) {
        need_bts!(ctx);
        require!(smp::start(2), "the second CPU started");
        let area = PAGES.arm(300);
        run_on_second(trace);
        // The branches of the second CPU are stored until it halts.
        require!(smp::restart(1), "the second CPU started again");
        let stored = PAGES.area();
        check!(stored.index != area.base, "records stored before INIT");
        run_on_second(report);
        check!(PAGES.area() == stored, "no records stored after INIT");
        check_eq!(FOUND_AREA.load(Ordering::Acquire), PAGES.area_address(), "IA32_DS_AREA");
    }
}
