//! Precise event-based sampling.

#![no_std]
#![no_main]

use core::arch::asm;

use hindsight_guest::gdt::KERNEL_CODE32;
use hindsight_guest::insn;
use hindsight_guest::msr;
use hindsight_guest::paging;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::pmu::EventSelect;
use hindsight_guest::regs::pmu::global::{CTR_FRZ, DS_BUFFER};
use hindsight_guest::regs::pmu::pebs::{self, record};
use hindsight_payloads::pmu::{self, INT, MAX, ON, PebsArea};
use hindsight_payloads::{counted, need_pebs};

payload!("pebs");

/// -N as a reset value.
const fn after(events: u64) -> u64 {
    events.wrapping_neg()
}

/// Turns on counter `n` with PEBS, with `events` to go.
fn arm(n: u32, event: u8, umask: u8, bits: u64, events: u64) {
    pmu::preset(n, events);
    pmu::select(n, event, umask, bits);
    msr::write(reg::IA32_PEBS_ENABLE, 1 << n);
}

/// Runs 62 NOPs with the counters in `global` on, of 67 instructions in all; gives the address of
/// the first one.
fn nops(global: u64) -> u64 {
    let first: u64;
    counted!(global, "2: .rept 62", "nop", ".endr", "lea r8, [rip + 2b]"; out("r8") first);
    first
}

fn done() {
    pmu::reset();
    msr::write(reg::IA32_DS_AREA, 0);
}

case! {
    name: "place", cpl: [0], rules: ["PEBS-02", "PEBS-03", "PEBS-04", "PEBS-05", "PEBS-12", "PEBS-18", "PEBS-29", "OP-26"],
    needs: [], about: "the record is of the event after the overflow, and has the place of it and of the next",
    fn body(ctx) {
        need_pebs!(ctx);
        for events in [1, 5, 40] {
            let ds = PebsArea::new(4, 4, [after(1000); 4]);
            arm(0, 0xc0, 0, ON, events);
            let first = nops(1);
            require_eq!(ds.count(), 1, "records");
            // The WRMSR is event 1; NOP 1 is event 2.
            check_eq!(ds.record(0, record::EVENTING_RIP) - first, events - 1, "the eventing NOP");
            check_eq!(ds.record(0, record::RIP) - first, events, "the next one");
            check_eq!(ds.record(0, record::COUNTERS), 1, "applicable counters");
            check!(ds.is_clean_from(1), "nothing beyond the record");
            pmu::reset();
        }
        done();
    }
}

case! {
    name: "precise_distribution", cpl: [0], rules: ["PEBS-03", "PEBS-17", "PEBS-18"], needs: [],
    about: "INST_RETIRED.PREC_DIST in counter 1 records the instruction that overflows, or the next",
    fn body(ctx) {
        need_pebs!(ctx);
        let ds = PebsArea::new(4, 4, [after(1000); 4]);
        arm(1, 0xc0, 1, ON, 20);
        let first = nops(2);
        require_eq!(ds.count(), 1, "records");
        let offset = ds.record(0, record::EVENTING_RIP) - first;
        check!(offset == 18 || offset == 19, "the twentieth instruction, or the one after it");
        check_eq!(ds.record(0, record::RIP) - ds.record(0, record::EVENTING_RIP), 1, "the next one");
        check_eq!(ds.record(0, record::COUNTERS), 2, "applicable counters");
        done();
    }
}

