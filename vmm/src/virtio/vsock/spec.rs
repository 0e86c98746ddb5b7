//! Parses `cid=N,socket=PATH`, the sockets of a guest.

use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Lowest context identifier of a guest; those below are the hypervisor's, the host's and local.
const CID_MIN: u32 = 3;
/// Longest path in bytes: that of a unix socket, less `_` and ten digits.
const PATH_MAX: usize = 107 - 11;

/// The sockets of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VsockSpec {
    /// The guest's context identifier.
    pub cid: u32,
    /// The unix socket for clients.
    pub socket: PathBuf,
}

impl VsockSpec {
    /// Parses `cid=N,socket=PATH`.
    ///
    /// # Errors
    ///
    /// The text has not this form, or the context identifier is reserved.
    pub fn parse(text: &str) -> Result<Self, String> {
        let parts = text.strip_prefix("cid=");
        let parts = parts.and_then(|rest| rest.split_once(",socket="));
        let (cid, socket) = parts
            .filter(|(_, socket)| !socket.is_empty())
            .ok_or("not a context identifier and a socket: cid=N,socket=PATH")?;
        let valid = |cid: &u32| (CID_MIN..u32::MAX).contains(cid);
        let cid = cid.parse().ok().filter(valid).ok_or_else(|| {
            let max = u32::MAX - 1;
            format!("{cid:?} is no context identifier of a guest: use {CID_MIN} to {max}")
        })?;
        Ok(Self {
            cid,
            socket: socket.into(),
        })
    }

    /// Whether the path can have the suffix of a port.
    pub(super) fn path_fits(&self) -> bool {
        self.socket.as_os_str().as_bytes().len() <= PATH_MAX
    }

    /// The same sockets, with their path resolved against `folder`.
    #[must_use]
    pub fn in_folder(self, folder: &Path) -> Self {
        Self {
            socket: folder.join(self.socket),
            ..self
        }
    }
}

impl fmt::Display for VsockSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cid, socket } = self;
        write!(f, "cid={cid},socket={}", socket.display())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cid_and_socket_are_parsed() {
        let spec = VsockSpec::parse("cid=3,socket=a,b=c").unwrap();
        assert_eq!((spec.cid, spec.socket.as_path()), (3, Path::new("a,b=c")));
        assert_eq!(spec.to_string(), "cid=3,socket=a,b=c");
    }

    #[test]
    fn other_words_and_reserved_cids_are_refused() {
        for text in [
            "",
            "cid=3",
            "socket=s",
            "cid=3,socket=",
            "cid=2,socket=s",
            "cid=-1,socket=s",
            "cid=4294967295,socket=s",
        ] {
            assert!(VsockSpec::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn path_is_short_enough_for_a_port() {
        let spec = |len| VsockSpec {
            cid: 3,
            socket: "x".repeat(len).into(),
        };
        assert!(spec(96).path_fits());
        assert!(!spec(97).path_fits());
    }
}
