//! A client that reads the files of a server.

use std::io::{self, Read, Write};

use crate::framing::{self, BODY_MAX, PacketDecoder, PacketEvent};

/// Number of bytes that one request asks for. Escaping can double them in the reply.
const REQUEST_BYTES: u64 = BODY_MAX as u64 / 2 - 64;

/// A file of a server, such as `/vmcore`. The machine is paused while it is open.
pub struct RemoteFile<S> {
    stream: S,
    decoder: PacketDecoder,
    descriptor: String,
}

impl<S> std::fmt::Debug for RemoteFile<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteFile")
            .field("descriptor", &self.descriptor)
            .finish_non_exhaustive()
    }
}

fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

impl<S: Read + Write> RemoteFile<S> {
    /// Opens a file of the server at the other end of `stream`, which no client has used yet.
    ///
    /// # Errors
    ///
    /// When the connection breaks, the server has no such file, or it is no server of gdb's
    /// protocol.
    pub fn open(stream: S, name: &str) -> io::Result<Self> {
        let mut file = Self {
            stream,
            decoder: PacketDecoder::default(),
            descriptor: String::new(),
        };
        if file.request("QStartNoAckMode")? != b"OK" {
            return Err(invalid(
                "the server does not answer as one of gdb's protocol",
            ));
        }
        let name = framing::hex(name.as_bytes());
        let reply = file.request(&format!("vFile:open:{name},0,0"))?;
        let reply = String::from_utf8_lossy(&reply);
        let descriptor = reply
            .strip_prefix('F')
            .filter(|rest| !rest.starts_with('-'));
        let missing = || io::Error::new(io::ErrorKind::NotFound, "the server has no such file");
        file.descriptor = descriptor.ok_or_else(missing)?.to_owned();
        Ok(file)
    }

    /// Reads from `offset` on: an empty result at the end of the file.
    ///
    /// # Errors
    ///
    /// When the connection breaks, or the reply is malformed.
    pub fn read_at(&mut self, offset: u64) -> io::Result<Vec<u8>> {
        let request = format!(
            "vFile:pread:{},{REQUEST_BYTES:x},{offset:x}",
            self.descriptor
        );
        let reply = self.request(&request)?;
        let malformed = || invalid("the server's reply to a read is malformed");
        let separator = reply.iter().position(|&byte| byte == b';');
        let (length, contents) = reply.split_at(separator.ok_or_else(malformed)?);
        let length = length
            .strip_prefix(b"F")
            .and_then(|digits| std::str::from_utf8(digits).ok());
        let length = length.and_then(|digits| usize::from_str_radix(digits, 16).ok());
        let contents = framing::unescape(&contents[1..]);
        if length != Some(contents.len()) {
            return Err(malformed());
        }
        Ok(contents)
    }

    /// Sends a packet and returns the body of the reply.
    fn request(&mut self, body: &str) -> io::Result<Vec<u8>> {
        self.exchange(body).map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::UnexpectedEof => {
                let text = "the server closed the connection: another debugger may be connected";
                io::Error::new(error.kind(), text)
            }
            _ => error,
        })
    }

    fn exchange(&mut self, body: &str) -> io::Result<Vec<u8>> {
        self.stream
            .write_all(&framing::encode_packet(body.as_bytes()))?;
        let mut buffer = [0; 0x4000];
        loop {
            let len = self.stream.read(&mut buffer)?;
            if len == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            // The server sends nothing that was not requested, so that nothing follows a reply.
            for &byte in &buffer[..len] {
                if let Some(PacketEvent::Packet(body)) = self.decoder.push(byte) {
                    return Ok(body);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that sends these replies, whatever it receives.
    struct Replies(io::Cursor<Vec<u8>>);

    impl Read for Replies {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            // One packet at a time, as a server does.
            let rest = &self.0.get_ref()[usize::try_from(self.0.position()).unwrap()..];
            let end = rest.iter().position(|&byte| byte == b'#');
            let len = end.map_or(rest.len(), |end| end + 3).min(buffer.len());
            self.0.read(&mut buffer[..len])
        }
    }

    impl Write for Replies {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn open(replies: &[&[u8]]) -> io::Result<RemoteFile<Replies>> {
        let packets = replies.iter().map(|body| framing::encode_packet(body));
        let bytes = packets.collect::<Vec<_>>().concat();
        RemoteFile::open(Replies(io::Cursor::new(bytes)), "/vmcore")
    }

    #[test]
    fn contents_are_unescaped_and_end() {
        let mut file = open(&[b"OK", b"F3", b"F3;a}\x03b", b"F0;"]).unwrap();
        assert_eq!(file.read_at(0).unwrap(), b"a#b");
        assert_eq!(file.read_at(3).unwrap(), b"");
    }

    #[test]
    fn servers_without_the_file_and_malformed_replies_are_errors() {
        let text = |result: io::Result<RemoteFile<Replies>>| result.unwrap_err().to_string();
        assert!(text(open(&[])).contains("another debugger"));
        assert!(text(open(&[b""])).contains("does not answer"));
        assert!(text(open(&[b"OK", b"F-1,2"])).contains("no such file"));
        for bad in [&b"F9;abc"[..], b"E01", b"F", b"Fx;"] {
            let mut file = open(&[b"OK", b"F3", bad]).unwrap();
            assert!(file.read_at(0).is_err(), "{}", bad.escape_ascii());
        }
    }
}
