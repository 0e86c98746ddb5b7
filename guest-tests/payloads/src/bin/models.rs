//! Events that a branch predictor and caches cause: mispredictions, references and misses, latency.
//!
//! The checks hold for every processor that has both; `hindsight run --models off` models neither.

#![no_std]
#![no_main]

use core::arch::asm;

use hindsight_guest::msr;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::branch::{DebugCtl, LbrInfo};
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::pmu::pebs::{self, record};
use hindsight_payloads::lbr::{self, LbrStack};
use hindsight_payloads::pmu::{self, ON, PebsArea};
use hindsight_payloads::{counted, need_lbr, need_pebs, need_pmu};

payload!("models");

/// Iterations of most loops of this payload.
const ITERATIONS: u64 = 1000;

/// Cache lines that nothing else uses.
#[repr(align(64))]
struct CacheLines([u64; 16]);

/// Runs assembly text while counter 0 counts the event; evaluates to the count.
macro_rules! count {
    ($event:expr, $umask:expr, $($text:literal),* ; $($operands:tt)*) => {{
        pmu::select(0, $event, $umask, ON);
        pmu::set(0, 0);
        counted!(1, $($text),* ; $($operands)*);
        pmu::get(0)
    }};
}

/// Counts an event in a loop with a branch that a random number generator in R8 decides.
macro_rules! count_random_branch {
    ($event:expr, $umask:expr) => {
        count!($event, $umask,
            "mov r9d, 1000", "mov r8d, 1",
            "2: imul r8d, r8d, 1664525", "add r8d, 1013904223",
            "test r8d, r8d", "js 3f", "nop", "3: sub r9d, 1", "jnz 2b";
            out("r8") _, out("r9") _)
    };
}

case! {
    name: "chance_is_mispredicted", cpl: [0], rules: ["EVT-07"], needs: [],
    about: "a branch that a random number decides is mispredicted about every second time, \
        a loop branch almost never",
    fn body(ctx) {
        need_pmu!(ctx);
        for umask in [0x00, 0x01, 0x04] {
            let random = count_random_branch!(0xc5, umask);
            let quarter = ITERATIONS / 4;
            check!((quarter..quarter * 3).contains(&random), "mispredictions of random branches");
            let steady = count!(0xc5, umask, "mov r8d, 1000", "2: sub r8d, 1", "jnz 2b";
                out("r8") _);
            check!(steady < ITERATIONS / 20, "mispredictions of loop branches");
        }
        let calls = count!(0xc5, 0x02, "mov r8d, 1000", "2: call 3f", "sub r8d, 1", "jnz 2b", "jmp 4f",
            "3: ret", "4:"; out("r8") _);
        check!(calls < ITERATIONS / 20, "mispredictions of direct calls");
        pmu::reset();
    }
}

case! {
    name: "mispredicted_records", cpl: [0], rules: ["PEBS-17", "PEBS-18"], needs: [],
    about: "PEBS on C5H records the branch that a random number decides",
    fn body(ctx) {
        need_pebs!(ctx);
        let ds = PebsArea::new(16, 16, [50_u64.wrapping_neg(); 4]);
        // By then the predictor has learnt the branch of the loop.
        pmu::preset(0, 5000);
        pmu::select(0, 0xc5, 1, ON);
        msr::write(reg::IA32_PEBS_ENABLE, 1);
        let branch: u64;
        counted!(1,
            "mov r9d, 20000", "mov r8d, 1",
            "2: imul r8d, r8d, 1664525", "add r8d, 1013904223",
            "test r8d, r8d", "5: js 3f", "nop", "3: sub r9d, 1", "jnz 2b", "lea r10, [rip + 5b]";
            out("r8") _, out("r9") _, out("r10") branch);
        require!(ds.count() >= 8, "count of records");
        let eventing_rip = |n: &usize| ds.record(*n, record::EVENTING_RIP);
        let at_branch = (0..8).filter(|n| eventing_rip(n) == branch).count();
        // Random outcomes in the history cause some mispredictions of the loop branch too.
        check!(at_branch > 4, "records of the random branch");
        pmu::reset();
        msr::write(reg::IA32_DS_AREA, 0);
    }
}

