//! Serves the files of one folder.
//!
//! fuse-backend-rs reads requests from descriptor chains in a `GuestMemory` of its own version of
//! vm-memory, which cannot report writes to the interpreters. Therefore this module copies each
//! message through a buffer, in which it builds one descriptor chain.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use fuse_backend_rs::api::server::Server;
use fuse_backend_rs::passthrough::{CachePolicy, Config, PassthroughFs};
use fuse_backend_rs::transport::{Reader, VirtioFsWriter, Writer};
use fuse_virtio_queue::{Queue, QueueT};
use fuse_vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use hindsight_devices::virtio::filesystem::{FileSystem, FuseServer, MESSAGE_MAX};
use thiserror::Error;

use super::budget::Budget;
use super::filter::{FilterVerdict, REPLY_HEADER, judge, refuse};
use super::nodes::NodeTable;
use super::request::{destroy, is_destroy};
use super::spec::ShareSpec;

/// How long the guest may cache names and attributes.
const CACHE_TIME: Duration = Duration::from_secs(5);

/// Addresses in the buffer of the queue, the request and the reply.
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const REQUEST: u64 = 0x1_0000;
const REPLY: u64 = 0x20_0000;
const BUFFER_LEN: usize = 0x40_0000;
const QUEUE_SIZE: u16 = 4;
/// Descriptor flags: another one follows; the device writes.
const NEXT: u16 = 1;
const WRITE: u16 = 2;

const _: () = assert!(REQUEST + MESSAGE_MAX as u64 <= REPLY);
const _: () = assert!(REPLY + MESSAGE_MAX as u64 <= BUFFER_LEN as u64);

