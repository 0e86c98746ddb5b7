//! IA32_DEBUGCTL: which bits exist, who clears them, and who does not.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::msr::{self, GP};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ICR_ASSERT, ICR_SELF};
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::dr::{Condition, Dr6, Dr7, Length, BreakpointIndex};
use hindsight_guest::regs::msr::{IA32_DEBUGCTL, IA32_DS_AREA, IA32_PERF_CAPABILITIES};
use hindsight_guest::{apic, insn, paging, smp};
use hindsight_payloads::access::{self, Page};
use hindsight_payloads::branch::recorder::IRQ_VECTOR;
use hindsight_payloads::branch::sequences as seq;
use hindsight_payloads::branch::{
    BTF, BTINT, BTS, BTS_OFF_OS, BTS_OFF_USR, FREEZE_WHILE_SMM, LBR, TR, other_bits, run_sequence,
};
use hindsight_payloads::ds::{self, Store};
use hindsight_payloads::{lbr, need_bts, need_lbr, sequence};

payload!("debugctl");

static STORE: Store = Store::new();

/// Bits 10:6, which belong to the debug store.
const DEBUG_STORE: u64 = TR | BTS | BTINT | BTS_OFF_OS | BTS_OFF_USR;

/// All bits that this processor has.
fn writable() -> u64 {
    let mut mask = LBR | BTF | other_bits();
    if msr::read(IA32_PERF_CAPABILITIES) & (1 << 12) != 0 {
        mask |= FREEZE_WHILE_SMM;
    }
    if ds::present() {
        mask |= DEBUG_STORE;
    }
    if insn::has(Feature::RTM) {
        mask |= 1 << 15;
    }
    mask
}

case! {
    name: "after_reset", cpl: [0], rules: ["DCTL-01", "MSR-08", "RST-06"], needs: [],
    about: "0 after RESET",
    fn body(ctx) {
        need_lbr!(ctx);
        check_eq!(msr::read(IA32_DEBUGCTL), 0, "IA32_DEBUGCTL");
    }
}

case! {
    name: "bits", cpl: [0], rules: ["DCTL-02", "DCTL-03", "DCTL-04", "DCTL-05", "DCTL-08", "SMF-01", "SMF-10", "MSR-08"],
    needs: [],
    about: "every bit of the mask can be set alone and is kept; every other raises #GP(0) and changes nothing",
    fn body(ctx) {
        need_lbr!(ctx);
        // Branches store nothing where this area is.
        if ds::present() {
            msr::write(IA32_DS_AREA, (&raw const NO_BUFFER) as u64);
        }
        let mask = writable();
        if !insn::has(Feature::RTM) && ds::present() && other_bits() != 0 {
            check_eq!(mask, 0x7fc3, "the mask");
        }
        for bit in 0..64 {
            let value = 1 << bit;
            msr::write(IA32_DEBUGCTL, BTF);
            let answer = msr::write_safe(IA32_DEBUGCTL, value);
            let found = msr::read(IA32_DEBUGCTL);
            if mask & value != 0 {
                check_eq!((answer.is_ok(), found), (true, value), "a bit that exists");
            } else {
                check_eq!((answer, found), (Err(GP), BTF), "a reserved bit");
            }
            let answer = msr::write_safe(IA32_DEBUGCTL, value | mask);
            check_eq!(answer.is_ok(), mask & value != 0, "with all the others");
        }
        msr::write(IA32_DEBUGCTL, mask);
        check_eq!(msr::read(IA32_DEBUGCTL), mask, "all bits at once");
        msr::write(IA32_DEBUGCTL, 0);
    }
}

/// A DS area without buffers.
static NO_BUFFER: [u64; 16] = [0; 16];

case! {
    name: "user_access", cpl: [3], rules: ["DCTL-09"], needs: [],
    about: "RDMSR and WRMSR at CPL 3 raise #GP(0)",
    fn body(ctx) {
        need_lbr!(ctx);
        let fault = ctx.run(|| { msr::read(IA32_DEBUGCTL); });
        check_eq!(fault.map(|e| e.code()), Some(GP), "RDMSR");
        for value in [0, LBR] {
            let fault = ctx.run(|| msr::write(IA32_DEBUGCTL, value));
            check_eq!(fault.map(|e| e.code()), Some(GP), "WRMSR");
        }
        check_eq!(msr::read(IA32_DEBUGCTL), 0, "the value");
    }
}

