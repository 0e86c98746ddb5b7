//! The entry stubs of the 256 vectors and the IDT, which the assembler lays out.
//!
//! #DF, NMI, #MC and #DB have stacks of their own (IST 1 to 4). The others use the current stack, or
//! RSP0 of the TSS if they come from CPL 3. INT n through gates 3 and 80H is allowed at CPL 3.

use core::arch::global_asm;

global_asm!(
    ".pushsection .hindsight.stubs, \"ax\"",
    ".global hindsight_stubs",
    "hindsight_stubs:",
    ".set vector, 0",
    ".rept 256",
    ".balign 16, 0xcc",
    // The exceptions 8, 10 to 14, 17 and 21 push an error code.
    ".if vector == 8 || (vector >= 10 && vector <= 14) || vector == 17 || vector == 21",
    ".else",
    "push 0",
    ".endif",
    "push vector",
    "jmp hindsight_trap_entry",
    ".set vector, vector + 1",
    ".endr",
    ".balign 16, 0xcc",
    "hindsight_trap_entry:",
    "push rax",
    "push rcx",
    "push rdx",
    "push rbx",
    "push rbp",
    "push rsi",
    "push rdi",
    "push r8",
    "push r9",
    "push r10",
    "push r11",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "cld",
    "mov rdi, rsp",
    "call hindsight_trap",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop r11",
    "pop r10",
    "pop r9",
    "pop r8",
    "pop rdi",
    "pop rsi",
    "pop rbp",
    "pop rbx",
    "pop rdx",
    "pop rcx",
    "pop rax",
    "add rsp, 16",
    "iretq",
    ".popsection",
    ".pushsection .data.hindsight.idt, \"aw\"",
    ".balign 16",
    ".global hindsight_idt",
    "hindsight_idt:",
    ".set vector, 0",
    ".rept 256",
    ".set stub, {stubs} + vector * 16",
    ".word stub & 0xffff",
    ".word 8",
    ".if vector == 8",
    ".byte 1",
    ".elseif vector == 2",
    ".byte 2",
    ".elseif vector == 18",
    ".byte 3",
    ".elseif vector == 1",
    ".byte 4",
    ".else",
    ".byte 0",
    ".endif",
    ".if vector == 3 || vector == 0x80",
    ".byte 0xee",
    ".else",
    ".byte 0x8e",
    ".endif",
    ".word (stub >> 16) & 0xffff",
    ".quad 0",
    ".set vector, vector + 1",
    ".endr",
    ".global hindsight_idt_pointer",
    "hindsight_idt_pointer:",
    ".word 4095",
    ".quad hindsight_idt",
    ".quad hindsight_stubs", // a reference, so that the linker keeps the stubs with the IDT
    ".popsection",
    stubs = const STUBS,
);

/// Address at which the linker script places the stubs.
const STUBS: u64 = 0x10_0000;

unsafe extern "C" {
    static mut hindsight_idt: [Gate; 256];
}

/// A gate of the IDT. SDM Vol. 3A, "64-Bit Mode IDT".
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gate(pub [u8; 16]);

impl Gate {
    const IST: usize = 4;
    const ATTRIBUTES: usize = 5;

    /// This gate with another stack: an entry of the interrupt stack table, or 0 for none.
    #[must_use]
    pub fn with_ist(mut self, ist: u8) -> Self {
        self.0[Self::IST] = ist & 7;
        self
    }

    /// This gate with another DPL.
    #[must_use]
    pub fn with_dpl(mut self, dpl: u8) -> Self {
        self.0[Self::ATTRIBUTES] = self.0[Self::ATTRIBUTES] & !0x60 | (dpl & 3) << 5;
        self
    }

    /// This gate as a trap gate, which leaves IF as it is.
    #[must_use]
    pub fn as_trap(mut self) -> Self {
        self.0[Self::ATTRIBUTES] |= 1;
        self
    }
}

fn slot(vector: u8) -> *mut Gate {
    (&raw mut hindsight_idt)
        .cast::<Gate>()
        .wrapping_add(usize::from(vector))
}

/// The gate of `vector`.
pub fn gate(vector: u8) -> Gate {
    // SAFETY: every vector is inside the IDT.
    unsafe { slot(vector).read_volatile() }
}

/// Makes `vector` an interrupt gate with this DPL to `handler` at CPL 0, and returns the old gate.
///
/// The gate has no IST. It is for handlers in assembly that run instead of the runtime's handler.
pub fn set_gate(vector: u8, handler: u64, dpl: u8) -> Gate {
    let low = handler & 0xffff
        | 8 << 16
        | u64::from(0x8e | (dpl & 3) << 5) << 40
        | (handler >> 16 & 0xffff) << 48;
    let mut entry = [0; 16];
    entry[..8].copy_from_slice(&low.to_le_bytes());
    entry[8..].copy_from_slice(&(handler >> 32).to_le_bytes());
    let old = gate(vector);
    restore_gate(vector, Gate(entry));
    old
}

/// Restores a gate that [`set_gate`] replaced, or sets one that was made from it.
pub fn restore_gate(vector: u8, gate: Gate) {
    // SAFETY: every vector is inside the IDT, which only the processor reads.
    unsafe { slot(vector).write_volatile(gate) };
}

/// Runs `f` with the gate of `vector` changed by `change`.
pub fn with_gate<R>(vector: u8, change: impl FnOnce(Gate) -> Gate, f: impl FnOnce() -> R) -> R {
    let old = gate(vector);
    restore_gate(vector, change(old));
    let result = f();
    restore_gate(vector, old);
    result
}

/// The address of the entry stub of `vector`.
pub fn entry(vector: u8) -> u64 {
    STUBS + 16 * u64::from(vector)
}
