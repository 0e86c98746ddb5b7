//! A virtual processor: its thread, its two engines, and the path from an exit to a model.
//!
//! Read [`crate::kvm::exit`] (why KVM stopped), [`dispatch`] (the one match), [`model`] (the MSR
//! path), then [`kvm`] (the loop around KVM_RUN), [`interp`] (the loop around the interpreter),
//! [`engine`] (which of the two runs the guest, and how a machine changes) and [`run_control`]
//! (pause, resume, stop, kick). [`debug`] is what a debugger asks of a paused vCPU. [`recorder`]
//! records events on request, and [`stats`] counts them. [`board`] holds what all threads share.

pub mod board;
pub mod branch_history;
mod branch_ring;
pub mod crash;
pub mod debug;
pub mod dispatch;
pub mod engine;
pub mod halt_watch;
mod hex_bytes;
pub mod interp;
pub mod kernel_function;
mod kernel_search;
pub mod kvm;
pub mod loop_guard;
pub mod model;
pub mod pmu_totals;
pub mod process_tracker;
pub mod recorder;
pub mod reset;
pub mod run_control;
pub mod run_counter;
pub mod stats;
mod thread;
mod trace_events;
pub mod translation;

pub use thread::MachineVcpu;
