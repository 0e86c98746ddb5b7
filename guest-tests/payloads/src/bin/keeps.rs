//! State that must be the same after exits, during which the monitor may change the engine.
//!
//! `hindsight test keeps --run-arg=--switch-every=1` changes it at every exit.

#![no_std]
#![no_main]

use core::arch::asm;

use hindsight_guest::insn;
use hindsight_guest::msr;
use hindsight_guest::port;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cr::Cr4;
use hindsight_guest::regs::msr::{
    IA32_CSTAR, IA32_FMASK, IA32_KERNEL_GS_BASE, IA32_LSTAR, IA32_PAT, IA32_STAR, IA32_SYSENTER_CS,
    IA32_SYSENTER_EIP, IA32_SYSENTER_ESP, IA32_TIME_STAMP_COUNTER, IA32_TSC_ADJUST,
};

payload!("keeps");

/// A port without a device.
const PORT: u16 = 0x2e8;
/// Exits of each case.
const EXITS: u64 = 6;
/// Bytes of an FXSAVE image that the processor writes.
const WRITTEN: usize = 416;

/// An FXSAVE image.
#[repr(C, align(16))]
struct FxsaveImage([u8; 512]);

impl FxsaveImage {
    const fn new() -> Self {
        Self([0; 512])
    }

    fn save(&mut self) {
        // SAFETY: FXSAVE writes at most 512 bytes, which the aligned image has.
        unsafe {
            asm!("fxsave64 [{}]", in(reg) &raw mut self.0, options(nostack, preserves_flags))
        };
    }

    fn load(&self) {
        // SAFETY: the code of payloads uses no x87 and no SSE registers. FXSAVE made the image, and the
        // case changed only the contents of registers.
        unsafe {
            asm!("fxrstor64 [{}]", in(reg) &raw const self.0, options(nostack, preserves_flags))
        };
    }
}

fn exits() {
    for _ in 0..EXITS {
        port::inb(PORT);
    }
}

case! {
    name: "general_registers", cpl: [0], rules: [], needs: ["io-exit"],
    about: "general registers and flags are the same after port reads",
    fn body(_ctx) {
        let (mut differ, flags): (u64, u64);
        // SAFETY: all registers that change are declared or restored, and the stack is balanced.
        unsafe {
            asm!(
                "push rbx", "push rbp", "mov rbp, 0x1122334455667788", "mov rbx, 0x99aabbccddeeff00",
                "xor ecx, ecx", "stc", "std",
                "2:", "in al, dx", "inc ecx", "cmp ecx, 6", "jne 2b",
                "stc", "in al, dx", "in al, dx", "pushfq", "pop rcx", "cld",
                "mov rax, 0x1122334455667788", "xor rax, rbp", "mov rsi, 0x99aabbccddeeff00", "xor rsi, rbx",
                "or rax, rsi",
                "lea rsi, [r8 + 1]", "xor rsi, r9", "or rax, rsi", "lea rsi, [r9 + 1]", "xor rsi, r10", "or rax, rsi",
                "lea rsi, [r10 + 1]", "xor rsi, r11", "or rax, rsi", "lea rsi, [r11 + 1]", "xor rsi, r12",
                "or rax, rsi", "lea rsi, [r12 + 1]", "xor rsi, r13", "or rax, rsi", "lea rsi, [r13 + 1]",
                "xor rsi, r14", "or rax, rsi", "lea rsi, [r14 + 1]", "xor rsi, r15", "or rax, rsi",
                "pop rbp", "pop rbx",
                inout("rdx") u64::from(PORT) => _, inout("rax") 0_u64 => differ, out("rcx") flags, out("rsi") _,
                inout("r8") 0x7000_0000_0000_0001_u64 => _, inout("r9") 0x7000_0000_0000_0002_u64 => _,
                inout("r10") 0x7000_0000_0000_0003_u64 => _, inout("r11") 0x7000_0000_0000_0004_u64 => _,
                inout("r12") 0x7000_0000_0000_0005_u64 => _, inout("r13") 0x7000_0000_0000_0006_u64 => _,
                inout("r14") 0x7000_0000_0000_0007_u64 => _, inout("r15") 0x7000_0000_0000_0008_u64 => _,
            );
        }
        check_eq!(differ, 0, "bits that differ");
        // CF and DF.
        check_eq!(flags & 0x401, 0x401, "flags");
    }
}

