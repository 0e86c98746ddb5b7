//! The real-time clock and its non-volatile memory: ports 70H and 71H.
//!
//! Motorola MC146818 data sheet; the century byte at 32H and the memory sizes as PC firmware keeps
//! them. Bit 7 of port 70H, the NMI mask, has no effect. Daylight-saving changes are not made.

mod calendar;
mod regs;
#[cfg(test)]
mod tests;

use crate::clock::{Clock, Rate, Ticks};
use crate::inspect::{FieldList, Inspect, InspectField};
use calendar::{SECONDS_PER_DAY, civil_from_days, days_from_civil, weekday};
use regs::{ALARM_DONT_CARE, PM, RegisterA, RegisterB, RegisterC, VALID_TIME, index};

/// Frequency of the oscillator in Hz.
pub const RTC_HZ: u64 = 32_768;

/// Oscillator clocks before an update in which register A shows it: 244 + 1984 us.
const UPDATE_CLOCKS: u64 = 73;

/// Number of registers.
const REGISTERS: usize = 128;
/// The bits of an index.
const INDEX_MASK: u8 = 0x7f;
/// The port of the index.
const INDEX_PORT: u16 = 0x70;
/// The port of the indexed register.
const DATA_PORT: u16 = 0x71;
/// Seconds since 1970 are kept within plus or minus this, so that no sum overflows.
const SECOND_MAX: i64 = 1 << 40;

/// The configuration of the RTC.
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
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RtcState {
    /// The selected register.
    pub index: u8,
    /// All 128 registers. Those of the time are valid only while the time does not advance.
    pub registers: Vec<u8>,
    /// The oscillator clock at which the second `second` began.
    pub second_began: u64,
    /// Seconds since 1970 by this clock.
    pub second: i64,
    /// Days by which software has set the day of the week off, 0 to 6.
    pub weekday_shift: u8,
    /// The oscillator clock to which the RTC was advanced.
    #[cfg_attr(feature = "serde", serde(rename = "seen"))]
    pub advanced_to: u64,
}

/// The real-time clock.
#[derive(Clone, Debug)]
pub struct Rtc {
    rate: Rate,
    s: RtcState,
}

/// Whether a register shows the time.
const fn is_time(register: u8) -> bool {
    matches!(
        register,
        index::SECONDS
            | index::MINUTES
            | index::HOURS
            | index::WEEKDAY
            | index::DAY
            | index::MONTH
            | index::YEAR
            | index::CENTURY
    )
}

impl Rtc {
    /// A clock that shows the configured time.
    pub fn new(config: &RtcConfig, clock: &Clock) -> Self {
        let mut registers = vec![0; REGISTERS];
        registers[usize::from(index::A)] = RegisterA::FIRMWARE.into();
        registers[usize::from(index::B)] = RegisterB::HOURS_24.bits();
        registers[usize::from(index::D)] = VALID_TIME;
        set_memory_size(&mut registers, config);
        let s = RtcState {
            index: 0,
            registers,
            second_began: 0,
            second: config.epoch_seconds.clamp(-SECOND_MAX, SECOND_MAX),
            weekday_shift: 0,
            advanced_to: 0,
        };
        Self {
            rate: clock.rate(RTC_HZ),
            s,
        }
    }

    /// Applies the RESET pin: interrupts are disabled, flags cleared; the time continues.
    pub fn reset(&mut self) {
        let disabled =
            RegisterB::PERIODIC | RegisterB::ALARM | RegisterB::UPDATE | RegisterB::SQUARE_WAVE;
        self.set_register(index::B, self.b().difference(disabled).bits());
        self.set_register(index::C, 0);
    }

    /// The state as plain data.
    pub fn save(&self) -> RtcState {
        self.s.clone()
    }

    /// Whether the RTC can be in this state.
    pub(crate) fn accepts_state(state: &RtcState) -> bool {
        state.registers.len() == REGISTERS
            && state.index <= INDEX_MASK
            && state.second.abs() <= 2 * SECOND_MAX
            && state.weekday_shift < 7
    }

