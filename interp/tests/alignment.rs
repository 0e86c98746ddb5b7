//! Alignment checks at CPL 3 with CR0.AM and RFLAGS.AC. SDM Vol. 3A, "Interrupt 17—Alignment Check
//! Exception (#AC)".
#![allow(unsafe_code, reason = "the programs are assembly")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{CODE, Machine, Ram, STACK, between, gate, long_mode, state, vcpu};
use hindsight_cpu::state::CpuState;
use hindsight_interp::Exit;

/// Bytes from one program to the next.
const STRIDE: usize = 32;

macro_rules! programs {
    ($($name:literal, $alignment:literal, $($line:literal),+;)+) => {
        std::arch::global_asm!(
            ".balign 32",
            ".global al_first, al_end",
            "al_first:",
            $($($line,)+ "ud2", ".balign 32",)+
            "al_end:",
        );

        /// The programs in order, with the alignment in bytes that each needs at RDI.
        const PROGRAMS: &[(&str, u64)] = &[$(($name, $alignment)),+];
    };
}

programs! {
    "mov m8", 1, "mov al, [rdi]";
    "mov m16", 2, "mov ax, [rdi]";
    "mov m32", 4, "mov eax, [rdi]";
    "mov m64", 8, "mov [rdi], rax";
    "lock xadd", 4, "lock xadd [rdi], eax";
    "xchg m16", 2, "xchg [rdi], ax";
    "cmpxchg8b", 8, "cmpxchg8b [rdi]";
    "bt m16", 2, "xor eax, eax", "bt [rdi], ax";
    "bts m64", 8, "xor eax, eax", "bts [rdi], rax";
    "rep movsq", 8, "mov rsi, rbx", "rep movsq";
    "rep stosd", 4, "rep stosd";
    "scasw", 2, "scasw";
    "push m64", 8, "push qword ptr [rdi]";
    "pop m64", 8, "pop qword ptr [rdi]";
    "mov Sreg", 2, "mov [rdi], ds";
    "lgs m16:16", 2, "lgs ax, [rdi]";
    "lgs m16:32", 4, "lgs eax, [rdi]";
    "sgdt", 4, "sgdt [rdi]";
    "movss", 4, "movss xmm0, [rdi]";
    "movlps", 8, "movlps [rdi], xmm0";
    "movups", 1, "movups xmm0, [rdi]";
    "fld m32", 4, "fld dword ptr [rdi]";
    "fld m64", 8, "fld qword ptr [rdi]";
    "fld m80", 8, "fld tbyte ptr [rdi]";
    "fstp m80", 8, "fld1", "fstp tbyte ptr [rdi]";
    "fbld", 8, "fbld [rdi]";
    "fbstp", 8, "fld1", "fbstp [rdi]";
    "fnstcw", 2, "fnstcw [rdi]";
    "fnstenv 14", 2, ".byte 0x66", "fnstenv [rdi]";
    "fnstenv 28", 4, "fnstenv [rdi]";
    "fldenv 14", 2, ".byte 0x66", "fldenv [rdi]";
    "fldenv 28", 4, "fldenv [rdi]";
    "fnsave 94", 2, ".byte 0x66", "fnsave [rdi]";
    "fnsave 108", 4, "fnsave [rdi]";
    "frstor 94", 2, ".byte 0x66", "frstor [rdi]";
    "frstor 108", 4, "frstor [rdi]";
}

unsafe extern "C" {
    static al_first: u8;
    static al_end: u8;
}

const DATA: u64 = 0x20_0000;
const HANDLERS: usize = CODE + 0x4000;
const AC: u64 = 17;
const UD: u64 = 6;

/// A machine at CPL 3 that checks alignment, with all programs from [`CODE`] on.
fn machine() -> (Ram, CpuState) {
    let ram = Ram::new(4 << 20);
    let mut st = long_mode(&ram, 3);
    for vector in 0..32 {
        let handler = HANDLERS + vector * 16;
        ram.write(handler, &[0xf4]);
        gate(&ram, vector, handler as u64, 0);
    }
    // SAFETY: labels of one section.
    ram.write(CODE, unsafe {
        between(&raw const al_first, &raw const al_end)
    });
    st.rflags |= 1 << 18;
    (ram, st)
}

/// Runs the program at `rip`; returns the vector of the exception that ends it, and its error code.
fn exception(ram: &Ram, st: &CpuState) -> (u64, u64, CpuState) {
    let mut cpu = vcpu(ram, st);
    assert_eq!(cpu.run(&mut Machine::default(), 1000), Exit::Halted);
    let st = state(&mut cpu);
    let code = ram.read_u64(usize::try_from(st.gpr[4]).unwrap());
    ((st.rip - 1 - HANDLERS as u64) / 16, code, st)
}

#[test]
fn unaligned_operand_of_each_type_raises_ac() {
    let (ram, st) = machine();
    for (n, &(name, alignment)) in PROGRAMS.iter().enumerate() {
        for offset in [0, 1, 2, 4, 8] {
            let mut st = st.clone();
            st.rip = (CODE + n * STRIDE) as u64;
            (st.gpr[1], st.gpr[3]) = (2, DATA + 0x100);
            st.gpr[7] = DATA + offset;
            ram.write(usize::try_from(DATA).unwrap(), &[0; 256]);
            let (vector, code, _) = exception(&ram, &st);
            let aligned = offset % alignment == 0;
            assert_eq!(vector, if aligned { UD } else { AC }, "{name} at +{offset}");
            assert!(aligned || code == 0, "{name} at +{offset}");
        }
    }
}

#[test]
fn enter_with_unaligned_new_top_of_stack_raises_ac_and_changes_nothing() {
    for (size, vector) in [(0, UD), (8, UD), (4, AC), (1, AC)] {
        let (ram, mut st) = machine();
        // enter size, 0; ud2
        ram.write(CODE, &[0xc8, size, 0, 0, 0x0f, 0x0b]);
        st.gpr[5] = 0x1234;
        let (raised, _, after) = exception(&ram, &st);
        assert_eq!(raised, vector, "{size}");
        let frame = STACK as u64 - 8;
        assert_eq!(after.gpr[5], if raised == UD { frame } else { 0x1234 });
    }
}
