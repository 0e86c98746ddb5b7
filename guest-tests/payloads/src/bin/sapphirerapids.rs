//! What Sapphire Rapids adds: architectural LBR, and XSAVES of it.

#![no_std]
#![no_main]

use core::arch::asm;

use hindsight_guest::catch::catch;
use hindsight_guest::insn::{self, cpuid};
use hindsight_guest::msr::{self, GP};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::branch::{CYC_CNT_MAX, LbrCtl, LbrInfo, arch_info, xsave};
use hindsight_guest::regs::cpuid::{Feature, LEAF_LBR};
use hindsight_guest::regs::cr::Cr4;
use hindsight_guest::regs::dr::Dr6;
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::pmu::global;
use hindsight_guest::report;
use hindsight_payloads::branch::recorder::{STOP, set_control};
use hindsight_payloads::branch::sequences as seq;
use hindsight_payloads::branch::{
    BranchRun, BranchSequence, FREEZE_LBRS_ON_PMI, FREEZE_PERFMON_ON_PMI, LBR, TakenBranch,
    run_checked, run_sequence,
};
use hindsight_payloads::pmu::{self, INT, ON};
use hindsight_payloads::{counted, sequence};

payload!("sapphirerapids");

/// Family 6 model 8FH stepping 8.
const SIGNATURE: u32 = 0x806f8;
/// The highest value of IA32_LBR_DEPTH.
const DEPTH: u32 = 32;
/// IA32_LBR_CTL: all branches are recorded.
const ALL: u64 = LbrCtl::PASS.bits() | LbrCtl::ENABLE.bits();
/// IA32_LBR_CTL: call-stack mode as Linux sets it, at every level.
const CALL_STACK: u64 = LbrCtl::ENABLE.bits()
    | LbrCtl::OS.bits()
    | LbrCtl::USR.bits()
    | LbrCtl::CALL_STACK.bits()
    | LbrCtl::NEAR_REL_CALL.bits()
    | LbrCtl::NEAR_IND_CALL.bits()
    | LbrCtl::NEAR_RET.bits();
/// FROM of a branch whose source is at a level that is not recorded.
const HIDDEN: u64 = u64::MAX;
/// An entry without a branch.
const EMPTY: ((u64, u64), u64) = ((0, 0), 0);

/// Ends the case as skipped unless it runs on Hindsight's model with all of its facilities.
macro_rules! need_sapphire_rapids {
    ($ctx:expr) => {
        if cpuid(0x4000_0000, 0).ebx != u32::from_le_bytes(*b"Hind") {
            skip!($ctx, "models are Hindsight's");
        }
        require_eq!(cpuid(1, 0).eax, SIGNATURE, "the signature");
        if !insn::has(Feature::ARCH_LBR) {
            skip!($ctx, "KVM alone has no architectural LBR");
        }
    };
}

/// The bit of IA32_LBR_CTL for a class, which is a bit number of MSR_LBR_SELECT.
fn class_bit(class: u64) -> LbrCtl {
    match class {
        2 => LbrCtl::JCC,
        3 => LbrCtl::NEAR_REL_CALL,
        4 => LbrCtl::NEAR_IND_CALL,
        5 => LbrCtl::NEAR_RET,
        6 => LbrCtl::NEAR_IND_JMP,
        7 => LbrCtl::NEAR_REL_JMP,
        _ => LbrCtl::OTHER_BRANCH,
    }
}

/// BR_TYPE of a class.
fn branch_type(class: u64) -> u64 {
    match class {
        2 => arch_info::JCC,
        3 => arch_info::NEAR_REL_CALL,
        4 => arch_info::NEAR_IND_CALL,
        5 => arch_info::NEAR_RET,
        6 => arch_info::NEAR_IND_JMP,
        7 => arch_info::NEAR_REL_JMP,
        _ => arch_info::OTHER_BRANCH,
    }
}

fn level_bit(cpl: u8) -> LbrCtl {
    if cpl == 0 { LbrCtl::OS } else { LbrCtl::USR }
}

/// FROM, TO and INFO of an entry, 0 being the newest.
fn entry(number: u32) -> ((u64, u64), u64) {
    let from = msr::read(reg::IA32_LBR_0_FROM_IP + number);
    let to = msr::read(reg::IA32_LBR_0_TO_IP + number);
    ((from, to), msr::read(reg::IA32_LBR_0_INFO + number))
}

