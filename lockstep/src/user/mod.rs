//! User-mode instructions: the interpreter against this host's processor.
//!
//! [`class`] says which instructions are compared together, [`kind`] which instructions are
//! compared at all, and [`stems`] finds every encoding of them. `build` makes batches of code
//! around random instructions. `host` and `interp` run a batch, [`compare`] compares the results
//! and bisects, and [`run`] spreads the batches over processes.

mod batch;
mod build;
pub mod class;
pub mod compare;
mod host;
mod interp;
mod kernel;
pub mod kind;
pub mod reference;
pub mod run;
pub mod stems;
mod values;
