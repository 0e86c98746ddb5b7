//! Parsing packets that the filter answers itself or must check before `gdbstub` sees them.

use crate::framing::BODY_MAX;
use crate::registers::RegisterLayout;
use crate::thread_id;

/// Parses the address and the length of an `m` packet; the length is at most what one reply holds.
pub(super) fn parse_range(range: &[u8]) -> Option<(u64, usize)> {
    let (at, len) = std::str::from_utf8(range).ok()?.split_once(',')?;
    let (at, len) = (u64::from_str_radix(at, 16), usize::from_str_radix(len, 16));
    Some((at.ok()?, len.ok()?.min(BODY_MAX / 2 - 64)))
}

/// Parses a `qXfer` read: the object with its annex, the offset and the length.
pub(super) fn parse_transfer(body: &[u8]) -> Option<(String, usize, usize)> {
    let text = std::str::from_utf8(body.strip_prefix(b"qXfer:")?).ok()?;
    let (object, rest) = text.split_once(":read:")?;
    let (annex, range) = rest.rsplit_once(':')?;
    let (offset, length) = range.split_once(',')?;
    Some((
        format!("{object}:{annex}"),
        usize::from_str_radix(offset, 16).ok()?,
        usize::from_str_radix(length, 16).ok()?,
    ))
}

/// Whether `vCont` resumes vCPUs below `count`. `gdbstub` would take a malformed one for a request
/// that no thread moves, and never answer.
pub(super) fn is_resumption(body: &[u8], count: usize) -> bool {
    let Ok(text) = std::str::from_utf8(body) else {
        return false;
    };
    let Some(actions) = text.strip_prefix("vCont;") else {
        return false;
    };
    actions.split(';').all(|action| {
        let (kind, thread) = match action.split_once(':') {
            Some((kind, thread)) => (kind, Some(thread.as_bytes())),
            None => (action, None),
        };
        let is_thread = |thread| thread_id::is_all(thread) || thread_id::is_vcpu(thread, count);
        is_action(kind) && thread.is_none_or(is_thread)
    })
}

/// Whether `vCont` has an action of this form.
fn is_action(kind: &str) -> bool {
    match kind.split_at_checked(1) {
        Some(("c" | "s", "")) => true,
        Some(("C" | "S", signal)) => u8::from_str_radix(signal, 16).is_ok(),
        Some(("r", range)) => range.split_once(',').is_some_and(|(from, to)| {
            u64::from_str_radix(from, 16).is_ok() && u64::from_str_radix(to, 16).is_ok()
        }),
        _ => false,
    }
}

/// Whether the id of `Hc` or `Hg` names a vCPU below `count`, or any thread.
pub(super) fn names_thread(id: &[u8], count: usize) -> bool {
    thread_id::is_any(id) || thread_id::is_vcpu(id, count)
}

/// Whether a packet reads, changes or resumes the machine.
pub(super) fn needs_machine(body: &[u8]) -> bool {
    matches!(
        body.first(),
        Some(b'g' | b'G' | b'p' | b'P' | b'm' | b'M' | b'X' | b'b')
    ) || body.starts_with(b"vCont;")
        || body.starts_with(b"qRcmd,")
}

/// Whether gdb shows the text of an error in the reply to this packet: those for registers, and for
/// resumptions.
pub(super) fn shows_error(body: &[u8], reply: &[u8]) -> bool {
    let shows = matches!(body.first(), Some(b'g' | b'G' | b'p' | b'P' | b'b'))
        || body.starts_with(b"vCont;");
    shows && matches!(reply, [b'E', high, low] if [high, low].iter().all(|d| d.is_ascii_hexdigit()))
}

/// How many registers in a row only those clients write that restore all of them, after they called a
/// function of the guest.
pub(super) const RESTORED_REGISTERS: usize = 16;

/// Whether a `P` packet names a register that is described with save-restore="no".
///
/// gdb's code for x86 ignores that attribute, and would set back registers such as the time.
pub(super) fn is_not_restored(layout: &RegisterLayout, write: &[u8]) -> bool {
    let number = write.split(|&byte| byte == b'=').next();
    let number = number.and_then(|digits| std::str::from_utf8(digits).ok());
    let number = number.and_then(|digits| usize::from_str_radix(digits, 16).ok());
    let register = number.and_then(|number| layout.all().get(number));
    register.is_some_and(|register| register.group().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_resumptions_are_rejected() {
        for good in ["vCont;c", "vCont;s:p1.2;c", "vCont;C05:1;r10,20:p1.-1"] {
            assert!(is_resumption(good.as_bytes(), 2), "{good}");
        }
        for bad in [
            "vCont",
            "vCont;",
            "vCont;x",
            "vCont;r1",
            "vCont;s:p1.3",
            "vCont;C",
            "vCont;cc",
        ] {
            assert!(!is_resumption(bad.as_bytes(), 2), "{bad}");
        }
    }

    #[test]
    fn transfer_is_split_into_object_and_range() {
        let parsed = parse_transfer(b"qXfer:btrace:read:all:10,fff");
        assert_eq!(parsed, Some(("btrace:all".to_owned(), 0x10, 0xfff)));
        assert_eq!(parse_transfer(b"qXfer:threads:write::0:"), None);
        assert_eq!(parse_range(b"10,4"), Some((0x10, 4)));
        assert_eq!(parse_range(b"10"), None);
    }
}