/// Clears the stack and the last event record, and selects the number of entries.
fn clear(depth: u32) {
    msr::write(reg::IA32_LBR_CTL, 0);
    msr::write(reg::IA32_LBR_DEPTH, u64::from(depth));
    for index in [
        reg::MSR_LER_FROM_LIP,
        reg::MSR_LER_TO_LIP,
        reg::IA32_LER_INFO,
    ] {
        msr::write(index, 0);
    }
}

/// Checks an entry: the branch, its type, and no other flag than CYC_CNT_VALID and MISPRED.
fn check_entry(number: u32, branch: &TakenBranch, from: u64) -> bool {
    let (found, info) = entry(number);
    let flags = info & !(CYC_CNT_MAX | LbrInfo::MISPRED.bits());
    let expected =
        arch_info::CYC_CNT_VALID | branch_type(branch.class()) << arch_info::BR_TYPE_SHIFT;
    check_eq!(found, (from, branch.to), "FROM and TO")
        & check_eq!(flags, expected, "the flags of INFO")
}

/// Checks that exactly the branches that pass are in the stack, which was empty, and nothing else.
fn check_filtered(level: u8, sequence: &BranchSequence, control: LbrCtl) -> bool {
    clear(DEPTH);
    if run_sequence(level, sequence, control.bits()).is_none() {
        return false;
    }
    let all = sequence.all(level);
    let passing = all.filtered(|branch| {
        let needed = class_bit(branch.class()) | level_bit(branch.cpl_after(level));
        branch.class() != 0 && control.contains(needed)
    });
    let mut good = true;
    let mut number = 0;
    for branch in passing.items().iter().rev().take(DEPTH as usize) {
        let from = if control.contains(level_bit(branch.cpl_before(level))) {
            branch.from
        } else {
            HIDDEN
        };
        good &= check_entry(number, branch, from);
        number += 1;
    }
    for number in number..DEPTH {
        good &= check_eq!(entry(number), EMPTY, "an entry without a branch");
    }
    good
}

case! {
    name: "enumeration", cpl: [0], rules: ["GEN-28"], needs: ["msr-exit"], cpu: "sapphirerapids",
    about: "CPUID.1CH and IA32_PERF_CAPABILITIES announce architectural LBR, whose MSRs replace the others",
    fn body(ctx) {
        need_sapphire_rapids!(ctx);
        check!(cpuid(0, 0).eax >= LEAF_LBR, "the highest leaf");
        let leaf = cpuid(LEAF_LBR, 0);
        check_eq!((leaf.eax, leaf.ebx), (0x8000_000b, 7), "CPUID.1CH:EAX, EBX");
        check_eq!((leaf.ecx, leaf.edx), (7, 0), "CPUID.1CH:ECX, EDX");
        check_eq!(msr::read(reg::IA32_PERF_CAPABILITIES) & 0x3f, 0x3f, "the LBR format");
        for index in [
            reg::MSR_LBR_SELECT,
            reg::MSR_LASTBRANCH_TOS,
            reg::MSR_LASTBRANCH_0_FROM_IP,
            reg::MSR_LASTBRANCH_0_FROM_IP + 31,
            reg::MSR_LASTBRANCH_0_TO_IP,
            reg::MSR_LBR_INFO_0,
            reg::CORE_LASTBRANCH_0_FROM_IP,
            reg::IA32_LBR_0_INFO + DEPTH,
            reg::IA32_LBR_0_FROM_IP + DEPTH,
            reg::IA32_LBR_0_TO_IP + DEPTH,
        ] {
            if !check_eq!(msr::read_safe(index), Err(GP), "an MSR that does not exist") {
                report::measurement("msr", u64::from(index));
            }
        }
    }
}

