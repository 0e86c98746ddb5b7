//! What the events count: instructions, branches by kind, loads and stores, cycles.

#![no_std]
#![no_main]

use core::arch::asm;

use hindsight_guest::apic;
use hindsight_guest::insn;
use hindsight_guest::msr;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::branch::DebugCtl;
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::cr::Cr4;
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::pmu::EventSelect;
use hindsight_payloads::clock;
use hindsight_payloads::pmu::{self, ON, OVERHEAD, PebsArea};
use hindsight_payloads::{counted, need_pmu};

payload!("pmu_events");

/// C4H with its unit masks: all, conditional, near call, all, near return, not taken, near taken,
/// far.
const BRANCH_MASKS: [u8; 8] = [0x00, 0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40];

/// Runs text once for each unit mask of C4H; gives the counts in the order of [`BRANCH_MASKS`].
macro_rules! branches {
    ($($text:literal),* $(; $($operands:tt)*)?) => {{
        let mut counts = [0; 8];
        for (count, umask) in counts.iter_mut().zip(BRANCH_MASKS) {
            pmu::select(0, 0xc4, umask, ON);
            pmu::set(0, 0);
            counted!(1, $($text),* ; $($($operands)*)?);
            *count = pmu::get(0);
        }
        counts
    }};
}

case! {
    name: "instructions", cpl: [0], rules: ["EVT-01", "EVT-02", "EVT-16"], needs: [],
    about: "a counter and fixed counter 0 count the same instructions, a repeated one once",
    fn body(ctx) {
        need_pmu!(ctx);
        for n in 0..4 {
            pmu::select(n, 0xc0, 0, ON);
        }
        msr::write(reg::IA32_FIXED_CTR_CTRL, 0b11);
        let source = [7_u8; 300];
        let mut target = [0_u8; 300];
        counted!(0x1_0000_000f,
            ".rept 25", "nop", "add r8, 1", ".endr",
            "cld", "mov ecx, 300", "rep movsb", "mov ecx, 0", "rep movsb";
            inout("rsi") source.as_ptr() => _, inout("rdi") target.as_mut_ptr() => _, out("r8") _);
        check_eq!(target, source, "the string is copied");
        let expected = 50 + 5 + OVERHEAD;
        for n in 0..4 {
            check_eq!(pmu::get(n), expected, "C0H/00H");
        }
        check_eq!(pmu::fixed(0), expected, "fixed counter 0");
        pmu::reset();
    }
}

case! {
    name: "emulated_instructions", cpl: [0], rules: ["EVT-14"], needs: [],
    about: "instructions that leave the processor count like all others",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::select(0, 0xc0, 0, ON);
        counted!(1,
            "mov r8, rbx", "xor eax, eax", "cpuid", "mov rbx, r8",
            "mov dx, 0x3fd", "in al, dx",
            "mov ecx, 0x1a0", "rdmsr",
            "rdtsc";
            out("r8") _);
        check_eq!(pmu::get(0), 9 + OVERHEAD, "CPUID, IN, RDMSR, RDTSC");
        pmu::reset();
    }
}

case! {
    name: "exception", cpl: [0], rules: ["EVT-17"], needs: [],
    about: "an exception is no branch, the return from its handler is a far one",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::select(1, 0xc4, 0x40, ON);
        pmu::set(1, 0);
        pmu::start(2);
        let _ = msr::read_safe(0xc5);
        pmu::stop();
        check_eq!(pmu::get(1), 1, "far branches");
        pmu::reset();
    }
}

case! {
    name: "faulting_instruction_at_cpl3", cpl: [3], rules: ["EVT-02", "PMU-05"], needs: [], needs_cpl3: ["iretq-cpl3"],
    about: "up to an instruction that faults at CPL 3, all count but itself",
    fn body(ctx) {
        need_pmu!(ctx);
        let cr4 = insn::read_cr4();
        insn::write_cr4(cr4 | Cr4::PCE.bits());
        pmu::select(0, 0xc0, 0, pmu::USR);
        pmu::start(1);
        let fault = ctx.run(|| {
            // SAFETY: registers only; UD2 ends the closure.
            unsafe {
                asm!("xor ecx, ecx", "rdpmc", "mov r8, rax", ".rept 10", "nop", ".endr", "ud2",
                    out("rax") _, out("rcx") _, out("rdx") _, out("r8") _, options(nomem, nostack));
            }
        });
        pmu::stop();
        insn::write_cr4(cr4);
        let fault = require_some!(fault, "#UD");
        // RDPMC, MOV and the NOPs.
        check_eq!(pmu::get(0) - fault.frame.r8, 12, "instructions");
        pmu::reset();
    }
}

