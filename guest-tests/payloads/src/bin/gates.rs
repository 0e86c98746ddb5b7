//! Far branches between privilege levels in 32- and 16-bit protected mode.
//!
//! SDM Vol. 3A, "Privilege Levels", "Call Gates".

#![no_std]
#![no_main]

use hindsight_guest::blob;
use hindsight_guest::legacy::tables::{
    self, CALL16, CALL32, CODE_CONFORMING, USER, gate, segment, with_parameters,
};
use hindsight_guest::legacy::{
    self, BASE, Blob, BlobLabel, BlobStart, LegacyMachine, LegacyMode, STACK, sel,
};
use hindsight_guest::prelude::*;

payload!("gates");

/// Index of the first free descriptor, which these cases use.
const FREE: usize = (sel::FREE / 8) as usize;

blob! {
    fn calls[32](
        call_gate, after_call, inner, inner_same, jump_gate, conforming, at_conforming, bounds, bounds_at,
        overflow, after_into, check_segments, segments_end, call_short, short_back, short_inner; calls_stop
    );
    // Two parameters, then the gate at 80H with RPL 3.
    "pushl $0x1111"
    "pushl $0x2222"
    "lcall $0x83, $0"
    "after_call: ud2"
    // At CPL 0: reads return address, parameters and the outer stack.
    "inner: movl 8(%esp), %eax"
    "movl 12(%esp), %ebx"
    "movl 16(%esp), %ecx"
    "movl 20(%esp), %edx"
    "movl 4(%esp), %esi"
    "movl %esp, %edi"
    "lretl $8"
    "inner_same: ud2"
    "jump_gate: ljmp $0x83, $0"
    "conforming: ljmp $0x88, $(0x10000 + at_conforming - call_gate)"
    "at_conforming: ud2"
    "bounds: movl $10, %eax"
    "bounds_at: .byte 0x62, 0x06" // BOUND EAX, [ESI]
    "ud2"
    "overflow: movb $0x7f, %al"
    "addb $1, %al"
    "into"
    "after_into: ud2"
    // LAR, LSL, VERR, VERW and ARPL of the selectors in EBX and ECX.
    "check_segments: larl %ebx, %eax"
    "lsll %ebx, %edx"
    "xorl %edi, %edi"
    "verr %bx"
    "setz %bl"
    "verw %cx"
    "setz %bh"
    "movw $0x10, %cx"
    "movw $0x83, %si"
    "arpl %si, %cx"
    "segments_end: ud2"
    // 16-bit code that calls a 16-bit gate with two words as parameters.
    ".code16"
    "call_short: pushw $0x5555"
    "pushw $0x6666"
    "lcallw $0x83, $0"
    "short_back: ud2"
    ".code32"
    "short_inner: movzwl 4(%esp), %eax"
    "movzwl 6(%esp), %ebx"
    ".byte 0x66, 0xca, 4, 0" // RET of 16 bits, 4 bytes of parameters
}

fn machine() -> (Blob, &'static mut LegacyMachine) {
    let blob = calls();
    (blob, legacy::machine(&blob))
}

fn run(m: &mut LegacyMachine, blob: &Blob, cpl: u8, entry: BlobLabel) {
    m.run(blob, &BlobStart::at(LegacyMode::Protected32(cpl), entry));
}

case! {
    name: "call_gate", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "a call gate switches to the inner stack and copies the parameters; RET returns and releases them",
    fn body(_ctx) {
        let (blob, m) = machine();
        m.gdt[FREE] = with_parameters(gate(sel::CODE32, blob.linear(inner), CALL32 | USER), 2);
        run(m, &blob, 3, call_gate);
        let last = m.last();
        check_eq!(last.vector_and_eip(), (6, blob.linear(after_call)), "vector and EIP at the end");
        check_eq!(last.esp, BASE + STACK, "outer ESP after RET");
        let r = last.registers;
        check_eq!((r.eax, r.ebx), (0x2222, 0x1111), "parameters");
        check_eq!((r.ecx, r.edx), (BASE + STACK - 8, sel::USER_DATA32.into()), "outer ESP and SS");
        check_eq!(r.esi, sel::USER_CODE32.into(), "outer CS");
        check_eq!(r.edi, m.tss[0].esp0 - 24, "inner ESP");
        check_eq!(last.cs, sel::USER_CODE32.into(), "CS");
    }
}

case! {
    name: "short_call_gate", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "a 16-bit call gate pushes words",
    fn body(_ctx) {
        let (blob, m) = machine();
        // The return address has 16 bits, so the code segments have the blob's base.
        m.gdt[FREE + 1] = segment(BASE, 0xffff, tables::CODE | tables::BIG);
        let target = gate(sel::FREE + 8, blob.offset(short_inner), CALL16 | USER);
        m.gdt[FREE] = with_parameters(target, 2);
        m.run(&blob, &BlobStart::at(LegacyMode::Protected16(3), call_short));
        check_eq!(m.last().vector_and_eip(), (6, blob.offset(short_back)), "vector and EIP at the end");
        let r = m.last().registers;
        check_eq!((r.eax, r.ebx), (0x6666, 0x5555), "parameters");
        check_eq!(m.last().esp & 0xffff, STACK, "outer SP after RET");
    }
}