sequence! {
    /// INT1, that is a #DB, alone.
    debug_exception:
        ".byte 0xf1",
        "nop",
    =>
}

sequence! {
    /// A #DB by single-step.
    single_step:
        "pushfq", "or qword ptr [rsp], 0x100", "popfq",
        "nop",
        "nop",
    =>
}

sequence! {
    /// A #DB by a write breakpoint.
    data_breakpoint:
        "mov eax, 0x03d00000",
        "mov byte ptr [rax - 64], 1",
        "nop",
    =>
}

case! {
    name: "debug_exceptions", cpl: [0, 3], rules: ["DCTL-06"], needs: [],
    about: "every #DB clears LBR and BTF before its handler and keeps all other bits",
    fn body(ctx) {
        need_lbr!(ctx);
        if ds::present() {
            msr::write(IA32_DS_AREA, (&raw const NO_BUFFER) as u64);
        }
        let all = writable();
        // BTF would turn the step into one on branches.
        let runs = [(debug_exception(), all), (data_breakpoint(), all), (single_step(), all & !BTF)];
        for (sequence, value) in runs {
            insn::write_dr6(Dr6::RESET);
            insn::write_dr0(seq::UNMAPPED - 64);
            insn::write_dr7(Dr7::RESET.with_breakpoint(BreakpointIndex(0), Condition::Write, Length::One).0);
            let seen = run_sequence(ctx.cpl, sequence, value);
            insn::write_dr7(Dr7::RESET.0);
            insn::write_dr6(Dr6::RESET);
            let found = seen.map(|seen| (seen.debugs, seen.debugctl));
            check_eq!(found, Some((1, all & !(LBR | BTF))), "#DBs, IA32_DEBUGCTL in the handler");
        }
    }
}

sequence! {
    /// At CPL 0: reads IA32_DEBUGCTL into R13 after an INT3, a #UD, a #DE and a hardware interrupt, and
    /// ends with a #UD loop if it is not what it was (R12).
    other_events:
        "mov r14, rsp",
        "mov ecx, 0x1d9", "rdmsr", "mov r12d, eax",
        "int3",
        "rdmsr", "cmp eax, r12d", "jne 29f",
        "ud2",
        "rdmsr", "cmp eax, r12d", "jne 29f",
        "lea r15, [rip + 21f]", "xor eax, eax", "xor edx, edx", "div edx",
        "21: mov ecx, 0x1d9", "rdmsr", "cmp eax, r12d", "jne 29f",
        "sti", "nop", "cli",
        "rdmsr", "cmp eax, r12d", "jne 29f",
        "xor edi, edi",
        "jmp 30f",
        "29: mov edi, 0x03d00000", "mov dword ptr [rdi - 128], 1",
        "30: nop",
    =>
}

case! {
    name: "other_events", cpl: [0], rules: ["DCTL-07"], needs: [],
    about: "#BP, other exceptions and interrupts leave it alone",
    fn body(ctx) {
        need_lbr!(ctx);
        if ds::present() {
            msr::write(IA32_DS_AREA, (&raw const NO_BUFFER) as u64);
        }
        let mark = (seq::UNMAPPED - 128) as *mut u32;
        // SAFETY: the page below that address is in no other use.
        unsafe { mark.write_volatile(0) };
        apic::enable();
        apic::send(0, ICR_SELF | ICR_ASSERT | u32::from(IRQ_VECTOR));
        let seen = require_some!(run_sequence(0, other_events(), writable()), "the run ended well");
        check_eq!(seen.irqs, 1, "interrupts");
        // SAFETY: as above.
        check_eq!(unsafe { mark.read_volatile() }, 0, "a difference was seen");
    }
}

