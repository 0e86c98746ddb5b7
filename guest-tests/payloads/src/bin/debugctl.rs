//! IA32_DEBUGCTL: which bits exist, which events clear them, and which do not.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::msr::{self, GP};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ICR_ASSERT, ICR_SELF};
use hindsight_guest::regs::branch::DebugCtl;
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::dr::{BreakpointIndex, Condition, Dr6, Dr7, Length};
use hindsight_guest::regs::msr::{IA32_DEBUGCTL, IA32_DS_AREA, IA32_PERF_CAPABILITIES};
use hindsight_guest::{apic, insn, paging, smp};
use hindsight_payloads::access::{self, ScratchPage};
use hindsight_payloads::branch::recorder::IRQ_VECTOR;
use hindsight_payloads::branch::sequences as seq;
use hindsight_payloads::branch::{
    BTF, BTINT, BTS, BTS_OFF_OS, BTS_OFF_USR, FREEZE_WHILE_SMM, LBR, TR, other_bits, run_sequence,
};
use hindsight_payloads::ds::{self, DsPages};
use hindsight_payloads::{lbr, need_bts, need_lbr, sequence};

payload!("debugctl");

static DS_PAGES: DsPages = DsPages::new();

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
        mask |= DebugCtl::RTM.bits();
    }
    mask
}

case! {
    name: "after_reset", cpl: [0], rules: ["DCTL-01", "MSR-08", "RST-06"], needs: [],
    about: "IA32_DEBUGCTL is 0 after RESET",
    fn body(ctx) {
        need_lbr!(ctx);
        check_eq!(msr::read(IA32_DEBUGCTL), 0, "IA32_DEBUGCTL");
    }
}

case! {
    name: "bits", cpl: [0],
    rules: ["DCTL-02", "DCTL-03", "DCTL-04", "DCTL-05", "DCTL-08", "SMF-01", "SMF-10", "MSR-08"],
    needs: [],
    about: "every existing bit can be set alone; every other bit raises #GP(0) and changes nothing",
    fn body(ctx) {
        need_lbr!(ctx);
        // With this DS area branches store no records.
        if ds::present() {
            msr::write(IA32_DS_AREA, (&raw const NO_BUFFER) as u64);
        }
        let mask = writable();
        if !insn::has(Feature::RTM) && ds::present() && other_bits() != 0 {
            check_eq!(mask, 0x7fc3, "bits that exist");
        }
        for bit in 0..64 {
            let value = 1 << bit;
            msr::write(IA32_DEBUGCTL, BTF);
            let answer = msr::write_safe(IA32_DEBUGCTL, value);
            let found = msr::read(IA32_DEBUGCTL);
            if mask & value != 0 {
                check_eq!((answer.is_ok(), found), (true, value), "write and value, existing bit");
            } else {
                check_eq!((answer, found), (Err(GP), BTF), "write and value, reserved bit");
            }
            let answer = msr::write_safe(IA32_DEBUGCTL, value | mask);
            check_eq!(answer.is_ok(), mask & value != 0, "write together with all existing bits");
        }
        msr::write(IA32_DEBUGCTL, mask);
        check_eq!(msr::read(IA32_DEBUGCTL), mask, "all existing bits");
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
        check_eq!(msr::read(IA32_DEBUGCTL), 0, "IA32_DEBUGCTL");
    }
}

sequence! {
    /// A #DB by INT1.
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
        // With BTF set, TF alone would raise no #DB.
        let runs = [(debug_exception(), all), (data_breakpoint(), all), (single_step(), all & !BTF)];
        for (sequence, value) in runs {
            insn::write_dr6(Dr6::RESET);
            insn::write_dr0(seq::UNMAPPED - 64);
            insn::write_dr7(Dr7::RESET.with_breakpoint(BreakpointIndex(0), Condition::Write, Length::One).0);
            let events = run_sequence(ctx.cpl, sequence, value);
            insn::write_dr7(Dr7::RESET.0);
            insn::write_dr6(Dr6::RESET);
            let found = events.map(|events| (events.debugs, events.debugctl));
            check_eq!(found, Some((1, all & !(LBR | BTF))), "count of #DBs, IA32_DEBUGCTL in the handler");
        }
    }
}