case! {
    name: "mispred_in_the_lbr", cpl: [0], rules: ["LBR-22", "LBR-23", "OP-43"], needs: [],
    about: "INFO.MISPRED marks random branches and hardly any loop branches; mispredicted ones \
        took longer",
    fn body(ctx) {
        need_lbr!(ctx);
        let is_mispredicted = |info: u64| info & LbrInfo::MISPRED.bits() != 0;
        let mispredicted =
            |stack: &LbrStack| stack.info.iter().filter(|&&info| is_mispredicted(info)).count();
        LbrStack::EMPTY.write();
        msr::write(reg::IA32_DEBUGCTL, DebugCtl::LBR.bits());
        // SAFETY: the instructions access only registers.
        unsafe {
            asm!("mov r8d, 1000", "2: sub r8d, 1", "jnz 2b", out("r8") _);
        }
        msr::write(reg::IA32_DEBUGCTL, 0);
        let steady = LbrStack::read();
        LbrStack::EMPTY.write();
        msr::write(reg::IA32_DEBUGCTL, DebugCtl::LBR.bits());
        // SAFETY: the instructions access only registers.
        unsafe {
            asm!(
                "mov r9d, 1000", "mov r8d, 1",
                "2: imul r8d, r8d, 1664525", "add r8d, 1013904223",
                "test r8d, r8d", "js 3f", "nop", "3: sub r9d, 1", "jnz 2b",
                out("r8") _, out("r9") _
            );
        }
        msr::write(reg::IA32_DEBUGCTL, 0);
        let random = LbrStack::read();
        check!(mispredicted(&steady) <= 2, "mispredicted loop branches");
        check!(mispredicted(&random) >= 3, "mispredicted random branches");
        for n in 0..lbr::ENTRIES {
            let cycles = random.info[n] & 0xffff;
            check!(!is_mispredicted(random.info[n]) || cycles > 4, "cycles of a misprediction");
        }
    }
}

case! {
    name: "flushed_lines_miss", cpl: [0], rules: ["EVT-08"], needs: [], timeout_ms: 10000,
    about: "each load of a flushed line misses the last-level cache; repeated loads of a line hit \
        the first level",
    fn body(ctx) {
        need_pmu!(ctx);
        let lines = CacheLines([0; 16]);
        let events = [(0x2e, 0x41), (0x2e, 0x4f), (0xd1, 0x20), (0xd1, 0x10), (0xd1, 0x08)];
        for (event, umask) in events {
            let misses = count!(event, umask,
                "mov r8d, 200", "2: clflush [r9]", "mfence", "mov r10, [r9]", "sub r8d, 1", "jnz 2b";
                in("r9") lines.0.as_ptr(), out("r8") _, out("r10") _);
            check!((200..220).contains(&misses), "count of misses");
        }
        let hits = count!(0xd1, 0x01, "mov r8d, 1000", "2: mov r10, [r9]", "sub r8d, 1", "jnz 2b";
            in("r9") lines.0.as_ptr(), out("r8") _, out("r10") _);
        check!((ITERATIONS - 10..=ITERATIONS).contains(&hits), "count of hits");
        pmu::reset();
    }
}

case! {
    name: "splits_and_locks", cpl: [0], rules: ["EVT-12", "PEBS-17", "PEBS-18"], needs: [],
    about: "D0H/21H, 22H, 41H and 42H count locked and split loads and stores",
    fn body(ctx) {
        need_pmu!(ctx);
        let mut lines = CacheLines([0; 16]);
        for (umask, expected) in [(0x21, 5), (0x22, 5), (0x41, 10), (0x42, 20)] {
            let count = count!(0xd0, umask,
                ".rept 5", "lock inc qword ptr [r9]", ".endr",
                ".rept 10", "mov r8, [r9 + 60]", "mov r8, [r9 + 56]", ".endr",
                ".rept 20", "mov [r9 + 60], r8", "mov [r9 + 56], r8", ".endr";
                in("r9") lines.0.as_mut_ptr(), out("r8") _);
            check_eq!(count, expected, "count of locked or split accesses");
        }
        pmu::reset();
    }
}

