//! Why an instruction did not complete, and why the dispatch loop was left.
use crate::platform::AbortCause;
use hindsight_regs::vector::{GpFault, Vector};

/// Why an instruction did not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// An exception that pushes no error code.
    NoCode(Vector),
    /// An exception with its error code.
    WithCode(Vector, u32),
    /// A page fault: error code and CR2.
    Page(u32, u64),
    /// A #DB of the fault class, with the DR6 bits to merge.
    Debug(u64),
    /// The interpreter does not implement the instruction.
    Unimplemented,
    /// A repeated string instruction stopped between two iterations; it continues later.
    BetweenIterations,
    /// An x87 error is pending with CR0.NE clear: the instruction waits for an interrupt.
    Frozen,
    /// The open transaction aborts.
    Abort(AbortCause),
    /// RSM read a save area that no processor can have written: the processor shuts down.
    Shutdown,
}

impl Fault {
    /// #UD.
    pub(crate) const UD: Self = Self::NoCode(Vector::UD);
    /// #GP(0).
    pub(crate) const GP: Self = Self::WithCode(Vector::GP, 0);
    /// #SS(0).
    pub(crate) const SS: Self = Self::WithCode(Vector::SS, 0);
    /// #AC(0).
    pub(crate) const AC: Self = Self::WithCode(Vector::AC, 0);
    /// #NM.
    pub(crate) const NM: Self = Self::NoCode(Vector::NM);

    /// Returns vector and error code of the exception.
    ///
    /// The variants that are not exceptions are never delivered; they count as #UD.
    pub(crate) fn exception(self) -> (Vector, Option<u32>) {
        match self {
            Self::NoCode(vector) => (vector, None),
            Self::WithCode(vector, code) => (vector, Some(code)),
            Self::Page(code, _) => (Vector::PF, Some(code)),
            Self::Debug(_) => (Vector::DB, None),
            Self::Unimplemented
            | Self::BetweenIterations
            | Self::Frozen
            | Self::Abort(_)
            | Self::Shutdown => (Vector::UD, None),
        }
    }
}

impl From<GpFault> for Fault {
    fn from(_: GpFault) -> Self {
        Self::GP
    }
}

/// Why the dispatch loop was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExitReason {
    /// Neither a link nor the jump cache has the next block: it must be looked up.
    Lookup,
    /// The budget does not cover the next block, or the block is dead.
    Budget,
    /// The next block begins the next slice.
    SliceEnd,
    /// The event state may have changed: traps, interrupts and debugger stops must be polled.
    Poll,
    /// An instruction faulted.
    Fault,
    /// A software interrupt.
    SoftwareInterrupt(Vector, SoftwareInterruptKind),
}

/// Which instruction raised a software interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SoftwareInterruptKind {
    /// INT n.
    IntN,
    /// INT3 and INTO.
    Trap,
    /// INT1, for which the DPL of the gate does not count.
    Int1,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_codes_are_those_of_vectors_that_have_one() {
        for fault in [
            Fault::UD,
            Fault::GP,
            Fault::SS,
            Fault::AC,
            Fault::NM,
            Fault::Page(2, 0x1000),
            Fault::Debug(1),
        ] {
            let (vector, code) = fault.exception();
            assert_eq!(code.is_some(), vector.has_error_code(), "{vector}");
        }
    }
}
