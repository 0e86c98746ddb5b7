//! Why a request of the client fails.

use thiserror::Error;

use crate::registers::RegisterError;
use crate::target::{TargetError, Unavailable};

/// Why a debugger's request failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DebugError {
    /// The machine is not paused.
    #[error("the machine runs; interrupt it first")]
    Running,
    /// There is no such vCPU.
    #[error("there is no vCPU {vcpu}: the machine has {count}")]
    NoVcpu {
        /// The number given.
        vcpu: usize,
        /// The number of vCPUs.
        count: usize,
    },
    /// There is no register with this number or name.
    #[error("there is no register {0}")]
    NoRegister(String),
    /// The value does not have the length of the register.
    #[error("the register has {expected} bytes, and {given} were given")]
    Length {
        /// The register's length.
        expected: usize,
        /// The value's length.
        given: usize,
    },
    /// The register does not take the value.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// WRMSR would raise #GP.
    #[error("the processor refuses {value:#x} for MSR {index:#x}: WRMSR would raise #GP")]
    MsrRefused {
        /// The MSR.
        index: u32,
        /// The value.
        value: u64,
    },
    /// The address does not lead to RAM.
    #[error("{0:#x} is not mapped to memory")]
    NotMemory(u64),
    /// The machine cannot record branches.
    #[error("this machine cannot record branches")]
    NoBranchTrace,
    /// The machine lacks the ability.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// The machine did not do it.
    #[error(transparent)]
    Target(#[from] TargetError),
}
