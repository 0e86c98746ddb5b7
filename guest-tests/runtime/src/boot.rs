//! Start-up code: from the PVH entry point to 64-bit Rust.
//!
//! The monitor enters in 32-bit protected mode with paging off and EBX pointing to the start info
//! (Xen documentation, "x86/HVM direct boot ABI"). The assembler lays out page tables and GDT, so
//! start-up takes two dozen instructions, which matters on hosts that emulate ring 0.

use core::arch::global_asm;

use hindsight_regs::cr::{Cr0, Cr4, Efer};
use hindsight_regs::msr::IA32_EFER;

use crate::gdt::MAX_CPUS;

/// CR0 of 64-bit mode.
pub(crate) const CR0: u64 = Cr0::PG
    .union(Cr0::WP)
    .union(Cr0::NE)
    .union(Cr0::ET)
    .union(Cr0::PE)
    .bits();
/// CR4 of 64-bit mode.
pub(crate) const CR4: u64 = Cr4::PAE.bits();
/// EFER before paging is enabled, which adds LMA.
pub(crate) const EFER: u64 = Efer::LME.union(Efer::NXE).bits();

global_asm!(
    ".pushsection .note.hindsight, \"a\", @note",
    ".balign 4",
    ".long 4, 8, 18", // name size, value size, XEN_ELFNOTE_PHYS32_ENTRY
    ".asciz \"Xen\"",
    ".quad hindsight_pvh_entry",
    ".popsection",
    ".pushsection .hindsight.boot, \"ax\"",
    ".code32",
    ".global hindsight_pvh_entry",
    "hindsight_pvh_entry:",
    "mov eax, {cr4}",
    "mov cr4, eax",
    "mov eax, offset hindsight_pml4",
    "mov cr3, eax",
    "mov ecx, {ia32_efer}",
    "xor edx, edx",
    "mov eax, {efer}",
    "wrmsr",
    "mov eax, {cr0}",
    "mov cr0, eax",
    "lgdt [hindsight_gdt_pointer]",
    "mov esp, offset hindsight_boot_stack_end",
    "push 8",
    "mov eax, offset hindsight_entry64",
    "push eax",
    "retf",
    ".code64",
    "hindsight_entry64:",
    "xor eax, eax",
    "mov ds, eax",
    "mov es, eax",
    "mov fs, eax",
    "mov gs, eax",
    "mov eax, 0x10",
    "mov ss, eax",
    "lea rsp, [rip + hindsight_boot_stack_end]",
    "mov edi, ebx",
    "xor ebp, ebp",
    "call hindsight_start",
    "ud2",
    ".popsection",
    cr0 = const CR0,
    cr4 = const CR4,
    efer = const EFER,
    ia32_efer = const IA32_EFER,
);

// The first 4 GiB are mapped one to one, in 2 MiB pages that CPL 3 may use too. The last GiB holds
// the device memory and is uncached. The code and data descriptors have their accessed bits set, so
// that loading them writes nothing.
global_asm!(
    ".pushsection .data.hindsight.tables, \"aw\"",
    ".balign 4096",
    ".global hindsight_pml4",
    "hindsight_pml4:",
    ".quad hindsight_pdpt + 7",
    ".fill 511, 8, 0",
    "hindsight_pdpt:",
    ".quad hindsight_pd + 0x0007",
    ".quad hindsight_pd + 0x1007",
    ".quad hindsight_pd + 0x2007",
    ".quad hindsight_pd + 0x3007",
    ".fill 508, 8, 0",
    ".global hindsight_pd",
    "hindsight_pd:",
    ".set page, 0",
    ".rept 1536",
    ".quad page + 0x87", // present, writable, user, 2 MiB
    ".set page, page + 0x200000",
    ".endr",
    ".rept 512",
    ".quad page + 0x9f", // the same, uncached
    ".set page, page + 0x200000",
    ".endr",
    ".balign 16",
    ".global hindsight_gdt",
    "hindsight_gdt:",
    ".quad 0",
    ".quad 0x00af9b000000ffff",
    ".quad 0x00cf93000000ffff",
    ".quad 0x00cffb000000ffff",
    ".quad 0x00cff3000000ffff",
    ".quad 0x00affb000000ffff",
    ".quad 0x00cf9b000000ffff",
    ".quad 0x00cf13000000ffff",
    ".fill {tss}, 8, 0",
    "hindsight_gdt_end:",
    ".global hindsight_gdt_pointer",
    "hindsight_gdt_pointer:",
    ".word hindsight_gdt_end - hindsight_gdt - 1",
    ".quad hindsight_gdt",
    ".popsection",
    ".pushsection .bss.hindsight.stack, \"aw\", @nobits",
    ".balign 16",
    ".fill 32768, 1, 0",
    ".global hindsight_boot_stack_end",
    "hindsight_boot_stack_end:",
    ".popsection",
    tss = const 2 * MAX_CPUS,
);