case! {
    name: "conditional_branches", cpl: [0], rules: ["EVT-06", "EVT-12"], needs: [],
    about: "a loop of N iterations has N conditional branches, the last one not taken",
    fn body(ctx) {
        need_pmu!(ctx);
        let found = branches!("mov r8d, 1000", "2: sub r8d, 1", "jnz 2b"; out("r8") _);
        check_eq!(found, [1000, 1000, 0, 1000, 0, 1, 999, 0], "JNZ");
        let found = branches!("mov ecx, 10", "2: loop 2b", "3: jecxz 4f", "4:");
        check_eq!(found, [11, 11, 0, 11, 0, 1, 10, 0], "LOOP and JECXZ");
        let found = branches!("cmp eax, eax", ".rept 5", "jne 4f", ".endr", "je 4f", "nop", "4:");
        check_eq!(found, [6, 6, 0, 6, 0, 5, 1, 0], "CMP fused with a branch");
        pmu::reset();
    }
}

case! {
    name: "jumps_calls_returns", cpl: [0], rules: ["EVT-06", "EVT-12"], needs: [],
    about: "near jumps, calls and returns, direct and indirect",
    fn body(ctx) {
        need_pmu!(ctx);
        let found = branches!(
            "call 5f", "lea r8, [rip + 5f]", "call r8", "jmp 6f",
            "5: ret",
            "6: lea r8, [rip + 7f]", "jmp r8",
            "7:";
            out("r8") _);
        // Two calls, two returns, two jumps.
        check_eq!(found, [6, 0, 2, 6, 2, 0, 6, 0], "near branches");
        pmu::reset();
    }
}

case! {
    name: "far_branches", cpl: [0], rules: ["EVT-12", "EVT-17"], needs: [],
    about: "IRETQ and far RET are far branches",
    fn body(ctx) {
        need_pmu!(ctx);
        let found = branches!(
            "mov r8, rsp",
            "mov r9d, ss", "push r9", "push r8", "pushfq", "mov r9d, cs", "push r9",
            "lea r9, [rip + 5f]", "push r9", "iretq",
            "5: mov r9d, cs", "push r9", "lea r9, [rip + 6f]", "push r9", "retfq",
            "6:";
            out("r8") _, out("r9") _);
        check_eq!(found, [2, 0, 0, 2, 0, 0, 0, 2], "IRETQ, RETFQ");
        pmu::reset();
    }
}

case! {
    name: "software_interrupts", cpl: [0], rules: ["EVT-17"], needs: ["intn-cpl0"],
    about: "INT n and the IRET of its handler are far branches",
    fn body(ctx) {
        need_pmu!(ctx);
        fn back(_: &mut hindsight_guest::exception::TrapFrame) {}
        hindsight_guest::trap::set_handler(0x55, back);
        pmu::select(0, 0xc4, 0x40, ON);
        counted!(1, "int 0x55");
        check_eq!(pmu::get(0), 2, "INT 55H, IRET");
        pmu::reset();
    }
}

case! {
    name: "rings", cpl: [3], rules: ["EVT-01", "EVT-06", "PMU-05"], needs: [], needs_cpl3: ["iretq-cpl3"],
    about: "USR counts what runs at CPL 3 only, to the branch, across the ways in and out",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::select(0, 0xc4, 0x01, pmu::USR | pmu::INT);
        pmu::select(1, 0xc4, 0x01, pmu::OS);
        let mut counts = [0; 3];
        for (count, loops) in counts.iter_mut().zip([1000_u64, 2000, 3000]) {
            pmu::set(0, 0);
            pmu::start(1);
            let fault = ctx.run(|| {
                // SAFETY: registers only.
                unsafe { asm!("2: sub {n}, 1", "jnz 2b", n = inout(reg) loops => _, options(nomem, nostack)) };
            });
            pmu::stop();
            check!(fault.is_none(), "no exception");
            *count = pmu::get(0);
        }
        check_eq!(counts[1] - counts[0], 1000, "1000 branches more");
        check_eq!(counts[2] - counts[1], 1000, "and again");
        check!(counts[0] >= 1000 && counts[0] < 1050, "hardly any beside the loop's");
        pmu::reset();
    }
}

