//! Helpers that several payloads share.

#![no_std]

pub mod access;
pub mod branch;
pub mod clock;
pub mod debug;
pub mod ds;
pub mod lbr;
pub mod pmu;
pub mod syscall;
