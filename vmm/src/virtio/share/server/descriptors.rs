//! Serves requests with a bounded number of descriptors.
//!
//! Before a request, the nodes that it uses get their descriptors back, and others are evicted if
//! the reply adds descriptors. After it, what the guest has been given is recorded.

use super::super::filter::{REPLY_HEADER, refuse};
use super::super::request::{self, FuseRequest, NodeAction};
use super::FolderServer;

/// Maximum number of evicted folders above a file. A guest can nest folders without bound.
const DEPTH_MAX: usize = 4096;
/// Bytes of entries in one reply to READDIRPLUS, at least and at most.
const ENTRIES: std::ops::RangeInclusive<usize> = 4096..=(64 << 10);
/// Bytes of an entry with a short name.
const ENTRY: usize = 160;

impl FolderServer {
    /// Serves a request that the filter has let pass. Returns the bytes of the reply.
    pub(super) fn serve_within_budget(&mut self, request: &[u8], reply: &mut [u8]) -> usize {
        let Some(parsed) = FuseRequest::parse(request) else {
            return refuse(request, libc::EINVAL, reply);
        };
        if let NodeAction::Forget(nodes) = parsed.action {
            for (node, count) in nodes {
                self.forget(node, count);
            }
            return 0;
        }
        if reply.len() < parsed.reply_len() {
            return refuse(request, libc::EINVAL, reply);
        }
        let node = parsed.node;
        let max = self.entries_max().min(reply.len() - REPLY_HEADER);
        if let Err(error) = self.prepare(&parsed, max) {
            return refuse(request, error, reply);
        }
        let len = match parsed.action {
            NodeAction::Entries => self
                .files
                .serve(&request::limit_entries(request, max), reply),
            _ => self.files.serve(request, reply),
        };
        let reply = reply.get(..len).unwrap_or_default();
        if reply.get(4..8) == Some(&[0; 4]) {
            self.record(&parsed, reply);
        } else if let NodeAction::Entry { name, opens: true } = parsed.action {
            self.undo_lookup(node, name);
        }
        len
    }

    fn entries_max(&self) -> usize {
        (self.budget.descriptors() / 4 * ENTRY).clamp(*ENTRIES.start(), *ENTRIES.end())
    }

    /// Provides the descriptors that a request needs.
    ///
    /// # Errors
    ///
    /// The error number for the guest.
    fn prepare(&mut self, request: &FuseRequest<'_>, entries_max: usize) -> Result<(), i32> {
        let node = request.node;
        self.nodes.touch(node);
        let mut used = vec![node];
        // Files that lose their name can be found by it for the last time.
        let mut unlinked = Vec::new();
        match request.action {
            NodeAction::Link { file, .. } => used.push(file),
            NodeAction::Unlink { name } => unlinked.extend(self.nodes.child(node, name)),
            NodeAction::Rename { folder, to, .. } => {
                used.push(folder);
                unlinked.extend(self.nodes.child(folder, to));
            }
            _ => {}
        }
        for number in unlinked {
            used.push(number);
            // If it cannot be found by this name, the host has changed the folder.
            let _ = self.restore(number, &used);
        }
        for number in used.clone() {
            match self.restore(number, &used) {
                Err(error) if number == node || error == libc::EMFILE => return Err(error),
                _ => {}
            }
        }
        self.reserve(request.descriptors(entries_max), &used)
    }

    /// Records what the guest has been given by a request that succeeded.
    fn record(&mut self, request: &FuseRequest<'_>, reply: &[u8]) {
        let folder = request.node;
        match request.action {
            NodeAction::Entry { name, .. } | NodeAction::Link { name, .. } => {
                if let Some(node) = request::entry(reply) {
                    self.nodes.found(node, folder, name);
                    if matches!(request.action, NodeAction::Entry { opens: true, .. }) {
                        self.nodes.opened(node);
                    }
                }
            }
            NodeAction::Entries => {
                for (node, name) in request::entries(reply) {
                    self.nodes.found(node, folder, name);
                }
            }
            NodeAction::Open => self.nodes.opened(folder),
            NodeAction::Release => self.nodes.released(folder),
            NodeAction::Unlink { name } => self.nodes.unlinked(folder, name),
            NodeAction::Rename {
                from,
                folder: new_folder,
                to,
                exchange,
            } => self
                .nodes
                .renamed((folder, from), (new_folder, to), exchange),
            NodeAction::Forget(_) | NodeAction::Use => {}
        }
    }

