//! Debugging in real, virtual-8086, 16- and 32-bit protected and compatibility mode.

#![no_std]
#![no_main]

use hindsight_guest::blob;
use hindsight_guest::gdt::{USER_CODE, USER_CODE32};
use hindsight_guest::insn;
use hindsight_guest::legacy::action;
use hindsight_guest::legacy::{
    self, Blob, BlobLabel, BlobStart, LegacyEvent, LegacyMachine, LegacyMode,
};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::dr::{Condition, Dr6, Length};
use hindsight_payloads::access::ScratchPage;
use hindsight_payloads::debug::{self, BS, arm, at, conditions, disarm};
use hindsight_payloads::{check_steps, snippet};

payload!("modes");

static PAGE: ScratchPage = ScratchPage::new();

const MODES16: [LegacyMode; 4] = [
    LegacyMode::Real,
    LegacyMode::Virtual8086,
    LegacyMode::Protected16(0),
    LegacyMode::Protected16(3),
];
const MODES32: [LegacyMode; 2] = [LegacyMode::Protected32(0), LegacyMode::Protected32(3)];

const B0: u64 = Dr6::B0.bits();
const B1: u64 = Dr6::B1.bits();
/// EFLAGS.
const TF: u32 = 1 << 8;
const OF: u32 = 1 << 11;
const IOPL: u32 = 3 << 12;
const RF: u32 = 1 << 16;
const VM: u32 = 1 << 17;
/// CR4.
const VME: u32 = 1;
const TSD: u32 = 1 << 2;
const DE: u32 = 1 << 3;
/// A port without a device, inside the TSS's map.
const PORT: u64 = 0x2e8;
/// Where blobs keep data: linear, and in the blob's segment.
const DATA: u32 = legacy::BASE + 0x8000;

/// Runs `blob` from `entry` with IOPL 3 and what `arm` arms, while #DBs resume.
fn run(
    blob: &Blob,
    mode: LegacyMode,
    entry: BlobLabel,
    arm: impl FnOnce(),
) -> &'static mut LegacyMachine {
    run_with(blob, mode, entry, 0, 0, |_| arm())
}

/// Arms nothing.
fn nothing() {}

/// Runs `blob` from `entry` with IOPL 3, the given flags and bits of CR4 and changes to the
/// machine. Breakpoints are armed there too: the making of the machine writes to all its memory.
fn run_with(
    blob: &Blob,
    mode: LegacyMode,
    entry: BlobLabel,
    eflags: u32,
    cr4: u32,
    change: impl FnOnce(&mut LegacyMachine),
) -> &'static mut LegacyMachine {
    let machine = legacy::machine(blob);
    machine.actions[1] = action::RESUME_RF;
    change(machine);
    let mut start = BlobStart::at(mode, entry);
    start.eflags = IOPL | eflags;
    start.cr4 = cr4;
    machine.run(blob, &start);
    disarm();
    machine
}

/// The EIP of a label in a mode.
fn eip_of(blob: &Blob, mode: LegacyMode, label: BlobLabel) -> u32 {
    match mode {
        LegacyMode::Protected32(_) => blob.linear(label),
        _ => blob.offset(label),
    }
}

/// Vector, EIP and conditions of an event.
fn debugged(event: Option<&LegacyEvent>) -> ((u32, u32), u64) {
    event.map_or(((0, 0), 0), |e| {
        (e.vector_and_eip(), conditions(u64::from(e.dr6)))
    })
}

/// Checks that there was one #DB, with these conditions, at `label`, and then the end.
fn check_one(machine: &LegacyMachine, eip: u32, expected: u64) {
    check_eq!(machine.events().len(), 2, "one #DB and the end");
    check_eq!(
        debugged(machine.events().first()),
        ((1, eip), expected),
        "vector, EIP and conditions"
    );
}

blob! {
    fn write16[16](write16_start, write16_insn, write16_next, write16_end; write16_stop);
    "movb $1, %al"
    "write16_insn: movb %al, %ds:0x8007"
    "write16_next: nop"
    "write16_end: ud2"
}

blob! {
    fn write32[32](write32_start, write32_insn, write32_next, write32_end; write32_stop);
    "movb $1, %al"
    "write32_insn: movb %al, 0x18007"
    "write32_next: nop"
    "write32_end: ud2"
}

