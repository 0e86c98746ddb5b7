//! The threads that receive frames for the guest.

use std::sync::Arc;
use std::thread;

use anyhow::Context;

use crate::sandbox::{ThreadKind, enter};
use crate::vcpu::board::Board;
use crate::virtio::net::NetLink;

/// Starts the threads of networks, each given with the index of its card.
///
/// # Errors
///
/// A thread cannot be started.
pub(super) fn start(links: Vec<(usize, NetLink)>, board: &Arc<Board>) -> anyhow::Result<()> {
    for (index, link) in links {
        let board = board.clone();
        thread::Builder::new()
            .name("network".to_owned())
            .spawn(move || {
                enter(ThreadKind::Network);
                link.run(|| board.buses.serve_device(index));
            })
            .context("the thread of the network cannot be started")?;
    }
    Ok(())
}
