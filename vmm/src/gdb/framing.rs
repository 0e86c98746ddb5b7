//! Packets in a stream of bytes: `$body#checksum`, acknowledgements and the interrupt character.

/// The longest packet body that is taken, in bytes. Told to the client as `PacketSize`.
pub(super) const BODY_MAX: usize = 0x1_0000;

/// What came in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Item {
    /// A packet with a good checksum: its body, still escaped.
    Packet(Vec<u8>),
    /// A packet whose checksum is wrong: to be asked for again.
    Corrupt,
    /// A packet longer than [`BODY_MAX`].
    TooLong,
    /// The client did not understand our last packet.
    Nack,
    /// Ctrl-C.
    Interrupt,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Outside,
    Body,
    Checksum(Option<u8>),
}

/// Finds packets in bytes that come in any pieces. What is no packet is skipped.
#[derive(Debug, Default)]
pub(super) struct Framer {
    place: Place,
    body: Vec<u8>,
    too_long: bool,
}

impl Framer {
    /// Takes one byte.
    pub(super) fn push(&mut self, byte: u8) -> Option<Item> {
        match (self.place, byte) {
            (Place::Outside, b'-') => return Some(Item::Nack),
            (Place::Outside, 0x03) => return Some(Item::Interrupt),
            // Within a body, a `$` can only be the start of the next packet: it is never sent
            // unescaped.
            (Place::Outside | Place::Body, b'$') => self.start(),
            (Place::Outside, _) => {}
            (Place::Body, b'#') => self.place = Place::Checksum(None),
            (Place::Body, byte) if self.body.len() < BODY_MAX => self.body.push(byte),
            (Place::Body, _) => self.too_long = true,
            (Place::Checksum(None), byte) => self.place = Place::Checksum(Some(byte)),
            (Place::Checksum(Some(high)), low) => {
                self.place = Place::Outside;
                return Some(self.finish(high, low));
            }
        }
        None
    }

    fn start(&mut self) {
        self.place = Place::Body;
        self.body.clear();
        self.too_long = false;
    }

    fn finish(&mut self, high: u8, low: u8) -> Item {
        if self.too_long {
            return Item::TooLong;
        }
        let told = hex_digit(high).zip(hex_digit(low)).map(|(h, l)| h << 4 | l);
        if told == Some(checksum(&self.body)) {
            Item::Packet(std::mem::take(&mut self.body))
        } else {
            Item::Corrupt
        }
    }
}

fn hex_digit(byte: u8) -> Option<u8> {
    char::from(byte)
        .to_digit(16)
        .and_then(|digit| u8::try_from(digit).ok())
}

/// The sum of all bytes, modulo 256.
fn checksum(body: &[u8]) -> u8 {
    body.iter().fold(0, |sum: u8, &byte| sum.wrapping_add(byte))
}

/// A body as a packet.
pub(super) fn frame(body: &[u8]) -> Vec<u8> {
    let mut packet = Vec::with_capacity(body.len() + 4);
    packet.push(b'$');
    packet.extend_from_slice(body);
    packet.extend_from_slice(format!("#{:02x}", checksum(body)).as_bytes());
    packet
}

/// The bodies of well-formed packets in `bytes`.
pub(super) fn bodies(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut framer = Framer::default();
    let items = bytes.iter().filter_map(|&byte| framer.push(byte));
    items
        .filter_map(|item| match item {
            Item::Packet(body) => Some(body),
            _ => None,
        })
        .collect()
}

/// Takes the escapes (`}` and a byte XOR 0x20) out of a body.
#[cfg(test)]
fn unescape(body: &[u8]) -> Vec<u8> {
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

/// Escapes what may not stand in a body.
pub(super) fn escape(plain: &[u8]) -> Vec<u8> {
    let mut body = Vec::with_capacity(plain.len());
    for &byte in plain {
        match byte {
            b'#' | b'$' | b'}' | b'*' => body.extend([b'}', byte ^ 0x20]),
            byte => body.push(byte),
        }
    }
    body
}

/// Bytes as hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    let digit = |nibble: u8| char::from(b"0123456789abcdef"[usize::from(nibble)]);
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits.map(digit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn items(bytes: &[u8]) -> Vec<Item> {
        let mut framer = Framer::default();
        bytes.iter().filter_map(|&b| framer.push(b)).collect()
    }

    #[test]
    fn packets_among_other_things() {
        assert_eq!(
            items(b"+$g#67junk\x03-$?#00$m0,1#fa"),
            [
                Item::Packet(b"g".to_vec()),
                Item::Interrupt,
                Item::Nack,
                Item::Corrupt,
                Item::Packet(b"m0,1".to_vec()),
            ]
        );
    }

    #[test]
    fn interrupt_character_within_a_body_is_data() {
        let packet = frame(b"X0,1:\x03");
        assert_eq!(items(&packet), [Item::Packet(b"X0,1:\x03".to_vec())]);
    }

    #[test]
    fn packet_that_is_cut_off_gives_way_to_the_next() {
        assert_eq!(items(b"$m10$g#67"), [Item::Packet(b"g".to_vec())]);
    }

    #[test]
    fn huge_packet_takes_no_memory_and_is_reported() {
        let mut bytes = vec![b'$'];
        bytes.resize(BODY_MAX * 3, b'a');
        bytes.extend(b"#00$g#67");
        assert_eq!(items(&bytes), [Item::TooLong, Item::Packet(b"g".to_vec())]);
    }

    proptest! {
        #[test]
        fn any_body_survives_framing(body in proptest::collection::vec(any::<u8>(), 0..200)) {
            let sent = frame(&escape(&body));
            let got = bodies(&sent);
            prop_assert_eq!(got.len(), 1);
            prop_assert_eq!(unescape(&got[0]), body);
        }

        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            items(&bytes);
        }
    }
}