/// A blob that stores to byte 7 of the data, with its labels, for each mode.
fn writers() -> [(LegacyMode, Blob, [BlobLabel; 4]); 6] {
    let narrow = (
        write16(),
        [
            write16_start as BlobLabel,
            write16_insn,
            write16_next,
            write16_end,
        ],
    );
    let wide = (
        write32(),
        [
            write32_start as BlobLabel,
            write32_insn,
            write32_next,
            write32_end,
        ],
    );
    let entry = |mode, (blob, labels): (Blob, [BlobLabel; 4])| (mode, blob, labels);
    let [a, b, c, d] = MODES16;
    let [e, f] = MODES32;
    [
        entry(a, narrow),
        entry(b, narrow),
        entry(c, narrow),
        entry(d, narrow),
        entry(e, wide),
        entry(f, wide),
    ]
}

case! {
    name: "data_breakpoints", cpl: [0], rules: ["DR-27", "DR-23", "WP-01", "WP-17", "DB-11"],
    needs: ["gd", "intn-cpl0", "guestbp-data", "guestbp-io"],
    about: "a store in every legacy mode meets a breakpoint of eight bytes on its linear address",
    fn body(_ctx) {
        for (mode, blob, [start, _, next, _]) in writers() {
            let m = run(&blob, mode, start, || arm(0, u64::from(DATA), Condition::Write, Length::Eight));
            check_one(m, eip_of(&blob, mode, next), B0);
            let saved = m.events().first().map_or(0, |e| e.eflags);
            check_eq!(saved & (RF | TF), 0, "RF and TF in the image");
            check_eq!(saved & VM != 0, mode == LegacyMode::Virtual8086, "VM in the image");
        }
    }
}

case! {
    name: "instruction_breakpoints", cpl: [0], rules: ["DR-27", "DB-01", "DB-03", "RF-03"],
    needs: ["gd", "intn-cpl0", "guestbp-io"],
    about: "an instruction breakpoint is met in every legacy mode; IRETD with RF resumes it where RF can be restored",
    fn body(_ctx) {
        for (mode, blob, [start, insn, ..]) in writers() {
            if mode == LegacyMode::Real {
                continue; // the stubs of real mode return by a 16-bit IRET: see the next case
            }
            let m = run(&blob, mode, start, || arm(1, u64::from(blob.linear(insn)), Condition::Execute, Length::One));
            check_one(m, eip_of(&blob, mode, insn), B1);
        }
    }
}

case! {
    name: "instruction_breakpoint_in_real_mode", cpl: [0], rules: ["DR-27", "DB-01", "TF-20"],
    needs: ["gd", "intn-cpl0", "guestbp-io"],
    about: "an instruction breakpoint enters by vector 1 of the real-mode table",
    fn body(_ctx) {
        let blob = write16();
        let m = run_with(&blob, LegacyMode::Real, write16_start, 0, 0, |m| {
            m.actions[1] = action::END;
            arm(0, u64::from(blob.linear(write16_insn)), Condition::Execute, Length::One);
        });
        check_eq!(debugged(m.events().first()), ((1, blob.offset(write16_insn)), B0), "vector, IP and conditions");
    }
}

case! {
    name: "single_step", cpl: [0], rules: ["DR-27", "TF-20", "TF-01", "TF-21"],
    needs: ["gd", "intn-cpl0", "tf-cpl0", "guestbp-io"],
    about: "TF steps in every legacy mode",
    fn body(_ctx) {
        for (mode, blob, [start, insn, next, end]) in writers() {
            let m = run_with(&blob, mode, start, TF, 0, |m| m.actions[1] = action::RESUME);
            check_eq!(m.events().len(), 4, "three steps and the end");
            for (event, label) in m.events().iter().zip([insn, next, end]) {
                check_eq!(debugged(Some(event)), ((1, eip_of(&blob, mode, label)), BS), "a step");
            }
        }
    }
}

case! {
    name: "upper_address_bits", cpl: [0], rules: ["DR-22"],
    needs: ["gd", "intn-cpl0", "guestbp-data", "guestbp-io"],
    about: "a breakpoint with an address above 4 GiB matches nothing outside 64-bit mode",
    fn body(_ctx) {
        for (mode, blob, [start, insn, ..]) in writers() {
            let m = run(&blob, mode, start, || {
                arm(0, u64::from(DATA) | 1 << 32, Condition::ReadWrite, Length::Eight);
                debug::arm_also(1, u64::from(blob.linear(insn)) | 1 << 40, Condition::Execute, Length::One);
            });
            check_eq!(m.events().len(), 1, "the end alone");
        }
    }
}

