//! One 8259A: requests, priorities and command words.

use super::regs::{EoiCommand, Icw1, Icw4, NextIcw, Ocw2, Ocw3};

/// The line of the master to which the slave's output is connected.
pub(super) const CASCADE: u8 = 2;

/// The state of one 8259A.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PicChipState {
    /// Levels of the lines.
    pub lines: u8,
    /// Requests.
    pub irr: u8,
    /// Masked lines.
    pub imr: u8,
    /// In service.
    pub isr: u8,
    /// ELCR: the input of each set bit is level-triggered, the others are edge-triggered.
    pub elcr: u8,
    /// ICW1 bit 3: all lines are level-triggered.
    pub all_level: bool,
    /// ICW2: the vector of line 0.
    pub base: u8,
    /// The line with the highest priority, 0 to 7.
    pub first: u8,
    /// The initialization command word that the data port expects.
    pub next_icw: NextIcw,
    /// ICW1 bit 0: ICW4 follows.
    pub needs_icw4: bool,
    /// ICW1 bit 1: no ICW3.
    pub single: bool,
    /// Automatic end of interrupt.
    pub auto_eoi: bool,
    /// Rotate on automatic end of interrupt.
    pub rotate_on_auto_eoi: bool,
    /// Special fully nested mode.
    pub special_nested: bool,
    /// Special mask mode.
    pub special_mask: bool,
    /// Reads return the ISR, not the IRR.
    pub read_isr: bool,
    /// The next read is a poll.
    pub poll: bool,
}

impl PicChipState {
    /// The rank of a line in the order of priorities, 0 for the highest.
    fn rank(&self, line: u8) -> u8 {
        line.wrapping_sub(self.first) & 7
    }

    /// The line with the highest priority among `lines`.
    fn highest(&self, lines: u8) -> Option<u8> {
        (0..8)
            .map(|rank| (self.first + rank) & 7)
            .find(|line| lines & (1 << line) != 0)
    }

    fn is_level_triggered(&self, line: u8) -> bool {
        self.all_level || self.elcr & (1 << line) != 0
    }

    /// The line whose request is to be acknowledged next.
    pub(super) fn requested(&self, master: bool) -> Option<u8> {
        let line = self.highest(self.irr & !self.imr)?;
        let mut blocking = self.isr;
        if self.special_mask {
            blocking &= !self.imr;
        }
        if self.special_nested && master && line == CASCADE {
            // A slave in service may interrupt itself.
            blocking &= !(1 << CASCADE);
        }
        let above = self
            .highest(blocking)
            .is_none_or(|in_service| self.rank(line) < self.rank(in_service));
        above.then_some(line)
    }

    pub(super) fn set_line(&mut self, line: u8, level: bool) {
        debug_assert!(line < 8, "an 8259A has eight lines");
        let bit = 1 << line;
        let rising = level && self.lines & bit == 0;
        self.lines = if level {
            self.lines | bit
        } else {
            self.lines & !bit
        };
        if self.is_level_triggered(line) {
            self.irr = if level {
                self.irr | bit
            } else {
                self.irr & !bit
            };
        } else if rising {
            self.irr |= bit;
        }
    }

    /// The acknowledge sequence for a line.
    pub(super) fn acknowledge(&mut self, line: u8) {
        debug_assert!(line < 8, "an 8259A has eight lines");
        let bit = 1 << line;
        if !self.is_level_triggered(line) {
            self.irr &= !bit;
        }
        if !self.auto_eoi {
            self.isr |= bit;
        } else if self.rotate_on_auto_eoi {
            self.set_lowest(line);
        }
    }

    /// Gives a line the lowest priority.
    fn set_lowest(&mut self, line: u8) {
        self.first = (line + 1) & 7;
    }

    pub(super) fn write_command(&mut self, value: u8) {
        if Icw1::from(value).is_icw1() {
            self.write_icw1(value.into());
        } else if Ocw3::from(value).is_ocw3() {
            self.write_ocw3(value.into());
        } else {
            self.write_ocw2(value.into());
        }
    }

    fn write_icw1(&mut self, word: Icw1) {
        *self = Self {
            lines: self.lines,
            elcr: self.elcr,
            base: self.base,
            all_level: word.all_level(),
            single: word.single(),
            needs_icw4: word.needs_icw4(),
            next_icw: NextIcw::Icw2,
            ..Self::default()
        };
        // The edge sense is reset: a high line must rise again, unless it is level-triggered.
        self.irr = self.lines & if self.all_level { 0xff } else { self.elcr };
    }

    fn write_ocw3(&mut self, word: Ocw3) {
        if word.poll() {
            self.poll = true;
        }
        if word.selects_read() {
            self.read_isr = word.read_isr();
        }
        if word.sets_special_mask() {
            self.special_mask = word.special_mask();
        }
    }

    fn write_ocw2(&mut self, word: Ocw2) {
        let line = word.line();
        match word.command() {
            EoiCommand::ClearRotateOnAutoEoi => self.rotate_on_auto_eoi = false,
            EoiCommand::SetRotateOnAutoEoi => self.rotate_on_auto_eoi = true,
            EoiCommand::NonSpecific => {
                self.end_highest();
            }
            EoiCommand::RotateOnNonSpecific => {
                if let Some(line) = self.end_highest() {
                    self.set_lowest(line);
                }
            }
            EoiCommand::Specific => self.isr &= !(1 << line),
            EoiCommand::RotateOnSpecific => {
                self.isr &= !(1 << line);
                self.set_lowest(line);
            }
            EoiCommand::SetPriority => self.set_lowest(line),
            EoiCommand::Nop => {}
        }
    }

    /// Ends the highest interrupt in service, and returns its line.
    fn end_highest(&mut self) -> Option<u8> {
        let mut in_service = self.isr;
        if self.special_mask {
            // A non-specific EOI does not clear a masked line.
            in_service &= !self.imr;
        }
        let line = self.highest(in_service)?;
        self.isr &= !(1 << line);
        Some(line)
    }

    pub(super) fn write_data(&mut self, value: u8) {
        let after_icw3 = if self.needs_icw4 {
            NextIcw::Icw4
        } else {
            NextIcw::None
        };
        match self.next_icw {
            NextIcw::Icw2 => {
                self.base = value & 0xf8;
                self.next_icw = if self.single {
                    after_icw3
                } else {
                    NextIcw::Icw3
                };
            }
            // The wiring of the cascade is fixed.
            NextIcw::Icw3 => self.next_icw = after_icw3,
            NextIcw::Icw4 => {
                let word = Icw4::from(value);
                self.special_nested = word.special_nested();
                self.auto_eoi = word.auto_eoi();
                self.next_icw = NextIcw::None;
            }
            NextIcw::None => self.imr = value,
        }
    }

    /// Writes the ELCR; lines that become level-triggered request by their level.
    pub(super) fn write_elcr(&mut self, value: u8) {
        self.elcr = value;
        self.irr = self.irr & !self.elcr | self.lines & self.elcr;
    }

    /// Whether a chip can be in this state, if the lines `always_edge` are edge-triggered.
    pub(super) fn is_valid(&self, always_edge: u8) -> bool {
        self.base & 7 == 0 && self.first < 8 && self.elcr & always_edge == 0
    }
}
