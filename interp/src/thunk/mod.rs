//! Thunks: machine code that executes one guest instruction on the host.
//!
//! Vector, x87 and rare integer instructions run on the guest's register values, with the memory
//! operand redirected to a buffer.
//!
//! While an SSE instruction runs, the host's floating-point exceptions are masked. If the sticky
//! flags then show an exception that the guest has unmasked, the interpreter discards the result
//! and raises the guest's exception. The x87's exceptions are unmasked as the guest has set them:
//! the host would raise one only at the next x87 instruction, and the thunk saves the x87 state
//! before that.

#[cfg(test)]
mod against_host;
pub(crate) mod cache;
mod codegen;
mod elements;
pub(crate) mod host;
mod masking;
mod memory;
mod run;
pub(crate) mod vectors;

pub(crate) use elements::run as run_elements;
#[cfg(test)]
pub(crate) use run::can_run;
pub(crate) use run::{Support, check_state, last_opcode, run, support};