blob! {
    fn move_dr[32](move_dr_start, move_dr_end; move_dr_stop);
    "movl %dr0, %ebx"
    "movl $0x87654321, %eax"
    "movl %eax, %dr0"
    "movl %dr0, %ecx"
    "movl %eax, %dr1"
    "movl %dr7, %edx"
    "move_dr_end: ud2"
}

case! {
    name: "operands_of_32_bits", cpl: [0], rules: ["DR-08"], needs: ["gd", "intn-cpl0"],
    about: "MOV DR in 32-bit mode reads the low half, and clears the upper half when it writes",
    fn body(_ctx) {
        insn::write_dr0(0xfedc_ba98_0123_4567);
        insn::write_dr1(u64::MAX);
        let blob = move_dr();
        let m = run(&blob, LegacyMode::Protected32(0), move_dr_start, nothing);
        check_eq!(m.last().vector_and_eip(), (6, blob.linear(move_dr_end)), "vector and EIP at the end");
        let r = m.last().registers;
        check_eq!([r.ebx, r.ecx, r.edx], [0x0123_4567, 0x8765_4321, 0x400], "what 32-bit mode reads");
        check_eq!((insn::read_dr0(), insn::read_dr1()), (0x8765_4321, 0x8765_4321), "what 64-bit mode reads");
    }
}

blob! {
    fn move_dr16[16](move_dr16_start, move_dr16_next, move_dr16_end; move_dr16_stop);
    "movl $0x1234, %eax"
    "move_dr16_next: movl %eax, %dr2"
    "movl %dr2, %ecx"
    "move_dr16_end: ud2"
}

case! {
    name: "access_by_mode", cpl: [0], rules: ["DR-15", "DR-14"], needs: ["gd", "intn-cpl0"],
    about: "MOV DR works in real mode, and raises #GP(0) in virtual-8086 mode and at CPL 3",
    fn body(_ctx) {
        let blob = move_dr16();
        for mode in MODES16 {
            let m = run(&blob, mode, move_dr16_start, nothing);
            if matches!(mode, LegacyMode::Real | LegacyMode::Protected16(0)) {
                check_eq!(m.last().vector_and_eip(), (6, blob.offset(move_dr16_end)), "vector and EIP at the end");
                check_eq!(m.last().registers.ecx, 0x1234, "the value read back");
            } else {
                check_eq!(m.last().vector_and_eip(), (13, blob.offset(move_dr16_next)), "#GP");
                check_eq!(m.last().error, 0, "its error code");
            }
        }
    }
}

blob! {
    fn general_detect16[16](detect_start, detect_insn, detect_end; detect_stop);
    "movl $0x2400, %eax"
    "movl %eax, %dr7"
    "detect_insn: movl %dr0, %eax"
    "detect_end: ud2"
}

case! {
    name: "general_detect", cpl: [0], rules: ["GD-01", "DR-27"], needs: ["gd", "intn-cpl0", "guestbp-io"],
    about: "general detect in real and 16-bit protected mode",
    fn body(_ctx) {
        for mode in [LegacyMode::Real, LegacyMode::Protected16(0)] {
            let blob = general_detect16();
            let m = run(&blob, mode, detect_start, nothing);
            check_one(m, blob.offset(detect_insn), debug::BD);
        }
    }
}

blob! {
    fn pop_ss16[16](pop_ss16_start, pop_ss16_nop, pop_ss16_next, pop_ss16_end; pop_ss16_stop);
    "movw %ss, %ax"
    "movw %ax, %ds:0x8000"
    "pushw %ds:0x8000"
    "popw %ss"
    "pop_ss16_nop: nop"
    "pop_ss16_next: nop"
    "pop_ss16_end: ud2"
}

