//! The registers of a vCPU as a debugger sees them: which there are, how they are described to the
//! client, and where each one is in a [`CpuState`](hindsight_cpu::state::CpuState).
//!
//! A [`RegisterLayout`] lists them in the order of their numbers. Those of [`RegisterLayout::general`]
//! make up the `g` packet; the client requests the others one by one. The layout is that of 64-bit
//! code at first, and only the user changes it, whatever mode the vCPU is in: a client that did not
//! ask for another layout would misread the packet.

mod code_model;
mod describe;
mod fields;
mod info;
mod layout;
mod location;
mod msrs;
mod read;
mod write;
mod xsave;

pub use code_model::CodeModel;
pub use info::{AvailableRegisters, RegisterInfo};
pub use layout::RegisterLayout;
pub use location::RegisterLocation;
pub use msrs::{MsrRegister, msr_registers};
pub use read::read_register;
pub use write::{RegisterError, write_register};
