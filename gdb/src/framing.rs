//! Packets in a stream of bytes: `$body#checksum`, acknowledgements and the interrupt character.

/// The longest packet body that is accepted, in bytes; the client gets it as `PacketSize`.
pub const BODY_MAX: usize = 0x1_0000;

/// Something that arrived completely.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PacketEvent {
    /// A packet with a valid checksum: its body, still escaped.
    Packet(Vec<u8>),
    /// A packet with a wrong checksum, which the client must send again.
    Corrupt,
    /// A packet with a body of more than [`BODY_MAX`] bytes.
    TooLong,
    /// `-`: the client requests the last packet again.
    Nack,
    /// Ctrl-C.
    Interrupt,
}

/// Which part of a packet comes next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum DecoderState {
    #[default]
    Outside,
    Body,
    /// The checksum, with its first digit if that has arrived.
    Checksum(Option<u8>),
}

/// Finds packets in a stream of bytes, and skips everything else.
#[derive(Debug, Default)]
pub struct PacketDecoder {
    state: DecoderState,
    body: Vec<u8>,
    too_long: bool,
}

impl PacketDecoder {
    /// Takes the next byte; returns what it completed.
    pub fn push(&mut self, byte: u8) -> Option<PacketEvent> {
        match (self.state, byte) {
            (DecoderState::Outside, b'-') => return Some(PacketEvent::Nack),
            (DecoderState::Outside, 0x03) => return Some(PacketEvent::Interrupt),
            // A `$` is never sent unescaped within a body, so it starts the next packet.
            (DecoderState::Outside | DecoderState::Body, b'$') => self.start(),
            (DecoderState::Outside, _) => {}
            (DecoderState::Body, b'#') => self.state = DecoderState::Checksum(None),
            (DecoderState::Body, byte) if self.body.len() < BODY_MAX => self.body.push(byte),
            (DecoderState::Body, _) => self.too_long = true,
            (DecoderState::Checksum(None), byte) => {
                self.state = DecoderState::Checksum(Some(byte));
            }
            (DecoderState::Checksum(Some(high)), low) => {
                self.state = DecoderState::Outside;
                return Some(self.finish(high, low));
            }
        }
        None
    }

    fn start(&mut self) {
        self.state = DecoderState::Body;
        self.body.clear();
        self.too_long = false;
    }

    fn finish(&mut self, high: u8, low: u8) -> PacketEvent {
        if self.too_long {
            return PacketEvent::TooLong;
        }
        let received = hex_digit(high).zip(hex_digit(low)).map(|(h, l)| h << 4 | l);
        if received == Some(checksum(&self.body)) {
            PacketEvent::Packet(std::mem::take(&mut self.body))
        } else {
            PacketEvent::Corrupt
        }
    }
}

fn hex_digit(byte: u8) -> Option<u8> {
    let digit = char::from(byte).to_digit(16)?;
    u8::try_from(digit).ok()
}

/// The sum of all bytes, modulo 256.
fn checksum(body: &[u8]) -> u8 {
    body.iter().fold(0, |sum: u8, &byte| sum.wrapping_add(byte))
}

/// The packet with this body.
pub fn encode_packet(body: &[u8]) -> Vec<u8> {
    let mut packet = Vec::with_capacity(body.len() + 4);
    packet.push(b'$');
    packet.extend_from_slice(body);
    packet.extend_from_slice(format!("#{:02x}", checksum(body)).as_bytes());
    packet
}

/// The bodies of the valid packets in `bytes`.
pub(crate) fn bodies(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut decoder = PacketDecoder::default();
    let events = bytes.iter().filter_map(|&byte| decoder.push(byte));
    events
        .filter_map(|event| match event {
            PacketEvent::Packet(body) => Some(body),
            _ => None,
        })
        .collect()
}

/// Escapes the bytes that may not occur in a body: as `}` and the byte XOR 0x20.
pub fn escape(plain: &[u8]) -> Vec<u8> {
    let mut body = Vec::with_capacity(plain.len());
    for &byte in plain {
        match byte {
            b'#' | b'$' | b'}' | b'*' => body.extend([b'}', byte ^ 0x20]),
            byte => body.push(byte),
        }
    }
    body
}

/// Replaces the escapes of a body by the bytes that they stand for.
pub fn unescape(body: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(body.len());
    let mut bytes = body.iter();
    while let Some(&byte) = bytes.next() {
        match byte {
            b'}' => plain.extend(bytes.next().map(|&byte| byte ^ 0x20)),
            byte => plain.push(byte),
        }
    }
    plain
}

/// Bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    let digit = |nibble: u8| char::from(b"0123456789abcdef"[usize::from(nibble)]);
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits.map(digit).collect()
}

/// The bytes that hexadecimal digits stand for; `None` if there is anything else.
pub fn unhex(digits: &str) -> Option<Vec<u8>> {
    let pairs = digits.as_bytes().chunks(2);
    let byte = |pair: &[u8]| match pair {
        &[high, low] => Some(hex_digit(high)? << 4 | hex_digit(low)?),
        _ => None,
    };
    pairs.map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn events(bytes: &[u8]) -> Vec<PacketEvent> {
        let mut decoder = PacketDecoder::default();
        bytes.iter().filter_map(|&b| decoder.push(b)).collect()
    }

    #[test]
    fn decoder_skips_bytes_outside_of_packets() {
        assert_eq!(
            events(b"+$g#67junk\x03-$?#00$m0,1#fa"),
            [
                PacketEvent::Packet(b"g".to_vec()),
                PacketEvent::Interrupt,
                PacketEvent::Nack,
                PacketEvent::Corrupt,
                PacketEvent::Packet(b"m0,1".to_vec()),
            ]
        );
    }

    #[test]
    fn interrupt_character_within_a_body_is_data() {
        let packet = encode_packet(b"X0,1:\x03");
        assert_eq!(
            events(&packet),
            [PacketEvent::Packet(b"X0,1:\x03".to_vec())]
        );
    }

    #[test]
    fn truncated_packet_ends_where_the_next_one_starts() {
        assert_eq!(events(b"$m10$g#67"), [PacketEvent::Packet(b"g".to_vec())]);
    }

    #[test]
    fn body_beyond_the_limit_is_reported_and_not_stored() {
        let mut bytes = vec![b'$'];
        bytes.resize(BODY_MAX * 3, b'a');
        bytes.extend(b"#00$g#67");
        assert_eq!(
            events(&bytes),
            [PacketEvent::TooLong, PacketEvent::Packet(b"g".to_vec())]
        );
    }

    proptest! {
        #[test]
        fn any_escaped_body_is_decoded_unchanged(
            body in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let decoded = bodies(&encode_packet(&escape(&body)));
            prop_assert_eq!(decoded.len(), 1);
            prop_assert_eq!(unescape(&decoded[0]), body);
        }

        #[test]
        fn any_bytes_leave_a_decoder_that_finds_the_next_packet(
            bytes in proptest::collection::vec(any::<u8>(), 0..2000),
        ) {
            // `$g#67` twice: the first may complete a checksum of what was before.
            let all = [&*bytes, b"$g#67$g#67"].concat();
            prop_assert_eq!(events(&all).pop(), Some(PacketEvent::Packet(b"g".to_vec())));
        }
    }
}
