//! Branch recording outside 64-bit mode: compatibility mode, the legacy modes, task switches.

#![no_std]
#![no_main]

use hindsight_guest::blob;
use hindsight_guest::gdt::{KERNEL_CODE32, USER_CODE32, set_spare_descriptor};
use hindsight_guest::legacy::tables::Tss32;
use hindsight_guest::legacy::{
    self, Blob, BlobLabel, BlobStart, LegacyMachine, LegacyMode, LegacyPaging, action, sel,
};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::msr::{IA32_DEBUGCTL, MSR_LBR_SELECT};
use hindsight_guest::regs::rflags::Rflags;
use hindsight_guest::{insn, msr};
use hindsight_payloads::branch::{
    BTF, BTS, BTS_OFF_OS, BranchList, FAR, JCC, LBR, REL_CALL, REL_JMP, RET, TR, TakenBranch,
    run_sequence,
};
use hindsight_payloads::ds::{DsPages, RECORD_BYTES};
use hindsight_payloads::lbr::{self, LbrStack};
use hindsight_payloads::{need_bts, need_lbr, sequence};

payload!("branch_modes");

static PAGES: DsPages = DsPages::new();

sequence! {
    /// A far jump to the segment that `compat_selector` names, and a far return from it.
    ///
    /// In the segment there are a jump, a call, a return and a taken INTO.
    compatibility:
        "mov rbp, rsp",
        "sub rsp, 16",
        "mov ecx, cs",
        "mov edx, [rip + compat_selector]",
        "mov [rsp + 4], edx",
        "mov eax, [rip + compat_offset]",
        "mov [rsp], eax",
        "lea rbx, [rip + 27f]",
        "20: .byte 0xff, 0x2c, 0x24",
        "ud2",
        ".code32",
        "21: jmp 22f",
        "ud2",
        "30: ret",
        "22: call 30b",
        "23: mov eax, 0x7fffffff",
        "add eax, 1",
        "24: into",
        "25: push ecx",
        "push ebx",
        "26: retf",
        ".code64",
        "27: mov rsp, rbp",
    => ["20b", "21b", "FAR"], ["21b", "22b", "REL_JMP"], ["22b", "30b", "REL_CALL"],
        ["30b", "23b", "RET_NEAR"], ["24b", "recorder_return", "FAR_IN"],
        ["recorder_return", "25b", "FAR_OUT"], ["26b", "27b", "FAR"],
}

core::arch::global_asm!(
    ".pushsection .data.compat, \"aw\"",
    ".balign 4",
    ".global compat_selector, compat_offset",
    "compat_selector: .long 0",
    "compat_offset: .long 0",
    ".popsection",
);

unsafe extern "C" {
    static mut compat_selector: u32;
    static mut compat_offset: u32;
}

/// Chooses the code segment of [`compatibility`] and returns the branches as offsets in segments.
///
/// `base` is the base of the segment.
fn choose_segment(level: u8, selector: u16, base: u64) -> BranchList {
    let records = compatibility().records();
    let inside = records[0].to;
    let offset = u32::try_from(inside - base).unwrap_or(0);
    // SAFETY: only a run accesses it otherwise, and none runs now.
    unsafe {
        (&raw mut compat_selector).write_volatile(u32::from(selector));
        (&raw mut compat_offset).write_volatile(offset);
    }
    let end = records[6].from;
    let offset_of = |address: u64| {
        if (inside..=end).contains(&address) {
            address - base
        } else {
            address
        }
    };
    let mut list = BranchList::new();
    for item in compatibility().all(level).items() {
        list.push(TakenBranch::new(
            offset_of(item.from),
            offset_of(item.to),
            item.class(),
        ));
    }
    list
}

/// Records the sequence in the LBR stack and compares it with the offsets.
fn check_compatibility(level: u8, offsets: &BranchList) {
    lbr::reset();
    if run_sequence(level, compatibility(), LBR).is_some() {
        lbr::check_list(offsets);
        let stack = LbrStack::read();
        for age in 0..lbr::ENTRIES {
            let (from, to) = stack.entry(age);
            check_eq!((from >> 32, to >> 32), (0, 0), "bits 63:32");
        }
    }
}

