//! The files of a share that the guest knows, and which of them have a descriptor.
//!
//! The server opens a descriptor for each file that the guest looks up. Files whose descriptor is
//! evicted are found again by their name in their folder, and the server gives them the same node
//! number. A file that has lost its name, or is open, is not evicted.
//!
//! Deviation: if the host removes an evicted file and the host's file system gives its number to a
//! new file of the same name, the guest's node is the new file.

use std::collections::HashMap;
use std::sync::Arc;

/// The node of the share's folder.
pub(super) const ROOT: u64 = 1;

/// Names that are recorded for a file with several hard links; the guest can make many more.
const NAMES_MAX: usize = 4;

/// A folder's node, and a name in the folder.
type NodeName = (u64, Arc<[u8]>);

/// A file that the guest knows, or that is a folder of one.
#[derive(Debug, Default)]
struct ShareNode {
    /// The names by which the file can be found again, the one that was used last at the end. Empty
    /// if the file was unlinked, or other files have its names.
    names: Vec<NodeName>,
    /// How often the guest was given this node, without those that it has forgotten.
    lookups: u64,
    /// Open handles of the guest.
    handles: usize,
    /// Names of nodes in this folder.
    children: usize,
    has_descriptor: bool,
    last_use: u64,
}

/// All files that the guest knows, except for the root, which always has its descriptor.
#[derive(Debug, Default)]
pub(super) struct NodeTable {
    nodes: HashMap<u64, ShareNode>,
    names: HashMap<NodeName, u64>,
    /// Descriptors of nodes.
    descriptors: usize,
    /// Open handles, each of which has a descriptor.
    handles: usize,
    clock: u64,
}

impl NodeTable {
    /// Descriptors of all nodes and handles.
    pub(super) fn descriptors(&self) -> usize {
        self.descriptors + self.handles
    }

    /// Whether `node` is known, and its descriptor was evicted.
    pub(super) fn is_evicted(&self, node: u64) -> bool {
        self.nodes
            .get(&node)
            .is_some_and(|node| !node.has_descriptor)
    }

    /// Whether the server has a descriptor for `node`.
    pub(super) fn has_descriptor(&self, node: u64) -> bool {
        self.nodes
            .get(&node)
            .is_some_and(|node| node.has_descriptor)
    }

    /// The folder of `node` and its name there, if it has one.
    pub(super) fn location(&self, node: u64) -> Option<NodeName> {
        self.nodes.get(&node)?.names.last().cloned()
    }

    /// The node with this name, if the guest knows it.
    pub(super) fn child(&self, parent: u64, name: &[u8]) -> Option<u64> {
        self.names.get(&(parent, name.into())).copied()
    }

    /// Records a use of `node`.
    pub(super) fn touch(&mut self, node: u64) {
        self.clock += 1;
        if let Some(node) = self.nodes.get_mut(&node) {
            node.last_use = self.clock;
        }
    }

    /// Records that the server has given `node` to the guest as `name` in `parent`.
    pub(super) fn found(&mut self, node: u64, parent: u64, name: &[u8]) {
        if node == ROOT {
            return;
        }
        let entry = self.nodes.entry(node).or_default();
        entry.lookups = entry.lookups.saturating_add(1);
        self.restored(node);
        if name != b"." && parent != node {
            self.set_name(node, parent, name);
        }
    }

    /// Records that the server has a descriptor for `node` again.
    pub(super) fn restored(&mut self, node: u64) {
        if let Some(found) = self.nodes.get_mut(&node)
            && !found.has_descriptor
        {
            found.has_descriptor = true;
            self.descriptors += 1;
        }
        self.touch(node);
    }

    /// Takes back `count` lookups. Returns whether the server must close the node's descriptor.
    pub(super) fn forget(&mut self, node: u64, count: u64) -> bool {
        let Some(found) = self.nodes.get_mut(&node) else {
            return false;
        };
        found.lookups = found.lookups.saturating_sub(count);
        if found.lookups > 0 {
            return false;
        }
        let close = self.drop_descriptor(node);
        self.remove_unused(node);
        close
    }

    /// Records that the guest has opened `node`.
    pub(super) fn opened(&mut self, node: u64) {
        self.handles += 1;
        if let Some(node) = self.nodes.get_mut(&node) {
            node.handles += 1;
        }
    }

