//! Sockets between guest and host, on unix sockets as Firecracker has them.
//!
//! A client connects to the socket and writes `CONNECT <port>\n`; when the guest accepts, the client
//! reads `OK <host port>\n`, and the connection is the guest's. A connection of the guest to port P of the
//! host goes to the unix socket whose path ends with `_P`.

mod server;
mod spec;
mod stream;

pub use server::{VsockError, VsockLink, VsockServer, open};
pub use spec::VsockSpec;
