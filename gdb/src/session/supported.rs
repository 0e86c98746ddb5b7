//! The features that the client is offered.

use crate::framing::BODY_MAX;

/// The features of the filter, beyond those of `gdbstub`.
const FEATURES: &[u8] = b";QStartNoAckMode+;qXfer:threads:read+";

/// The features of branch traces.
const TRACE_FEATURES: &[u8] = b";Qbtrace:bts+;Qbtrace:off+;qXfer:btrace:read+;\
    Qbtrace-conf:bts:size+;qXfer:btrace-conf:read+";

/// The reply to `qSupported`: that of `gdbstub`, with the features of the filter.
pub(super) fn with_own_features(reply: &[u8], traces: bool) -> Vec<u8> {
    // `gdbstub` offers packets up to the size of its buffer, which grows as needed.
    let size = format!("PacketSize={BODY_MAX:x}");
    let others = reply.iter().position(|&byte| byte == b';').unwrap_or(0);
    let traces = if traces { TRACE_FEATURES } else { b"" };
    [size.as_bytes(), &reply[others..], FEATURES, traces].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_are_offered_only_by_machines_that_have_them() {
        let reply = |traces| with_own_features(b"PacketSize=1000;vContSupported+", traces);
        let with = String::from_utf8(reply(true)).unwrap();
        assert!(with.starts_with("PacketSize=10000;vContSupported+;QStartNoAckMode+"));
        assert!(with.ends_with(";Qbtrace-conf:bts:size+;qXfer:btrace-conf:read+"));
        assert!(!String::from_utf8(reply(false)).unwrap().contains("btrace"));
    }
}