case! {
    name: "registers", cpl: [0], rules: ["GEN-29"], needs: ["msr-exit"], cpu: "sapphirerapids",
    about: "reserved bits of IA32_LBR_CTL, the depths, and the values of entries",
    fn body(ctx) {
        need_sapphire_rapids!(ctx);
        clear(DEPTH);
        for bit in 0..64 {
            let exists = LbrCtl::all().bits() >> bit & 1 != 0;
            // LBREn would record.
            if bit != 0 && !check_eq!(msr::write_safe(reg::IA32_LBR_CTL, 1 << bit).is_ok(), exists, "a bit of IA32_LBR_CTL") {
                report::measurement("bit", bit);
            }
        }
        msr::write(reg::IA32_LBR_CTL, LbrCtl::JCC.bits());
        check_eq!(msr::read(reg::IA32_LBR_CTL), LbrCtl::JCC.bits(), "IA32_LBR_CTL");
        for depth in [8, 16, 32] {
            msr::write(reg::IA32_LBR_DEPTH, 32);
            let values = [(reg::IA32_LBR_0_FROM_IP, HIDDEN), (reg::IA32_LBR_0_TO_IP, 0x1234), (reg::IA32_LBR_0_INFO, u64::MAX)];
            for (first, value) in values {
                msr::write(first, value);
                msr::write(first + depth - 1, value);
            }
            let info = LbrInfo::all().bits() | arch_info::BR_TYPE | arch_info::CYC_CNT_VALID | CYC_CNT_MAX;
            check_eq!(entry(depth - 1), ((HIDDEN, 0x1234), info), "what was written");
            msr::write(reg::IA32_LBR_DEPTH, u64::from(depth));
            check_eq!(msr::read(reg::IA32_LBR_DEPTH), u64::from(depth), "IA32_LBR_DEPTH");
            for number in 0..depth {
                check_eq!(entry(number), EMPTY, "an entry after a write to IA32_LBR_DEPTH");
            }
            for first in [reg::IA32_LBR_0_FROM_IP, reg::IA32_LBR_0_TO_IP, reg::IA32_LBR_0_INFO] {
                check_eq!(msr::read_safe(first + depth), Err(GP), "RDMSR beyond the depth");
                check_eq!(msr::write_safe(first + depth, 0), Err(GP), "WRMSR beyond the depth");
            }
        }
        for depth in [0, 1, 7, 9, 24, 33, 40, 64, 1 << 32 | 8] {
            check_eq!(msr::write_safe(reg::IA32_LBR_DEPTH, depth), Err(GP), "a depth that CPUID.1CH does not have");
        }
        for index in [reg::IA32_LBR_0_FROM_IP, reg::IA32_LBR_0_TO_IP + 31, reg::MSR_LER_FROM_LIP] {
            check_eq!(msr::write_safe(index, 1 << 63), Err(GP), "an address that is not canonical");
        }
        clear(DEPTH);
    }
}

case! {
    name: "debugctl", cpl: [0], rules: ["GEN-32"], needs: ["msr-exit"], cpu: "sapphirerapids",
    about: "IA32_DEBUGCTL.LBR is ignored",
    fn body(ctx) {
        need_sapphire_rapids!(ctx);
        clear(DEPTH);
        set_control(reg::IA32_DEBUGCTL);
        msr::write(reg::IA32_LBR_CTL, LbrCtl::PASS.bits());
        run_sequence(0, seq::one_of_each(), LBR);
        msr::write(reg::IA32_DEBUGCTL, LBR | FREEZE_LBRS_ON_PMI);
        check_eq!(msr::read(reg::IA32_DEBUGCTL), FREEZE_LBRS_ON_PMI, "IA32_DEBUGCTL");
        msr::write(reg::IA32_DEBUGCTL, 0);
        check_eq!(entry(0), EMPTY, "the newest entry");
        clear(DEPTH);
    }
}

case! {
    name: "records", cpl: [0, 3], rules: ["GEN-29", "GEN-30"], needs: ["msr-exit"], cpu: "sapphirerapids",
    about: "entry 0 is the newest branch; INFO has its type and CYC_CNT_VALID",
    fn body(ctx) {
        need_sapphire_rapids!(ctx);
        set_control(reg::IA32_LBR_CTL);
        let control = LbrCtl::from_bits_retain(ALL);
        for sequence in [
            seq::one_of_each(), seq::conditionals(), seq::jumps(), seq::calls(),
            seq::far_transfers(), seq::software_interrupts(), seq::faults(),
        ] {
            check_filtered(ctx.cpl, sequence, control);
        }
        clear(DEPTH);
    }
}

