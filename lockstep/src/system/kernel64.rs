//! The kernel of system batches in 64-bit mode, and its memory layout.

#![expect(unsafe_code, reason = "the kernel's code lies between two labels")]
#![expect(
    clippy::cast_possible_truncation,
    reason = "offsets in guest memory are small"
)]

use crate::kernel_parts::*;
use crate::layout::*;
use crate::system::batch::{GATES, RANDOM, RESET, SystemBatch, WINDOW, WINDOW_PAGES};
use hindsight_cpu::state::{CpuState, seg};
use hindsight_regs::rflags::Rflags;

/// Guest-physical address of the region.
const REGION: usize = 0x10_0000;
/// Bytes of guest memory.
pub(super) const MEMORY: usize = REGION + (WINDOW + WINDOW_PAGES * 0x1000) as usize;
const TABLES: usize = 0x1000;
const IDT: usize = 0x9000;
const TSS: usize = 0xa000;
const GDT: usize = 0xc000;
const HANDLERS: usize = 0x1_0000;
/// Top of the stack of all handlers, where the region's linear address is kept.
const STACK: usize = 0x1_fff0;
/// Linear address of guest-physical address 0 in the kernel's half.
const KERNEL: u64 = 0xffff_8000_0000_0000;

std::arch::global_asm!(
    ".pushsection .rodata",
    ".global hs_system_kernel, hs_system_reset, hs_system_leave, hs_system_stubs, hs_system_end",
    // The stubs are aligned, so this makes all offsets the same in every build.
    ".balign 16",
    // An exception, or INT n through a random gate: records it and continues behind the case.
    // On the stack: the vector, the error code, the frame, the region's address.
    "hs_system_kernel:",
    "push rax",
    "push rcx",
    "mov rcx, [rsp + 72]",
    "mov eax, [rcx + {current}]",
    "and eax, 63",
    "shl eax, 5",
    "add rcx, rax",
    "mov eax, [rsp + 16]",
    "inc eax",
    "mov [rcx + {faults}], eax",
    "mov eax, [rsp + 24]",
    "mov [rcx + {faults} + 4], eax",
    "mov rax, [rsp + 32]",
    "mov [rcx + {faults} + 16], rax",
    "mov eax, [rsp + 48]",
    "mov [rcx + {faults} + 24], eax",
    "mov eax, [rsp + 40]",
    "mov [rcx + {faults} + 28], ax",
    "mov eax, [rsp + 64]",
    "mov [rcx + {faults} + 30], ax",
    "xor eax, eax",
    "cmp dword ptr [rsp + 16], 14",
    "jne 1f",
    "mov rax, cr2",
    "1: mov [rcx + {faults} + 8], rax",
    "mov rcx, [rsp + 72]",
    "mov eax, [rcx + {current}]",
    "and eax, 63",
    "mov eax, [rcx + rax * 4 + {post}]",
    "mov [rsp + 32], rax",
    "mov qword ptr [rsp + 40], 0x10",
    "mov qword ptr [rsp + 48], 2",
    "mov qword ptr [rsp + 64], 0x18",
    "pop rcx",
    "pop rax",
    "add rsp, 16",
    "iretq",
    // The end of a case: records the frame, and restores segments, registers and flags.
    "hs_system_reset:",
    "mov rcx, [rsp + 40]",
    "mov eax, [rcx + {current}]",
    "and eax, 63",
    "shl eax, 5",
    "lea rdx, [rcx + rax + {ends}]",
    "mov rax, [rsp + 24]",
    "mov [rdx], rax",
    "mov rax, [rsp + 16]",
    "mov [rdx + 8], rax",
    "mov rax, [rsp + 8]",
    "mov [rdx + 16], rax",
    "mov rax, [rsp + 32]",
    "mov [rdx + 24], rax",
    "mov qword ptr [rsp + 8], 0x10",
    "mov qword ptr [rsp + 16], 2",
    "lea rax, [rcx + {stack}]",
    "mov [rsp + 24], rax",
    "mov qword ptr [rsp + 32], 0x18",
    "mov eax, 0x2b",
    "mov ds, eax",
    "mov es, eax",
    "mov fs, eax",
    "mov gs, eax",
    "xor eax, eax",
    "xor ebx, ebx",
    "xor ecx, ecx",
    "xor edx, edx",
    "xor edi, edi",
    "iretq",
    "hs_system_leave:",
    "mov rax, [rsp + 40]",
    "add rax, {code}",
    "mov [rsp], rax",
    "out 0xf4, al",
    "iretq",
    stubs!("hs_system_stubs", "hs_system_kernel"),
    "hs_system_end:",
    ".popsection",
    current = const CURRENT,
    faults = const FAULTS,
    ends = const ENDS,
    post = const POST,
    code = const CODE,
    stack = const DATA + 0x1800,
);