case! {
    name: "pop_ss", cpl: [0], rules: ["SHD-03", "SHD-08", "SHD-12", "DB-04", "TF-13"],
    needs: ["gd", "intn-cpl0", "tf-cpl0", "shadow-cpl0", "guestbp-io"],
    about: "POP SS delays the step by one instruction, and hides a breakpoint on the next",
    fn body(_ctx) {
        let blob = pop_ss16();
        for mode in MODES16 {
            let m = run_with(&blob, mode, pop_ss16_start, TF, 0, |m| m.actions[1] = action::RESUME);
            // The steps: two MOVs, PUSH, then NOP with POP SS, and NOP.
            let steps = [3, 4].map(|n: usize| debugged(m.events().get(n)));
            let expected = [pop_ss16_next as BlobLabel, pop_ss16_end].map(|label| ((1, blob.offset(label)), BS));
            check_eq!(steps[0], expected[0], "the step after POP SS");
            check_eq!(steps[1], expected[1], "the next step");
            let m = run(&blob, mode, pop_ss16_start, || arm(0, u64::from(blob.linear(pop_ss16_nop)), Condition::Execute, Length::One));
            check_eq!(m.events().len(), 1, "no #DB");
        }
    }
}

case! {
    name: "pop_ss_operand", cpl: [0], rules: ["SHD-04"],
    needs: ["gd", "intn-cpl0", "guestbp-data", "guestbp-io"],
    about: "a breakpoint on the stack word that POP SS reads reports one instruction later",
    fn body(_ctx) {
        let blob = pop_ss16();
        // Where the handler has a stack of its own.
        for mode in [LegacyMode::Virtual8086, LegacyMode::Protected16(3)] {
            let stack = u64::from(legacy::BASE + legacy::STACK - 2);
            let m = run_with(&blob, mode, pop_ss16_start, 0, 0, |m| {
                m.actions[1] = action::RESUME;
                arm(1, stack, Condition::ReadWrite, Length::Two);
            });
            check_eq!(m.events().len(), 3, "PUSH, POP SS and the end");
            check_eq!(debugged(m.events().get(1)), ((1, blob.offset(pop_ss16_next)), B1), "after the NOP");
        }
    }
}

blob! {
    fn into_taken[32](into_start, into_next, into_clear, into_end; into_stop);
    "movb $0x7f, %al"
    "incb %al"
    "into"
    "into_next: xorl %eax, %eax"
    "into"
    "into_clear: nop"
    "into_end: ud2"
}

case! {
    name: "into", cpl: [0], rules: ["SWI-06"], needs: ["gd", "intn-cpl0"],
    about: "INTO traps with OF set, at both levels, and does nothing with OF clear",
    fn body(_ctx) {
        let blob = into_taken();
        for mode in MODES32 {
            let m = run_with(&blob, mode, into_start, 0, 0, |m| m.actions[4] = action::RESUME);
            check_eq!(m.events().len(), 2, "one #OF and the end");
            let first = m.events().first();
            check_eq!(first.map(|e| (e.vector_and_eip(), e.error)), Some(((4, blob.linear(into_next)), 0)), "#OF");
            check_eq!(first.map(|e| e.eflags & OF), Some(OF), "OF in the image");
        }
    }
}

blob! {
    fn breakpoints16[16](breaks_start, breaks_int1, breaks_cd03, breaks_end; breaks_stop);
    "int3"
    "breaks_int1: .byte 0xf1"
    "breaks_cd03: .byte 0xcd, 3"
    "breaks_end: ud2"
}

case! {
    name: "virtual8086_iopl", cpl: [0], rules: ["SWI-05", "SWI-03", "SWI-01"],
    needs: ["gd", "intn-cpl0", "guestbp-io"],
    about: "in virtual-8086 mode with IOPL 0 CD 03 raises #GP(0); CC and F1 do not",
    fn body(_ctx) {
        let blob = breakpoints16();
        let m = legacy::machine(&blob);
        m.actions[1] = action::RESUME;
        m.actions[3] = action::RESUME;
        m.run(&blob, &BlobStart::at(LegacyMode::Virtual8086, breaks_start));
        let places = [0, 1, 2].map(|n: usize| m.events().get(n).map_or((99, 0), LegacyEvent::vector_and_eip));
        let offset = |label| blob.offset(label);
        check_eq!(places, [(3, offset(breaks_int1)), (1, offset(breaks_cd03)), (13, offset(breaks_cd03))], "vectors and IPs");
        check_eq!(m.last().error, 0, "the error code");
    }
}