case! {
    name: "vectors", cpl: [0], rules: [], needs: ["io-exit", "sse-cpl0"],
    about: "x87 and SSE registers, their control words and tags are the same after port reads",
    fn body(_ctx) {
        let cr4 = insn::read_cr4();
        // Without OSFXSR, FXSAVE may leave out SSE state.
        insn::write_cr4(cr4 | Cr4::OSFXSR.bits());
        let mut before = FxsaveImage::new();
        before.save();
        let original = FxsaveImage(before.0);
        // FCW; FSW with TOP 3 and C1; FTW with three registers in use; MXCSR with rounding up and DE set.
        before.0[..5].copy_from_slice(&[0x7f, 0x0f, 0x00, 0x1a, 0b0011_1000]);
        before.0[24..28].copy_from_slice(&0x5f82_u32.to_le_bytes());
        for (byte, value) in before.0[32..WRITTEN].iter_mut().zip((1_u8..=251).cycle()) {
            *byte = value;
        }
        // The upper 6 bytes of each x87 register are reserved.
        for register in before.0[32..160].chunks_exact_mut(16) {
            register[10..].fill(0);
        }
        before.load();
        let mut after = FxsaveImage::new();
        exits();
        after.save();
        original.load();
        insn::write_cr4(cr4);
        // MXCSR_MASK is a constant. FOP, FIP and FDP need not stay, because no x87 instruction was executed.
        let compared = |image: &FxsaveImage| {
            let mut bytes = image.0;
            bytes[5..24].fill(0);
            bytes[28..32].fill(0);
            bytes
        };
        let (before, after) = (compared(&before), compared(&after));
        let differs = (0..WRITTEN).find(|&at| before[at] != after[at]);
        check_eq!(differs, None, "first byte that differs");
    }
}

case! {
    name: "debug_registers", cpl: [0], rules: [], needs: ["io-exit"],
    about: "DR0 to DR3, DR6 and DR7 without enabled breakpoints are the same after port reads",
    fn body(_ctx) {
        let (status, control) = (0xffff_4ff5, 0xd9b5_0400);
        for n in 0..4 {
            insn::write_dr(n, 0x1000_2000_3000 + u64::from(n));
        }
        insn::write_dr6(status);
        insn::write_dr7(control);
        exits();
        let addresses = [insn::read_dr0(), insn::read_dr1(), insn::read_dr2(), insn::read_dr3()];
        check_eq!(addresses, [0, 1, 2, 3].map(|n| 0x1000_2000_3000 + n), "DR0 to DR3");
        check_eq!([insn::read_dr6(), insn::read_dr7()], [status, control], "DR6 and DR7");
    }
}

case! {
    name: "system_registers", cpl: [0], rules: [], needs: ["io-exit"],
    about: "MSRs of system calls, PAT, CR2 and CR8 are the same after port reads",
    fn body(_ctx) {
        let values = [
            (IA32_STAR, 0x0023_0010_0000_0000), (IA32_LSTAR, 0xffff_8000_0000_1000),
            (IA32_CSTAR, 0xffff_8000_0000_2000), (IA32_FMASK, 0x4_7700), (IA32_KERNEL_GS_BASE, 0x1234_5678_9000),
            (IA32_SYSENTER_CS, 0x10), (IA32_SYSENTER_ESP, 0x7654_3210), (IA32_SYSENTER_EIP, 0xffff_8000_0000_3000),
            (IA32_PAT, 0x0007_0406_0007_0406),
        ];
        let before = values.map(|(index, _)| msr::read(index));
        for (index, value) in values {
            msr::write(index, value);
        }
        insn::write_cr2(0xffff_8000_dead_b000);
        insn::write_cr8(5);
        exits();
        for (index, value) in values {
            check_eq!((index, msr::read(index)), (index, value), "MSR");
        }
        check_eq!([insn::read_cr2(), insn::read_cr8()], [0xffff_8000_dead_b000, 5], "CR2 and CR8");
        insn::write_cr8(0);
        for ((index, _), value) in values.into_iter().zip(before) {
            msr::write(index, value);
        }
    }
}

case! {
    name: "time", cpl: [0], rules: ["TSC-05", "ADJ-03", "ADJ-04"], needs: ["msr-exit", "tsc-offset"],
    about: "the TSC increases across exits and keeps a step that the guest made by IA32_TSC_ADJUST",
    fn body(_ctx) {
        const STEP: u64 = 1 << 50;
        let mut last = insn::rdtsc();
        for adjust in [0, STEP] {
            let before = msr::read(IA32_TSC_ADJUST);
            msr::write(IA32_TSC_ADJUST, before.wrapping_add(adjust));
            for _ in 0..EXITS {
                port::inb(PORT);
                let by_instruction = insn::rdtsc();
                let by_msr = msr::read(IA32_TIME_STAMP_COUNTER);
                check!(last < by_instruction && by_instruction < by_msr, "the TSC increases");
                last = by_msr;
            }
            check_eq!(last >= STEP, adjust == STEP, "step in the TSC");
            check_eq!(msr::read(IA32_TSC_ADJUST), before.wrapping_add(adjust), "IA32_TSC_ADJUST");
        }
        let adjusted = msr::read(IA32_TSC_ADJUST);
        msr::write(IA32_TSC_ADJUST, adjusted.wrapping_sub(STEP));
    }
}
