//! Why a machine does not do what the debugger requires.

use std::borrow::Cow;
use std::error::Error;

use thiserror::Error;

/// Why a machine did not carry out a request.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TargetError {
    /// The machine has ended, so that no vCPU serves requests any more.
    #[error("the machine has ended")]
    Ended,
    /// The machine cannot do this. The text says why, and what the user can do about it.
    #[error("{0}")]
    Unsupported(String),
    /// The hypervisor or the emulator failed.
    #[error("{0}")]
    Failed(#[source] Box<dyn Error + Send + Sync>),
}

/// Why a machine did not resume.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ResumeError {
    /// One vCPU cannot run as requested, so none runs. The client sees that this vCPU stopped again
    /// at once, with the reason as a message.
    #[error("vCPU {vcpu} cannot resume: {reason}")]
    Refused {
        /// The vCPU.
        vcpu: usize,
        /// Why, and what the user can do about it.
        reason: String,
    },
    /// The machine failed to resume.
    #[error(transparent)]
    Target(#[from] TargetError),
}

/// Why a machine lacks an ability. The text says what the user can do about it.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{0}")]
pub struct Unavailable(pub Cow<'static, str>);
