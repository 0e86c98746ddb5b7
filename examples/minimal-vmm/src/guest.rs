//! The guest: 64-bit code that can be anywhere, with what it needs at fixed addresses below 64 KiB.

#![expect(unsafe_code, reason = "declares the symbol of the assembly text")]

use hindsight_regs::branch::DebugCtl;
use hindsight_regs::msr;

/// IA32_DS_AREA of the guest.
pub const DS_AREA: u64 = 0x6000;
/// Where the guest stores what it reads: instructions, branches, and the top of the LBR stack.
pub const RESULTS: u64 = 0x7000;
/// Bytes of [`CODE`].
pub const LEN: usize = 0x1000;

unsafe extern "C" {
    /// The code, which starts at its first byte.
    #[link_name = "minimal_vmm_guest"]
    pub safe static CODE: [u8; LEN];
}

std::arch::global_asm!(
    ".pushsection .rodata.minimal_vmm_guest, \"a\"",
    ".macro set_msr index, low\n mov ecx, \\index\n mov eax, \\low\n wrmsr\n .endm",
    ".macro store_msr index, at\n mov ecx, \\index\n rdmsr\n mov [\\at], eax\n .endm",
    ".globl minimal_vmm_guest",
    "minimal_vmm_guest:",
    // Nothing is armed: KVM runs this on the host's processor.
    "    mov ecx, 100000",
    "2:  dec ecx",
    "    jnz 2b",
    "    xor edx, edx",
    "    set_msr {ds_area_msr}, {ds_area}",
    // Count instructions (fixed counter 0) and retired branches (event C4H), at all levels.
    "    set_msr {fixed_ctrl}, 3",
    "    set_msr {event_select_0}, 0x4300c4",
    "    mov edx, 1",
    "    set_msr {global_ctrl}, 1",
    // Record branches in the LBR stack and in the BTS buffer.
    "    xor edx, edx",
    "    set_msr {debugctl}, {lbr_and_bts}",
    "    mov edi, 4",
    "    call 3f",
    "    set_msr {debugctl}, 0",
    "    set_msr {global_ctrl}, 0",
    "    store_msr {fixed_0}, {results}",
    "    store_msr {pmc_0}, {results} + 8",
    "    store_msr {tos}, {results} + 16",
    "    hlt",
    // The factorial of EDI in EAX.
    "3:  cmp edi, 1",
    "    jbe 4f",
    "    push rdi",
    "    dec edi",
    "    call 3b",
    "    pop rdi",
    "    imul eax, edi",
    "    ret",
    "4:  mov eax, 1",
    "    ret",
    ".org minimal_vmm_guest + {len}",
    ".popsection",
    ds_area_msr = const msr::IA32_DS_AREA,
    ds_area = const DS_AREA,
    event_select_0 = const msr::IA32_PERFEVTSEL0,
    fixed_ctrl = const msr::IA32_FIXED_CTR_CTRL,
    global_ctrl = const msr::IA32_PERF_GLOBAL_CTRL,
    debugctl = const msr::IA32_DEBUGCTL,
    lbr_and_bts = const DebugCtl::LBR.union(DebugCtl::TR).union(DebugCtl::BTS).bits(),
    fixed_0 = const msr::IA32_FIXED_CTR0,
    pmc_0 = const msr::IA32_PMC0,
    tos = const msr::MSR_LASTBRANCH_TOS,
    results = const RESULTS,
    len = const LEN,
);
