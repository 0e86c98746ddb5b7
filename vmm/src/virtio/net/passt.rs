//! The user network: frames go to the program passt, which translates their connections to sockets
//! of the host.
//!
//! passt and the monitor share a pair of sockets. On it, 4 bytes with the length in big endian
//! precede each frame. passt ends when the monitor closes its socket.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use hindsight_devices::virtio::network::{FRAME_MAX, FrameSink, Network, ReceivedFrames};
use rustix::io::{FdFlags, fcntl_setfd};
use thiserror::Error;

use super::spec::PortForward;

/// The MAC address of the guest's card.
const MAC: [u8; 6] = [0x52, 0x54, 0x00, 0x12, 0x34, 0x56];
/// Bytes of the length before a frame.
const LENGTH_LEN: usize = 4;

/// Why there is no network.
#[derive(Debug, Error)]
pub enum NetError {
    /// passt cannot be run.
    #[error("passt cannot be run; install the package passt, or use --net none")]
    Passt(#[source] io::Error),
    /// passt ended at once.
    #[error("passt ended at once with {0}; another program may use a forwarded port")]
    Ended(std::process::ExitStatus),
    /// The pair of sockets cannot be created.
    #[error("the socket to passt cannot be made")]
    Socket(#[source] io::Error),
}

/// The host's end of a network.
#[derive(Debug)]
pub struct NetLink {
    socket: File,
    received: ReceivedFrames,
    /// passt ends by itself when the sockets are closed.
    _passt: Child,
}

/// Sends frames to passt.
struct PasstSink {
    socket: File,
    message: Vec<u8>,
    failed: bool,
}

impl FrameSink for PasstSink {
    fn send(&mut self, frame: &[u8]) {
        let Ok(len) = u32::try_from(frame.len()) else {
            return;
        };
        self.message.clear();
        self.message.extend(len.to_be_bytes());
        self.message.extend(frame);
        if let Err(error) = self.socket.write_all(&self.message)
            && !self.failed
        {
            self.failed = true;
            tracing::error!("--net: the network has ended: {error}");
        }
    }
}

fn arguments(forwards: &[PortForward]) -> Vec<String> {
    let mut arguments = vec!["--foreground".to_owned(), "--quiet".to_owned()];
    for forward in forwards {
        let option = if forward.udp {
            "--udp-ports"
        } else {
            "--tcp-ports"
        };
        let address = forward.address.map(|address| format!("{address}/"));
        let PortForward { host, guest, .. } = forward;
        arguments.push(option.to_owned());
        arguments.push(format!("{}{host}:{guest}", address.unwrap_or_default()));
    }
    arguments
}

/// Starts passt with these forwarded ports. Returns the card, and the host's end of its network.
///
/// # Errors
///
/// passt cannot be run.
pub fn open(forwards: &[PortForward]) -> Result<(Network, NetLink), NetError> {
    let (own, other) = UnixStream::pair().map_err(NetError::Socket)?;
    let other = OwnedFd::from(other);
    // passt inherits its socket: clear close-on-exec.
    fcntl_setfd(&other, FdFlags::empty()).map_err(|e| NetError::Socket(e.into()))?;
    let mut passt = Command::new("passt")
        .args(arguments(forwards))
        .args(["--fd", &other.as_raw_fd().to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(NetError::Passt)?;
    drop(other);
    // passt checks its options and binds the forwarded ports at its start: wait for that.
    std::thread::sleep(std::time::Duration::from_millis(20));
    if let Ok(Some(status)) = passt.try_wait() {
        return Err(NetError::Ended(status));
    }
    let socket = File::from(OwnedFd::from(own));
    let received = ReceivedFrames::default();
    let sink = PasstSink {
        socket: socket.try_clone().map_err(NetError::Socket)?,
        message: Vec::new(),
        failed: false,
    };
    let card = Network::new(MAC, Box::new(sink), received.clone());
    let link = NetLink {
        socket,
        received,
        _passt: passt,
    };
    Ok((card, link))
}

impl NetLink {
    /// Passes frames from passt to the guest until passt ends. `serve` makes the card process them.
    pub fn run(mut self, serve: impl Fn()) {
        let mut length = [0; LENGTH_LEN];
        let mut frame = vec![0; FRAME_MAX];
        while self.socket.read_exact(&mut length).is_ok() {
            let len = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
            let Some(frame) = frame.get_mut(..len) else {
                tracing::error!("--net: passt sent a frame of {len} bytes");
                return;
            };
            if self.socket.read_exact(frame).is_err() {
                return;
            }
            self.received.push(frame);
            serve();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwarded_ports_are_arguments_of_passt() {
        let forward = |udp, address, host, guest| PortForward {
            udp,
            address,
            host,
            guest,
        };
        let forwards = [
            forward(false, None, 2222, 22),
            forward(true, Some([127, 0, 0, 1].into()), 53, 5353),
        ];
        assert_eq!(
            arguments(&forwards)[2..],
            ["--tcp-ports", "2222:22", "--udp-ports", "127.0.0.1/53:5353"]
        );
    }

    #[test]
    fn frames_follow_their_lengths() {
        let (own, mut other) = UnixStream::pair().unwrap();
        let own = File::from(OwnedFd::from(own));
        let mut sink = PasstSink {
            socket: own,
            message: Vec::new(),
            failed: false,
        };
        sink.send(b"frame");
        let mut message = [0; 9];
        other.read_exact(&mut message).unwrap();
        assert_eq!(&message, b"\0\0\0\x05frame");
        drop(other);
        sink.send(b"lost");
        assert!(sink.failed);
    }
}
