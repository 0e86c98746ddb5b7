//! Compares whole programs in the interpreter with the same code on the host.
#![allow(unsafe_code, reason = "the programs are assembly")]
#![allow(clippy::cast_precision_loss, reason = "a measurement")]

mod common;

use common::{CODE, IDT, Machine, Ram, STACK, between, gate, long_mode, state, vcpu};
use hindsight_cpu::branch::BtsConfig;
use hindsight_interp::{BranchClass, Exit, Observe};

// rdi: scratch memory of 1 MiB; returns a checksum in rax.
std::arch::global_asm!(
    ".global hs_work, hs_work_end",
    "hs_work:",
    "push rbx",
    "push rbp",
    "push r12",
    "mov r12, rdi",
    // Fill 4096 words with a generator.
    "mov ecx, 4096",
    "mov eax, 12345",
    "2:",
    "imul eax, eax, 1103515245",
    "add eax, 12345",
    "mov [r12 + rcx*4 - 4], eax",
    "dec ecx",
    "jnz 2b",
    // Insertion sort of the first 256.
    "mov ecx, 1",
    "3:",
    "mov eax, [r12 + rcx*4]",
    "mov edx, ecx",
    "4:",
    "cmp [r12 + rdx*4 - 4], eax",
    "jbe 5f",
    "mov ebx, [r12 + rdx*4 - 4]",
    "mov [r12 + rdx*4], ebx",
    "sub edx, 1",
    "jnz 4b",
    "5:",
    "mov [r12 + rdx*4], eax",
    "inc ecx",
    "cmp ecx, 256",
    "jb 3b",
    // CRC over all of it.
    "xor ebx, ebx",
    "not ebx",
    "xor ecx, ecx",
    "6:",
    "movzx eax, byte ptr [r12 + rcx]",
    "xor bl, al",
    "mov edx, 8",
    "7:",
    "shr ebx, 1",
    "jnc 8f",
    "xor ebx, 0xedb88320",
    "8:",
    "dec edx",
    "jnz 7b",
    "add rcx, 1",
    "cmp rcx, 16384",
    "jne 6b",
    "mov edi, 18",
    "call 9f",
    "shl rax, 32",
    "or rax, rbx",
    "pop r12",
    "pop rbp",
    "pop rbx",
    "ret",
    // Recursive Fibonacci.
    "9:",
    "cmp edi, 2",
    "jae 10f",
    "mov eax, edi",
    "ret",
    "10:",
    "push rdi",
    "sub edi, 1",
    "call 9b",
    "pop rdi",
    "push rax",
    "sub edi, 2",
    "call 9b",
    "pop rdi",
    "add rax, rdi",
    "ret",
    "hs_work_end:",
);

unsafe extern "C" {
    fn hs_work(scratch: *mut u8) -> u64;
    static hs_work_end: u8;
}

fn program() -> &'static [u8] {
    // SAFETY: labels of one section.
    unsafe { between((hs_work as *const ()).cast(), &raw const hs_work_end) }
}

fn setup() -> (Ram, hindsight_cpu::state::CpuState) {
    let ram = Ram::new(4 << 20);
    let mut st = long_mode(&ram, 0);
    ram.write(CODE, program());
    // Returns to a HLT.
    ram.write(CODE - 16, &[0xf4]);
    st.gpr[4] -= 8;
    ram.write_u64(STACK - 8, CODE as u64 - 16);
    st.gpr[7] = 0x20_0000;
    (ram, st)
}

fn host_result() -> u64 {
    let mut scratch = vec![0_u8; 1 << 20];
    // SAFETY: the program stays within 16 KiB of the scratch memory.
    unsafe { hs_work(scratch.as_mut_ptr()) }
}

#[test]
fn integer_program_gives_the_hosts_result() {
    let (ram, st) = setup();
    let mut cpu = vcpu(&ram, &st);
    let exit = cpu.run(&mut Machine::default(), 100_000_000);
    let st = state(&mut cpu);
    assert_eq!(
        (exit, st.gpr[0]),
        (Exit::Halted, host_result()),
        "rip {:#x}",
        st.rip
    );
}

#[test]
fn budget_of_any_size_stops_exactly() {
    let (ram, st) = setup();
    let mut cpu = vcpu(&ram, &st);
    let mut machine = Machine::default();
    cpu.run(&mut machine, 100_000_000);
    let total = cpu.stats().retired;
    let (ram, st) = setup();
    let mut cpu = vcpu(&ram, &st);
    let mut steps = 0;
    for n in (1..).map(|n: u64| n % 97 + 1) {
        let before = cpu.stats().retired;
        let exit = cpu.run(&mut machine, n);
        steps += cpu.stats().retired - before;
        if exit == Exit::Halted {
            break;
        }
        assert_eq!((exit, cpu.stats().retired - before), (Exit::Budget, n));
    }
    assert_eq!(steps, total);
    assert_eq!(state(&mut cpu).gpr[0], host_result());
}

