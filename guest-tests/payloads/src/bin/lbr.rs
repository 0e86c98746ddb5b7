//! The LBR stack: branches of all kinds, and instructions that add no record.
//!
//! Each case runs a sequence with known branches and compares all 32 entries.

#![no_std]
#![no_main]

use hindsight_guest::prelude::*;
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::pmu::global::LBR_FRZ;
use hindsight_guest::{insn, msr, paging};
use hindsight_payloads::branch::recorder;
use hindsight_payloads::branch::sequences as seq;
use hindsight_payloads::branch::{
    BTS, BranchList, BranchRun, LBR, TR, TakenBranch, other_bits, run, run_sequence,
};
use hindsight_payloads::lbr::{self, LbrStack};
use hindsight_payloads::{need_lbr, sequence};

payload!("lbr");

case! {
    name: "format", cpl: [0], rules: ["LBR-01", "LBR-02", "LBR-39", "PCAP-03"], needs: [],
    about: "IA32_PERF_CAPABILITIES reports format 5; the stack has 32 entries, and TOS has five bits",
    fn body(ctx) {
        need_lbr!(ctx);
        check_eq!(msr::read(reg::IA32_PERF_CAPABILITIES) & 0x3f, 5, "LBR format");
        for tos in 0..32 {
            msr::write(reg::MSR_LASTBRANCH_TOS, tos);
            check_eq!(msr::read(reg::MSR_LASTBRANCH_TOS), tos, "TOS");
        }
        for first in [reg::MSR_LASTBRANCH_0_FROM_IP, reg::MSR_LASTBRANCH_0_TO_IP, reg::MSR_LBR_INFO_0] {
            check!(msr::read_safe(first + 31).is_ok(), "entry 31 exists");
        }
    }
}

case! {
    name: "empty_after_reset", cpl: [0],
    rules: ["LBR-05", "LSEL-01", "LER-05", "RST-07", "MSR-06", "MSR-07", "MSR-09", "MSR-10", "MSR-24", "MSR-25",
        "MSR-36"],
    needs: [],
    about: "all entries, TOS, the filter and LER are 0 after RESET; the first record goes to entry 1",
    fn body(ctx) {
        need_lbr!(ctx);
        check!(LbrStack::read() == LbrStack::EMPTY, "LBR stack empty");
        check_eq!(msr::read(reg::MSR_LBR_SELECT), 0, "MSR_LBR_SELECT");
        check_eq!(lbr::ler(), (0, 0), "LER");
        let sequence = seq::jumps();
        if run_sequence(0, sequence, LBR).is_some() {
            let stack = LbrStack::read();
            check_eq!((stack.from[1], stack.to[1]), recorder::entry(0, sequence.code()).pair(), "entry 1");
            check_eq!((stack.from[0], stack.to[0]), (0, 0), "entry 0");
            lbr::check_list(&sequence.all(0));
        }
    }
}

case! {
    name: "one_of_each", cpl: [0, 3], rules: ["LBR-03", "LBR-04", "LBR-07", "LBR-08", "LSEL-01"], needs: [],
    about: "one branch of each class is recorded in order, from the WRMSR that sets LBR on",
    fn body(ctx) {
        need_lbr!(ctx);
        lbr::check_sequence(ctx.cpl, seq::one_of_each());
    }
}

case! {
    name: "conditional_branches", cpl: [0, 3], rules: ["LBR-04"], needs: [],
    about: "Jcc with every condition, JRCXZ, JECXZ and LOOPs: FROM is the first byte of the branch",
    fn body(ctx) {
        need_lbr!(ctx);
        lbr::check_sequence(ctx.cpl, seq::conditionals());
    }
}

case! {
    name: "not_taken", cpl: [0, 3], rules: ["LBR-07"], needs: [],
    about: "conditional branches that are not taken and REP iterations add no record",
    fn body(ctx) {
        need_lbr!(ctx);
        lbr::check_sequence(ctx.cpl, seq::not_taken());
    }
}

case! {
    name: "jumps", cpl: [0, 3], rules: ["LBR-04"], needs: [],
    about: "JMP short, near, by register and through memory is recorded",
    fn body(ctx) {
        need_lbr!(ctx);
        lbr::check_sequence(ctx.cpl, seq::jumps());
    }
}

case! {
    name: "calls", cpl: [0, 3], rules: ["LBR-04", "LSEL-15"], needs: [],
    about: "CALL and RET are recorded, also a call of the next instruction",
    fn body(ctx) {
        need_lbr!(ctx);
        lbr::check_sequence(ctx.cpl, seq::calls());
    }
}

case! {
    name: "far_transfers", cpl: [0, 3], rules: ["LBR-04"], needs: [],
    about: "far JMP, CALL and RET, and IRET within one level are recorded",
    fn body(ctx) {
        need_lbr!(ctx);
        lbr::check_sequence(ctx.cpl, seq::far_transfers());
    }
}

