//! The pair of 8259A interrupt controllers and their edge/level control registers.
//!
//! Intel 8259A data sheet (231468); ELCR as in the 82371 data sheets. Deviation: an edge is latched
//! until it is acknowledged, even if its line falls before, so that a timer that is looked at late
//! loses no tick.

use serde::{Deserialize, Serialize};

/// Lines that the ELCR leaves edge-triggered: the timer, keyboard and cascade; RTC and FPU error.
const ALWAYS_EDGE: [u8; 2] = [0b0000_0111, 0b0010_0001];

/// The line of the master to which the slave's output goes.
const CASCADE: u8 = 2;

/// The state of one 8259A.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PicChipState {
    /// Levels of the lines.
    pub lines: u8,
    /// Requests.
    pub irr: u8,
    /// Masked lines.
    pub imr: u8,
    /// In service.
    pub isr: u8,
    /// Level-triggered lines.
    pub elcr: u8,
    /// ICW1 bit 3: all lines are level-triggered.
    pub all_level: bool,
    /// ICW2: the vector of line 0.
    pub base: u8,
    /// The line with the highest priority.
    pub first: u8,
    /// The initialization word that comes next: 2 to 4, or 0.
    pub next_icw: u8,
    /// ICW4 is to come.
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
    /// Reads give the ISR, not the IRR.
    pub read_isr: bool,
    /// The next read is a poll.
    pub poll: bool,
}

impl PicChipState {
    /// The place of a line in the order of priorities, 0 first.
    fn rank(&self, line: u8) -> u8 {
        line.wrapping_sub(self.first) & 7
    }

    /// The line with the highest priority among `lines`.
    fn best(&self, lines: u8) -> Option<u8> {
        (0..8)
            .map(|rank| (self.first + rank) & 7)
            .find(|line| lines & (1 << line) != 0)
    }

    fn is_level(&self, line: u8) -> bool {
        self.all_level || self.elcr & (1 << line) != 0
    }

    /// The line whose request is to be served.
    fn requested(&self, master: bool) -> Option<u8> {
        let line = self.best(self.irr & !self.imr)?;
        let mut blocking = self.isr;
        if self.special_mask {
            blocking &= !self.imr;
        }
        if self.special_nested && master && line == CASCADE {
            // A slave in service may interrupt itself.
            blocking &= !(1 << CASCADE);
        }
        let free = match self.best(blocking) {
            Some(busy) => self.rank(line) < self.rank(busy),
            None => true,
        };
        free.then_some(line)
    }

