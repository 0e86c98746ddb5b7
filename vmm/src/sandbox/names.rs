//! Formats the line about a refused system call.
//!
//! A signal handler calls this, so nothing is allocated.

/// Bytes of the longest line.
pub(super) const LINE_MAX: usize = 160;

/// Names of the calls that an attacker who took over a thread would try first.
const NAMES: [(i64, &str); 34] = [
    (libc::SYS_open, "open"),
    (libc::SYS_openat, "openat"),
    (libc::SYS_openat2, "openat2"),
    (libc::SYS_creat, "creat"),
    (libc::SYS_stat, "stat"),
    (libc::SYS_statx, "statx"),
    (libc::SYS_newfstatat, "newfstatat"),
    (libc::SYS_access, "access"),
    (libc::SYS_faccessat, "faccessat"),
    (libc::SYS_readlink, "readlink"),
    (libc::SYS_readlinkat, "readlinkat"),
    (libc::SYS_unlink, "unlink"),
    (libc::SYS_unlinkat, "unlinkat"),
    (libc::SYS_rename, "rename"),
    (libc::SYS_mkdir, "mkdir"),
    (libc::SYS_chmod, "chmod"),
    (libc::SYS_getdents64, "getdents64"),
    (libc::SYS_mmap, "mmap"),
    (libc::SYS_mprotect, "mprotect"),
    (libc::SYS_ioctl, "ioctl"),
    (libc::SYS_socket, "socket"),
    (libc::SYS_socketpair, "socketpair"),
    (libc::SYS_connect, "connect"),
    (libc::SYS_bind, "bind"),
    (libc::SYS_execve, "execve"),
    (libc::SYS_execveat, "execveat"),
    (libc::SYS_clone, "clone"),
    (libc::SYS_clone3, "clone3"),
    (libc::SYS_fork, "fork"),
    (libc::SYS_vfork, "vfork"),
    (libc::SYS_kill, "kill"),
    (libc::SYS_ptrace, "ptrace"),
    (libc::SYS_prctl, "prctl"),
    (libc::SYS_perf_event_open, "perf_event_open"),
];

/// Appends to a buffer, as much as fits.
struct Text<'a> {
    buffer: &'a mut [u8; LINE_MAX],
    length: usize,
}

impl Text<'_> {
    fn push(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if let Some(to) = self.buffer.get_mut(self.length) {
                *to = byte;
                self.length += 1;
            }
        }
    }

    fn push_number(&mut self, number: u64) {
        if number >= 10 {
            self.push_number(number / 10);
        }
        let digit = u8::try_from(number % 10).unwrap_or(0);
        self.push(&[b'0' + digit]);
    }
}

/// Formats the line that names system call `number` and `thread`; returns its length.
///
/// The name of the thread ends with a zero byte.
pub(super) fn line(buffer: &mut [u8; LINE_MAX], thread: &[u8; 16], number: i64) -> usize {
    let name = thread.split(|&byte| byte == 0).next().unwrap_or_default();
    let mut text = Text { buffer, length: 0 };
    text.push(b"hindsight: sandbox: thread ");
    text.push(name);
    text.push(b" is refused the system call ");
    match NAMES.iter().find(|(known, _)| *known == number) {
        Some((_, name)) => text.push(name.as_bytes()),
        None => text.push_number(number.unsigned_abs()),
    }
    text.push(b"; please report it, and use --sandbox=off until then\n");
    text.length
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(thread: &[u8; 16], number: i64) -> String {
        let mut buffer = [0; LINE_MAX];
        let length = line(&mut buffer, thread, number);
        String::from_utf8(buffer[..length].to_vec()).unwrap()
    }

    #[test]
    fn known_calls_are_named_and_others_numbered() {
        let expected = "hindsight: sandbox: thread vcpu0 is refused the system call execve;";
        let line = text(b"vcpu0\0garbage...", libc::SYS_execve);
        assert!(line.starts_with(expected), "{line}");
        let line = text(b"sixteen-bytes-16", i64::MIN);
        assert!(line.contains("-16 is refused the system call 9223372036854775808;"));
        assert!(line.ends_with("then\n"), "{line}");
    }
}
