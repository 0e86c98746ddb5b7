//! Restricted transactional memory: XBEGIN, XEND, XABORT and their accesses.
//!
//! SDM Vol. 1, "Programming with Intel Transactional Synchronization Extensions".
//!
//! Code in a transaction is decoded separately: instructions that cannot be part of one become
//! operations that abort it. All of its accesses take the slow path, which leads to [`shared`]. No
//! transaction is open outside [`crate::Vcpu::run`].

mod checked;
mod lifecycle;
pub(crate) mod shared;
pub(crate) mod state;