    fn forget(&mut self, node: u64, count: u64) {
        if self.nodes.forget(node, count) {
            self.close(node);
        }
    }

    /// Closes the descriptor of a node.
    fn close(&mut self, node: u64) {
        self.files.serve(&request::forget(node), &mut []);
    }

    /// Evicts nodes other than `protected` until `count` descriptors can be opened.
    fn reserve(&mut self, count: usize, protected: &[u64]) -> Result<(), i32> {
        let budget = self.budget.descriptors();
        let needed = |held: usize| (held + count).saturating_sub(budget);
        let excess = needed(self.nodes.descriptors());
        if excess == 0 {
            return Ok(());
        }
        // Finding the oldest takes time for each node: evict an eighth at a time.
        for node in self.nodes.evict(excess.max(budget / 8), protected) {
            self.close(node);
        }
        if needed(self.nodes.descriptors()) == 0 {
            return Ok(());
        }
        if !std::mem::replace(&mut self.exhausted, true) {
            tracing::warn!(
                "share {}: the guest has {budget} files open, and this process may open no more; \
                 raise its limit (ulimit -Hn)",
                self.spec.tag
            );
        }
        Err(libc::EMFILE)
    }

    /// Finds an evicted node again, and before it the folders above.
    fn restore(&mut self, node: u64, protected: &[u64]) -> Result<(), i32> {
        let mut evicted = Vec::new();
        let mut at = node;
        while self.nodes.is_evicted(at) {
            if evicted.len() == DEPTH_MAX {
                return Err(libc::ENAMETOOLONG);
            }
            evicted.push(at);
            at = self.nodes.location(at).ok_or(libc::ESTALE)?.0;
        }
        while let Some(node) = evicted.pop() {
            let (parent, name) = self.nodes.location(node).ok_or(libc::ESTALE)?;
            let protected = [protected, &[parent]].concat();
            self.reserve(1, &protected)?;
            self.find_again(node, parent, &name)?;
        }
        Ok(())
    }

    /// Closes what the server has opened for `name` in a request that failed.
    ///
    /// A CREATE of a file that exists is a lookup and an open. If only the open fails, the server
    /// holds a node that the guest does not know.
    fn undo_lookup(&mut self, parent: u64, name: &[u8]) {
        let mut reply = [0; 256];
        let len = self.files.serve(&request::lookup(parent, name), &mut reply);
        let reply = reply.get(..len).unwrap_or_default();
        let found = request::entry(reply).filter(|_| reply.get(4..8) == Some(&[0; 4]));
        if let Some(node) = found
            && !self.nodes.has_descriptor(node)
        {
            self.close(node);
        }
    }

    fn find_again(&mut self, node: u64, parent: u64, name: &[u8]) -> Result<(), i32> {
        let mut reply = [0; 256];
        let len = self.files.serve(&request::lookup(parent, name), &mut reply);
        let reply = reply.get(..len).unwrap_or_default();
        let code = reply.get(4..8).and_then(|code| code.try_into().ok());
        match (code.map(i32::from_le_bytes), request::entry(reply)) {
            (Some(0), Some(found)) if found == node => {
                self.nodes.restored(node);
                Ok(())
            }
            (Some(0), Some(other)) => {
                if !self.nodes.has_descriptor(other) {
                    self.close(other);
                }
                Err(libc::ESTALE)
            }
            (Some(error), _) if -error == libc::EMFILE || -error == libc::ENFILE => Err(-error),
            _ => Err(libc::ESTALE),
        }
    }
}