case! {
    name: "cycles", cpl: [0], rules: ["GEN-29"], needs: ["msr-exit"], cpu: "sapphirerapids",
    about: "CYC_CNT counts from the branch before, and a stack of 8 entries keeps the newest",
    fn body(ctx) {
        need_sapphire_rapids!(ctx);
        set_control(reg::IA32_LBR_CTL);
        clear(8);
        require!(run_sequence(0, twelve_jumps(), ALL).is_some(), "no unhandled exception");
        let all = twelve_jumps().all(0);
        for (number, branch) in (0..).zip(all.items().iter().rev().take(8)) {
            check_entry(number, branch, branch.from);
        }
        // Two NOPs and the jump.
        let (_, info) = entry(1);
        if info & LbrInfo::MISPRED.bits() == 0 {
            check_eq!(info & CYC_CNT_MAX, 3, "CYC_CNT");
        }
        clear(DEPTH);
    }
}

sequence! {
    /// Twelve jumps, the last after two NOPs.
    twelve_jumps:
        "20: jmp 21f", "ud2", "21: jmp 22f", "ud2", "22: jmp 23f", "ud2", "23: jmp 24f", "ud2",
        "24: jmp 25f", "ud2", "25: jmp 26f", "ud2", "26: jmp 27f", "ud2", "27: jmp 28f", "ud2",
        "28: jmp 29f", "ud2", "29: jmp 30f", "ud2", "30: jmp 31f", "ud2",
        "31: nop", "nop", "32: jmp 33f", "ud2", "33: nop",
    => ["20b", "21b", "REL_JMP"], ["21b", "22b", "REL_JMP"], ["22b", "23b", "REL_JMP"],
        ["23b", "24b", "REL_JMP"], ["24b", "25b", "REL_JMP"], ["25b", "26b", "REL_JMP"],
        ["26b", "27b", "REL_JMP"], ["27b", "28b", "REL_JMP"], ["28b", "29b", "REL_JMP"],
        ["29b", "30b", "REL_JMP"], ["30b", "31b", "REL_JMP"], ["32b", "33b", "REL_JMP"],
}

case! {
    name: "filters", cpl: [0, 3], rules: ["GEN-30", "GEN-31"], needs: ["msr-exit"], cpu: "sapphirerapids",
    timeout_ms: 20000,
    about: "with each of the 512 combinations of filter bits, the branches that pass are recorded",
    fn body(ctx) {
        need_sapphire_rapids!(ctx);
        set_control(reg::IA32_LBR_CTL);
        for filter in 0..0x200_u64 {
            let bits = (filter & 3) << 1 | (filter >> 2) << 16;
            let control = LbrCtl::from_bits_retain(bits) | LbrCtl::ENABLE;
            if !check_filtered(ctx.cpl, seq::one_of_each(), control) {
                report::measurement("control", control.bits());
                break;
            }
        }
        clear(DEPTH);
    }
}

case! {
    name: "levels", cpl: [3], rules: ["GEN-31"], needs: ["msr-exit"], cpu: "sapphirerapids",
    about: "a branch from a level that is not recorded to one that is has FFFFFFFFFFFFFFFFH in FROM",
    fn body(ctx) {
        need_sapphire_rapids!(ctx);
        set_control(reg::IA32_LBR_CTL);
        seq::set_fast_calls();
        for left_out in [LbrCtl::OS, LbrCtl::USR] {
            let control = LbrCtl::from_bits_retain(ALL) - left_out;
            for sequence in [
                seq::syscall_sysret(), seq::sysenter_sysexit(), seq::software_interrupts(), seq::faults(),
            ] {
                check_filtered(ctx.cpl, sequence, control);
            }
        }
        clear(DEPTH);
    }
}

sequence! {
    /// Calls A, which calls B by register and then C through memory; the sequence ends in C.
    calls_a_b_c:
        "20: call 30f",
        "ud2",
        "30: lea rax, [rip + 40f]",
        "31: call rax",
        "32: lea rax, [rip + 50f]", "push rax",
        "33: call qword ptr [rsp]",
        "ud2",
        "40: call 41f",
        "41: pop rcx", "ret",
        "50: nop",
    => ["20b", "30b", "REL_CALL"], ["33b", "50b", "IND_CALL"],
}

case! {
    name: "call_stack", cpl: [0, 3], rules: ["GEN-30"], needs: ["msr-exit"], cpu: "sapphirerapids",
    about: "in call-stack mode a return removes the record of its call",
    fn body(ctx) {
        need_sapphire_rapids!(ctx);
        set_control(reg::IA32_LBR_CTL);
        clear(DEPTH);
        require!(run_sequence(ctx.cpl, calls_a_b_c(), CALL_STACK).is_some(), "no unhandled exception");
        let [a, c] = calls_a_b_c().records() else { return };
        check_entry(0, c, c.from);
        check_entry(1, a, a.from);
        for number in 2..DEPTH {
            check_eq!(entry(number), EMPTY, "an entry without a call");
        }
        clear(DEPTH);
    }
}

