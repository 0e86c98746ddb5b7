//! Host thunks: vector, x87 and rare integer instructions are executed by the host's processor on the
//! guest's register values, with the memory operand redirected to a buffer.
//!
//! SSE's floating-point exceptions are masked while the host executes. If the sticky flags then show
//! one that the guest has unmasked, the result is discarded and the guest's exception raised. The
//! exceptions of the x87 are unmasked as the guest has them: the host would raise one only at the
//! next x87 instruction, and the thunk saves the state before that.

pub(crate) mod cache;
mod codegen;
mod elements;
mod masking;
mod memory;
mod run;
pub(crate) mod vectors;

pub(crate) use elements::run as run_elements;
#[cfg(test)]
pub(crate) use run::can_run;
pub(crate) use run::{Support, check_state, last_opcode, run, support};