case! {
    name: "registers", cpl: [0], rules: ["PEBS-04", "PEBS-19", "PEBS-27", "PEBS-13"], needs: [],
    about: "the record has the registers after the instruction, flags, time, and nothing of data",
    fn body(ctx) {
        need_pebs!(ctx);
        let ds = PebsArea::new(4, 4, [after(1000); 4]);
        // WRMSR, CLC and eleven MOVs, then one more is the event after the overflow.
        arm(0, 0xc0, 0, ON, 14);
        let (rbp, rsp): (u64, u64);
        let before = insn::rdtsc();
        counted!(1,
            "stc",
            "mov rsi, 0x56", "mov rdi, 0x57", "mov r8, 0x108", "mov r9, 0x109", "mov r10, 0x10a",
            "mov r11, 0x10b", "mov r12, 0x10c", "mov r13, 0x10d", "mov r14, 0x10e", "mov r15, 0x10f",
            "mov eax, 0x50", "mov ecx, 0x51", "mov edx, 0x52",
            "mov rsi, rbp", "mov rdi, rsp";
            out("rsi") rbp, out("rdi") rsp, out("r8") _, out("r9") _, out("r10") _, out("r11") _,
            out("r12") _, out("r13") _, out("r14") _, out("r15") _);
        let passed = insn::rdtsc();
        require_eq!(ds.count(), 1, "records");
        // The event after the overflow is MOV RSI, RBP's predecessor: MOV EDX, 52H is number 15.
        for (offset, value) in [
            (0x10, 0x50), (0x20, 0x51), (0x28, 0x52), (0x30, 0x56), (0x38, 0x57), (0x40, rbp), (0x48, rsp),
            (0x50, 0x108), (0x58, 0x109), (0x60, 0x10a), (0x68, 0x10b), (0x70, 0x10c), (0x78, 0x10d),
            (0x80, 0x10e), (0x88, 0x10f), (0x98, 0), (0xa0, 0), (0xa8, 0), (0xb8, 0),
        ] {
            if !check_eq!(ds.record(0, offset), value, "a field") {
                hindsight_guest::report::measurement("offset", offset as u64);
            }
        }
        let flags = ds.record(0, record::RFLAGS);
        check_eq!(flags & 3, 3, "CF, and the bit that is always set");
        check_eq!(flags >> 22, 0, "reserved flags");
        let tsc = ds.record(0, record::TSC);
        check!(before <= tsc && tsc <= passed, "the time");
        done();
    }
}

case! {
    name: "compatibility_mode", cpl: [0], rules: ["PEBS-28", "PEBS-04"], needs: [],
    about: "a record of 32-bit code has no upper halves, and nothing of R8 to R15",
    fn body(ctx) {
        need_pebs!(ctx);
        let ds = PebsArea::new(4, 4, [after(1000); 4]);
        // The far JMP is instruction 11: the event after the overflow is the fourth NOP behind it.
        arm(0, 0xc0, 0, ON, 14);
        let first: u64;
        counted!(1,
            "mov rsi, 0x7700000056", "mov r15, -1",
            "sub rsp, 16", "mov edi, cs",
            "lea rax, [rip + 22f]", "mov edx, eax",
            "lea rax, [rip + 21f]", "mov [rsp], eax", "mov [rsp + 4], r8d",
            ".byte 0xff, 0x2c, 0x24",
            ".code32",
            "21: .rept 20", "nop", ".endr",
            "push edi", "push edx", "retf",
            ".code64",
            "22: add rsp, 16", "lea r8, [rip + 21b]";
            inout("r8") u64::from(KERNEL_CODE32) => first, out("r15") _, out("rsi") _, out("rdi") _);
        require_eq!(ds.count(), 1, "records");
        check_eq!(ds.record(0, record::EVENTING_RIP) - first, 3, "the eventing NOP");
        check_eq!(ds.record(0, record::RIP) - first, 4, "the next one");
        check_eq!(ds.record(0, 0x30), 0x56, "RSI without its upper half");
        for offset in [0x50, 0x58, 0x60, 0x68, 0x70, 0x78, 0x80, 0x88] {
            check_eq!(ds.record(0, offset), 0, "R8 to R15");
        }
        done();
    }
}

case! {
    name: "branches", cpl: [0], rules: ["PEBS-03", "PEBS-04", "PEBS-17", "PEBS-18"], needs: [],
    about: "records of branches: the branch itself, and where it went",
    fn body(ctx) {
        need_pebs!(ctx);
        for (umask, events, not_taken) in [(0x00, 3, false), (0x01, 3, false), (0x04, 3, false), (0x20, 3, false),
            (0x01, 9, true), (0x10, 0, true)] {
            let ds = PebsArea::new(4, 4, [after(1000); 4]);
            // Nine are taken, the tenth is not.
            let to_go = if umask == 0x10 { continue } else { events };
            arm(0, 0xc4, umask, ON, to_go);
            let (head, after_loop): (u64, u64);
            counted!(1, "mov r8d, 10", "2: nop", "sub r8d, 1", "3: jnz 2b", "4: nop",
                "lea r8, [rip + 2b]", "lea r9, [rip + 4b]"; out("r8") head, out("r9") after_loop);
            require_eq!(ds.count(), 1, "records");
            check_eq!(ds.record(0, record::EVENTING_RIP), after_loop - 2, "the JNZ");
            let to = if not_taken { after_loop } else { head };
            check_eq!(ds.record(0, record::RIP), to, "where it went");
            pmu::reset();
        }
        done();
    }
}

