//! Sequences that several payloads run; they do the same at CPL 0 and 3 unless their comment says so.

use hindsight_guest::msr;
use hindsight_guest::regs::cr::Efer;
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::rflags::Rflags;

use crate::sequence;

sequence! {
    /// One taken branch of each class, in the order of the bits of MSR_LBR_SELECT.
    ///
    /// They are a conditional branch, relative and indirect calls with their returns, indirect and
    /// relative jumps, and a far branch (INT n with its IRET). One branch among them is not taken.
    one_of_each:
        "xor eax, eax",
        "20: jz 21f",
        "ud2",
        "30: ret",
        "31: ret",
        "21: jnz 20b",
        "22: call 30b",
        "23: lea rax, [rip + 31b]",
        "24: call rax",
        "25: lea rax, [rip + 27f]",
        "26: jmp rax",
        "ud2",
        "27: jmp 28f",
        "ud2",
        "28: int 0x82",
        "29: nop",
    => ["20b", "21b", "JCC"],
        ["22b", "30b", "REL_CALL"], ["30b", "23b", "RET_NEAR"],
        ["24b", "31b", "IND_CALL"], ["31b", "25b", "RET_NEAR"],
        ["26b", "27b", "IND_JMP"],
        ["27b", "28b", "REL_JMP"],
        ["28b", "recorder_return", "FAR_IN"], ["recorder_return", "29b", "FAR_OUT"],
}

sequence! {
    /// Conditional branches, all taken: each condition, then those that depend on RCX.
    conditionals:
        "xor eax, eax",
        "20: jz 21f", "ud2", "21: jnc 22f", "ud2", "22: jno 23f", "ud2", "23: jns 24f", "ud2",
        "24: jbe 25f", "ud2", "25: jp 26f", "ud2", "26: jge 27f", "ud2", "27: jle 28f", "ud2",
        "28: mov al, 0x7f", "add al, 0x42",
        // OF and SF set, CF, ZF and PF clear: C1H has three ones.
        "29: jo 30f", "ud2", "30: js 31f", "ud2", "31: jnz 32f", "ud2", "32: jnp 33f", "ud2",
        "33: ja 34f", "ud2", "34: jg 35f", "ud2",
        "35: xor eax, eax", "cmp eax, 1",
        "36: jc 37f", "ud2", "37: jl 38f", "ud2",
        "38: xor ecx, ecx",
        "39: jrcxz 40f", "ud2", "40: jecxz 41f", "ud2",
        "41: mov ecx, 2",
        "42: loop 43f", "ud2", "43: mov ecx, 2", "xor eax, eax",
        "44: loope 45f", "ud2", "45: mov ecx, 2", "or eax, 1",
        "46: loopne 47f", "ud2",
        // The long form: six bytes.
        "47: cmp ecx, 1",
        "48: .byte 0x0f, 0x84", ".long 49f - 48b - 6", "ud2",
        "49: nop",
    => ["20b", "21b", "JCC"], ["21b", "22b", "JCC"], ["22b", "23b", "JCC"], ["23b", "24b", "JCC"],
        ["24b", "25b", "JCC"], ["25b", "26b", "JCC"], ["26b", "27b", "JCC"], ["27b", "28b", "JCC"],
        ["29b", "30b", "JCC"], ["30b", "31b", "JCC"], ["31b", "32b", "JCC"], ["32b", "33b", "JCC"],
        ["33b", "34b", "JCC"], ["34b", "35b", "JCC"], ["36b", "37b", "JCC"], ["37b", "38b", "JCC"],
        ["39b", "40b", "JCC"], ["40b", "41b", "JCC"], ["42b", "43b", "JCC"], ["44b", "45b", "JCC"],
        ["46b", "47b", "JCC"], ["48b", "49b", "JCC"],
}

