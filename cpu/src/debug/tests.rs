use proptest::prelude::*;

use super::*;

const KERNEL: Access = Access {
    cpl: 0,
    extensions: false,
    long: true,
    rtm: false,
};

fn with(slot: u8, address: u64, condition: Condition, length: Length) -> Registers {
    let mut registers = Registers::RESET;
    registers.addresses[usize::from(slot)] = address;
    registers.control = Dr7::RESET
        .with_breakpoint(BreakpointIndex(slot), condition, length)
        .0;
    registers
}

#[test]
fn fixed_bits_read_back_as_the_manual_says() {
    let mut r = Registers::RESET;
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
fn rtm_has_a_bit_in_dr6_and_one_in_dr7() {
    let transactional = Access {
        rtm: true,
        ..KERNEL
    };
    let mut r = Registers::RESET;
    for (number, value, found) in [
        (6, 0, 0xfffe_0ff0),
        (6, 0xffff_ffff, 0xffff_efff),
        (7, 0xffff_dfff, 0xffff_0fff),
    ] {
        r.write(number, value, transactional).unwrap();
        assert_eq!(r.read(number, transactional), Ok(found));
    }
    r.report(Dr6::BS.bits());
    r.enter(true);
    assert_eq!(r.status & Dr6::RTM.bits(), 0);
    r.enter(false);
    assert_eq!(r.status & Dr6::RTM.bits(), Dr6::RTM.bits());
}

#[test]
fn upper_halves_are_refused_in_dr6_and_dr7_only() {
    let mut r = Registers::RESET;
    for number in [4, 5, 6, 7] {
        assert_eq!(r.write(number, 1 << 32, KERNEL), Err(Refusal::Protection));
    }
    r.write(3, u64::MAX, KERNEL).unwrap();
    assert_eq!(r.addresses[3], u64::MAX);
    let narrow = Access {
        long: false,
        ..KERNEL
    };
    r.write(3, u64::MAX, narrow).unwrap();
    r.write(7, u64::MAX << 32 | 1, narrow).unwrap();
    assert_eq!((r.addresses[3], r.control), (0xffff_ffff, 0x401));
}

#[test]
fn of_several_refusals_the_first_in_order_counts() {
    let mut r = Registers::RESET;
    r.control |= Dr7::GD;
    let user = Access { cpl: 3, ..KERNEL };
    let extended = Access {
        extensions: true,
        ..user
    };
    assert_eq!(r.read(4, extended), Err(Refusal::Undefined));
    assert_eq!(r.read(8, user), Err(Refusal::Undefined));
    assert_eq!(r.read(4, user), Err(Refusal::Protection));
    assert_eq!(r.write(6, u64::MAX, KERNEL), Err(Refusal::Detected));
    r.report(Dr6::BD.bits());
    r.enter(false);
    assert_eq!(r.write(6, u64::MAX, KERNEL), Err(Refusal::Protection));
}

#[test]
fn the_manuals_example_matches_as_it_says() {
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
        assert_eq!(r.accessed(address, len, write), hits, "{address:x}");
    }
}

#[test]
fn the_last_bytes_of_the_address_space_can_be_watched() {
    let r = with(0, u64::MAX, Condition::Write, Length::One);
    assert_eq!(r.accessed(u64::MAX, 1, true), 1);
    assert_eq!(r.accessed(u64::MAX - 3, 4, true), 1);
    assert_eq!(r.accessed(u64::MAX - 3, 3, true), 0);
    let wide = with(0, u64::MAX, Condition::Write, Length::Eight);
    assert_eq!(wide.accessed(u64::MAX - 7, 1, true), 1);
    assert_eq!(wide.accessed(u64::MAX - 8, 1, true), 0);
}

#[test]
fn only_their_own_kind_of_access_meets_breakpoints() {
    let execute = with(2, 0x1000, Condition::Execute, Length::One);
    assert_eq!(execute.executed(0x1000), 0b0100);
    assert_eq!(execute.executed(0x1001), 0);
    assert_eq!(execute.accessed(0x1000, 8, true), 0);
    assert_eq!(
        with(2, 0x1000, Condition::Execute, Length::Two).executed(0x1000),
        0
    );
    let io = with(0, 0x3f8, Condition::Io, Length::Eight);
    assert_eq!(io.port(0x3fc, 1, true), 1);
    assert_eq!(io.port(0x3fc, 1, false), 0);
    assert_eq!(io.accessed(0x3f8, 8, true), 0);
    assert_eq!(
        with(0, 0x1_03f8, Condition::Io, Length::One).port(0x3f8, 4, true),
        0
    );
}