fn flat_selector(level: u8) -> u16 {
    if level == 3 {
        USER_CODE32 | 3
    } else {
        KERNEL_CODE32
    }
}

case! {
    name: "compatibility_mode", cpl: [0, 3], rules: ["LBR-18", "LBR-10"], needs: [],
    about: "compatibility mode: far branches into and out of it, near branches, a taken INTO",
    fn body(ctx) {
        need_lbr!(ctx);
        check_compatibility(ctx.cpl, &choose_segment(ctx.cpl, flat_selector(ctx.cpl), 0));
    }
}

/// Base of the code segment in the next two cases.
const CODE_BASE: u64 = 0xf_f000;

/// The selector of a 32-bit code segment with the base [`CODE_BASE`] and this DPL.
fn based_selector(level: u8) -> u16 {
    let kind = 0x9b | legacy::tables::BIG | u32::from(level) << 5;
    let descriptor = legacy::tables::segment(0xf_f000, 0xf_ffff, kind) | 0x80 << 48;
    set_spare_descriptor(0, descriptor) | u16::from(level)
}

case! {
    name: "code_segment_with_a_base", cpl: [0, 3], rules: ["LBR-17", "LBR-18", "OP-12"], needs: [],
    about: "LBR addresses are offsets in CS, not linear addresses (OP-12)",
    fn body(ctx) {
        need_lbr!(ctx);
        check_compatibility(ctx.cpl, &choose_segment(ctx.cpl, based_selector(ctx.cpl), CODE_BASE));
    }
}

case! {
    name: "bts_of_a_segment_with_a_base", cpl: [0, 3], rules: ["BTS-02", "DS-02", "LBR-17", "OP-12"], needs: [],
    about: "BTS stores linear addresses (OP-12), in 24-byte records",
    fn body(ctx) {
        need_bts!(ctx);
        for (selector, base) in [(flat_selector(ctx.cpl), 0), (based_selector(ctx.cpl), CODE_BASE)] {
            choose_segment(ctx.cpl, selector, base);
            let area = PAGES.arm(50);
            let events = run_sequence(ctx.cpl, compatibility(), TR | BTS);
            require!(events.is_some(), "no unhandled exception");
            PAGES.check_stored(&area, compatibility().all(ctx.cpl).items());
        }
    }
}

blob! {
    /// Writes EBX to IA32_DEBUGCTL; then a jump, a call, a return, a conditional branch and UD2.
    ///
    /// A start at the label `b16_user` leaves out the first WRMSR, and with ECX = 0 the second one.
    fn branches16[16](
        b16_start, b16_user, b16_jmp, b16_call, b16_after, b16_f, b16_jz, b16_end, b16_done; b16_stop
    );
    "movl $0x1d9, %ecx"
    "xorl %edx, %edx"
    "movl %ebx, %eax"
    "wrmsr"
    "b16_user:"
    "b16_jmp: jmp b16_call"
    "ud2"
    "b16_f: ret"
    "b16_call: call b16_f"
    "b16_after: xorl %eax, %eax"
    "b16_jz: jz b16_end"
    "ud2"
    "b16_end: jecxz b16_done"
    "xorl %edx, %edx"
    "wrmsr"
    "b16_done: ud2"
}

blob! {
    /// Like [`branches16`], for 32-bit segments.
    fn branches32[32](
        b32_start, b32_user, b32_jmp, b32_call, b32_after, b32_f, b32_jz, b32_end, b32_done; b32_stop
    );
    "movl $0x1d9, %ecx"
    "xorl %edx, %edx"
    "movl %ebx, %eax"
    "wrmsr"
    "b32_user:"
    "b32_jmp: jmp b32_call"
    "ud2"
    "b32_f: ret"
    "b32_call: call b32_f"
    "b32_after: xorl %eax, %eax"
    "b32_jz: jz b32_end"
    "ud2"
    "b32_end: jecxz b32_done"
    "xorl %edx, %edx"
    "wrmsr"
    "b32_done: ud2"
}

/// A blob with known branches.
struct BranchBlob {
    blob: Blob,
    start: BlobLabel,
    user: BlobLabel,
    done: BlobLabel,
    /// Source, target, class. The last branch is taken only with ECX = 0, which means at CPL 3.
    taken: [(BlobLabel, BlobLabel, u64); 5],
}

