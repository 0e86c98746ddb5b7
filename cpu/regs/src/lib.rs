//! Layouts and numbers of the x86 system registers: what the manual says, and nothing of what we
//! do about it. Shared by the monitor and by guests.
//!
//! Names are those of the Intel 64 and IA-32 Architectures Software Developer's Manual (SDM); each
//! item cites the section by its title.

#![no_std]
#![forbid(unsafe_code)]

pub mod apic;
pub mod branch;
pub mod cpuid;
pub mod cr;
pub mod dr;
pub mod msr;
pub mod pmu;
pub mod rdt;
pub mod rflags;
pub mod vector;
