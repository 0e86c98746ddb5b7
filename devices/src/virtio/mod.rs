//! Virtio devices on PCI: the transport, and models of devices without threads and host I/O.
//!
//! Follows "Virtual I/O Device (VIRTIO) Version 1.2", OASIS. There is no legacy interface: a driver
//! must accept VIRTIO_F_VERSION_1. Queues are split rings with indirect descriptors and event indices.
//! A device serves its queues during the guest's access to the notification register, so that a
//! deterministic machine completes a request at the same instruction in every run. It serves a bounded
//! number of them at a time ([`queues::VirtQueues`]); [`crate::pci::PciRoot::serve_backlog`] serves the rest.
//!
//! | Module | Contents |
//! | --- | --- |
//! | [`memory`] | guest memory as devices access it |
//! | [`chain`], [`queues`] | descriptor chains, and the queues of one device |
//! | [`device`] | the trait of a device behind the transport |
//! | [`function`] | the PCI function: capabilities, registers, interrupts, saved state |
//! | [`block`], [`overlay`] | disks, and disks whose changes are thrown away |
//! | [`entropy`] | random numbers |
//! | [`console`] | consoles and serial ports |
//! | [`filesystem`] | files of the host |
//! | [`network`] | network cards |
//! | [`vsock`] | sockets between guest and host |
//!
//! # Errors of the driver
//!
//! A ring or chain that the specification forbids (a loop, a length beyond memory, an index that jumps)
//! sets DEVICE_NEEDS_RESET, is logged in one line, and stops the device until the driver resets it.

#[cfg(test)]
mod backlog_tests;
pub mod block;
pub mod chain;
mod common;
pub mod console;
pub mod device;
pub mod entropy;
pub mod filesystem;
pub mod function;
#[cfg(test)]
mod function_tests;
#[cfg(test)]
mod fuzz_tests;
pub mod memory;
pub mod network;
pub mod overlay;
pub mod queues;
pub mod scsi;
#[cfg(test)]
pub(crate) mod test_driver;
pub mod vsock;

pub use chain::Chain;
pub use device::{VirtioDevice, VirtioDeviceState, VirtioKind, VirtioStateError};
pub use function::{VirtioFunction, VirtioFunctionState};
pub use memory::{DmaMemory, WriteReport, WriteReporter};
pub use queues::{QueueError, VirtQueues};
