//! Real mode, 16-bit protected mode and virtual-8086 mode: instructions that 64-bit mode lacks,
//! and the delivery of single-step #DBs.

#![no_std]
#![no_main]

use hindsight_guest::blob;
use hindsight_guest::legacy::{
    self, Blob, BlobLabel, BlobStart, LegacyMachine, LegacyMode, SEGMENT, STACK,
};
use hindsight_guest::legacy::{action, sel};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::rflags::Rflags;

payload!("modes16");

const MODES: [LegacyMode; 4] = [
    LegacyMode::Real,
    LegacyMode::Virtual8086,
    LegacyMode::Protected16(0),
    LegacyMode::Protected16(3),
];

const IOPL_3: u32 = (Rflags::IOPL.bits() & 0xffff_ffff) as u32;
const TF: u32 = (Rflags::TF.bits() & 0xffff_ffff) as u32;

/// Runs `blob` from `entry` in `mode`, with IOPL 3.
fn run(blob: &Blob, mode: LegacyMode, entry: BlobLabel) -> &'static mut LegacyMachine {
    let machine = legacy::machine(blob);
    let mut start = BlobStart::at(mode, entry);
    start.eflags = IOPL_3;
    machine.run(blob, &start);
    machine
}

blob! {
    fn decimal[16](decimal_start, decimal_end; decimal_stop);
    "movw $0x0799, %ax"
    "addb $0x28, %al"
    "daa"
    "pushfw"
    "movw %ax, %si"
    "movw $0x0735, %ax"
    "subb $0x47, %al"
    "das"
    "movw %ax, %di"
    "movw $0x0009, %ax"
    "addb $8, %al"
    "aaa"
    "movw %ax, %cx"
    "movw $0x0201, %ax"
    "subb $8, %al"
    "aas"
    "movw %ax, %dx"
    "movw $0x0905, %ax"
    "aad"
    "movw %ax, %bx"
    "aam $16"
    "movw %ax, %bp"
    "stc"
    ".byte 0xd6" // SALC
    "decimal_end: ud2"
}

case! {
    name: "decimal_arithmetic", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "DAA, DAS, AAA, AAS, AAD, AAM and SALC compute their results in every 16-bit mode",
    fn body(_ctx) {
        let blob = decimal();
        for mode in MODES {
            let m = run(&blob, mode, decimal_start);
            let last = m.last();
            let end = (6, blob.offset(decimal_end));
            check_eq!(last.vector_and_eip(), end, "vector and EIP at the end");
            let r = last.registers;
            check_eq!(r.esi & 0xffff, 0x0727, "DAA of 99H + 28H");
            check_eq!(r.edi & 0xffff, 0x0788, "DAS of 35H - 47H");
            check_eq!(r.ecx & 0xffff, 0x0107, "AAA of 9 + 8");
            check_eq!(r.edx & 0xffff, 0x0103, "AAS of 0201H - 8");
            check_eq!(r.ebx & 0xffff, 95, "AAD of 9, 5");
            check_eq!(r.ebp & 0xffff, 0x050f, "AAM of 95 by 16");
            check_eq!(r.eax & 0xff, 0xff, "SALC with CF");
        }
    }
}

blob! {
    fn steps[16](steps_start, steps_second, steps_third, steps_end; steps_stop);
    "incw %ax"
    "steps_second: pushw %ax"
    "steps_third: popw %cx"
    "steps_end: ud2"
}

case! {
    name: "single_step", cpl: [0], rules: ["TF-01", "TF-20", "DR-27"], needs: ["exceptions", "intn-cpl0"],
    about: "TF steps every instruction in real, virtual-8086 and 16-bit protected mode",
    fn body(_ctx) {
        let blob = steps();
        for mode in MODES {
            let m = legacy::machine(&blob);
            m.actions[1] = action::RESUME;
            let mut start = BlobStart::at(mode, steps_start);
            start.eflags = TF;
            m.run(&blob, &start);
            check_eq!(m.events().len(), 4, "count of exceptions: three steps and the end");
            let expected =
                [(1, steps_second as BlobLabel), (1, steps_third), (1, steps_end), (6, steps_end)];
            for (event, (vector, label)) in m.events().iter().zip(expected) {
                check_eq!(event.vector_and_eip(), (vector, blob.offset(label)), "vector and IP");
            }
            for event in &m.events()[..3] {
                check_eq!(event.dr6 & 0xf00f, 0x4000, "conditions in DR6");
                check_eq!(event.eflags & TF, TF, "TF in the saved flags");
                check_eq!(event.ss, expected_ss(mode), "interrupted SS");
            }
            check_eq!(m.events()[1].esp & 0xffff, STACK - 2, "SP after the push");
            check_eq!(m.last().registers.ecx & 0xffff, 1, "value popped");
        }
    }
}

fn expected_ss(mode: LegacyMode) -> u32 {
    match mode {
        LegacyMode::Protected16(0) => sel::DATA16.into(),
        LegacyMode::Protected16(_) => sel::USER_DATA16.into(),
        _ => SEGMENT.into(),
    }
}