unsafe extern "C" {
    static hs_system_kernel: u8;
    static hs_system_reset: u8;
    static hs_system_leave: u8;
    static hs_system_stubs: u8;
    static hs_system_end: u8;
}

/// Offset of a label in the kernel.
fn offset(label: *const u8) -> usize {
    label.addr() - (&raw const hs_system_kernel).addr()
}

/// Writes page tables, descriptors and the kernel to guest memory.
pub(super) fn install(ram: &mut [u8], base: u32) {
    let at = base as usize;
    put(ram, TABLES, TABLES as u64 + 0x1007);
    put(
        ram,
        TABLES + 0x1000 + (at >> 30) * 8,
        TABLES as u64 + 0x2007,
    );
    put(
        ram,
        TABLES + 0x2000 + (at >> 21 & 511) * 8,
        TABLES as u64 + 0x3007,
    );
    for page in (0..GUEST_LEN).step_by(0x1000) {
        let rights = if page & !0xffff == CODE { 7 } else { NX | 7 };
        // Accessed and dirty are set, so that the processor changes only the window's entries.
        put(
            ram,
            entry(at, page),
            (REGION as u64 + u64::from(page)) | rights | 0x60,
        );
    }
    put(ram, TABLES + 0x800, TABLES as u64 + 0x4003);
    put(ram, TABLES + 0x4000, TABLES as u64 + 0x5003);
    put(ram, TABLES + 0x5000, 0xe3);
    let flat = [
        0x00af_9b00_0000_ffff,
        0x00cf_9300_0000_ffff,
        0x00cf_fb00_0000_ffff,
        0x00cf_f300_0000_ffff,
        0x00af_fb00_0000_ffff,
    ];
    for (i, d) in flat.into_iter().enumerate() {
        put(ram, GDT + 16 + i * 8, d);
    }
    let tss = KERNEL + TSS as u64;
    let low = 0x8b << 40 | 0x67 | (tss & 0xff_ffff) << 16 | (tss >> 24 & 0xff) << 56;
    put(ram, GDT + 0x40, low);
    put(ram, GDT + 0x48, tss >> 32);
    // RSP0 to RSP2, and the first interrupt stack.
    for slot in [4, 12, 20, 0x24] {
        put(ram, TSS + slot, KERNEL + STACK as u64);
    }
    put(ram, STACK, base.into());
    let (from, to) = (&raw const hs_system_kernel, &raw const hs_system_end);
    // SAFETY: the assembly above puts both labels in one section, in this order, with instructions
    // between them.
    unsafe { copy_code(ram, HANDLERS, from..to) };
    for (vector, at, dpl) in exception_gates() {
        let stub = offset(&raw const hs_system_stubs) + at;
        gate(ram, vector, stub, 0x8e00 | dpl << 13);
    }
    gate(
        ram,
        RESET.into(),
        offset(&raw const hs_system_reset),
        0xee00,
    );
    gate(ram, 0x80, offset(&raw const hs_system_leave), 0xee00);
    // Call gates lead to UD2.
    let pad = REGION + (CODE + CODE_LEN) as usize - 16;
    ram[pad..pad + 2].copy_from_slice(&[0x0f, 0x0b]);
}

fn entry(base: usize, page: u32) -> usize {
    TABLES + 0x3000 + ((base + page as usize) >> 12 & 511) * 8
}