    /// Replaces the state by a saved one, which [`Rtc::accepts_state`] accepts.
    pub(crate) fn restore(&mut self, state: &RtcState) {
        debug_assert!(Self::accepts_state(state), "the state was checked");
        self.s = state.clone();
    }

    fn register(&self, index: u8) -> u8 {
        self.s.registers[usize::from(index & INDEX_MASK)]
    }

    fn set_register(&mut self, index: u8, value: u8) {
        self.s.registers[usize::from(index & INDEX_MASK)] = value;
    }

    fn a(&self) -> RegisterA {
        self.register(index::A).into()
    }

    fn b(&self) -> RegisterB {
        RegisterB::from_bits_retain(self.register(index::B))
    }

    fn c(&self) -> RegisterC {
        RegisterC::from_bits_retain(self.register(index::C))
    }

    /// Whether the time does not advance: software sets it, or the divider is held in reset.
    fn is_stopped(&self) -> bool {
        self.b().contains(RegisterB::SET) || self.a().divider_in_reset()
    }

    /// Oscillator clocks between periodic interrupts; `None` if there are none.
    fn period(&self) -> Option<u64> {
        match self.a().rate_select() {
            _ if self.a().divider_in_reset() => None,
            0 => None,
            rate @ (1 | 2) => Some(1 << (rate + 6)),
            rate => Some(1 << (rate - 1)),
        }
    }

    /// The time at an oscillator clock: seconds since 1970, and clocks into the second.
    fn time(&self, clock: u64) -> (i64, u64) {
        let elapsed = clock.saturating_sub(self.s.second_began);
        let seconds = i64::try_from(elapsed / RTC_HZ).unwrap_or(0);
        (self.s.second.saturating_add(seconds), elapsed % RTC_HZ)
    }

    /// Advances to a time, and sets the flags of what has happened.
    pub fn advance(&mut self, now: Ticks) {
        let (from, to) = (self.s.advanced_to, self.rate.count(now));
        if to < from {
            self.set_back(to);
        }
        if to <= from {
            return;
        }
        self.s.advanced_to = to;
        let mut flags = self.c();
        if let Some(period) = self.period() {
            // Counted from the last second, where the divider chain is at 0.
            let passed = |clock: u64| clock.wrapping_sub(self.s.second_began) / period;
            if passed(to) != passed(from) {
                flags |= RegisterC::PERIODIC;
            }
        }
        if !self.is_stopped() {
            let (old, new) = (self.time(from).0, self.time(to).0);
            if old != new {
                flags |= RegisterC::UPDATE;
                if !flags.contains(RegisterC::ALARM) && self.alarm_in(old + 1, new) {
                    flags |= RegisterC::ALARM;
                }
            }
        }
        self.set_register(index::C, flags.bits());
    }

    /// Handles a machine clock that a RESET has set back: the time of day continues.
    fn set_back(&mut self, clock: u64) {
        let (second, into_second) = self.time(self.s.advanced_to);
        self.s.second = second;
        // The rest of the second may not fit before tick 0.
        self.s.second_began = clock.saturating_sub(into_second);
        self.s.advanced_to = clock;
    }

    /// Whether the alarm matches one of these seconds since 1970.
    fn alarm_in(&self, first: i64, last: i64) -> bool {
        let matches = |register: u8, value: u8| {
            let alarm = self.register(register);
            alarm >= ALARM_DONT_CARE || alarm == value
        };
        let second = |value| matches(index::SECONDS_ALARM, self.encode(value));
        let minute = |value| matches(index::MINUTES_ALARM, self.encode(value));
        let hour = |value| matches(index::HOURS_ALARM, self.encode_hour(value));
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
        !self.c().enabled(self.b()).is_empty()
    }