case! {
    name: "load_latency", cpl: [0], rules: ["PEBS-17", "PEBS-18", "PEBS-19", "PEBS-32"], needs: [],
    about: "CDH/01H records only slow loads, with address, data source and latency",
    fn body(ctx) {
        need_pebs!(ctx);
        const THRESHOLD: u64 = 100;
        let lines = CacheLines([0; 16]);
        let flushed = lines.0.as_ptr();
        let cached = flushed.wrapping_add(8);
        let ds = PebsArea::new(16, 16, [1_u64.wrapping_neg(); 4]);
        msr::write(reg::MSR_PEBS_LD_LAT_THRESHOLD, THRESHOLD);
        pmu::preset(0, 1);
        pmu::select(0, 0xcd, 1, ON);
        msr::write(reg::IA32_PEBS_ENABLE, 1 | 1 << pebs::LOAD_LATENCY);
        counted!(1, "mov r8, [r10]", "mov r8d, 40",
            "2: clflush [r9]", "mfence", "mov r11, [r9]", "mov r11, [r10]", "sub r8d, 1", "jnz 2b";
            in("r9") flushed, in("r10") cached, out("r8") _, out("r11") _);
        require!(ds.count() >= 8, "count of records");
        for n in 1..8 {
            check_eq!(ds.record(n, record::ADDRESS), flushed.addr() as u64, "data address");
            check!(ds.record(n, record::LATENCY) > THRESHOLD, "latency");
            let source = ds.record(n, record::SOURCE) & 0xf;
            check!((8..=0xd).contains(&source), "data source");
        }
        msr::write(reg::MSR_PEBS_LD_LAT_THRESHOLD, 0);
        pmu::reset();
        msr::write(reg::IA32_DS_AREA, 0);
    }
}

case! {
    name: "data_addresses", cpl: [0], rules: ["PEBS-17", "PEBS-18", "PEBS-19"], needs: [],
    about: "records of D0H and D1H hold the linear address of the load or store",
    fn body(ctx) {
        need_pebs!(ctx);
        let mut lines = CacheLines([0; 16]);
        let data = lines.0.as_mut_ptr();
        for (event, umask, offset) in [(0xd0, 0x81, 16), (0xd0, 0x82, 24), (0xd1, 0x01, 16)] {
            let ds = PebsArea::new(4, 4, [1000_u64.wrapping_neg(); 4]);
            pmu::preset(0, 5);
            pmu::select(0, event, umask, ON);
            msr::write(reg::IA32_PEBS_ENABLE, 1);
            counted!(1, ".rept 20", "mov r8, [r9 + 16]", "mov [r9 + 24], r8", ".endr";
                in("r9") data, out("r8") _);
            require_eq!(ds.count(), 1, "count of records");
            check_eq!(ds.record(0, record::ADDRESS), data.addr() as u64 + offset, "data address");
            check_eq!(ds.record(0, record::SOURCE) & 0xf, 1, "data source: first level");
            pmu::reset();
        }
        msr::write(reg::IA32_DS_AREA, 0);
    }
}

case! {
    name: "conditional_overflow_is_exact", cpl: [0], rules: ["EVT-06", "OVF-05", "OVF-06"], needs: [],
    about: "as rr uses it: C4H/01H overflows exactly at the expected branch, with and without VM \
        exits before it",
    fn body(ctx) {
        need_pmu!(ctx);
        for (branches, exits) in [(3_u64, false), (100, false), (3, true), (100, true)] {
            pmu::unmask_pmi(true);
            pmu::preset(0, branches);
            pmu::select(0, 0xc4, 1, ON | pmu::INT);
            let port = if exits { 0xed_u64 } else { 0 };
            let (left, first, third): (u64, u64, u64);
            counted!(1, "mov r8d, 500",
                "2: test r10d, r10d", "jz 3f", "mov edx, r10d", "in al, dx",
                "3: sub r8d, 1", "jnz 2b", "lea r9, [rip + 2b]", "lea r11, [rip + 3b]";
                in("r10") port, out("r8") left, out("r9") first, out("r11") third);
            let pmi = pmu::pmi_state();
            check_eq!(left, 0, "loop counter at the end");
            check_eq!(pmi.taken, 1, "count of interrupts");
            // An iteration has two conditional branches: an odd count ends at the first.
            let expected = match (branches % 2 != 0, exits) {
                (true, false) => third,
                (true, true) => first + 5,
                (false, _) => first,
            };
            check_eq!(pmi.rip, expected, "RIP after the branch");
            pmu::mask_pmi();
            pmu::reset();
            // Without an interrupt: its handler branches as well.
            let all = count!(0xc4, 1, "mov r8d, 500",
                "2: test r10d, r10d", "jz 3f", "mov edx, r10d", "in al, dx",
                "3: sub r8d, 1", "jnz 2b"; in("r10") port, out("r8") _);
            check_eq!(all, 1000, "count of conditional branches");
            pmu::reset();
        }
    }
}
