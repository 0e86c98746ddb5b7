//! Transactions: what they undo, why they abort, and what other processors see of them.
#![allow(
    clippy::unwrap_used,
    clippy::allow_attributes,
    reason = "a test may panic"
)]

mod common;

use common::*;
use hindsight_cpu::state::CpuState;
use hindsight_interp::{BranchClass, Exit, Vcpu};
use std::sync::Arc;

/// Where the tests' data is.
const DATA: usize = 0x20_0000;

/// XBEGIN with its fallback address `over` bytes behind it.
fn xbegin(over: u8) -> Vec<u8> {
    vec![0xc7, 0xf8, over, 0, 0, 0]
}

const XEND: &[u8] = &[0x0f, 0x01, 0xd5];
const XTEST: &[u8] = &[0x0f, 0x01, 0xd6];
const HLT: &[u8] = &[0xf4];
/// MOV dword [RDI], 1.
const STORE: &[u8] = &[0xc7, 0x07, 1, 0, 0, 0];

fn with_rtm(leaf: u32, sub: u32) -> [u32; 4] {
    let mut r = host_cpuid(leaf, sub);
    if (leaf, sub) == (7, 0) {
        r[1] |= 1 << 4 | 1 << 11;
    }
    r
}

fn without_rtm(leaf: u32, sub: u32) -> [u32; 4] {
    let mut r = host_cpuid(leaf, sub);
    if (leaf, sub) == (7, 0) {
        r[1] &= !(1 << 4 | 1 << 11);
    }
    r
}

fn machine() -> Machine {
    Machine {
        cpuid: Some(with_rtm),
        ..Machine::default()
    }
}

/// XBEGIN, `body`, XEND, HLT; the fallback address is that of the HLT.
fn region(body: &[u8]) -> Vec<u8> {
    let over = u8::try_from(body.len() + XEND.len()).unwrap();
    [&xbegin(over), body, XEND, HLT].concat()
}

fn start(ram: &Ram, code: &[u8]) -> CpuState {
    let mut st = long_mode(ram, 0);
    ram.write(CODE, code);
    st.gpr[7] = DATA as u64;
    st.gpr[0] = 0x1122_3344_5566_7788;
    st
}

/// Runs to the HLT: the state, and what is at [`DATA`].
fn run(code: &[u8], machine: &mut Machine) -> (CpuState, u64) {
    let ram = Ram::new(4 << 20);
    let st = start(&ram, code);
    let mut cpu = vcpu(&ram, &st);
    assert_eq!(cpu.run(machine, 100_000), Exit::Halted);
    (state(&mut cpu), ram.read_u64(DATA))
}

/// EAX after an abort.
fn status_of(body: &[u8]) -> u32 {
    let (st, memory) = run(&region(body), &mut machine());
    assert_eq!(memory, 0, "nothing was stored");
    assert_eq!(st.gpr[7], DATA as u64);
    u32::try_from(st.gpr[0]).unwrap()
}

#[test]
fn committed_region_keeps_registers_and_memory() {
    // MOV EBX, [RDI] sees the store before it.
    let body = [STORE, &[0x8b, 0x1f], &[0x48, 0x83, 0xc7, 8]].concat();
    let (st, memory) = run(&region(&body), &mut machine());
    assert_eq!((memory, st.gpr[3], st.gpr[7]), (1, 1, DATA as u64 + 8));
    assert_eq!(st.gpr[0], 0x1122_3344_5566_7788, "EAX is not written");
}

#[test]
fn xabort_undoes_registers_vectors_flags_and_memory() {
    let body = [
        STORE,
        // PCMPEQB XMM1, XMM1; ADD RDI, 8; STC; XABORT 5AH.
        &[0x66, 0x0f, 0x74, 0xc9],
        &[0x48, 0x83, 0xc7, 8],
        &[0xf9],
        &[0xc6, 0xf8, 0x5a],
    ]
    .concat();
    let (st, memory) = run(&region(&body), &mut machine());
    assert_eq!(memory, 0);
    assert_eq!(st.gpr[0], 0x5a00_0001, "the upper half of RAX is cleared");
    assert_eq!((st.gpr[7], st.rflags & 1), (DATA as u64, 0));
    assert_eq!(st.xsave.0[160 + 16..160 + 32], [0; 16]);
}

