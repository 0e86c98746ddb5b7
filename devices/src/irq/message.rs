//! Interrupt messages, as the APICs send them to each other.
//!
//! SDM Vol. 3A, "Issuing Interprocessor Interrupts" and "Message Signalled Interrupts".

use hindsight_regs::apic::DeliveryMode;

/// The receivers of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// The sender.
    Myself,
    /// All, with the sender.
    All,
    /// All but the sender.
    Others,
    /// By APIC ID.
    Physical(DestinationId),
    /// By logical APIC ID.
    Logical(DestinationId),
}

/// The ID in a message's destination field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DestinationId {
    /// Eight bits: from an xAPIC, an I/O APIC or a device. FFH addresses all.
    Xapic(u8),
    /// 32 bits: from an x2APIC. FFFF_FFFFH addresses all.
    X2apic(u32),
}

impl DestinationId {
    /// The ID, zero-extended.
    pub fn value(self) -> u32 {
        match self {
            Self::Xapic(id) => id.into(),
            Self::X2apic(id) => id,
        }
    }

    /// Whether the ID addresses every local APIC.
    pub fn is_broadcast(self) -> bool {
        matches!(self, Self::Xapic(u8::MAX) | Self::X2apic(u32::MAX))
    }
}

/// An interrupt message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterruptMessage {
    /// The receivers.
    pub destination: Destination,
    /// What the message does at its destination.
    pub delivery: DeliveryMode,
    /// The vector.
    pub vector: u8,
    /// The interrupt is level-triggered: its EOI is broadcast to the I/O APICs.
    pub level: bool,
}

/// Address bit 2 of a message-signalled interrupt: the destination is logical.
const MSI_ADDRESS_LOGICAL: u32 = 1 << 2;
/// Address bits 19:12: the destination ID begins here.
const MSI_ADDRESS_DESTINATION_SHIFT: u32 = 12;
/// Data bits 10:8: the delivery mode begins here.
const MSI_DATA_DELIVERY_SHIFT: u32 = 8;
/// Data bit 15: level-triggered.
const MSI_DATA_LEVEL: u32 = 1 << 15;

impl InterruptMessage {
    /// Decodes a message-signalled interrupt from the low half of its address and its data.
    ///
    /// `None` for a reserved delivery mode.
    pub fn from_msi(address: u32, data: u32) -> Option<Self> {
        let [id, ..] = (address >> MSI_ADDRESS_DESTINATION_SHIFT).to_le_bytes();
        let id = DestinationId::Xapic(id);
        let destination = if address & MSI_ADDRESS_LOGICAL == 0 {
            Destination::Physical(id)
        } else {
            Destination::Logical(id)
        };
        let [vector, ..] = data.to_le_bytes();
        Some(Self {
            destination,
            delivery: DeliveryMode::from_bits(data >> MSI_DATA_DELIVERY_SHIFT)?,
            vector,
            level: data & MSI_DATA_LEVEL != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn msi_fields_match_the_manual() {
        let message = InterruptMessage::from_msi(0xfee0_3004, 0x8141).unwrap();
        let expected = InterruptMessage {
            destination: Destination::Logical(DestinationId::Xapic(3)),
            delivery: DeliveryMode::LowestPriority,
            vector: 0x41,
            level: true,
        };
        assert_eq!(message, expected);
        let physical = InterruptMessage::from_msi(0xfeef_f000, 0x441).unwrap();
        let all = DestinationId::Xapic(0xff);
        assert_eq!(physical.destination, Destination::Physical(all));
        assert!(all.is_broadcast() && !DestinationId::X2apic(0xff).is_broadcast());
        assert_eq!(InterruptMessage::from_msi(0xfee0_0000, 0x341), None);
    }
}
