//! Events that a branch predictor and caches make: mispredictions, references and misses, latency.
//! What is asked for holds for any processor that has both; `hindsight run --models off` has none.

#![no_std]
#![no_main]

use core::arch::asm;

use hindsight_guest::msr;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::branch::DebugCtl;
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::pmu::pebs::{self, record};
use hindsight_payloads::lbr::{self, LbrStack};
use hindsight_payloads::pmu::{self, ON, PebsArea};
use hindsight_payloads::{counted, need_lbr, need_pebs, need_pmu};

payload!("models");

/// How often each loop here runs.
const ROUNDS: u64 = 1000;

/// Lines of cache that nothing else uses.
#[repr(align(64))]
struct Lines([u64; 16]);

/// Runs text with C5H, 2EH or another event in counter 0; gives the count.
macro_rules! count {
    ($event:expr, $umask:expr, $($text:literal),* ; $($operands:tt)*) => {{
        pmu::select(0, $event, $umask, ON);
        pmu::set(0, 0);
        counted!(1, $($text),* ; $($operands)*);
        pmu::get(0)
    }};
}

/// The text of a loop with a branch that is taken by chance, by a generator in R8.
macro_rules! coin {
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
    about: "branches without a pattern are mispredicted about every second time, those of a loop hardly ever",
    fn body(ctx) {
        need_pmu!(ctx);
        for umask in [0x00, 0x01, 0x04] {
            let missed = coin!(0xc5, umask);
            check!((ROUNDS / 4..ROUNDS / 4 * 3).contains(&missed), "mispredicted by chance");
            let missed = count!(0xc5, umask, "mov r8d, 1000", "2: sub r8d, 1", "jnz 2b"; out("r8") _);
            check!(missed < ROUNDS / 20, "mispredicted in a loop");
        }
        let calls = count!(0xc5, 0x02, "mov r8d, 1000", "2: call 3f", "sub r8d, 1", "jnz 2b", "jmp 4f",
            "3: ret", "4:"; out("r8") _);
        check!(calls < ROUNDS / 20, "direct calls");
        pmu::reset();
    }
}

case! {
    name: "mispredicted_records", cpl: [0], rules: ["PEBS-17", "PEBS-18"], needs: [],
    about: "PEBS on C5H records the branch that chance decides",
    fn body(ctx) {
        need_pebs!(ctx);
        let ds = PebsArea::new(16, 16, [50_u64.wrapping_neg(); 4]);
        // Once the branch of the loop has been learnt.
        pmu::preset(0, 5000);
        pmu::select(0, 0xc5, 1, ON);
        msr::write(reg::IA32_PEBS_ENABLE, 1);
        let branch: u64;
        counted!(1,
            "mov r9d, 20000", "mov r8d, 1",
            "2: imul r8d, r8d, 1664525", "add r8d, 1013904223",
            "test r8d, r8d", "5: js 3f", "nop", "3: sub r9d, 1", "jnz 2b", "lea r10, [rip + 5b]";
            out("r8") _, out("r9") _, out("r10") branch);
        require!(ds.count() >= 8, "records");
        let at_branch = (0..8).filter(|&n| ds.record(n, record::EVENTING_RIP) == branch).count();
        // Chance in the history makes the branch of the loop miss at times too.
        check!(at_branch > 4, "mostly the branch that chance decides");
        pmu::reset();
        msr::write(reg::IA32_DS_AREA, 0);
    }
}

