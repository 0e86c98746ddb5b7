//! Layouts, bits and numbers of the x86 system registers, as the manual gives them.
//!
//! The crate holds what the Intel 64 and IA-32 Architectures Software Developer's Manual (SDM) says
//! and no behaviour, so that a virtual machine monitor and the guests that test it can share it.
//! Names are the manual's; each item cites its section by title, because section numbers move
//! between revisions.
//!
//! - Registers of independent flags are `bitflags` types ([`cr::Cr4`], [`branch::DebugCtl`]).
//! - Registers with fields are newtypes over the raw value with accessors ([`dr::Dr7`],
//!   [`apic::LvtEntry`]). The raw value is public, and no conversion drops reserved bits.
//! - MSR numbers are constants in [`msr`].
//!
//! # Example
//!
//! ```
//! use hindsight_regs::dr::{BreakpointIndex, Condition, Dr6, Dr7, Length};
//!
//! // Breakpoint 2 stops at reads and writes of eight bytes.
//! let index = BreakpointIndex(2);
//! let dr7 = Dr7::RESET.with_breakpoint(index, Condition::ReadWrite, Length::Eight);
//! assert_eq!(dr7.0, 0x0b00_0420);
//! assert!(dr7.is_enabled(index));
//! assert_eq!(dr7.length(index), Length::Eight);
//!
//! // DR6 of a #DB that this breakpoint and the trap flag cause together.
//! let dr6 = Dr6::RESET | (Dr6::B2 | Dr6::BS).bits();
//! assert_eq!(dr6, 0xffff_4ff4);
//! ```
//!
//! # Features
//!
//! - `serde`: `Serialize` and `Deserialize` for register values.

#![no_std]
#![forbid(unsafe_code)]

pub mod apic;
pub mod branch;
pub mod capabilities;
pub mod cpuid;
pub mod cr;
pub mod dr;
pub mod msr;
pub mod pmu;
pub mod rdt;
pub mod rflags;
pub mod vector;