fn blob_of(mode: LegacyMode) -> BranchBlob {
    if matches!(mode, LegacyMode::Protected32(_)) {
        BranchBlob {
            blob: branches32(),
            start: b32_start,
            user: b32_user,
            done: b32_done,
            taken: [
                (b32_jmp, b32_call, REL_JMP),
                (b32_call, b32_f, REL_CALL),
                (b32_f, b32_after, RET),
                (b32_jz, b32_end, JCC),
                (b32_end, b32_done, JCC),
            ],
        }
    } else {
        BranchBlob {
            blob: branches16(),
            start: b16_start,
            user: b16_user,
            done: b16_done,
            taken: [
                (b16_jmp, b16_call, REL_JMP),
                (b16_call, b16_f, REL_CALL),
                (b16_f, b16_after, RET),
                (b16_jz, b16_end, JCC),
                (b16_end, b16_done, JCC),
            ],
        }
    }
}

impl BranchBlob {
    /// The taken branches; `address` converts labels.
    fn list(&self, level: u8, address: impl Fn(BlobLabel) -> u32) -> BranchList {
        let mut list = BranchList::new();
        let count = if level == 3 { 5 } else { 4 };
        for (from, to, class) in self.taken.into_iter().take(count) {
            list.push(TakenBranch::new(
                address(from).into(),
                address(to).into(),
                class,
            ));
        }
        list
    }

    /// The taken branches as offsets in CS.
    fn offsets(&self, level: u8, mode: LegacyMode) -> BranchList {
        if matches!(mode, LegacyMode::Protected32(_)) {
            self.linear(level)
        } else {
            self.list(level, |label| self.blob.offset(label))
        }
    }

    /// The taken branches as linear addresses.
    fn linear(&self, level: u8) -> BranchList {
        self.list(level, |label| self.blob.linear(label))
    }
}

/// Modes with CPL 0.
const KERNEL_MODES: [(LegacyMode, LegacyPaging); 5] = [
    (LegacyMode::Real, LegacyPaging::Off),
    (LegacyMode::Protected16(0), LegacyPaging::Off),
    (LegacyMode::Protected32(0), LegacyPaging::Off),
    (LegacyMode::Protected32(0), LegacyPaging::Bits32),
    (LegacyMode::Protected32(0), LegacyPaging::Pae),
];

/// Modes with CPL 3.
const USER_MODES: [(LegacyMode, LegacyPaging); 4] = [
    (LegacyMode::Virtual8086, LegacyPaging::Off),
    (LegacyMode::Protected16(3), LegacyPaging::Off),
    (LegacyMode::Protected32(3), LegacyPaging::Off),
    (LegacyMode::Protected32(3), LegacyPaging::Bits32),
];

/// Runs the blob of the mode, which itself sets IA32_DEBUGCTL and clears it again.
fn run_kernel(mode: LegacyMode, paging: LegacyPaging, debugctl: u32) -> BranchBlob {
    let branches = blob_of(mode);
    let machine = legacy::machine(&branches.blob);
    let mut start = BlobStart {
        paging,
        ..BlobStart::at(mode, branches.start)
    };
    start.registers.ebx = debugctl;
    machine.run(&branches.blob, &start);
    check_end(machine, &branches, mode);
    branches
}

/// Runs the blob of the mode at CPL 3; IA32_DEBUGCTL is set during the switches to the mode and back.
fn run_user(mode: LegacyMode, paging: LegacyPaging, debugctl: u64) -> BranchBlob {
    let branches = blob_of(mode);
    let machine = legacy::machine(&branches.blob);
    let start = BlobStart {
        paging,
        ..BlobStart::at(mode, branches.user)
    };
    msr::write(IA32_DEBUGCTL, debugctl);
    machine.run(&branches.blob, &start);
    msr::write(IA32_DEBUGCTL, 0);
    check_end(machine, &branches, mode);
    branches
}

fn check_end(machine: &LegacyMachine, branches: &BranchBlob, mode: LegacyMode) {
    let flat = matches!(mode, LegacyMode::Protected32(_));
    let done = if flat {
        branches.blob.linear(branches.done)
    } else {
        branches.blob.offset(branches.done)
    };
    check_eq!(machine.events().len(), 1, "count of events");
    check_eq!(
        machine.last().vector_and_eip(),
        (6, done),
        "vector and EIP of the last event"
    );
}

