//! The real-time clock and its non-volatile memory: ports 70H and 71H.
//!
//! Motorola MC146818 data sheet; the century byte at 32H and the memory sizes as PC firmware keeps
//! them. Bit 7 of port 70H, the NMI mask, has no effect. Daylight-saving changes are not made.

use serde::{Deserialize, Serialize};

use crate::clock::{Clock, Rate, Ticks};

/// The oscillator.
pub const RTC_HZ: u64 = 32_768;

/// Oscillator clocks before an update in which bit 7 of register A is set: 244 + 1984 us.
const UPDATE_CLOCKS: u64 = 73;

const SECONDS_PER_DAY: i64 = 86_400;

const REG_A: u8 = 0x0a;
const REG_B: u8 = 0x0b;
const REG_C: u8 = 0x0c;
const REG_D: u8 = 0x0d;
const CENTURY: u8 = 0x32;

/// Register B: updates are stopped while software sets the time.
const B_SET: u8 = 1 << 7;
/// Register B: binary, not BCD.
const B_BINARY: u8 = 1 << 2;
/// Register B: 24-hour, not 12-hour.
const B_24H: u8 = 1 << 1;

/// Periodic-interrupt flag in register C, and its enable in register B.
const PERIODIC: u8 = 1 << 6;
/// Alarm-interrupt flag and enable.
const ALARM: u8 = 1 << 5;
/// Update-ended flag and enable.
const UPDATE: u8 = 1 << 4;

/// What the RTC is built with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RtcConfig {
    /// Seconds since 1970-01-01 00:00 UTC at tick 0 of the clock.
    pub epoch_seconds: i64,
    /// Bytes of RAM below 4 GiB.
    pub memory_below_4g: u64,
    /// Bytes of RAM from 4 GiB on.
    pub memory_above_4g: u64,
}

/// The state of the RTC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RtcState {
    /// The selected register.
    pub index: u8,
    /// All 128 registers. Those of the time are valid only while the time stands still.
    pub registers: Vec<u8>,
    /// The oscillator clock at which the second `second` began.
    pub second_began: u64,
    /// Seconds since 1970 by this clock.
    pub second: i64,
    /// Days by which the day of the week is off.
    pub weekday_shift: u8,
    /// The oscillator clock up to which flags were set.
    pub seen: u64,
}

/// The real-time clock.
#[derive(Debug)]
pub struct Rtc {
    rate: Rate,
    s: RtcState,
}

impl Rtc {
    /// A clock that shows the configured time.
    pub fn new(config: &RtcConfig, clock: &Clock) -> Self {
        let mut registers = vec![0; 128];
        registers[usize::from(REG_A)] = 0x26;
        registers[usize::from(REG_B)] = B_24H;
        registers[usize::from(REG_D)] = 0x80;
        set_memory_size(&mut registers, config);
        let s = RtcState {
            index: 0,
            registers,
            second_began: 0,
            second: config.epoch_seconds.clamp(-(1 << 40), 1 << 40),
            weekday_shift: 0,
            seen: 0,
        };
        Self {
            rate: clock.rate(RTC_HZ),
            s,
        }
    }

    /// The RESET pin: interrupts off, no flags; the time goes on.
    pub fn reset(&mut self) {
        self.s.registers[usize::from(REG_B)] &= !(PERIODIC | ALARM | UPDATE | 1 << 3);
        self.s.registers[usize::from(REG_C)] = 0;
    }

    /// The state, to be saved.
    pub fn save(&self) -> RtcState {
        self.s.clone()
    }

    pub(crate) fn accepts_state(state: &RtcState) -> bool {
        state.registers.len() == 128
            && state.index < 128
            && state.second.abs() <= 1 << 41
            && state.weekday_shift < 7
    }

    pub(crate) fn restore(&mut self, state: &RtcState) {
        self.s = state.clone();
    }

    fn register(&self, index: u8) -> u8 {
        self.s.registers[usize::from(index & 0x7f)]
    }

