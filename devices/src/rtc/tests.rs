use super::regs::index::{A, B, C, D};
use super::*;
use crate::inspect::test::field;
use proptest::prelude::*;

/// 2024-02-28 23:59:58, a Wednesday.
const EPOCH: i64 = 1_709_164_798;

/// One tick is one oscillator clock.
fn rtc() -> Rtc {
    let config = RtcConfig {
        epoch_seconds: EPOCH,
        memory_below_4g: 128 << 20,
        memory_above_4g: 1 << 30,
    };
    Rtc::new(&config, &Clock::new_virtual(RTC_HZ))
}

fn get(rtc: &mut Rtc, index: u8) -> u8 {
    rtc.write(0x70, index);
    rtc.read(0x71)
}

fn set(rtc: &mut Rtc, index: u8, value: u8) {
    rtc.write(0x70, index);
    rtc.write(0x71, value);
}

/// Century, year, month, day, hour, minute, second, day of the week.
fn time(rtc: &mut Rtc) -> [u8; 8] {
    [0x32, 9, 8, 7, 4, 2, 0, 6].map(|index| get(rtc, index))
}

#[test]
fn time_in_bcd_counts_a_leap_day() {
    let mut rtc = rtc();
    assert_eq!(
        time(&mut rtc),
        [0x20, 0x24, 0x02, 0x28, 0x23, 0x59, 0x58, 4]
    );
    rtc.advance(2 * RTC_HZ);
    assert_eq!(
        time(&mut rtc),
        [0x20, 0x24, 0x02, 0x29, 0x00, 0x00, 0x00, 5]
    );
    rtc.advance((2 + 86_400) * RTC_HZ);
    assert_eq!(
        time(&mut rtc),
        [0x20, 0x24, 0x03, 0x01, 0x00, 0x00, 0x00, 6]
    );
}

#[test]
fn time_in_binary_and_12_hours_has_a_pm_bit() {
    let mut rtc = rtc();
    set(&mut rtc, B, RegisterB::BINARY.bits());
    assert_eq!(time(&mut rtc), [20, 24, 2, 28, 0x80 | 11, 59, 58, 4]);
    rtc.advance(2 * RTC_HZ);
    assert_eq!(get(&mut rtc, 4), 12);
}

#[test]
fn time_set_under_the_set_bit_continues_from_there() {
    let mut rtc = rtc();
    set(&mut rtc, B, (RegisterB::SET | RegisterB::HOURS_24).bits());
    let date = [0x32, 9, 8, 7, 4, 2, 0, 6]
        .into_iter()
        .zip([0x19, 0x99, 0x12, 0x31, 0x23, 0x59, 0x59, 6]);
    for (index, value) in date {
        set(&mut rtc, index, value);
    }
    rtc.advance(10 * RTC_HZ);
    assert_eq!(get(&mut rtc, 0), 0x59);
    set(&mut rtc, B, RegisterB::HOURS_24.bits());
    rtc.advance(11 * RTC_HZ);
    assert_eq!(
        time(&mut rtc),
        [0x20, 0x00, 0x01, 0x01, 0x00, 0x00, 0x00, 7]
    );
}

#[test]
fn divider_out_of_reset_updates_after_half_a_second() {
    let mut rtc = rtc();
    set(&mut rtc, A, 0x76);
    rtc.advance(5 * RTC_HZ);
    assert_eq!(get(&mut rtc, 0), 0x58);
    set(&mut rtc, A, 0x26);
    rtc.advance(5 * RTC_HZ + RTC_HZ / 2 - 1);
    assert_eq!(get(&mut rtc, 0), 0x58);
    rtc.advance(5 * RTC_HZ + RTC_HZ / 2);
    assert_eq!(get(&mut rtc, 0), 0x59);
}

#[test]
fn update_in_progress_shows_before_the_update() {
    let mut rtc = rtc();
    rtc.advance(RTC_HZ - 74);
    assert_eq!(get(&mut rtc, A), 0x26);
    rtc.advance(RTC_HZ - 1);
    assert_eq!(get(&mut rtc, A), 0xa6);
    rtc.advance(RTC_HZ);
    assert_eq!(get(&mut rtc, A), 0x26);
}

