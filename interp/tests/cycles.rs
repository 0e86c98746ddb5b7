//! Core cycles: what the virtual clock counts.
#![allow(unsafe_code, reason = "the memory is reached through host pointers")]

mod common;

use common::{CODE, Machine, Ram, long_mode, state, vcpu};
use hindsight_cpu::state::gpr::{RCX, RDI};
use hindsight_interp::Exit;

/// Bytes that each string instruction is to handle.
const COUNT: u64 = 20_000;

/// Repeated string instructions, with other instructions before and after them.
const PROGRAM: &[u8] = &[
    0xb9, 0x20, 0x4e, 0, 0, // mov ecx, COUNT
    0xf3, 0xaa, // rep stosb
    0x90, // nop
    0xb9, 0x20, 0x4e, 0, 0, // mov ecx, COUNT
    0xf3, 0xa4, // rep movsb
    0xb9, 0x20, 0x4e, 0, 0, // mov ecx, COUNT
    0xf3, 0xac, // rep lodsb
    0xf3, 0xaa, // rep stosb: no iteration
    0x90, // nop
    0xf4, // hlt
];
const INSTRUCTIONS: u64 = 10;
const CYCLES: u64 = INSTRUCTIONS + 3 * (COUNT - 1);

fn program(ram: &Ram) -> hindsight_cpu::state::CpuState {
    ram.write(CODE, PROGRAM);
    let mut st = long_mode(ram, 0);
    st.gpr[RDI] = 0x10_0000;
    st.gpr[6] = 0x20_0000;
    st
}

#[test]
fn repeated_string_instruction_takes_a_cycle_an_iteration_and_retires_once() {
    let ram = Ram::new(4 << 20);
    let mut cpu = vcpu(&ram, &program(&ram));
    assert_eq!(cpu.run(&mut Machine::default(), 1 << 30), Exit::Halted);
    assert_eq!((cpu.stats().retired, cpu.cycles()), (INSTRUCTIONS, CYCLES));
}

#[test]
fn budget_stops_repeated_string_instructions_at_the_iteration() {
    for step in [1, 2, 3, 7, 100, 4095, 4097, 30_001] {
        let ram = Ram::new(4 << 20);
        let mut cpu = vcpu(&ram, &program(&ram));
        let mut machine = Machine::default();
        let mut cycles = 0;
        while cpu.run(&mut machine, step) == Exit::Budget {
            cycles += step;
            assert_eq!(cpu.cycles(), cycles, "in steps of {step}");
        }
        let total = (cpu.stats().retired, cpu.cycles());
        assert_eq!(total, (INSTRUCTIONS, CYCLES), "in steps of {step}");
        assert_eq!(state(&mut cpu).gpr[RDI], 0x10_0000 + 2 * COUNT);
    }
}

#[test]
fn budget_in_the_middle_of_a_repetition_leaves_the_rest() {
    let ram = Ram::new(4 << 20);
    let mut cpu = vcpu(&ram, &program(&ram));
    let mut machine = Machine::default();
    assert_eq!(cpu.run(&mut machine, 1 + 123), Exit::Budget);
    let st = state(&mut cpu);
    assert_eq!((st.gpr[RCX], cpu.stats().retired), (COUNT - 123, 1));
    assert_eq!(st.rip, CODE as u64 + 5);
}