case! {
    name: "bits_without_effect", cpl: [0, 3], rules: ["DCTL-08", "SMF-10", "BTS-18"], needs: [],
    about: "UNCORE_PMI_EN, FREEZE_WHILE_SMM and the bits that qualify others do nothing alone",
    fn body(ctx) {
        need_bts!(ctx);
        let area = STORE.arm(50);
        lbr::reset();
        for bits in [other_bits(), writable() & FREEZE_WHILE_SMM, BTINT, BTS_OFF_OS, BTS_OFF_USR, BTS] {
            let seen = require_some!(run_sequence(ctx.cpl, seq::one_of_each(), bits), "the run ended well");
            check_eq!((seen.debugs, seen.irqs), (0, 0), "#DBs, interrupts");
        }
        STORE.check_stored(&area, &[]);
        check!(lbr::Stack::read() == lbr::Stack::EMPTY, "no LBR records");
    }
}

static OTHER: AtomicU64 = AtomicU64::new(0);
static OTHER_TOS: AtomicU64 = AtomicU64::new(0);

/// On the other processor: sets BTF, and its own filter and entries.
fn write_there(_index: usize) {
    OTHER.store(msr::read(IA32_DEBUGCTL), Ordering::Release);
    OTHER_TOS.store(
        msr::read(hindsight_guest::regs::msr::MSR_LASTBRANCH_TOS),
        Ordering::Release,
    );
    msr::write(IA32_DEBUGCTL, BTF);
    msr::write(hindsight_guest::regs::msr::MSR_LBR_SELECT, 0x1fe);
    msr::write(hindsight_guest::regs::msr::MSR_LASTBRANCH_TOS, 9);
}

case! {
    name: "one_per_processor", cpl: [0], rules: ["DCTL-10", "LSEL-08"], needs: [], vcpus: 2, timeout_ms: 5000,
    about: "each processor has its own IA32_DEBUGCTL, filter and stack",
    fn body(ctx) {
        need_lbr!(ctx);
        need_bts!(ctx);
        require!(smp::start(2), "the second processor started");
        lbr::reset();
        msr::write(hindsight_guest::regs::msr::MSR_LBR_SELECT, 3);
        msr::write(hindsight_guest::regs::msr::MSR_LASTBRANCH_TOS, 5);
        msr::write(IA32_DEBUGCTL, BTINT);
        smp::run(1, write_there);
        smp::wait(1);
        check_eq!(OTHER.load(Ordering::Acquire), 0, "IA32_DEBUGCTL there, before");
        check_eq!(OTHER_TOS.load(Ordering::Acquire), 0, "TOS there, before");
        check_eq!(msr::read(IA32_DEBUGCTL), BTINT, "IA32_DEBUGCTL here, after");
        check_eq!(msr::read(hindsight_guest::regs::msr::MSR_LBR_SELECT), 3, "the filter here");
        check_eq!(msr::read(hindsight_guest::regs::msr::MSR_LASTBRANCH_TOS), 5, "TOS here");
        msr::write(IA32_DEBUGCTL, 0);
    }
}

static PAGES: [Page; 2] = [Page::new(), Page::new()];

case! {
    name: "mapped_elsewhere_while_recorded", cpl: [0], rules: [], needs: [],
    about: "a page that is mapped elsewhere, with INVLPG, while branches are recorded, is still there afterwards",
    fn body(ctx) {
        need_lbr!(ctx);
        let [here, there] = [PAGES[0].address(), PAGES[1].address()];
        access::store(here, 1);
        access::store(there, 2);
        let entry = paging::entry(here);
        // SAFETY: the entry of a page that nothing else uses.
        let old = unsafe { entry.read_volatile() };
        let rounds = (0..8).map(|_| {
            let before = access::load(here);
            msr::write(IA32_DEBUGCTL, LBR);
            // SAFETY: as above; the other page is mapped one to one.
            unsafe { entry.write_volatile(old & !paging::ADDRESS | there) };
            insn::invlpg(here);
            let recorded = access::load(here);
            msr::write(IA32_DEBUGCTL, 0);
            let after = access::load(here);
            // SAFETY: as above.
            unsafe { entry.write_volatile(old) };
            insn::invlpg(here);
            [before, recorded, after]
        });
        for found in rounds {
            check_eq!(found, [1, 2, 2], "before, while branches are recorded, and after");
        }
    }
}
