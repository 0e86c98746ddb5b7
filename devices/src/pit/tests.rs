use super::*;
use crate::inspect::test::field;
use proptest::prelude::*;

/// One tick is one timer clock.
fn pit() -> Pit {
    Pit::new(&Clock::new_virtual(PIT_HZ))
}

fn program(pit: &mut Pit, channel: u16, control: u8, count: u16) {
    pit.write(0x43, u8::try_from(channel).unwrap() << 6 | 0x30 | control);
    for byte in count.to_le_bytes() {
        pit.write(0x40 + channel, byte);
    }
}

fn read_word(pit: &mut Pit, port: u16) -> u16 {
    let low = pit.read(port);
    u16::from_le_bytes([low, pit.read(port)])
}

/// The output of channel 0 in each of the clocks from 1 on.
fn outputs(pit: &mut Pit, clocks: u64) -> String {
    (1..=clocks)
        .map(|clock| {
            pit.advance(clock);
            if pit.irq() { '1' } else { '0' }
        })
        .collect()
}

#[test]
fn output_of_each_mode_matches_the_data_sheet() {
    // The count of 4 is written at clock 0 and loaded at clock 1.
    let table = [
        (0x0, "000011111111"),
        (0x4, "111011101110"),
        (0x6, "110011001100"),
        (0x8, "111101111111"),
        (0xc, "111011101110"),
        (0xe, "110011001100"),
    ];
    for (control, expected) in table {
        let mut pit = pit();
        program(&mut pit, 0, control, 4);
        assert_eq!(outputs(&mut pit, 12), expected, "control {control:#x}");
    }
}

#[test]
fn mode_3_with_an_odd_count_is_high_one_clock_longer() {
    let mut pit = pit();
    program(&mut pit, 0, 0x6, 5);
    assert_eq!(outputs(&mut pit, 10), "1110011100");
}

#[test]
fn modes_1_and_5_start_at_a_rising_gate() {
    for (control, before, after) in [(0x2, "11", "00001111"), (0xa, "11", "11110111")] {
        let mut pit = pit();
        program(&mut pit, 2, control, 4);
        let output = |pit: &mut Pit, from: u64, to: u64| -> String {
            (from..=to)
                .map(|clock| {
                    pit.advance(clock);
                    if pit.read(0x61) & 0x20 != 0 { '1' } else { '0' }
                })
                .collect()
        };
        assert_eq!(output(&mut pit, 1, 2), before, "control {control:#x}");
        pit.write(0x61, 1);
        assert_eq!(output(&mut pit, 3, 10), after, "control {control:#x}");
    }
}

#[test]
fn mode_0_stops_counting_while_gate_is_low() {
    let mut pit = pit();
    pit.write(0x61, 1);
    program(&mut pit, 2, 0, 100);
    pit.advance(11);
    pit.write(0x61, 0);
    pit.advance(1000);
    assert_eq!(read_word(&mut pit, 0x42), 90);
    pit.write(0x61, 1);
    pit.advance(1089);
    assert_eq!(pit.read(0x61) & 0x20, 0);
    pit.advance(1090);
    assert_eq!(pit.read(0x61) & 0x20, 0x20);
}

#[test]
fn mode_2_interrupts_every_period_without_drift() {
    let clock = Clock::new_virtual(3_000_000_000);
    let mut pit = Pit::new(&clock);
    program(&mut pit, 0, 0x4, 11_932);
    let rate = clock.rate(PIT_HZ);
    for period in 1..1000 {
        let due = rate.ticks(1 + period * 11_932);
        assert_eq!(pit.due(), Some(due));
        assert!(!pit.advance(due - 1));
        assert!(pit.advance(due));
    }
}

#[test]
fn mode_2_loads_a_new_count_at_the_end_of_the_period() {
    let mut pit = pit();
    program(&mut pit, 0, 0x4, 100);
    pit.advance(50);
    for byte in [30, 0] {
        pit.write(0x40, byte);
    }
    assert_eq!(read_word(&mut pit, 0x40), 51);
    assert_eq!(pit.due(), Some(101));
    pit.advance(101);
    assert_eq!(pit.due(), Some(131));
}

#[test]
fn latched_count_is_kept_until_it_is_read() {
    let mut pit = pit();
    program(&mut pit, 0, 0x4, 0x1234);
    pit.advance(1);
    pit.write(0x43, 0x00);
    pit.advance(0x35);
    pit.write(0x43, 0x00);
    assert_eq!(read_word(&mut pit, 0x40), 0x1234);
    assert_eq!(read_word(&mut pit, 0x40), 0x1200);
}

