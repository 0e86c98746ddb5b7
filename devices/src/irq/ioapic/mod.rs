//! The I/O APIC: 24 pins, version 20H (with an EOI register).
//!
//! 82093AA data sheet, "I/O Advanced Programmable Interrupt Controller", and the EOI register of
//! later chipsets. The polarity bit is kept but has no effect: a pin's level states whether the
//! interrupt is asserted.

mod regs;
#[cfg(test)]
mod tests;

pub use regs::RedirectionEntry;

use super::message::InterruptMessage;
use crate::inspect::{FieldList, Inspect, InspectField};
use regs::{IOAPICARB, IOAPICID, IOAPICVER, IOEOI, IOREDTBL, IOREGSEL, IOWIN};

/// Number of pins.
pub const PINS: usize = 24;

/// The version register: version 20H, 23 as the last entry.
const VERSION: u32 = 0x0017_0020;

/// The state of an I/O APIC.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct IoapicState {
    /// The index of the register in the window.
    pub select: u8,
    /// The ID, 0 to 15.
    pub id: u8,
    /// The redirection table.
    pub entries: [RedirectionEntry; PINS],
    /// Levels of the pins, by bit.
    pub levels: u32,
}

/// An I/O APIC.
#[derive(Clone, Debug)]
pub struct Ioapic {
    s: IoapicState,
}

impl Default for Ioapic {
    fn default() -> Self {
        Self::new()
    }
}

/// Delivers a message; returns whether a local APIC accepted it.
type SendMessage<'a> = &'a mut dyn FnMut(&InterruptMessage) -> bool;

impl Ioapic {
    /// An I/O APIC after RESET: every pin is masked.
    pub fn new() -> Self {
        Self {
            s: IoapicState {
                select: 0,
                id: 0,
                entries: [RedirectionEntry::RESET; PINS],
                levels: 0,
            },
        }
    }

    /// Applies RESET; the pins keep their levels.
    pub fn reset(&mut self) {
        let levels = self.s.levels;
        *self = Self::new();
        self.s.levels = levels;
    }

    /// The state as plain data.
    pub fn save(&self) -> IoapicState {
        self.s.clone()
    }

    /// Whether an I/O APIC can be in this state.
    pub(super) fn accepts_state(state: &IoapicState) -> bool {
        let entries_valid = state.entries.iter().all(|entry| entry.is_valid());
        state.id < 16 && state.levels >> PINS == 0 && entries_valid
    }

    /// Replaces the state by a saved one, which [`Ioapic::accepts_state`] accepts.
    pub(super) fn restore(&mut self, state: &IoapicState) {
        debug_assert!(Self::accepts_state(state), "the state was checked");
        self.s = state.clone();
    }

    /// Reads `data.len()` bytes at `offset` of the page.
    ///
    /// Registers: select (00H) and window (10H), whole or by bytes; others read as 0.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let register = match offset & !3 {
            IOREGSEL => u32::from(self.s.select),
            IOWIN => self.read_window(),
            _ => 0,
        };
        let bytes = register.to_le_bytes();
        let skip = (offset & 3) as usize;
        for (i, byte) in data.iter_mut().enumerate() {
            *byte = bytes.get(skip + i).copied().unwrap_or(0);
        }
    }

    /// Writes bytes at `offset` of the page.
    ///
    /// Registers: as [`Ioapic::read`], and EOI (40H). Bytes of the window that are not written
    /// keep their values. `send` delivers a message and returns whether it was accepted.
    pub fn write(&mut self, offset: u64, data: &[u8], send: SendMessage<'_>) {
        let register = offset & !3;
        let old = if register == IOWIN {
            self.read_window()
        } else {
            0
        };
        let mut bytes = old.to_le_bytes();
        let skip = (offset & 3) as usize;
        for (old, new) in bytes.iter_mut().skip(skip).zip(data) {
            *old = *new;
        }
        match register {
            IOREGSEL if skip == 0 => self.s.select = bytes[0],
            IOWIN => self.write_window(u32::from_le_bytes(bytes), send),
            IOEOI if skip == 0 => self.eoi(bytes[0], send),
            _ => {}
        }
    }

    fn read_window(&self) -> u32 {
        match self.s.select {
            IOAPICID | IOAPICARB => u32::from(self.s.id) << 24,
            IOAPICVER => VERSION,
            _ => self
                .selected_pin()
                .map_or(0, |(pin, high)| self.s.entries[pin].half(high)),
        }
    }

    fn write_window(&mut self, value: u32, send: SendMessage<'_>) {
        if self.s.select == IOAPICID {
            self.s.id = ((value >> 24) & 0xf) as u8;
            return;
        }
        if let Some((pin, high)) = self.selected_pin() {
            self.s.entries[pin] = self.s.entries[pin].with_half(high, value);
            self.deliver_level(pin, send);
        }
    }

    /// The pin whose entry is selected, and whether the high half is.
    fn selected_pin(&self) -> Option<(usize, bool)> {
        let index = usize::from(self.s.select.checked_sub(IOREDTBL)?);
        (index < 2 * PINS).then_some((index / 2, index % 2 == 1))
    }

    /// Drives a pin, 0 to [`PINS`] less 1; other pins do not exist.
    ///
    /// An edge on a masked pin is lost, as the data sheet says.
    pub fn set_pin(&mut self, pin: usize, level: bool, send: SendMessage<'_>) {
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
        if entry.is_level_triggered() {
            self.deliver_level(pin, send);
        } else if rising
            && !entry.masked()
            && let Some(message) = entry.message()
        {
            send(&message);
        }
    }

    /// Sends the interrupt of a level-triggered pin that is asserted.
    fn deliver_level(&mut self, pin: usize, send: SendMessage<'_>) {
        let entry = self.s.entries[pin];
        let asserted = self.s.levels & (1 << pin) != 0;
        if !asserted || !entry.is_level_triggered() || entry.masked() || entry.remote_irr() {
            return;
        }
        // A message that is not accepted is sent again when the pin or the entry changes.
        if entry.message().is_some_and(|message| send(&message)) {
            self.s.entries[pin].set_remote_irr(true);
        }
    }

    /// Ends a level-triggered interrupt; a pin that is still asserted raises it again.
    pub fn eoi(&mut self, vector: u8, send: SendMessage<'_>) {
        for pin in 0..PINS {
            let entry = self.s.entries[pin];
            if entry.remote_irr() && entry.vector() == vector {
                self.s.entries[pin].set_remote_irr(false);
                self.deliver_level(pin, send);
            }
        }
    }
}

impl Inspect for Ioapic {
    fn inspect(&self) -> Vec<InspectField> {
        let mut fields = FieldList::default();
        fields.push("ID", self.s.id);
        fields.hex("select", self.s.select);
        fields.bits("levels", self.s.levels);
        for (pin, entry) in self.s.entries.iter().enumerate() {
            fields.push(format!("pin {pin}"), describe(*entry));
        }
        fields.finish()
    }
}

/// An entry as its fields: vector, delivery mode, destination, trigger mode and mask.
fn describe(entry: RedirectionEntry) -> String {
    let delivery = entry
        .delivery()
        .map_or_else(|| "reserved".to_owned(), |mode| format!("{mode:?}"));
    let destination = if entry.logical() {
        "logical"
    } else {
        "physical"
    };
    let mut text = format!(
        "vector {:#04x} {delivery} {destination} {:#04x} {}",
        entry.vector(),
        entry.destination(),
        if entry.level() { "level" } else { "edge" },
    );
    if entry.remote_irr() {
        text.push_str(" remote-IRR");
    }
    if entry.masked() {
        text.push_str(" masked");
    }
    text
}
