//! Which instructions cannot be part of a transaction. SDM Vol. 1, "Instruction Based Considerations".

use iced_x86::{Instruction, Mnemonic as M};

/// Executing the instruction aborts the transaction that it is in. Those that come to an end of their
/// own (XBEGIN, XABORT, XEND) and those that merely fault are not among them.
pub(super) fn aborts(i: &Instruction) -> bool {
    let name = i.mnemonic();
    // State that no transaction keeps: MMX and x87 registers.
    let bank = (0..i.op_count()).any(|n| {
        let register = i.op_register(n);
        register.is_mm() || register.is_st()
    });
    bank || i.is_privileged()
        || (i.is_save_restore_instruction() && name != M::Xabort)
        || i.is_jmp_far()
        || i.is_jmp_far_indirect()
        || i.is_call_far()
        || i.is_call_far_indirect()
        || x87(i)
        || unfit(name)
        || (name == M::Mov && i.op0_register().is_segment_register())
        || (name == M::Pop && i.op0_register().is_segment_register())
        || i.is_string_instruction() && matches!(i.op0_register(), iced_x86::Register::DX)
}

/// An x87 instruction, of whatever operands.
fn x87(i: &Instruction) -> bool {
    use iced_x86::CpuidFeature::{FPU, FPU287, FPU387, MMX};
    let of = |feature| i.cpuid_features().contains(&feature);
    of(FPU) || of(FPU287) || of(FPU387) || of(MMX)
}

#[rustfmt::skip]
fn unfit(name: M) -> bool {
    matches!(
        name,
        M::Cpuid | M::Pause | M::Rsm | M::Ud0 | M::Ud1 | M::Ud2 | M::Getsec
        // Instructions that change system flags.
        | M::Cli | M::Sti | M::Popf | M::Popfd | M::Popfq | M::Clac | M::Stac
        // Segments and tables.
        | M::Lds | M::Les | M::Lfs | M::Lgs | M::Lss | M::Swapgs | M::Wrfsbase | M::Wrgsbase
        | M::Sgdt | M::Sidt | M::Sldt | M::Str | M::Smsw
        // Far branches and rings.
        | M::Retf | M::Iret | M::Iretd | M::Iretq
        | M::Syscall | M::Sysret | M::Sysretq | M::Sysenter | M::Sysexit | M::Sysexitq
        | M::Int | M::Into
        // Ports.
        | M::In | M::Out | M::Insb | M::Insw | M::Insd | M::Outsb | M::Outsw | M::Outsd
        // Caches, and stores round them.
        | M::Clflush | M::Clflushopt | M::Clwb
        | M::Movnti | M::Movntdq | M::Movntdqa | M::Movntpd | M::Movntps | M::Movntq
        | M::Vmovntdq | M::Vmovntdqa | M::Vmovntpd | M::Vmovntps
        | M::Maskmovq | M::Maskmovdqu | M::Vmaskmovdqu
        | M::Monitor | M::Mwait
    )
}