#[test]
fn instructions_that_no_region_can_have_abort_it() {
    for body in [
        // CPUID, PAUSE, HLT, CLI, POPFQ, INT 80H, UD2, OUT, RDMSR, XSAVE, FLD1, MOVNTI, MOV DS,
        // SYSCALL.
        &[0x0f, 0xa2][..],
        &[0xf3, 0x90],
        &[0xf4],
        &[0xfa],
        &[0x9d],
        &[0xcd, 0x80],
        &[0x0f, 0x0b],
        &[0xe6, 0x80],
        &[0x0f, 0x32],
        &[0x0f, 0xae, 0x27],
        &[0xd9, 0xe8],
        &[0x0f, 0xc3, 0x07],
        &[0x8e, 0xd8],
        &[0x0f, 0x05],
        // MOV CR3, MOV DR7, WBINVD, LGDT, IRETQ.
        &[0x0f, 0x22, 0xd8],
        &[0x0f, 0x23, 0xf8],
        &[0x0f, 0x09],
        &[0x0f, 0x01, 0x17],
        &[0x48, 0xcf],
        // DIV by what is 0, a store to no memory.
        &[0x48, 0x31, 0xdb, 0x48, 0xf7, 0xf3],
        &[0xc7, 0x04, 0x25, 0, 0, 0, 0x30, 1, 0, 0, 0],
    ] {
        assert_eq!(status_of(&[STORE, body].concat()), 0, "{body:x?}");
    }
}

#[test]
fn breakpoints_abort_with_their_bit() {
    assert_eq!(status_of(&[STORE, &[0xcc]].concat()), 1 << 4);
    assert_eq!(status_of(&[STORE, &[0xf1]].concat()), 1 << 4);
}

#[test]
fn regions_nest_seven_deep() {
    for (depth, expected) in [(6, None), (7, Some(1 << 5))] {
        let inner: Vec<u8> = std::iter::repeat_n(xbegin(0), depth).flatten().collect();
        let ends = XEND.repeat(depth);
        let (st, memory) = run(&region(&[&inner, STORE, &ends].concat()), &mut machine());
        match expected {
            None => assert_eq!((st.gpr[0], memory), (0x1122_3344_5566_7788, 1)),
            Some(status) => assert_eq!((st.gpr[0], memory), (status, 0)),
        }
    }
}

#[test]
fn abort_in_an_inner_region_goes_to_the_outer_fallback() {
    let inner = [&xbegin(0), STORE, &[0xc6, 0xf8, 1][..]].concat();
    assert_eq!(status_of(&inner), 1 << 24 | 1 << 5 | 1);
}

#[test]
fn xtest_and_what_there_is_outside() {
    // XTEST, SETZ BL; XBEGIN, XTEST, SETZ CL, XEND; XABORT; HLT.
    let setz = |register: u8| vec![0x0f, 0x94, 0xc0 | register];
    let inside = [XTEST, &setz(1), XEND].concat();
    let code = [XTEST, &setz(3), &xbegin(9), &inside, &[0xc6, 0xf8, 7], HLT].concat();
    let (st, _) = run(&code, &mut machine());
    assert_eq!((st.gpr[3] & 0xff, st.gpr[1] & 0xff), (1, 0));
    assert_eq!(st.gpr[0], 0x1122_3344_5566_7788, "XABORT does nothing");
}

/// Runs code that raises an exception, whose handler halts.
fn raises(code: &[u8], vector: usize, mut machine: Machine) {
    let ram = Ram::new(4 << 20);
    let st = start(&ram, code);
    gate(&ram, vector, 0x30000, 0);
    ram.write(0x30000, HLT);
    let mut cpu = vcpu(&ram, &st);
    assert_eq!(cpu.run(&mut machine, 1000), Exit::Halted, "{code:x?}");
    assert_eq!(cpu.rip(), 0x30001, "{code:x?}");
}

#[test]
fn xend_outside_a_region_and_all_without_rtm_fault() {
    raises(XEND, 13, machine());
    for code in [&xbegin(0)[..], XEND, XTEST, &[0xc6, 0xf8, 0]] {
        let machine = Machine {
            cpuid: Some(without_rtm),
            ..Machine::default()
        };
        raises(code, 6, machine);
    }
}

#[test]
fn more_lines_than_the_ways_of_a_set_abort() {
    // MOV ECX, n; again: MOV [RDI], EAX; ADD RDI, 4096; LOOP.
    let stores = |n: u8| {
        let mut body = vec![0xb9, n, 0, 0, 0, 0x89, 0x07];
        body.extend([0x48, 0x81, 0xc7, 0, 0x10, 0, 0, 0xe2, 0xf5]);
        body
    };
    assert_eq!(status_of(&stores(9)), 1 << 3);
    let (st, memory) = run(&region(&stores(8)), &mut machine());
    assert_eq!((st.gpr[7], memory), (DATA as u64 + 0x8000, 0x5566_7788));
}