sequence! {
    /// A branch, and then INT1.
    branch_then_debug:
        "20: jmp 21f", "ud2",
        "21: .byte 0xf1",
        "22: jmp 23f", "ud2",
        "23: nop",
    => ["20b", "21b", "REL_JMP"],
}

case! {
    name: "debug_exception", cpl: [0, 3], rules: ["GEN-32"], needs: ["msr-exit"], cpu: "sapphirerapids",
    about: "a #DB clears IA32_LBR_CTL.LBREn before its handler, and is not recorded",
    fn body(ctx) {
        need_sapphire_rapids!(ctx);
        set_control(reg::IA32_LBR_CTL);
        clear(DEPTH);
        let events = run_sequence(ctx.cpl, branch_then_debug(), ALL);
        insn::write_dr6(Dr6::RESET);
        let events = require_some!(events, "no unhandled exception");
        check_eq!(events.debugs, 1, "count of #DBs");
        check_eq!(events.debugctl, ALL & !LbrCtl::ENABLE.bits(), "IA32_LBR_CTL in the handler");
        let branch = &branch_then_debug().records()[0];
        check_entry(0, branch, branch.from);
        clear(DEPTH);
    }
}

sequence! {
    /// A branch, and then a UD2.
    branch_then_fault:
        "xor eax, eax",
        "20: jz 21f", "ud2",
        "21: jmp 22f", "ud2",
        "22: nop",
        "23: ud2",
    => ["20b", "21b", "JCC"], ["21b", "22b", "REL_JMP"], ["23b", "recorder_stop", "FAR_IN"],
}

case! {
    name: "last_event_record", cpl: [0, 3], rules: ["GEN-33"], needs: ["msr-exit"], cpu: "sapphirerapids",
    about: "an exception stores the record before it in the last event record, with its INFO",
    fn body(ctx) {
        need_sapphire_rapids!(ctx);
        set_control(reg::IA32_LBR_CTL);
        clear(DEPTH);
        let ended = run_checked(BranchRun {
            handlers: &[(6, STOP)],
            ..BranchRun::new(ctx.cpl, branch_then_fault(), ALL)
        });
        require!(ended.is_some(), "no unhandled exception");
        let ler = (
            (msr::read(reg::MSR_LER_FROM_LIP), msr::read(reg::MSR_LER_TO_LIP)),
            msr::read(reg::IA32_LER_INFO),
        );
        check_eq!(ler, entry(1), "the last event record");
        let branch = &branch_then_fault().records()[1];
        check_entry(1, branch, branch.from);
        clear(DEPTH);
    }
}

case! {
    name: "freeze", cpl: [0], rules: ["GEN-33"], needs: ["msr-exit"], cpu: "sapphirerapids",
    about: "a PMI request with FREEZE_LBRS_ON_PMI stops the stack until LBR_FRZ is cleared",
    fn body(ctx) {
        need_sapphire_rapids!(ctx);
        clear(DEPTH);
        pmu::reset();
        pmu::select(0, 0xc0, 0, ON | INT);
        pmu::preset(0, 3);
        msr::write(reg::IA32_DEBUGCTL, FREEZE_LBRS_ON_PMI | FREEZE_PERFMON_ON_PMI);
        msr::write(reg::IA32_LBR_CTL, ALL & !LbrCtl::NEAR_REL_CALL.bits() & !LbrCtl::NEAR_RET.bits());
        let (target, late): (u64, u64);
        counted!(1, "jmp 2f", "nop", "2: nop", "nop", "nop", "3: jmp 4f", "nop", "4: nop",
            "lea r8, [rip + 2b]", "lea r9, [rip + 4b]"; out("r8") target, out("r9") late,);
        check_eq!(pmu::status() & global::LBR_FRZ, global::LBR_FRZ, "LBR_FRZ");
        check_eq!(msr::read(reg::IA32_LBR_CTL) & 1, 1, "LBREn");
        check_eq!(entry(0).0.1, target, "the newest entry");
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, global::LBR_FRZ | 1);
        counted!(0, "3: jmp 4f", "nop", "4: nop", "lea r9, [rip + 4b]"; out("r9") _,);
        msr::write(reg::IA32_LBR_CTL, 0);
        check!(entry(0).0.1 != target && target != late, "the stack records again");
        pmu::reset();
        clear(DEPTH);
    }
}