case! {
    name: "exact_across_interrupts", cpl: [3], rules: ["EVT-06", "EVT-17"], needs: [],
    needs_cpl3: ["iretq-cpl3"], timeout_ms: 10000,
    about: "conditional branches at CPL 3 are the same with timer interrupts and exits in between",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::select(0, 0xc4, 0x01, pmu::USR | pmu::INT);
        let run = |ctx: &Ctx| {
            pmu::set(0, 0);
            pmu::start(1);
            let fault = ctx.run(|| {
                // SAFETY: registers only; CPUID leaves the processor.
                unsafe {
                    asm!("2: mov r9, rbx", "xor eax, eax", "cpuid", "mov rbx, r9", "mov ecx, 200", "3: sub ecx, 1", "jnz 3b",
                        "sub r8d, 1", "jnz 2b",
                        inout("r8") 500 => _, out("rax") _, out("rcx") _, out("rdx") _,
                        out("r9") _, options(nomem, nostack));
                };
            });
            pmu::stop();
            check!(fault.is_none(), "no exception");
            pmu::get(0)
        };
        let quiet = run(ctx);
        check!(quiet >= 500 * 201, "the loops at least");
        fn tick(_: &mut hindsight_guest::exception::TrapFrame) {
            apic::eoi();
        }
        use hindsight_guest::regs::apic::{LVT_TIMER_PERIODIC, ApicRegister};
        hindsight_guest::trap::set_handler(0x61, tick);
        apic::enable();
        apic::write(ApicRegister::TIMER_DIVIDE, 0b1011);
        apic::write(ApicRegister::LVT_TIMER, LVT_TIMER_PERIODIC | 0x61);
        apic::write(ApicRegister::TIMER_INITIAL, 20_000);
        insn::sti();
        let busy = run(ctx);
        insn::cli();
        apic::disable();
        check_eq!(busy, quiet, "the same count");
        pmu::reset();
    }
}

case! {
    name: "loads_and_stores", cpl: [0], rules: ["EVT-12"], needs: [],
    about: "D0H/81H and D0H/82H count instructions that load and store",
    fn body(ctx) {
        need_pmu!(ctx);
        let mut word = [5_u64; 2];
        for (umask, expected) in [(0x81, 3 + 10), (0x82, 3 + 20)] {
            pmu::select(0, 0xd0, umask, ON);
            pmu::set(0, 0);
            counted!(1,
                ".rept 10", "mov r8, [r9]", ".endr",
                ".rept 20", "mov [r9], r8", ".endr",
                "add [r9], r8", "push r8", "pop r8", "lock inc qword ptr [r9]",
                "lea r8, [r9 + 8]", "nop dword ptr [r9]", "prefetcht0 [r9]";
                in("r9") word.as_mut_ptr(), out("r8") _);
            check_eq!(pmu::get(0), expected, "loads or stores");
        }
        pmu::reset();
    }
}

case! {
    name: "busy_cycles", cpl: [0], rules: ["EVT-04", "EVT-05"], needs: ["tsc-offset"], timeout_ms: 10000,
    about: "in a busy loop, reference cycles follow the TSC, and the crystal's cycles the crystal",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::select(0, 0x3c, 0, ON);
        pmu::select(1, 0x3c, 1, ON);
        msr::write(reg::IA32_FIXED_CTR_CTRL, 0x330);
        let before = insn::rdtsc();
        pmu::start(3 | 6 << 32);
        clock::wait(20);
        pmu::stop();
        let passed = insn::rdtsc() - before;
        // The core's frequency is not the TSC's.
        check!(pmu::get(0) != 0, "core cycles");
        check!(pmu::get(0).abs_diff(pmu::fixed(1)) <= 100, "fixed counter 1");
        let reference = pmu::fixed(2);
        check!(reference <= passed, "fixed counter 2 ran ahead");
        check!(reference >= passed / 10 * 9, "fixed counter 2 fell behind");
        let (Some(tsc), Some(crystal)) = (clock::tsc_hz(), clock::crystal_hz()) else {
            skip!(ctx, "CPUID.15H does not say the frequencies");
        };
        let expected = u64::try_from(u128::from(pmu::fixed(2)) * u128::from(crystal) / u128::from(tsc)).unwrap_or(0);
        check!(pmu::get(1).abs_diff(expected) <= 1 + expected / 100, "crystal cycles");
        pmu::reset();
    }
}