case! {
    name: "calls_and_returns", cpl: [0], rules: ["PEBS-17", "PEBS-18"], needs: [],
    about: "records of near calls and near returns",
    fn body(ctx) {
        need_pebs!(ctx);
        for (umask, at_return) in [(0x02, false), (0x08, true)] {
            let ds = PebsArea::new(4, 4, [after(1000); 4]);
            arm(0, 0xc4, umask, ON, 1);
            let (callee, back): (u64, u64);
            counted!(1, "call 5f", "call 5f", "4: jmp 6f", "5: ret", "6:",
                "lea r8, [rip + 5b]", "lea r9, [rip + 4b]"; out("r8") callee, out("r9") back);
            require_eq!(ds.count(), 1, "records");
            let (eventing, rip) = if at_return { (callee, back) } else { (back - 5, callee) };
            check_eq!(ds.record(0, record::EVENTING_RIP), eventing, "the second one");
            check_eq!(ds.record(0, record::RIP), rip, "where it went");
            pmu::reset();
        }
        done();
    }
}

case! {
    name: "reload", cpl: [0], rules: ["PEBS-06", "PEBS-07", "PEBS-31", "PEBS-13", "OP-25"], needs: [],
    about: "each record reloads the counter, clears its status bit, and the time never goes back",
    fn body(ctx) {
        need_pebs!(ctx);
        let ds = PebsArea::new(16, 16, [0xffff_0000_0000_0000 | after(9); 4]);
        arm(0, 0xc0, 0, ON, 9);
        pmu::preset(1, 9);
        pmu::select(1, 0xc0, 0, ON);
        let first = nops(3);
        // A record each ten of 67 events.
        require_eq!(ds.count(), 6, "records");
        for n in 0..6 {
            let offset = ds.record(n, record::EVENTING_RIP) - first;
            check_eq!(offset, 10 * n as u64 + 8, "every tenth instruction");
            let before = if n == 0 { 0 } else { ds.record(n - 1, record::TSC) };
            check!(before <= ds.record(n, record::TSC), "the time");
        }
        check_eq!(pmu::get(0), MAX - 8 + 7, "seven since the last reload");
        check_eq!(pmu::status(), 0b10, "counter 1 has no PEBS: it keeps its bit");
        check_eq!(pmu::get(1), 67 - 9, "and its value");
        done();
    }
}

case! {
    name: "threshold", cpl: [0], rules: ["PEBS-08", "PEBS-11", "PEBS-22", "PEBS-30", "PEBS-31"], needs: [],
    about: "at the threshold status bit 62 is set and an interrupt is requested, not before",
    fn body(ctx) {
        need_pebs!(ctx);
        pmu::unmask_pmi(true);
        let ds = PebsArea::new(16, 3, [after(9); 4]);
        arm(0, 0xc0, 0, ON, 9);
        let first = nops(1);
        let seen = pmu::pmi_state();
        check_eq!(seen.taken, 1, "interrupts; the LVT entry is masked then");
        check_eq!(seen.rip - first, 29, "right after the third record");
        check_eq!(seen.status & DS_BUFFER, DS_BUFFER, "status bit 62");
        pmu::mask_pmi();
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, 1);
        check_eq!(pmu::status(), DS_BUFFER, "it stays");
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, DS_BUFFER);
        check_eq!(pmu::status(), 0, "until it is cleared");
        check!(ds.count() >= 3, "records go on after the threshold");
        pmu::reset();
        pmu::unmask_pmi(true);
        let ds = PebsArea::new(16, 7, [after(9); 4]);
        arm(0, 0xc0, 0, ON, 9);
        nops(1);
        check_eq!(ds.count(), 6, "records");
        check_eq!((pmu::pmi_state().taken, pmu::status()), (0, 0), "nothing below the threshold");
        pmu::mask_pmi();
        done();
    }
}

case! {
    name: "maximum", cpl: [0], rules: ["PEBS-09", "PEBS-10", "DS-11"], needs: [],
    about: "records stop at the maximum; the counter is reloaded, the index stays",
    fn body(ctx) {
        need_pebs!(ctx);
        pmu::unmask_pmi(true);
        let ds = PebsArea::new(3, 8, [after(9); 4]);
        ds.put(pebs::MAXIMUM, ds.base() + 3 * 200 - 1);
        arm(0, 0xc0, 0, ON, 9);
        nops(1);
        check_eq!(ds.count(), 2, "records");
        check!(ds.is_clean_from(2), "nothing beyond them");
        check_eq!(pmu::get(0), MAX - 8 + 7, "reloaded all the same");
        check_eq!((pmu::pmi_state().taken, pmu::status()), (0, 0), "nothing is signalled");
        check_eq!(ds.field(pebs::BASE), ds.base(), "the base");
        check_eq!(ds.field(pebs::RESET), after(9), "the reset value");
        pmu::mask_pmi();
        done();
    }
}