#[test]
fn a_debug_exception_replaces_breakpoints_and_keeps_the_rest() {
    let mut r = Registers::RESET;
    r.control |= Dr7::GD;
    r.report(Dr6::BS.bits() | 0b0011);
    r.enter(false);
    assert_eq!((r.status, r.control), (0xffff_4ff3, 0x400));
    r.report(0b1000);
    assert_eq!(r.status, 0xffff_4ff8);
    r.control |= Dr7::GD;
    r.enter(false);
    assert_eq!((r.status, r.control), (0xffff_4ff8, 0x400));
}

#[test]
fn a_task_switch_clears_local_enables() {
    let mut r = Registers::RESET;
    r.control = 0xffff_27ff;
    r.switch_task();
    assert_eq!(r.control, 0xffff_26aa);
}

/// What may happen to the registers.
#[derive(Clone, Debug)]
enum Step {
    Write(u8, u64, Access),
    Report(u64),
    Enter,
    Task,
}

fn access() -> impl Strategy<Value = Access> {
    (
        prop_oneof![4 => Just(0_u8), 1 => Just(3)],
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(|(cpl, extensions, long)| Access {
            cpl,
            extensions,
            long,
            rtm: false,
        })
}

fn step() -> impl Strategy<Value = Step> {
    let value = prop_oneof![any::<u64>(), any::<u32>().prop_map(u64::from)];
    prop_oneof![
        4 => (0_u8..10, value, access()).prop_map(|(n, v, a)| Step::Write(n, v, a)),
        2 => any::<u64>().prop_map(Step::Report),
        1 => Just(Step::Enter),
        1 => Just(Step::Task),
    ]
}

fn apply(r: &mut Registers, step: &Step) -> Result<(), Refusal> {
    match *step {
        Step::Write(number, value, access) => return r.write(number, value, access),
        Step::Report(conditions) => r.report(conditions),
        Step::Enter => r.enter(false),
        Step::Task => r.switch_task(),
    }
    Ok(())
}

proptest! {
    #[test]
    fn any_sequence_keeps_the_fixed_bits(steps in prop::collection::vec(step(), 0..64)) {
        let mut r = Registers::RESET;
        for step in &steps {
            let before = r;
            if apply(&mut r, step).is_err() {
                prop_assert_eq!(r, before, "a refused write changes nothing");
            }
            prop_assert_eq!(r.status & !STATUS_STORED, Dr6::RESET);
            prop_assert_eq!(r.control & !CONTROL_STORED, Dr7::RESET.0);
        }
    }

    #[test]
    fn saving_and_restoring_changes_nothing(steps in prop::collection::vec(step(), 0..32), at in 0_usize..32) {
        let (mut kept, mut restored) = (Registers::RESET, Registers::RESET);
        for (n, step) in steps.iter().enumerate() {
            if n == at {
                restored = serde_json::from_str(&serde_json::to_string(&restored).unwrap()).unwrap();
            }
            prop_assert_eq!(apply(&mut kept, step), apply(&mut restored, step));
        }
        prop_assert_eq!(kept, restored);
    }

    #[test]
    fn an_access_matches_when_it_shares_a_byte(
        address in 0_u64..64, length in 0_u8..4, from in 0_u64..64, len in 1_u64..9, write: bool, kind in 0_u8..4,
    ) {
        let lengths = [Length::One, Length::Two, Length::Four, Length::Eight];
        let kinds = [Condition::Execute, Condition::Write, Condition::Io, Condition::ReadWrite];
        let (length, kind) = (usize::from(length), kinds[usize::from(kind)]);
        let size = 1_u64 << length;
        let r = with(1, address, kind, lengths[length]);
        let watched = address / size * size..address / size * size + size;
        let touched = (from..from + len).any(|byte| watched.contains(&byte));
        let data = kind == Condition::ReadWrite || kind == Condition::Write && write;
        prop_assert_eq!(r.accessed(from, len, write) != 0, touched && data);
        let io = kind == Condition::Io;
        prop_assert_eq!(r.port(u16::try_from(from).unwrap(), len, true) != 0, touched && io);
        prop_assert!(r.watches_page(address) == matches!(kind, Condition::Write | Condition::ReadWrite));
    }

    #[test]
    fn what_is_not_enabled_never_matches(dr7: u32, addresses: [u64; 4], at: u64, port: u16) {
        let control = u64::from(dr7) & CONTROL_STORED & !0xff | Dr7::RESET.0;
        let r = Registers { addresses, status: Dr6::RESET, control };
        prop_assert_eq!(r.executed(at) | r.accessed(at, 8, true) | r.port(port, 4, true), 0);
    }
}
