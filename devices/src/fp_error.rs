//! The chipset's logic for x87 errors: FERR#, IGNNE#, and IRQ 13.
//!
//! SDM Vol. 1, "Guidelines for Writing x87 FPU Exception Handlers". With CR0.NE clear a processor
//! asserts FERR# instead of raising #MF. The rising edge requests IRQ 13. A write to port F0H ends
//! that request and asserts IGNNE#, so that the handler can use the x87, until FERR# is deasserted.
//!
//! FERR# of all processors is one wire, and so is IGNNE#.

use crate::bus::Device;
use crate::hooks::IrqLine;

/// The port that ends the interrupt request of an x87 error.
pub const FP_ERROR_PORT: u16 = 0xf0;
/// The ISA interrupt line of x87 errors.
pub const FP_ERROR_LINE: u32 = 13;

/// The state of [`FpError`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct FpErrorState {
    /// The processors that assert FERR#, one bit each.
    pub ferr: u64,
    /// Whether IRQ 13 is requested.
    pub request: bool,
    /// Whether IGNNE# is asserted.
    pub ignne: bool,
}

/// The two flip-flops between the processors' FERR# and IGNNE# pins and IRQ 13.
#[derive(Debug)]
pub struct FpError {
    state: FpErrorState,
    line: IrqLine,
}

impl FpError {
    /// The logic after reset. `line` is IRQ 13.
    pub fn new(line: IrqLine) -> Self {
        Self {
            state: FpErrorState::default(),
            line,
        }
    }

    /// Drives FERR# of processor `cpu`, which is below 64. Returns whether IGNNE# is asserted.
    pub fn set_ferr(&mut self, cpu: usize, asserted: bool) -> bool {
        let before = self.state.ferr;
        if asserted {
            self.state.ferr |= 1 << (cpu % 64);
        } else {
            self.state.ferr &= !(1 << (cpu % 64));
        }
        if self.state.ferr == 0 {
            self.state.ignne = false;
        } else if before == 0 {
            self.request(true);
        }
        self.state.ignne
    }

    fn request(&mut self, level: bool) {
        self.state.request = level;
        self.line.set(level);
    }

    /// Returns the state, to be saved.
    pub fn save(&self) -> FpErrorState {
        self.state
    }

    /// Sets a saved state, and drives IRQ 13 as it says.
    pub fn restore(&mut self, state: FpErrorState) {
        self.state = state;
        self.line.set(state.request);
    }
}

impl Device for FpError {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&mut self, _offset: u64, _data: &[u8]) {
        self.request(false);
        self.state.ignne = self.state.ferr != 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn wired() -> (FpError, impl Fn() -> bool) {
        let level = Arc::new(AtomicBool::new(false));
        let pin = Arc::clone(&level);
        let line = IrqLine::new(move |level| pin.store(level, Ordering::Relaxed));
        (FpError::new(line), move || level.load(Ordering::Relaxed))
    }

    #[test]
    fn ferr_requests_irq_13_until_port_f0_is_written() {
        let (mut logic, line) = wired();
        assert!(!logic.set_ferr(0, true), "IGNNE# is not asserted");
        assert!(line());
        logic.write(0, &[0]);
        assert!(!line());
        assert!(logic.set_ferr(0, true), "IGNNE# is asserted");
        assert!(!line(), "an asserted FERR# has no further edge");
    }

    #[test]
    fn ignne_ends_with_ferr() {
        let (mut logic, line) = wired();
        logic.set_ferr(0, true);
        logic.write(0, &[0]);
        assert!(!logic.set_ferr(0, false));
        assert!(!logic.set_ferr(0, true));
        assert!(line(), "the next error is requested");
    }

    #[test]
    fn port_f0_without_an_error_asserts_nothing() {
        let (mut logic, line) = wired();
        logic.write(0, &[0]);
        assert!(!logic.save().ignne);
        assert!(!line());
    }

    #[test]
    fn handler_may_clear_the_error_before_the_request() {
        let (mut logic, line) = wired();
        logic.set_ferr(0, true);
        logic.set_ferr(0, false);
        assert!(line(), "the request is latched");
        logic.write(0, &[0]);
        assert_eq!(logic.save(), FpErrorState::default());
    }

    #[test]
    fn ferr_of_two_processors_is_one_wire() {
        let (mut logic, _) = wired();
        logic.set_ferr(0, true);
        logic.set_ferr(63, true);
        logic.write(0, &[0]);
        assert!(logic.set_ferr(0, false), "processor 63 holds the wire");
        assert!(!logic.set_ferr(63, false));
    }

    #[test]
    fn saved_state_is_restored() {
        let (mut logic, _) = wired();
        logic.set_ferr(2, true);
        let (mut other, line) = wired();
        other.restore(logic.save());
        assert_eq!(other.save(), logic.save());
        assert!(line());
    }
}