#[test]
fn periodic_interrupt_repeats_once_register_c_is_read() {
    let mut rtc = rtc();
    set(
        &mut rtc,
        B,
        (RegisterB::HOURS_24 | RegisterB::PERIODIC).bits(),
    );
    assert_eq!(rtc.due(), Some(32));
    rtc.advance(31);
    assert!(!rtc.irq());
    rtc.advance(32);
    assert!(rtc.irq());
    assert_eq!(rtc.due(), None);
    assert_eq!(get(&mut rtc, C), 0xc0);
    assert!(!rtc.irq());
    assert_eq!(get(&mut rtc, C), 0);
    assert_eq!(rtc.due(), Some(64));
}

#[test]
fn alarm_with_dont_care_hours_matches_minute_and_second() {
    let mut rtc = rtc();
    for (index, value) in [(1, 0x05), (3, 0x01), (5, 0xff)] {
        set(&mut rtc, index, value);
    }
    set(&mut rtc, B, (RegisterB::HOURS_24 | RegisterB::ALARM).bits());
    rtc.advance(66 * RTC_HZ);
    assert!(!rtc.irq());
    rtc.advance(67 * RTC_HZ);
    assert!(rtc.irq());
    assert_eq!(get(&mut rtc, C), RegisterC::all().bits());
}

#[test]
fn update_interrupt_is_due_every_second() {
    let mut rtc = rtc();
    rtc.advance(100);
    set(
        &mut rtc,
        B,
        (RegisterB::HOURS_24 | RegisterB::UPDATE).bits(),
    );
    assert_eq!(rtc.due(), Some(RTC_HZ));
    rtc.advance(RTC_HZ);
    assert!(rtc.irq());
}

#[test]
fn memory_size_bytes_follow_the_configuration() {
    let mut rtc = rtc();
    let mut word = |index| u16::from_le_bytes([get(&mut rtc, index), get(&mut rtc, index + 1)]);
    assert_eq!(word(0x15), 640);
    assert_eq!(word(0x17), 0xffff);
    assert_eq!(word(0x34), 112 * 16);
    assert_eq!(word(0x5b), 1 << 14);
}

#[test]
fn index_ignores_the_nmi_bit() {
    let mut rtc = rtc();
    set(&mut rtc, 0x80 | 0x40, 0xa5);
    assert_eq!(get(&mut rtc, 0x40), 0xa5);
    assert_eq!(get(&mut rtc, D), 0x80);
}

#[test]
fn clock_set_back_keeps_the_time_of_day() {
    let mut rtc = rtc();
    rtc.advance(3600 * RTC_HZ);
    let before = time(&mut rtc);
    rtc.advance(10);
    assert_eq!(time(&mut rtc), before);
    rtc.advance(10 + RTC_HZ);
    assert_eq!(get(&mut rtc, 0), 0x59);
}

proptest! {
    #[test]
    fn any_accesses_leave_a_state_that_restores(
        steps in prop::collection::vec(
            (prop_oneof![0_u8..14, any::<u8>()], any::<u8>(), any::<bool>(),
             prop_oneof![4 => 0_u64..100_000, 1 => 0_u64..1 << 55]), 1..60),
    ) {
        let clock = Clock::new_virtual(100_000);
        let mut rtc = Rtc::new(&RtcConfig::default(), &clock);
        let mut now: u64 = 0;
        for (index, value, read, elapsed) in steps {
            now = now.saturating_add(elapsed);
            rtc.advance(now);
            if read {
                get(&mut rtc, index);
            } else {
                set(&mut rtc, index, value);
            }
            prop_assert!(rtc.due().is_none_or(|due| due > now));
            let state = rtc.save();
            prop_assert!(Rtc::accepts_state(&state), "{state:?}");
            let mut copy = Rtc::new(&RtcConfig::default(), &clock);
            copy.restore(&state);
            prop_assert_eq!(copy.save(), state);
        }
    }
}

#[test]
fn inspect_shows_time_and_flags() {
    let mut rtc = rtc();
    set(
        &mut rtc,
        B,
        (RegisterB::HOURS_24 | RegisterB::UPDATE).bits(),
    );
    rtc.advance(RTC_HZ);
    assert_eq!(field(&rtc, "time"), "2024-02-28 23:59:59");
    assert_eq!(field(&rtc, "B"), "HOURS_24 UPDATE");
    assert_eq!(field(&rtc, "C"), "UPDATE PERIODIC");
    assert_eq!(field(&rtc, "periodic interrupt"), "1024 Hz");
    assert_eq!(field(&rtc, "IRQ 8"), "yes");
}
