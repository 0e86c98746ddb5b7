//! Folders of the host as virtio file systems.
//!
//! FUSE messages are parsed and files are accessed by the crate fuse-backend-rs. Before that, a message
//! passes the module `filter`, which is all that makes a share read-only.

mod filter;
mod server;
mod spec;

pub use server::{ShareError, open};
pub use spec::ShareSpec;
