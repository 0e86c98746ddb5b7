//! Tests the stop conditions of a debugger outside the machine.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{CODE, Machine, Ram, TABLES, gate, long_mode, state, vcpu};
use hindsight_cpu::state::CpuState;
use hindsight_cpu::stops::{MsrStops, PortWatchpoint, StopConditions, StopHit, Watchpoint};
use hindsight_interp::{Exit, Vcpu};

/// inc rax; mov [rbx], rax; inc rcx; jmp to the start.
const LOOP: [u8; 11] = [
    0x48, 0xff, 0xc0, 0x48, 0x89, 0x03, 0x48, 0xff, 0xc1, 0xeb, 0xf5,
];
const START: u64 = CODE as u64;
const STORE: u64 = START + 3;
const COUNT: u64 = START + 6;
const DATA: u64 = 0x5_0000;

struct Rig {
    ram: Ram,
    machine: Machine,
    vcpu: Vcpu,
}

impl Rig {
    fn new(code: &[u8], change: impl FnOnce(&Ram, &mut CpuState)) -> Self {
        let ram = Ram::new(1 << 20);
        ram.write(CODE, code);
        let mut st = long_mode(&ram, 0);
        st.rip = START;
        st.gpr[3] = DATA;
        change(&ram, &mut st);
        let vcpu = vcpu(&ram, &st);
        Self {
            ram,
            machine: Machine::default(),
            vcpu,
        }
    }

    fn run(&mut self, budget: u64) -> Exit {
        self.vcpu.run(&mut self.machine, budget)
    }

    fn step(&mut self) -> Exit {
        self.vcpu.step(&mut self.machine, true)
    }

    fn state(&mut self) -> CpuState {
        state(&mut self.vcpu)
    }
}

fn execute(list: &[u64]) -> StopConditions {
    let mut stops = StopConditions::default();
    stops.execute = list.to_vec();
    stops
}

fn watch(at: u64, len: u64, read: bool, write: bool) -> Watchpoint {
    Watchpoint {
        at,
        len,
        read,
        write,
    }
}

#[test]
fn breakpoint_in_code_that_already_runs() {
    let mut rig = Rig::new(&LOOP, |_, _| {});
    assert_eq!(rig.run(10_000), Exit::Budget);
    rig.vcpu.set_stops(&execute(&[COUNT]));
    assert_eq!(rig.run(10_000), Exit::Stop(StopHit::Execute(COUNT)));
    let first = rig.state();
    assert_eq!(first.rip, COUNT);
    assert_eq!(
        rig.run(10_000),
        Exit::Stop(StopHit::Execute(COUNT)),
        "still there"
    );
    assert_eq!(rig.state().gpr, first.gpr);
    for more in 1..50 {
        assert_eq!(rig.step(), Exit::Stepped);
        assert_eq!(rig.state().rip, COUNT + 3);
        assert_eq!(rig.run(10_000), Exit::Stop(StopHit::Execute(COUNT)));
        assert_eq!(rig.state().gpr[0], first.gpr[0] + more);
    }
    rig.vcpu.set_stops(&StopConditions::default());
    assert_eq!(rig.run(10_000), Exit::Budget);
}

#[test]
fn breakpoints_are_many_and_go_by_linear_address() {
    // The second 2 MiB of linear addresses show the first 2 MiB of memory.
    const ALIAS: u64 = 0x20_0000;
    let mut rig = Rig::new(&LOOP, |ram, _| ram.write_u64(TABLES + 0x2000 + 8, 0x87));
    let many: Vec<u64> = (0..1000).map(|i| 0x4000_0000 + i * 0x1003).collect();
    let mut stops = execute(&many);
    stops.execute.push(ALIAS + STORE);
    rig.vcpu.set_stops(&stops);
    assert_eq!(rig.run(1000), Exit::Budget, "not at this address");
    let mut st = rig.state();
    st.rip += ALIAS;
    rig.vcpu.load(&st);
    assert_eq!(rig.run(1000), Exit::Stop(StopHit::Execute(ALIAS + STORE)));
}

