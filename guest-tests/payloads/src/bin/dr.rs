//! Debug registers: accesses, enables, lengths, and the addresses that match.

#![no_std]
#![no_main]

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::exception::TrapFrame;
use hindsight_guest::msr::GP;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cr::Cr4;
use hindsight_guest::regs::dr::{BreakpointIndex, Condition, Dr6, Dr7, Length};
use hindsight_guest::{insn, paging, port, smp, trap};
use hindsight_payloads::access::{self, ScratchPage};
use hindsight_payloads::debug::{self, BD, arm, at, call, conditions, disarm, events};
use hindsight_payloads::{check_events, snippet};

payload!("dr");

static PAGE: ScratchPage = ScratchPage::new();
static OTHER: ScratchPage = ScratchPage::new();

/// A linear address far above all memory that is used.
const FAR: u64 = 0x4000_0000_0000;
/// A port without a device.
const PORT: u16 = 0xe8;
/// Vector and error code of #UD.
const UD: (u8, u64) = (6, 0);
const B0: u64 = Dr6::B0.bits();

snippet! { store_one [after_store] "mov byte ptr [rdi], 1", "after_store:", "ret" }
snippet! { store_wide [after_wide] "mov qword ptr [rdi], 1", "after_wide:", "ret" }
snippet! { enable_then_nop [enabled_nop] "mov dr7, rdi", "enabled_nop:", "nop", "ret" }
snippet! { prefixed [prefixed_insn prefixed_middle]
    "prefixed_insn:", ".byte 0x66, 0x66", "prefixed_middle:", "mov ax, di", "ret"
}
snippet! { copy_byte [copy_done] "movsb", "copy_done:", "ret" }
snippet! { read_with_66 [] "mov dr0, rdi", ".byte 0x66, 0x0f, 0x21, 0xc0", "ret" }
snippet! { read_with_rexw [] "mov dr0, rdi", ".byte 0x48, 0x0f, 0x21, 0xc0", "ret" }
snippet! { write_with_66 [] ".byte 0x66, 0x0f, 0x23, 0xc7", "mov rax, dr0", "ret" }
snippet! { write_with_rexw [] ".byte 0x48, 0x0f, 0x23, 0xc7", "mov rax, dr0", "ret" }
// Reads into RSI with the values of mod that mean memory in other instructions; no displacement follows.
snippet! { read_mod [] "mov dr0, rdi",
    ".byte 0x0f, 0x21, 0x06", "mov rax, rsi", "xor esi, esi",
    ".byte 0x0f, 0x21, 0x46", "and rax, rsi", "xor esi, esi",
    ".byte 0x0f, 0x21, 0x86", "and rax, rsi", "ret"
}
snippet! { lock_read [] ".byte 0xf0, 0x0f, 0x21, 0xc0", "ret" }
snippet! { lock_write [] ".byte 0xf0, 0x0f, 0x23, 0xc0", "ret" }
snippet! { read_dr15 [] ".byte 0x44, 0x0f, 0x21, 0xf8", "ret" }
snippet! { write_dr15 [] ".byte 0x44, 0x0f, 0x23, 0xf8", "ret" }
snippet! { read_dr4 [] ".byte 0x0f, 0x21, 0xe0", "ret" }
snippet! { write_dr4 [] ".byte 0x0f, 0x23, 0xe7", "ret" }
snippet! { write_dr5 [] ".byte 0x0f, 0x23, 0xef", "ret" }
snippet! { write_dr6_at [write_dr6_insn] "write_dr6_insn:", "mov dr6, rdi", "ret" }

/// The value that a sequence returns.
fn value(code: debug::SnippetFn, first: u64) -> u64 {
    // SAFETY: `snippet!` defines only sequences that follow the C calling convention.
    unsafe { code(first, 0) }
}

/// Runs `f` with this CR4.DE.
fn with_de<R>(de: bool, f: impl FnOnce() -> R) -> R {
    let cr4 = insn::read_cr4();
    let other = cr4 & !Cr4::DE.bits();
    insn::write_cr4(if de { other | Cr4::DE.bits() } else { other });
    let result = f();
    insn::write_cr4(cr4);
    result
}

