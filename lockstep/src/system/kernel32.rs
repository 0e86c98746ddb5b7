//! The kernel of system batches in 16- and 32-bit protected mode and virtual-8086 mode.
//!
//! All of it is in the first MiB, which virtual-8086 code can reach, and linear addresses equal
//! physical ones. Every event ends a case: its handler records registers, segments and the top of
//! the stack, restores the initial state, and continues with the next case.

#![expect(unsafe_code, reason = "the kernel's code lies between two labels")]

use crate::kernel_parts::{copy_code, exception_gates, flat_segment, put, stubs};
use crate::layout::{CODE, CURRENT, DATA, POST, SLOTS};
use crate::system::batch::{RESET, SystemBatch, WINDOW, WINDOW_PAGES};
use hindsight_cpu::state::{CpuState, seg};
use hindsight_regs::rflags::Rflags;

/// Address of the page directory of 32-bit paging.
pub(super) const DIRECTORY: usize = 0x4000;
/// Address of its only page table.
const TABLE: usize = 0x5000;
/// Address of the page-directory pointers of PAE paging.
pub(super) const POINTERS: usize = 0x6000;
const PAE_DIRECTORY: usize = 0x7000;
const PAE_TABLE: usize = 0x8000;
const IDT: usize = 0x9000;
/// Address of the kernel's TSS: 32 bits, with a redirection bitmap and an I/O map.
pub(super) const TSS: usize = 0xa000;
/// Limit of the kernel's TSS.
pub(super) const TSS_LIMIT: u16 = 0x8f;
/// Address of a 32-bit TSS to switch to.
pub(super) const TASK32: usize = 0xa200;
/// Address of a 16-bit TSS to switch to.
pub(super) const TASK16: usize = 0xa400;
/// Address of the GDT.
pub(super) const GDT: usize = 0xc000;
const HANDLERS: usize = 0x3_0000;
const STACK: usize = 0x3_fff0;
/// Stacks of CPL 0 to 2.
pub(super) const STACKS: [u32; 3] = [0x3_fff0, 0x3_d000, 0x3_c000];
/// Target of far transfers, also by 16-bit offsets: an interrupt that ends the case.
pub(super) const PAD: u32 = 0x8_fff0;
/// Address of the records, one of which each case writes.
const RECORDS: usize = 0x4_2000;
/// Bytes of a record.
const RECORD: usize = 160;
/// End of the scratch memory at the bottom, which begins with the interrupt table of virtual-8086
/// mode.
const LOW_END: usize = 0x4000;

/// Selectors of code and stack at each CPL; CPL 2 has none.
pub(super) const LEVELS: [(u16, u16); 4] = [(0x10, 0x18), (0x31, 0x39), (0, 0), (0x23, 0x2b)];
const KERNEL_TSS: u16 = 0x40;
/// Selectors of the tasks' TSSs and of a task gate.
pub(super) const TASK_SELECTORS: [u16; 3] = [0x58, 0x60, 0x68];