    /// The next time at which a flag whose interrupt is enabled may be set.
    pub fn due(&self) -> Option<Ticks> {
        let (now, began) = (self.s.advanced_to, self.s.second_began);
        // Flags that are clear, and whose interrupts are enabled.
        let pending = self.c().complement().enabled(self.b());
        let next = |period: u64| {
            let passed = now
                .checked_sub(began)
                .map_or(0, |clocks| clocks / period + 1);
            began.checked_add(passed.checked_mul(period)?)
        };
        let periodic = self
            .period()
            .filter(|_| pending.contains(RegisterC::PERIODIC))
            .and_then(next);
        let at_second = pending.intersects(RegisterC::ALARM | RegisterC::UPDATE);
        let second = (at_second && !self.is_stopped())
            .then(|| next(RTC_HZ))
            .flatten();
        let clock = periodic.into_iter().chain(second).min()?;
        Some(self.rate.ticks(clock.max(now.saturating_add(1))))
    }

    /// Reads port 70H or 71H. The caller has called [`Rtc::advance`] for the current time.
    pub fn read(&mut self, port: u16) -> u8 {
        if port != DATA_PORT {
            // The index cannot be read back.
            return 0xff;
        }
        let register = self.s.index;
        match register {
            _ if is_time(register) && !self.is_stopped() => self.time_register(register),
            index::A => self
                .a()
                .with_update_in_progress(self.update_in_progress())
                .into(),
            index::C => {
                let mut flags = self.c();
                flags.set(RegisterC::IRQ, self.irq());
                self.set_register(index::C, 0);
                flags.bits()
            }
            _ => self.register(register),
        }
    }

    fn update_in_progress(&self) -> bool {
        !self.is_stopped() && self.time(self.s.advanced_to).1 >= RTC_HZ - UPDATE_CLOCKS
    }

    /// Writes port 70H or 71H. The caller has called [`Rtc::advance`] for the current time.
    pub fn write(&mut self, port: u16, value: u8) {
        match port {
            INDEX_PORT => self.s.index = value & INDEX_MASK,
            DATA_PORT => self.write_register(self.s.index, value),
            _ => {}
        }
    }

    fn write_register(&mut self, register: u8, value: u8) {
        match register {
            _ if is_time(register) && !self.is_stopped() => {
                self.store_time();
                self.set_register(register, value);
                let into_second = self.time(self.s.advanced_to).1;
                self.load_time(into_second);
            }
            index::A | index::B => self.write_control(register, value),
            index::C | index::D => {}
            _ => self.set_register(register, value),
        }
    }

    /// Writes register A or B: the time may stop or continue.
    fn write_control(&mut self, register: u8, value: u8) {
        let was_stopped = self.is_stopped();
        let divider_was_in_reset = self.a().divider_in_reset();
        let into_second = self.time(self.s.advanced_to).1;
        if !was_stopped {
            self.store_time();
        }
        let value = if register == index::A {
            RegisterA::from(value).with_update_in_progress(false).into()
        } else {
            let mut b = RegisterB::from_bits_retain(value);
            if b.contains(RegisterB::SET) {
                // SET disables the update-ended interrupt.
                b.remove(RegisterB::UPDATE);
            }
            b.bits()
        };
        self.set_register(register, value);
        if was_stopped && !self.is_stopped() {
            // The first update comes half a second after the divider leaves reset.
            self.load_time(if divider_was_in_reset {
                RTC_HZ / 2
            } else {
                into_second
            });
        }
    }

    /// Copies the running time into its registers.
    fn store_time(&mut self) {
        for register in [
            index::SECONDS,
            index::MINUTES,
            index::HOURS,
            index::WEEKDAY,
            index::DAY,
            index::MONTH,
            index::YEAR,
            index::CENTURY,
        ] {
            self.set_register(register, self.time_register(register));
        }
    }

