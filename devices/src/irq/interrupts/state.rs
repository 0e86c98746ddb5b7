//! The state of all interrupt controllers as plain data, and its check.

use super::chips::Chips;
use crate::clock::Ticks;
use crate::irq::ioapic::{Ioapic, IoapicState, PINS};
use crate::irq::lapic::{Lapic, LapicState};
use crate::irq::pic::{Pic, PicState};
use crate::pit::{Pit, PitState};
use crate::rtc::{Rtc, RtcState};

/// The state of all controllers and timers, as plain data.
///
/// Counts in it are absolute: the clock must be set to the time of the save before it is restored.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct InterruptsState {
    /// The local APICs, by virtual processor.
    pub lapics: Vec<LapicState>,
    /// The I/O APIC.
    pub ioapic: IoapicState,
    /// The 8259 pair.
    pub pic: PicState,
    /// The interval timer.
    pub pit: PitState,
    /// The real-time clock.
    pub rtc: RtcState,
    /// Levels that devices drive, by line.
    pub lines: u32,
}

/// A state that cannot be restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InterruptsError {
    /// The state belongs to a machine with another number of virtual processors.
    #[error("the state has {found} local APICs, the machine has {expected}")]
    LapicCount {
        /// Of the machine.
        expected: usize,
        /// In the state.
        found: usize,
    },
    /// A local APIC cannot be in its state.
    #[error("the state of local APIC {0} is not valid")]
    Lapic(usize),
    /// The I/O APIC cannot be in its state.
    #[error("the state of the I/O APIC is not valid")]
    Ioapic,
    /// The 8259 pair cannot be in its state.
    #[error("the state of the 8259 pair is not valid")]
    Pic,
    /// The interval timer cannot be in its state.
    #[error("the state of the interval timer is not valid")]
    Pit,
    /// The real-time clock cannot be in its state.
    #[error("the state of the real-time clock is not valid")]
    Rtc,
    /// A line that does not exist is driven.
    #[error("the levels {0:#x} name lines that do not exist")]
    Lines(u32),
}

impl Chips {
    pub(super) fn save(&self) -> InterruptsState {
        InterruptsState {
            lapics: self.lapics.iter().map(Lapic::save).collect(),
            ioapic: self.ioapic.save(),
            pic: self.pic.save(),
            pit: self.pit.save(),
            rtc: self.rtc.save(),
            lines: self.lines,
        }
    }

    /// Checks the whole state, then replaces that of all chips.
    pub(super) fn restore(
        &mut self,
        state: &InterruptsState,
        now: Ticks,
    ) -> Result<(), InterruptsError> {
        self.check(state)?;
        for (lapic, state) in self.lapics.iter_mut().zip(&state.lapics) {
            lapic.restore(state, now);
        }
        self.ioapic.restore(&state.ioapic);
        self.pic.restore(&state.pic);
        self.pit.restore(&state.pit);
        self.rtc.restore(&state.rtc);
        self.lines = state.lines;
        Ok(())
    }

    fn check(&self, state: &InterruptsState) -> Result<(), InterruptsError> {
        let (expected, found) = (self.lapics.len(), state.lapics.len());
        if expected != found {
            return Err(InterruptsError::LapicCount { expected, found });
        }
        let mut pairs = self.lapics.iter().zip(&state.lapics);
        if let Some(index) = pairs.position(|(lapic, state)| !lapic.accepts_state(state)) {
            return Err(InterruptsError::Lapic(index));
        }
        if !Ioapic::accepts_state(&state.ioapic) {
            return Err(InterruptsError::Ioapic);
        }
        if !Pic::accepts_state(&state.pic) {
            return Err(InterruptsError::Pic);
        }
        if !Pit::accepts_state(&state.pit) {
            return Err(InterruptsError::Pit);
        }
        if !Rtc::accepts_state(&state.rtc) {
            return Err(InterruptsError::Rtc);
        }
        if state.lines >> PINS != 0 || state.lines & (1 << super::CASCADE_LINE) != 0 {
            return Err(InterruptsError::Lines(state.lines));
        }
        Ok(())
    }
}
