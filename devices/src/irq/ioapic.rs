//! The I/O APIC: 24 pins, version 20H (with an EOI register).
//!
//! 82093AA data sheet, "I/O Advanced Programmable Interrupt Controller", and the later chipsets'
//! EOI register. The polarity bit is kept but has no effect: a pin's level says whether the
//! interrupt is asserted.

use serde::{Deserialize, Serialize};

use super::message::{Address, Delivery, Destination, Message};

/// Number of pins.
pub const PINS: usize = 24;

const VECTOR: u64 = 0xff;
const REMOTE_IRR: u64 = 1 << 14;
const LEVEL: u64 = 1 << 15;
const MASKED: u64 = 1 << 16;
/// Vector, delivery mode, destination mode, polarity, trigger mode, mask; destination.
const WRITABLE: u64 = 0xff00_0000_0001_afff;

/// The state of an I/O APIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoapicState {
    /// The register that the window shows.
    pub select: u8,
    /// The ID, 0 to 15.
    pub id: u8,
    /// The redirection table.
    pub entries: [u64; PINS],
    /// Levels of the pins, by bit.
    pub levels: u32,
}

/// An I/O APIC.
#[derive(Debug)]
pub struct Ioapic {
    s: IoapicState,
}

impl Default for Ioapic {
    fn default() -> Self {
        Self::new()
    }
}

impl Ioapic {
    /// After RESET: every pin masked.
    pub fn new() -> Self {
        Self {
            s: IoapicState {
                select: 0,
                id: 0,
                entries: [MASKED; PINS],
                levels: 0,
            },
        }
    }

    /// RESET; the pins keep their levels.
    pub fn reset(&mut self) {
        let levels = self.s.levels;
        *self = Self::new();
        self.s.levels = levels;
    }

    /// The state, to be saved.
    pub fn save(&self) -> IoapicState {
        self.s.clone()
    }

    pub(super) fn accepts_state(state: &IoapicState) -> bool {
        let entry_valid = |entry: &u64| {
            entry & !(WRITABLE | REMOTE_IRR) == 0 && (entry & REMOTE_IRR == 0 || entry & LEVEL != 0)
        };
        state.id < 16 && state.levels >> PINS == 0 && state.entries.iter().all(entry_valid)
    }

    pub(super) fn restore(&mut self, state: &IoapicState) {
        self.s = state.clone();
    }