    /// The time stands still: software sets it, or the divider is held in reset.
    fn stands_still(&self) -> bool {
        self.register(REG_B) & B_SET != 0 || self.divider_held()
    }

    fn divider_held(&self) -> bool {
        self.register(REG_A) & 0x60 == 0x60
    }

    /// Oscillator clocks between periodic interrupts.
    fn period(&self) -> Option<u64> {
        match self.register(REG_A) & 0xf {
            _ if self.divider_held() => None,
            0 => None,
            rate @ (1 | 2) => Some(1 << (rate + 6)),
            rate => Some(1 << (rate - 1)),
        }
    }

    /// The time by the oscillator: seconds since 1970, and clocks into the second.
    fn time(&self, clock: u64) -> (i64, u64) {
        let elapsed = clock.saturating_sub(self.s.second_began);
        let seconds = i64::try_from(elapsed / RTC_HZ).unwrap_or(0);
        (self.s.second.saturating_add(seconds), elapsed % RTC_HZ)
    }

    /// Moves on to a time: sets the flags of what happened.
    pub fn advance(&mut self, now: Ticks) {
        let (from, to) = (self.s.seen, self.rate.count(now));
        if to < from {
            self.set_back(to);
        }
        if to <= from {
            return;
        }
        self.s.seen = to;
        let mut flags = 0;
        if let Some(period) = self.period() {
            // Counted from the last second, where the divider chain is at 0.
            let passed = |clock: u64| clock.wrapping_sub(self.s.second_began) / period;
            if passed(to) != passed(from) {
                flags |= PERIODIC;
            }
        }
        if !self.stands_still() {
            let (old, new) = (self.time(from).0, self.time(to).0);
            if old != new {
                flags |= UPDATE;
                if self.register(REG_C) & ALARM == 0 && self.alarm_in(old + 1, new) {
                    flags |= ALARM;
                }
            }
        }
        self.s.registers[usize::from(REG_C)] |= flags;
    }

    /// The machine's clock was set back, by a RESET: the time of day goes on.
    fn set_back(&mut self, clock: u64) {
        let (second, into_second) = self.time(self.s.seen);
        // So early, the rest of the second may not fit before the clock's beginning.
        let began = clock.checked_sub(into_second);
        self.s.second = second;
        self.s.second_began = began.unwrap_or(0);
        self.s.seen = clock;
    }

    /// Whether the alarm's time is one of these seconds.
    fn alarm_in(&self, first: i64, last: i64) -> bool {
        let matches = |register: u8, value: u8| {
            let alarm = self.register(register);
            alarm >= 0xc0 || alarm == value
        };
        let second = |value| matches(1, self.encode(value));
        let minute = |value| matches(3, self.encode(value));
        let hour = |value| matches(5, self.encode_hour(value));
        let possible = (0..60).any(second) && (0..60).any(minute) && (0..24).any(hour);
        let whole_day = last - first >= SECONDS_PER_DAY - 1;
        possible
            && (whole_day
                || (first..=last).any(|time| {
                    let time = time.rem_euclid(SECONDS_PER_DAY);
                    second(time % 60) && minute(time / 60 % 60) && hour(time / 3600)
                }))
    }

    /// The level of IRQ 8.
    pub fn irq(&self) -> bool {
        self.register(REG_C) & self.register(REG_B) & (PERIODIC | ALARM | UPDATE) != 0
    }

    /// When a flag whose interrupt is enabled may next be set.
    pub fn due(&self) -> Option<Ticks> {
        let (seen, began) = (self.s.seen, self.s.second_began);
        let wanted = self.register(REG_B) & !self.register(REG_C);
        let next = |period: u64| {
            let passed = seen
                .checked_sub(began)
                .map_or(0, |clocks| clocks / period + 1);
            began.checked_add(passed.checked_mul(period)?)
        };
        let periodic = self
            .period()
            .filter(|_| wanted & PERIODIC != 0)
            .and_then(next);
        let second = (wanted & (ALARM | UPDATE) != 0 && !self.stands_still())
            .then(|| next(RTC_HZ))
            .flatten();
        let clock = periodic.into_iter().chain(second).min()?;
        Some(self.rate.ticks(clock.max(seen.saturating_add(1))))
    }