blob! {
    fn redirected16[16](redirected_start, redirected_here, redirected_end; redirected_stop);
    ".byte 0xcd, 3"
    "redirected_end: ud2"
    "redirected_here: movw $0x55aa, %cx"
    "int3"
}

case! {
    name: "virtual8086_redirection", cpl: [0], rules: ["SWI-05"], needs: ["gd", "intn-cpl0", "guestbp-io"],
    about: "with CR4.VME and a clear bit in the map CD 03 goes to the real-mode vector, CC to the \
        protected-mode gate",
    fn body(_ctx) {
        let blob = redirected16();
        let m = run_with(&blob, LegacyMode::Virtual8086, redirected_start, 0, VME, |m| {
            m.tss[0].redirect[0] &= !(1 << 3);
            let vector = u32::from(legacy::SEGMENT) << 16 | blob.offset(redirected_here);
            // SAFETY: vector 3 of the real-mode table, which the machine owns.
            unsafe { (12 as *mut u32).write_volatile(vector) };
        });
        check_eq!(m.events().len(), 1, "the INT3 alone enters protected mode");
        check_eq!((m.last().vector, m.last().registers.ecx & 0xffff), (3, 0x55aa), "after the redirected handler");
    }
}

blob! {
    fn rdtsc16[16](rdtsc16_start, rdtscp16, rdtsc16_end; rdtsc16_stop);
    "rdtsc"
    "rdtscp16: rdtscp"
    "rdtsc16_end: ud2"
}

case! {
    name: "time_stamp", cpl: [0], rules: ["TSC-04"], needs: ["gd", "intn-cpl0", "tsd-cpl3", "rdtscp-cpl0"],
    about: "RDTSC and RDTSCP work in every mode without CR4.TSD; with it they raise #GP(0) at CPL 3 \
        and in virtual-8086 mode",
    fn body(_ctx) {
        let blob = rdtsc16();
        for mode in MODES16 {
            let m = run(&blob, mode, rdtsc16_start, nothing);
            check_eq!(m.last().vector_and_eip(), (6, blob.offset(rdtsc16_end)), "without TSD");
            let refused = matches!(mode, LegacyMode::Virtual8086 | LegacyMode::Protected16(3));
            for (entry, label) in [(rdtsc16_start as BlobLabel, rdtsc16_start as BlobLabel), (rdtscp16, rdtscp16)] {
                let m = run_with(&blob, mode, entry, 0, TSD, |_| ());
                let expected = if refused { (13, blob.offset(label)) } else { (6, blob.offset(rdtsc16_end)) };
                check_eq!(m.last().vector_and_eip(), expected, "with TSD");
            }
        }
    }
}

blob! {
    fn port16[16](port16_start, port16_insn, port16_next, port16_end; port16_stop);
    "movw $0x2e8, %dx"
    "port16_insn: outb %al, %dx"
    "port16_next: nop"
    "port16_end: ud2"
}

case! {
    name: "io_breakpoints", cpl: [0], rules: ["IOB-01", "IOB-06", "DR-27"], needs: ["guestbp-io"],
    about: "an I/O breakpoint in every 16-bit mode; what the map refuses is #GP(0) and no #DB",
    fn body(_ctx) {
        let blob = port16();
        for mode in MODES16 {
            let m = run_with(&blob, mode, port16_start, 0, DE, |m| {
                m.tss[0].io[93] = 0;
                arm(0, PORT, Condition::Io, Length::One);
            });
            check_one(m, blob.offset(port16_next), B0);
        }
        let m = run_with(&blob, LegacyMode::Virtual8086, port16_start, 0, DE, |_| arm(0, PORT, Condition::Io, Length::One));
        check_eq!(m.events().len(), 1, "no #DB");
        check_eq!((m.last().vector_and_eip(), m.last().error), ((13, blob.offset(port16_insn)), 0), "#GP");
    }
}

// 64-bit code at CPL 3 that goes through 32-bit code: a store, and back.
snippet! { through_compatibility [compatibility_store compatibility_next compatibility_back]
    "mov r8, rsp", "mov eax, 0x23", "mov ds, eax", "push 0x1b", "lea rax, [rip + 2f]", "push rax", ".byte 0x48", "retf",
    "2:", ".code32", "compatibility_store:", "mov byte ptr [edi], 1", "compatibility_next:", "nop",
    ".byte 0xea", ".long compatibility_back", ".word 0x2b",
    ".code64", "compatibility_back:", "xor eax, eax", "mov ds, eax", "mov rsp, r8", "ret"
}

