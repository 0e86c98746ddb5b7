//! The events that are pending for a virtual processor, in one atomic word.

use crate::irq::lapic::Lapic;

/// Events that are pending for a virtual processor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PendingInterrupts {
    /// A non-maskable interrupt.
    pub nmi: bool,
    /// A system-management interrupt.
    pub smi: bool,
    /// An INIT. It comes before a start-up IPI that is pending with it.
    pub init: bool,
    /// A start-up IPI and its vector.
    pub sipi: Option<u8>,
    /// A maskable interrupt whose priority is above the task priority.
    pub interrupt: bool,
    /// A maskable interrupt that the task priority alone inhibits.
    ///
    /// It cannot be acknowledged. If the processor can lower CR8 without an exit, the caller must
    /// compare CR8 at intervals.
    pub held: bool,
}

impl PendingInterrupts {
    const NMI: u32 = 1 << 0;
    const SMI: u32 = 1 << 1;
    const INIT: u32 = 1 << 2;
    const INTERRUPT: u32 = 1 << 3;
    const SIPI: u32 = 1 << 4;
    const HELD: u32 = 1 << 5;
    /// The start-up IPI's vector begins at this bit.
    const SIPI_VECTOR_SHIFT: u32 = 8;

    /// Whether any event is pending.
    pub fn any(self) -> bool {
        self != Self::default()
    }

    pub(super) fn from_word(word: u32) -> Self {
        let [vector, ..] = (word >> Self::SIPI_VECTOR_SHIFT).to_le_bytes();
        Self {
            nmi: word & Self::NMI != 0,
            smi: word & Self::SMI != 0,
            init: word & Self::INIT != 0,
            interrupt: word & Self::INTERRUPT != 0,
            held: word & Self::HELD != 0,
            sipi: (word & Self::SIPI != 0).then_some(vector),
        }
    }

    pub(super) fn word(lapic: &Lapic) -> u32 {
        let state = lapic.state();
        let bit = |set: bool, bit: u32| if set { bit } else { 0 };
        bit(state.nmi, Self::NMI)
            | bit(state.smi, Self::SMI)
            | bit(state.init, Self::INIT)
            | bit(lapic.has_interrupt(), Self::INTERRUPT)
            | bit(lapic.has_held_interrupt(), Self::HELD)
            | state.sipi.map_or(0, |vector| {
                Self::SIPI | u32::from(vector) << Self::SIPI_VECTOR_SHIFT
            })
    }
}