    /// Reads port 70H or 71H at a time to which the clock was advanced.
    pub fn read(&mut self, port: u16) -> u8 {
        if port != 0x71 {
            // The index cannot be read back.
            return 0xff;
        }
        let index = self.s.index;
        match index {
            0 | 2 | 4 | 6..=9 | CENTURY if !self.stands_still() => {
                self.time_registers()[time_slot(index)]
            }
            REG_A => self.register(REG_A) | u8::from(self.update_in_progress()) << 7,
            REG_C => {
                let flags = self.register(REG_C);
                let irq = u8::from(self.irq()) << 7;
                self.s.registers[usize::from(REG_C)] = 0;
                flags | irq
            }
            _ => self.register(index),
        }
    }

    fn update_in_progress(&self) -> bool {
        !self.stands_still() && self.time(self.s.seen).1 >= RTC_HZ - UPDATE_CLOCKS
    }

    /// Writes port 70H or 71H at a time to which the clock was advanced.
    pub fn write(&mut self, port: u16, value: u8) {
        match port {
            0x70 => self.s.index = value & 0x7f,
            0x71 => self.write_register(self.s.index, value),
            _ => {}
        }
    }

    fn write_register(&mut self, index: u8, value: u8) {
        match index {
            0 | 2 | 4 | 6..=9 | CENTURY if !self.stands_still() => {
                self.store_time();
                self.s.registers[usize::from(index)] = value;
                let into_second = self.time(self.s.seen).1;
                self.load_time(into_second);
            }
            REG_A | REG_B => self.write_control(index, value),
            REG_C | REG_D => {}
            _ => self.s.registers[usize::from(index)] = value,
        }
    }

    /// Writes register A or B: the time may stop or go on.
    fn write_control(&mut self, index: u8, value: u8) {
        let stood_still = self.stands_still();
        let divider_was_held = self.divider_held();
        let into_second = self.time(self.s.seen).1;
        if !stood_still {
            self.store_time();
        }
        self.s.registers[usize::from(index)] = match index {
            REG_A => value & 0x7f,
            // SET stops update-ended interrupts.
            _ if value & B_SET != 0 => value & !UPDATE,
            _ => value,
        };
        if stood_still && !self.stands_still() {
            // The first update comes half a second after the divider is let go.
            self.load_time(if divider_was_held {
                RTC_HZ / 2
            } else {
                into_second
            });
        }
    }

    /// Puts the running time into its registers.
    fn store_time(&mut self) {
        let time = self.time_registers();
        for index in [0, 2, 4, 6, 7, 8, 9, CENTURY] {
            self.s.registers[usize::from(index)] = time[time_slot(index)];
        }
    }

    /// Lets the time run from its registers; `into_second` clocks of the second have passed.
    fn load_time(&mut self, into_second: u64) {
        let field = |index: u8| self.decode(self.register(index));
        let year = field(CENTURY) * 100 + field(9);
        let days = days_from_civil(year, field(8).clamp(1, 12), field(7).clamp(1, 31));
        let hours = self.decode_hour(self.register(4));
        // Day 0 was a Thursday, the fifth day of the week.
        let shift = (field(6) - 1 - (days + 4)).rem_euclid(7);
        self.s.second = days * SECONDS_PER_DAY + hours * 3600 + field(2) * 60 + field(0);
        self.s.second_began = self.s.seen.saturating_sub(into_second);
        self.s.weekday_shift = u8::try_from(shift).unwrap_or(0);
    }

    /// The time as its registers show it: 0 to 9, then the century.
    fn time_registers(&self) -> [u8; 11] {
        let (second, _) = self.time(self.s.seen);
        let days = second.div_euclid(SECONDS_PER_DAY);
        let day_second = second.rem_euclid(SECONDS_PER_DAY);
        let (year, month, day) = civil_from_days(days);
        let weekday = (days + 4 + i64::from(self.s.weekday_shift)).rem_euclid(7) + 1;
        let mut registers = [0; 11];
        registers[0] = self.encode(day_second % 60);
        registers[2] = self.encode(day_second / 60 % 60);
        registers[4] = self.encode_hour(day_second / 3600);
        registers[6] = self.encode(weekday);
        registers[7] = self.encode(day);
        registers[8] = self.encode(month);
        registers[9] = self.encode(year.rem_euclid(100));
        registers[10] = self.encode(year.div_euclid(100).rem_euclid(100));
        registers
    }

