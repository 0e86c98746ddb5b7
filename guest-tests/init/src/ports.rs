//! The ports of the virtio console, and the processes that copy between them and pipes.

use core::ffi::CStr;

use crate::sys;
use crate::text::{Text, decimal};

/// How a port is used.
#[derive(Clone, Copy)]
pub enum Port {
    /// The program reads from the port.
    Reads,
    /// The program writes to the port.
    Writes,
}

/// Numbers of console devices and ports that are tried.
const DEVICES: u32 = 32;
const PORTS: u32 = 8;

fn name_matches(path: &CStr, name: &[u8]) -> bool {
    let Ok(file) = sys::open(path, sys::O_RDONLY) else {
        return false;
    };
    let mut found = [0; 32];
    let count = sys::read(file, &mut found).unwrap_or(0);
    sys::close(file);
    found[..count].strip_suffix(b"\n") == Some(name)
}

fn open_port(name: &[u8], usage: Port) -> Option<usize> {
    let (mut first, mut second) = ([0; 10], [0; 10]);
    for device in 0..DEVICES {
        let device = decimal(device, &mut first);
        for port in 0..PORTS {
            let port = decimal(port, &mut second);
            let node: &[&[u8]] = &[b"vport", device, b"p", port];
            let node = Text::of(node);
            let path = Text::of(&[b"/sys/class/virtio-ports/", node.as_bytes(), b"/name"]);
            if name_matches(path.as_c(), name) {
                let path = Text::of(&[b"/dev/", node.as_bytes()]);
                let flags = match usage {
                    Port::Reads => sys::O_RDONLY,
                    Port::Writes => sys::O_WRONLY,
                };
                return sys::open(path.as_c(), flags | sys::O_CLOEXEC).ok();
            }
        }
    }
    None
}

/// Opens the port of a name. Waits until it appears, at most for some seconds.
pub fn find_port(name: &[u8], usage: Port) -> Option<usize> {
    for _ in 0..2000 {
        if let Some(port) = open_port(name, usage) {
            return Some(port);
        }
        sys::sleep_ms(2);
    }
    None
}

/// Copies from one file to another until either ends.
pub fn pump(from: usize, to: usize) {
    let mut buffer = [0; 1 << 15];
    loop {
        match sys::read(from, &mut buffer) {
            Ok(0) => return,
            Ok(count) => {
                if sys::write_all(to, &buffer[..count]).is_err() {
                    return;
                }
            }
            Err(sys::EINTR) => {}
            Err(_) => return,
        }
    }
}
