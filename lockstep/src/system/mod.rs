//! System instructions at CPL 0 to 3: the interpreter against KVM.
//!
//! The slots of a batch run under a small kernel that belongs to the batch. Each slot works on
//! random descriptors, gates, page-table entries or control registers, and ends with an event that
//! restores what the next slot expects. A batch is one KVM_RUN, because single steps are slow; a
//! batch that differs is bisected.
//!
//! `build` makes batches (`cases64`, `cases32`), `kernel` puts them into guest memory, `kvm` and
//! `interp` run them, [`compare`] compares the results and bisects, and [`run`] takes the classes
//! in turn.

mod batch;
mod build;
mod cases32;
mod cases64;
pub mod class;
pub mod compare;
pub mod expected;
mod interp;
mod kernel;
mod kernel32;
mod kernel64;
mod kvm;
mod ram;
pub mod run;
