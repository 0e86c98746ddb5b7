//! Resource limits of the process.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{SandboxError, SandboxNeeds};

/// Maximum number of open descriptors. 64 vCPUs under KVM with all consoles need less than 100.
const FILES_MAX: u64 = 1024;

/// Lowers the limits to what a run needs. They cannot be raised again.
///
/// A core dump would be a copy of guest memory on the host's disk.
pub(super) fn lower(needs: SandboxNeeds) -> Result<(), SandboxError> {
    // The process holds a descriptor for each file of a shared folder that the guest has looked up.
    let files = if needs.shares { u64::MAX } else { FILES_MAX };
    let limits = [
        (Resource::Core, "core dumps", 0),
        (Resource::Nofile, "descriptors", files),
    ];
    for (resource, name, limit) in limits {
        let now = getrlimit(resource);
        let limit = now.maximum.map_or(limit, |maximum| maximum.min(limit));
        let limit = Some(limit).filter(|limit| *limit != u64::MAX);
        let lowered = Rlimit {
            current: limit,
            maximum: limit,
        };
        setrlimit(resource, lowered)
            .map_err(|error| SandboxError::Limit(name, io::Error::from(error)))?;
    }
    Ok(())
}
