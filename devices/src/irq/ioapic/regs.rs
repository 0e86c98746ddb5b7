//! Registers of the I/O APIC. 82093AA data sheet, "I/O Redirection Table Registers".

use bitfield_struct::bitfield;
use hindsight_regs::apic::DeliveryMode;

use crate::irq::message::{Destination, DestinationId, InterruptMessage};

/// Offset of the register-select register in the page.
pub(super) const IOREGSEL: u64 = 0x00;
/// Offset of the window in the page.
pub(super) const IOWIN: u64 = 0x10;
/// Offset of the EOI register in the page; from version 20H on.
pub(super) const IOEOI: u64 = 0x40;

/// Index of the ID register.
pub(super) const IOAPICID: u8 = 0x00;
/// Index of the version register.
pub(super) const IOAPICVER: u8 = 0x01;
/// Index of the arbitration register.
pub(super) const IOAPICARB: u8 = 0x02;
/// Index of the low half of the first redirection entry.
pub(super) const IOREDTBL: u8 = 0x10;

/// An entry of the redirection table.
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct RedirectionEntry {
    /// The vector.
    pub vector: u8,
    /// The delivery mode, see [`DeliveryMode`].
    #[bits(3)]
    pub delivery_bits: u8,
    /// The destination is logical.
    pub logical: bool,
    /// Delivery status, read-only; always 0 here, as delivery takes no time.
    pub send_pending: bool,
    /// The pin is active low; kept without effect.
    pub active_low: bool,
    /// Read-only: a local APIC accepted the level-triggered interrupt and has not sent an EOI.
    pub remote_irr: bool,
    /// The pin is level-triggered.
    pub level: bool,
    /// The pin is masked.
    pub masked: bool,
    #[bits(39)]
    __: u64,
    /// The destination ID.
    pub destination: u8,
}

impl RedirectionEntry {
    /// The bits that software may write.
    pub(super) const WRITABLE: u64 = Self::new()
        .with_vector(0xff)
        .with_delivery_bits(0b111)
        .with_logical(true)
        .with_active_low(true)
        .with_level(true)
        .with_masked(true)
        .with_destination(0xff)
        .into_bits();

    /// The entry after RESET.
    pub(super) const RESET: Self = Self::new().with_masked(true);

    /// The delivery mode; `None` for the reserved encoding.
    pub fn delivery(self) -> Option<DeliveryMode> {
        DeliveryMode::from_bits(self.delivery_bits().into())
    }

    /// Whether the entry is level-triggered, and in a delivery mode that can be.
    pub fn is_level_triggered(self) -> bool {
        self.level() && self.delivery().is_some_and(DeliveryMode::is_vectored)
    }

    /// The message of this entry; `None` for a delivery mode that an I/O APIC does not send.
    pub(super) fn message(self) -> Option<InterruptMessage> {
        let id = DestinationId::Xapic(self.destination());
        let destination = if self.logical() {
            Destination::Logical(id)
        } else {
            Destination::Physical(id)
        };
        let delivery = self
            .delivery()
            .filter(|&mode| mode != DeliveryMode::StartUp)?;
        Some(InterruptMessage {
            destination,
            delivery,
            vector: self.vector(),
            level: self.is_level_triggered(),
        })
    }

    /// The low or high half, as the window shows it.
    pub(super) fn half(self, high: bool) -> u32 {
        let shift = if high { 32 } else { 0 };
        (self.into_bits() >> shift & 0xffff_ffff) as u32
    }

    /// This entry after software wrote one half.
    pub(super) fn with_half(self, high: bool, value: u32) -> Self {
        let old = self.into_bits();
        let new = if high {
            u64::from(value) << 32 | old & 0xffff_ffff
        } else {
            old & !0xffff_ffff | u64::from(value)
        };
        let entry = Self::from_bits(new & Self::WRITABLE);
        entry.with_remote_irr(self.remote_irr() && entry.level())
    }

    /// Whether an I/O APIC can hold this entry.
    pub(super) fn is_valid(self) -> bool {
        let writable = self.with_remote_irr(false).into_bits();
        writable & !Self::WRITABLE == 0 && (!self.remote_irr() || self.level())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirection_entry_fields_match_the_data_sheet() {
        assert_eq!(RedirectionEntry::WRITABLE, 0xff00_0000_0001_afff);
        let entry = RedirectionEntry::from(0x0300_0000_0001_c931);
        assert_eq!((entry.vector(), entry.destination()), (0x31, 3));
        assert_eq!(entry.delivery(), Some(DeliveryMode::LowestPriority));
        assert!(entry.logical() && entry.remote_irr() && entry.level() && entry.masked());
        assert_eq!(
            u64::from(RedirectionEntry::new().with_send_pending(true)),
            1 << 12
        );
        assert_eq!(
            u64::from(RedirectionEntry::new().with_active_low(true)),
            1 << 13
        );
        assert_eq!(
            (entry.half(false), entry.half(true)),
            (0x1_c931, 0x0300_0000)
        );
    }

    #[test]
    fn nmi_entry_is_never_level_triggered() {
        let entry = RedirectionEntry::from(0x8400);
        assert!(entry.level() && !entry.is_level_triggered());
    }
}