case! {
    name: "refused", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "gates of DPL 0, absent gates, jumps to inner code, and a missing inner stack raise exceptions",
    fn body(_ctx) {
        let (blob, m) = machine();
        m.gdt[FREE] = gate(sel::CODE32, blob.linear(inner), CALL32);
        run(m, &blob, 3, call_gate);
        check_eq!(m.last().code(), (13, sel::FREE.into()), "gate of DPL 0");

        let (blob, m) = machine();
        m.gdt[FREE] = gate(sel::CODE32, blob.linear(inner), CALL32 | USER) & !(0x80 << 40);
        run(m, &blob, 3, call_gate);
        check_eq!(m.last().code(), (11, sel::FREE.into()), "absent gate");

        let (blob, m) = machine();
        m.gdt[FREE] = gate(sel::CODE32, blob.linear(inner), CALL32 | USER);
        run(m, &blob, 3, jump_gate);
        check_eq!(m.last().code(), (13, sel::CODE32.into()), "jump to CPL 0");

        let (blob, m) = machine();
        m.gdt[FREE] = gate(sel::FREE + 8, blob.linear(inner), CALL32 | USER);
        m.gdt[FREE + 1] = segment(0, 0xffff_ffff, tables::CODE | tables::BIG | 0x20);
        run(m, &blob, 3, call_gate);
        check_eq!(m.last().code(), (10, 0), "no stack for CPL 1 in the TSS");
    }
}

case! {
    name: "same_level", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "a gate to the same level keeps the stack; conforming code runs at the caller's level",
    fn body(_ctx) {
        let (blob, m) = machine();
        m.gdt[FREE] = gate(sel::CODE32, blob.linear(inner_same), CALL32 | USER);
        run(m, &blob, 0, call_gate);
        check_eq!(m.last().vector_and_eip(), (6, blob.linear(inner_same)), "vector and EIP at the end");
        check_eq!(m.last().esp, BASE + STACK - 16, "ESP, same stack");

        let (blob, m) = machine();
        m.gdt[FREE + 1] = segment(0, 0xffff_ffff, CODE_CONFORMING | tables::BIG);
        run(m, &blob, 3, conforming);
        check_eq!(m.last().vector_and_eip(), (6, blob.linear(at_conforming)), "vector and EIP at the end");
        check_eq!(m.last().cs & 3, 3, "CPL");
    }
}

case! {
    name: "bound_and_into", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "BOUND raises #BR outside its limits, INTO raises #OF if OF is set",
    fn body(_ctx) {
        let (blob, m) = machine();
        let mut start = BlobStart::at(LegacyMode::Protected32(3), bounds);
        start.registers.esi = legacy::DATA;
        // The data page is zero, so both limits are 0.
        m.run(&blob, &start);
        check_eq!(m.last().vector_and_eip(), (5, blob.linear(bounds_at)), "#BR");

        let (blob, m) = machine();
        run(m, &blob, 3, overflow);
        check_eq!(m.last().vector_and_eip(), (4, blob.linear(after_into)), "#OF");
    }
}

case! {
    name: "descriptor_checks", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "LAR, LSL, VERR, VERW and ARPL check the descriptors' DPL against CPL and RPL",
    fn body(_ctx) {
        let (blob, m) = machine();
        let mut start = BlobStart::at(LegacyMode::Protected32(3), check_segments);
        start.registers.ebx = sel::USER_CODE16.into();
        start.registers.ecx = sel::USER_DATA16.into();
        m.run(&blob, &start);
        let r = m.last().registers;
        check_eq!(m.last().vector_and_eip(), (6, blob.linear(segments_end)), "vector and EIP at the end");
        check_eq!(r.eax & 0xff00, 0xfb00, "LAR: access rights");
        check_eq!(r.edx, 0xffff, "LSL");
        check_eq!(r.ebx & 0xffff, 0x0101, "VERR and VERW");
        check_eq!(r.ecx & 0xffff, 0x13, "ARPL");

        let (blob, m) = machine();
        start.registers.ebx = sel::CODE32.into();
        start.registers.ecx = sel::DATA32.into();
        start.registers.edx = 77;
        start.registers.eax = 55;
        m.run(&blob, &start);
        let r = m.last().registers;
        check_eq!((r.eax, r.edx), (55, 77), "destinations of LAR and LSL for DPL 0, unchanged");
        check_eq!(r.ebx & 0xffff, 0, "VERR and VERW for DPL 0");
    }
}