case! {
    name: "operand_size", cpl: [0], rules: ["DR-09"], needs: [],
    about: "MOV DR has a 64-bit operand, with and without REX.W and 66H",
    fn body(_ctx) {
        let expected = 0x8765_4321_0fed_cba9;
        for code in [read_with_66, read_with_rexw, write_with_66, write_with_rexw] {
            check_eq!(value(code, expected), expected, "all 64 bits");
        }
    }
}

case! {
    name: "mod_is_ignored", cpl: [0], rules: ["DR-10"], needs: [],
    about: "the operand of MOV DR is a register, whatever ModRM.mod is",
    fn body(_ctx) {
        check_eq!(value(read_mod, 0x1234_5678_9abc_def0), 0x1234_5678_9abc_def0, "mod 0, 1 and 2");
    }
}

case! {
    name: "undefined_forms", cpl: [0], rules: ["DR-13", "DR-12"], needs: ["exceptions", "gd"],
    about: "LOCK, DR8 to DR15, and DR4 and DR5 with CR4.DE raise #UD for reads and writes",
    fn body(ctx) {
        for code in [lock_read, lock_write, read_dr15, write_dr15] {
            let fault = debug::run(ctx, code, 0, 0);
            check_eq!(fault.map(|e| e.code()), Some(UD), "LOCK or REX.R");
        }
        with_de(true, || for code in [read_dr4, write_dr4, write_dr5] {
            let fault = debug::run(ctx, code, 0x400, 0);
            check_eq!(fault.map(|e| e.code()), Some(UD), "DR4 and DR5");
        });
    }
}

case! {
    name: "aliases_take_writes", cpl: [0], rules: ["DR-11"], needs: [],
    about: "with CR4.DE clear a write to DR4 or DR5 writes DR6 or DR7",
    fn body(_ctx) {
        with_de(false, || {
            call(write_dr4, 0xffff_4ff1, 0);
            check_eq!(conditions(insn::read_dr6()), 0x4001, "DR6");
            call(write_dr5, 0x0000_0401, 0);
            check_eq!(insn::read_dr7(), 0x401, "DR7");
        });
    }
}

case! {
    name: "checks_in_order", cpl: [0, 3], rules: ["DR-16", "OP-07", "GD-06", "GD-08"],
    needs: ["exceptions", "gd", "guestbp-io"],
    needs_cpl3: ["iretq-cpl3"],
    about: "of several violations, #UD precedes the CPL check, general detect, and the check of bits 63:32",
    fn body(ctx) {
        insn::write_dr6(Dr6::RESET);
        with_de(true, || {
            insn::write_dr7(Dr7::RESET.0 | Dr7::GD);
            let undefined = debug::run(ctx, write_dr4, u64::MAX, 0);
            check_eq!(undefined.map(|e| e.code()), Some(UD), "#UD before the other checks");
        });
        let both = debug::run(ctx, write_dr6_at, u64::MAX, 0);
        let expected = if ctx.cpl == 3 { GP } else { (1, 0) };
        check_eq!(both.map(|e| e.code()), Some(expected), "CPL or general detect");
        if ctx.cpl == 0 {
            check_eq!(both.map(|e| conditions(e.dr6)), Some(BD), "BD");
            check_eq!(both.map(|e| e.rip), Some(at(write_dr6_insn)), "saved RIP");
            let last = debug::run(ctx, write_dr6_at, u64::MAX, 0);
            check_eq!(last.map(|e| e.code()), Some(GP), "check of bits 63:32 at last");
        } else {
            let fault = catch(|| { insn::read_dr0(); });
            check_eq!(fault.map(|e| conditions(e.dr6)), Some(BD), "GD still set");
        }
    }
}

case! {
    name: "active_at_once", cpl: [0], rules: ["DR-17", "DR-30"], needs: ["guestbp-exec-cpl0"],
    about: "a breakpoint on the instruction after the MOV that enables it raises #DB",
    fn body(ctx) {
        insn::write_dr0(at(enabled_nop));
        let dr7 = Dr7::RESET.with_breakpoint(BreakpointIndex(0), Condition::Execute, Length::One);
        let log = events(ctx, enable_then_nop, dr7.0, 0);
        check_events!(log, [(at(enabled_nop), B0)], "next instruction");
    }
}

