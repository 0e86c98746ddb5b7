//! What FUSE requests do to the files that the guest knows.
//!
//! FUSE protocol 7.x: the structures `fuse_in_header`, `fuse_entry_out`, `fuse_direntplus` and those
//! of each request.

use super::filter::{REPLY_HEADER, REQUEST_HEADER, opcode};

/// Bytes of a reply's entry, which gives the guest a node.
const ENTRY: usize = 128;
/// Bytes of what follows a header and an entry in the reply that opens a file.
const OPENED: usize = 16;
/// Bytes of an entry of a folder without its name.
const DIRECTORY_ENTRY: usize = 24;
/// The flag of RENAME2 that exchanges two files.
const RENAME_EXCHANGE: u64 = 2;

/// A request, as far as it concerns nodes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FuseRequest<'a> {
    /// The node in the header.
    pub(super) node: u64,
    pub(super) action: NodeAction<'a>,
}

/// What a request does to nodes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NodeAction<'a> {
    /// The reply has the node `name` of this folder, and a handle if the request opens it, too.
    Entry { name: &'a [u8], opens: bool },
    /// The same for another name of the node `file`.
    Link { name: &'a [u8], file: u64 },
    /// The reply has many nodes of this folder.
    Entries,
    /// Opens the node.
    Open,
    /// Closes a handle of the node.
    Release,
    /// Removes `name` from this folder.
    Unlink { name: &'a [u8] },
    /// Moves `from` of this folder to `to` in `folder`.
    Rename {
        from: &'a [u8],
        folder: u64,
        to: &'a [u8],
        exchange: bool,
    },
    /// Takes back lookups: pairs of a node and a count.
    Forget(Vec<(u64, u64)>),
    /// Nothing but a use of the node.
    Use,
}

/// The 8-byte number at `at`.
fn number(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

/// The 4-byte number at `at`.
fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

/// The name at `at`, without the NUL that ends it, and where the bytes after it begin.
fn name(body: &[u8], at: usize) -> Option<(&[u8], usize)> {
    let rest = body.get(at..)?;
    let len = rest.iter().position(|byte| *byte == 0)?;
    Some((&rest[..len], at + len + 1))
}

impl<'a> FuseRequest<'a> {
    /// Parses a request with a complete header; returns `None` if the rest is not complete.
    pub(super) fn parse(request: &'a [u8]) -> Option<Self> {
        let code = word(request, 4)?;
        let node = number(request, 16)?;
        let body = request.get(REQUEST_HEADER..)?;
        let entry = |at, opens| {
            let (name, _) = name(body, at)?;
            Some(NodeAction::Entry { name, opens })
        };
        let action = match code {
            opcode::LOOKUP | opcode::SYMLINK => entry(0, false)?,
            opcode::MKNOD => entry(16, false)?,
            opcode::MKDIR => entry(8, false)?,
            opcode::CREATE => entry(16, true)?,
            opcode::LINK => NodeAction::Link {
                name: name(body, 8)?.0,
                file: number(body, 0)?,
            },
            opcode::READDIRPLUS => NodeAction::Entries,
            opcode::OPEN | opcode::OPENDIR => NodeAction::Open,
            opcode::RELEASE | opcode::RELEASEDIR => NodeAction::Release,
            opcode::UNLINK | opcode::RMDIR => NodeAction::Unlink {
                name: name(body, 0)?.0,
            },
            opcode::RENAME => rename(body, 8, 0)?,
            opcode::RENAME2 => rename(body, 16, number(body, 8)?)?,
            opcode::FORGET => NodeAction::Forget(vec![(node, number(body, 0)?)]),
            opcode::BATCH_FORGET => NodeAction::Forget(forgotten(body)?),
            _ => NodeAction::Use,
        };
        Some(Self { node, action })
    }

    /// Descriptors that the request may add, if its reply has at most `reply_len` bytes.
    pub(super) fn descriptors(&self, reply_len: usize) -> usize {
        match self.action {
            NodeAction::Entry { opens, .. } => 1 + usize::from(opens),
            NodeAction::Entries => reply_len / (ENTRY + DIRECTORY_ENTRY),
            NodeAction::Link { .. } | NodeAction::Open => 1,
            _ => 0,
        }
    }

    /// Bytes of the reply, without which the server would change its nodes and report an error.
    pub(super) fn reply_len(&self) -> usize {
        REPLY_HEADER
            + match self.action {
                NodeAction::Entry { opens: true, .. } => ENTRY + OPENED,
                NodeAction::Entry { .. } | NodeAction::Link { .. } => ENTRY,
                NodeAction::Open => OPENED,
                _ => 0,
            }
    }
}

/// RENAME, whose names begin at `at`.
fn rename(body: &[u8], at: usize, flags: u64) -> Option<NodeAction<'_>> {
    let (from, next) = name(body, at)?;
    Some(NodeAction::Rename {
        from,
        folder: number(body, 0)?,
        to: name(body, next)?.0,
        exchange: flags & RENAME_EXCHANGE != 0,
    })
}

/// The pairs of BATCH_FORGET.
fn forgotten(body: &[u8]) -> Option<Vec<(u64, u64)>> {
    let count = usize::try_from(word(body, 0)?).ok()?;
    let pairs = body.get(8..)?.chunks_exact(16).take(count);
    pairs
        .map(|pair| Some((number(pair, 0)?, number(pair, 8)?)))
        .collect()
}

/// The node of a reply's entry.
pub(super) fn entry(reply: &[u8]) -> Option<u64> {
    number(reply, REPLY_HEADER).filter(|node| *node != 0)
}

/// The nodes and names in a reply to READDIRPLUS.
pub(super) fn entries(reply: &[u8]) -> Vec<(u64, &[u8])> {
    let mut entries = Vec::new();
    let mut rest = reply.get(REPLY_HEADER..).unwrap_or_default();
    while let (Some(node), Some(len)) = (number(rest, 0), word(rest, ENTRY + 16)) {
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let at = ENTRY + DIRECTORY_ENTRY;
        let Some(name) = at.checked_add(len).and_then(|end| rest.get(at..end)) else {
            break;
        };
        if node != 0 {
            entries.push((node, name));
        }
        rest = rest
            .get((at + len).next_multiple_of(8)..)
            .unwrap_or_default();
    }
    entries
}

/// A LOOKUP of `name` in the folder `parent`.
pub(super) fn lookup(parent: u64, name: &[u8]) -> Vec<u8> {
    message(opcode::LOOKUP, parent, &[name, b"\0"].concat())
}

/// A FORGET of all lookups of `node`.
pub(super) fn forget(node: u64) -> Vec<u8> {
    message(opcode::FORGET, node, &u64::MAX.to_le_bytes())
}

/// Whether a request ends the session.
pub(super) fn is_destroy(request: &[u8]) -> bool {
    request.get(4..8) == Some(&opcode::DESTROY.to_le_bytes())
}

/// The end of the session.
pub(super) fn destroy() -> Vec<u8> {
    message(opcode::DESTROY, 0, &[])
}

fn message(code: u32, node: u64, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(REQUEST_HEADER + body.len()).unwrap_or(u32::MAX);
    let mut message = [len, code].map(u32::to_le_bytes).concat();
    message.extend([0; 8]);
    message.extend(node.to_le_bytes());
    message.resize(REQUEST_HEADER, 0);
    message.extend(body);
    message
}

/// READDIRPLUS with at most `max` bytes of entries.
pub(super) fn limit_entries(request: &[u8], max: usize) -> Vec<u8> {
    /// Where the maximum length is, after handle and offset.
    const SIZE: usize = REQUEST_HEADER + 16;
    let mut limited = request.to_vec();
    if let (Some(size), Ok(max)) = (word(request, SIZE), u32::try_from(max))
        && let Some(to) = limited.get_mut(SIZE..SIZE + 4)
    {
        to.copy_from_slice(&size.min(max).to_le_bytes());
    }
    limited
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_folders_of_a_rename_are_parsed() {
        let body = [
            &9_u64.to_le_bytes()[..],
            &2_u64.to_le_bytes(),
            b"old\0new\0",
        ]
        .concat();
        let message = message(opcode::RENAME2, 5, &body);
        let expected = NodeAction::Rename {
            from: b"old",
            folder: 9,
            to: b"new",
            exchange: true,
        };
        let request = FuseRequest::parse(&message).unwrap();
        assert_eq!((request.node, request.action), (5, expected));
        assert_eq!(FuseRequest::parse(&message[..message.len() - 1]), None);
    }

    #[test]
    fn forgotten_nodes_are_those_that_the_request_has() {
        let body = [u64::MAX, 3, 1, 4, 2].map(u64::to_le_bytes).concat();
        let batch = message(opcode::BATCH_FORGET, 0, &body);
        let parsed = FuseRequest::parse(&batch).unwrap().action;
        assert_eq!(parsed, NodeAction::Forget(vec![(3, 1), (4, 2)]));
        let one = forget(7);
        let parsed = FuseRequest::parse(&one).unwrap().action;
        assert_eq!(parsed, NodeAction::Forget(vec![(7, u64::MAX)]));
    }

    #[test]
    fn entries_of_a_folder_have_nodes_and_names() {
        let mut reply = vec![0; REPLY_HEADER];
        for (node, name) in [(5_u64, &b"a"[..]), (0, b"none"), (6, b"longer name")] {
            let begin = reply.len();
            reply.extend(node.to_le_bytes());
            reply.resize(begin + ENTRY + 16, 0);
            reply.extend(u32::try_from(name.len()).unwrap().to_le_bytes());
            reply.extend([0; 4]);
            reply.extend(name);
            reply.resize(begin + (reply.len() - begin).next_multiple_of(8), 0);
        }
        let expected: [(u64, &[u8]); 2] = [(5, b"a"), (6, b"longer name")];
        assert_eq!(entries(&reply), expected);
        reply.truncate(reply.len() - 8);
        assert_eq!(entries(&reply), expected[..1]);
    }

    #[test]
    fn length_of_entries_is_limited() {
        let mut body = vec![0; 24];
        body[16..20].copy_from_slice(&5000_u32.to_le_bytes());
        let request = message(opcode::READDIRPLUS, 1, &body);
        for (max, expected) in [(100, 100), (6000, 5000)] {
            let limited = limit_entries(&request, max);
            assert_eq!(word(&limited, REQUEST_HEADER + 16), Some(expected));
        }
    }
}