    /// Reads `data.len()` bytes at `offset` of its page: the select register (00H) and the window
    /// (10H), whole or by bytes.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let register = match offset & !3 {
            0x00 => u32::from(self.s.select),
            0x10 => self.read_window(),
            _ => 0,
        };
        let bytes = register.to_le_bytes();
        let skip = (offset & 3) as usize;
        for (i, byte) in data.iter_mut().enumerate() {
            *byte = bytes.get(skip + i).copied().unwrap_or(0);
        }
    }

    /// Writes bytes at `offset` of its page: also the EOI register (40H). Bytes of the window that
    /// are not written stay. `send` delivers a message and says whether it was accepted.
    pub fn write(&mut self, offset: u64, data: &[u8], send: &mut dyn FnMut(&Message) -> bool) {
        let base = offset & !3;
        let mut bytes = if base == 0x10 { self.read_window() } else { 0 }.to_le_bytes();
        let skip = (offset & 3) as usize;
        for (old, new) in bytes.iter_mut().skip(skip).zip(data) {
            *old = *new;
        }
        let value = u32::from_le_bytes(bytes);
        match base {
            0x00 if skip == 0 => self.s.select = bytes[0],
            0x10 => self.write_window(value, send),
            0x40 if skip == 0 => self.eoi(bytes[0], send),
            _ => {}
        }
    }

    fn read_window(&self) -> u32 {
        match self.s.select {
            0x00 | 0x02 => u32::from(self.s.id) << 24,
            // Version 20H, 23 as the last entry.
            0x01 => 0x0017_0020,
            _ => match self.selected_pin() {
                Some((pin, false)) => (self.s.entries[pin] & 0xffff_ffff) as u32,
                Some((pin, true)) => (self.s.entries[pin] >> 32) as u32,
                None => 0,
            },
        }
    }

    fn write_window(&mut self, value: u32, send: &mut dyn FnMut(&Message) -> bool) {
        if self.s.select == 0 {
            self.s.id = ((value >> 24) & 0xf) as u8;
            return;
        }
        let Some((pin, high)) = self.selected_pin() else {
            return;
        };
        let old = self.s.entries[pin];
        let new = if high {
            u64::from(value) << 32 | old & 0xffff_ffff
        } else {
            old & !0xffff_ffff | u64::from(value)
        };
        let mut entry = new & WRITABLE | old & REMOTE_IRR;
        if entry & LEVEL == 0 {
            entry &= !REMOTE_IRR;
        }
        self.s.entries[pin] = entry;
        self.service_level(pin, send);
    }

    /// The pin whose entry is selected, and whether it is its high half.
    fn selected_pin(&self) -> Option<(usize, bool)> {
        let index = usize::from(self.s.select.checked_sub(0x10)?);
        (index < 2 * PINS).then_some((index / 2, index % 2 == 1))
    }

    /// Drives a pin. An edge on a masked pin is lost, as the data sheet says.
    pub fn set_pin(&mut self, pin: usize, level: bool, send: &mut dyn FnMut(&Message) -> bool) {
        if pin >= PINS {
            return;
        }
        let bit = 1_u32 << pin;
        let rising = level && self.s.levels & bit == 0;
        self.s.levels = if level {
            self.s.levels | bit
        } else {
            self.s.levels & !bit
        };
        let entry = self.s.entries[pin];
        if is_level(entry) {
            self.service_level(pin, send);
        } else if rising
            && entry & MASKED == 0
            && let Some(message) = message(entry)
        {
            send(&message);
        }
    }

    fn service_level(&mut self, pin: usize, send: &mut dyn FnMut(&Message) -> bool) {
        let entry = self.s.entries[pin];
        let asserted = self.s.levels & (1 << pin) != 0;
        if !asserted || !is_level(entry) || entry & (MASKED | REMOTE_IRR) != 0 {
            return;
        }
        // Not accepted: asked again when the pin or the entry changes.
        if message(entry).is_some_and(|message| send(&message)) {
            self.s.entries[pin] |= REMOTE_IRR;
        }
    }

    /// A level-triggered interrupt ended; a pin that still asserts it raises it again.
    pub fn eoi(&mut self, vector: u8, send: &mut dyn FnMut(&Message) -> bool) {
        for pin in 0..PINS {
            let entry = self.s.entries[pin];
            if entry & REMOTE_IRR != 0 && entry & VECTOR == u64::from(vector) {
                self.s.entries[pin] &= !REMOTE_IRR;
                self.service_level(pin, send);
            }
        }
    }
}

/// Level-triggered, and in a delivery mode that can be.
fn is_level(entry: u64) -> bool {
    entry & LEVEL != 0 && (entry >> 8) & 7 <= 1
}

