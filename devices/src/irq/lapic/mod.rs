//! The local APIC of one virtual processor, in xAPIC and x2APIC mode.
//!
//! SDM Vol. 3A, "Advanced Programmable Interrupt Controller (APIC)". Not modelled: CMCI (the
//! version register reports six LVT entries), remote read, arbitration. Deviation: delivery takes
//! no time, so a delivery-status bit never reads as set, and no interrupt becomes spurious.

mod access;
mod deliver;
mod inspect;
mod priority;
mod regs;
mod state;
#[cfg(test)]
mod tests;
mod timer;
mod vectors;

pub use priority::Acknowledged;
pub use regs::lvt;
pub use state::LapicState;
pub use vectors::VectorSet;

use hindsight_regs::apic::{ApicBase, Svr};
use hindsight_regs::vector::GpFault;

use super::message::InterruptMessage;
use crate::clock::{Clock, Rate, Ticks};

/// Rate of the local APIC timer in Hz: the crystal clock of CPUID leaf 15H.
pub const CRYSTAL_HZ: u64 = 25_000_000;

/// What CPUID reports about the local APIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LapicFeatures {
    /// `CPUID.1:ECX[21]`.
    pub x2apic: bool,
    /// `CPUID.1:ECX[24]`.
    pub tsc_deadline: bool,
    /// `CPUID.80000008H:EAX[7:0]`.
    pub physical_address_bits: u8,
}

impl Default for LapicFeatures {
    fn default() -> Self {
        Self {
            x2apic: true,
            tsc_deadline: true,
            physical_address_bits: 46,
        }
    }
}

/// What the caller must do outside of this APIC after an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum LapicEffect {
    /// Nothing.
    None,
    /// Send this message.
    Send(InterruptMessage),
    /// Broadcast the end of a level-triggered interrupt to the I/O APICs.
    Eoi(u8),
}

/// A local APIC.
#[derive(Clone, Debug)]
pub struct Lapic {
    id: u32,
    features: LapicFeatures,
    crystal: Rate,
    s: LapicState,
    /// When the timer next raises an interrupt.
    due: Option<Ticks>,
    /// The time to which the timer was advanced.
    advanced_to: Ticks,
}

impl Lapic {
    /// The local APIC with initial APIC ID `id`, as after RESET. ID 0 is the bootstrap processor.
    pub fn new(id: u32, features: LapicFeatures, clock: &Clock) -> Self {
        Self {
            id,
            features,
            crystal: clock.rate(CRYSTAL_HZ),
            s: LapicState::reset(id == 0),
            due: None,
            advanced_to: 0,
        }
    }

    /// Applies RESET; the LINT pins keep their levels.
    pub fn reset(&mut self) {
        self.s = LapicState {
            lint: self.s.lint,
            tsc_offset: self.s.tsc_offset,
            ..LapicState::reset(self.id == 0)
        };
        self.due = None;
    }

    /// Applies INIT: registers as after RESET, but IA32_APIC_BASE and so the mode are kept.
    ///
    /// An application processor then waits for a start-up IPI.
    pub fn init(&mut self) {
        let bsp = self.is_bsp();
        self.s = LapicState {
            apic_base: self.s.apic_base,
            lint: self.s.lint,
            tsc_offset: self.s.tsc_offset,
            nmi: self.s.nmi,
            second_nmi: self.s.second_nmi,
            smi: self.s.smi,
            sipi: self.s.sipi,
            wait_for_sipi: !bsp,
            ..LapicState::reset(bsp)
        };
        self.due = None;
    }

    /// The state as plain data.
    pub fn save(&self) -> LapicState {
        self.s.clone()
    }

    /// Replaces the state by a saved one, which [`Lapic::accepts_state`] accepts.
    pub(super) fn restore(&mut self, state: &LapicState, now: Ticks) {
        debug_assert!(self.accepts_state(state), "the state was checked");
        self.s = state.clone();
        self.advanced_to = now;
        self.update_due();
    }

    /// Whether this APIC can be in `state`.
    pub(super) fn accepts_state(&self, state: &LapicState) -> bool {
        state.is_valid(self.features)
    }

    /// IA32_APIC_BASE.
    pub fn apic_base(&self) -> u64 {
        self.s.apic_base
    }

    /// Writes IA32_APIC_BASE. SDM Vol. 3A, "x2APIC State Transitions".
    ///
    /// # Errors
    /// A reserved bit is set, x2APIC mode does not exist, or the mode cannot be entered from the
    /// current one.
    pub fn set_apic_base(&mut self, value: u64) -> Result<(), GpFault> {
        if !state::apic_base_is_legal(value, self.features) {
            return Err(GpFault);
        }
        let mode = |value: u64| {
            let flags = ApicBase::of(value);
            (flags.contains(ApicBase::EN), flags.contains(ApicBase::EXTD))
        };
        match (mode(self.s.apic_base), mode(value)) {
            ((true, true), (true, false)) | ((false, _), (true, true)) => return Err(GpFault),
            ((true, _), (false, _)) => {
                // A disabled APIC is as if absent; enabled again, it is as after RESET.
                self.s = LapicState {
                    lint: self.s.lint,
                    tsc_offset: self.s.tsc_offset,
                    nmi: self.s.nmi,
                    second_nmi: self.s.second_nmi,
                    smi: self.s.smi,
                    init: self.s.init,
                    sipi: self.s.sipi,
                    wait_for_sipi: self.s.wait_for_sipi,
                    ..LapicState::reset(false)
                };
                self.due = None;
            }
            _ => {}
        }
        self.s.apic_base = value;
        Ok(())
    }

    fn is_enabled(&self) -> bool {
        self.s.base_flags().contains(ApicBase::EN)
    }

    fn is_x2apic(&self) -> bool {
        self.s.base_flags().contains(ApicBase::EXTD)
    }

    fn is_bsp(&self) -> bool {
        self.s.base_flags().contains(ApicBase::BSP)
    }

    fn is_software_enabled(&self) -> bool {
        self.is_enabled() && self.s.svr_flags().contains(Svr::ENABLE)
    }
}