case! {
    name: "privilege", cpl: [3], rules: ["PEBS-24", "PEBS-04", "DS-04"], needs: [], needs_cpl3: ["iretq-cpl3"],
    about: "a counter of CPL 3 records CPL 3 only, into pages that CPL 3 cannot reach",
    fn body(ctx) {
        need_pebs!(ctx);
        let ds = PebsArea::new(16, 16, [after(100); 4]);
        let old = [0, 4096].map(|at| (ds.address() + at, paging::change(ds.address() + at, 0, paging::US)));
        arm(0, 0xc4, 1, pmu::USR, 100);
        pmu::start(1);
        let mut offset = 0;
        let fault = ctx.run(|| {
            let at: u64;
            // SAFETY: registers only.
            unsafe {
                asm!("mov {n:e}, 1000", "2: sub {n:e}, 1", "3: jnz 2b", "lea {at}, [rip + 3b]",
                    n = out(reg) _, at = out(reg) at, options(nomem, nostack));
            }
            offset = at;
        });
        pmu::stop();
        for (at, entry) in old {
            paging::restore(at, entry);
        }
        check!(fault.is_none(), "no exception");
        require!(ds.count() >= 9, "records");
        for n in 1..9 {
            check_eq!(ds.record(n, record::EVENTING_RIP), offset, "the JNZ of CPL 3");
        }
        done();
    }
}

case! {
    name: "frozen", cpl: [0], rules: ["FRZ-09", "FRZ-01", "PEBS-08"], needs: [],
    about: "a threshold freezes the counters when asked to, and no record is taken after that",
    fn body(ctx) {
        need_pebs!(ctx);
        let ds = PebsArea::new(16, 2, [after(9); 4]);
        msr::write(reg::IA32_DEBUGCTL, 1 << 12);
        arm(0, 0xc0, 0, ON, 9);
        nops(1);
        check_eq!(ds.count(), 2, "records");
        check_eq!(pmu::status(), DS_BUFFER | CTR_FRZ, "status");
        check_eq!(pmu::get(0), MAX - 8, "the counter stands at its reset value");
        done();
    }
}

case! {
    name: "int_of_the_counter", cpl: [0], rules: ["PEBS-21", "PEBS-07"], needs: [],
    about: "with INT the interrupt comes after the record is written",
    fn body(ctx) {
        need_pebs!(ctx);
        pmu::unmask_pmi(true);
        let ds = PebsArea::new(16, 16, [after(1000); 4]);
        arm(0, 0xc0, 0, ON | INT, 9);
        let first = nops(1);
        let seen = pmu::pmi_state();
        check_eq!(ds.count(), 1, "records");
        check_eq!(seen.taken, 1, "count of interrupts");
        check_eq!(seen.rip, ds.record(0, record::RIP), "right behind the record");
        check_eq!(seen.rip - first, 9, "which is of event ten");
        check_eq!(seen.status & DS_BUFFER, 0, "no threshold");
        pmu::mask_pmi();
        done();
    }
}

case! {
    name: "several_counters", cpl: [0], rules: ["PEBS-06", "PEBS-12", "PEBS-14", "PEBS-20"], needs: [],
    about: "counters that come due at one instruction share a record and are all reloaded",
    fn body(ctx) {
        need_pebs!(ctx);
        let ds = PebsArea::new(16, 16, [after(1000), after(2000), after(3000), after(4000)]);
        for n in 0..4 {
            arm(n, 0xc0, 0, ON, 9);
        }
        msr::write(reg::IA32_PEBS_ENABLE, 0xf);
        nops(0xf);
        check_eq!(ds.count(), 1, "records");
        check_eq!(ds.record(0, record::COUNTERS), 0xf, "applicable counters");
        for n in 0..4 {
            // 67 events, ten of them up to the record.
            check_eq!(pmu::get(n), MAX + 1 - 1000 * (u64::from(n) + 1) + 57, "reloaded");
        }
        done();
    }
}