sequence! {
    /// At CPL 0: compares IA32_DEBUGCTL with its first value after INT3, #UD, #DE and an interrupt.
    ///
    /// If it differs, the sequence stores 1 at 128 bytes below the unmapped page.
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
    about: "#BP, other exceptions and interrupts do not change IA32_DEBUGCTL",
    fn body(ctx) {
        need_lbr!(ctx);
        if ds::present() {
            msr::write(IA32_DS_AREA, (&raw const NO_BUFFER) as u64);
        }
        let mark = (seq::UNMAPPED - 128) as *mut u32;
        // SAFETY: the page below the unmapped address is RAM that nothing else uses.
        unsafe { mark.write_volatile(0) };
        apic::enable();
        apic::send(0, ICR_SELF | ICR_ASSERT | u32::from(IRQ_VECTOR));
        let events = run_sequence(0, other_events(), writable());
        let events = require_some!(events, "no unhandled exception");
        check_eq!(events.irqs, 1, "count of interrupts");
        // SAFETY: as above.
        check_eq!(unsafe { mark.read_volatile() }, 0, "mark of a changed value");
    }
}

case! {
    name: "bits_without_effect", cpl: [0, 3], rules: ["DCTL-08", "SMF-10", "BTS-18"], needs: [],
    about: "UNCORE_PMI_EN, FREEZE_WHILE_SMM and the bits that qualify others have no effect alone",
    fn body(ctx) {
        need_bts!(ctx);
        let area = DS_PAGES.arm(50);
        lbr::reset();
        for bits in [other_bits(), writable() & FREEZE_WHILE_SMM, BTINT, BTS_OFF_OS, BTS_OFF_USR, BTS] {
            let events = run_sequence(ctx.cpl, seq::one_of_each(), bits);
            let events = require_some!(events, "no unhandled exception");
            check_eq!((events.debugs, events.irqs), (0, 0), "counts of #DBs and interrupts");
        }
        DS_PAGES.check_stored(&area, &[]);
        check!(lbr::LbrStack::read() == lbr::LbrStack::EMPTY, "no LBR records");
    }
}

/// IA32_DEBUGCTL and TOS of the second CPU before it writes them.
static OTHER: AtomicU64 = AtomicU64::new(0);
static OTHER_TOS: AtomicU64 = AtomicU64::new(0);

/// On the second CPU: reads the MSRs, then writes BTF, the filter and TOS.
fn read_and_write(_index: usize) {
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
    about: "each CPU has its own IA32_DEBUGCTL, MSR_LBR_SELECT and LBR stack",
    fn body(ctx) {
        need_lbr!(ctx);
        need_bts!(ctx);
        require!(smp::start(2), "the second CPU started");
        lbr::reset();
        msr::write(hindsight_guest::regs::msr::MSR_LBR_SELECT, 3);
        msr::write(hindsight_guest::regs::msr::MSR_LASTBRANCH_TOS, 5);
        msr::write(IA32_DEBUGCTL, BTINT);
        smp::run(1, read_and_write);
        smp::wait(1);
        check_eq!(OTHER.load(Ordering::Acquire), 0, "IA32_DEBUGCTL of the second CPU, before");
        check_eq!(OTHER_TOS.load(Ordering::Acquire), 0, "TOS of the second CPU, before");
        check_eq!(msr::read(IA32_DEBUGCTL), BTINT, "IA32_DEBUGCTL of the first CPU, after");
        check_eq!(msr::read(hindsight_guest::regs::msr::MSR_LBR_SELECT), 3, "MSR_LBR_SELECT of the first CPU");
        check_eq!(msr::read(hindsight_guest::regs::msr::MSR_LASTBRANCH_TOS), 5, "TOS of the first CPU");
        msr::write(IA32_DEBUGCTL, 0);
    }
}

static PAGES: [ScratchPage; 2] = [ScratchPage::new(), ScratchPage::new()];

case! {
    name: "mapped_elsewhere_while_recorded", cpl: [0], rules: [], needs: [],
    about: "a new mapping with INVLPG while LBR is set takes effect, and so does the old one afterwards",
    fn body(ctx) {
        need_lbr!(ctx);
        let [first, second] = [PAGES[0].address(), PAGES[1].address()];
        access::store(first, 1);
        access::store(second, 2);
        let entry = paging::entry(first);
        // SAFETY: `entry` returns the address of an entry of a mapped table; nothing else uses the page.
        let old = unsafe { entry.read_volatile() };
        let rounds = (0..8).map(|_| {
            let before = access::load(first);
            msr::write(IA32_DEBUGCTL, LBR);
            // SAFETY: as above; the other page is mapped one to one.
            unsafe { entry.write_volatile(old & !paging::ADDRESS | second) };
            insn::invlpg(first);
            let recorded = access::load(first);
            msr::write(IA32_DEBUGCTL, 0);
            let after = access::load(first);
            // SAFETY: as above.
            unsafe { entry.write_volatile(old) };
            insn::invlpg(first);
            [before, recorded, after]
        });
        for found in rounds {
            check_eq!(found, [1, 2, 2], "bytes before the new mapping, and with it while LBR is set and clear");
        }
    }
}
