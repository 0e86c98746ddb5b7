//! Exact Intel debug and monitoring hardware of one virtual processor, as pure state machines.
//!
//! The crate models what a virtual machine monitor needs to give a guest debug registers, the LBR
//! stack, branch trace store, the performance-monitoring unit with PEBS, Resource Director
//! Technology, the time-stamp counter, CPUID and the MSRs behind them. It has no KVM types, no I/O
//! and no threads: every model is plain data with methods. A model returns a value, a fault or an
//! effect; it never calls the monitor, and never injects an event.
//!
//! - [`msr::Msrs`] holds the MSRs of one processor, and routes RDMSR and WRMSR to their models.
//! - [`debug::DebugRegisters`] executes MOV DR and finds the breakpoints of an access.
//! - [`branch`], [`pmu`], [`rdt`], [`tsc`] and [`transaction`] are the models behind the MSRs.
//! - [`uarch`] models a branch predictor and caches, for events that no architecture defines.
//! - [`state::CpuState`] is the architectural state that engines exchange and snapshots store.
//! - [`cpuid`], [`facility`] and [`profile`] decide what the guest sees.
//!
//! Saved states are plain data. `save` cannot fail; `restore` checks its input, because a snapshot
//! is untrusted, and changes nothing if it fails.
//!
//! # Example
//!
//! The guest switches on the LBR stack, executes a call, and reads the newest record:
//!
//! ```
//! use hindsight_cpu::branch::{Branch, BranchClass};
//! use hindsight_cpu::facility::Facilities;
//! use hindsight_cpu::msr::{MsrConfig, Msrs, Now, RdmsrOutcome, WrmsrOutcome};
//! use hindsight_regs::branch::DebugCtl;
//! use hindsight_regs::msr;
//!
//! let mut msrs = Msrs::new(MsrConfig::new(Facilities::INTERP_DEFAULT, 2_500_000_000));
//! let now = Now { ticks: 0 };
//!
//! // WRMSR IA32_DEBUGCTL. The effect says that the guest has armed a facility: from now on, the
//! // engine must report branches.
//! let outcome = msrs.write(msr::IA32_DEBUGCTL, DebugCtl::LBR.bits(), now);
//! let WrmsrOutcome::Done(effect) = outcome else { panic!("the write is legal") };
//! assert!(effect.armed.is_some());
//! assert!(msrs.observe().branches);
//!
//! // The engine executed a CALL at 0x1000.
//! msrs.record_branches(&[Branch::new(BranchClass::DirectCall, 0x1000, 0x2000)]);
//!
//! // RDMSR of the top of the stack, and of the record that it indexes.
//! assert_eq!(msrs.read(msr::MSR_LASTBRANCH_TOS, now), RdmsrOutcome::Value(1));
//! let from = msrs.read(msr::MSR_LASTBRANCH_0_FROM_IP + 1, now);
//! assert_eq!(from, RdmsrOutcome::Value(0x1000));
//!
//! // A reserved bit raises #GP(0), and an MSR that the processor lacks is claimed by no model.
//! assert_eq!(msrs.write(msr::IA32_DEBUGCTL, 1 << 2, now), WrmsrOutcome::Fault);
//! assert_eq!(msrs.read(0x4000_0000, now), RdmsrOutcome::Unclaimed);
//! ```
//!
//! # Features
//!
//! - `serde`: `Serialize` and `Deserialize` for saved states and configurations.
//! - `toml`: [`profile::CpuProfile`] from TOML files.

#![forbid(unsafe_code)]

pub mod armed;
pub mod branch;
pub mod control;
pub mod cpuid;
pub mod debug;
pub mod facility;
pub mod model;
pub mod msr;
pub mod page_walk;
pub mod pmu;
pub mod profile;
pub mod rdt;
pub mod register_dump;
pub mod smm;
pub mod state;
mod state_check;
pub mod stops;
pub mod transaction;
pub mod tsc;
pub mod uarch;