fn message(entry: u64) -> Option<Message> {
    let address = Address::Narrow((entry >> 56) as u8);
    let destination = if entry & (1 << 11) == 0 {
        Destination::Physical(address)
    } else {
        Destination::Logical(address)
    };
    let delivery = Delivery::from_bits((entry >> 8 & 7) as u32)?;
    if delivery == Delivery::StartUp {
        return None;
    }
    Some(Message {
        destination,
        delivery,
        vector: (entry & VECTOR) as u8,
        level: is_level(entry),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An I/O APIC and what it sent.
    #[derive(Default)]
    struct Rig {
        ioapic: Ioapic,
        sent: Vec<Message>,
        refuse: bool,
    }

    impl Rig {
        fn write(&mut self, offset: u64, data: &[u8]) {
            let Self {
                ioapic,
                sent,
                refuse,
            } = self;
            ioapic.write(offset, data, &mut |message| {
                sent.push(*message);
                !*refuse
            });
        }

        fn set_register(&mut self, register: u8, value: u32) {
            self.write(0x00, &[register]);
            self.write(0x10, &value.to_le_bytes());
        }

        fn register(&mut self, register: u8) -> u32 {
            self.write(0x00, &[register]);
            let mut data = [0; 4];
            self.ioapic.read(0x10, &mut data);
            u32::from_le_bytes(data)
        }

        fn set_pin(&mut self, pin: usize, level: bool) {
            let Self {
                ioapic,
                sent,
                refuse,
            } = self;
            ioapic.set_pin(pin, level, &mut |message| {
                sent.push(*message);
                !*refuse
            });
        }

        fn eoi(&mut self, vector: u8) {
            let Self { ioapic, sent, .. } = self;
            ioapic.eoi(vector, &mut |message| {
                sent.push(*message);
                true
            });
        }
    }

    #[test]
    fn registers_after_reset_have_the_data_sheets_values() {
        let mut rig = Rig::default();
        assert_eq!(rig.register(0), 0);
        assert_eq!(rig.register(1), 0x0017_0020);
        assert_eq!(rig.register(0x10), 0x1_0000);
        assert_eq!(rig.register(0x3f), 0);
        assert_eq!(rig.register(0x40), 0);
    }

    #[test]
    fn window_written_by_bytes_keeps_the_other_bytes() {
        let mut rig = Rig::default();
        rig.set_register(0x12, 0x1_a5ff);
        rig.write(0x10, &[0x31]);
        assert_eq!(rig.register(0x12), 0x1_a531);
        let mut byte = [0];
        rig.ioapic.read(0x11, &mut byte);
        assert_eq!(byte, [0xa5]);
    }

    #[test]
    fn edge_pin_sends_at_each_rise_and_loses_a_masked_one() {
        let mut rig = Rig::default();
        rig.set_register(0x13, 0x0200_0000);
        rig.set_pin(1, true);
        rig.set_pin(1, false);
        rig.set_register(0x12, 0x0931);
        assert_eq!(rig.sent, []);
        rig.set_pin(1, true);
        rig.set_pin(1, true);
        let message = Message {
            destination: Destination::Logical(Address::Narrow(2)),
            delivery: Delivery::LowestPriority,
            vector: 0x31,
            level: false,
        };
        assert_eq!(rig.sent, [message]);
        assert_eq!(rig.register(0x12), 0x0931);
    }

    #[test]
    fn level_pin_waits_for_the_eoi_and_comes_again_while_asserted() {
        let mut rig = Rig::default();
        rig.set_register(0x12, 0x8031);
        rig.set_pin(1, true);
        assert_eq!(rig.register(0x12), 0xc031);
        rig.set_pin(1, false);
        rig.set_pin(1, true);
        assert_eq!(rig.sent.len(), 1);
        rig.eoi(0x32);
        assert_eq!(rig.sent.len(), 1);
        rig.eoi(0x31);
        assert_eq!(rig.sent.len(), 2);
        rig.set_pin(1, false);
        rig.write(0x40, &0x31_u32.to_le_bytes());
        assert_eq!(rig.register(0x12), 0x8031);
        assert_eq!(rig.sent.len(), 2);
    }

    #[test]
    fn level_pin_unmasked_while_asserted_sends() {
        let mut rig = Rig::default();
        rig.set_register(0x12, 0x1_8031);
        rig.set_pin(1, true);
        assert_eq!(rig.sent, []);
        rig.set_register(0x12, 0x8031);
        assert_eq!(rig.sent.len(), 1);
    }

    #[test]
    fn level_message_that_nobody_accepts_leaves_remote_irr_clear() {
        let mut rig = Rig {
            refuse: true,
            ..Rig::default()
        };
        rig.set_register(0x12, 0x8031);
        rig.set_pin(1, true);
        assert_eq!(rig.register(0x12), 0x8031);
    }

    #[test]
    fn entry_made_edge_triggered_clears_remote_irr() {
        let mut rig = Rig::default();
        rig.set_register(0x12, 0x8031);
        rig.set_pin(1, true);
        rig.set_register(0x12, 0x0031);
        assert_eq!(rig.register(0x12), 0x0031);
    }

    proptest! {
        #[test]
        fn any_accesses_leave_a_valid_state(
            steps in prop::collection::vec(
                (any::<u8>(), 0_u64..0x50, any::<u64>(), 0_usize..9, any::<bool>()), 1..60),
        ) {
            let mut rig = Rig::default();
            for (select, offset, value, len, level) in steps {
                rig.write(0, &[select & 0x3f]);
                rig.write(offset, &value.to_le_bytes()[..len]);
                rig.ioapic.read(offset, &mut value.to_le_bytes()[..len]);
                rig.set_pin(usize::from(select & 0x1f), level);
                let state = rig.ioapic.save();
                prop_assert!(Ioapic::accepts_state(&state));
                let mut copy = Ioapic::new();
                copy.restore(&state);
                prop_assert_eq!(copy.save(), state);
            }
        }
    }
}
