//! The keys of a US keyboard: their scan codes by the name of a key, and for what a terminal sends.

/// A key: its code of set 1, with [`E0`] if the prefix E0H goes before it.
type KeyNumber = u16;
const E0: KeyNumber = 0x100;
const RELEASED: u8 = 0x80;

const SHIFT: KeyNumber = 0x2a;
const CTRL: KeyNumber = 0x1d;
const ALT: KeyNumber = 0x38;
const ESC: KeyNumber = 0x01;
const BACKSPACE: KeyNumber = 0x0e;
const TAB: KeyNumber = 0x0f;
const ENTER: KeyNumber = 0x1c;
const SPACE: KeyNumber = 0x39;

/// Rows of keys: the code of the first, and the characters without and with the shift key.
const ROWS: [(KeyNumber, &[u8], &[u8]); 5] = [
    (0x02, b"1234567890-=", b"!@#$%^&*()_+"),
    (0x10, b"qwertyuiop[]", b"QWERTYUIOP{}"),
    (0x1e, b"asdfghjkl;'`", b"ASDFGHJKL:\"~"),
    (0x2b, b"\\zxcvbnm,./", b"|ZXCVBNM<>?"),
    (SPACE, b" ", b""),
];

/// Other keys by the names that QEMU's monitor has for them.
const NAMES: [(&str, KeyNumber); 65] = [
    ("shift", SHIFT),
    ("shift_r", 0x36),
    ("ctrl", CTRL),
    ("ctrl_r", E0 | CTRL),
    ("alt", ALT),
    ("alt_r", E0 | ALT),
    ("meta_l", E0 | 0x5b),
    ("meta_r", E0 | 0x5c),
    ("menu", E0 | 0x5d),
    ("esc", ESC),
    ("backspace", BACKSPACE),
    ("tab", TAB),
    ("ret", ENTER),
    ("spc", SPACE),
    ("minus", 0x0c),
    ("equal", 0x0d),
    ("bracket_left", 0x1a),
    ("bracket_right", 0x1b),
    ("semicolon", 0x27),
    ("apostrophe", 0x28),
    ("grave_accent", 0x29),
    ("backslash", 0x2b),
    ("comma", 0x33),
    ("dot", 0x34),
    ("slash", 0x35),
    ("less", 0x56),
    ("caps_lock", 0x3a),
    ("num_lock", 0x45),
    ("scroll_lock", 0x46),
    ("f1", 0x3b),
    ("f2", 0x3c),
    ("f3", 0x3d),
    ("f4", 0x3e),
    ("f5", 0x3f),
    ("f6", 0x40),
    ("f7", 0x41),
    ("f8", 0x42),
    ("f9", 0x43),
    ("f10", 0x44),
    ("f11", 0x57),
    ("f12", 0x58),
    ("home", E0 | 0x47),
    ("up", E0 | 0x48),
    ("pgup", E0 | 0x49),
    ("left", E0 | 0x4b),
    ("right", E0 | 0x4d),
    ("end", E0 | 0x4f),
    ("down", E0 | 0x50),
    ("pgdn", E0 | 0x51),
    ("insert", E0 | 0x52),
    ("delete", E0 | 0x53),
    ("kp_divide", E0 | 0x35),
    ("kp_multiply", 0x37),
    ("kp_subtract", 0x4a),
    ("kp_add", 0x4e),
    ("kp_enter", E0 | ENTER),
    ("kp_0", 0x52),
    ("kp_1", 0x4f),
    ("kp_2", 0x50),
    ("kp_3", 0x51),
    ("kp_4", 0x4b),
    ("kp_5", 0x4c),
    ("kp_6", 0x4d),
    ("kp_7", 0x47),
    ("kp_8", 0x48),
];

/// The key of a character, and whether it needs the shift key.
fn character(byte: u8) -> Option<(KeyNumber, bool)> {
    ROWS.iter().find_map(|&(first, plain, shifted)| {
        let find = |row: &[u8]| {
            let mut keys = (first..).zip(row);
            keys.find(|(_, c)| **c == byte).map(|(key, _)| key)
        };
        let unshifted = find(plain).map(|key| (key, false));
        unshifted.or_else(|| find(shifted).map(|key| (key, true)))
    })
}

/// The codes of pressing keys in this order, and of releasing them in the opposite one.
fn press(keys: &[KeyNumber]) -> Vec<u8> {
    let mut codes = Vec::new();
    let mut add = |key: KeyNumber, released: u8| {
        if key & E0 != 0 {
            codes.push(0xe0);
        }
        codes.push((key & 0x7f) as u8 | released);
    };
    keys.iter().for_each(|&key| add(key, 0));
    keys.iter().rev().for_each(|&key| add(key, RELEASED));
    codes
}

/// The codes of keys that are pressed together, named as in QEMU's monitor: `ctrl-alt-delete`, `a`, `ret`.
///
/// Returns `None` if there is no key of that name.
pub fn chord(names: &str) -> Option<Vec<u8>> {
    let key = |name: &str| match name.as_bytes() {
        &[byte] => character(byte)
            .filter(|(_, shift)| !shift)
            .map(|(key, _)| key),
        _ => NAMES
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, key)| *key),
    };
    let keys: Option<Vec<KeyNumber>> = names.split('-').map(key).collect();
    Some(press(&keys?))
}