case! {
    name: "legacy_modes", cpl: [0], rules: ["LBR-17", "LBR-18"], needs: [],
    about: "real, 16- and 32-bit protected mode at CPL 0: offsets in CS, upper halves 0",
    fn body(ctx) {
        need_lbr!(ctx);
        for (number, (mode, paging)) in (0..).zip(KERNEL_MODES) {
            lbr::reset();
            let branches = run_kernel(mode, paging, 1);
            if !lbr::check_list(&branches.offsets(ctx.cpl, mode)) {
                hindsight_guest::report::measurement("mode", number);
            }
        }
    }
}

case! {
    name: "legacy_user_modes", cpl: [3], rules: ["LBR-17", "LBR-18", "LSEL-04"], needs: [],
    about: "virtual-8086 and protected mode at CPL 3, recorded with CPL_EQ_0",
    fn body(ctx) {
        need_lbr!(ctx);
        for (number, (mode, paging)) in (0..).zip(USER_MODES) {
            lbr::reset();
            msr::write(MSR_LBR_SELECT, 1);
            let branches = run_user(mode, paging, LBR);
            let stack = LbrStack::read();
            let mut expected = BranchList::new();
            // The branch into the mode, whose source is code of the runtime.
            let flat = matches!(mode, LegacyMode::Protected32(_));
            let blob = &branches.blob;
            let user = if flat { blob.linear(branches.user) } else { blob.offset(branches.user) };
            expected.push(TakenBranch::new(stack.from[1], user.into(), FAR));
            branches.offsets(ctx.cpl, mode).items().iter().for_each(|&item| expected.push(item));
            if !lbr::check_records(&stack, expected.items()) {
                hindsight_guest::report::measurement("mode", number);
            }
        }
    }
}

case! {
    name: "bts_in_legacy_modes", cpl: [0], rules: ["DS-02", "DS-17", "BTS-02"], needs: [],
    about: "BTS stores 64-bit records with linear addresses in every mode, with and without paging",
    fn body(ctx) {
        need_bts!(ctx);
        for (number, (mode, paging)) in (0..).zip(KERNEL_MODES) {
            let area = PAGES.arm(50);
            let branches = run_kernel(mode, paging, 0xc0);
            if !PAGES.check_stored(&area, branches.linear(ctx.cpl).items()) {
                hindsight_guest::report::measurement("mode", number);
            }
        }
    }
}

case! {
    name: "bts_in_legacy_user_modes", cpl: [3], rules: ["DS-02", "DS-17", "BTS-13"], needs: [],
    about: "BTS stores 64-bit records with linear addresses at CPL 3, also in virtual-8086 mode",
    fn body(ctx) {
        need_bts!(ctx);
        for (number, (mode, paging)) in (0..).zip(USER_MODES) {
            let area = PAGES.arm(50);
            let branches = run_user(mode, paging, TR | BTS | BTS_OFF_OS);
            let mut expected = branches.linear(ctx.cpl);
            // The exception at the end, whose target is code of the runtime.
            let last = PAGES.record(area.base + 5 * RECORD_BYTES);
            let done = branches.blob.linear(branches.done);
            expected.push(TakenBranch::new(done.into(), last.to, FAR));
            if !PAGES.check_stored(&area, expected.items()) {
                hindsight_guest::report::measurement("mode", number);
            }
        }
    }
}

blob! {
    /// A jump to another task, which begins at `tasks_new` with a branch and ends with UD2.
    fn tasks[32](tasks_start, tasks_jump, tasks_new, tasks_branch, tasks_target, tasks_done; tasks_stop);
    "movl $0x1d9, %ecx"
    "xorl %edx, %edx"
    "movl %ebx, %eax"
    "wrmsr"
    "tasks_jump: ljmp $0x58, $0"
    "ud2"
    "tasks_new: nop"
    "tasks_branch: jmp tasks_target"
    "ud2"
    "tasks_target: xorl %eax, %eax"
    "wrmsr"
    "tasks_done: ud2"
}

