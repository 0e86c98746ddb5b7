//! The 8254 interval timer, and port 61H, which gates its channel 2.
//!
//! Intel 8254 data sheet (231164). Counts are not stored: they follow from the timer clock's count
//! at which a channel was loaded. Deviation: a new count written to a running mode-3 channel takes
//! effect at the end of the cycle, not of the half cycle.

mod channel;
mod regs;
#[cfg(test)]
mod tests;

pub use channel::ChannelState;
pub use regs::{Byte, PitAccess, PitMode, PitStatus};

use crate::clock::{Clock, Rate, Ticks};
use crate::inspect::{FieldList, Inspect, InspectField};
use regs::{ControlWord, NmiStatusControl, ReadBack};

/// The timer's clock in Hz: 14.31818 MHz / 12.
pub const PIT_HZ: u64 = 1_193_182;

/// Timer clocks between changes of port 61H's refresh bit.
const REFRESH_CLOCKS: u64 = 18;

/// The port of channel 0; channels 1 and 2 follow.
const CHANNEL_PORT: u16 = 0x40;
/// The last port of a channel.
const CHANNEL_PORT_LAST: u16 = 0x42;
/// The port of control words and the read-back command.
const CONTROL_PORT: u16 = 0x43;
/// NMI status and control: GATE and OUT of channel 2.
const NMI_PORT: u16 = 0x61;

/// The state of the timer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PitState {
    /// The three channels.
    pub channels: [ChannelState; 3],
    /// Port 61H, bits 3:0: channel 2's GATE, speaker, two check enables.
    pub speaker: u8,
    /// The timer clock to which the timer was advanced.
    #[cfg_attr(feature = "serde", serde(rename = "seen"))]
    pub advanced_to: u64,
}

/// The interval timer.
#[derive(Clone, Debug)]
pub struct Pit {
    rate: Rate,
    s: PitState,
}

impl Pit {
    /// A timer without programmed channels, as after RESET.
    pub fn new(clock: &Clock) -> Self {
        Self {
            rate: clock.rate(PIT_HZ),
            s: PitState {
                channels: reset_channels(),
                speaker: 0,
                advanced_to: 0,
            },
        }
    }

    /// Applies RESET: no channel is programmed, and all outputs are high.
    ///
    /// The clock may have been set back before.
    pub fn reset(&mut self) {
        self.s = PitState {
            channels: reset_channels(),
            speaker: 0,
            advanced_to: 0,
        };
    }

    /// The state as plain data.
    pub fn save(&self) -> PitState {
        self.s.clone()
    }

    /// Whether the timer can be in this state.
    pub(crate) fn accepts_state(state: &PitState) -> bool {
        let port = NmiStatusControl::from(state.speaker);
        state.channels.iter().all(ChannelState::is_valid)
            && state.speaker & !NmiStatusControl::WRITABLE == 0
            && state.channels[2].gate == port.gate2()
    }

    /// Replaces the state by a saved one, which [`Pit::accepts_state`] accepts.
    pub(crate) fn restore(&mut self, state: &PitState) {
        debug_assert!(Self::accepts_state(state), "the state was checked");
        self.s = state.clone();
    }

    /// Advances to a time. Returns whether channel 0's OUT, IRQ 0, rose in between.
    pub fn advance(&mut self, now: Ticks) -> bool {
        let (from, to) = (self.s.advanced_to, self.rate.count(now));
        if to <= from {
            return false;
        }
        self.s.advanced_to = to;
        let [timer, refresh, speaker] = &mut self.s.channels;
        refresh.advance(from, to);
        speaker.advance(from, to);
        timer.advance(from, to)
    }

    /// The level of IRQ 0, as of the last [`Pit::advance`].
    pub fn irq(&self) -> bool {
        self.s.channels[0].output(self.s.advanced_to)
    }

    /// The next time at which IRQ 0 rises.
    pub fn due(&self) -> Option<Ticks> {
        self.s.channels[0]
            .next_rise(self.s.advanced_to)
            .map(|clock| self.rate.ticks(clock))
    }

    fn port_61(&self) -> NmiStatusControl {
        let clock = self.s.advanced_to;
        NmiStatusControl::from(self.s.speaker)
            .with_refresh(!(clock / REFRESH_CLOCKS).is_multiple_of(2))
            .with_output2(self.s.channels[2].output(clock))
    }

    /// Reads port 40H to 43H or 61H; other ports return FFH.
    ///
    /// The caller has called [`Pit::advance`] for the current time.
    pub fn read(&mut self, port: u16) -> u8 {
        let clock = self.s.advanced_to;
        match port {
            CHANNEL_PORT..=CHANNEL_PORT_LAST => {
                self.s.channels[usize::from(port - CHANNEL_PORT)].read(clock)
            }
            NMI_PORT => self.port_61().into(),
            _ => 0xff,
        }
    }

    /// Writes port 40H to 43H or 61H; other ports are ignored.
    ///
    /// The caller has called [`Pit::advance`] for the current time.
    pub fn write(&mut self, port: u16, value: u8) {
        let clock = self.s.advanced_to;
        match port {
            CHANNEL_PORT..=CHANNEL_PORT_LAST => {
                self.s.channels[usize::from(port - CHANNEL_PORT)].write(value, clock);
            }
            CONTROL_PORT => self.write_control(value, clock),
            NMI_PORT => {
                self.s.speaker = value & NmiStatusControl::WRITABLE;
                let gate = NmiStatusControl::from(value).gate2();
                self.s.channels[2].set_gate(gate, clock);
            }
            _ => {}
        }
    }

    fn write_control(&mut self, value: u8, clock: u64) {
        let word = ControlWord::from(value);
        let index = usize::from(word.channel());
        let Some(channel) = self.s.channels.get_mut(index) else {
            self.read_back(ReadBack::from(value), clock);
            return;
        };
        match PitAccess::from_bits(word.access()) {
            Some(access) => channel.write_control(word, access),
            None => channel.latch(clock),
        }
    }

    fn read_back(&mut self, command: ReadBack, clock: u64) {
        for (index, channel) in self.s.channels.iter_mut().enumerate() {
            if command.channels() & (1 << index) == 0 {
                continue;
            }
            if !command.keep_count() {
                channel.latch(clock);
            }
            if !command.keep_status() {
                channel.latch_status(clock);
            }
        }
    }
}

/// The channels after RESET: GATE of channels 0 and 1 is tied high.
fn reset_channels() -> [ChannelState; 3] {
    [true, true, false].map(|gate| ChannelState::new(gate, PitMode::SquareWave))
}

impl Inspect for Pit {
    fn inspect(&self) -> Vec<InspectField> {
        let clock = self.s.advanced_to;
        let mut fields = FieldList::default();
        for (index, channel) in self.s.channels.iter().enumerate() {
            let mut push = |name: &str, value: &dyn std::fmt::Display| {
                fields.push(format!("channel {index} {name}"), value);
            };
            push("mode", &format_args!("{:?}", channel.mode));
            push("access", &format_args!("{:?}", channel.access));
            push("count", &channel.count);
            push("value", &channel.value(clock));
            push("gate", &u8::from(channel.gate));
            push("output", &u8::from(channel.output(clock)));
            let running = channel.start.is_some();
            push("running", if running { &"yes" } else { &"no" });
        }
        fields.hex("port 61H", u8::from(self.port_61()));
        fields.finish()
    }
}
