//! From the PVH entry point to 64-bit Rust.
//!
//! The monitor enters in 32-bit protected mode with paging off and EBX pointing to the start info
//! (Xen documentation, "x86/HVM direct boot ABI"). Nothing is computed here: page tables and GDT are
//! laid out by the assembler, so that start-up is two dozen instructions on an emulated ring 0 too.

use core::arch::global_asm;

/// Selector of the 64-bit code segment of CPL 0.
pub const KERNEL_CODE: u16 = 0x08;
/// Selector of the data segment of CPL 0.
pub const KERNEL_DATA: u16 = 0x10;
/// Selector of the 32-bit code segment of CPL 3, without its RPL.
pub const USER_CODE32: u16 = 0x18;
/// Selector of the data segment of CPL 3, with its RPL.
pub const USER_DATA: u16 = 0x23;
/// Selector of the 64-bit code segment of CPL 3, with its RPL.
pub const USER_CODE: u16 = 0x2b;
/// Selector of the 32-bit code segment of CPL 0.
pub const KERNEL_CODE32: u16 = 0x30;
/// Selector of a data segment that is not present.
pub const ABSENT_DATA: u16 = 0x38;
/// Selector of the TSS of CPU 0; each CPU's is 16 bytes further.
pub const FIRST_TSS: u16 = 0x40;

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
    "mov eax, 0x20", // CR4.PAE
    "mov cr4, eax",
    "mov eax, offset hindsight_pml4",
    "mov cr3, eax",
    "mov ecx, 0xc0000080", // EFER: LME, NXE
    "xor edx, edx",
    "mov eax, 0x900",
    "wrmsr",
    "mov eax, 0x80010031", // CR0: PG, WP, NE, ET, PE
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
);

// The first 4 GiB, one to one, in 2 MiB pages that CPL 3 may use too; the last GiB, where the
// device memory is, uncached. The GDT's code and data descriptors have their accessed bits set, so
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
    tss = const 2 * crate::cpu::MAX_CPUS,
);

unsafe extern "C" {
    static mut hindsight_gdt: [u64; 8 + 2 * crate::cpu::MAX_CPUS];
}

/// Puts `descriptor` in the GDT, in the place of the TSS of the last processors, and returns its
/// selector. `slot` is taken modulo 8.
pub fn set_spare_descriptor(slot: usize, descriptor: u64) -> u16 {
    let index = 2 * crate::cpu::MAX_CPUS + slot % 8;
    // SAFETY: the index is inside the table; machines with so many processors run no such payload.
    unsafe {
        (&raw mut hindsight_gdt)
            .cast::<u64>()
            .add(index)
            .write_volatile(descriptor);
    }
    u16::try_from(index * 8).unwrap_or(0)
}