case! {
    name: "noncanonical_never_matches", cpl: [0, 3], rules: ["DR-07"], needs: ["guestbp-data", "gd"],
    needs_cpl3: ["iretq-cpl3"],
    about: "a breakpoint whose address is not canonical matches no access and no instruction",
    fn body(ctx) {
        for bit in [48, 63] {
            arm(0, PAGE.address() ^ 1 << bit, Condition::ReadWrite, Length::One);
            debug::arm_also(1, debug::start(store_one) ^ 1 << bit, Condition::Execute, Length::One);
            check_events!(events(ctx, store_one, PAGE.address(), 0), [], "no #DB");
        }
    }
}

case! {
    name: "either_enable", cpl: [0, 3], rules: ["DR-19", "DR-20"], needs: ["guestbp-data"],
    needs_cpl3: ["iretq-cpl3"],
    about: "Ln or Gn alone enables a breakpoint, none disables it; LE and GE have no effect",
    fn body(ctx) {
        let address = PAGE.address();
        insn::write_dr(2, address);
        let fields = 0b0001 << 24; // a write of one byte
        for exact in [0, 1 << 8, 1 << 9, 3 << 8] {
            for (enable, hits) in [(0b00, 0), (0b01, 1), (0b10, 1), (0b11, 1)] {
                insn::write_dr7(Dr7::RESET.0 | fields | enable << 4 | exact);
                let log = events(ctx, store_one, address, 0);
                check_eq!(log.count(), hits, "count of #DBs");
                if hits == 1 {
                    check_eq!(debug::event(log, 0), (at(after_store), Dr6::B2.bits()), "RIP and conditions");
                }
            }
        }
    }
}

case! {
    name: "linear_addresses", cpl: [0, 3], rules: ["DR-21"], needs: ["guestbp-data"],
    needs_cpl3: ["iretq-cpl3"],
    about: "an access through another linear address of the same page does not match",
    fn body(ctx) {
        let frame = PAGE.address();
        paging::map(FAR, frame, paging::P | paging::RW | paging::US);
        for (address, other) in [(frame, FAR), (FAR, frame)] {
            arm(0, address + 8, Condition::Write, Length::One);
            check_events!(events(ctx, store_one, other + 8, 0), [], "other address");
            arm(0, address + 8, Condition::Write, Length::One);
            let log = events(ctx, store_one, address + 8, 0);
            check_events!(log, [(at(after_store), B0)], "address of the breakpoint");
        }
        paging::unmap(FAR);
    }
}

case! {
    name: "eight_bytes", cpl: [0, 3], rules: ["DR-23", "WP-05"], needs: ["guestbp-data"],
    needs_cpl3: ["iretq-cpl3"],
    about: "a data breakpoint with LEN = 10B covers eight bytes",
    fn body(ctx) {
        let base = PAGE.address() + 0x40;
        for (offset, hits) in [(7, 0), (8, 1), (11, 1), (15, 1), (16, 0)] {
            arm(3, base + 13, Condition::Write, Length::Eight);
            check_eq!(events(ctx, store_one, base + offset, 0).count(), hits, "count of #DBs");
        }
    }
}

case! {
    name: "io_needs_de", cpl: [0], rules: ["DR-24", "IOB-08", "DR-18"], needs: ["guestbp-io"],
    about: "with CR4.DE clear a breakpoint with R/W = 10B never matches; CR4.DE does not change DR7",
    fn body(ctx) {
        let (mut clear, mut set) = (0, 0);
        let out = || {
            port::outb(PORT, 0);
            access::store(PAGE.address(), 0);
        };
        for address in [u64::from(PORT), PAGE.address()] {
            with_de(false, || {
                arm(0, address, Condition::Io, Length::One);
                clear += hindsight_guest::catch::logged(debug::DB, out).count();
                let before = insn::read_dr7();
                with_de(true, || {
                    check_eq!(insn::read_dr7(), before, "DR7 after CR4.DE was set");
                    set += hindsight_guest::catch::logged(debug::DB, || { ctx.run(out); }).count();
                });
            });
            disarm();
        }
        check_eq!((clear, set), (0, 1), "count of #DBs with DE clear and set");
    }
}