case! {
    name: "compatibility", cpl: [3], rules: ["DR-27", "DR-22", "DR-23"],
    needs: ["guestbp-data", "guestbp-exec-cpl3", "iretq-cpl3", "gd"],
    about: "instruction and data breakpoints in compatibility mode",
    fn body(ctx) {
        check_eq!((USER_CODE32 | 3, USER_CODE), (0x1b, 0x2b), "the selectors");
        let address = PAGE.address();
        arm(0, at(compatibility_store), Condition::Execute, Length::One);
        debug::arm_also(1, address, Condition::Write, Length::Eight);
        let log = debug::events(ctx, through_compatibility, address, 0);
        check_eq!(log.count(), 2, "two #DBs");
        check_eq!(debug::event(log, 0), (at(compatibility_store), B0), "the instruction");
        check_eq!(debug::event(log, 1), (at(compatibility_next), B1), "the store");
        check_eq!(log.events().first().map(|e| e.cs), Some(0x1b), "CS");
        arm(1, address | 1 << 32, Condition::Write, Length::Eight);
        check_eq!(debug::events(ctx, through_compatibility, address, 0).count(), 0, "an address above 4 GiB");
    }
}

snippet! { step_compatibility [step_store step_next step_back]
    "mov r8, rsp", "mov eax, 0x23", "mov ds, eax", "push 0x1b", "lea rax, [rip + 2f]", "push rax", hindsight_payloads::set_tf!(), ".byte 0x48", "retf",
    "2:", ".code32", "step_store:", "mov byte ptr [edi], 1", "step_next:",
    ".byte 0xea", ".long step_back", ".word 0x2b",
    ".code64", "step_back:", hindsight_payloads::clear_tf!(), "xor eax, eax", "mov ds, eax", "mov rsp, r8", "ret"
}

case! {
    name: "step_compatibility", cpl: [3], rules: ["DR-27", "TF-20"], needs: ["tf-cpl3", "iretq-cpl3", "gd"],
    about: "TF steps into, through and out of compatibility mode",
    fn body(ctx) {
        let log = debug::events(ctx, step_compatibility, PAGE.address(), 0);
        check_steps!(log, [(at(step_store), BS), (at(step_next), BS), (at(step_back), BS)], "three steps");
    }
}

blob! {
    fn flags32[32](flags_start, flags_popf_next, flags_end; flags_stop);
    "pushfl"
    "popl %ecx"
    "orl $0x10000, %ecx"
    "pushl %ecx"
    "popfl"
    "flags_popf_next: pushfl"
    "popl %edx"
    "flags_end: ud2"
}

case! {
    name: "popf", cpl: [0], rules: ["RF-09"], needs: ["gd", "intn-cpl0", "guestbp-exec-cpl0", "guestbp-io"],
    about: "POPFD ignores RF, and PUSHFD stores it as 0",
    fn body(_ctx) {
        let blob = flags32();
        for mode in MODES32 {
            let m = run(&blob, mode, flags_start, || arm(0, u64::from(blob.linear(flags_popf_next)), Condition::Execute, Length::One));
            check_one(m, blob.linear(flags_popf_next), B0);
            check_eq!(m.last().registers.edx & RF, 0, "RF in the image");
        }
    }
}

blob! {
    fn iret16[16](iret16_start, iret16_target, iret16_end; iret16_stop);
    "pushfw"
    "pushw %cs"
    "pushw $iret16_target - iret16_start"
    "iretw"
    "iret16_target: nop"
    "iret16_end: ud2"
}

case! {
    name: "iret16", cpl: [0], rules: ["RF-10", "DB-05"],
    needs: ["gd", "intn-cpl0", "guestbp-exec-cpl0", "guestbp-io"],
    about: "a 16-bit IRET leaves RF clear: the breakpoint on its target is met",
    fn body(_ctx) {
        let blob = iret16();
        for mode in [LegacyMode::Virtual8086, LegacyMode::Protected16(0), LegacyMode::Protected16(3)] {
            let m = run(&blob, mode, iret16_start, || arm(0, u64::from(blob.linear(iret16_target)), Condition::Execute, Length::One));
            check_one(m, blob.offset(iret16_target), B0);
        }
    }
}
