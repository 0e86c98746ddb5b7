//! Thread ids: vCPU N is thread N + 1 of process 1.

use std::num::NonZeroUsize;

/// The thread that stands for a vCPU.
pub(crate) fn thread_of(vcpu: usize) -> NonZeroUsize {
    NonZeroUsize::MIN.saturating_add(vcpu)
}

/// The vCPU of a thread.
pub(crate) fn vcpu_of(thread: NonZeroUsize) -> usize {
    thread.get() - 1
}

/// The thread of an id such as `p1.2`, without the process.
fn thread_part(id: &str) -> &str {
    id.rsplit('.').next().unwrap_or(id)
}

/// The vCPU that an id names; `None` for an id of no thread, of all, or one that is malformed.
pub(crate) fn parse(id: &[u8]) -> Option<usize> {
    let thread = thread_part(std::str::from_utf8(id).ok()?);
    let thread = usize::from_str_radix(thread, 16).ok()?;
    NonZeroUsize::new(thread).map(vcpu_of)
}

/// Whether the id names a vCPU below `count`.
pub(crate) fn is_vcpu(id: &[u8], count: usize) -> bool {
    parse(id).is_some_and(|vcpu| vcpu < count)
}

/// Whether the id stands for all threads.
pub(crate) fn is_all(id: &[u8]) -> bool {
    std::str::from_utf8(id).is_ok_and(|id| id.rsplit('.').next() == Some("-1"))
}

/// Whether the id stands for any thread or for all of them.
pub(crate) fn is_any(id: &[u8]) -> bool {
    is_all(id) || std::str::from_utf8(id).is_ok_and(|id| id.rsplit('.').next() == Some("0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_name_vcpus_with_and_without_a_process() {
        assert_eq!(parse(b"p1.2"), Some(1));
        assert_eq!(parse(b"a"), Some(9));
        assert_eq!(parse(b"p1.-1"), None);
        assert_eq!(parse(b"0"), None);
        assert_eq!(parse(b"p1"), None, "a process");
        assert!(is_vcpu(b"p1.2", 2) && !is_vcpu(b"p1.3", 2) && !is_vcpu(b"-1", 2));
        assert!(is_any(b"0") && is_any(b"p1.-1") && !is_any(b"1"));
        assert!(is_all(b"p1.-1") && !is_all(b"p1.0"));
    }
}