    fn set_line(&mut self, line: u8, level: bool) {
        let bit = 1 << line;
        let rising = level && self.lines & bit == 0;
        self.lines = if level {
            self.lines | bit
        } else {
            self.lines & !bit
        };
        if self.is_level(line) {
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
    fn acknowledge(&mut self, line: u8) {
        let bit = 1 << line;
        if !self.is_level(line) {
            self.irr &= !bit;
        }
        if !self.auto_eoi {
            self.isr |= bit;
        } else if self.rotate_on_auto_eoi {
            self.first = (line + 1) & 7;
        }
    }

    fn write_command(&mut self, value: u8) {
        if value & 0x10 != 0 {
            self.write_icw1(value);
        } else if value & 0x08 != 0 {
            self.write_ocw3(value);
        } else {
            self.write_ocw2(value);
        }
    }

    fn write_icw1(&mut self, value: u8) {
        *self = Self {
            lines: self.lines,
            elcr: self.elcr,
            base: self.base,
            all_level: value & 0x08 != 0,
            single: value & 0x02 != 0,
            needs_icw4: value & 0x01 != 0,
            next_icw: 2,
            ..Self::default()
        };
        // The edge sense is reset: a line that is high must rise again, unless it is level.
        self.irr = self.lines & if self.all_level { 0xff } else { self.elcr };
    }

    fn write_ocw3(&mut self, value: u8) {
        if value & 0x04 != 0 {
            self.poll = true;
        }
        if value & 0x02 != 0 {
            self.read_isr = value & 0x01 != 0;
        }
        if value & 0x40 != 0 {
            self.special_mask = value & 0x20 != 0;
        }
    }

    fn write_ocw2(&mut self, value: u8) {
        let level = value & 7;
        let mut serviced = self.isr;
        if self.special_mask {
            // A non-specific EOI does not clear a masked line.
            serviced &= !self.imr;
        }
        match value >> 5 {
            0b000 => self.rotate_on_auto_eoi = false,
            0b100 => self.rotate_on_auto_eoi = true,
            0b001 | 0b101 => {
                if let Some(line) = self.best(serviced) {
                    self.isr &= !(1 << line);
                    if value >> 5 == 0b101 {
                        self.first = (line + 1) & 7;
                    }
                }
            }
            0b011 => self.isr &= !(1 << level),
            0b111 => {
                self.isr &= !(1 << level);
                self.first = (level + 1) & 7;
            }
            0b110 => self.first = (level + 1) & 7,
            _ => {}
        }
    }

    fn write_data(&mut self, value: u8) {
        match self.next_icw {
            2 => {
                self.base = value & 0xf8;
                self.next_icw = match (self.single, self.needs_icw4) {
                    (false, _) => 3,
                    (true, true) => 4,
                    (true, false) => 0,
                };
            }
            // The wiring of the cascade is fixed.
            3 => self.next_icw = if self.needs_icw4 { 4 } else { 0 },
            4 => {
                self.special_nested = value & 0x10 != 0;
                self.auto_eoi = value & 0x02 != 0;
                self.next_icw = 0;
            }
            _ => self.imr = value,
        }
    }

    fn is_valid(&self, always_edge: u8) -> bool {
        self.base & 7 == 0
            && self.first < 8
            && matches!(self.next_icw, 0 | 2 | 3 | 4)
            && self.elcr & always_edge == 0
    }
}

/// The state of the pair.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PicState {
    /// Master and slave.
    pub chips: [PicChipState; 2],
}

/// The pair of interrupt controllers.
#[derive(Debug, Default)]
pub struct Pic {
    s: PicState,
}

impl Pic {
    /// Not yet initialized: nothing masked, vectors from 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// RESET; the lines keep their levels.
    pub fn reset(&mut self) {
        for chip in &mut self.s.chips {
            *chip = PicChipState {
                lines: chip.lines,
                ..PicChipState::default()
            };
        }
        self.cascade();
    }

    /// The state, to be saved.
    pub fn save(&self) -> PicState {
        self.s.clone()
    }

    pub(super) fn accepts_state(state: &PicState) -> bool {
        state
            .chips
            .iter()
            .zip(ALWAYS_EDGE)
            .all(|(chip, edge)| chip.is_valid(edge))
    }

    pub(super) fn restore(&mut self, state: &PicState) {
        self.s = state.clone();
    }

    /// Drives line 0 to 15. Line 2 is the cascade and is not to be had.
    pub fn set_line(&mut self, line: u8, level: bool) {
        if line == CASCADE || line > 15 {
            return;
        }
        self.s.chips[usize::from(line >> 3)].set_line(line & 7, level);
        self.cascade();
    }

    /// Passes the slave's output to the master.
    fn cascade(&mut self) {
        let output = self.s.chips[1].requested(false).is_some();
        let master = &mut self.s.chips[0];
        // The slave's output is held by the master's request latch only as long as it lasts.
        if !output {
            master.irr &= !(1 << CASCADE);
        }
        master.set_line(CASCADE, output);
    }

    /// The output to the processor (INTR).
    pub fn output(&self) -> bool {
        self.s.chips[0].requested(true).is_some()
    }