#[test]
fn watches_stop_behind_the_access_and_are_more_than_four() {
    let mut rig = Rig::new(&LOOP, |_, _| {});
    let many = (0..100).map(|i| watch(0x6_0000 + i * 8, 8, true, true));
    let mut stops = StopConditions::default();
    stops.watchpoints = many.collect();
    stops.watchpoints.push(watch(DATA, 4, true, false));
    rig.vcpu.set_stops(&stops);
    assert_eq!(rig.run(1000), Exit::Budget, "written, not read");
    let last = watch(DATA + 7, 2, false, true);
    stops.watchpoints.push(last);
    rig.vcpu.set_stops(&stops);
    let hit = StopHit::Watchpoint {
        watchpoint: last,
        at: DATA,
        write: true,
    };
    assert_eq!(rig.run(1000), Exit::Stop(hit));
    let st = rig.state();
    assert_eq!(st.rip, COUNT);
    assert_eq!(rig.ram.read_u64(0x5_0000), st.gpr[0]);
    assert_eq!((st.dr7, st.dr6), (0x400, 0xffff_0ff0));
    rig.vcpu.set_stops(&StopConditions::default());
    assert_eq!(rig.run(1000), Exit::Budget);
}

#[test]
fn watch_stops_a_repeated_store_in_its_middle() {
    // rep stosb; nop
    let mut rig = Rig::new(&[0xf3, 0xaa, 0x90, 0xeb, 0xfe], |_, st| {
        (st.gpr[7], st.gpr[1], st.gpr[0]) = (DATA, 0x100, 0x55);
    });
    let watched = watch(DATA + 0x10, 1, false, true);
    let mut stops = StopConditions::default();
    stops.watchpoints = vec![watched];
    rig.vcpu.set_stops(&stops);
    let hit = StopHit::Watchpoint {
        watchpoint: watched,
        at: DATA + 0x10,
        write: true,
    };
    assert_eq!(rig.run(1000), Exit::Stop(hit));
    let st = rig.state();
    assert_eq!((st.rip, st.gpr[7], st.gpr[1]), (START, DATA + 0x11, 0xef));
    assert_eq!(rig.run(1000), Exit::Budget);
    assert_eq!(rig.ram.read(0x5_00ff, 1), [0x55]);
}

#[test]
fn exception_is_seen_before_its_delivery_and_delivered_then() {
    const HANDLER: u64 = START + 0x100;
    // ud2
    let mut rig = Rig::new(&[0x0f, 0x0b], |ram, _| {
        gate(ram, 6, HANDLER, 0);
        ram.write(CODE + 0x100, &[0xeb, 0xfe]);
    });
    let mut stops = StopConditions::default();
    stops.exceptions = 1 << 6;
    rig.vcpu.set_stops(&stops);
    let hit = StopHit::Exception {
        vector: 6,
        code: None,
    };
    assert_eq!(rig.run(1000), Exit::Stop(hit));
    assert_eq!(rig.state().rip, START);
    assert_eq!(rig.step(), Exit::Stepped);
    assert_eq!(rig.state().rip, HANDLER);
    assert_eq!(rig.run(1000), Exit::Budget);
}

