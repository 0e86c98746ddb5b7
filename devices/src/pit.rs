//! The 8254 interval timer, and the speaker port 61H that gates its channel 2.
//!
//! Intel 8254 data sheet (231164). Counts are not stored: they follow from the timer clock's count
//! at which a channel was loaded. Deviation: a new count written to a running mode-3 channel takes
//! effect at the end of the cycle, not of the half cycle.

use serde::{Deserialize, Serialize};

use crate::clock::{Clock, Rate, Ticks};

/// The timer's clock: 14.31818 MHz / 12.
pub const PIT_HZ: u64 = 1_193_182;

/// Timer clocks between changes of port 61H's refresh bit.
const REFRESH_CLOCKS: u64 = 18;

/// Which byte of a 16-bit count comes next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Byte {
    /// Bits 7:0.
    #[default]
    Low,
    /// Bits 15:8.
    High,
}

/// The state of one channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelState {
    /// 0 to 5.
    pub mode: u8,
    /// Counts in binary-coded decimal.
    pub bcd: bool,
    /// Bits 5:4 of the control word: 1 low byte, 2 high byte, 3 both.
    pub access: u8,
    /// The GATE input.
    pub gate: bool,
    /// The count in use: 1 to 10000H.
    pub count: u32,
    /// A count that is loaded at the end of the cycle.
    pub next_count: Option<u32>,
    /// The timer clock at which `count` was, or will be, loaded. `None`: no count was written, or
    /// the trigger of modes 1 and 5 has not come.
    pub start: Option<u64>,
    /// GATE is low and counting stopped after so many clocks.
    pub stopped_after: Option<u64>,
    /// A count was written since the control word.
    pub written: bool,
    /// The low byte of a count of which the high byte is to come.
    pub low: u8,
    /// The byte that is written next.
    pub next_write: Byte,
    /// The byte that is read next.
    pub next_read: Byte,
    /// The latched count.
    pub latched: Option<u16>,
    /// The latched status.
    pub latched_status: Option<u8>,
}

impl ChannelState {
    fn new(gate: bool) -> Self {
        Self {
            mode: 0,
            bcd: false,
            access: 3,
            gate,
            count: 0x1_0000,
            next_count: None,
            start: None,
            stopped_after: None,
            written: false,
            low: 0,
            next_write: Byte::Low,
            next_read: Byte::Low,
            latched: None,
            latched_status: None,
        }
    }

    fn is_periodic(&self) -> bool {
        matches!(self.mode, 2 | 3)
    }

    /// Modes that a rising GATE starts.
    fn is_triggered(&self) -> bool {
        matches!(self.mode, 1 | 5)
    }

    /// Clocks since the count was loaded; `None` if it was not.
    fn elapsed(&self, clock: u64) -> Option<u64> {
        match self.stopped_after {
            Some(elapsed) => Some(elapsed),
            None => self.start.and_then(|start| clock.checked_sub(start)),
        }
    }

    /// The OUT pin.
    fn output(&self, clock: u64) -> bool {
        let count = u64::from(self.count);
        let elapsed = self.elapsed(clock);
        match self.mode {
            0 => elapsed.is_some_and(|e| e >= count),
            1 => elapsed.is_none_or(|e| e >= count),
            2 if self.gate => elapsed.is_none_or(|e| e % count != count - 1),
            3 if self.gate => elapsed.is_none_or(|e| e % count < count.div_ceil(2)),
            4 | 5 => elapsed != Some(count),
            _ => true,
        }
    }

    /// The counting element, in binary.
    fn value(&self, clock: u64) -> u32 {
        let count = u64::from(self.count);
        let elapsed = self.elapsed(clock).unwrap_or(0);
        let modulus = if self.bcd { 10_000 } else { 0x1_0000 };
        let value = match self.mode {
            2 => count - elapsed % count,
            3 => {
                let position = elapsed % count;
                let high = count.div_ceil(2);
                let in_half = if position < high {
                    position
                } else {
                    position - high
                };
                (count & !1).saturating_sub(2 * in_half)
            }
            _ => (count + modulus - elapsed % modulus) % modulus,
        };
        u32::try_from(value % modulus).unwrap_or(0)
    }

