//! The check that a processor can be in a saved state: a snapshot is untrusted input.

use thiserror::Error;

use hindsight_regs::cr::{Cr0, Cr4, Efer};
use hindsight_regs::dr::{Dr6, Dr7};
use hindsight_regs::vector::Vector;

use crate::control::{self, ControlMasks};
use crate::state::{CpuState, XSAVE_LEN};

/// Components of XCR0: x87, SSE, AVX, AVX-512 (three) and PKRU.
const XCR0: u64 = 0x2e7;
/// Bits of a segment's access rights that exist in [`crate::state::Segment::access`].
const ACCESS: u16 = 0xf0ff;
/// Vectors below this one are exceptions.
const EXCEPTIONS: u8 = 32;

/// A register or field whose saved value no processor can have.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the saved {part} ({value:#x}) is not possible")]
#[non_exhaustive]
pub struct StateError {
    /// The register or field.
    pub part: &'static str,
    /// The field's value.
    pub value: u64,
}

fn require(possible: bool, part: &'static str, value: u64) -> Result<(), StateError> {
    if possible {
        Ok(())
    } else {
        Err(StateError { part, value })
    }
}

impl CpuState {
    /// Checks that a processor can be in this state.
    ///
    /// # Errors
    ///
    /// Names the first invalid part: a reserved bit, contradicting mode bits, or an XSAVE header
    /// or MXCSR value that would fault when it is loaded.
    pub fn check(&self) -> Result<(), StateError> {
        self.check_control()?;
        self.check_segments()?;
        self.check_debug()?;
        self.check_xsave()?;
        self.check_events()
    }

    fn check_control(&self) -> Result<(), StateError> {
        let pg = self.cr0 & Cr0::PG.bits() != 0;
        let pae = self.cr4 & Cr4::PAE.bits() != 0;
        let lme = self.efer & Efer::LME.bits() != 0;
        let lma = self.efer & Efer::LMA.bits() != 0;
        let ControlMasks {
            cr4,
            efer,
            physical,
        } = ControlMasks::WIDEST;
        let cr0 = self.cr0 & !Cr0::all().bits() == 0 && control::accepts_cr0(self.cr0);
        require(cr0, "CR0", self.cr0)?;
        require(self.cr4 & !cr4 == 0, "CR4", self.cr4)?;
        require(self.cr3 & !physical == 0, "CR3", self.cr3)?;
        require(control::accepts_cr8(self.cr8), "CR8", self.cr8)?;
        let consistent = lma == (lme && pg) && (!lma || pae);
        require(self.efer & !efer == 0 && consistent, "EFER", self.efer)?;
        let possible = control::accepts_rflags(self, self.rflags);
        require(possible, "RFLAGS", self.rflags)
    }

    fn check_segments(&self) -> Result<(), StateError> {
        let all = self.seg.iter().chain([&self.ldtr, &self.tr]);
        for segment in all {
            require(
                segment.access & !ACCESS == 0,
                "segment access rights",
                segment.access.into(),
            )?;
        }
        Ok(())
    }

    fn check_debug(&self) -> Result<(), StateError> {
        require(self.dr6 >> 32 == 0, "DR6", self.dr6)?;
        let fixed = self.dr7 >> 32 == 0 && self.dr7 & Dr7::RESET.0 != 0;
        require(fixed, "DR7", self.dr7)
    }

    /// SDM Vol. 1, "XSAVE Header" and "MXCSR Control and Status Register".
    fn check_xsave(&self) -> Result<(), StateError> {
        const { assert!(XSAVE_LEN > 576) };
        let (sse, avx) = (self.xcr0 >> 1 & 1, self.xcr0 >> 2 & 1);
        let avx512 = self.xcr0 >> 5 & 7;
        let possible = self.xcr0 & !XCR0 == 0
            && self.xcr0 & 1 != 0
            && avx <= sse
            && (avx512 == 0 || avx512 == 7 && avx == 1);
        require(possible, "XCR0", self.xcr0)?;
        let word = |at: usize, len: usize| {
            let bytes = &self.xsave.0[at..at + len];
            bytes.iter().rfold(0, |v, &b| v << 8 | u64::from(b))
        };
        let mxcsr = word(24, 4);
        require(mxcsr >> 16 == 0, "MXCSR", mxcsr)?;
        let present = word(512, 8);
        require(present & !XCR0 == 0, "XSTATE_BV", present)?;
        let rest = (520..576).step_by(8).map(|at| word(at, 8));
        let nonzero = rest.fold(0, |all, value| all | value);
        require(nonzero == 0, "XSAVE header", nonzero)
    }

    fn check_events(&self) -> Result<(), StateError> {
        let events = &self.events;
        if let Some(exception) = events.exception {
            let vector = exception.vector;
            require(
                vector < EXCEPTIONS && vector != Vector::NMI.0,
                "exception vector",
                vector.into(),
            )?;
        }
        require(
            events.deferred_db & !Dr6::BREAKPOINTS == 0,
            "deferred #DB bits",
            events.deferred_db,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::PendingException;

    #[test]
    fn check_accepts_the_state_after_reset() {
        assert_eq!(CpuState::reset().check(), Ok(()));
    }

    #[test]
    fn check_names_the_invalid_part() {
        type Corruption = fn(&mut CpuState);
        let rows: [(&str, Corruption); 14] = [
            ("RFLAGS", |s| s.rflags = 0),
            ("RFLAGS", |s| s.rflags |= 1 << 40),
            ("CR0", |s| s.cr0 |= 1 << 31),
            ("CR4", |s| s.cr4 = 1 << 40),
            ("CR3", |s| s.cr3 = u64::MAX),
            ("EFER", |s| s.efer = 1 << 10),
            ("RFLAGS", |s| s.rflags |= 1 << 17),
            ("segment access rights", |s| s.tr.access = 0x800),
            ("DR6", |s| s.dr6 = u64::MAX),
            ("DR7", |s| s.dr7 = 0),
            ("XCR0", |s| s.xcr0 = 4),
            ("MXCSR", |s| s.xsave.0[26] = 1),
            ("XSAVE header", |s| s.xsave.0[527] = 0x80),
            ("exception vector", |s| {
                s.events.exception = Some(PendingException {
                    vector: 200,
                    error_code: None,
                    payload: None,
                });
            }),
        ];
        for (part, corrupt) in rows {
            let mut state = CpuState::reset();
            corrupt(&mut state);
            assert_eq!(state.check().map_err(|e| e.part), Err(part));
        }
    }
}
