//! Why a virtual processor stopped running, in our own words.

use std::fmt;

/// Direction and data of a port access. `REP INS` and `REP OUTS` may carry several elements.
#[derive(Debug)]
pub enum Port<'a> {
    /// IN or INS: to be filled.
    In(&'a mut [u8]),
    /// OUT or OUTS.
    Out(&'a [u8]),
}

/// Why the processor stopped. The kinds up to [`Exit::Wrmsr`] leave an instruction half done: it
/// must be completed before the state is read, written or moved
/// ([`crate::kvm::vcpu::KvmVcpuFd::complete`]). At all others the state is consistent.
#[derive(Debug)]
pub enum Exit<'a> {
    /// A port access; `data` holds elements of `size` bytes (1, 2 or 4).
    Io {
        /// First port.
        port: u16,
        /// Bytes of one element.
        size: usize,
        /// All elements.
        data: Port<'a>,
    },
    /// A read where there is no memory: fill 1 to 8 bytes.
    MmioRead {
        /// Guest physical address.
        address: u64,
        /// To be filled.
        data: &'a mut [u8],
    },
    /// A write where there is no memory.
    MmioWrite {
        /// Guest physical address.
        address: u64,
        /// 1 to 8 bytes.
        data: &'a [u8],
    },
    /// RDMSR of an MSR that the filter holds back or that KVM does not know.
    Rdmsr {
        /// MSR number.
        index: u32,
        /// Where the answer goes.
        reply: MsrReply<'a>,
    },
    /// WRMSR likewise.
    Wrmsr {
        /// MSR number.
        index: u32,
        /// EDX:EAX.
        value: u64,
        /// Where the answer goes.
        reply: MsrReply<'a>,
    },
    /// HLT.
    Halt,
    /// The guest lowered CR8: interrupts held back by the task priority may now be due.
    TprLowered,
    /// An interrupt can now be injected.
    InterruptWindow,
    /// Kicked from another thread, or a signal.
    Kicked,
    /// A triple fault.
    Shutdown,
    /// A debug event that the host asked for.
    Debug {
        /// Vector: 1 or 3.
        vector: u32,
        /// DR6 of the event.
        dr6: u64,
    },
    /// KVM met what it cannot do.
    InternalError(InternalError),
    /// The hardware refused to enter the guest.
    FailEntry {
        /// KVM's hardware_entry_failure_reason.
        reason: u64,
    },
    /// KVM reports a guest access it could not resolve to host memory.
    MemoryFault {
        /// Guest physical address.
        address: u64,
    },
    /// An exit reason that no machine of ours should produce.
    Unexpected {
        /// KVM's exit_reason.
        reason: u32,
    },
}

/// Answers a RDMSR or WRMSR exit.
#[derive(Debug)]
pub struct MsrReply<'a> {
    pub(crate) data: &'a mut u64,
    pub(crate) error: &'a mut u8,
}

impl MsrReply<'_> {
    /// RDMSR gives `value`; for WRMSR use [`MsrReply::done`].
    pub const fn value(self, value: u64) {
        *self.data = value;
        *self.error = 0;
    }

    /// WRMSR is done.
    pub const fn done(self) {
        *self.error = 0;
    }

    /// The guest gets #GP(0).
    pub const fn fault(self) {
        *self.error = 1;
    }
}

/// What KVM says of an internal error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InternalError {
    /// KVM_INTERNAL_ERROR_*: 1 emulation, 2 simultaneous exceptions, 3 delivery of an event, 4
    /// unexpected exit.
    pub suberror: u32,
    /// Instruction bytes at RIP as far as KVM gives them.
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
