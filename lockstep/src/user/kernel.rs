//! The kernel under which the interpreter runs user batches.
//!
//! It handles exceptions as the host's signal handler does: it records each one and continues
//! behind the instruction.

#![expect(unsafe_code, reason = "the kernel's code lies between two labels")]
#![expect(
    clippy::cast_possible_truncation,
    reason = "offsets in guest memory are small"
)]

use crate::kernel_parts::*;
use crate::layout::*;
use crate::user::batch::{CS64, DS};
use hindsight_cpu::state::{CpuState, seg};
use hindsight_interp::supported_cpuid;
use hindsight_regs::cr::Cr4;
use hindsight_regs::rflags::Rflags;

/// Guest-physical address of the region.
pub(super) const REGION: usize = 0x10_0000;
/// Bytes of guest memory.
pub(super) const MEMORY: usize = REGION + GUEST_LEN as usize;
const TABLES: usize = 0x1000;
const GDT: usize = 0x8000;
const IDT: usize = 0x9000;
const TSS: usize = 0xa000;
const HANDLERS: usize = 0x1_0000;
/// Top of the kernel's stack, where the region's linear address is kept.
const STACK: usize = 0x1_fff0;
/// Linear address of guest-physical address 0 in the kernel's half.
const KERNEL: u64 = 0xffff_8000_0000_0000;
/// Vector of the INT n that ends a batch.
const LEAVE: usize = 0x80;

std::arch::global_asm!(
    ".pushsection .rodata",
    ".global hs_lockstep_kernel, hs_lockstep_leave, hs_lockstep_stubs, hs_lockstep_kernel_end",
    // The stubs are aligned, so this makes all offsets the same in every build.
    ".balign 16",
    "hs_lockstep_kernel:",
    // On the stack: the vector, the error code, the frame, the region's address.
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
    "pop rcx",
    "pop rax",
    "add rsp, 16",
    "iretq",
    "hs_lockstep_leave:",
    // The end of a batch. The next batch starts when the OUT is complete.
    "mov rax, [rsp + 40]",
    "add rax, {code}",
    "mov [rsp], rax",
    "out 0xf4, al",
    "iretq",
    stubs!("hs_lockstep_stubs", "hs_lockstep_kernel"),
    "hs_lockstep_kernel_end:",
    ".popsection",
    current = const CURRENT,
    faults = const FAULTS,
    post = const POST,
    code = const CODE,
);

unsafe extern "C" {
    static hs_lockstep_kernel: u8;
    static hs_lockstep_leave: u8;
    static hs_lockstep_stubs: u8;
    static hs_lockstep_kernel_end: u8;
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
    for (part, len, rights) in [
        (DATA, DATA_LEN, NX | 7),
        (READ_ONLY, 0x1000, NX | 5),
        (PARAMS, PARAMS_LEN, NX | 7),
        (LOG, LOG_LEN, NX | 7),
        (CODE, CODE_LEN, 5),
        (CELLS, 0x1000, NX | 7),
    ] {
        for page in (part..part + len).step_by(0x1000) {
            let entry = TABLES + 0x3000 + ((at + page as usize) >> 12 & 511) * 8;
            put(ram, entry, (REGION as u64 + u64::from(page)) | rights);
        }
    }
    // The kernel maps all of memory in the upper half.
    put(ram, TABLES + 0x800, TABLES as u64 + 0x4003);
    put(ram, TABLES + 0x4000, TABLES as u64 + 0x5003);
    put(ram, TABLES + 0x5000, 0x83);
    for (i, d) in [
        0,
        0,
        0x00af_9b00_0000_ffff,
        0x00cf_9300_0000_ffff,
        0x00cf_fb00_0000_ffff,
        0x00cf_f300_0000_ffff,
        0x00af_fb00_0000_ffff,
    ]
    .into_iter()
    .enumerate()
    {
        put(ram, GDT + i * 8, d);
    }
    put(ram, TSS + 4, KERNEL + STACK as u64);
    put(ram, STACK, base.into());
    install_kernel(ram);
    let cells = REGION + CELLS as usize;
    put(ram, cells, u64::from(base + CODE + CODE_LEN) - 2);
    // INT LEAVE.
    let exit = REGION + (CODE + CODE_LEN) as usize - 2;
    ram[exit..exit + 2].copy_from_slice(&[0xcd, LEAVE as u8]);
}

fn install_kernel(ram: &mut [u8]) {
    let start = &raw const hs_lockstep_kernel;
    let offset = |label: *const u8| label.addr() - start.addr();
    // SAFETY: the assembly above puts both labels in one section, in this order, with instructions
    // between them.
    unsafe { copy_code(ram, HANDLERS, start..&raw const hs_lockstep_kernel_end) };
    let mut gate = |vector: usize, at: usize, dpl: u64| {
        let target = KERNEL + (HANDLERS + at) as u64;
        let low = target & 0xffff | 0x10 << 16 | (0x8e00 | dpl << 13) << 32;
        put(ram, IDT + vector * 16, low | (target & 0xffff_0000) << 32);
        put(ram, IDT + vector * 16 + 8, target >> 32);
    };
    let stubs = offset(&raw const hs_lockstep_stubs);
    for (vector, at, dpl) in exception_gates() {
        gate(vector, stubs + at, dpl);
    }
    gate(LEAVE, offset(&raw const hs_lockstep_leave), 3);
}

/// The components of XCR0 that the host's processor has.
///
/// The interpreter has components that a host may lack.
fn host_components() -> u32 {
    std::arch::x86_64::__cpuid_count(0xd, 0).eax
}

/// The state at the start of a batch: user code, as Linux runs it.
pub(super) fn start(base: u32) -> CpuState {
    let mut st = CpuState::reset();
    st.cr0 = CR0_64;
    st.cr3 = TABLES as u64;
    st.cr4 = CR4_64 | (Cr4::FSGSBASE | Cr4::OSXSAVE).bits();
    st.efer = EFER_64;
    st.xcr0 = u64::from(host_components() & supported_cpuid(0xd, 0)[0]) & 0xe7;
    st.seg = [flat_segment(DS, 0xc0f3); 6];
    st.seg[seg::CS] = flat_segment(CS64, 0xa0fb);
    for null in [seg::FS, seg::GS] {
        st.seg[null] = flat_segment(0, 0xc0f3);
    }
    st.tr = flat_segment(0x40, 0x8b);
    (st.tr.base, st.tr.limit) = (KERNEL + TSS as u64, 0x67);
    st.ldtr.unusable = true;
    (st.gdtr.base, st.gdtr.limit) = (KERNEL + GDT as u64, 0x37);
    (st.idtr.base, st.idtr.limit) = (KERNEL + IDT as u64, 0xfff);
    st.rip = u64::from(base + CODE);
    st.rflags = (Rflags::IF | Rflags::FIXED).bits();
    st
}
