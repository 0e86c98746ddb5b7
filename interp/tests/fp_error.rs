//! x87 errors with CR0.NE clear: FERR#, IGNNE#, and the wait for an interrupt.

mod common;

use common::{CODE, Machine, Ram, gate, long_mode, state, vcpu};
use hindsight_cpu::state::CpuState;
use hindsight_interp::{Exit, Vcpu};

const HANDLER: usize = CODE + 0x3000;
const CONTROL: usize = 0x20_0000;
const CR0_NE: u64 = 1 << 5;
const IF: u64 = 1 << 9;
const VECTOR: u8 = 0x75;

/// fninit; fldcw [rdi]; fld1; fldz; fdivp; fwait; hlt
const PROGRAM: &[u8] = &[
    0xdb, 0xe3, 0xd9, 0x2f, 0xd9, 0xe8, 0xd9, 0xee, 0xde, 0xf9, 0x9b, 0xf4,
];
const FWAIT: u64 = CODE as u64 + 10;
const END: u64 = CODE as u64 + 12;

/// Returns a processor at [`PROGRAM`], which divides by zero.
///
/// The exception is unmasked, and `handler` is the handler of the interrupt.
fn divides(ram: &Ram, ne: u64, handler: &[u8]) -> Vcpu {
    let mut st = long_mode(ram, 0);
    st.cr0 = st.cr0 & !CR0_NE | ne;
    st.rflags |= IF;
    st.gpr[7] = CONTROL as u64;
    ram.write(CONTROL, &0x37b_u16.to_le_bytes());
    ram.write(CODE, PROGRAM);
    gate(ram, 16, HANDLER as u64 + 0x100, 0);
    gate(ram, VECTOR.into(), HANDLER as u64, 0);
    ram.write(HANDLER, handler);
    ram.write(HANDLER + 0x100, &[0xf4]);
    vcpu(ram, &st)
}

fn run(cpu: &mut Vcpu, machine: &mut Machine) -> CpuState {
    assert_eq!(cpu.run(machine, 1000), Exit::Halted);
    state(cpu)
}

#[test]
fn x87_error_with_cr0_ne_set_raises_mf() {
    let ram = Ram::new(4 << 20);
    let mut machine = Machine::default();
    let st = run(&mut divides(&ram, CR0_NE, &[0xf4]), &mut machine);
    assert_eq!(st.rip, HANDLER as u64 + 0x101);
    assert!(!machine.ferr.contains(&true));
}

#[test]
fn error_with_ne_clear_stops_before_the_waiting_instruction() {
    let ram = Ram::new(4 << 20);
    let mut machine = Machine::default();
    let mut cpu = divides(&ram, 0, &[0xf4]);
    let st = run(&mut cpu, &mut machine);
    assert_eq!(st.rip, FWAIT);
    assert_eq!(machine.ferr.last(), Some(&true));
    // The interrupt returns to the instruction.
    machine.interrupts = vec![VECTOR];
    let st = run(&mut cpu, &mut machine);
    assert_eq!(st.rip, HANDLER as u64 + 1);
    assert_eq!(ram.read_u64(usize::try_from(st.gpr[4]).unwrap_or(0)), FWAIT);
}

#[test]
fn handler_that_clears_the_error_returns_to_a_program_that_goes_on() {
    let ram = Ram::new(4 << 20);
    let mut machine = Machine::default();
    // out 0xf0, al; fnclex; iretq
    let mut cpu = divides(&ram, 0, &[0xe6, 0xf0, 0xdb, 0xe2, 0x48, 0xcf]);
    run(&mut cpu, &mut machine);
    machine.interrupts = vec![VECTOR];
    let st = run(&mut cpu, &mut machine);
    assert_eq!(st.rip, END);
    assert_eq!(machine.out, [(0xf0, vec![0])]);
    assert_eq!(machine.ferr.last(), Some(&false));
    assert!(!machine.ignne, "IGNNE# ends with FERR#");
}

#[test]
fn waiting_instruction_with_ignne_is_executed() {
    let ram = Ram::new(4 << 20);
    let mut machine = Machine::default();
    // out 0xf0, al; fld1; fwait; iretq
    let mut cpu = divides(&ram, 0, &[0xe6, 0xf0, 0xd9, 0xe8, 0x9b, 0x48, 0xcf]);
    run(&mut cpu, &mut machine);
    machine.interrupts = vec![VECTOR];
    let st = run(&mut cpu, &mut machine);
    assert_eq!(st.rip, END, "IGNNE# holds while FERR# is asserted");
    assert_eq!(machine.ferr.last(), Some(&true));
}

#[test]
fn stop_before_a_waiting_instruction_retires_nothing() {
    let ram = Ram::new(4 << 20);
    let mut machine = Machine::default();
    let mut cpu = divides(&ram, 0, &[0xf4]);
    run(&mut cpu, &mut machine);
    assert_eq!(cpu.stats().retired, 5);
}