sequence! {
    /// Conditional branches and LOOPs that are not taken, and repeated string instructions.
    not_taken:
        "xor eax, eax",
        "20: jnz 20b", "jc 20b", "jo 20b", "js 20b", "ja 20b", "jnp 20b", "jl 20b", "jg 20b",
        "mov ecx, 1", "jrcxz 20b", "jecxz 20b", "loop 20b",
        "mov ecx, 2", "loopne 21f", "21: mov ecx, 1", "xor eax, eax", "loope 20b",
        "sub rsp, 64", "mov rdi, rsp", "mov ecx, 8", "rep stosq",
        "mov rsi, rsp", "mov rdi, rsp", "mov ecx, 64", "repe cmpsb",
        "mov rdi, rsp", "mov ecx, 64", "mov al, 1", "repne scasb",
        "add rsp, 64",
    =>
}

sequence! {
    /// Jumps: short and near, by register and through memory.
    jumps:
        "20: jmp 21f", "ud2",
        "21: .byte 0xe9", ".long 22f - 21b - 5", "ud2",
        "22: lea rax, [rip + 24f]",
        "23: jmp rax", "ud2",
        "24: lea rax, [rip + 26f]", "push rax",
        "25: jmp qword ptr [rsp]", "ud2",
        "26: pop rax",
    => ["20b", "21b", "REL_JMP"], ["21b", "22b", "REL_JMP"], ["23b", "24b", "IND_JMP"],
        ["25b", "26b", "IND_JMP"],
}

sequence! {
    /// Calls: relative, to the next instruction, by register and through memory; RET and RET n.
    calls:
        "20: jmp 22f",
        "21: ret",
        "30: ret 8",
        "22: call 21b",
        "23: call 24f", "24: pop rax",
        "25: lea rax, [rip + 21b]",
        "26: call rax",
        "27: push rax",
        "28: call qword ptr [rsp]",
        "29: call 30b",
        "31: nop",
    => ["20b", "22b", "REL_JMP"],
        ["22b", "21b", "REL_CALL"], ["21b", "23b", "RET_NEAR"],
        ["23b", "24b", "REL_CALL"],
        ["26b", "21b", "IND_CALL"], ["21b", "27b", "RET_NEAR"],
        ["28b", "21b", "IND_CALL"], ["21b", "29b", "RET_NEAR"],
        ["29b", "30b", "REL_CALL"], ["30b", "31b", "RET_NEAR"],
}

sequence! {
    /// Far branches within one level: far jump, far call and return, IRET.
    far_transfers:
        "mov rbp, rsp",
        "sub rsp, 16",
        "mov word ptr [rsp + 4], cs",
        "lea rax, [rip + 21f]", "mov [rsp], eax",
        // LJMP FWORD PTR [RSP], to which the assembler would add REX.W.
        "20: .byte 0xff, 0x2c, 0x24", "ud2",
        "21: lea rax, [rip + 23f]", "mov [rsp], eax",
        "22: lcall fword ptr [rsp]",
        "24: mov rax, rsp",
        "mov ecx, ss", "push rcx", "push rax", "pushfq", "mov ecx, cs", "push rcx",
        "lea rcx, [rip + 26f]", "push rcx",
        "25: iretq", "ud2",
        "23: retf",
        "26: mov rsp, rbp",
    => ["20b", "21b", "FAR"], ["22b", "23b", "FAR"], ["23b", "24b", "FAR"], ["25b", "26b", "FAR"],
}

sequence! {
    /// INT n and INT3, each with the IRET of its handler.
    software_interrupts:
        "20: int 0x82",
        "21: int3",
        "22: nop",
    => ["20b", "recorder_return", "FAR_IN"], ["recorder_return", "21b", "FAR_OUT"],
        ["21b", "recorder_return", "FAR_IN"], ["recorder_return", "22b", "FAR_OUT"],
}