    fn encode(&self, value: i64) -> u8 {
        let value = u8::try_from(value).unwrap_or(0);
        if self.register(REG_B) & B_BINARY != 0 {
            value
        } else {
            ((value / 10 % 10) << 4) | (value % 10)
        }
    }

    fn decode(&self, value: u8) -> i64 {
        if self.register(REG_B) & B_BINARY != 0 {
            value.into()
        } else {
            i64::from(value >> 4) * 10 + i64::from(value & 0xf)
        }
    }

    fn encode_hour(&self, hour: i64) -> u8 {
        if self.register(REG_B) & B_24H != 0 {
            return self.encode(hour);
        }
        let twelve = if hour % 12 == 0 { 12 } else { hour % 12 };
        self.encode(twelve) | if hour >= 12 { 0x80 } else { 0 }
    }

    fn decode_hour(&self, value: u8) -> i64 {
        if self.register(REG_B) & B_24H != 0 {
            return self.decode(value);
        }
        self.decode(value & 0x7f) % 12 + if value & 0x80 != 0 { 12 } else { 0 }
    }
}

/// The place of a time register in [`Rtc::time_registers`].
fn time_slot(index: u8) -> usize {
    if index == CENTURY {
        10
    } else {
        usize::from(index) % 10
    }
}

/// The bytes in which PC firmware keeps the memory size.
fn set_memory_size(registers: &mut [u8], config: &RtcConfig) {
    let mut put = |index: usize, value: u64, bytes: usize| {
        let value = value.to_le_bytes();
        registers[index..index + bytes].copy_from_slice(&value[..bytes]);
    };
    let below = config.memory_below_4g;
    let extended_kib = (below.saturating_sub(1 << 20) >> 10).min(0xffff);
    put(0x15, 640, 2);
    put(0x17, extended_kib, 2);
    put(0x30, extended_kib, 2);
    // In units of 64 KiB: from 16 MiB, and from 4 GiB.
    put(0x34, (below.saturating_sub(16 << 20) >> 16).min(0xffff), 2);
    put(0x5b, (config.memory_above_4g >> 16).min(0xff_ffff), 3);
}

/// Days since 1970-01-01 of a date of the proleptic Gregorian calendar.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    // The year is taken to begin in March, so that the leap day is its last.
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