#[test]
fn branches_are_reported_in_order() {
    let (ram, st) = setup();
    let mut cpu = vcpu(&ram, &st);
    let mut machine = Machine {
        observe: Observe::BRANCHES,
        ..Machine::default()
    };
    assert_eq!(cpu.run(&mut machine, 100_000_000), Exit::Halted);
    assert_eq!(state(&mut cpu).gpr[0], host_result());
    let last = machine.branches.last().unwrap();
    assert_eq!(last.to, CODE as u64 - 16);
    assert!(machine.branches.len() > 10_000);
}

/// A loop of three: dec ecx; jnz; hlt.
fn loop_of_three(ram: &Ram) -> hindsight_cpu::state::CpuState {
    let mut st = long_mode(ram, 0);
    st.gpr[1] = 3;
    ram.write(CODE, &[0xff, 0xc9, 0x75, 0xfc, 0xf4]);
    st
}

#[test]
fn conditional_branches_that_fall_through_are_reported_on_request() {
    let ram = Ram::new(4 << 20);
    let st = loop_of_three(&ram);
    let mut observe = Observe::BRANCHES;
    observe.not_taken = true;
    let mut machine = Machine {
        observe,
        ..Machine::default()
    };
    assert_eq!(vcpu(&ram, &st).run(&mut machine, 100), Exit::Halted);
    use BranchClass::{Conditional, NotTaken};
    let reported: Vec<_> = machine.branches.iter().map(|b| (b.class, b.at)).collect();
    assert_eq!(
        reported,
        [(Conditional, 2), (Conditional, 4), (NotTaken, 6)]
    );
    assert_eq!(machine.branches[2].to, CODE as u64 + 4);
}

/// BTS-01, BTS-05: records in guest memory as soon as the branch retires.
#[test]
fn branches_are_stored_in_the_bts_buffer() {
    let ram = Ram::new(4 << 20);
    let st = loop_of_three(&ram);
    let (area, buffer) = (0x20_0000_u64, 0x20_1000_u64);
    let at = |offset: u64| usize::try_from(area + offset).unwrap();
    for (offset, value) in [
        (0, buffer),
        (8, buffer),
        (16, buffer + 48),
        (24, buffer + 24),
    ] {
        ram.write_u64(at(offset), value);
    }
    let store = BtsConfig {
        area,
        interrupt: true,
        off_os: false,
        off_usr: false,
    };
    let mut observe = Observe::BRANCHES;
    observe.bts = Some(store);
    let mut machine = Machine {
        observe,
        ..Machine::default()
    };
    let mut cpu = vcpu(&ram, &st);
    assert_eq!(cpu.run(&mut machine, 2), Exit::Budget);
    let code = CODE as u64;
    let word = |n: usize| ram.read_u64(usize::try_from(buffer).unwrap() + 8 * n);
    assert_eq!([word(0), word(1), word(2)], [code + 2, code, 0]);
    assert_eq!((ram.read_u64(at(8)), machine.pmis), (buffer + 24, 1));
    assert_eq!(cpu.run(&mut machine, 100), Exit::Halted);
    assert_eq!((ram.read_u64(at(8)), machine.pmis), (buffer + 48, 2));
}

/// BTF-01, BTF-02, BTF-04, BTF-05.
#[test]
fn step_on_branches_traps_once_after_a_taken_branch() {
    let ram = Ram::new(4 << 20);
    let mut st = loop_of_three(&ram);
    st.rflags |= 1 << 8;
    // Handler of #DB: hlt.
    ram.write(CODE + 0x100, &[0xf4]);
    gate(&ram, 1, CODE as u64 + 0x100, 0);
    let mut observe = Observe::BRANCHES;
    observe.step_on_branch = true;
    observe.debug_exceptions = true;
    let mut machine = Machine {
        observe,
        ..Machine::default()
    };
    let mut cpu = vcpu(&ram, &st);
    assert_eq!(cpu.run(&mut machine, 100), Exit::Halted);
    let st = state(&mut cpu);
    assert_eq!((st.gpr[1], machine.debug_exceptions), (2, 1));
    let frame = usize::try_from(st.gpr[4]).unwrap();
    assert_eq!(ram.read_u64(frame), CODE as u64);
    assert_eq!(st.dr6, 0xffff_4ff0);
}

/// The platform receives a report after each `every` branches.
#[test]
fn branches_are_reported_after_the_requested_number() {
    let (ram, st) = setup();
    let mut cpu = vcpu(&ram, &st);
    let mut observe = Observe::BRANCHES;
    observe.every = 7;
    let mut machine = Machine {
        observe,
        ..Machine::default()
    };
    assert_eq!(cpu.run(&mut machine, 100_000), Exit::Budget);
    assert!(!machine.batches.is_empty());
    let (_, whole) = machine.batches.split_last().unwrap();
    assert!(whole.iter().all(|&n| n == 7));
    assert_eq!(machine.branches[6].at as u64, machine.retired_at_report[0]);
}