sequence! {
    /// #UD and #DE, each with the IRET of its handler.
    faults:
        "mov r14, rsp",
        "20: ud2",
        "21: lea r15, [rip + 23f]", "xor eax, eax", "xor edx, edx",
        "22: div edx",
        "ud2",
        "23: nop",
    => ["20b", "recorder_skip", "FAR_IN"], ["recorder_skip_return", "21b", "FAR_OUT"],
        ["22b", "recorder_resume", "FAR_IN"], ["recorder_resume_return", "23b", "FAR_OUT"],
}

/// An address that payloads unmap and do not use otherwise: 61 MiB.
pub const UNMAPPED: u64 = 0x03d0_0000;

sequence! {
    /// Branches that fault and so are not taken.
    ///
    /// They are JMP and CALL through unmapped memory, RET from an unmapped stack, and JMP, CALL and RET
    /// to non-canonical addresses. The caller unmaps [`UNMAPPED`] and maps the page below it.
    faulting_branches:
        "mov r14, rsp",
        "mov rbp, rsp",
        "mov eax, 0x03d00000",
        "lea r15, [rip + 21f]",
        "20: jmp qword ptr [rax]", "ud2",
        "21: lea r15, [rip + 23f]",
        "22: call qword ptr [rax]", "ud2",
        "23: lea r15, [rip + 25f]",
        "mov rsp, rax",
        "24: ret", "ud2",
        "25: lea r15, [rip + 27f]",
        "mov rcx, 0x0000800000000000",
        "26: jmp rcx", "ud2",
        "27: lea r15, [rip + 29f]",
        "28: call rcx", "ud2",
        "29: lea r15, [rip + 31f]",
        "lea r14, [rsp]",
        "push rcx",
        "30: ret", "ud2",
        "31: nop",
    => ["20b", "recorder_resume_code", "FAR_IN"], ["recorder_resume_return", "21b", "FAR_OUT"],
        ["22b", "recorder_resume_code", "FAR_IN"], ["recorder_resume_return", "23b", "FAR_OUT"],
        ["24b", "recorder_resume_code", "FAR_IN"], ["recorder_resume_return", "25b", "FAR_OUT"],
        ["26b", "recorder_resume_code", "FAR_IN"], ["recorder_resume_return", "27b", "FAR_OUT"],
        ["28b", "recorder_resume_code", "FAR_IN"], ["recorder_resume_return", "29b", "FAR_OUT"],
        ["30b", "recorder_resume_code", "FAR_IN"], ["recorder_resume_return", "31b", "FAR_OUT"],
}

sequence! {
    /// Branches to [`UNMAPPED`]: jump, call and return are taken, and then the fetch faults.
    branches_to_unmapped:
        "mov r14, rsp",
        "mov eax, 0x03d00000",
        "lea r15, [rip + 21f]",
        "20: jmp rax", "ud2",
        "21: lea r15, [rip + 23f]",
        "22: call rax", "ud2",
        "23: lea r15, [rip + 25f]",
        "push rax",
        "24: ret", "ud2",
        "25: nop",
    => ["20b", "0x03d00000", "IND_JMP"],
        ["0x03d00000", "recorder_resume_code", "FAR_IN"], ["recorder_resume_return", "21b", "FAR_OUT"],
        ["22b", "0x03d00000", "IND_CALL"],
        ["0x03d00000", "recorder_resume_code", "FAR_IN"], ["recorder_resume_return", "23b", "FAR_OUT"],
        ["24b", "0x03d00000", "RET_NEAR"],
        ["0x03d00000", "recorder_resume_code", "FAR_IN"], ["recorder_resume_return", "25b", "FAR_OUT"],
}

sequence! {
    /// STI with a pending interrupt, which is delivered one instruction later: after a NOP.
    ///
    /// At CPL 3 it needs IOPL 3.
    interrupt_after_nop:
        "sti",
        "nop",
        "20: cli",
    => ["20b", "recorder_irq", "FAR_IN"], ["recorder_irq_return", "20b", "FAR_OUT"],
}

