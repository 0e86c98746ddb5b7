//! `qXfer`: documents that a client reads in parts.

use super::packets::parse_transfer;
use crate::debugger::Debugger;
use crate::framing::{self, BODY_MAX};
use crate::threads;

/// The document that the client reads.
#[derive(Debug, Default)]
pub(super) struct DocumentTransfer {
    /// Object and annex.
    object: String,
    text: Vec<u8>,
}

/// What the filter does with a `qXfer` packet.
pub(super) enum TransferReply {
    /// The filter sends this body.
    Body(Vec<u8>),
    /// The filter passes the packet to `gdbstub`.
    Pass,
}

impl DocumentTransfer {
    /// Answers a `qXfer` packet for the vCPU that the client has selected.
    pub(super) fn reply(
        &mut self,
        debugger: &mut Debugger,
        vcpu: usize,
        packet: &[u8],
    ) -> TransferReply {
        let Some((object, offset, length)) = parse_transfer(packet) else {
            return TransferReply::Body(b"E00".to_vec());
        };
        if object.starts_with("features:") {
            return TransferReply::Pass;
        }
        if offset == 0 || self.object != object {
            match document(debugger, vcpu, &object) {
                Some(Ok(text)) => {
                    self.text = text.into_bytes();
                    self.object = object;
                }
                Some(Err(error)) => {
                    return TransferReply::Body(format!("E.{error}.").into_bytes());
                }
                None => return TransferReply::Body(Vec::new()),
            }
        }
        TransferReply::Body(self.part(offset, length))
    }

    /// A part of the document, marked as the last one or not.
    fn part(&self, offset: usize, length: usize) -> Vec<u8> {
        let from = offset.min(self.text.len());
        let to = from
            .saturating_add(length.min(BODY_MAX / 2))
            .min(self.text.len());
        let mut body = vec![if to == self.text.len() { b'l' } else { b'm' }];
        body.extend(framing::escape(&self.text[from..to]));
        body
    }
}

/// The document of an object; `None` if there is no such object.
fn document(debugger: &mut Debugger, vcpu: usize, object: &str) -> Option<Result<String, String>> {
    match object {
        "threads:" => Some(Ok(threads::list(debugger))),
        "btrace-conf:" => {
            let configuration = debugger.trace_configuration(vcpu);
            Some(configuration.map_err(|error| error.to_string()))
        }
        object => {
            let annex = object.strip_prefix("btrace:")?;
            Some(debugger.trace(vcpu, annex))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_marked_until_the_last_one() {
        let transfer = DocumentTransfer {
            object: String::new(),
            text: b"<a}b>".to_vec(),
        };
        assert_eq!(transfer.part(0, 2), b"m<a");
        assert_eq!(transfer.part(2, 3), b"l}]b>");
        assert_eq!(transfer.part(9, usize::MAX), b"l");
    }
}