case! {
    name: "execute_with_length", cpl: [0, 3], rules: ["DR-25", "OP-01"], needs: ["guestbp-io"],
    about: "an instruction breakpoint with a length other than 1 never matches",
    fn body(ctx) {
        for length in [Length::Two, Length::Four, Length::Eight] {
            arm(0, debug::start(store_one), Condition::Execute, length);
            check_events!(events(ctx, store_one, PAGE.address(), 0), [], "no #DB");
        }
    }
}

case! {
    name: "first_byte_only", cpl: [0, 3], rules: ["DR-26"], needs: [], needs_cpl0: ["guestbp-exec-cpl0"],
    needs_cpl3: ["guestbp-exec-cpl3", "iretq-cpl3"],
    about: "an instruction breakpoint matches at the first prefix, not at the opcode after it",
    fn body(ctx) {
        debug::arm_at(0, prefixed_middle);
        check_events!(events(ctx, prefixed, 0, 0), [], "breakpoint on the second byte");
        debug::arm_at(0, prefixed_insn);
        check_events!(events(ctx, prefixed, 0, 0), [(at(prefixed_insn), B0)], "breakpoint on the first byte");
    }
}

static FAULT_CONDITIONS: AtomicU64 = AtomicU64::new(0);

/// Handles a page fault: records DR6 and makes OTHER present.
fn map_other(_frame: &mut TrapFrame) {
    FAULT_CONDITIONS.store(conditions(insn::read_dr6()), Ordering::Relaxed);
    paging::change(OTHER.address(), paging::P, 0);
}

case! {
    name: "faulting_instruction", cpl: [0, 3], rules: ["DR-28", "WP-18"],
    needs: ["guestbp-data", "exceptions"],
    needs_cpl3: ["iretq-cpl3"],
    about: "a MOVSB whose load hits a breakpoint and whose store faults raises #DB when it is restarted",
    fn body(ctx) {
        let (from, to) = (PAGE.address(), OTHER.address());
        access::store(from, 77);
        paging::change(to, 0, paging::P);
        FAULT_CONDITIONS.store(u64::MAX, Ordering::Relaxed);
        trap::set_handler(14, map_other);
        arm(0, from, Condition::ReadWrite, Length::One);
        let log = events(ctx, copy_byte, to, from);
        trap::clear_handler(14);
        check_eq!(FAULT_CONDITIONS.load(Ordering::Relaxed), 0, "DR6 at the fault");
        check_events!(log, [(at(copy_done), B0)], "after the restart");
        check_eq!(access::load(to), 77, "byte copied");
    }
}

/// Values that the second CPU read.
static FOUND: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];

case! {
    name: "per_processor", cpl: [0], rules: ["DR-29"], needs: ["guestbp-data"], vcpus: 2, timeout_ms: 5000,
    about: "each CPU has its own debug registers and breakpoints",
    fn body(ctx) {
        require!(smp::start(2), "the second CPU started");
        arm(1, PAGE.address(), Condition::Write, Length::One);
        insn::write_dr6(Dr6::RESET | 8);
        smp::run_all(2, |_| {
            for (found, value) in FOUND.iter().zip([insn::read_dr1(), insn::read_dr6(), insn::read_dr7()]) {
                found.store(value, Ordering::Relaxed);
            }
            call(store_one, PAGE.address(), 0);
            insn::write_dr1(0x1234);
        });
        let found = FOUND.each_ref().map(|value| value.load(Ordering::Relaxed));
        check_eq!(found, [0, Dr6::RESET, Dr7::RESET.0], "DR1, DR6 and DR7 of the second CPU");
        let own = (insn::read_dr1(), insn::read_dr6());
        check_eq!(own, (PAGE.address(), Dr6::RESET | 8), "DR1 and DR6 of the first CPU");
        let log = events(ctx, store_wide, PAGE.address(), 0);
        check_events!(log, [(at(after_wide), Dr6::B1.bits())], "breakpoint of the first CPU");
    }
}

