//! The switch from 64-bit mode to a legacy mode and back.

use core::arch::global_asm;
use core::mem::offset_of;

use hindsight_regs::msr::IA32_EFER;

use crate::gdt::{KERNEL_CODE, KERNEL_CODE32, KERNEL_DATA};
use crate::legacy::layout::{MACHINE, sel};
use crate::legacy::machine::{EntryImage, LegacyMachine, STACK_BYTES, SavedState};

const fn saved(field: usize) -> usize {
    offset_of!(LegacyMachine, saved) + field
}

const fn entry(field: usize) -> usize {
    offset_of!(LegacyMachine, entry) + field
}

// 64-bit mode, then 32-bit protected mode, then the blob; and back. EBX points to the machine.
global_asm!(
    ".pushsection .text.hindsight.legacy, \"ax\"",
    ".code64",
    "hindsight_legacy_enter:",
    "pushq %rbp",
    "pushq %rbx",
    "pushq %r12",
    "pushq %r13",
    "pushq %r14",
    "pushq %r15",
    "pushfq",
    "movl ${machine}, %ebx",
    "movq %rsp, {saved_rsp}(%rbx)",
    "movq %cr0, %rax",
    "movl %eax, {saved_cr0}(%rbx)",
    "movq %cr3, %rax",
    "movl %eax, {saved_cr3}(%rbx)",
    "movq %cr4, %rax",
    "movl %eax, {saved_cr4}(%rbx)",
    "pushq ${old_code32}",
    "pushq $2f",
    "lretq",
    ".code32",
    "2: movl ${old_data}, %eax",
    "movl %eax, %ss",
    "movl %eax, %ds",
    "movl %cr0, %eax",
    "andl $0x7fffffff, %eax",
    "movl %eax, %cr0",
    "movl ${ia32_efer}, %ecx",
    "rdmsr",
    "movl %eax, {saved_efer}(%ebx)",
    "andl $0xfffffeff, %eax", // LME
    "wrmsr",
    "movl {cr4}(%ebx), %eax",
    "movl %eax, %cr4",
    "lgdt {gdt_pointer}(%ebx)",
    "lidt {idt_pointer}(%ebx)",
    "ljmp ${code32}, $3f",
    "3: movl ${data32}, %eax",
    "movl %eax, %ds",
    "movl %eax, %es",
    "movl %eax, %ss",
    "movl %eax, %fs",
    "movl %eax, %gs",
    "xorl %eax, %eax",
    "lldt %ax",
    "movl ${tss0}, %eax",
    "ltr %ax",
    "movl {cr3}(%ebx), %eax",
    "movl %eax, %cr3",
    "movl {cr0}(%ebx), %eax",
    "movl %eax, %cr0",
    "cmpl $0, {real}(%ebx)",
    "jne 5f",
    "lssl {esp}(%ebx), %esp",
    "movl {len}(%ebx), %ecx",
    "4: pushl {words} - 4(%ebx, %ecx, 4)",
    "loop 4b",
    "popl %gs",
    "popl %fs",
    "popl %es",
    "popl %ds",
    "popal",
    "iretl",
    "5: lidt hindsight_legacy_ivt_pointer",
    ".byte 0xea",
    ".long hindsight_legacy_to_real - hindsight_legacy_low",
    ".word {low_code}",
    // Entered from any legacy mode, at CPL 0 in the flat code segment.
    "hindsight_legacy_leave:",
    "movl ${data32}, %eax",
    "movl %eax, %ss",
    "movl %eax, %ds",
    "movl ${machine}, %ebx",
    "leal {stack_end}(%ebx), %esp",
    "pushl $2",
    "popfl",
    "movl %cr0, %eax",
    "andl $0x7fffffff, %eax",
    "movl %eax, %cr0",
    // IA-32e mode cannot be entered with a 16-bit TSS in TR.
    "str %eax",
    "cmpw ${tss16}, %ax",
    "jne 7f",
    "andb $0xfd, {tss0_type}(%ebx)",
    "movl ${tss0}, %eax",
    "ltr %ax",
    "7:",
    "movl {saved_cr4}(%ebx), %eax",
    "movl %eax, %cr4",
    "movl {saved_cr3}(%ebx), %eax",
    "movl %eax, %cr3",
    "movl {saved_efer}(%ebx), %eax",
    "xorl %edx, %edx",
    "movl ${ia32_efer}, %ecx",
    "wrmsr",
    "movl {saved_cr0}(%ebx), %eax",
    "movl %eax, %cr0",
    "xorl %eax, %eax",
    "lldt %ax",
    "lgdt hindsight_gdt_pointer",
    "pushl ${old_code64}",
    "pushl $6f",
    "lretl",
    ".code64",
    "6: xorl %eax, %eax",
    "movl %eax, %ds",
    "movl %eax, %es",
    "movl %eax, %fs",
    "movl %eax, %gs",
    "movl ${old_data}, %eax",
    "movl %eax, %ss",
    "movl ${machine}, %ebx",
    "movq {saved_rsp}(%rbx), %rsp",
    "popfq",
    "popq %r15",
    "popq %r14",
    "popq %r13",
    "popq %r12",
    "popq %rbx",
    "popq %rbp",
    "retq",
    ".balign 8",
    "hindsight_legacy_ivt_pointer:",
    ".word 0x3ff, 0, 0, 0",
    ".popsection",
    options(att_syntax),
    machine = const MACHINE,
    old_code32 = const KERNEL_CODE32,
    old_code64 = const KERNEL_CODE,
    old_data = const KERNEL_DATA,
    code32 = const sel::CODE32,
    data32 = const sel::DATA32,
    low_code = const sel::LOW_CODE,
    tss0 = const sel::TSS0,
    tss16 = const sel::TSS16,
    tss0_type = const offset_of!(LegacyMachine, gdt) + sel::TSS0 as usize + 5,
    ia32_efer = const IA32_EFER,
    saved_rsp = const saved(offset_of!(SavedState, rsp)),
    saved_cr0 = const saved(offset_of!(SavedState, cr0)),
    saved_cr3 = const saved(offset_of!(SavedState, cr3)),
    saved_cr4 = const saved(offset_of!(SavedState, cr4)),
    saved_efer = const saved(offset_of!(SavedState, efer)),
    gdt_pointer = const entry(offset_of!(EntryImage, gdt_pointer)),
    idt_pointer = const entry(offset_of!(EntryImage, idt_pointer)),
    cr0 = const entry(offset_of!(EntryImage, cr0)),
    cr3 = const entry(offset_of!(EntryImage, cr3)),
    cr4 = const entry(offset_of!(EntryImage, cr4)),
    real = const entry(offset_of!(EntryImage, real)),
    esp = const entry(offset_of!(EntryImage, esp)),
    len = const entry(offset_of!(EntryImage, len)),
    words = const entry(offset_of!(EntryImage, words)),
    stack_end = const offset_of!(LegacyMachine, stack) + STACK_BYTES,
);

unsafe extern "C" {
    fn hindsight_legacy_enter();
    static hindsight_pd: [u64; 2048];
}

/// Switches to the legacy mode of the machine's entry image, and returns after the last event.
pub(super) fn enter(_machine: &mut LegacyMachine) {
    // SAFETY: the machine is the one at MACHINE, because only `machine` makes one. Its image leads
    // into the blob, which can leave only by an event. The assembly preserves the registers that
    // the C calling convention names; memory changes only as the case made the blob do.
    unsafe { hindsight_legacy_enter() }
}

/// Physical address of the four page directories of 64-bit mode, which PAE paging can use.
pub(super) fn directories() -> u64 {
    (&raw const hindsight_pd) as u64
}