    /// Starts the time from its registers; `into_second` clocks of the second have passed.
    fn load_time(&mut self, into_second: u64) {
        let field = |register: u8| self.decode(self.register(register));
        let year = field(index::CENTURY) * 100 + field(index::YEAR);
        let (month, day) = (field(index::MONTH), field(index::DAY));
        let days = days_from_civil(year, month.clamp(1, 12), day.clamp(1, 31));
        let hours = self.decode_hour(self.register(index::HOURS));
        let shift = (field(index::WEEKDAY) - 1 - weekday(days)).rem_euclid(7);
        let minutes = hours * 60 + field(index::MINUTES);
        self.s.second = days * SECONDS_PER_DAY + minutes * 60 + field(index::SECONDS);
        self.s.second_began = self.s.advanced_to.saturating_sub(into_second);
        self.s.weekday_shift = u8::try_from(shift).unwrap_or(0);
    }

    /// A time register as the guest reads it while the time advances.
    fn time_register(&self, register: u8) -> u8 {
        debug_assert!(is_time(register), "the register shows the time");
        let (second, _) = self.time(self.s.advanced_to);
        let days = second.div_euclid(SECONDS_PER_DAY);
        let day_second = second.rem_euclid(SECONDS_PER_DAY);
        let (year, month, day) = civil_from_days(days);
        match register {
            index::SECONDS => self.encode(day_second % 60),
            index::MINUTES => self.encode(day_second / 60 % 60),
            index::HOURS => self.encode_hour(day_second / 3600),
            index::WEEKDAY => self.encode(weekday(days + i64::from(self.s.weekday_shift)) + 1),
            index::DAY => self.encode(day),
            index::MONTH => self.encode(month),
            index::YEAR => self.encode(year.rem_euclid(100)),
            _ => self.encode(year.div_euclid(100).rem_euclid(100)),
        }
    }

    fn encode(&self, value: i64) -> u8 {
        let value = u8::try_from(value).unwrap_or(0);
        if self.b().contains(RegisterB::BINARY) {
            value
        } else {
            ((value / 10 % 10) << 4) | (value % 10)
        }
    }

    fn decode(&self, value: u8) -> i64 {
        if self.b().contains(RegisterB::BINARY) {
            value.into()
        } else {
            i64::from(value >> 4) * 10 + i64::from(value & 0xf)
        }
    }

    fn encode_hour(&self, hour: i64) -> u8 {
        if self.b().contains(RegisterB::HOURS_24) {
            return self.encode(hour);
        }
        let twelve = if hour % 12 == 0 { 12 } else { hour % 12 };
        self.encode(twelve) | if hour >= 12 { PM } else { 0 }
    }

    fn decode_hour(&self, value: u8) -> i64 {
        if self.b().contains(RegisterB::HOURS_24) {
            return self.decode(value);
        }
        self.decode(value & !PM) % 12 + if value & PM != 0 { 12 } else { 0 }
    }
}

/// Writes the bytes in which PC firmware keeps the memory size.
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

impl Inspect for Rtc {
    fn inspect(&self) -> Vec<InspectField> {
        let (second, into_second) = self.time(self.s.advanced_to);
        let (year, month, day) = civil_from_days(second.div_euclid(SECONDS_PER_DAY));
        let of_day = second.rem_euclid(SECONDS_PER_DAY);
        let (hours, minutes) = (of_day / 3600, of_day / 60 % 60);
        let mut fields = FieldList::default();
        fields.push(
            "time",
            format_args!(
                "{year:04}-{month:02}-{day:02} {hours:02}:{minutes:02}:{:02}",
                of_day % 60
            ),
        );
        fields.push("clocks into the second", into_second);
        fields.flag("stopped", self.is_stopped());
        fields.hex("index", self.s.index);
        fields.hex("A", u8::from(self.a()));
        fields.flags("B", self.b());
        fields.flags("C", self.c());
        match self.period() {
            Some(period) => {
                fields.push("periodic interrupt", format_args!("{} Hz", RTC_HZ / period))
            }
            None => fields.push("periodic interrupt", "none"),
        }
        fields.flag("IRQ 8", self.irq());
        fields.finish()
    }
}