/// Year, month and day of a day since 1970-01-01.
fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
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
    fn time_in_bcd_passes_a_leap_day() {
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
    fn time_in_binary_and_twelve_hours() {
        let mut rtc = rtc();
        set(&mut rtc, REG_B, B_BINARY);
        assert_eq!(time(&mut rtc), [20, 24, 2, 28, 0x80 | 11, 59, 58, 4]);
        rtc.advance(2 * RTC_HZ);
        assert_eq!(get(&mut rtc, 4), 12);
    }

    #[test]
    fn time_set_under_the_set_bit_runs_on_from_there() {
        let mut rtc = rtc();
        set(&mut rtc, REG_B, B_SET | B_24H);
        let date = [0x32, 9, 8, 7, 4, 2, 0, 6]
            .into_iter()
            .zip([0x19, 0x99, 0x12, 0x31, 0x23, 0x59, 0x59, 6]);
        for (index, value) in date {
            set(&mut rtc, index, value);
        }
        rtc.advance(10 * RTC_HZ);
        assert_eq!(get(&mut rtc, 0), 0x59);
        set(&mut rtc, REG_B, B_24H);
        rtc.advance(11 * RTC_HZ);
        assert_eq!(
            time(&mut rtc),
            [0x20, 0x00, 0x01, 0x01, 0x00, 0x00, 0x00, 7]
        );
    }

    #[test]
    fn divider_let_go_updates_after_half_a_second() {
        let mut rtc = rtc();
        set(&mut rtc, REG_A, 0x76);
        rtc.advance(5 * RTC_HZ);
        assert_eq!(get(&mut rtc, 0), 0x58);
        set(&mut rtc, REG_A, 0x26);
        rtc.advance(5 * RTC_HZ + RTC_HZ / 2 - 1);
        assert_eq!(get(&mut rtc, 0), 0x58);
        rtc.advance(5 * RTC_HZ + RTC_HZ / 2);
        assert_eq!(get(&mut rtc, 0), 0x59);
    }

    #[test]
    fn update_in_progress_precedes_the_update() {
        let mut rtc = rtc();
        rtc.advance(RTC_HZ - 74);
        assert_eq!(get(&mut rtc, REG_A), 0x26);
        rtc.advance(RTC_HZ - 1);
        assert_eq!(get(&mut rtc, REG_A), 0xa6);
        rtc.advance(RTC_HZ);
        assert_eq!(get(&mut rtc, REG_A), 0x26);
    }

    #[test]
    fn periodic_interrupt_comes_at_its_rate_once_register_c_is_read() {
        let mut rtc = rtc();
        set(&mut rtc, REG_B, B_24H | PERIODIC);
        assert_eq!(rtc.due(), Some(32));
        rtc.advance(31);
        assert!(!rtc.irq());
        rtc.advance(32);
        assert!(rtc.irq());
        assert_eq!(rtc.due(), None);
        assert_eq!(get(&mut rtc, REG_C), 0xc0);
        assert!(!rtc.irq());
        assert_eq!(get(&mut rtc, REG_C), 0);
        assert_eq!(rtc.due(), Some(64));
    }

    #[test]
    fn alarm_with_dont_care_hours_comes_at_its_minute_and_second() {
        let mut rtc = rtc();
        for (index, value) in [(1, 0x05), (3, 0x01), (5, 0xff)] {
            set(&mut rtc, index, value);
        }
        set(&mut rtc, REG_B, B_24H | ALARM);
        rtc.advance(66 * RTC_HZ);
        assert!(!rtc.irq());
        rtc.advance(67 * RTC_HZ);
        assert!(rtc.irq());
        assert_eq!(get(&mut rtc, REG_C), 0x80 | ALARM | UPDATE | PERIODIC);
    }

    #[test]
    fn update_interrupt_comes_each_second() {
        let mut rtc = rtc();
        rtc.advance(100);
        set(&mut rtc, REG_B, B_24H | UPDATE);
        assert_eq!(rtc.due(), Some(RTC_HZ));
        rtc.advance(RTC_HZ);
        assert!(rtc.irq());
    }

    #[test]
    fn memory_size_is_in_the_bytes_of_the_firmware() {
        let mut rtc = rtc();
        let mut word = |index| u16::from_le_bytes([get(&mut rtc, index), get(&mut rtc, index + 1)]);
        assert_eq!(word(0x15), 640);
        assert_eq!(word(0x17), 0xffff);
        assert_eq!(word(0x34), 112 * 16);
        assert_eq!(word(0x5b), 1 << 14);
    }

    #[test]
    fn memory_byte_and_index_with_the_nmi_bit() {
        let mut rtc = rtc();
        set(&mut rtc, 0x80 | 0x40, 0xa5);
        assert_eq!(get(&mut rtc, 0x40), 0xa5);
        assert_eq!(get(&mut rtc, REG_D), 0x80);
    }

    #[test]
    fn clock_set_back_leaves_the_time_of_day() {
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
        fn civil_date_and_days_are_inverse(days in -800_000_i64..3_000_000) {
            let (year, month, day) = civil_from_days(days);
            prop_assert!((1..=12).contains(&month) && (1..=31).contains(&day));
            prop_assert_eq!(days_from_civil(year, month, day), days);
        }

        #[test]
        fn any_accesses_leave_a_valid_state(
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
}
