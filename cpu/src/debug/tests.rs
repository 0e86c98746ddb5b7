use proptest::prelude::*;

use super::*;

const KERNEL: MovDrContext = MovDrContext {
    cpl: 0,
    cr4_de: false,
    long: true,
    rtm: false,
};

fn with(index: u8, address: u64, condition: Condition, length: Length) -> DebugRegisters {
    let mut registers = DebugRegisters::RESET;
    registers.addresses[usize::from(index)] = address;
    registers.control = Dr7::RESET
        .with_breakpoint(BreakpointIndex(index), condition, length)
        .0;
    registers
}

#[test]
fn fixed_bits_of_dr6_and_dr7_read_back_as_in_the_manual() {
    let mut r = DebugRegisters::RESET;
    for (number, value, found) in [
        (6, 0, 0xffff_0ff0),
        (6, 0xffff_ffff, 0xffff_efff),
        (7, 0, 0x400),
        (7, 0xffff_dfff, 0xffff_07ff),
    ] {
        r.write(number, value, KERNEL).unwrap();
        assert_eq!(r.read(number, KERNEL), Ok(found));
    }
}

/// Rules DR-02, DR-05 and D6-07 with RTM.
#[test]
fn dr6_and_dr7_have_their_rtm_bits_with_rtm() {
    let transactional = MovDrContext {
        rtm: true,
        ..KERNEL
    };
    let mut r = DebugRegisters::RESET;
    for (number, value, found) in [
        (6, 0, 0xfffe_0ff0),
        (6, 0xffff_ffff, 0xffff_efff),
        (7, 0xffff_dfff, 0xffff_0fff),
    ] {
        r.write(number, value, transactional).unwrap();
        assert_eq!(r.read(number, transactional), Ok(found));
    }
    r.record_conditions(Dr6::BS.bits());
    r.deliver(true);
    assert_eq!(r.status & Dr6::RTM.bits(), 0);
    r.deliver(false);
    assert_eq!(r.status & Dr6::RTM.bits(), Dr6::RTM.bits());
}

#[test]
fn mov_to_dr6_and_dr7_with_an_upper_half_faults() {
    let mut r = DebugRegisters::RESET;
    for number in [4, 5, 6, 7] {
        assert_eq!(
            r.write(number, 1 << 32, KERNEL),
            Err(MovDrFault::Protection)
        );
    }
    r.write(3, u64::MAX, KERNEL).unwrap();
    assert_eq!(r.addresses[3], u64::MAX);
    let narrow = MovDrContext {
        long: false,
        ..KERNEL
    };
    r.write(3, u64::MAX, narrow).unwrap();
    r.write(7, u64::MAX << 32 | 1, narrow).unwrap();
    assert_eq!((r.addresses[3], r.control), (0xffff_ffff, 0x401));
}

#[test]
fn mov_dr_raises_the_first_fault_in_order() {
    let mut r = DebugRegisters::RESET;
    r.control |= Dr7::GD;
    let user = MovDrContext { cpl: 3, ..KERNEL };
    let extended = MovDrContext {
        cr4_de: true,
        ..user
    };
    assert_eq!(r.read(4, extended), Err(MovDrFault::Undefined));
    assert_eq!(r.read(8, user), Err(MovDrFault::Undefined));
    assert_eq!(r.read(4, user), Err(MovDrFault::Protection));
    assert_eq!(r.write(6, u64::MAX, KERNEL), Err(MovDrFault::Detected));
    r.record_conditions(Dr6::BD.bits());
    r.deliver(false);
    assert_eq!(r.write(6, u64::MAX, KERNEL), Err(MovDrFault::Protection));
}

#[test]
fn data_breakpoints_match_as_in_the_manuals_example() {
    let mut r = with(0, 0x10001, Condition::ReadWrite, Length::One);
    r.addresses = [0x10001, 0x10002, 0x30002, 0x40005];
    r.control = Dr7(r.control)
        .with_breakpoint(BreakpointIndex(1), Condition::Write, Length::One)
        .with_breakpoint(BreakpointIndex(2), Condition::ReadWrite, Length::Two)
        .with_breakpoint(BreakpointIndex(3), Condition::Write, Length::Four)
        .0;
    for (address, len, write, hits) in [
        (0x10001, 1, false, 0b0001),
        (0x10000, 4, false, 0b0001),
        (0x10001, 2, true, 0b0011),
        (0x0fffa, 8, true, 0b0001),
        (0x30000, 4, false, 0b0100),
        (0x30000, 2, false, 0),
        (0x40004, 1, true, 0b1000),
        (0x40000, 4, true, 0),
        (0x40007, 8, true, 0b1000),
    ] {
        assert_eq!(r.data_hits(address, len, write), hits, "{address:x}");
    }
}

#[test]
fn data_breakpoint_matches_the_last_byte_of_the_address_space() {
    let r = with(0, u64::MAX, Condition::Write, Length::One);
    assert_eq!(r.data_hits(u64::MAX, 1, true), 1);
    assert_eq!(r.data_hits(u64::MAX - 3, 4, true), 1);
    assert_eq!(r.data_hits(u64::MAX - 3, 3, true), 0);
    let wide = with(0, u64::MAX, Condition::Write, Length::Eight);
    assert_eq!(wide.data_hits(u64::MAX - 7, 1, true), 1);
    assert_eq!(wide.data_hits(u64::MAX - 8, 1, true), 0);
}