std::arch::global_asm!(
    ".pushsection .rodata",
    ".global hs_narrow_kernel, hs_narrow_stubs, hs_narrow_reset, hs_narrow_end",
    // The stubs are aligned, so this makes all offsets the same in every build.
    ".balign 16",
    ".code32",
    // On the stack: the vector, the error code, the frame.
    "hs_narrow_kernel:",
    "pushad",
    "mov eax, ds",
    "push eax",
    "mov eax, es",
    "push eax",
    "mov eax, fs",
    "push eax",
    "mov eax, gs",
    "push eax",
    "mov eax, 0x18",
    "mov ds, eax",
    "mov es, eax",
    "mov ebp, dword ptr [{current}]",
    "and ebp, 63",
    "imul edi, ebp, {record}",
    "add edi, {records}",
    "mov esi, esp",
    "mov ecx, 32",
    "cld",
    "rep movsd",
    "xor eax, eax",
    "cmp dword ptr [esp + 48], 14",
    "jne 1f",
    "mov eax, cr2",
    "1: mov dword ptr [edi], eax",
    "mov eax, ss",
    "mov dword ptr [edi + 4], eax",
    "xor eax, eax",
    "str ax",
    "mov dword ptr [edi + 8], eax",
    "sldt ax",
    "mov dword ptr [edi + 12], eax",
    "mov eax, cr0",
    "mov dword ptr [edi + 16], eax",
    "mov eax, 0x18",
    "mov ss, eax",
    "mov esp, {stack}",
    "clts",
    "push 2",
    "popfd",
    "xor eax, eax",
    "lldt ax",
    // No task is busy but the kernel's.
    "and byte ptr [{gdt} + 0x45], 0xfd",
    "and byte ptr [{gdt} + 0x5d], 0xfd",
    "and byte ptr [{gdt} + 0x65], 0xfd",
    "mov eax, 0x40",
    "ltr ax",
    "mov eax, 0x2b",
    "mov ds, eax",
    "mov es, eax",
    // A task switch by a 16-bit TSS keeps FS and GS in KVM, and loads null selectors elsewhere.
    "mov eax, dword ptr [{current} + 8]",
    "mov fs, eax",
    "mov gs, eax",
    "xor eax, eax",
    "xor ebx, ebx",
    "xor ecx, ecx",
    "xor edx, edx",
    "xor esi, esi",
    "xor edi, edi",
    "jmp dword ptr [ebp * 4 + {post}]",
    stubs!("hs_narrow_stubs", "hs_narrow_kernel"),
    "hs_narrow_reset:",
    "push 0",
    "push 0x81",
    "jmp hs_narrow_kernel",
    "hs_narrow_end:",
    ".code64",
    ".popsection",
    current = const CURRENT,
    record = const RECORD,
    records = const RECORDS,
    stack = const STACK,
    gdt = const GDT,
    post = const POST,
);

unsafe extern "C" {
    static hs_narrow_kernel: u8;
    static hs_narrow_stubs: u8;
    static hs_narrow_reset: u8;
    static hs_narrow_end: u8;
}

/// Offset of a label in the kernel.
fn offset(label: *const u8) -> usize {
    label.addr() - (&raw const hs_narrow_kernel).addr()
}

fn put32(ram: &mut [u8], at: usize, v: usize) {
    ram[at..at + 4].copy_from_slice(&v.to_le_bytes()[..4]);
}

/// Writes page tables, descriptors and the kernel to guest memory.
pub(super) fn install(ram: &mut [u8]) {
    put32(ram, DIRECTORY, TABLE | 7);
    put(ram, POINTERS, PAE_DIRECTORY as u64 | 1);
    put(ram, PAE_DIRECTORY, PAE_TABLE as u64 | 7);
    for page in 0..512 {
        put32(ram, TABLE + page * 4, page << 12 | 7);
        put(ram, PAE_TABLE + page * 8, (page as u64) << 12 | 7);
    }
    let code = |dpl: u64| 0x00cf_9b00_0000_ffff | dpl << 45;
    let data = |dpl: u64| 0x00cf_9300_0000_ffff | dpl << 45;
    for (at, d) in [
        (0x10, code(0)),
        (0x18, data(0)),
        (0x20, code(3)),
        (0x28, data(3)),
        (0x30, code(1)),
        (0x38, data(1)),
    ] {
        put(ram, GDT + at, d);
    }
    let (from, to) = (&raw const hs_narrow_kernel, &raw const hs_narrow_end);
    // SAFETY: the assembly above puts both labels in one section, in this order, with instructions
    // between them.
    unsafe { copy_code(ram, HANDLERS, from..to) };
    for (vector, at, dpl) in exception_gates() {
        let stub = offset(&raw const hs_narrow_stubs) + at;
        gate(ram, vector, stub, 0x8e00 | dpl << 13);
    }
    gate(
        ram,
        RESET.into(),
        offset(&raw const hs_narrow_reset),
        0xee00,
    );
    for pad in [PAD as usize, PAD as usize & 0xffff] {
        ram[pad..pad + 2].copy_from_slice(&[0xcd, RESET]);
    }
}

