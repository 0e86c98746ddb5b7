//! What a debugger outside the machine asks of a vCPU.

pub(crate) mod hw_breakpoints;
pub mod inspect;
pub mod stop;