case! {
    name: "mispred_in_the_lbr", cpl: [0], rules: ["LBR-22", "LBR-23", "OP-43"], needs: [],
    about: "INFO.MISPRED tells branches that chance decides from those of a loop, and they took longer",
    fn body(ctx) {
        need_lbr!(ctx);
        const MISPRED: u64 = 1 << 63;
        let missed = |stack: &LbrStack| stack.info.iter().filter(|&&info| info & MISPRED != 0).count();
        LbrStack::EMPTY.write();
        msr::write(reg::IA32_DEBUGCTL, DebugCtl::LBR.bits());
        // SAFETY: registers only.
        unsafe {
            asm!("mov r8d, 1000", "2: sub r8d, 1", "jnz 2b", out("r8") _);
        }
        msr::write(reg::IA32_DEBUGCTL, 0);
        let steady = LbrStack::read();
        LbrStack::EMPTY.write();
        msr::write(reg::IA32_DEBUGCTL, DebugCtl::LBR.bits());
        // SAFETY: registers only.
        unsafe {
            asm!(
                "mov r9d, 1000", "mov r8d, 1",
                "2: imul r8d, r8d, 1664525", "add r8d, 1013904223",
                "test r8d, r8d", "js 3f", "nop", "3: sub r9d, 1", "jnz 2b",
                out("r8") _, out("r9") _
            );
        }
        msr::write(reg::IA32_DEBUGCTL, 0);
        let chance = LbrStack::read();
        check!(missed(&steady) <= 2, "a loop");
        check!(missed(&chance) >= 3, "chance");
        for n in 0..lbr::ENTRIES {
            let cycles = chance.info[n] & 0xffff;
            check!(chance.info[n] & MISPRED == 0 || cycles > 4, "a wrong prediction costs cycles");
        }
    }
}

case! {
    name: "flushed_lines_miss", cpl: [0], rules: ["EVT-08"], needs: [], timeout_ms: 10000,
    about: "each load of a flushed line misses the last cache; loads of one line hit the first",
    fn body(ctx) {
        need_pmu!(ctx);
        let lines = Lines([0; 16]);
        for (event, umask) in [(0x2e, 0x41), (0x2e, 0x4f), (0xd1, 0x20), (0xd1, 0x10), (0xd1, 0x08)] {
            let missed = count!(event, umask,
                "mov r8d, 200", "2: clflush [r9]", "mfence", "mov r10, [r9]", "sub r8d, 1", "jnz 2b";
                in("r9") lines.0.as_ptr(), out("r8") _, out("r10") _);
            check!((200..220).contains(&missed), "every load misses");
        }
        let hits = count!(0xd1, 0x01, "mov r8d, 1000", "2: mov r10, [r9]", "sub r8d, 1", "jnz 2b";
            in("r9") lines.0.as_ptr(), out("r8") _, out("r10") _);
        check!((ROUNDS - 10..=ROUNDS).contains(&hits), "every load but the first hits");
        pmu::reset();
    }
}

case! {
    name: "splits_and_locks", cpl: [0], rules: ["EVT-12", "PEBS-17", "PEBS-18"], needs: [],
    about: "D0H/21H, 22H, 41H and 42H count locked and split loads and stores",
    fn body(ctx) {
        need_pmu!(ctx);
        let mut lines = Lines([0; 16]);
        for (umask, expected) in [(0x21, 5), (0x22, 5), (0x41, 10), (0x42, 20)] {
            let found = count!(0xd0, umask,
                ".rept 5", "lock inc qword ptr [r9]", ".endr",
                ".rept 10", "mov r8, [r9 + 60]", "mov r8, [r9 + 56]", ".endr",
                ".rept 20", "mov [r9 + 60], r8", "mov [r9 + 56], r8", ".endr";
                in("r9") lines.0.as_mut_ptr(), out("r8") _);
            check_eq!(found, expected, "locked or split");
        }
        pmu::reset();
    }
}