    /// The counting element as it is read.
    fn read_value(&self, clock: u64) -> u16 {
        let value = self.value(clock);
        let encoded = if self.bcd {
            (0..4).fold(0, |bcd, digit| {
                bcd | (value / 10_u32.pow(digit) % 10) << (4 * digit)
            })
        } else {
            value
        };
        (encoded & 0xffff) as u16
    }

    /// The next clock after `clock` at which OUT rises, or a cycle ends.
    fn next_rise(&self, clock: u64) -> Option<u64> {
        if self.stopped_after.is_some() {
            return None;
        }
        let start = self.start?;
        let count = u64::from(self.count);
        let rise = match self.mode {
            2 | 3 => {
                let cycles = clock
                    .checked_sub(start)
                    .map_or(1, |e| (e / count).saturating_add(1));
                start.checked_add(cycles.checked_mul(count)?)?
            }
            4 | 5 => start.checked_add(count + 1)?,
            _ => start.checked_add(count)?,
        };
        (rise > clock).then_some(rise)
    }

    /// Moves from one clock to a later one. Says whether OUT rose on the way.
    fn advance(&mut self, from: u64, to: u64) -> bool {
        let Some(rise) = self.next_rise(from).filter(|&rise| rise <= to) else {
            return false;
        };
        if self.is_periodic()
            && let Some(count) = self.next_count.take()
        {
            self.count = count;
            self.start = Some(rise);
        }
        true
    }

    fn write_control(&mut self, value: u8) {
        *self = Self {
            mode: match (value >> 1) & 7 {
                // Bit 3 does not count in modes 2 and 3.
                mode @ (6 | 7) => mode & 3,
                mode => mode,
            },
            bcd: value & 1 != 0,
            access: (value >> 4) & 3,
            latched: None,
            latched_status: None,
            next_write: first_byte(value >> 4),
            next_read: first_byte(value >> 4),
            ..Self::new(self.gate)
        };
    }

    fn latch(&mut self, clock: u64) {
        if self.latched.is_none() {
            self.latched = Some(self.read_value(clock));
        }
    }

    fn latch_status(&mut self, clock: u64) {
        let null = !self.written
            || self.next_count.is_some()
            || self.start.is_some_and(|start| clock < start);
        let status = u8::from(self.output(clock)) << 7
            | u8::from(null) << 6
            | self.access << 4
            | self.mode << 1
            | u8::from(self.bcd);
        self.latched_status.get_or_insert(status);
    }

    fn read(&mut self, clock: u64) -> u8 {
        if let Some(status) = self.latched_status.take() {
            return status;
        }
        let value = self.latched.unwrap_or_else(|| self.read_value(clock));
        let byte = self.next_read;
        if self.access == 3 && byte == Byte::Low {
            self.next_read = Byte::High;
        } else {
            self.next_read = first_byte(self.access);
            self.latched = None;
        }
        match byte {
            Byte::Low => (value & 0xff) as u8,
            Byte::High => (value >> 8) as u8,
        }
    }

    fn write(&mut self, value: u8, clock: u64) {
        match (self.access, self.next_write) {
            (1, _) => self.load(u16::from(value), clock),
            (2, _) => self.load(u16::from(value) << 8, clock),
            (_, Byte::Low) => {
                self.low = value;
                self.next_write = Byte::High;
                if self.mode == 0 {
                    // The first byte stops the count.
                    self.start = None;
                    self.stopped_after = None;
                }
            }
            (_, Byte::High) => {
                self.next_write = Byte::Low;
                self.load(u16::from(value) << 8 | u16::from(self.low), clock);
            }
        }
    }

    fn load(&mut self, raw: u16, clock: u64) {
        let raw = u32::from(raw);
        let count = if self.bcd {
            let digits = (0..4)
                .map(|digit| (raw >> (4 * digit) & 0xf) * 10_u32.pow(digit))
                .sum();
            if digits == 0 { 10_000 } else { digits }
        } else if raw == 0 {
            0x1_0000
        } else {
            raw
        };
        let running = self.start.is_some() || self.stopped_after.is_some();
        self.written = true;
        if self.is_periodic() && running || self.is_triggered() {
            // Modes 1 and 5 take it at the next trigger.
            self.next_count = Some(count);
            return;
        }
        self.count = count;
        self.next_count = None;
        self.start_at(clock.saturating_add(1));
    }