#[test]
fn breakpoint_matches_only_its_own_kind_of_access() {
    let execute = with(2, 0x1000, Condition::Execute, Length::One);
    assert_eq!(execute.instruction_hits(0x1000), 0b0100);
    assert_eq!(execute.instruction_hits(0x1001), 0);
    assert_eq!(execute.data_hits(0x1000, 8, true), 0);
    assert_eq!(
        with(2, 0x1000, Condition::Execute, Length::Two).instruction_hits(0x1000),
        0
    );
    let io = with(0, 0x3f8, Condition::Io, Length::Eight);
    assert_eq!(io.io_hits(0x3fc, 1, true), 1);
    assert_eq!(io.io_hits(0x3fc, 1, false), 0);
    assert_eq!(io.data_hits(0x3f8, 8, true), 0);
    assert_eq!(
        with(0, 0x1_03f8, Condition::Io, Length::One).io_hits(0x3f8, 4, true),
        0
    );
}

#[test]
fn debug_exception_replaces_breakpoint_bits_and_keeps_the_rest() {
    let mut r = DebugRegisters::RESET;
    r.control |= Dr7::GD;
    r.record_conditions(Dr6::BS.bits() | 0b0011);
    r.deliver(false);
    assert_eq!((r.status, r.control), (0xffff_4ff3, 0x400));
    r.record_conditions(0b1000);
    assert_eq!(r.status, 0xffff_4ff8);
    r.control |= Dr7::GD;
    r.deliver(false);
    assert_eq!((r.status, r.control), (0xffff_4ff8, 0x400));
}

#[test]
fn task_switch_clears_local_enables() {
    let mut r = DebugRegisters::RESET;
    r.control = 0xffff_27ff;
    r.switch_task();
    assert_eq!(r.control, 0xffff_26aa);
}

/// An event that changes the registers.
#[derive(Clone, Debug)]
enum DebugEvent {
    Write(u8, u64, MovDrContext),
    Report(u64),
    Deliver,
    SwitchTask,
}

fn context() -> impl Strategy<Value = MovDrContext> {
    (
        prop_oneof![4 => Just(0_u8), 1 => Just(3)],
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(|(cpl, cr4_de, long)| MovDrContext {
            cpl,
            cr4_de,
            long,
            rtm: false,
        })
}

fn event() -> impl Strategy<Value = DebugEvent> {
    let value = prop_oneof![any::<u64>(), any::<u32>().prop_map(u64::from)];
    prop_oneof![
        4 => (0_u8..10, value, context()).prop_map(|(n, v, a)| DebugEvent::Write(n, v, a)),
        2 => any::<u64>().prop_map(DebugEvent::Report),
        1 => Just(DebugEvent::Deliver),
        1 => Just(DebugEvent::SwitchTask),
    ]
}

fn apply(r: &mut DebugRegisters, event: &DebugEvent) -> Result<(), MovDrFault> {
    match *event {
        DebugEvent::Write(number, value, context) => return r.write(number, value, context),
        DebugEvent::Report(conditions) => r.record_conditions(conditions),
        DebugEvent::Deliver => r.deliver(false),
        DebugEvent::SwitchTask => r.switch_task(),
    }
    Ok(())
}

proptest! {
    #[test]
    fn any_sequence_of_events_keeps_the_fixed_bits(
        events in prop::collection::vec(event(), 0..64),
    ) {
        let mut r = DebugRegisters::RESET;
        for event in &events {
            let before = r;
            if apply(&mut r, event).is_err() {
                prop_assert_eq!(r, before, "a faulting write changes nothing");
            }
            prop_assert_eq!(r.status & !Dr6::WRITABLE, Dr6::RESET);
            prop_assert_eq!(r.control & !Dr7::WRITABLE, Dr7::RESET.0);
        }
    }

    #[cfg(feature = "serde")]
    #[test]
    fn restored_state_equals_the_saved_one(
        events in prop::collection::vec(event(), 0..32),
        at in 0_usize..32,
    ) {
        let (mut original, mut restored) = (DebugRegisters::RESET, DebugRegisters::RESET);
        for (n, event) in events.iter().enumerate() {
            if n == at {
                let saved = serde_json::to_string(&restored).unwrap();
                restored = serde_json::from_str(&saved).unwrap();
            }
            prop_assert_eq!(apply(&mut original, event), apply(&mut restored, event));
        }
        prop_assert_eq!(original, restored);
    }

    #[test]
    fn access_matches_when_it_shares_a_byte_with_the_breakpoint(
        address in 0_u64..64,
        length in 0_u8..4,
        from in 0_u64..64,
        len in 1_u64..9,
        write: bool,
        kind in 0_u8..4,
    ) {
        let lengths = [Length::One, Length::Two, Length::Four, Length::Eight];
        let kinds = [Condition::Execute, Condition::Write, Condition::Io, Condition::ReadWrite];
        let (length, kind) = (usize::from(length), kinds[usize::from(kind)]);
        let size = 1_u64 << length;
        let r = with(1, address, kind, lengths[length]);
        let block = address / size * size..address / size * size + size;
        let touched = (from..from + len).any(|byte| block.contains(&byte));
        let data = kind == Condition::ReadWrite || kind == Condition::Write && write;
        prop_assert_eq!(r.data_hits(from, len, write) != 0, touched && data);
        let io = kind == Condition::Io;
        prop_assert_eq!(r.io_hits(u16::try_from(from).unwrap(), len, true) != 0, touched && io);
        let data = matches!(kind, Condition::Write | Condition::ReadWrite);
        prop_assert_eq!(r.has_data_breakpoint_on_page(address), data);
    }

    #[test]
    fn disabled_breakpoint_never_matches(dr7: u32, addresses: [u64; 4], at: u64, port: u16) {
        let control = u64::from(dr7) & Dr7::WRITABLE & !0xff | Dr7::RESET.0;
        let r = DebugRegisters { addresses, status: Dr6::RESET, control };
        let hits = r.instruction_hits(at) | r.data_hits(at, 8, true) | r.io_hits(port, 4, true);
        prop_assert_eq!(hits, 0);
    }
}
