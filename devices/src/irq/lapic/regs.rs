//! What this model's local APIC implements of the registers in [`hindsight_regs::apic`].

use hindsight_regs::apic::{ICR_ASSERT, ICR_LOGICAL, ICR_OTHERS, LvtEntry, Svr};

use super::LapicFeatures;

/// Indices into the local vector table.
pub mod lvt {
    /// Timer.
    pub const TIMER: usize = 0;
    /// Thermal sensor.
    pub const THERMAL: usize = 1;
    /// Performance monitoring.
    pub const PMC: usize = 2;
    /// LINT0 pin; LINT1 is the next.
    pub const LINT0: usize = 3;
    /// LINT1 pin.
    pub const LINT1: usize = 4;
    /// Error.
    pub const ERROR: usize = 5;
    /// Number of entries.
    pub const COUNT: usize = 6;
}

/// Version register: version 14H, the last LVT entry, EOI-broadcast suppression.
pub(super) const VERSION: u32 = 0x14 | (5 << 16) | (1 << 24);

/// SVR: the bits that software may write, the vector and all flags.
///
/// Bit 9 (focus processor checking) has no effect, but old software sets it.
pub(super) const SVR_WRITABLE: u32 = 0xff | Svr::all().bits();

/// ICR bits 31:0 that software may write: all but delivery status and the reserved ones.
pub(super) const ICR_WRITABLE: u32 = ICR_OTHERS | ICR_LEVEL | ICR_ASSERT | ICR_LOGICAL | 0x7ff;
/// ICR: level-triggered.
const ICR_LEVEL: u32 = 1 << 15;

/// LDR and DFR of xAPIC mode: the bits that software may write.
pub(super) const LDR_WRITABLE: u32 = 0xff00_0000;
/// DFR: the bits that read as ones.
pub(super) const DFR_ONES: u32 = 0x0fff_ffff;

/// Whether the entry is that of a LINT pin.
pub(super) const fn is_lint(index: usize) -> bool {
    matches!(index, lvt::LINT0 | lvt::LINT1)
}

/// The bits of an LVT entry that software may write.
pub(super) fn lvt_writable(index: usize, features: LapicFeatures) -> u32 {
    const VECTOR: u32 = 0xff;
    const DELIVERY_MODE: u32 = 0x700;
    const POLARITY: u32 = 1 << 13;
    const TIMER_PERIODIC: u32 = hindsight_regs::apic::LVT_TIMER_PERIODIC;
    let fields = match index {
        lvt::TIMER if features.tsc_deadline => TIMER_PERIODIC | LvtEntry::TIMER_DEADLINE,
        lvt::TIMER => TIMER_PERIODIC,
        lvt::THERMAL | lvt::PMC => DELIVERY_MODE,
        lvt::LINT0 | lvt::LINT1 => DELIVERY_MODE | POLARITY | LvtEntry::LEVEL,
        _ => 0,
    };
    debug_assert!(index < lvt::COUNT, "the LVT has six entries");
    VECTOR | LvtEntry::MASKED | fields
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writable_bits_match_the_manual() {
        let all = LapicFeatures::default();
        let writable = [0, 1, 2, 3, 4, 5].map(|index| lvt_writable(index, all));
        let expected = [0x7_00ff, 0x1_07ff, 0x1_07ff, 0x1_a7ff, 0x1_a7ff, 0x1_00ff];
        assert_eq!(writable, expected);
        let no_deadline = LapicFeatures {
            tsc_deadline: false,
            ..all
        };
        assert_eq!(lvt_writable(lvt::TIMER, no_deadline), 0x3_00ff);
        assert_eq!((ICR_WRITABLE, SVR_WRITABLE), (0x000c_cfff, 0x13ff));
        assert_eq!(VERSION, 0x0105_0014);
    }
}