#[test]
fn interrupt_aborts_transaction_before_its_delivery() {
    let ram = Ram::new(4 << 20);
    // The region goes round for ever.
    let mut st = start(&ram, &region(&[STORE, &[0xeb, 0xfe]].concat()));
    gate(&ram, 0x40, 0x30000, 0);
    ram.write(0x30000, HLT);
    st.rflags |= 0x200;
    let mut machine = machine();
    let mut cpu = vcpu(&ram, &st);
    // The run's end is one of the aborts: it goes on with the HLT.
    assert_eq!(cpu.run(&mut machine, 1000), Exit::Budget);
    assert_eq!(state(&mut cpu).gpr[0], 1 << 1);
    cpu.load(&st);
    // Taken at the first boundary of the region.
    let mut st = state(&mut cpu);
    st.rflags &= !0x200;
    cpu.load(&st);
    machine.nmi = true;
    gate(&ram, 2, 0x30000, 0);
    assert_eq!(cpu.run(&mut machine, 1000), Exit::Halted);
    assert_eq!((cpu.rip(), ram.read_u64(DATA)), (0x30001, 0));
}

#[test]
fn code_that_the_region_writes_aborts_it() {
    // MOV byte [RIP], 90H: writes the next instruction, which is in the same block.
    let near = [0xc6, 0x05, 0, 0, 0, 0, 0x90, 0x90];
    assert_eq!(status_of(&near), 0);
    // MOV byte [RDI], F4H (HLT); JMP RDI: jumps to the code that it writes.
    assert_eq!(status_of(&[0xc6, 0x07, 0xf4, 0xff, 0xe7]), 0);
}

#[test]
fn steps_and_stops_abort() {
    let ram = Ram::new(4 << 20);
    let st = start(&ram, &region(STORE));
    let mut cpu = vcpu(&ram, &st);
    let mut machine = machine();
    assert_eq!(cpu.step(&mut machine, true), Exit::Stepped);
    let after = state(&mut cpu);
    let end = CODE + 6 + STORE.len() + XEND.len();
    assert_eq!((after.gpr[0], after.rip), (1 << 1, end as u64));
}

#[test]
fn branch_of_the_abort_is_reported() {
    let mut machine = machine();
    machine.observe.branches = true;
    // JMP +0; XABORT 0.
    run(&region(&[0xeb, 0, 0xc6, 0xf8, 0]), &mut machine);
    let branches: Vec<_> = machine.branches.iter().map(|b| (b.class, b.from)).collect();
    let at = CODE as u64 + 6;
    let expected = [(BranchClass::DirectJump, at), (BranchClass::Abort, at + 2)];
    assert_eq!(branches, expected);
}

fn rtm_debug(mut st: CpuState, ram: &Ram) -> (Exit, CpuState) {
    gate(ram, 1, 0x30000, 0);
    ram.write(0x30000, HLT);
    st.dr7 |= 1 << 11;
    let mut machine = machine();
    machine.observe.debugs_transactions = true;
    let mut cpu = vcpu(ram, &st);
    (cpu.run(&mut machine, 1000), state(&mut cpu))
}

/// Rules RTM-03 to RTM-06.
#[test]
fn advanced_debugging_goes_back_to_the_xbegin() {
    let ram = Ram::new(4 << 20);
    for (body, breakpoint, bits) in [
        // INT3; a data breakpoint; a code breakpoint on XEND.
        (&[STORE, &[0xcc]].concat()[..], 0, 0),
        (STORE, 0xd_0001, 1),
        (STORE, 0x4, 2),
    ] {
        let mut st = start(&ram, &region(body));
        st.dr = [DATA as u64, (CODE + 6 + STORE.len()) as u64, 0, 0];
        st.dr7 |= breakpoint;
        let (exit, st) = rtm_debug(st, &ram);
        assert_eq!((exit, st.rip), (Exit::Halted, 0x30001), "{body:x?}");
        let frame = |n: usize| ram.read_u64(usize::try_from(st.gpr[4]).unwrap() + n * 8);
        assert_eq!(frame(0), CODE as u64, "RIP of the XBEGIN");
        assert_eq!(frame(2) & 1 << 16, 0, "RF");
        assert_eq!(st.dr6 & 0x1_e00f, bits, "DR6, with RTM clear");
        assert_eq!(st.gpr[0], 0x1122_3344_5566_7788);
        assert_eq!(ram.read_u64(DATA), 0);
    }
}

