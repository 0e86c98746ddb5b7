//! Entry stubs of the 256 vectors, and the IDT, both laid out by the assembler.
//!
//! #DF, NMI, #MC and #DB have stacks of their own (IST 1 to 4); all others use the current stack, or
//! the TSS's RSP0 when they come from CPL 3. Gates 3 and 0x80 may be called from CPL 3.

use core::arch::global_asm;

global_asm!(
    ".pushsection .hindsight.stubs, \"ax\"",
    ".global hindsight_stubs",
    "hindsight_stubs:",
    ".set vector, 0",
    ".rept 256",
    ".balign 16, 0xcc",
    // Vectors whose exception pushes an error code: 8, 10 to 14, 17, 21.
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
    ".quad hindsight_stubs", // only to keep the stubs where the IDT is kept
    ".popsection",
    // Where the linker script places the stubs.
    stubs = const 0x10_0000,
);

unsafe extern "C" {
    static mut hindsight_idt: [[u8; 16]; 256];
}

/// Byte of a gate that holds its type and DPL.
const GATE_ATTRIBUTES: usize = 5;

/// Sets the DPL of the gate of `vector` and returns the old one.
pub fn set_gate_dpl(vector: u8, dpl: u8) -> u8 {
    // SAFETY: the index is inside the IDT; the processor reads the byte at the next event.
    unsafe {
        let gate = (&raw mut hindsight_idt)
            .cast::<[u8; 16]>()
            .add(usize::from(vector));
        let byte = gate.cast::<u8>().add(GATE_ATTRIBUTES);
        let old = byte.read_volatile();
        byte.write_volatile(old & !0x60 | (dpl & 3) << 5);
        old >> 5 & 3
    }
}

/// The IDT entry of one vector, to be put back.
#[derive(Clone, Copy, Debug)]
pub struct Gate([u8; 16]);

fn gate(vector: u8) -> *mut [u8; 16] {
    // SAFETY: every vector has its entry inside the IDT.
    unsafe {
        (&raw mut hindsight_idt)
            .cast::<[u8; 16]>()
            .add(usize::from(vector))
    }
}

/// Makes `vector` an interrupt gate to `handler` at CPL 0, callable from `dpl`, on the current stack
/// or RSP0. Returns the old entry. For handlers in assembly that must not run the runtime's.
pub fn set_gate(vector: u8, handler: u64, dpl: u8) -> Gate {
    let low = handler & 0xffff
        | 8 << 16
        | u64::from(0x8e | (dpl & 3) << 5) << 40
        | (handler >> 16 & 0xffff) << 48;
    let mut entry = [0; 16];
    entry[..8].copy_from_slice(&low.to_le_bytes());
    entry[8..].copy_from_slice(&(handler >> 32).to_le_bytes());
    // SAFETY: the entry is inside the IDT; the processor reads it at the next event.
    unsafe {
        let old = gate(vector).read_volatile();
        gate(vector).write_volatile(entry);
        Gate(old)
    }
}

/// Puts back what [`set_gate`] replaced.
pub fn restore_gate(vector: u8, old: Gate) {
    // SAFETY: as in `set_gate`.
    unsafe { gate(vector).write_volatile(old.0) };
}