    fn start_at(&mut self, clock: u64) {
        if self.gate || self.is_triggered() {
            self.start = Some(clock);
            self.stopped_after = None;
        } else {
            self.start = None;
            self.stopped_after = Some(0);
        }
    }

    /// Drives GATE.
    fn set_gate(&mut self, gate: bool, clock: u64) {
        if std::mem::replace(&mut self.gate, gate) == gate || !self.written {
            return;
        }
        match (self.mode, gate) {
            (1 | 5, true) => {
                self.count = self.next_count.take().unwrap_or(self.count);
                self.start_at(clock.saturating_add(1));
            }
            (1 | 5, false) => {}
            (2 | 3, true) => {
                self.count = self.next_count.take().unwrap_or(self.count);
                self.start_at(clock.saturating_add(1));
            }
            (_, true) => {
                if let Some(elapsed) = self.stopped_after.take() {
                    self.start = Some(clock.saturating_sub(elapsed));
                }
            }
            (_, false) => {
                if self.start.is_some() {
                    self.stopped_after = Some(self.elapsed(clock).unwrap_or(0));
                    self.start = None;
                }
            }
        }
    }

    fn is_valid(&self) -> bool {
        let count_valid = |count: u32| (1..=0x1_0000).contains(&count);
        self.mode <= 5
            && matches!(self.access, 1..=3)
            && count_valid(self.count)
            && self.next_count.is_none_or(count_valid)
            && (self.start.is_none() || self.stopped_after.is_none())
    }
}

fn first_byte(access: u8) -> Byte {
    if access & 3 == 2 {
        Byte::High
    } else {
        Byte::Low
    }
}

/// The state of the timer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PitState {
    /// The three channels.
    pub channels: [ChannelState; 3],
    /// Port 61H, bits 3:0: channel 2's GATE, speaker, two check enables.
    pub speaker: u8,
    /// The timer clock up to which channel 0 has raised its interrupts.
    pub seen: u64,
}

/// The interval timer.
#[derive(Debug)]
pub struct Pit {
    rate: Rate,
    s: PitState,
}

impl Pit {
    /// A timer that is not programmed; channel 0 is silent.
    pub fn new(clock: &Clock) -> Self {
        let channels = [true, true, false].map(ChannelState::new);
        let mut pit = Self {
            rate: clock.rate(PIT_HZ),
            s: PitState {
                channels,
                speaker: 0,
                seen: 0,
            },
        };
        pit.reset();
        pit
    }

    /// RESET, after which the clock may have been set back: no channel is programmed, and all
    /// outputs are high.
    pub fn reset(&mut self) {
        self.s.channels = [true, true, false].map(ChannelState::new);
        for channel in &mut self.s.channels {
            channel.mode = 3;
        }
        self.s.speaker = 0;
        self.s.seen = 0;
    }

    /// The state, to be saved.
    pub fn save(&self) -> PitState {
        self.s.clone()
    }

    pub(crate) fn accepts_state(state: &PitState) -> bool {
        state.channels.iter().all(ChannelState::is_valid)
            && state.speaker <= 0xf
            && state.channels[2].gate == (state.speaker & 1 != 0)
    }

    pub(crate) fn restore(&mut self, state: &PitState) {
        self.s = state.clone();
    }

    /// Moves on to a time. Says whether channel 0's output, IRQ 0, rose on the way.
    pub fn advance(&mut self, now: Ticks) -> bool {
        let (from, to) = (self.s.seen, self.rate.count(now));
        if to <= from {
            return false;
        }
        self.s.seen = to;
        let [timer, refresh, speaker] = &mut self.s.channels;
        refresh.advance(from, to);
        speaker.advance(from, to);
        timer.advance(from, to)
    }

    /// The level of IRQ 0, as of the last [`Pit::advance`].
    pub fn irq(&self) -> bool {
        self.s.channels[0].output(self.s.seen)
    }

