//! One channel of the 8254.

use super::regs::{Byte, ControlWord, PitAccess, PitMode, PitStatus};

/// Largest count: 0 is written for it.
const COUNT_MAX: u32 = 0x1_0000;
/// Largest count in binary-coded decimal.
const BCD_COUNT_MAX: u32 = 10_000;

/// The state of one channel.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ChannelState {
    /// Counting mode.
    pub mode: PitMode,
    /// The channel counts in binary-coded decimal.
    pub bcd: bool,
    /// Bytes of a count that are read and written.
    pub access: PitAccess,
    /// Level of the GATE input.
    pub gate: bool,
    /// The count in use: 1 to 10000H.
    pub count: u32,
    /// A count that is loaded at the end of the period, or at the next trigger.
    pub next_count: Option<u32>,
    /// The timer clock at which `count` was, or will be, loaded. `None` before a count is written,
    /// and before the trigger of modes 1 and 5.
    pub start: Option<u64>,
    /// GATE is low, and counting stopped after this many clocks.
    pub stopped_after: Option<u64>,
    /// A count was written since the control word.
    pub written: bool,
    /// The low byte of a count whose high byte is not written yet.
    pub low: u8,
    /// The byte that the next write sets.
    pub next_write: Byte,
    /// The byte that the next read returns.
    pub next_read: Byte,
    /// The latched count.
    pub latched: Option<u16>,
    /// The latched status.
    pub latched_status: Option<PitStatus>,
}