#[test]
fn ports_msrs_and_control_registers() {
    // in al, 0x60; out 0x61, al; wrmsr (STAR); mov cr3, rax; jmp to itself
    let code = [
        0xe4, 0x60, 0xe6, 0x61, 0x0f, 0x30, 0x48, 0x89, 0xf0, 0x0f, 0x22, 0xd8, 0xeb, 0xfe,
    ];
    let mut rig = Rig::new(&code, |_, st| {
        (st.gpr[1], st.gpr[2], st.gpr[6]) = (0xc000_0081, 7, TABLES as u64);
    });
    let mut stops = StopConditions::default();
    stops.ports = vec![PortWatchpoint {
        first: 0x60,
        last: 0x60,
        read: true,
        write: false,
    }];
    stops.msrs = MsrStops::Only(vec![0xc000_0081]);
    stops.controls = 1 << 3;
    rig.vcpu.set_stops(&stops);
    let port = StopHit::Port {
        port: 0x60,
        write: false,
    };
    let msr = StopHit::Msr {
        index: 0xc000_0081,
        value: 7 << 32 | 0x60,
    };
    let control = StopHit::Control {
        number: 3,
        value: TABLES as u64,
    };
    for (hit, rip) in [(port, 2), (msr, 6), (control, 12)] {
        assert_eq!(rig.run(1000), Exit::Stop(hit));
        assert_eq!(rig.state().rip, START + rip);
    }
    assert_eq!(rig.run(1000), Exit::Budget);
}

#[test]
fn quiet_steps_leave_interrupts_waiting() {
    const HANDLER: u64 = START + 0x100;
    let mut rig = Rig::new(&LOOP, |ram, st| {
        gate(ram, 0x40, HANDLER, 0);
        ram.write(CODE + 0x100, &[0xeb, 0xfe]);
        st.rflags |= 0x200;
    });
    rig.machine.interrupts.push(0x40);
    assert_eq!(rig.step(), Exit::Stepped);
    assert_eq!(rig.state().rip, STORE);
    assert_eq!(rig.vcpu.step(&mut rig.machine, false), Exit::Stepped);
    assert_eq!(rig.state().rip, HANDLER);
}

#[test]
fn guest_keeps_its_own_breakpoints_and_single_step() {
    const HANDLER: u64 = START + 0x100;
    let mut rig = Rig::new(&LOOP, |ram, st| {
        gate(ram, 1, HANDLER, 0);
        ram.write(CODE + 0x100, &[0xeb, 0xfe]);
        (st.dr[0], st.dr7) = (STORE, 0x401);
    });
    rig.vcpu.set_stops(&execute(&[STORE]));
    assert_eq!(rig.run(1000), Exit::Stop(StopHit::Execute(STORE)));
    let st = rig.state();
    assert_eq!((st.rip, st.dr6, st.dr7), (STORE, 0xffff_0ff0, 0x401));
    assert_eq!(rig.step(), Exit::Stepped, "the guest's #DB");
    let st = rig.state();
    assert_eq!((st.rip, st.dr6 & 0xf), (HANDLER, 1));

    let mut rig = Rig::new(&LOOP, |ram, st| {
        gate(ram, 1, HANDLER, 0);
        ram.write(CODE + 0x100, &[0xeb, 0xfe]);
        st.rflags |= 0x100;
    });
    assert_eq!(rig.step(), Exit::Stepped);
    let st = rig.state();
    assert_eq!(
        (st.rip, st.dr6 >> 14 & 1),
        (HANDLER, 1),
        "TF is the guest's"
    );
    let frame = usize::try_from(st.gpr[4]).unwrap();
    assert_eq!(rig.ram.read_u64(frame), STORE);
}

