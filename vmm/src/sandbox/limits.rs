//! Resource limits of the process.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::SandboxError;

/// Most descriptors: a machine of 64 vCPUs under KVM with all consoles has less than 100.
const FILES_MAX: u64 = 1024;

/// Lowers the limits to what a run needs. They cannot be raised again.
///
/// A core dump would be a copy of guest memory on the host's disk.
pub(super) fn lower() -> Result<(), SandboxError> {
    let limits = [
        (Resource::Core, "core dumps", 0),
        (Resource::Nofile, "descriptors", FILES_MAX),
    ];
    for (resource, name, limit) in limits {
        let now = getrlimit(resource);
        let limit = now.maximum.map_or(limit, |maximum| maximum.min(limit));
        let lowered = Rlimit {
            current: Some(limit),
            maximum: Some(limit),
        };
        setrlimit(resource, lowered)
            .map_err(|error| SandboxError::Limit(name, io::Error::from(error)))?;
    }
    Ok(())
}