#[test]
fn page_fault_reaches_its_handler_with_code_and_address() {
    let ram = Ram::new(4 << 20);
    let st = long_mode(&ram, 0);
    // mov [0x40000000], eax; handler: hlt.
    ram.write(CODE, &[0x89, 0x04, 0x25, 0, 0, 0, 0x40]);
    ram.write(CODE + 0x100, &[0xf4]);
    gate(&ram, 14, CODE as u64 + 0x100, 0);
    let mut cpu = vcpu(&ram, &st);
    let exit = cpu.run(&mut Machine::default(), 100);
    let st = state(&mut cpu);
    assert_eq!(
        (exit, st.rip, st.cr2),
        (Exit::Halted, CODE as u64 + 0x101, 0x4000_0000)
    );
    let frame = usize::try_from(st.gpr[4]).unwrap();
    assert_eq!(ram.read_u64(frame), 2);
    assert_eq!(ram.read_u64(frame + 8), CODE as u64);
    assert_eq!(ram.read_u64(frame + 24) & 1 << 16, 1 << 16);
}

#[test]
fn fault_without_handlers_is_a_triple_fault() {
    let ram = Ram::new(4 << 20);
    let st = long_mode(&ram, 0);
    ram.write(CODE, &[0x0f, 0x0b]);
    let mut cpu = vcpu(&ram, &st);
    assert_eq!(cpu.run(&mut Machine::default(), 100), Exit::Shutdown);
    assert_eq!(state(&mut cpu).rip, CODE as u64);
    let _ = IDT;
}

#[test]
fn code_that_changes_itself_runs_as_changed() {
    let ram = Ram::new(4 << 20);
    let st = long_mode(&ram, 0);
    // mov byte [rip+1], 0x90 over the next instruction's INC (ff c0): inc eax; hlt -> nop; ...
    // c6 05 00 00 00 00 f4: writes HLT over the instruction that follows.
    ram.write(
        CODE,
        &[0xc6, 0x05, 0, 0, 0, 0, 0xf4, 0xff, 0xc0, 0xff, 0xc0, 0xf4],
    );
    let mut cpu = vcpu(&ram, &st);
    assert_eq!(cpu.run(&mut Machine::default(), 100), Exit::Halted);
    assert_eq!(
        (state(&mut cpu).gpr[0], state(&mut cpu).rip),
        (0, CODE as u64 + 8)
    );
}

#[test]
fn single_step_traps_after_each_instruction() {
    let ram = Ram::new(4 << 20);
    let mut st = long_mode(&ram, 0);
    st.rflags |= 1 << 8;
    // nop; nop; hlt. Handler of #DB: inc ebx; iretq.
    ram.write(CODE, &[0x90, 0x90, 0xf4]);
    ram.write(CODE + 0x100, &[0xff, 0xc3, 0x48, 0xcf]);
    gate(&ram, 1, CODE as u64 + 0x100, 0);
    let mut cpu = vcpu(&ram, &st);
    let exit = cpu.run(&mut Machine::default(), 8);
    let st = state(&mut cpu);
    assert_eq!(
        (exit, st.gpr[3], st.dr6),
        (Exit::Budget, 3, 0xffff_4ff0),
        "rip {:#x}",
        st.rip
    );
}

#[test]
fn interrupt_wakes_a_halted_processor() {
    let ram = Ram::new(4 << 20);
    let mut st = long_mode(&ram, 0);
    ram.write(CODE, &[0xfb, 0xf4, 0xf4]);
    ram.write(CODE + 0x100, &[0xff, 0xc3, 0x48, 0xcf]);
    gate(&ram, 0x40, CODE as u64 + 0x100, 0);
    st.rflags &= !(1 << 9);
    let mut cpu = vcpu(&ram, &st);
    let mut machine = Machine::default();
    assert_eq!(cpu.run(&mut machine, 100), Exit::Halted);
    machine.interrupts.push(0x40);
    assert_eq!(cpu.run(&mut machine, 100), Exit::Halted);
    let st = state(&mut cpu);
    assert_eq!((st.gpr[3], st.rip), (1, CODE as u64 + 3));
}

#[test]
#[ignore = "prints the speed: \
            cargo test --release -p hindsight-interp --test basic speed -- --ignored --nocapture"]
fn speed() {
    let (ram, st) = setup();
    for branches in [false, true] {
        let mut cpu = vcpu(&ram, &st);
        let mut machine = Machine::default();
        machine.observe.branches = branches;
        cpu.run(&mut machine, 100_000_000);
        let mut best = f64::MAX;
        let mut n = 0;
        for _ in 0..100 {
            ram.write_u64(STACK - 8, CODE as u64 - 16);
            cpu.load(&st);
            let before = cpu.stats().retired;
            let start = std::time::Instant::now();
            cpu.run(&mut machine, 100_000_000);
            best = best.min(start.elapsed().as_secs_f64());
            n = cpu.stats().retired - before;
            machine.branches.clear();
        }
        println!(
            "branches {branches}: {:.0} MIPS at best, {n} instructions",
            n as f64 / best / 1e6
        );
    }
    let mut best = std::time::Duration::MAX;
    for _ in 0..100 {
        let start = std::time::Instant::now();
        host_result();
        best = best.min(start.elapsed());
    }
    println!("host: {best:?}");
}
