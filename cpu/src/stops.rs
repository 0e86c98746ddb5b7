//! What a debugger outside the machine requires of a vCPU: what it stops for, and how it resumes.
//!
//! None of this is visible to the guest, whose own debug registers are in [`crate::debug`]. The
//! types are plain data, shared by the engines that run a vCPU and by the debugger's server.

/// How a vCPU runs when a pause ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResumeAction {
    /// Until something stops it.
    #[default]
    Run,
    /// One instruction, or until RIP leaves a range.
    Step {
        /// Interrupts and NMIs wait meanwhile.
        mask_interrupts: bool,
        /// Continue as long as RIP is at or after the first address and before the second.
        range: Option<(u64, u64)>,
    },
    /// One instruction backwards, in a deterministic run.
    StepBack {
        /// Do not enter the handler of an interrupt.
        mask_interrupts: bool,
    },
    /// Backwards to the last stop, in a deterministic run.
    RunBack,
}

/// Data accesses in a range of linear addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Watchpoint {
    /// First address.
    pub at: u64,
    /// Length in bytes, at least 1.
    pub len: u64,
    /// Stops at reads.
    pub read: bool,
    /// Stops at writes.
    pub write: bool,
}

impl Watchpoint {
    /// Whether an access to `len` bytes at linear address `at` touches the range.
    pub const fn overlaps(&self, at: u64, len: u64) -> bool {
        let last = at.saturating_add(len.saturating_sub(1));
        let own_last = self.at.saturating_add(self.len.saturating_sub(1));
        at <= own_last && self.at <= last
    }
}

/// Accesses to I/O ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortWatchpoint {
    /// First port.
    pub first: u16,
    /// Last port.
    pub last: u16,
    /// Stops at IN and INS.
    pub read: bool,
    /// Stops at OUT and OUTS.
    pub write: bool,
}

/// Which writes to MSRs stop a vCPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MsrStops {
    /// None.
    #[default]
    None,
    /// Writes to the MSRs with these indices.
    Only(Vec<u32>),
    /// All.
    All,
}

/// Everything that a vCPU stops for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StopConditions {
    /// Linear addresses of instructions, before which the vCPU stops.
    pub execute: Vec<u64>,
    /// Data accesses, after which the vCPU stops.
    pub watchpoints: Vec<Watchpoint>,
    /// Port accesses, after which the vCPU stops.
    pub ports: Vec<PortWatchpoint>,
    /// Vectors of exceptions, one bit each, before whose delivery the vCPU stops.
    ///
    /// [`StopHit::Exception`] lists those after whose delivery it stops.
    pub exceptions: u32,
    /// Writes to MSRs, after which the vCPU stops.
    pub msrs: MsrStops,
    /// Control registers after whose writes the vCPU stops: bit N is CRN.
    pub controls: u16,
}

impl StopConditions {
    /// Whether these conditions still include the one that was hit.
    pub fn includes(&self, hit: &StopHit) -> bool {
        match *hit {
            StopHit::Execute(at) => self.execute.contains(&at),
            StopHit::Watchpoint { watchpoint, .. } => self.watchpoints.contains(&watchpoint),
            StopHit::Port { port, write } => self.ports.iter().any(|ports| {
                let enabled = if write { ports.write } else { ports.read };
                enabled && (ports.first..=ports.last).contains(&port)
            }),
            StopHit::Exception { vector, .. } => vector < 32 && self.exceptions >> vector & 1 != 0,
            StopHit::Msr { index, .. } => match &self.msrs {
                MsrStops::None => false,
                MsrStops::Only(indices) => indices.contains(&index),
                MsrStops::All => true,
            },
            StopHit::Control { number, .. } => number < 16 && self.controls >> number & 1 != 0,
        }
    }
}

/// The condition that stopped a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopHit {
    /// The vCPU is about to execute the instruction at this linear address.
    Execute(u64),
    /// The vCPU accessed memory in the range of a watchpoint.
    Watchpoint {
        /// Which of [`StopConditions::watchpoints`].
        watchpoint: Watchpoint,
        /// First byte accessed.
        at: u64,
        /// The access was a write.
        write: bool,
    },
    /// The vCPU accessed a port of [`StopConditions::ports`].
    Port {
        /// The port.
        port: u16,
        /// The access was a write.
        write: bool,
    },
    /// The vCPU raised an exception.
    ///
    /// The exception waits in [`crate::state::PendingEvents::exception`], except for a double
    /// fault, INT3, INTO and INT1, which were delivered.
    Exception {
        /// The exception's vector.
        vector: u8,
        /// The exception's error code, if it has one.
        code: Option<u32>,
    },
    /// The vCPU wrote an MSR.
    Msr {
        /// The MSR's index.
        index: u32,
        /// The value written.
        value: u64,
    },
    /// The vCPU wrote a control register.
    Control {
        /// The register's number.
        number: u8,
        /// The value written.
        value: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writes(at: u64, len: u64) -> Watchpoint {
        Watchpoint {
            at,
            len,
            read: false,
            write: true,
        }
    }

    #[test]
    fn watchpoint_overlaps_accesses_that_touch_one_of_its_bytes() {
        let watchpoint = writes(0x1ffe, 4);
        assert!(watchpoint.overlaps(0x2001, 1) && watchpoint.overlaps(0x1ff8, 8));
        assert!(!watchpoint.overlaps(0x2002, 8) && !watchpoint.overlaps(0x1ff0, 8));
    }

    #[test]
    fn watchpoint_at_the_last_address_does_not_wrap_to_the_first() {
        let watchpoint = writes(u64::MAX, u64::MAX);
        assert!(watchpoint.overlaps(!0xfff, 0x1000));
        assert!(!watchpoint.overlaps(0, 0x1000));
    }

    #[test]
    fn conditions_include_the_hits_that_they_cause() {
        let stops = StopConditions {
            execute: vec![0x1000],
            watchpoints: vec![writes(1, 8)],
            ports: vec![PortWatchpoint {
                first: 0x3f8,
                last: 0x3ff,
                read: false,
                write: true,
            }],
            exceptions: 1 << 14,
            msrs: MsrStops::Only(vec![0x10]),
            controls: 1 << 3,
        };
        let data = |watchpoint| StopHit::Watchpoint {
            watchpoint,
            at: 1,
            write: true,
        };
        let port = |port, write| StopHit::Port { port, write };
        let exception = |vector| StopHit::Exception { vector, code: None };
        let control = |number| StopHit::Control { number, value: 0 };
        let msr = |index| StopHit::Msr { index, value: 0 };
        for hit in [
            StopHit::Execute(0x1000),
            data(writes(1, 8)),
            port(0x3ff, true),
            exception(14),
            control(3),
            msr(0x10),
        ] {
            assert!(stops.includes(&hit), "{hit:?}");
        }
        for other in [
            StopHit::Execute(0x1001),
            data(writes(2, 8)),
            port(0x3f8, false),
            port(0x400, true),
            exception(6),
            exception(32 + 14),
            control(0),
            msr(0x11),
        ] {
            assert!(!stops.includes(&other), "{other:?}");
        }
    }
}