    /// Records that the guest has closed a handle of `node`.
    pub(super) fn released(&mut self, node: u64) {
        self.handles = self.handles.saturating_sub(1);
        if let Some(found) = self.nodes.get_mut(&node) {
            found.handles = found.handles.saturating_sub(1);
        }
        self.remove_unused(node);
    }

    /// Records that a file has lost this name. It may have others.
    pub(super) fn unlinked(&mut self, parent: u64, name: &[u8]) {
        let name = (parent, name.into());
        if let Some(node) = self.names.remove(&name) {
            self.drop_name(node, &name);
            self.lose_child(parent);
        }
    }

    /// Records that `from` was renamed to `to`, both a folder and a name there; with `exchange` the
    /// other way round, too.
    pub(super) fn renamed(&mut self, from: (u64, &[u8]), to: (u64, &[u8]), exchange: bool) {
        let moved = self.child(from.0, from.1);
        let other = self.child(to.0, to.1);
        self.unlinked(from.0, from.1);
        self.unlinked(to.0, to.1);
        if let Some(node) = moved {
            self.set_name(node, to.0, to.1);
        }
        if let Some(node) = other.filter(|_| exchange) {
            self.set_name(node, from.0, from.1);
        }
    }

    /// Takes the descriptors of `count` nodes, those whose last use is the longest ago, and returns
    /// them. There may be fewer. `protected` nodes keep theirs.
    pub(super) fn evict(&mut self, count: usize, protected: &[u64]) -> Vec<u64> {
        let mut candidates: Vec<_> = self
            .nodes
            .iter()
            .filter(|(number, node)| {
                node.has_descriptor
                    && node.handles == 0
                    && (!node.names.is_empty() || node.lookups == 0)
                    && !protected.contains(number)
            })
            .map(|(number, node)| (node.last_use, *number))
            .collect();
        if count < candidates.len() {
            candidates.select_nth_unstable(count);
            candidates.truncate(count);
        }
        for (_, node) in &candidates {
            self.drop_descriptor(*node);
            self.remove_unused(*node);
        }
        candidates.into_iter().map(|(_, node)| node).collect()
    }

    /// Forgets everything: the guest has ended its session.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    fn drop_descriptor(&mut self, node: u64) -> bool {
        let Some(found) = self.nodes.get_mut(&node) else {
            return false;
        };
        let had = found.has_descriptor;
        found.has_descriptor = false;
        self.descriptors -= usize::from(had);
        had
    }

    fn drop_name(&mut self, node: u64, name: &NodeName) {
        if let Some(found) = self.nodes.get_mut(&node) {
            found.names.retain(|other| other != name);
        }
    }

    fn set_name(&mut self, node: u64, parent: u64, name: &[u8]) {
        if !self.nodes.contains_key(&node) {
            return;
        }
        let name: NodeName = (parent, name.into());
        match self.names.insert(name.clone(), node) {
            Some(other) => self.drop_name(other, &name),
            None => {
                if let Some(folder) = self.nodes.get_mut(&parent) {
                    folder.children += 1;
                }
            }
        }
        let Some(found) = self.nodes.get_mut(&node) else {
            return;
        };
        found.names.push(name);
        if found.names.len() > NAMES_MAX {
            let oldest = found.names.remove(0);
            self.names.remove(&oldest);
            self.lose_child(oldest.0);
        }
    }

    /// Takes one from the children of `parent`, which may be the root.
    fn lose_child(&mut self, parent: u64) {
        if let Some(folder) = self.nodes.get_mut(&parent) {
            folder.children = folder.children.saturating_sub(1);
        }
        self.remove_unused(parent);
    }

    /// Removes `node` and then its folders, as long as nothing refers to them.
    fn remove_unused(&mut self, node: u64) {
        let mut candidates = vec![node];
        while let Some(node) = candidates.pop() {
            let unused = self.nodes.get(&node).is_some_and(|found| {
                let refers = found.lookups > 0 || found.handles > 0 || found.children > 0;
                !refers && !found.has_descriptor
            });
            if !unused {
                continue;
            }
            for name in self.nodes.remove(&node).unwrap_or_default().names {
                self.names.remove(&name);
                if let Some(folder) = self.nodes.get_mut(&name.0) {
                    folder.children = folder.children.saturating_sub(1);
                }
                candidates.push(name.0);
            }
        }
    }
}