/// Prepares the blob [`tasks`], whose new task starts with these flags.
fn two_tasks(eflags: u32) -> (Blob, &'static mut LegacyMachine) {
    let blob = tasks();
    let machine = legacy::machine(&blob);
    let (code, data) = (u32::from(sel::CODE32), u32::from(sel::DATA32));
    let cr3 = machine.tss[1].cr3;
    machine.tss[1] = Tss32 {
        cr3,
        eip: blob.linear(tasks_new),
        eflags: eflags | 2,
        ecx: 0x1d9,
        esp: legacy::BASE + legacy::STACK - 256,
        cs: code,
        ss: data,
        ds: data,
        es: data,
        ..Tss32::new()
    };
    (blob, machine)
}

case! {
    name: "task_switch", cpl: [0], rules: ["LBR-35", "BTS-01"], needs: [],
    about: "the LBR stack records a task switch by JMP as one far branch to the new task",
    fn body(ctx) {
        need_lbr!(ctx);
        for (select, skipped) in [(0, 0), (1 << 8, 1)] {
            let (blob, machine) = two_tasks(0);
            lbr::reset();
            msr::write(MSR_LBR_SELECT, select);
            let mut start = BlobStart::at(LegacyMode::Protected32(0), tasks_start);
            start.registers.ebx = 1;
            machine.run(&blob, &start);
            check_eq!(machine.last().vector_and_eip(), (6, blob.linear(tasks_done)), "vector and EIP at the end");
            let linear = |label| u64::from(blob.linear(label));
            let records = [
                TakenBranch::new(linear(tasks_jump), linear(tasks_new), FAR),
                TakenBranch::new(linear(tasks_branch), linear(tasks_target), REL_JMP),
            ];
            lbr::check_records(&LbrStack::read(), &records[skipped..]);
        }
    }
}

const TF: u32 = (Rflags::TF.bits() & 0xffff_ffff) as u32;

case! {
    name: "task_switch_under_btf", cpl: [0], rules: ["BTF-13", "TF-22", "TF-14"], needs: [],
    about: "with BTF, a task switch by JMP raises no #DB; the first branch of a new task with TF does",
    fn body(ctx) {
        need_lbr!(ctx);
        for new_flags in [0, TF] {
            let (blob, machine) = two_tasks(new_flags);
            machine.actions[1] = action::RESUME_NO_TF;
            let mut start = BlobStart::at(LegacyMode::Protected32(0), tasks_start);
            start.eflags = TF;
            start.registers.ebx = u32::try_from(BTF).unwrap_or(0);
            // BTF is set already, so no #DB follows the WRMSR at the start.
            msr::write(IA32_DEBUGCTL, BTF);
            machine.run(&blob, &start);
            msr::write(IA32_DEBUGCTL, 0);
            insn::write_dr6(hindsight_guest::regs::dr::Dr6::RESET);
            let steps = machine.events().iter().filter(|event| event.vector == 1);
            let mut eips = [0; 2];
            for (eip, event) in eips.iter_mut().zip(steps) {
                *eip = event.eip;
            }
            let expected = if new_flags == TF { blob.linear(tasks_target) } else { 0 };
            check_eq!(eips, [expected, 0], "EIPs of the #DBs");
            check_eq!(machine.last().vector_and_eip(), (6, blob.linear(tasks_done)), "vector and EIP at the end");
        }
    }
}

case! {
    name: "task_switch_under_tf", cpl: [0], rules: ["TF-22", "TF-14"], needs: ["intn-cpl0", "gd"],
    about: "without BTF, a #DB follows each instruction before the task switch, and not the JMP",
    fn body(_ctx) {
        let (blob, machine) = two_tasks(0);
        machine.actions[1] = action::RESUME;
        let mut start = BlobStart::at(LegacyMode::Protected32(0), tasks_start);
        start.eflags = TF;
        machine.run(&blob, &start);
        insn::write_dr6(hindsight_guest::regs::dr::Dr6::RESET);
        let steps = || machine.events().iter().filter(|event| event.vector == 1).map(|event| event.eip);
        check_eq!(steps().max(), Some(blob.linear(tasks_jump)), "EIP of the last #DB");
        check_eq!(steps().count(), 4, "count of #DBs, for the four instructions before the JMP");
        check_eq!(machine.last().vector_and_eip(), (6, blob.linear(tasks_done)), "vector and EIP at the end");
    }
}
