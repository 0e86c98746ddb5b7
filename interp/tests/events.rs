//! Tests exceptions, NMI blocking, and software interrupts of virtual-8086 mode.

mod common;

use common::{CODE, Machine, Ram, gate, long_mode, state, vcpu};
use hindsight_cpu::state::{CpuState, Segment, seg};
use hindsight_interp::{BranchClass, Exit, Observe, SystemEvent};

const HANDLER: usize = CODE + 0x3000;
const HLT: u8 = 0xf4;

/// Runs 64-bit code; returns the vector of its exception, and the state there.
fn raised(code: &[u8], nmi_blocked: bool) -> (u64, CpuState) {
    let ram = Ram::new(4 << 20);
    let mut st = long_mode(&ram, 0);
    st.events.nmi_blocked = nmi_blocked;
    for vector in 0..32 {
        gate(&ram, vector, (HANDLER + vector) as u64, 0);
    }
    ram.write(HANDLER, &[HLT; 32]);
    ram.write(CODE, code);
    let mut cpu = vcpu(&ram, &st);
    assert_eq!(cpu.run(&mut Machine::default(), 100), Exit::Halted);
    let st = state(&mut cpu);
    (st.rip - 1 - HANDLER as u64, st)
}

#[test]
fn instruction_of_more_than_15_bytes_is_a_general_protection_fault() {
    for more in [0, 20] {
        let long = [vec![0x66; 15], vec![0x90; 1 + more]].concat();
        assert_eq!(raised(&long, false).0, 13);
        // Undefined, and of 14 bytes.
        let undefined = [vec![0x66; 12], vec![0x0f, 0x0a], vec![0x90; 2 + more]].concat();
        assert_eq!(raised(&undefined, false).0, 6);
    }
}

#[test]
fn undefined_instruction_at_the_end_of_a_page_is_undefined() {
    for left in 2..15 {
        // jmp to the last bytes of the page; those are undefined.
        let mut code = vec![0x90; 0x1000 - left];
        code.extend([0x0f, 0x0a].iter().chain(&[0x90; 13]));
        code[..5].copy_from_slice(&[0xe9, 0, 0, 0, 0]);
        let distance = u32::try_from(0x1000 - left - 5).unwrap();
        code[1..5].copy_from_slice(&distance.to_le_bytes());
        assert_eq!(raised(&code, false).0, 6, "{left} bytes");
    }
}

#[test]
fn iret_that_ends_an_nmi_reports_that_nmis_are_unblocked() {
    let ram = Ram::new(4 << 20);
    let mut st = long_mode(&ram, 0);
    gate(&ram, 2, HANDLER as u64, 0);
    // iretq; in the code: hlt.
    ram.write(HANDLER, &[0x48, 0xcf]);
    ram.write(CODE, &[0x90, HLT]);
    for (nmi, windows) in [(true, 1), (false, 0)] {
        st.rip = CODE as u64;
        let mut machine = Machine {
            nmi,
            ..Machine::default()
        };
        let mut cpu = vcpu(&ram, &st);
        assert_eq!(cpu.run(&mut machine, 100), Exit::Halted);
        assert_eq!((machine.nmi, machine.nmi_windows), (false, windows));
    }
}

#[test]
fn iret_that_faults_lets_nmis_in() {
    // push 0, five times; iretq
    let code = [[0x6a, 0].repeat(5), vec![0x48, 0xcf]].concat();
    let (vector, st) = raised(&code, true);
    assert_eq!(vector, 13);
    assert!(!st.events.nmi_blocked);
    let (vector, st) = raised(&[0x0f, 0x0b], true);
    assert_eq!(vector, 6);
    assert!(
        st.events.nmi_blocked,
        "after a fault of another instruction"
    );
}

#[test]
fn redirected_interrupt_of_virtual_8086_mode_is_a_branch_that_ends_single_steps() {
    const TSS: usize = 0x9_0000;
    let ram = Ram::new(4 << 20);
    let mut st = CpuState::reset();
    let real = |selector: u16| Segment {
        selector,
        base: u64::from(selector) << 4,
        limit: 0xffff,
        access: 0xf3,
        unusable: false,
    };
    st.seg = [real(0x4000); 6];
    st.seg[seg::CS] = real(0x5000);
    (st.rip, st.gpr[4]) = (0, 0x8000);
    // VM, IOPL 3 and TF; PE; VME; a bitmap that redirects everything.
    (st.rflags, st.cr0, st.cr4) = (0x2_3102, 0x11, 1);
    st.idtr.limit = 0;
    st.tr = Segment {
        selector: 8,
        base: TSS as u64,
        limit: 0xff,
        access: 0x8b,
        unusable: false,
    };
    ram.write(TSS + 0x66, &0x88_u16.to_le_bytes());
    ram.write(0x50 * 4, &[0x10, 0, 0, 0x50]);
    // int 0x50, to 5000:10, where HLT is not allowed.
    ram.write(0x5_0000, &[0xcd, 0x50]);
    ram.write(0x5_0010, &[HLT]);
    let mut observe = Observe::default();
    observe.branches = true;
    let mut machine = Machine {
        observe,
        ..Machine::default()
    };
    let mut cpu = vcpu(&ram, &st);
    assert_eq!(cpu.run(&mut machine, 100), Exit::Shutdown);
    let st = state(&mut cpu);
    assert_eq!((st.seg[seg::CS].selector, st.rip), (0x5000, 0x10));
    assert_eq!(st.dr6 & 0x4000, 0, "no single-step");
    let branches = machine.branches.iter().map(|b| (b.from, b.to, b.class));
    let expected = (0, 0x10, BranchClass::SoftwareInterrupt);
    assert_eq!(branches.collect::<Vec<_>>(), [expected]);
}

#[test]
fn system_events_are_reported_with_their_values_only_on_request() {
    let run = |system_events| {
        let ram = Ram::new(4 << 20);
        let st = long_mode(&ram, 0);
        let code: &[&[u8]] = &[
            &[0x0f, 0x20, 0xd8],             // mov rax, cr3
            &[0x0f, 0x22, 0xd8],             // mov cr3, rax
            &[0xb9, 2, 1, 0, 0xc0],          // mov ecx, IA32_KERNEL_GS_BASE
            &[0xb8, 0x78, 0x56, 0x34, 0x12], // mov eax, 0x12345678
            &[0x31, 0xd2],                   // xor edx, edx
            &[0x0f, 0x30],                   // wrmsr
            &[0x0f, 0x32],                   // rdmsr
            &[HLT],
        ];
        ram.write(CODE, &code.concat());
        let mut observe = Observe::default();
        observe.system_events = system_events;
        let mut machine = Machine {
            observe,
            ..Machine::default()
        };
        assert_eq!(vcpu(&ram, &st).run(&mut machine, 100), Exit::Halted);
        (st.cr3, machine.system_events)
    };
    assert_eq!(run(false).1, []);
    let (cr3, events) = run(true);
    let index = 0xc000_0102;
    let value = 0x1234_5678;
    let expected = [
        (
            1,
            SystemEvent::ControlRegister {
                number: 3,
                value: cr3,
            },
        ),
        (5, SystemEvent::MsrWritten { index, value }),
        (6, SystemEvent::MsrRead { index, value }),
    ];
    assert_eq!(events, expected);
}
