//! The virtual processor's facilities as pure state machines: no KVM, no I/O, no threads.
//!
//! Every model here is plain data with methods. It answers what the guest asked for (a value, or a
//! fault) and says what must follow (an effect); it never calls KVM and never injects. Hence all of
//! it is tested without `/dev/kvm`, and the same models stand behind both ways of running.

pub mod armed;
pub mod branch;
pub mod control;
pub mod cpuid;
pub mod debug;
pub mod facility;
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