case! {
    name: "load_latency", cpl: [0], rules: ["PEBS-17", "PEBS-18", "PEBS-19", "PEBS-32"], needs: [],
    about: "CDH/01H records slow loads only, with their address, source and latency",
    fn body(ctx) {
        need_pebs!(ctx);
        const THRESHOLD: u64 = 100;
        let lines = Lines([0; 16]);
        let far = lines.0.as_ptr();
        let near = far.wrapping_add(8);
        let ds = PebsArea::new(16, 16, [1_u64.wrapping_neg(); 4]);
        msr::write(reg::MSR_PEBS_LD_LAT_THRESHOLD, THRESHOLD);
        pmu::preset(0, 1);
        pmu::select(0, 0xcd, 1, ON);
        msr::write(reg::IA32_PEBS_ENABLE, 1 | 1 << pebs::LOAD_LATENCY);
        counted!(1, "mov r8, [r10]", "mov r8d, 40",
            "2: clflush [r9]", "mfence", "mov r11, [r9]", "mov r11, [r10]", "sub r8d, 1", "jnz 2b";
            in("r9") far, in("r10") near, out("r8") _, out("r11") _);
        require!(ds.count() >= 8, "records");
        for n in 1..8 {
            check_eq!(ds.record(n, record::ADDRESS), far.addr() as u64, "the flushed line");
            check!(ds.record(n, record::LATENCY) > THRESHOLD, "the latency");
            let source = ds.record(n, record::SOURCE) & 0xf;
            check!((8..=0xd).contains(&source), "beyond the last cache");
        }
        msr::write(reg::MSR_PEBS_LD_LAT_THRESHOLD, 0);
        pmu::reset();
        msr::write(reg::IA32_DS_AREA, 0);
    }
}

case! {
    name: "data_addresses", cpl: [0], rules: ["PEBS-17", "PEBS-18", "PEBS-19"], needs: [],
    about: "records of D0H and D1H have the linear address of the load or store",
    fn body(ctx) {
        need_pebs!(ctx);
        let mut lines = Lines([0; 16]);
        let at = lines.0.as_mut_ptr();
        for (event, umask, offset) in [(0xd0, 0x81, 16), (0xd0, 0x82, 24), (0xd1, 0x01, 16)] {
            let ds = PebsArea::new(4, 4, [1000_u64.wrapping_neg(); 4]);
            pmu::preset(0, 5);
            pmu::select(0, event, umask, ON);
            msr::write(reg::IA32_PEBS_ENABLE, 1);
            counted!(1, ".rept 20", "mov r8, [r9 + 16]", "mov [r9 + 24], r8", ".endr"; in("r9") at, out("r8") _);
            require_eq!(ds.count(), 1, "records");
            check_eq!(ds.record(0, record::ADDRESS), at.addr() as u64 + offset, "the address");
            check_eq!(ds.record(0, record::SOURCE) & 0xf, 1, "the first level has it");
            pmu::reset();
        }
        msr::write(reg::IA32_DS_AREA, 0);
    }
}

case! {
    name: "conditional_overflow_is_exact", cpl: [0], rules: ["EVT-06", "OVF-05", "OVF-06"], needs: [],
    about: "as rr uses it: C4H/01H overflows at the very branch, whatever exits lie between",
    fn body(ctx) {
        need_pmu!(ctx);
        for (round, exits) in [(3_u64, false), (100, false), (3, true), (100, true)] {
            pmu::unmask_pmi(true);
            pmu::preset(0, round);
            pmu::select(0, 0xc4, 1, ON | pmu::INT);
            let port = if exits { 0xed_u64 } else { 0 };
            let (left, first, third): (u64, u64, u64);
            counted!(1, "mov r8d, 500",
                "2: test r10d, r10d", "jz 3f", "mov edx, r10d", "in al, dx",
                "3: sub r8d, 1", "jnz 2b", "lea r9, [rip + 2b]", "lea r11, [rip + 3b]";
                in("r10") port, out("r8") left, out("r9") first, out("r11") third);
            let seen = pmu::pmi_state();
            check_eq!(left, 0, "the loop ran on");
            check_eq!(seen.taken, 1, "one interrupt");
            // Two conditional branches a round: an odd count ends at the first one of a round.
            let expected = match (round % 2 != 0, exits) {
                (true, false) => third,
                (true, true) => first + 5,
                (false, _) => first,
            };
            check_eq!(seen.rip, expected, "right after the branch");
            pmu::mask_pmi();
            pmu::reset();
            // Without an interrupt, whose handler branches as well, all are counted.
            let all = count!(0xc4, 1, "mov r8d, 500",
                "2: test r10d, r10d", "jz 3f", "mov edx, r10d", "in al, dx",
                "3: sub r8d, 1", "jnz 2b"; in("r10") port, out("r8") _);
            check_eq!(all, 1000, "conditional branches, whatever exits lie between");
            pmu::reset();
        }
    }
}