fn gate(ram: &mut [u8], vector: usize, at: usize, kind: u64) {
    let target = (HANDLERS + at) as u64;
    let low = target & 0xffff | 0x10 << 16 | kind << 32 | (target & 0xffff_0000) << 32;
    put(ram, IDT + vector * 8, low);
}

/// Address of the gate of a vector.
pub(super) fn gate_at(vector: u8) -> usize {
    IDT + usize::from(vector) * 8
}

/// Address of the first page-table entry of the window, and the length of an entry.
pub(super) fn window(pae: bool) -> (usize, usize) {
    let page = (WINDOW >> 12) as usize;
    if pae {
        (PAE_TABLE + page * 8, 8)
    } else {
        (TABLE + page * 4, 4)
    }
}

/// Writes a batch.
pub(super) fn load(ram: &mut [u8], batch: &SystemBatch) {
    let data = DATA as usize;
    let window = WINDOW as usize..(WINDOW + WINDOW_PAGES * 0x1000) as usize;
    for part in [
        0..LOW_END,
        data..data + 0x4000,
        0x3_b000..STACK,
        RECORDS..RECORDS + SLOTS * RECORD,
        if batch.uses_window { window } else { 0..0 },
    ] {
        ram[part].fill(0);
    }
    // All vectors of virtual-8086 mode lead to the pad.
    for vector in 0..256 {
        put32(ram, vector * 4, 0x8000_fff0);
    }
    ram[CURRENT as usize..][..4].fill(0);
    put32(
        ram,
        CURRENT as usize + 8,
        if batch.switches_tasks { 0 } else { 0x2b },
    );
    let code = CODE as usize;
    ram[code..code + batch.code.len()].copy_from_slice(&batch.code);
    for (i, post) in batch.post.iter().enumerate() {
        put32(ram, POST as usize + i * 4, *post as usize);
    }
    for (at, bytes) in &batch.patches {
        ram[*at..*at + bytes.len()].copy_from_slice(bytes);
    }
}

/// The parts of guest memory that must be equal after a run: name, from, to.
pub(super) fn compared() -> Vec<(&'static str, usize, usize)> {
    let data = DATA as usize;
    let pages = WINDOW_PAGES as usize;
    // What a far call pushed before it faulted is not defined. If it did not fault, the record
    // holds its stack.
    let pushed = 0x17f8..0x1800;
    let mut parts = vec![
        ("records", RECORDS, RECORDS + SLOTS * RECORD),
        ("low memory", 0, LOW_END),
        ("data", data, data + pushed.start),
        ("data", data + pushed.end, data + 0x4000),
        ("descriptors", GDT, GDT + 0x400),
        ("tasks", TSS, TSS + 0x600),
        ("current", CURRENT as usize, CURRENT as usize + 8),
    ];
    for pae in [false, true] {
        let (at, len) = window(pae);
        parts.push(("page table", at, at + pages * len));
    }
    parts
}

/// The state at the start of a batch: CPL 0, at the batch's code.
pub(super) fn start(batch: &SystemBatch) -> CpuState {
    let mut st = CpuState::reset();
    let control = batch.control;
    (st.cr0, st.cr3, st.cr4) = (control.cr0, control.cr3, control.cr4);
    st.efer = 0;
    st.pdptr = [PAE_DIRECTORY as u64 | 1, 0, 0, 0];
    st.seg = [flat_segment(0x2b, 0xc0f3); 6];
    st.seg[seg::CS] = flat_segment(0x10, 0xc09b);
    st.seg[seg::SS] = flat_segment(0x18, 0xc093);
    st.tr = flat_segment(KERNEL_TSS, 0x8b);
    (st.tr.base, st.tr.limit) = (TSS as u64, TSS_LIMIT.into());
    st.ldtr.unusable = true;
    st.ldtr.access = 0x82;
    (st.gdtr.base, st.gdtr.limit) = (GDT as u64, 0x2ff);
    (st.idtr.base, st.idtr.limit) = (IDT as u64, 0x7ff);
    st.rip = CODE.into();
    st.rflags = Rflags::FIXED.bits();
    st.gpr[4] = STACK as u64;
    st
}