#[test]
fn read_back_returns_the_status_and_then_the_count() {
    let mut pit = pit();
    program(&mut pit, 0, 0x4, 0x1234);
    // Not loaded yet: the null-count bit.
    pit.write(0x43, 0xe2);
    assert_eq!(pit.read(0x40), 0xf4);
    pit.advance(1);
    pit.write(0x43, 0xc2);
    assert_eq!(pit.read(0x40), 0xb4);
    assert_eq!(read_word(&mut pit, 0x40), 0x1234);
}

#[test]
fn bcd_count_reads_as_decimal_digits() {
    let mut pit = pit();
    program(&mut pit, 0, 0x5, 0x1000);
    pit.advance(2);
    assert_eq!(read_word(&mut pit, 0x40), 0x0999);
    assert_eq!(pit.due(), Some(1001));
}

#[test]
fn count_of_zero_is_the_largest_count() {
    let mut pit = pit();
    program(&mut pit, 0, 0x4, 0);
    assert_eq!(pit.due(), Some(1 + 0x1_0000));
}

#[test]
fn single_byte_access_loads_one_byte() {
    let mut pit = pit();
    pit.write(0x43, 0x24);
    pit.write(0x40, 2);
    assert_eq!(pit.due(), Some(1 + 0x200));
    pit.advance(1);
    assert_eq!(pit.read(0x40), 2);
    assert_eq!(pit.read(0x40), 2);
}

#[test]
fn port_61h_refresh_bit_toggles_every_15_microseconds() {
    let mut pit = pit();
    assert_eq!(pit.read(0x61) & 0x10, 0);
    pit.advance(18);
    assert_eq!(pit.read(0x61) & 0x10, 0x10);
    pit.advance(36);
    assert_eq!(pit.read(0x61) & 0x10, 0);
}

proptest! {
    #[test]
    fn any_accesses_leave_a_state_that_restores(
        steps in prop::collection::vec(
            (0_usize..5, any::<u8>(), any::<bool>(),
             prop_oneof![4 => 0_u64..100_000, 1 => 0_u64..1 << 55]), 1..80),
    ) {
        let ports = [0x40, 0x41, 0x42, 0x43, 0x61];
        let clock = Clock::new_virtual(1_000_000);
        let mut pit = Pit::new(&clock);
        let mut now: u64 = 0;
        for (port, value, read, elapsed) in steps {
            now = now.saturating_add(elapsed);
            pit.advance(now);
            if read {
                pit.read(ports[port]);
            } else {
                pit.write(ports[port], value);
            }
            prop_assert!(pit.due().is_none_or(|due| due >= now), "{:?} at {now}", pit.due());
            let state = pit.save();
            prop_assert!(Pit::accepts_state(&state));
            let mut copy = Pit::new(&clock);
            copy.restore(&state);
            prop_assert_eq!(copy.save(), state);
            prop_assert_eq!(copy.irq(), pit.irq());
        }
    }

    #[test]
    fn irq_rises_exactly_when_it_is_due(control in 0_u8..8, count in 2_u16..300) {
        let mut pit = pit();
        program(&mut pit, 0, control << 1, count);
        let mut level = pit.irq();
        for clock in 1..1000 {
            let due = pit.due();
            let rose = pit.advance(clock);
            prop_assert_eq!(rose, due == Some(clock));
            prop_assert!(rose || level || !pit.irq(), "rose without a report at {}", clock);
            prop_assert!(!rose || pit.irq());
            level = pit.irq();
        }
    }
}

#[test]
fn inspect_shows_mode_count_and_output() {
    let mut pit = pit();
    program(&mut pit, 0, 0x4, 0x1234);
    pit.advance(0x35);
    assert_eq!(field(&pit, "channel 0 mode"), "RateGenerator");
    assert_eq!(field(&pit, "channel 0 count"), "4660");
    assert_eq!(field(&pit, "channel 0 value"), "4608");
    assert_eq!(field(&pit, "channel 0 running"), "yes");
    assert_eq!(field(&pit, "channel 2 gate"), "0");
    assert_eq!(field(&pit, "port 61H"), "0x20");
}

#[cfg(feature = "serde")]
#[test]
fn saved_state_with_an_invalid_mode_is_rejected() {
    let mut state = serde_json::to_value(pit().save()).unwrap();
    assert_eq!(state["channels"][0]["mode"], 3);
    state["channels"][0]["mode"] = 6.into();
    assert!(serde_json::from_value::<PitState>(state).is_err());
}