case! {
    name: "wraps_around", cpl: [0, 3], rules: ["LBR-02", "LBR-06"], needs: [],
    about: "after more than 32 branches TOS has wrapped and the oldest records are overwritten",
    fn body(ctx) {
        need_lbr!(ctx);
        let sequence = seq::loop_33();
        check_eq!(sequence.records().len(), 33, "count of branches of the loop");
        lbr::check_sequence(ctx.cpl, sequence);
        check_eq!(msr::read(reg::MSR_LASTBRANCH_TOS), (33 + 2) % 32, "TOS");
    }
}

case! {
    name: "starts_at_any_tos", cpl: [0], rules: ["LBR-04", "LBR-25"], needs: [],
    about: "a record increments TOS modulo 32 from the value that software wrote, then writes the entry",
    fn body(ctx) {
        need_lbr!(ctx);
        for tos in [30, 31] {
            lbr::reset();
            msr::write(reg::MSR_LASTBRANCH_TOS, tos);
            let sequence = seq::jumps();
            if run_sequence(0, sequence, LBR).is_none() {
                return;
            }
            let stack = LbrStack::read();
            let expected = sequence.all(0);
            check_eq!(stack.tos, (tos + expected.items().len() as u64) % 32, "TOS");
            for (age, item) in expected.items().iter().rev().enumerate() {
                check_eq!(stack.entry(age), item.pair(), "entry");
            }
            check_eq!(stack.entry(expected.items().len()), (0, 0), "entry before the first record");
        }
    }
}

case! {
    name: "stops_and_keeps", cpl: [0, 3], rules: ["LBR-09"], needs: [],
    about: "with LBR clear the stack does not change",
    fn body(ctx) {
        need_lbr!(ctx);
        require!(lbr::record(ctx.cpl, seq::one_of_each()).is_some(), "no unhandled exception");
        let before = LbrStack::read();
        if run_sequence(ctx.cpl, seq::conditionals(), 0).is_some() {
            check!(LbrStack::read() == before, "LBR stack unchanged");
        }
    }
}

case! {
    name: "needs_the_bit", cpl: [0, 3], rules: ["LBR-03", "LBR-33", "OP-14"], needs: [],
    about: "without LBR no other bit makes records; with LBR, TR and BTS have no effect on them",
    fn body(ctx) {
        need_lbr!(ctx);
        let others = other_bits();
        lbr::reset();
        for debugctl in [0, others] {
            require!(run_sequence(ctx.cpl, seq::one_of_each(), debugctl).is_some(), "no unhandled exception");
            check!(LbrStack::read() == LbrStack::EMPTY, "no records");
        }
        if !insn::has(Feature::DS) {
            return;
        }
        for debugctl in [TR, others | TR] {
            require!(run_sequence(ctx.cpl, seq::one_of_each(), debugctl).is_some(), "no unhandled exception");
            check!(LbrStack::read() == LbrStack::EMPTY, "no records with TR alone");
        }
        // IA32_DS_AREA is 0, where memory holds any values; an area of zeros stores no records.
        msr::write(reg::IA32_DS_AREA, (&raw const NO_BUFFER) as u64);
        for debugctl in [LBR | TR, LBR | TR | BTS, LBR | others] {
            lbr::reset();
            require!(run_sequence(ctx.cpl, seq::one_of_each(), debugctl).is_some(), "no unhandled exception");
            lbr::check_list(&seq::one_of_each().all(ctx.cpl));
        }
    }
}

/// A DS area without buffers.
static NO_BUFFER: [u64; 16] = [0; 16];

sequence! {
    /// Instructions that serialize or exit and do not branch. At CPL 0.
    not_branches_0:
        "mov ecx, 0xc0000084", "rdmsr", "wrmsr",
        "xor eax, eax", "cpuid",
        "mov rax, cr3", "mov cr3, rax",
        "mov rax, cr0", "mov cr0, rax",
        "mov rax, dr7", "mov dr7, rax",
        "invlpg [rsp]",
        "in al, 0x61", "out 0x80, al",
        "mov eax, 0xfee00020", "mov eax, [rax]",
        "lfence", "rdtsc", "swapgs", "swapgs",
        "sldt ax", "wbinvd",
    =>
}

sequence! {
    /// At CPL 3: instructions that serialize or cause an exit, and do not branch.
    not_branches_3:
        "xor eax, eax", "cpuid", "lfence", "mfence", "rdtsc", "pause",
        "mov eax, 0xfee00020", "mov eax, [rax]",
    =>
}

case! {
    name: "not_branches", cpl: [0, 3], rules: ["LBR-34", "LBR-36"], needs: [],
    about: "serializing instructions and those that exit add no record",
    fn body(ctx) {
        need_lbr!(ctx);
        lbr::check_sequence(ctx.cpl, if ctx.cpl == 0 { not_branches_0() } else { not_branches_3() });
    }
}

/// A second linear address of the low memory.
const HIGH_HALF: u64 = 0xffff_8000_0000_0000;