case! {
    name: "init", cpl: [0], rules: ["DR-01", "RST-01", "RST-02", "RST-03"], needs: [], vcpus: 2,
    timeout_ms: 5000,
    about: "INIT resets DR0 to DR3, DR6 and DR7",
    fn body(_ctx) {
        require!(smp::start(2), "the second CPU started");
        smp::run_all(2, |_| {
            (0..4).for_each(|n| insn::write_dr(n, FAR + u64::from(n)));
            insn::write_dr6(0xffff_4ff3);
            // No breakpoint is enabled, because the emulator of the amd lab keeps those that INIT disarms.
            insn::write_dr7(0xffff_0700);
            FOUND[0].store(insn::read_dr7(), Ordering::Relaxed);
        });
        check!(FOUND[0].load(Ordering::Relaxed) != 0x400, "registers changed before INIT");
        require!(smp::restart(1), "the second CPU started again");
        smp::run_all(2, |_| {
            let addresses = insn::read_dr0() | insn::read_dr1() | insn::read_dr2() | insn::read_dr3();
            for (found, value) in FOUND.iter().zip([addresses, insn::read_dr6(), insn::read_dr7()]) {
                found.store(value, Ordering::Relaxed);
            }
        });
        let found = FOUND.each_ref().map(|value| value.load(Ordering::Relaxed));
        check_eq!(found, [0, 0xffff_0ff0, 0x400], "DR0 to DR3, DR6 and DR7");
    }
}

// Code of the second CPU after INIT and a start-up IPI: it stores FLAGS and CR4 at 9800H.
core::arch::global_asm!(
    ".pushsection .rodata.reset, \"a\"",
    ".global reset_begin, reset_end",
    ".code16",
    "reset_begin:",
    "pushf",
    "pop word ptr cs:[0x800]",
    "mov eax, cr4",
    "mov dword ptr cs:[0x804], eax",
    "mov byte ptr cs:[0x808], 1",
    "2: hlt",
    "jmp 2b",
    "reset_end:",
    ".code64",
    ".popsection",
);

unsafe extern "C" {
    static reset_begin: u8;
    static reset_end: u8;
}

/// The page to which the code above is copied.
const RESET_PAGE: u8 = 9;

case! {
    name: "init_flags", cpl: [0], rules: ["RST-04", "RST-05"], needs: [], vcpus: 2, timeout_ms: 5000,
    about: "INIT leaves EFLAGS 2H and CR4 0",
    fn body(_ctx) {
        require!(smp::start(2), "the second CPU started");
        let base = u64::from(RESET_PAGE) << 12;
        let results = (base + 0x800) as *mut u32;
        // SAFETY: the page is RAM that nothing uses, and code and results fit in it.
        unsafe {
            let begin = &raw const reset_begin;
            let length = (&raw const reset_end).offset_from_unsigned(begin);
            core::ptr::copy_nonoverlapping(begin, base as *mut u8, length);
            (0..3).for_each(|n| results.add(n).write_volatile(0));
        }
        hindsight_guest::apic::send_init(1);
        hindsight_guest::apic::send_startup(1, RESET_PAGE);
        // SAFETY: the results are in that page; the second CPU writes them, hence volatile.
        let read = |n: usize| unsafe { results.add(n).read_volatile() };
        let started = hindsight_payloads::clock::wait_until(2000, || read(2) != 0);
        require!(started, "the second CPU started");
        check_eq!(read(0) & 0xffff, 2, "FLAGS");
        check_eq!(read(1), 0, "CR4");
        require!(smp::restart(1), "the second CPU started again");
    }
}

case! {
    name: "unaligned_read_back", cpl: [0], rules: ["WP-05"], needs: [],
    about: "the low address bits that LEN ignores read back as written",
    fn body(_ctx) {
        arm(0, FAR + 7, Condition::Write, Length::Eight);
        let found: u64;
        // SAFETY: reading a register touches no memory.
        unsafe { asm!("mov {}, dr0", out(reg) found, options(nomem, nostack)) };
        check_eq!(found, FAR + 7, "DR0");
    }
}

case! {
    name: "no_rtm_bit", cpl: [0], rules: ["DR-05", "OP-05"], needs: ["gd", "guestbp-io"],
    about: "DR7[11] reads 0 if CPUID does not report RTM",
    fn body(_ctx) {
        insn::write_dr7(Dr7::RESET.0 | Dr7::RTM);
        check_eq!(insn::read_dr7(), Dr7::RESET.0, "DR7");
    }
}
