//! The threads that serve networks and sockets of the guest.

use std::sync::Arc;
use std::thread;

use anyhow::Context;

use super::devices::DeviceLinks;
use crate::console::ListeningSocket;
use crate::sandbox::{ThreadKind, enter};
use crate::vcpu::board::Board;
use crate::virtio::net::NetLink;
use crate::virtio::vsock::VsockServer;

/// The hosts' ends of devices, whose sockets exist until this is dropped.
pub(in crate::cli) struct Links {
    networks: Vec<(usize, NetLink)>,
    servers: Vec<(usize, VsockServer)>,
    _sockets: Vec<ListeningSocket>,
}

impl Links {
    /// Creates the sockets.
    ///
    /// # Errors
    ///
    /// One cannot be created.
    pub(in crate::cli) fn listen(links: DeviceLinks) -> anyhow::Result<Self> {
        let (mut servers, mut sockets) = (Vec::new(), Vec::new());
        for (index, link) in links.sockets {
            let socket = ListeningSocket::listen(link.path()).context("--vsock")?;
            let server = link.server(socket.listener()).context("--vsock")?;
            servers.push((index, server));
            sockets.push(socket);
        }
        Ok(Self {
            networks: links.networks,
            servers,
            _sockets: sockets,
        })
    }

    /// Starts the threads.
    ///
    /// # Errors
    ///
    /// A thread cannot be started.
    pub(in crate::cli) fn start(&mut self, board: &Arc<Board>) -> anyhow::Result<()> {
        for (index, link) in self.networks.drain(..) {
            spawn("network", ThreadKind::Network, board, move |board| {
                link.run(|| board.buses.serve_device(index));
            })?;
        }
        for (index, server) in self.servers.drain(..) {
            spawn("vsock", ThreadKind::Vsock, board, move |board| {
                server.run(|| board.buses.serve_device(index));
            })?;
        }
        Ok(())
    }
}

fn spawn(
    name: &str,
    kind: ThreadKind,
    board: &Arc<Board>,
    run: impl FnOnce(&Board) + Send + 'static,
) -> anyhow::Result<()> {
    let board = board.clone();
    thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || {
            enter(kind);
            run(&board);
        })
        .with_context(|| format!("the thread {name} cannot be started"))?;
    Ok(())
}
