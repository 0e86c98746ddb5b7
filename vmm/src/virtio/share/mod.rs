//! Folders of the host as virtio file systems.
//!
//! The crate fuse-backend-rs parses FUSE messages and accesses the files. Before that, each message
//! passes the module `filter`, and nothing else makes a share read-only.

mod budget;
mod filter;
mod nodes;
mod request;
mod server;
mod spec;

pub use server::{ShareError, open};
pub use spec::ShareSpec;