    /// The acknowledge cycles: the vector. With no request it is that of line 7.
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
            // Between two requests the slave's output drops, so that the master sees an edge.
            self.s.chips[0].set_line(CASCADE, false);
            self.s.chips[1].base | slave.unwrap_or(7)
        } else {
            self.s.chips[0].base | master.unwrap_or(7)
        };
        self.cascade();
        vector
    }

    /// Reads port 20H, 21H, A0H, A1H, 4D0H or 4D1H; other ports give FFH.
    pub fn read(&mut self, port: u16) -> u8 {
        let Some((index, register)) = decode(port) else {
            return 0xff;
        };
        if register == Register::Elcr {
            return self.s.chips[index].elcr;
        }
        if self.s.chips[index].poll {
            return self.poll(index);
        }
        let chip = &self.s.chips[index];
        match register {
            Register::Data => chip.imr,
            _ if chip.read_isr => chip.isr,
            _ => chip.irr,
        }
    }

    /// A polled read is an acknowledge: bit 7 says whether there was a request, bits 2:0 which.
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
        self.cascade();
        0x80 | line
    }

    /// Writes one of the ports of [`Pic::read`].
    pub fn write(&mut self, port: u16, value: u8) {
        let Some((index, register)) = decode(port) else {
            return;
        };
        let chip = &mut self.s.chips[index];
        match register {
            Register::Command => chip.write_command(value),
            Register::Data => chip.write_data(value),
            Register::Elcr => {
                chip.elcr = value & !ALWAYS_EDGE[index];
                // A line that became level-triggered shows its level.
                chip.irr = chip.irr & !chip.elcr | chip.lines & chip.elcr;
            }
        }
        self.cascade();
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Register {
    Command,
    Data,
    Elcr,
}

fn decode(port: u16) -> Option<(usize, Register)> {
    Some(match port {
        0x20 => (0, Register::Command),
        0x21 => (0, Register::Data),
        0xa0 => (1, Register::Command),
        0xa1 => (1, Register::Data),
        0x4d0 => (0, Register::Elcr),
        0x4d1 => (1, Register::Elcr),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// As PC firmware sets it: vectors 20H and 28H, nothing masked.
    fn pic() -> Pic {
        let mut pic = Pic::new();
        initialize(&mut pic, 0x01);
        pic
    }

    fn initialize(pic: &mut Pic, icw4: u8) {
        for (port, base, wiring) in [(0x20, 0x20, 4), (0xa0, 0x28, 2)] {
            pic.write(port, 0x11);
            pic.write(port + 1, base);
            pic.write(port + 1, wiring);
            pic.write(port + 1, icw4);
        }
    }

    fn take(pic: &mut Pic) -> Option<u8> {
        pic.output().then(|| pic.acknowledge())
    }

    #[test]
    fn requests_are_served_by_priority_and_nest() {
        let mut pic = pic();
        pic.set_line(4, true);
        pic.set_line(3, true);
        assert_eq!(take(&mut pic), Some(0x23));
        assert_eq!(take(&mut pic), None);
        pic.set_line(1, true);
        assert_eq!(take(&mut pic), Some(0x21));
        pic.write(0x20, 0x20);
        assert_eq!(take(&mut pic), None);
        pic.write(0x20, 0x20);
        assert_eq!(take(&mut pic), Some(0x24));
    }

    #[test]
    fn slave_line_goes_through_the_cascade() {
        let mut pic = pic();
        pic.set_line(12, true);
        pic.set_line(8, true);
        assert_eq!(take(&mut pic), Some(0x28));
        assert_eq!(take(&mut pic), None);
        pic.write(0xa0, 0x20);
        assert_eq!(take(&mut pic), None);
        pic.write(0x20, 0x20);
        assert_eq!(take(&mut pic), Some(0x2c));
    }

    #[test]
    fn special_fully_nested_master_lets_a_higher_slave_line_through() {
        let mut pic = pic();
        initialize(&mut pic, 0x11);
        pic.set_line(12, true);
        assert_eq!(take(&mut pic), Some(0x2c));
        pic.set_line(3, true);
        assert_eq!(take(&mut pic), None);
        pic.set_line(8, true);
        assert_eq!(take(&mut pic), Some(0x28));
    }

    #[test]
    fn edge_is_seen_once_and_level_until_it_falls() {
        let mut pic = pic();
        pic.write(0x4d0, 0xff);
        assert_eq!(pic.read(0x4d0), 0xf8);
        pic.write(0x4d0, 0x20);
        pic.set_line(1, true);
        pic.set_line(5, true);
        assert_eq!(take(&mut pic), Some(0x21));
        pic.write(0x20, 0x20);
        assert_eq!(take(&mut pic), Some(0x25));
        pic.write(0x20, 0x20);
        assert_eq!(take(&mut pic), Some(0x25));
        pic.write(0x20, 0x20);
        pic.set_line(5, false);
        assert_eq!(take(&mut pic), None);
    }

    #[test]
    fn acknowledge_without_a_request_gives_line_seven_and_nothing_in_service() {
        let mut pic = pic();
        assert_eq!(pic.acknowledge(), 0x27);
        pic.write(0x20, 0x0b);
        assert_eq!(pic.read(0x20), 0);
    }

    #[test]
    fn mask_and_read_registers() {
        let mut pic = pic();
        pic.write(0x21, 0x02);
        pic.set_line(1, true);
        assert_eq!(take(&mut pic), None);
        assert_eq!(pic.read(0x20), 0x02);
        assert_eq!(pic.read(0x21), 0x02);
        pic.write(0x21, 0x00);
        assert_eq!(take(&mut pic), Some(0x21));
        assert_eq!(pic.read(0x20), 0);
        pic.write(0x20, 0x0b);
        assert_eq!(pic.read(0x20), 0x02);
    }

    #[test]
    fn automatic_eoi_with_rotation_puts_the_served_line_last() {
        let mut pic = pic();
        initialize(&mut pic, 0x03);
        pic.write(0x20, 0x80);
        pic.set_line(3, true);
        assert_eq!(take(&mut pic), Some(0x23));
        for line in [3, 4] {
            pic.set_line(line, false);
            pic.set_line(line, true);
        }
        assert_eq!(take(&mut pic), Some(0x24));
        assert_eq!(take(&mut pic), Some(0x23));
    }

    #[test]
    fn rotating_and_specific_commands_change_the_priorities() {
        let mut pic = pic();
        // Set priority: line 5 last, so 6 first.
        pic.write(0x20, 0xc5);
        pic.set_line(0, true);
        pic.set_line(6, true);
        assert_eq!(take(&mut pic), Some(0x26));
        // Specific end of interrupt.
        pic.write(0x20, 0x66);
        assert_eq!(take(&mut pic), Some(0x20));
        // Rotate on non-specific end: line 0 last.
        pic.write(0x20, 0xa0);
        assert_eq!(pic.save().chips[0].first, 1);
    }

    #[test]
    fn special_mask_mode_lets_lower_lines_interrupt_a_masked_one() {
        let mut pic = pic();
        pic.set_line(1, true);
        assert_eq!(take(&mut pic), Some(0x21));
        pic.set_line(4, true);
        pic.write(0x21, 0x02);
        assert_eq!(take(&mut pic), None);
        pic.write(0x20, 0x68);
        assert_eq!(take(&mut pic), Some(0x24));
    }

    #[test]
    fn poll_acknowledges_and_names_the_line() {
        let mut pic = pic();
        pic.set_line(5, true);
        pic.write(0x20, 0x0c);
        assert_eq!(pic.read(0x20), 0x85);
        assert_eq!(take(&mut pic), None);
        pic.write(0x20, 0x0c);
        assert_eq!(pic.read(0x20), 0);
        assert_eq!(pic.save().chips[0].isr, 0x20);
    }

    #[test]
    fn initialization_forgets_requests_and_masks() {
        let mut pic = pic();
        pic.set_line(1, true);
        pic.write(0x21, 0xff);
        initialize(&mut pic, 0x01);
        assert_eq!(pic.read(0x21), 0);
        assert_eq!(take(&mut pic), None);
    }

    proptest! {
        #[test]
        fn any_accesses_leave_a_valid_state(
            steps in prop::collection::vec((0_usize..6, any::<u8>(), 0_u8..17, any::<bool>()), 1..80),
        ) {
            let ports = [0x20, 0x21, 0xa0, 0xa1, 0x4d0, 0x4d1];
            let mut pic = Pic::new();
            for (port, value, line, flag) in steps {
                pic.write(ports[port], value);
                pic.set_line(line, flag);
                if flag {
                    pic.read(ports[port]);
                }
                if pic.output() {
                    pic.acknowledge();
                }
                let state = pic.save();
                prop_assert!(Pic::accepts_state(&state));
                let mut copy = Pic::new();
                copy.restore(&state);
                prop_assert_eq!(copy.save(), state);
            }
        }
    }
}