impl ChannelState {
    /// A channel that is not programmed.
    pub(super) fn new(gate: bool, mode: PitMode) -> Self {
        Self {
            mode,
            bcd: false,
            access: PitAccess::Both,
            gate,
            count: COUNT_MAX,
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

    /// Clocks since the count was loaded; `None` if it was not.
    fn elapsed(&self, clock: u64) -> Option<u64> {
        match self.stopped_after {
            Some(elapsed) => Some(elapsed),
            None => self.start.and_then(|start| clock.checked_sub(start)),
        }
    }

    /// Level of OUT at timer clock `clock`.
    pub(super) fn output(&self, clock: u64) -> bool {
        debug_assert!(self.count != 0, "a count of 0 is written for the largest");
        let count = u64::from(self.count);
        let elapsed = self.elapsed(clock);
        match self.mode {
            PitMode::TerminalCount => elapsed.is_some_and(|e| e >= count),
            PitMode::OneShot => elapsed.is_none_or(|e| e >= count),
            PitMode::RateGenerator if self.gate => elapsed.is_none_or(|e| e % count != count - 1),
            PitMode::SquareWave if self.gate => {
                elapsed.is_none_or(|e| e % count < count.div_ceil(2))
            }
            PitMode::RateGenerator | PitMode::SquareWave => true,
            PitMode::SoftwareStrobe | PitMode::HardwareStrobe => elapsed != Some(count),
        }
    }

    /// The counting element, in binary.
    pub(super) fn value(&self, clock: u64) -> u32 {
        let count = u64::from(self.count);
        let elapsed = self.elapsed(clock).unwrap_or(0);
        let modulus = u64::from(if self.bcd { BCD_COUNT_MAX } else { COUNT_MAX });
        let value = match self.mode {
            PitMode::RateGenerator => count - elapsed % count,
            PitMode::SquareWave => {
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

    /// The counting element as it is read: in binary or BCD.
    fn encoded_value(&self, clock: u64) -> u16 {
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

    /// The first clock after `clock` at which OUT rises or a period ends.
    pub(super) fn next_rise(&self, clock: u64) -> Option<u64> {
        if self.stopped_after.is_some() {
            return None;
        }
        let start = self.start?;
        let count = u64::from(self.count);
        let rise = match self.mode {
            PitMode::RateGenerator | PitMode::SquareWave => {
                let periods = clock
                    .checked_sub(start)
                    .map_or(1, |e| (e / count).saturating_add(1));
                start.checked_add(periods.checked_mul(count)?)?
            }
            PitMode::SoftwareStrobe | PitMode::HardwareStrobe => start.checked_add(count + 1)?,
            PitMode::TerminalCount | PitMode::OneShot => start.checked_add(count)?,
        };
        (rise > clock).then_some(rise)
    }

    /// Advances from clock `from` to a later one. Returns whether OUT rose in between.
    pub(super) fn advance(&mut self, from: u64, to: u64) -> bool {
        let Some(rise) = self.next_rise(from).filter(|&rise| rise <= to) else {
            return false;
        };
        if self.mode.is_periodic()
            && let Some(count) = self.next_count.take()
        {
            self.count = count;
            self.start = Some(rise);
        }
        true
    }

    /// Programs the channel by a control word, whose access is `access`.
    pub(super) fn write_control(&mut self, word: ControlWord, access: PitAccess) {
        *self = Self {
            bcd: word.bcd(),
            access,
            next_write: access.first_byte(),
            next_read: access.first_byte(),
            ..Self::new(self.gate, word.mode())
        };
    }

    /// Latches the count, unless a latched count has not been read yet.
    pub(super) fn latch(&mut self, clock: u64) {
        if self.latched.is_none() {
            self.latched = Some(self.encoded_value(clock));
        }
    }

    /// Latches the status, unless a latched status has not been read yet.
    pub(super) fn latch_status(&mut self, clock: u64) {
        let status = self.status(clock);
        self.latched_status.get_or_insert(status);
    }

    /// The status byte.
    pub(super) fn status(&self, clock: u64) -> PitStatus {
        let null_count = !self.written
            || self.next_count.is_some()
            || self.start.is_some_and(|start| clock < start);
        PitStatus::new()
            .with_bcd(self.bcd)
            .with_mode(self.mode)
            .with_access(self.access.into_bits())
            .with_null_count(null_count)
            .with_output(self.output(clock))
    }

    /// Reads the channel's port: latched status, latched count or count.
    pub(super) fn read(&mut self, clock: u64) -> u8 {
        if let Some(status) = self.latched_status.take() {
            return status.into();
        }
        let value = self.latched.unwrap_or_else(|| self.encoded_value(clock));
        let byte = self.next_read;
        if self.access == PitAccess::Both && byte == Byte::Low {
            self.next_read = Byte::High;
        } else {
            self.next_read = self.access.first_byte();
            self.latched = None;
        }
        let [low, high] = value.to_le_bytes();
        match byte {
            Byte::Low => low,
            Byte::High => high,
        }
    }

    /// Writes the channel's port: a byte of a count.
    pub(super) fn write(&mut self, value: u8, clock: u64) {
        match (self.access, self.next_write) {
            (PitAccess::Low, _) => self.load(u16::from(value), clock),
            (PitAccess::High, _) => self.load(u16::from(value) << 8, clock),
            (PitAccess::Both, Byte::Low) => {
                self.low = value;
                self.next_write = Byte::High;
                if self.mode == PitMode::TerminalCount {
                    // The first byte stops the count.
                    self.start = None;
                    self.stopped_after = None;
                }
            }
            (PitAccess::Both, Byte::High) => {
                self.next_write = Byte::Low;
                self.load(u16::from_le_bytes([self.low, value]), clock);
            }
        }
    }

    /// Takes a written count.
    fn load(&mut self, raw: u16, clock: u64) {
        let raw = u32::from(raw);
        let count = if self.bcd {
            let digits = (0..4)
                .map(|digit| (raw >> (4 * digit) & 0xf) * 10_u32.pow(digit))
                .sum();
            if digits == 0 { BCD_COUNT_MAX } else { digits }
        } else if raw == 0 {
            COUNT_MAX
        } else {
            raw
        };
        let counting = self.start.is_some() || self.stopped_after.is_some();
        self.written = true;
        if self.mode.is_periodic() && counting || self.mode.is_triggered() {
            // Modes 1 and 5 load it at the next trigger.
            self.next_count = Some(count);
            return;
        }
        self.count = count;
        self.next_count = None;
        self.start_at(clock.saturating_add(1));
    }

    fn start_at(&mut self, clock: u64) {
        if self.gate || self.mode.is_triggered() {
            self.start = Some(clock);
            self.stopped_after = None;
        } else {
            self.start = None;
            self.stopped_after = Some(0);
        }
    }

    /// Drives GATE.
    pub(super) fn set_gate(&mut self, gate: bool, clock: u64) {
        if std::mem::replace(&mut self.gate, gate) == gate || !self.written {
            return;
        }
        let restarts = self.mode.is_triggered() || self.mode.is_periodic();
        if gate && restarts {
            self.count = self.next_count.take().unwrap_or(self.count);
            self.start_at(clock.saturating_add(1));
        } else if gate {
            if let Some(elapsed) = self.stopped_after.take() {
                self.start = Some(clock.saturating_sub(elapsed));
            }
        } else if !self.mode.is_triggered() && self.start.is_some() {
            self.stopped_after = Some(self.elapsed(clock).unwrap_or(0));
            self.start = None;
        }
    }

    /// Whether a channel can be in this state.
    pub(super) fn is_valid(&self) -> bool {
        let count_valid = |count: u32| (1..=COUNT_MAX).contains(&count);
        count_valid(self.count)
            && self.next_count.is_none_or(count_valid)
            && (self.start.is_none() || self.stopped_after.is_none())
    }
}
