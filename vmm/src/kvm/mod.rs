//! KVM: the only module with ioctls.
//!
//! [`KvmDevice`] is `/dev/kvm`, [`vm::KvmVm`] one virtual machine with the MSR filter, and
//! [`vcpu::KvmVcpuFd`] one vCPU, which runs until it exits ([`exit`]). No in-kernel interrupt
//! controller is ever created. [`tiny_vm::TinyVm`] is the one-vCPU machine of the probes.

pub(crate) mod decode;
mod device;
mod error;
pub mod exactness;
pub mod exit;
mod filter;
pub mod host_support;
mod immediate_exit;
pub mod ioctls;
pub mod kick;
pub mod kick_timer;
mod state;
pub mod tiny_vm;
pub mod vcpu;
pub mod vm;

pub use device::{KvmDevice, open_device};
pub use error::KvmError;
pub(crate) use error::{call, ioctl};