case! {
    name: "no_record", cpl: [0], rules: ["PEBS-02", "PEBS-16", "PEBS-18"], needs: [],
    about: "events and selections without PEBS give no record",
    fn body(ctx) {
        need_pebs!(ctx);
        for (event, umask, bits) in [
            (0x3c, 0, ON),
            (0xc0, 0, ON | EventSelect::ANY_THREAD),
            (0xc0, 0, ON | EventSelect::EDGE),
            (0xc0, 0, ON | 1 << 24),
            (0xc0, 0, ON & !EventSelect::ENABLE),
            (0xb7, 1, ON),
        ] {
            let ds = PebsArea::new(16, 1, [after(9); 4]);
            arm(0, event, umask, bits, 5);
            nops(1);
            check_eq!(ds.count(), 0, "records");
            check!(ds.is_clean_from(0), "the buffer");
            check_eq!(pmu::status() & DS_BUFFER, 0, "status bit 62");
            pmu::reset();
        }
        done();
    }
}

case! {
    name: "wrong_places", cpl: [0], rules: ["DS-06", "DS-09", "DS-10", "PEBS-25", "OP-17"], needs: [],
    about: "a buffer or an area where nothing can be stored: no record, no exception",
    fn body(ctx) {
        need_pebs!(ctx);
        let good = PebsArea::new(16, 16, [after(9); 4]);
        let unmapped = good.base();
        for (index, maximum) in [
            (0x8000_0000_0000_0000_u64, u64::MAX),
            (0x0000_7fff_ffff_ff80, u64::MAX),
            (u64::MAX - 100, u64::MAX),
            (u64::MAX - 199, u64::MAX),
            (0xfffe_0000_0000, u64::MAX),
        ] {
            let ds = PebsArea::new(16, 16, [after(9); 4]);
            ds.put(pebs::INDEX, index);
            ds.put(pebs::MAXIMUM, maximum);
            arm(0, 0xc0, 0, ON, 9);
            nops(1);
            check_eq!(ds.field(pebs::INDEX), index, "the index stays");
            check_eq!(pmu::status() & DS_BUFFER, 0, "status bit 62");
            pmu::reset();
        }
        for area in [0x7fff_ffff_f000, 0xffff_8000_0000_0000, 0x1234_5678_9001] {
            arm(0, 0xc0, 0, ON, 9);
            msr::write(reg::IA32_DS_AREA, area);
            nops(1);
            check_eq!(pmu::status() & DS_BUFFER, 0, "status bit 62");
            pmu::reset();
        }
        let ds = PebsArea::new(16, 16, [after(9); 4]);
        let old = paging::unmap(unmapped);
        arm(0, 0xc0, 0, ON, 9);
        nops(1);
        paging::restore(unmapped, old);
        check_eq!(ds.count(), 0, "records in a page that is not present");
        check!(ds.is_clean_from(0), "the buffer");
        done();
    }
}

case! {
    name: "cycles", cpl: [0], rules: ["PEBS-16", "PEBS-18", "EVT-10"], needs: [], timeout_ms: 10000,
    about: "the cycle encodings record at a boundary inside the loop that runs",
    fn body(ctx) {
        need_pebs!(ctx);
        for (n, umask) in [(0, 0), (1, 1), (3, 0)] {
            let ds = PebsArea::new(16, 16, [after(20_000); 4]);
            arm(n, 0xc0, umask, ON | EventSelect::INVERT | 0x10 << 24, 20_000);
            let (head, end): (u64, u64);
            counted!(1 << n, "mov r8d, 400000", "2: sub r8d, 1", "jnz 2b", "3:",
                "lea r8, [rip + 2b]", "lea r9, [rip + 3b]"; out("r8") head, out("r9") end);
            require!(ds.count() >= 2, "records");
            for at in 1..2 {
                let eventing = ds.record(at, record::EVENTING_RIP);
                check!(eventing >= head && eventing < end, "in the loop");
                check_eq!(ds.record(at, record::COUNTERS), 1 << n, "applicable counters");
            }
            pmu::reset();
        }
        done();
    }
}

case! {
    name: "loads_and_stores", cpl: [0], rules: ["PEBS-17", "PEBS-18"], needs: [],
    about: "records of retired loads and stores",
    fn body(ctx) {
        need_pebs!(ctx);
        let mut word = 5_u64;
        for (umask, offset) in [(0x81, 0), (0x82, 3)] {
            let ds = PebsArea::new(4, 4, [after(1000); 4]);
            arm(0, 0xd0, umask, ON, 2);
            let first: u64;
            counted!(1, "2: .rept 20", "mov r8, [r9]", "mov [r9], r8", ".endr",
                "lea r8, [rip + 2b]"; inout("r9") &raw mut word => _, out("r8") first);
            require_eq!(ds.count(), 1, "records");
            // Each of the two is three bytes long; the third one of its kind is recorded.
            check_eq!(ds.record(0, record::EVENTING_RIP), first + 2 * 6 + offset, "the third one");
            pmu::reset();
        }
        done();
    }
}
