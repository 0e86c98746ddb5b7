//! What several payloads share.

#![no_std]

pub mod access;
pub mod clock;
pub mod pmu;