    /// When IRQ 0 next rises.
    pub fn due(&self) -> Option<Ticks> {
        self.s.channels[0]
            .next_rise(self.s.seen)
            .map(|clock| self.rate.ticks(clock))
    }

    /// Reads port 40H to 43H or 61H at a time to which the timer was advanced; others give FFH.
    pub fn read(&mut self, port: u16) -> u8 {
        let clock = self.s.seen;
        match port {
            0x40..=0x42 => self.s.channels[usize::from(port - 0x40)].read(clock),
            0x61 => {
                let refresh = u8::from(!(clock / REFRESH_CLOCKS).is_multiple_of(2));
                let output = u8::from(self.s.channels[2].output(clock));
                self.s.speaker | refresh << 4 | output << 5
            }
            _ => 0xff,
        }
    }

    /// Writes port 40H to 43H or 61H at a time to which the timer was advanced.
    pub fn write(&mut self, port: u16, value: u8) {
        let clock = self.s.seen;
        match port {
            0x40..=0x42 => self.s.channels[usize::from(port - 0x40)].write(value, clock),
            0x43 => self.write_control(value, clock),
            0x61 => {
                self.s.speaker = value & 0xf;
                self.s.channels[2].set_gate(value & 1 != 0, clock);
            }
            _ => {}
        }
    }

    fn write_control(&mut self, value: u8, clock: u64) {
        let index = usize::from(value >> 6);
        if let Some(channel) = self.s.channels.get_mut(index) {
            if value & 0x30 == 0 {
                channel.latch(clock);
            } else {
                channel.write_control(value);
            }
            return;
        }
        // Read-back: bits 3:1 choose channels, bits 5 and 4 are active low.
        for (index, channel) in self.s.channels.iter_mut().enumerate() {
            if value & (2 << index) == 0 {
                continue;
            }
            if value & 0x20 == 0 {
                channel.latch(clock);
            }
            if value & 0x10 == 0 {
                channel.latch_status(clock);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
    fn output_by_mode_follows_the_data_sheets_figures() {
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
    fn square_wave_of_an_odd_count_is_high_one_clock_longer() {
        let mut pit = pit();
        program(&mut pit, 0, 0x6, 5);
        assert_eq!(outputs(&mut pit, 10), "1110011100");
    }

    #[test]
    fn modes_one_and_five_wait_for_the_gate() {
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
    fn gate_low_holds_the_count_of_mode_zero() {
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
    fn rate_generator_raises_its_interrupt_each_period_and_does_not_drift() {
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
    fn new_count_of_a_rate_generator_takes_effect_at_the_end_of_the_period() {
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
    fn latched_count_stays_until_it_is_read() {
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
    fn read_back_gives_the_status_and_then_the_count() {
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
    fn bcd_count_reads_in_decimal() {
        let mut pit = pit();
        program(&mut pit, 0, 0x5, 0x1000);
        pit.advance(2);
        assert_eq!(read_word(&mut pit, 0x40), 0x0999);
        assert_eq!(pit.due(), Some(1001));
    }

    #[test]
    fn count_of_zero_is_the_largest() {
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
    fn refresh_bit_of_port_61_toggles_every_fifteen_microseconds() {
        let mut pit = pit();
        assert_eq!(pit.read(0x61) & 0x10, 0);
        pit.advance(18);
        assert_eq!(pit.read(0x61) & 0x10, 0x10);
        pit.advance(36);
        assert_eq!(pit.read(0x61) & 0x10, 0);
    }

    proptest! {
        #[test]
        fn any_accesses_leave_a_valid_state(
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
        fn interrupt_rises_exactly_when_it_is_due(control in 0_u8..8, count in 2_u16..300) {
            let mut pit = pit();
            program(&mut pit, 0, control << 1, count);
            let mut level = pit.irq();
            for clock in 1..1000 {
                let due = pit.due();
                let rose = pit.advance(clock);
                prop_assert_eq!(rose, due == Some(clock));
                prop_assert!(rose || level || !pit.irq(), "rose unseen at {}", clock);
                prop_assert!(!rose || pit.irq());
                level = pit.irq();
            }
        }
    }
}