#[test]
fn a_stop_sees_the_flags_of_an_instruction_whose_flags_are_set_again() {
    // xor eax, eax; sub dword [rbx], 1; cmp eax, eax; jmp to itself.
    const CODE_BYTES: [u8; 9] = [0x31, 0xc0, 0x83, 0x2b, 0x01, 0x39, 0xc0, 0xeb, 0xfe];
    const AFTER: u64 = START + 5;
    const HANDLER: u64 = START + 0x100;
    /// CF, PF, AF and SF, of 0 - 1.
    const FLAGS: u64 = 0x95;
    const ARITHMETIC: u64 = 0x8d5;
    let mut watches = StopConditions::default();
    watches.watchpoints = vec![watch(DATA, 4, false, true)];
    let mut rig = Rig::new(&CODE_BYTES, |_, _| {});
    rig.vcpu.set_stops(&watches);
    assert!(matches!(rig.run(1000), Exit::Stop(_)));
    let st = rig.state();
    assert_eq!(
        (st.rip, st.rflags & ARITHMETIC),
        (AFTER, FLAGS),
        "a debugger's watchpoint"
    );

    let mut rig = Rig::new(&CODE_BYTES, |ram, st| {
        gate(ram, 1, HANDLER, 0);
        ram.write(CODE + 0x100, &[0xeb, 0xfe]);
        // Writes of four bytes.
        (st.dr[0], st.dr7) = (DATA, 0x000d_0401);
    });
    assert_eq!(rig.run(1000), Exit::Budget);
    let st = rig.state();
    assert_eq!((st.rip, st.dr6 & 0xf), (HANDLER, 1), "the guest's own");
    let frame = usize::try_from(st.gpr[4]).unwrap();
    assert_eq!(rig.ram.read_u64(frame), AFTER);
    assert_eq!(rig.ram.read_u64(frame + 16) & ARITHMETIC, FLAGS);
}

#[test]
fn breakpoints_in_other_pages_do_not_split_blocks() {
    let decoded = |stops: &StopConditions| {
        let mut rig = Rig::new(&LOOP, |_, _| {});
        rig.vcpu.set_stops(stops);
        assert_eq!(rig.run(10_000), Exit::Budget);
        rig.vcpu.stats().blocks
    };
    let other_page: Vec<u64> = (0x4000_0000..0x4000_1000).collect();
    let none = decoded(&StopConditions::default());
    assert_eq!(decoded(&execute(&other_page)), none);
    // Not where an instruction begins.
    assert_eq!(decoded(&execute(&[STORE + 1])), none);
    assert!(decoded(&execute(&[START + 0x800, COUNT - 0x1000])) == none);
}

#[test]
fn each_linear_address_of_a_page_has_its_own_breakpoints() {
    // The second 2 MiB of linear addresses show the first 2 MiB of memory.
    const ALIAS: u64 = 0x20_0000;
    let mut rig = Rig::new(&LOOP, |ram, _| ram.write_u64(TABLES + 0x2000 + 8, 0x87));
    rig.vcpu
        .set_stops(&execute(&[START + 0x800, ALIAS + COUNT]));
    for _ in 0..3 {
        assert_eq!(rig.run(1000), Exit::Budget);
        let mut st = rig.state();
        st.rip |= ALIAS;
        rig.vcpu.load(&st);
        let hit = StopHit::Execute(ALIAS + COUNT);
        assert_eq!(rig.run(1000), Exit::Stop(hit));
        let mut st = rig.state();
        st.rip -= ALIAS;
        rig.vcpu.load(&st);
    }
    rig.vcpu.set_stops(&execute(&[STORE, ALIAS + COUNT]));
    assert_eq!(rig.run(1000), Exit::Stop(StopHit::Execute(STORE)));
}

#[test]
fn ten_thousand_watchpoints_stop_only_at_their_bytes() {
    let mut rig = Rig::new(&LOOP, |_, _| {});
    // All neighbours the written word, and the word itself for reads.
    let neighbours = |i: u64| {
        [
            watch(DATA - 8 - i * 8, 8, true, true),
            watch(DATA + 8 + i * 8, 8, true, true),
        ]
    };
    let mut stops = StopConditions::default();
    stops.watchpoints = (0..5000).flat_map(neighbours).collect();
    stops.watchpoints.push(watch(DATA, 8, true, false));
    rig.vcpu.set_stops(&stops);
    assert_eq!(rig.run(100_000), Exit::Budget);
    let mut st = rig.state();
    st.gpr[3] = DATA + 1;
    rig.vcpu.load(&st);
    assert!(matches!(rig.run(1000), Exit::Stop(StopHit::Watchpoint { at, .. }) if at == DATA + 1));
}