sequence! {
    /// Like [`interrupt_after_nop`], with a taken branch in place of the NOP.
    interrupt_after_branch:
        "sti",
        "20: jmp 21f",
        "ud2",
        "21: cli",
    => ["20b", "21b", "REL_JMP"], ["21b", "recorder_irq", "FAR_IN"],
        ["recorder_irq_return", "21b", "FAR_OUT"],
}

sequence! {
    /// SYSCALL at CPL 3, with IA32_LSTAR at a SYSRET.
    syscall_sysret:
        "20: syscall",
        "21: nop",
    => ["20b", "hindsight_sysret", "FAR_IN"], ["hindsight_sysret", "21b", "FAR_OUT"],
}

sequence! {
    /// SYSENTER at CPL 3, with IA32_SYSENTER_EIP at a SYSEXIT, which returns to RDX with RSP = RCX.
    sysenter_sysexit:
        "lea rdx, [rip + 21f]",
        "mov rcx, rsp",
        "20: sysenter",
        "ud2",
        "21: nop",
    => ["20b", "hindsight_sysexit", "FAR_IN"], ["hindsight_sysexit", "21b", "FAR_OUT"],
}

core::arch::global_asm!(
    ".pushsection .text.sequence.entries, \"ax\"",
    ".global hindsight_sysret, hindsight_sysexit",
    "hindsight_sysret: sysretq",
    "hindsight_sysexit: sysexitq",
    ".popsection",
);

/// Sets the MSRs of SYSCALL and SYSENTER for [`syscall_sysret`] and [`sysenter_sysexit`].
pub fn set_fast_calls() {
    unsafe extern "C" {
        fn hindsight_sysret();
        fn hindsight_sysexit();
    }
    msr::write(reg::IA32_EFER, msr::read(reg::IA32_EFER) | Efer::SCE.bits());
    // SYSRET's selectors from 18H on, SYSCALL's from 08H on.
    msr::write(reg::IA32_STAR, 0x001b_0008_0000_0000);
    msr::write(reg::IA32_LSTAR, hindsight_sysret as *const () as u64);
    msr::write(reg::IA32_FMASK, Rflags::IF.bits());
    msr::write(reg::IA32_SYSENTER_CS, 8);
    // SYSENTER pushes nothing, so its stack may be unmapped.
    msr::write(reg::IA32_SYSENTER_ESP, UNMAPPED);
    msr::write(
        reg::IA32_SYSENTER_EIP,
        hindsight_sysexit as *const () as u64,
    );
}

sequence! {
    /// A loop of 33 taken branches.
    loop_33:
        "mov ecx, 34",
        "20: loop 20b",
    => ["20b", "20b", "JCC"], ["20b", "20b", "JCC"], ["20b", "20b", "JCC"], ["20b", "20b", "JCC"],
        ["20b", "20b", "JCC"], ["20b", "20b", "JCC"], ["20b", "20b", "JCC"], ["20b", "20b", "JCC"],
        ["20b", "20b", "JCC"], ["20b", "20b", "JCC"], ["20b", "20b", "JCC"], ["20b", "20b", "JCC"],
        ["20b", "20b", "JCC"], ["20b", "20b", "JCC"], ["20b", "20b", "JCC"], ["20b", "20b", "JCC"],
        ["20b", "20b", "JCC"], ["20b", "20b", "JCC"], ["20b", "20b", "JCC"], ["20b", "20b", "JCC"],
        ["20b", "20b", "JCC"], ["20b", "20b", "JCC"], ["20b", "20b", "JCC"], ["20b", "20b", "JCC"],
        ["20b", "20b", "JCC"], ["20b", "20b", "JCC"], ["20b", "20b", "JCC"], ["20b", "20b", "JCC"],
        ["20b", "20b", "JCC"], ["20b", "20b", "JCC"], ["20b", "20b", "JCC"], ["20b", "20b", "JCC"],
        ["20b", "20b", "JCC"],
}