/// A count that two processors share, each change of it in a transaction or with LOCK.
#[test]
fn processors_in_parallel_lose_no_count() {
    let ram = Ram::new(4 << 20);
    // again: XBEGIN fallback; INC qword [RDI]; XEND; JMP next;
    // fallback: LOCK INC qword [RDI + 64]; next: DEC RSI; JNZ again; HLT.
    // The other count is on its own cache line.
    let code = [
        &xbegin(8)[..],
        &[0x48, 0xff, 0x07],
        XEND,
        &[0xeb, 5],
        &[0xf0, 0x48, 0xff, 0x47, 0x40],
        &[0x48, 0xff, 0xce, 0x75, 0xe8],
        HLT,
    ]
    .concat();
    let mut st = start(&ram, &code);
    st.gpr[6] = 3000;
    let memory = ram.memory();
    let cpus: Vec<_> = (0..2)
        .map(|_| {
            let mut cpu = Vcpu::new(Arc::clone(&memory));
            cpu.load(&st);
            cpu
        })
        .collect();
    std::thread::scope(|scope| {
        for mut cpu in cpus {
            scope.spawn(move || {
                let mut machine = machine();
                while cpu.run(&mut machine, 1 << 20) != Exit::Halted {}
            });
        }
    });
    let (inside, outside) = (ram.read_u64(DATA), ram.read_u64(DATA + 64));
    assert_eq!(inside + outside, 6000, "{inside} in transactions");
    assert_ne!(inside, 0);
}

/// One processor opens transactions, another one does not; both change a count with LOCK.
#[test]
fn locked_counts_are_exact_while_transactions_begin_and_end() {
    let ram = Ram::new(4 << 20);
    // again: LOCK INC qword [RDI]; XBEGIN next; XEND; next: LOCK INC qword [RDI]; DEC RSI;
    // JNZ again; HLT
    let transacting = [
        &[0xf0, 0x48, 0xff, 0x07][..],
        &xbegin(3),
        XEND,
        &[0xf0, 0x48, 0xff, 0x07, 0x48, 0xff, 0xce, 0x75, 0xea],
        HLT,
    ]
    .concat();
    // again: LOCK INC qword [RDI]; DEC RSI; JNZ again; HLT
    let counting = [
        &[0xf0, 0x48, 0xff, 0x07, 0x48, 0xff, 0xce, 0x75, 0xf7][..],
        HLT,
    ]
    .concat();
    let mut st = start(&ram, &transacting);
    st.gpr[6] = 100_000;
    let memory = ram.memory();
    let mut first = Vcpu::new(Arc::clone(&memory));
    first.load(&st);
    ram.write(CODE + 0x800, &counting);
    st.rip = (CODE + 0x800) as u64;
    st.gpr[6] = 5_000_000;
    let mut second = Vcpu::new(Arc::clone(&memory));
    second.load(&st);
    std::thread::scope(|scope| {
        for mut cpu in [first, second] {
            scope.spawn(move || {
                let mut machine = machine();
                while cpu.run(&mut machine, 1 << 20) != Exit::Halted {}
            });
        }
    });
    assert_eq!(ram.read_u64(DATA), 5_200_000);
}

/// A device that writes what the region has read is a conflict.
#[test]
fn store_of_a_device_aborts() {
    let ram = Ram::new(4 << 20);
    // MOV EBX, [RDI]; then round for ever.
    let st = start(&ram, &region(&[0x8b, 0x1f, 0xeb, 0xfe]));
    let mut cpu = vcpu(&ram, &st);
    let memory = Arc::clone(cpu.memory());
    let mut machine = machine();
    machine.at_boundary = Some(Box::new(move || {
        assert!(memory.write(DATA as u64 + 60, &[1]));
    }));
    assert_eq!(cpu.run(&mut machine, 1 << 20), Exit::Halted);
    assert_eq!(state(&mut cpu).gpr[0], 0b110);
}

#[test]
fn instructions_after_xend_retire_once() {
    // Three NOPs, then RDTSC, which counts instructions here.
    let code = [&xbegin(0), XEND, &[0x90, 0x90, 0x90, 0x0f, 0x31], HLT].concat();
    let (st, _) = run(&code, &mut machine());
    assert_eq!(st.gpr[0], 5);
}