/// An XSAVE area: the header is at word 64, and a lone component at word 72.
#[repr(C, align(64))]
struct XsaveArea([u64; 72 + xsave::BYTES as usize / 8]);

/// Words of the header: XSTATE_BV and XCOMP_BV.
const XSTATE_BV: usize = 64;
const XCOMP_BV: usize = 65;
/// The first word of the component: IA32_LBR_CTL.
const COMPONENT: usize = 72;
/// The component's bit in IA32_XSS.
const COMPONENT_BIT: u64 = 1 << xsave::COMPONENT;
/// The component alone, in EAX.
const COMPONENT_MASK: u32 = 1 << xsave::COMPONENT;

impl XsaveArea {
    /// An area whose header is 0, and nothing else.
    fn new() -> Self {
        let mut words = [0x5a5a_5a5a_5a5a_5a5a; 72 + xsave::BYTES as usize / 8];
        words[XSTATE_BV..COMPONENT].fill(0);
        Self(words)
    }

    /// XSAVES of architectural LBR.
    fn save(&mut self) {
        // SAFETY: the area has room for the component.
        unsafe {
            asm!("xsaves64 [{0}]", in(reg) &raw mut self.0, in("eax") COMPONENT_MASK, in("edx") 0);
        }
    }

    /// XRSTORS of architectural LBR. Returns the vector of an exception.
    fn restore(&self) -> Option<u8> {
        // SAFETY: it changes nothing but the LBR MSRs.
        let fault = catch(|| unsafe {
            asm!("xrstors64 [{0}]", in(reg) &raw const self.0, in("eax") COMPONENT_MASK, in("edx") 0);
        });
        fault.map(|exception| exception.code().0)
    }
}

