//! Why KVM_RUN returned, independent of KVM's own structures.

use std::fmt;

/// Direction and data of a port access. `REP INS` and `REP OUTS` may carry several elements.
#[derive(Debug)]
pub enum PortData<'a> {
    /// IN or INS: bytes that the monitor must fill.
    In(&'a mut [u8]),
    /// OUT or OUTS: bytes that the guest wrote.
    Out(&'a [u8]),
}

/// Why a vCPU left KVM_RUN.
///
/// The variants up to [`KvmExit::Wrmsr`] leave an instruction incomplete. It must be completed
/// ([`crate::kvm::vcpu::KvmVcpuFd::complete`]) before the vCPU's state is read, written or moved.
/// At all other exits the state is consistent.
#[derive(Debug)]
pub enum KvmExit<'a> {
    /// A port access.
    Io {
        /// First port.
        port: u16,
        /// Bytes of one element: 1, 2 or 4.
        size: usize,
        /// All elements.
        data: PortData<'a>,
    },
    /// A read of an address without memory.
    MmioRead {
        /// Guest physical address.
        address: u64,
        /// 1 to 8 bytes that the monitor must fill.
        data: &'a mut [u8],
    },
    /// A write to an address without memory.
    MmioWrite {
        /// Guest physical address.
        address: u64,
        /// 1 to 8 bytes.
        data: &'a [u8],
    },
    /// RDMSR of an MSR that the filter denies or that KVM does not know.
    Rdmsr {
        /// MSR number.
        index: u32,
        /// Takes the outcome.
        reply: MsrReply<'a>,
    },
    /// WRMSR of an MSR that the filter denies or that KVM does not know.
    Wrmsr {
        /// MSR number.
        index: u32,
        /// EDX:EAX.
        value: u64,
        /// Takes the outcome.
        reply: MsrReply<'a>,
    },
    /// HLT.
    Halt,
    /// The guest lowered CR8: interrupts that the task priority blocked may now be deliverable.
    TprLowered,
    /// An interrupt can now be injected.
    InterruptWindow,
    /// Another thread kicked the vCPU, or a signal arrived.
    Kicked,
    /// A triple fault.
    Shutdown,
    /// A debug event that KVM_SET_GUEST_DEBUG requested.
    Debug {
        /// Vector: 1 or 3.
        vector: u32,
        /// DR6 of the event.
        dr6: u64,
    },
    /// KVM could not continue.
    InternalError(InternalError),
    /// The hardware refused to enter the guest.
    FailEntry {
        /// KVM's hardware_entry_failure_reason.
        reason: u64,
    },
    /// KVM could not resolve a guest access to host memory.
    MemoryFault {
        /// Guest physical address.
        address: u64,
    },
    /// An exit reason that Hindsight's machines should never produce.
    Unexpected {
        /// KVM's exit_reason.
        reason: u32,
    },
}

impl KvmExit<'_> {
    /// Whether the exit leaves an instruction incomplete.
    pub const fn is_incomplete(&self) -> bool {
        matches!(
            self,
            Self::Io { .. }
                | Self::MmioRead { .. }
                | Self::MmioWrite { .. }
                | Self::Rdmsr { .. }
                | Self::Wrmsr { .. }
        )
    }
}

/// Takes the outcome of an RDMSR or WRMSR exit.
#[derive(Debug)]
pub struct MsrReply<'a> {
    pub(crate) data: &'a mut u64,
    pub(crate) error: &'a mut u8,
}

impl MsrReply<'_> {
    /// RDMSR returns `value`; for WRMSR use [`MsrReply::done`].
    pub const fn value(self, value: u64) {
        *self.data = value;
        *self.error = 0;
    }

    /// Completes the WRMSR.
    pub const fn done(self) {
        *self.error = 0;
    }

    /// Raises #GP(0) in the guest instead.
    pub const fn fault(self) {
        *self.error = 1;
    }
}

/// Why KVM could not continue: KVM_EXIT_INTERNAL_ERROR.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InternalError {
    /// KVM_INTERNAL_ERROR_*: 1 emulation, 2 simultaneous exceptions, 3 delivery of an event, 4
    /// unexpected exit.
    pub suberror: u32,
    /// The bytes at RIP that KVM had fetched: the instruction and perhaps more; empty if unknown.
    pub bytes: Vec<u8>,
}

impl fmt::Display for InternalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.suberror {
            1 => "its instruction emulator lacks this instruction",
            2 => "simultaneous exceptions",
            3 => "an exit while it delivered an event to the guest",
            4 => "an exit reason it did not expect",
            _ => "an unknown internal error",
        })
    }
}