case! {
    name: "halted_cycles", cpl: [0], rules: ["EVT-03", "EVT-11"], needs: ["tsc-offset"], timeout_ms: 10000,
    about: "no cycles pass in HLT; leaving it is an edge of the cycle event",
    fn body(ctx) {
        need_pmu!(ctx);
        fn tick(_: &mut hindsight_guest::exception::TrapFrame) {
            apic::eoi();
        }
        use hindsight_guest::regs::apic::ApicRegister;
        pmu::select(0, 0x3c, 0, ON);
        pmu::select(1, 0x3c, 1, ON);
        pmu::select(2, 0x3c, 0, ON | EventSelect::EDGE);
        msr::write(reg::IA32_FIXED_CTR_CTRL, 0x330);
        hindsight_guest::trap::set_handler(0x61, tick);
        apic::enable();
        apic::write(ApicRegister::TIMER_DIVIDE, 0b1011);
        apic::write(ApicRegister::LVT_TIMER, 0x61);
        let crystal = clock::crystal_hz().unwrap_or(25_000_000);
        let before = insn::rdtsc();
        pmu::start(7 | 6 << 32);
        // 100 ms.
        apic::write(ApicRegister::TIMER_INITIAL, u32::try_from(crystal / 10).unwrap_or(1));
        // SAFETY: the timer wakes the processor.
        unsafe { asm!("sti", "hlt", "cli") };
        pmu::stop();
        let passed = insn::rdtsc() - before;
        apic::disable();
        check!(passed > clock::ticks(50), "it halted");
        check!(pmu::get(0) < passed / 2, "core cycles");
        check!(pmu::fixed(1) < passed / 2, "fixed counter 1");
        check!(pmu::fixed(2) < passed / 2, "fixed counter 2");
        check_eq!(pmu::get(2), 1, "one wake");
        pmu::reset();
    }
}

case! {
    name: "precise_cycles", cpl: [0], rules: ["EVT-10"], needs: [], timeout_ms: 10000,
    about: "C0H/00H, and C0H/01H in counter 1, with INV and CMASK 10H count cycles",
    fn body(ctx) {
        need_pmu!(ctx);
        let bits = ON | EventSelect::INVERT | 0x10 << 24;
        pmu::select(0, 0xc0, 0, bits);
        pmu::select(1, 0xc0, 1, bits);
        pmu::select(2, 0x3c, 0, ON);
        pmu::start(7);
        clock::wait(5);
        pmu::stop();
        check!(pmu::get(2) > 0, "cycles");
        check_eq!(pmu::get(0), pmu::get(2), "C0H/00H");
        check_eq!(pmu::get(1), pmu::get(2), "C0H/01H");
        pmu::reset();
    }
}

case! {
    name: "misses", cpl: [0], rules: ["EVT-07", "EVT-08", "EVT-13"], needs: [],
    about: "mispredictions do not exceed branches, nor misses of the last cache its references",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::select(0, 0xc5, 0, ON);
        pmu::select(1, 0xc4, 0, ON);
        pmu::select(2, 0x2e, 0x41, ON);
        pmu::select(3, 0x2e, 0x4f, ON);
        counted!(0xf, "mov r8d, 1000", "2: sub r8d, 1", "jnz 2b"; out("r8") _);
        check!(pmu::get(0) <= pmu::get(1), "mispredictions");
        check!(pmu::get(2) <= pmu::get(3), "misses");
        pmu::reset();
    }
}

case! {
    name: "instructions_with_bts", cpl: [0], rules: ["DS-08", "EVT-02"], needs: [],
    about: "the same code retires as many instructions with branches stored as without",
    fn body(ctx) {
        need_pmu!(ctx);
        if !insn::has(Feature::DS) {
            skip!(ctx, "CPUID does not announce DS");
        }
        let area = PebsArea::new(0, 0, [0; 4]);
        // Room for twenty records, circular.
        for (offset, value) in [(0, area.base()), (8, area.base()), (0x10, area.base() + 480), (0x18, u64::MAX)] {
            area.put(offset, value);
        }
        pmu::select(0, 0xc0, 0, ON);
        let counts = [0, DebugCtl::TR.union(DebugCtl::BTS).bits()].map(|debugctl| {
            pmu::set(0, 0);
            msr::write(reg::IA32_DEBUGCTL, debugctl);
            counted!(1,
                "mov r8d, 100", "2: call 3f", "sub r8d, 1", "jnz 2b", "jmp 4f", "3: ret",
                "4: lea r8, [rip + 5f]", "jmp r8", "5: nop"; out("r8") _);
            msr::write(reg::IA32_DEBUGCTL, 0);
            pmu::get(0)
        });
        let expected = 1 + 4 * 100 + 1 + 3 + OVERHEAD;
        check_eq!(counts, [expected; 2], "instructions");
        msr::write(reg::IA32_DS_AREA, 0);
        pmu::reset();
    }
}