case! {
    name: "xsaves", cpl: [0], rules: ["GEN-37", "GEN-38"], needs: ["msr-exit"], cpu: "sapphirerapids",
    about: "XSAVES and XRSTORS move architectural LBR as component 15",
    fn body(ctx) {
        need_sapphire_rapids!(ctx);
        if cpuid(0xd, 1).eax & 1 << 3 == 0 {
            skip!(ctx, "KVM has no XSAVES of the modelled LBR stack");
        }
        insn::write_cr4(insn::read_cr4() | Cr4::OSXSAVE.bits());
        check_eq!(cpuid(0xd, 1).ecx, 1 << xsave::COMPONENT, "CPUID.(0DH,1):ECX");
        let leaf = cpuid(0xd, xsave::COMPONENT);
        check_eq!((leaf.eax, leaf.ebx), (xsave::BYTES, 0), "CPUID.(0DH,15):EAX, EBX");
        check_eq!((leaf.ecx, leaf.edx), (1, 0), "CPUID.(0DH,15):ECX, EDX");
        for bit in [0, 8, 14, 16, 63] {
            check_eq!(msr::write_safe(reg::IA32_XSS, 1 << bit), Err(GP), "a reserved bit of IA32_XSS");
        }
        let without = cpuid(0xd, 1).ebx;
        msr::write(reg::IA32_XSS, COMPONENT_BIT);
        check_eq!(cpuid(0xd, 1).ebx, without + xsave::BYTES, "bytes of all components");

        clear(DEPTH);
        let mut area = XsaveArea::new();
        area.save();
        check_eq!(area.0[XSTATE_BV], 0, "XSTATE_BV of the initial configuration");
        for n in 0..DEPTH {
            msr::write(reg::IA32_LBR_0_FROM_IP + n, u64::from(0x1000 + n));
            msr::write(reg::IA32_LBR_0_TO_IP + n, u64::from(0x2000 + n));
            msr::write(reg::IA32_LBR_0_INFO + n, u64::from(0x3000 + n));
        }
        msr::write(reg::MSR_LER_FROM_LIP, 0x4000);
        msr::write(reg::IA32_LER_INFO, 0x5000);
        msr::write(reg::IA32_LBR_CTL, CALL_STACK & !LbrCtl::ENABLE.bits());
        area.save();
        check_eq!(area.0[XSTATE_BV], COMPONENT_BIT, "XSTATE_BV");
        check_eq!(area.0[XCOMP_BV], 1 << 63 | COMPONENT_BIT, "XCOMP_BV");
        let words = &area.0[COMPONENT..];
        check_eq!((words[0], words[1]), (CALL_STACK & !1, u64::from(DEPTH)), "IA32_LBR_CTL and IA32_LBR_DEPTH");
        check_eq!(((words[2], words[3]), words[4]), ((0x4000, 0), 0x5000), "the last event record");
        for (n, found) in (0..).zip(words[5..].chunks_exact(3)) {
            let expected = ((0x1000 + n, 0x2000 + n), 0x3000 + n);
            check_eq!(((found[0], found[1]), found[2]), expected, "an entry in memory");
        }

        clear(DEPTH);
        check_eq!(area.restore(), None, "exception");
        check_eq!(entry(31), ((0x101f, 0x201f), 0x301f), "the last entry");
        check_eq!(msr::read(reg::IA32_LBR_CTL), CALL_STACK & !1, "IA32_LBR_CTL");
        check_eq!(msr::read(reg::IA32_LER_INFO), 0x5000, "IA32_LER_INFO");

        // Another depth clears the entries.
        msr::write(reg::IA32_LBR_DEPTH, 8);
        check_eq!(area.restore(), None, "exception");
        check_eq!((entry(0), entry(7)), (EMPTY, EMPTY), "entries of another depth");
        check_eq!(msr::read(reg::IA32_LBR_DEPTH), 8, "IA32_LBR_DEPTH");
        clear(DEPTH);

        area.0[COMPONENT] |= 1 << 4;
        check_eq!(area.restore(), Some(13), "a reserved bit of IA32_LBR_CTL");
        area.0[COMPONENT] &= !(1 << 4);
        area.0[COMPONENT + 5] = 1 << 47;
        check_eq!(area.restore(), None, "exception");
        check_eq!(entry(0).0.0, 0xffff_8000_0000_0000, "an address that is not canonical");
        area.0[XSTATE_BV] = 0;
        check_eq!(area.restore(), None, "exception");
        check_eq!((entry(0), msr::read(reg::IA32_LBR_CTL)), (EMPTY, 0), "the initial configuration");

        msr::write(reg::IA32_XSS, 0);
        check_eq!(area.restore(), Some(13), "a component that is not enabled");
        clear(DEPTH);
    }
}

case! {
    name: "xrstors_records", cpl: [0], rules: ["GEN-37", "GEN-38"], needs: ["msr-exit"], cpu: "sapphirerapids",
    about: "XRSTORS can start the stack, and XSAVES leaves it on",
    fn body(ctx) {
        need_sapphire_rapids!(ctx);
        if cpuid(0xd, 1).eax & 1 << 3 == 0 {
            skip!(ctx, "KVM has no XSAVES of the modelled LBR stack");
        }
        insn::write_cr4(insn::read_cr4() | Cr4::OSXSAVE.bits());
        msr::write(reg::IA32_XSS, COMPONENT_BIT);
        clear(DEPTH);
        let mut area = XsaveArea::new();
        msr::write(reg::IA32_LBR_CTL, LbrCtl::PASS.bits());
        area.save();
        area.0[COMPONENT] |= LbrCtl::ENABLE.bits();
        let (from, to): (u64, u64);
        // SAFETY: the area has the component.
        unsafe {
            asm!(
                "xrstors64 [{area}]", "2: jmp 3f", "nop", "3: xsaves64 [{area}]",
                "lea {from}, [rip + 2b]", "lea {to}, [rip + 3b]",
                area = in(reg) &raw mut area.0, from = out(reg) from, to = out(reg) to,
                in("eax") COMPONENT_MASK, in("edx") 0,
            );
        }
        let control = msr::read(reg::IA32_LBR_CTL);
        msr::write(reg::IA32_LBR_CTL, 0);
        check_eq!(control, ALL, "IA32_LBR_CTL");
        check_eq!((area.0[COMPONENT + 5], area.0[COMPONENT + 6]), (from, to), "the newest entry in memory");
        check_eq!(area.0[COMPONENT + 8], 0, "the entry before it");
        msr::write(reg::IA32_XSS, 0);
        clear(DEPTH);
    }
}