case! {
    name: "kernel_half_addresses", cpl: [0, 3], rules: ["LBR-19", "LBR-20", "LBR-21", "LBR-24"], needs: [],
    about: "addresses of the upper half have bits 63:48 set, those of the lower half clear",
    fn body(ctx) {
        need_lbr!(ctx);
        let sequence = seq::one_of_each();
        let page = sequence.code() & !(paging::PAGE - 1);
        for page in [page, page + paging::PAGE] {
            paging::map(HIGH_HALF + page, page, paging::P | paging::RW | paging::US);
        }
        let to_high = |address: u64| {
            let inside = (sequence.code()..=sequence.stop()).contains(&address);
            if inside { address + HIGH_HALF } else { address }
        };
        let mut expected = BranchList::new();
        for item in sequence.all(ctx.cpl).items() {
            expected.push(TakenBranch::new(to_high(item.from), to_high(item.to), item.class()));
        }
        lbr::reset();
        let code = HIGH_HALF + sequence.code();
        let result = run(BranchRun { code, ..BranchRun::new(ctx.cpl, sequence, LBR) });
        require!(result.is_ok(), "no unhandled exception");
        lbr::check_list(&expected);
        check_eq!(LbrStack::read().entry(1).0 >> 48, 0, "bits 63:48 of the IRET in the lower half");
        check_eq!(LbrStack::read().entry(2).0 >> 48, 0xffff, "bits 63:48 of the INT in the upper half");
    }
}

case! {
    name: "info", cpl: [0, 3], rules: ["LBR-20", "LBR-21", "LBR-22", "LBR-23", "LBR-24"], needs: [],
    about: "INFO has no bits beyond MISPRED and CYC_CNT; FROM carries no flags",
    fn body(ctx) {
        need_lbr!(ctx);
        require!(lbr::record(ctx.cpl, seq::loop_33()).is_some(), "no unhandled exception");
        let stack = LbrStack::read();
        for n in 0..lbr::ENTRIES {
            check_eq!(stack.info[n] & lbr::INFO_ZERO, 0, "INFO");
            check_eq!((stack.from[n] >> 48, stack.to[n] >> 48), (0, 0), "bits 63:48");
        }
    }
}

case! {
    name: "written_values", cpl: [0], rules: ["LBR-25", "MSR-07", "MSR-24", "MSR-25", "MSR-36"], needs: [],
    about: "every entry reads back what software wrote",
    fn body(ctx) {
        need_lbr!(ctx);
        let mut stack = LbrStack { tos: 17, ..LbrStack::EMPTY };
        for n in 0..lbr::ENTRIES {
            let value = n as u64;
            stack.from[n] = 0xffff_8000_0000_1000 + value;
            stack.to[n] = 0x7fff_ffff_f000 - value;
            stack.info[n] = value << 61 | 0xff00 | value;
        }
        stack.write();
        let found = LbrStack::read();
        check_eq!(found.tos, 17, "TOS");
        for n in 0..lbr::ENTRIES {
            check_eq!((found.from[n], found.to[n]), (stack.from[n], stack.to[n]), "FROM and TO");
            check_eq!(found.info[n], stack.info[n], "INFO");
        }
    }
}

case! {
    name: "probes_of_linux", cpl: [0], rules: ["LBR-38"], needs: [],
    about: "the writes by which Linux tests under a hypervisor whether the MSRs exist",
    fn body(ctx) {
        need_lbr!(ctx);
        let entries = (reg::MSR_LASTBRANCH_0_FROM_IP..).take(32).chain((reg::MSR_LASTBRANCH_0_TO_IP..).take(32));
        for index in entries {
            probe(index, 0xffff);
        }
        probe(reg::MSR_LASTBRANCH_TOS, 3);
    }
}

/// Changes the bits of `mask` and restores the old value, reading back both times.
fn probe(index: u32, mask: u64) {
    let old = msr::read(index);
    let written = msr::write_safe(index, old ^ mask);
    check_eq!(written.is_ok(), true, "write");
    check_eq!(msr::read(index), old ^ mask, "value read back");
    msr::write(index, old);
    check_eq!(msr::read(index), old, "old value read back");
}

/// Version of the architectural PMU, CPUID.0AH:EAX[7:0].
fn pmu_version() -> u32 {
    insn::cpuid(0xa, 0).eax & 0xff
}

case! {
    name: "frozen", cpl: [0, 3], rules: ["LBR-03", "LBR-25"], needs: [],
    about: "with LBR_FRZ set no branch is recorded although LBR is 1; entries can be written",
    fn body(ctx) {
        need_lbr!(ctx);
        if pmu_version() < 4 {
            skip!(ctx, "CPUID leaf 0AH reports no version 4, which has LBR_FRZ");
        }
        lbr::reset();
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_SET, LBR_FRZ);
        require!(run_sequence(ctx.cpl, seq::one_of_each(), LBR).is_some(), "no unhandled exception");
        check!(LbrStack::read() == LbrStack::EMPTY, "no records");
        msr::write(reg::MSR_LASTBRANCH_0_FROM_IP, 0x1234);
        check_eq!(msr::read(reg::MSR_LASTBRANCH_0_FROM_IP), 0x1234, "written entry");
        msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, LBR_FRZ);
        lbr::check_sequence(ctx.cpl, seq::one_of_each());
    }
}
