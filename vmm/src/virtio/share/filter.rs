//! Which FUSE requests a share serves.
//!
//! FUSE protocol 7.x, `struct fuse_in_header`: length, opcode, unique, node, uid, gid, pid.

/// Bytes of a request's header.
pub(super) const REQUEST_HEADER: usize = 40;
/// Bytes of a reply's header: length, error, unique.
pub(super) const REPLY_HEADER: usize = 16;

/// The requests of protocol version 7.31 that a share serves, by opcode.
pub(super) mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const ACCESS: u32 = 34;
    pub const CREATE: u32 = 35;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
}

/// The requests that change nothing.
const READ_ONLY: [u32; 22] = [
    opcode::LOOKUP,
    opcode::FORGET,
    opcode::GETATTR,
    opcode::READLINK,
    opcode::OPEN,
    opcode::READ,
    opcode::STATFS,
    opcode::RELEASE,
    opcode::FSYNC,
    opcode::GETXATTR,
    opcode::LISTXATTR,
    opcode::FLUSH,
    opcode::INIT,
    opcode::OPENDIR,
    opcode::READDIR,
    opcode::RELEASEDIR,
    opcode::FSYNCDIR,
    opcode::ACCESS,
    opcode::DESTROY,
    opcode::BATCH_FORGET,
    opcode::READDIRPLUS,
    opcode::LSEEK,
];

/// The requests that change files. Locks, ioctls, polls and DAX mappings are not served.
const CHANGING: [u32; 14] = [
    opcode::SETATTR,
    opcode::SYMLINK,
    opcode::MKNOD,
    opcode::MKDIR,
    opcode::UNLINK,
    opcode::RMDIR,
    opcode::RENAME,
    opcode::LINK,
    opcode::WRITE,
    opcode::SETXATTR,
    opcode::REMOVEXATTR,
    opcode::CREATE,
    opcode::FALLOCATE,
    opcode::RENAME2,
];

/// What the filter does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FilterVerdict {
    /// The server answers the request.
    Serve,
    /// The filter answers the request with this error number.
    Refuse(i32),
}

fn word(request: &[u8], at: usize) -> Option<u32> {
    let bytes = request.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

/// Judges a request, on a share whose files may be changed if `writable`.
pub(super) fn judge(request: &[u8], writable: bool) -> FilterVerdict {
    use FilterVerdict::{Refuse, Serve};
    let (Some(len), Some(code)) = (word(request, 0), word(request, 4)) else {
        return Refuse(libc::EINVAL);
    };
    if usize::try_from(len).ok() != Some(request.len()) {
        return Refuse(libc::EINVAL);
    }
    let body = &request[REQUEST_HEADER.min(request.len())..];
    if code == opcode::LOOKUP && body.starts_with(b"..\0") {
        // Only NFS servers look up the parent, and the lookup must not leave the share.
        return Refuse(libc::ESTALE);
    }
    if writable && CHANGING.contains(&code) {
        return Serve;
    }
    if CHANGING.contains(&code) {
        return Refuse(libc::EROFS);
    }
    if !READ_ONLY.contains(&code) {
        return Refuse(libc::ENOSYS);
    }
    if code == opcode::OPEN && !writable {
        let flags = word(body, 0).and_then(|flags| i32::try_from(flags).ok());
        let changes =
            |flags| flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0;
        if flags.is_none_or(changes) {
            return Refuse(libc::EROFS);
        }
    }
    Serve
}

/// Writes the reply of a refused request; returns its length.
pub(super) fn refuse(request: &[u8], error: i32, reply: &mut [u8]) -> usize {
    let expects_none =
        word(request, 4).is_some_and(|code| code == opcode::FORGET || code == opcode::BATCH_FORGET);
    let Some(header) = reply.get_mut(..REPLY_HEADER).filter(|_| !expects_none) else {
        return 0;
    };
    let [len, ..] = REPLY_HEADER.to_le_bytes();
    header[..4].copy_from_slice(&u32::from(len).to_le_bytes());
    header[4..8].copy_from_slice(&(-error).to_le_bytes());
    header[8..].copy_from_slice(request.get(8..16).unwrap_or(&[0; 8]));
    REPLY_HEADER
}

#[cfg(test)]
mod tests {
    use super::*;
    use FilterVerdict::{Refuse, Serve};

    fn request(code: u32, body: &[u8]) -> Vec<u8> {
        let mut request = vec![0; REQUEST_HEADER];
        request.extend(body);
        let len = u32::try_from(request.len()).unwrap();
        request[..4].copy_from_slice(&len.to_le_bytes());
        request[4..8].copy_from_slice(&code.to_le_bytes());
        request[8] = 7;
        request
    }

    #[test]
    fn read_only_share_refuses_every_change() {
        for code in CHANGING {
            assert_eq!(
                judge(&request(code, &[]), false),
                Refuse(libc::EROFS),
                "{code}"
            );
            assert_eq!(judge(&request(code, &[]), true), Serve, "{code}");
        }
        let open = |flags: i32| judge(&request(opcode::OPEN, &flags.to_le_bytes()), false);
        assert_eq!(open(libc::O_RDONLY), Serve);
        for flags in [libc::O_WRONLY, libc::O_RDWR, libc::O_TRUNC, -1] {
            assert_eq!(open(flags), Refuse(libc::EROFS), "{flags:#x}");
        }
    }

    #[test]
    fn requests_that_no_share_serves_are_unknown() {
        // GETLK, SETLK, INTERRUPT, IOCTL, POLL, SETUPMAPPING, a request of a later version.
        for code in [0, 31, 32, 36, 39, 40, 48, 4096, u32::MAX] {
            assert_eq!(
                judge(&request(code, &[]), true),
                Refuse(libc::ENOSYS),
                "{code}"
            );
        }
    }

    #[test]
    fn lookup_of_the_parent_folder_is_refused() {
        assert_eq!(judge(&request(1, b"..\0"), true), Refuse(libc::ESTALE));
        assert_eq!(judge(&request(1, b"..a\0"), true), Serve);
    }

    #[test]
    fn request_of_another_length_is_refused() {
        let mut long = request(1, b"a\0");
        long.push(0);
        assert_eq!(judge(&long, true), Refuse(libc::EINVAL));
        assert_eq!(judge(&[0; 5], true), Refuse(libc::EINVAL));
    }

    #[test]
    fn refusal_has_error_and_number_of_the_request() {
        let mut reply = [0xff; 20];
        assert_eq!(refuse(&request(4, &[]), libc::EROFS, &mut reply), 16);
        assert_eq!(reply[..9], [16, 0, 0, 0, 226, 255, 255, 255, 7]);
        assert_eq!(
            refuse(&request(2, &[]), libc::EINVAL, &mut reply),
            0,
            "FORGET"
        );
        assert_eq!(refuse(&request(4, &[]), 1, &mut [0; 3]), 0);
    }
}
