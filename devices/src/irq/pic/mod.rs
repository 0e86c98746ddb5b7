//! The pair of 8259A interrupt controllers and their edge/level control registers.
//!
//! Intel 8259A data sheet (231468); ELCR as in the 82371 data sheets. Deviation: an edge is latched
//! until it is acknowledged, even if its line falls before, so that a timer that is advanced late
//! loses no tick.

mod chip;
mod regs;
#[cfg(test)]
mod tests;

pub use chip::PicChipState;
pub use regs::NextIcw;

use crate::inspect::{FieldList, Inspect, InspectField};
use chip::CASCADE;
use regs::{PicRegister, decode};

/// Lines that the ELCR leaves edge-triggered: the timer, keyboard and cascade; RTC and FPU error.
const ALWAYS_EDGE: [u8; 2] = [0b0000_0111, 0b0010_0001];

/// The line whose vector an acknowledge without a request returns.
const SPURIOUS_LINE: u8 = 7;

/// A poll's answer, bit 7: there was a request; bits 2:0 are its line.
const POLL_REQUESTED: u8 = 1 << 7;

/// The state of the pair.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PicState {
    /// Master and slave.
    pub chips: [PicChipState; 2],
}

/// The pair of interrupt controllers.
#[derive(Clone, Debug, Default)]
pub struct Pic {
    s: PicState,
}

impl Pic {
    /// A pair that is not initialized: nothing is masked, and vectors begin at 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// Applies RESET; the lines keep their levels.
    pub fn reset(&mut self) {
        for chip in &mut self.s.chips {
            *chip = PicChipState {
                lines: chip.lines,
                ..PicChipState::default()
            };
        }
        self.update_cascade();
    }

    /// The state as plain data.
    pub fn save(&self) -> PicState {
        self.s.clone()
    }

    /// Whether a pair can be in this state.
    pub(super) fn accepts_state(state: &PicState) -> bool {
        let mut chips = state.chips.iter().zip(ALWAYS_EDGE);
        chips.all(|(chip, always_edge)| chip.is_valid(always_edge))
    }

    /// Replaces the state by a saved one, which [`Pic::accepts_state`] accepts.
    pub(super) fn restore(&mut self, state: &PicState) {
        debug_assert!(Self::accepts_state(state), "the state was checked");
        self.s = state.clone();
    }

    /// Drives line 0 to 15. Line 2 is the cascade and cannot be driven.
    pub fn set_line(&mut self, line: u8, level: bool) {
        if line == CASCADE || line > 15 {
            return;
        }
        self.s.chips[usize::from(line >> 3)].set_line(line & 7, level);
        self.update_cascade();
    }

    /// Passes the slave's output to the master.
    fn update_cascade(&mut self) {
        let output = self.s.chips[1].requested(false).is_some();
        let master = &mut self.s.chips[0];
        // The master's request latch holds the slave's output only as long as it lasts.
        if !output {
            master.irr &= !(1 << CASCADE);
        }
        master.set_line(CASCADE, output);
    }

    /// The output to the processor (INTR).
    pub fn output(&self) -> bool {
        self.s.chips[0].requested(true).is_some()
    }

    /// Runs the acknowledge cycles and returns the vector.
    ///
    /// Without a request the vector is that of line 7.
    pub fn acknowledge(&mut self) -> u8 {
        let master = self.s.chips[0].requested(true);
        if let Some(line) = master {
            self.s.chips[0].acknowledge(line);
        }
        let vector = if master == Some(CASCADE) {
            let slave = self.s.chips[1].requested(false);
            if let Some(line) = slave {
                self.s.chips[1].acknowledge(line);
            }
            // Between two requests the slave's output drops, so that the master detects an edge.
            self.s.chips[0].set_line(CASCADE, false);
            self.s.chips[1].base | slave.unwrap_or(SPURIOUS_LINE)
        } else {
            self.s.chips[0].base | master.unwrap_or(SPURIOUS_LINE)
        };
        self.update_cascade();
        vector
    }

    /// Reads port 20H, 21H, A0H, A1H, 4D0H or 4D1H; other ports return FFH.
    pub fn read(&mut self, port: u16) -> u8 {
        let Some((index, register)) = decode(port) else {
            return 0xff;
        };
        let chip = &self.s.chips[index];
        match register {
            PicRegister::Elcr => chip.elcr,
            _ if chip.poll => self.poll(index),
            PicRegister::Data => chip.imr,
            PicRegister::Command if chip.read_isr => chip.isr,
            PicRegister::Command => chip.irr,
        }
    }

    /// A polled read, which acknowledges the request.
    fn poll(&mut self, index: usize) -> u8 {
        let chip = &mut self.s.chips[index];
        chip.poll = false;
        let Some(line) = chip.requested(index == 0) else {
            return 0;
        };
        chip.acknowledge(line);
        if index == 1 {
            self.s.chips[0].set_line(CASCADE, false);
        }
        self.update_cascade();
        POLL_REQUESTED | line
    }

    /// Writes one of the ports of [`Pic::read`]; other ports are ignored.
    pub fn write(&mut self, port: u16, value: u8) {
        let Some((index, register)) = decode(port) else {
            return;
        };
        let chip = &mut self.s.chips[index];
        match register {
            PicRegister::Command => chip.write_command(value),
            PicRegister::Data => chip.write_data(value),
            PicRegister::Elcr => chip.write_elcr(value & !ALWAYS_EDGE[index]),
        }
        self.update_cascade();
    }
}

impl Inspect for Pic {
    fn inspect(&self) -> Vec<InspectField> {
        let mut fields = FieldList::default();
        for (chip, name) in self.s.chips.iter().zip(["master", "slave"]) {
            fields.hex(format!("{name} vectors from"), chip.base);
            fields.bits(format!("{name} IRR"), chip.irr.into());
            fields.bits(format!("{name} ISR"), chip.isr.into());
            fields.bits(format!("{name} IMR"), chip.imr.into());
            fields.bits(format!("{name} ELCR"), chip.elcr.into());
            fields.bits(format!("{name} lines"), chip.lines.into());
            fields.push(format!("{name} highest priority"), chip.first);
            let modes = [
                (chip.auto_eoi, "auto-EOI"),
                (chip.rotate_on_auto_eoi, "rotate"),
                (chip.special_nested, "special-nested"),
                (chip.special_mask, "special-mask"),
                (chip.all_level, "level"),
                (chip.next_icw != NextIcw::None, "initializing"),
            ];
            fields.names(format!("{name} modes"), &modes);
        }
        fields.flag("INTR", self.output());
        fields.finish()
    }
}
