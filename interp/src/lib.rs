//! An exact interpreter of an x86 processor, with the debug and monitoring facilities of a Xeon.
//!
//! It executes guest code in all modes of the processor, instruction by instruction, with the
//! results that the manual defines, on any x86-64 host and without a hypervisor. A virtual machine
//! monitor uses it beside KVM: the guest runs under KVM until it arms a facility that the host
//! lacks, and then in the interpreter. Both exchange a
//! [`CpuState`](hindsight_cpu::state::CpuState).
//!
//! - [`Vcpu`] is one processor. [`Vcpu::run`] runs it until an [`Exit`].
//! - [`Memory`] is the guest's memory, which processors, devices and another hypervisor share.
//! - [`Platform`] is everything around the processor, as four traits: [`Bus`],
//!   [`MsrHandler`], [`InterruptSource`] and [`Observer`].
//! - [`ModelPlatform`] implements them for a machine of one processor with the models of
//!   `hindsight-cpu`; it needs a [`Bus`] and an [`InterruptController`].
//! - [`supported_cpuid`] says what the interpreter executes on this host.
//!
//! Integer and system instructions are interpreted. x87 and vector instructions are executed on the
//! host's processor with the guest's registers, so that CPUID can only offer what the host has.
//!
//! # Example
//!
//! A guest in 64-bit mode whose branches the LBR stack records:
//!
//! ```
//! use std::sync::Arc;
//!
//! use hindsight_cpu::cpuid::CpuModel;
//! use hindsight_cpu::facility::Facilities;
//! use hindsight_cpu::msr::MsrConfig;
//! use hindsight_cpu::state::CpuState;
//! use hindsight_interp::{
//!     Exit, Memory, ModelPlatform, MsrHandler, NoDevices, NoInterrupts, Vcpu,
//! };
//! use hindsight_regs::branch::DebugCtl;
//! use hindsight_regs::msr;
//!
//! // 2 MiB of RAM, mapped one to one by a large page: PML4, page-directory pointers, directory.
//! let memory = Arc::new(Memory::allocate(&[(0, 0x20_0000)])?);
//! for (table, entry) in [(0x1000, 0x2003_u64), (0x2000, 0x3003), (0x3000, 0x83)] {
//!     assert!(memory.write(table, &entry.to_le_bytes()));
//! }
//! // mov ecx, 3; 1: dec ecx; jnz 1b; hlt
//! let code = [0xb9, 3, 0, 0, 0, 0xff, 0xc9, 0x75, 0xfc, 0xf4];
//! assert!(memory.write(0x5000, &code));
//!
//! let config = MsrConfig::new(Facilities::INTERP_DEFAULT, 1_000_000_000);
//! let model = CpuModel::SkylakeServer;
//! let mut platform = ModelPlatform::new(model, config, NoDevices, NoInterrupts::default());
//! // As the guest would by WRMSR; an error is its #GP(0).
//! assert!(platform.wrmsr(msr::IA32_DEBUGCTL, DebugCtl::LBR.bits()).is_ok());
//!
//! let mut vcpu = Vcpu::new(memory);
//! vcpu.load(&CpuState::long_mode(0x1000, 0x5000, 0x5000));
//! assert_eq!(vcpu.run(&mut platform, 1_000_000), Exit::Halted);
//!
//! // JNZ was taken twice.
//! assert_eq!(platform.rdmsr(msr::MSR_LASTBRANCH_TOS), Ok(2));
//! assert_eq!(platform.rdmsr(msr::MSR_LASTBRANCH_0_FROM_IP + 2), Ok(0x5007));
//! assert_eq!(platform.rdmsr(msr::MSR_LASTBRANCH_0_TO_IP + 2), Ok(0x5005));
//! # Ok::<(), hindsight_interp::MemoryError>(())
//! ```
//!
//! # Features
//!
//! - `serde`: `Serialize` and `Deserialize` for [`Stats`] and [`RetiredCounts`], and for the states
//!   of `hindsight-cpu`.

// Inside: `decode` turns code into blocks of small pre-resolved operations, `code` caches them,
// `run` dispatches them, `mmu` and `access` translate and reach guest memory, and `events` delivers
// exceptions and interrupts.

mod access;
mod boundary;
mod branch_buffer;
mod branches;
mod code;
mod core;
mod counters;
mod counting;
mod debug;
mod debug_state;
mod decode;
mod descriptor;
mod ds;
mod events;
mod exit;
mod facts;
mod fault;
mod features;
mod flags;
mod fp_error;
mod interpreter;
mod iret;
mod jit;
mod memory;
mod mmu;
mod mode;
mod model_platform;
mod ops;
mod platform;
mod platform_slot;
mod portable;
mod progress;
mod registers;
mod run;
mod seg;
mod smm;
mod softvec;
mod stop_sets;
mod stops;
mod supported;
mod task;
mod thunk;
mod transaction;
mod translate;
mod width;

pub use interpreter::{Exit, Kicker, Stats, UnitExits, Vcpu};
pub use memory::{Memory, MemoryError, RegionSpec};
pub use model_platform::{InterruptController, ModelPlatform, NoDevices, NoInterrupts};
pub use platform::{
    AbortCause, Accesses, Branch, BranchClass, Bus, Counting, Delivery, DeliveryFault,
    DeliveryKind, GpFault, InterruptSource, MemoryAccess, MsrHandler, Observe, Observer, Pending,
    Platform, RetiredCounts, Ring, SystemEvent, TransactionEvent,
};
pub use supported::supported_cpuid;

/// The README's examples compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct InterpReadme;