fn gate(ram: &mut [u8], vector: usize, at: usize, kind: u64) {
    let target = KERNEL + (HANDLERS + at) as u64;
    let low = target & 0xffff | 0x10 << 16 | (kind | 1) << 32;
    put(ram, IDT + vector * 16, low | (target & 0xffff_0000) << 32);
    put(ram, IDT + vector * 16 + 8, target >> 32);
}

/// Writes a batch to guest memory.
pub(super) fn load(ram: &mut [u8], base: u32, batch: &SystemBatch) {
    let region = &mut ram[REGION..];
    let window = if batch.uses_window {
        WINDOW..WINDOW + WINDOW_PAGES * 0x1000
    } else {
        0..0
    };
    // Only what a batch uses is filled, because KVM may run in a slow emulator.
    for part in [DATA..DATA + DATA_LEN, LOG..batch.log_end, window] {
        region[part.start as usize..part.end as usize].fill(0x11);
    }
    region[FAULTS as usize..RESULTS as usize].fill(0);
    region[CODE as usize..][..batch.code.len()].copy_from_slice(&batch.code);
    for (i, post) in batch.post.iter().enumerate() {
        region[POST as usize + i * 4..][..4].copy_from_slice(&post.to_le_bytes());
    }
    for (i, d) in batch.descriptors.iter().enumerate() {
        put(ram, GDT + RANDOM as usize + i * 8, *d);
    }
    let stub = KERNEL + (HANDLERS + offset(&raw const hs_system_stubs) + 3 * 16) as u64;
    for (i, pair) in batch.gates.chunks_exact(2).enumerate() {
        let at = IDT + (usize::from(GATES) + i) * 16;
        put(
            ram,
            at,
            pair[0] | stub & 0xffff | (stub & 0xffff_0000) << 32,
        );
        put(ram, at + 8, stub >> 32);
    }
    for (i, rights) in batch.entries.iter().enumerate() {
        let page = WINDOW + i as u32 * 0x1000;
        put(
            ram,
            entry(base as usize, page),
            (REGION as u64 + u64::from(page)) | rights,
        );
    }
}

/// The parts of guest memory that must be equal after a run: name, from, to.
pub(super) fn compared(base: u32, batch: &SystemBatch) -> [(&'static str, usize, usize); 6] {
    let region = |at: u32| REGION + at as usize;
    let window = entry(base as usize, WINDOW);
    [
        ("exceptions", region(FAULTS), region(CURRENT)),
        ("ends", region(ENDS), region(ENDS) + 0x800),
        ("results", region(RESULTS), region(batch.log_end)),
        ("data", region(DATA), region(DATA + DATA_LEN)),
        ("descriptors", GDT, GDT + 0x400),
        ("page tables", window, window + 8 * WINDOW_PAGES as usize),
    ]
}

/// The state at the start of a batch: CPL 0, at the batch's code.
pub(super) fn start(base: u32) -> CpuState {
    let mut st = CpuState::reset();
    st.cr0 = CR0_64;
    st.cr3 = TABLES as u64;
    st.cr4 = CR4_64;
    st.efer = EFER_64;
    st.seg = [flat_segment(0x2b, 0xc0f3); 6];
    st.seg[seg::CS] = flat_segment(0x10, 0xa09b);
    st.seg[seg::SS] = flat_segment(0x18, 0xc093);
    st.tr = flat_segment(0x40, 0x8b);
    (st.tr.base, st.tr.limit) = (KERNEL + TSS as u64, 0x67);
    st.ldtr.unusable = true;
    st.ldtr.access = 0x82;
    (st.gdtr.base, st.gdtr.limit) = (KERNEL + GDT as u64, RANDOM + 0x1ff);
    (st.idtr.base, st.idtr.limit) = (KERNEL + IDT as u64, 0xfff);
    st.rip = u64::from(base + CODE);
    st.rflags = Rflags::FIXED.bits();
    st.gpr[4] = u64::from(base + DATA + 0x1800);
    st
}