/// The next key in what a terminal sends: how many bytes it is, and its codes, which are empty for what no key
/// makes.
pub fn typed(bytes: &[u8]) -> (usize, Vec<u8>) {
    match *bytes {
        [] => (0, Vec::new()),
        [0x1b, b'[' | b'O', ref rest @ ..] if !rest.is_empty() => sequence(rest),
        // A terminal sends ESC before a key with Alt.
        [0x1b, next, ..] if next != 0x1b => {
            let keys = plain(next);
            let alt = [&[ALT][..], &keys].concat();
            (2, press(if keys.is_empty() { &[] } else { &alt }))
        }
        [byte, ..] => (1, press(&plain(byte))),
    }
}

/// The keys of a byte.
fn plain(byte: u8) -> Vec<KeyNumber> {
    match byte {
        0x08 | 0x7f => vec![BACKSPACE],
        b'\t' => vec![TAB],
        b'\r' | b'\n' => vec![ENTER],
        0x1b => vec![ESC],
        0 => vec![CTRL, SPACE],
        // Ctrl-A to Ctrl-Z, and Ctrl with the characters behind Z.
        0x01..0x20 => {
            let key = character((byte | 0x40).to_ascii_lowercase());
            key.map_or_else(Vec::new, |(key, _)| vec![CTRL, key])
        }
        _ => match character(byte) {
            Some((key, true)) => vec![SHIFT, key],
            Some((key, false)) => vec![key],
            None => Vec::new(),
        },
    }
}

/// The key of a sequence after ESC [ or ESC O, which is 2 bytes: a number and `~`, or a letter.
fn sequence(rest: &[u8]) -> (usize, Vec<u8>) {
    let parameters = |byte: &&u8| byte.is_ascii_digit() || **byte == b';';
    let len = rest.iter().take_while(parameters).count();
    let Some(last) = rest.get(len) else {
        return (2 + len, Vec::new());
    };
    let number = rest.iter().take_while(|byte| byte.is_ascii_digit());
    let number = number.fold(0_u32, |number, digit| {
        number
            .saturating_mul(10)
            .saturating_add(u32::from(digit - b'0'))
    });
    let name = match (last, number) {
        (b'A', _) => "up",
        (b'B', _) => "down",
        (b'C', _) => "right",
        (b'D', _) => "left",
        (b'H', _) | (b'~', 1 | 7) => "home",
        (b'F', _) | (b'~', 4 | 8) => "end",
        (b'P', _) | (b'~', 11) => "f1",
        (b'Q', _) | (b'~', 12) => "f2",
        (b'R', _) | (b'~', 13) => "f3",
        (b'S', _) | (b'~', 14) => "f4",
        (b'Z', _) => "shift-tab",
        (b'~', 2) => "insert",
        (b'~', 3) => "delete",
        (b'~', 5) => "pgup",
        (b'~', 6) => "pgdn",
        (b'~', 15) => "f5",
        (b'~', 17) => "f6",
        (b'~', 18) => "f7",
        (b'~', 19) => "f8",
        (b'~', 20) => "f9",
        (b'~', 21) => "f10",
        (b'~', 23) => "f11",
        (b'~', 24) => "f12",
        _ => "",
    };
    (3 + len, chord(name).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The codes of all keys in `bytes`.
    fn all(mut bytes: &[u8]) -> Vec<u8> {
        let mut codes = Vec::new();
        while !bytes.is_empty() {
            let (len, key) = typed(bytes);
            codes.extend(key);
            bytes = &bytes[len..];
        }
        codes
    }

    #[test]
    fn typed_characters_have_the_keys_of_a_us_keyboard() {
        let rows: [(&[u8], &[u8]); 12] = [
            (b"a", &[0x1e, 0x9e]),
            (b"A", &[0x2a, 0x1e, 0x9e, 0xaa]),
            (b"`~", &[0x29, 0xa9, 0x2a, 0x29, 0xa9, 0xaa]),
            (b"|/", &[0x2a, 0x2b, 0xab, 0xaa, 0x35, 0xb5]),
            (
                b"\r\x7f\t ",
                &[0x1c, 0x9c, 0x0e, 0x8e, 0x0f, 0x8f, 0x39, 0xb9],
            ),
            (b"\x03", &[0x1d, 0x2e, 0xae, 0x9d]),
            (b"\x1b", &[0x01, 0x81]),
            (
                b"\x1b[A\x1bOB",
                &[0xe0, 0x48, 0xe0, 0xc8, 0xe0, 0x50, 0xe0, 0xd0],
            ),
            (b"\x1b[24~", &[0x58, 0xd8]),
            (b"\x1b[1;5D", &[0xe0, 0x4b, 0xe0, 0xcb]),
            (b"\x1bx", &[0x38, 0x2d, 0xad, 0xb8]),
            ("é\x1b[99~".as_bytes(), &[]),
        ];
        for (bytes, codes) in rows {
            assert_eq!(all(bytes), codes, "{bytes:x?}");
        }
    }

    #[test]
    fn every_printable_character_has_a_key() {
        for byte in 0x20..0x7f {
            assert!(!plain(byte).is_empty(), "{}", char::from(byte));
        }
    }

    #[test]
    fn named_keys_are_pressed_together() {
        let reset = [0x1d, 0x38, 0xe0, 0x53, 0xe0, 0xd3, 0xb8, 0x9d];
        assert_eq!(chord("ctrl-alt-delete").unwrap(), reset);
        assert_eq!(chord("f12").unwrap(), [0x58, 0xd8]);
        assert_eq!(chord("5").unwrap(), [0x06, 0x86]);
        for name in ["", "A", "f13", "ctrl-", "no"] {
            assert_eq!(chord(name), None, "{name}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_consumed(bytes in prop::collection::vec(any::<u8>(), 1..20)) {
            let (len, codes) = typed(&bytes);
            prop_assert!((1..=bytes.len()).contains(&len));
            prop_assert!(codes.len() <= 8);
        }
    }
}