/// Why a folder cannot be shared.
#[derive(Debug, Error)]
pub enum ShareError {
    /// The path cannot be opened, or is no folder.
    #[error("{}", .0.display())]
    Open(PathBuf, #[source] io::Error),
    /// The folder's name is not UTF-8.
    #[error("the name of {} is not UTF-8", .0.display())]
    Name(PathBuf),
    /// The buffer for messages cannot be made.
    #[error("the buffer for file requests cannot be allocated: {0}")]
    Buffer(String),
}

/// Opens the device for `spec`.
///
/// # Errors
///
/// The folder cannot be shared.
pub fn open(spec: &ShareSpec) -> Result<FileSystem, ShareError> {
    Ok(FileSystem::new(
        &spec.tag,
        Box::new(FolderServer::new(spec, Budget::new())?),
    ))
}

/// The server of one folder.
struct FolderServer {
    spec: ShareSpec,
    files: MessageServer,
    nodes: NodeTable,
    budget: Budget,
    /// A request failed because all descriptors are those of open files; reported once.
    exhausted: bool,
}

/// Passes messages to the crate's server.
struct MessageServer {
    server: Server<PassthroughFs<()>>,
    buffer: GuestMemoryMmap<()>,
    queue: Queue,
    /// Requests served, as the available ring counts them.
    count: u16,
}

fn passthrough(spec: &ShareSpec) -> Result<PassthroughFs<()>, ShareError> {
    let failed = |error| ShareError::Open(spec.folder.clone(), error);
    let folder = spec.folder.canonicalize().map_err(failed)?;
    if !folder.is_dir() {
        return Err(failed(io::ErrorKind::NotADirectory.into()));
    }
    let root_dir = folder
        .to_str()
        .ok_or_else(|| ShareError::Name(spec.folder.clone()))?;
    let files = PassthroughFs::new(Config {
        root_dir: root_dir.to_owned(),
        attr_timeout: CACHE_TIME,
        entry_timeout: CACHE_TIME,
        cache_policy: CachePolicy::Auto,
        xattr: true,
        ..Config::default()
    });
    keeping_mask(spec.writable, || {
        files.and_then(|files| files.import().map(|()| files))
    })
    .map_err(failed)
}

/// Calls `open`, which clears the umask of this process, to open the root of a share. Restores the
/// umask unless the share is writable: then the guest's kernel has already applied one to new
/// files.
fn keeping_mask<T>(writable: bool, open: impl FnOnce() -> T) -> T {
    let mask = rustix::process::umask(rustix::fs::Mode::empty());
    let opened = open();
    if !writable {
        rustix::process::umask(mask);
    }
    opened
}

impl FolderServer {
    fn new(spec: &ShareSpec, budget: Budget) -> Result<Self, ShareError> {
        Ok(Self {
            spec: spec.clone(),
            files: MessageServer::new(spec)?,
            nodes: NodeTable::default(),
            budget,
            exhausted: false,
        })
    }
}

impl MessageServer {
    fn new(spec: &ShareSpec) -> Result<Self, ShareError> {
        let broken = |error: &dyn std::fmt::Display| ShareError::Buffer(error.to_string());
        let buffer = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), BUFFER_LEN)]);
        let mut queue = Queue::new(QUEUE_SIZE).map_err(|e| broken(&e))?;
        let mut set_up = || {
            queue.try_set_size(QUEUE_SIZE)?;
            queue.try_set_desc_table_address(GuestAddress(DESCRIPTORS))?;
            queue.try_set_avail_ring_address(GuestAddress(AVAILABLE))?;
            queue.try_set_used_ring_address(GuestAddress(USED))?;
            queue.set_ready(true);
            Ok::<_, fuse_virtio_queue::Error>(())
        };
        set_up().map_err(|e| broken(&e))?;
        Ok(Self {
            server: Server::new(passthrough(spec)?),
            buffer: buffer.map_err(|e| broken(&e))?,
            queue,
            count: 0,
        })
    }

    /// Lays out the chain of a request and its reply, and serves it. Returns the reply's length.
    fn serve_message(&mut self, request: &[u8], reply_len: usize) -> Option<usize> {
        let buffer = &self.buffer;
        let descriptors = [
            (
                REQUEST,
                request.len(),
                if reply_len == 0 { 0 } else { NEXT },
            ),
            (REPLY, reply_len, WRITE),
        ];
        for (index, (address, len, flags)) in (0_u64..).zip(descriptors) {
            let mut bytes = address.to_le_bytes().to_vec();
            bytes.extend(u32::try_from(len).ok()?.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes.extend(1_u16.to_le_bytes());
            let at = GuestAddress(DESCRIPTORS + 16 * index);
            buffer.write_slice(&bytes, at).ok()?;
        }
        buffer.write_slice(request, GuestAddress(REQUEST)).ok()?;
        // Every entry of the available ring names descriptor 0, as memory begins as zero.
        self.count = self.count.wrapping_add(1);
        buffer
            .write_obj(self.count, GuestAddress(AVAILABLE + 2))
            .ok()?;
        let chain = self.queue.pop_descriptor_chain(buffer)?;
        let reader = Reader::from_descriptor_chain(buffer, chain.clone()).ok()?;
        let writer = VirtioFsWriter::new(buffer, chain).ok()?;
        let served = self
            .server
            .handle_message(reader, Writer::VirtioFs(writer), None, None);
        served.ok()
    }

    /// Serves a request. Returns the bytes of the reply.
    fn serve(&mut self, request: &[u8], reply: &mut [u8]) -> usize {
        let Some(len) = self.serve_message(request, reply.len()) else {
            tracing::debug!("a request of a share could not be served");
            return refuse(request, libc::EIO, reply);
        };
        let Some(to) = reply.get_mut(..len) else {
            return refuse(request, libc::EIO, reply);
        };
        match self.buffer.read_slice(to, GuestAddress(REPLY)) {
            Ok(()) => len,
            Err(_) => refuse(request, libc::EIO, reply),
        }
    }
}

impl FolderServer {
    /// Closes all files and forgets them, as FUSE_DESTROY asks: the guest does so at each unmount.
    fn end_session(&mut self, request: &[u8], reply: &mut [u8]) -> usize {
        self.nodes.clear();
        keeping_mask(self.spec.writable, || self.files.serve(request, reply))
    }
}

impl FuseServer for FolderServer {
    fn answer(&mut self, request: &[u8], reply: &mut [u8]) -> usize {
        match judge(request, self.spec.writable) {
            FilterVerdict::Refuse(error) => refuse(request, error, reply),
            FilterVerdict::Serve if is_destroy(request) => self.end_session(request, reply),
            FilterVerdict::Serve => self.serve_within_budget(request, reply),
        }
    }

    fn reset(&mut self) {
        self.end_session(&destroy(), &mut [0; REPLY_HEADER]);
    }
}

mod descriptors;

#[cfg(test)]
mod tests;
