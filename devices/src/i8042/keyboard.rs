//! A PS/2 keyboard: scan codes on their way to the controller, and the answers to its commands.
//!
//! IBM PS/2 Hardware Interface Technical Reference, "Keyboard (101- and 102-Key)". Scan code sets 1 and 2.
//! Deviations: keys do not repeat by themselves, typematic rates and indicators are accepted without effect, and
//! the controller's translation is applied when a key is pressed.

use std::collections::VecDeque;

/// Most bytes of scan codes that wait for the guest.
const CODES_MAX: usize = 256;
/// Most bytes of answers that wait: a guest that sends commands without reading loses the further ones.
const ANSWERS_MAX: usize = 16;

const ACK: u8 = 0xfa;
const RESEND: u8 = 0xfe;
const ECHO: u8 = 0xee;
/// The self-test passed.
const BAT_PASSED: u8 = 0xaa;
const ID: u8 = 0xab;
/// The second byte of the ID, and as the controller translates it.
const ID_PLAIN: u8 = 0x83;
const ID_TRANSLATED: u8 = 0x41;
/// The scan code sets 1 and 2, as the controller translates their numbers.
const SETS_TRANSLATED: [u8; 2] = [0x43, 0x41];

/// Prefixes of scan codes.
const EXTENDED: u8 = 0xe0;
const PAUSE: u8 = 0xe1;
/// Bit 7 of a code of set 1: the key is released. In set 2, a prefix says so.
const RELEASED: u8 = 0x80;
const RELEASE_PREFIX: u8 = 0xf0;

/// The code of set 2 for each of set 1; 0 for those that no key has.
const SET_2: [u8; 0x60] = [
    0, 0x76, 0x16, 0x1e, 0x26, 0x25, 0x2e, 0x36, 0x3d, 0x3e, 0x46, 0x45, 0x4e, 0x55, 0x66, 0x0d,
    0x15, 0x1d, 0x24, 0x2d, 0x2c, 0x35, 0x3c, 0x43, 0x44, 0x4d, 0x54, 0x5b, 0x5a, 0x14, 0x1c, 0x1b,
    0x23, 0x2b, 0x34, 0x33, 0x3b, 0x42, 0x4b, 0x4c, 0x52, 0x0e, 0x12, 0x5d, 0x1a, 0x22, 0x21, 0x2a,
    0x32, 0x31, 0x3a, 0x41, 0x49, 0x4a, 0x59, 0x7c, 0x11, 0x29, 0x58, 0x05, 0x06, 0x04, 0x0c, 0x03,
    0x0b, 0x83, 0x0a, 0x01, 0x09, 0x77, 0x7e, 0x6c, 0x75, 0x7d, 0x7b, 0x6b, 0x73, 0x74, 0x79, 0x69,
    0x72, 0x7a, 0x70, 0x71, 0x84, 0, 0x61, 0x78, 0x07, 0, 0, 0x1f, 0x27, 0x2f, 0, 0,
];

/// A command of the keyboard that expects a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum KeyboardCommand {
    /// EDH: set the indicators.
    SetIndicators,
    /// F0H: select or read the scan code set.
    SelectSet,
    /// F3H: set the typematic rate.
    SetRate,
}

/// The state of a keyboard as plain data.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct KeyboardState {
    /// The keyboard sends scan codes.
    pub scanning: bool,
    /// The scan code set, 1 or 2.
    pub set: u8,
    /// The command that expects a parameter.
    pub pending: Option<KeyboardCommand>,
    /// Answers to commands, which go before scan codes.
    pub answers: VecDeque<u8>,
    /// Scan codes.
    pub codes: VecDeque<u8>,
    /// The last byte that the controller took.
    pub last: u8,
}

impl Default for KeyboardState {
    fn default() -> Self {
        Self {
            scanning: true,
            set: 2,
            pending: None,
            answers: VecDeque::new(),
            codes: VecDeque::new(),
            last: 0,
        }
    }
}

impl KeyboardState {
    /// Whether a keyboard can have this state.
    ///
    /// `given`: the controller has a byte of the keyboard that the guest has not read.
    pub(super) fn is_valid(&self, given: bool) -> bool {
        matches!(self.set, 1 | 2)
            && self.answers.len() + usize::from(given) <= ANSWERS_MAX + 1
            && self.codes.len() <= CODES_MAX
    }

    /// The next byte for the controller.
    pub(super) fn take(&mut self) -> Option<u8> {
        let byte = self
            .answers
            .pop_front()
            .or_else(|| self.codes.pop_front())?;
        self.last = byte;
        Some(byte)
    }

    /// The byte that the controller took last.
    pub(super) const fn last(&self) -> u8 {
        self.last
    }

    /// Takes back a byte that the guest has not read.
    pub(super) fn give_back(&mut self, byte: u8) {
        self.answers.push_front(byte);
    }

    /// Whether the keyboard takes at least one more key.
    pub(super) fn has_capacity(&self) -> bool {
        self.scanning && self.codes.len() + 6 <= CODES_MAX
    }

    /// Sends keys, given as codes of set 1, of which `translate` says that the guest gets them.
    ///
    /// Returns how many bytes of `codes` were taken: whole codes with their prefixes.
    pub(super) fn input(&mut self, codes: &[u8], translate: bool) -> usize {
        let mut rest = codes;
        while self.has_capacity() {
            let len = match rest.first() {
                None => break,
                Some(&EXTENDED) => 2,
                Some(&PAUSE) => 3,
                Some(_) => 1,
            };
            let (code, after) = rest.split_at(len.min(rest.len()));
            if translate || self.set == 1 {
                self.codes.extend(code);
            } else {
                code.iter().for_each(|&byte| self.push_set_2(byte));
            }
            rest = after;
        }
        codes.len() - rest.len()
    }

    /// Adds a byte of set 1 as set 2 has it.
    fn push_set_2(&mut self, byte: u8) {
        if matches!(byte, EXTENDED | PAUSE) {
            return self.codes.push_back(byte);
        }
        let code = SET_2.get(usize::from(byte & !RELEASED));
        if byte & RELEASED != 0 {
            self.codes.push_back(RELEASE_PREFIX);
        }
        self.codes.push_back(code.copied().unwrap_or(0));
    }

    fn answer(&mut self, bytes: &[u8]) {
        if self.answers.len() + bytes.len() <= ANSWERS_MAX {
            self.answers.extend(bytes);
        }
    }

    /// Executes a command, or takes its parameter. With `translate`, the controller translates answers.
    pub(super) fn write(&mut self, byte: u8, translate: bool) {
        match self.pending.take() {
            Some(KeyboardCommand::SelectSet) => self.select_set(byte, translate),
            Some(_) => self.answer(&[ACK]),
            None => self.command(byte, translate),
        }
    }

    fn select_set(&mut self, byte: u8, translate: bool) {
        match byte {
            0 => {
                let translated = SETS_TRANSLATED[usize::from(self.set == 2)];
                self.answer(&[ACK, if translate { translated } else { self.set }]);
            }
            1 | 2 => {
                self.set = byte;
                self.answer(&[ACK]);
            }
            _ => self.answer(&[RESEND]),
        }
    }

    fn command(&mut self, byte: u8, translate: bool) {
        match byte {
            0xed => self.expect(KeyboardCommand::SetIndicators),
            0xee => self.answer(&[ECHO]),
            0xf0 => self.expect(KeyboardCommand::SelectSet),
            0xf2 => {
                let second = if translate { ID_TRANSLATED } else { ID_PLAIN };
                self.answer(&[ACK, ID, second]);
            }
            0xf3 => self.expect(KeyboardCommand::SetRate),
            // Enable; disable and set defaults; set defaults.
            0xf4 => self.restart(true, &[ACK]),
            0xf5 => {
                self.set = 2;
                self.restart(false, &[ACK]);
            }
            0xf6 => {
                self.set = 2;
                self.restart(true, &[ACK]);
            }
            // The keys of set 3.
            0xf7..=0xfd => self.answer(&[ACK]),
            0xfe => self.answer(&[self.last]),
            0xff => {
                self.set = 2;
                self.restart(true, &[ACK, BAT_PASSED]);
            }
            _ => self.answer(&[RESEND]),
        }
    }

    fn expect(&mut self, command: KeyboardCommand) {
        self.pending = Some(command);
        self.answer(&[ACK]);
    }

    /// Drops what waits, and answers.
    fn restart(&mut self, scanning: bool, answer: &[u8]) {
        self.scanning = scanning;
        self.codes.clear();
        self.answers.clear();
        self.answer(answer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(keyboard: &mut KeyboardState) -> Vec<u8> {
        std::iter::from_fn(|| keyboard.take()).collect()
    }

    #[test]
    fn keys_have_the_codes_of_the_selected_set() {
        let mut keyboard = KeyboardState::default();
        // A, the right arrow, F7 and Pause, pressed and released.
        let codes = [
            0x1e, 0x9e, 0xe0, 0x4d, 0xe0, 0xcd, 0x41, 0xc1, 0xe1, 0x1d, 0x45, 0xe1, 0x9d, 0xc5,
        ];
        assert_eq!(keyboard.input(&codes, true), codes.len());
        assert_eq!(drain(&mut keyboard), codes);
        keyboard.input(&codes, false);
        let set_2 = [
            0x1c, 0xf0, 0x1c, 0xe0, 0x74, 0xe0, 0xf0, 0x74, 0x83, 0xf0, 0x83, 0xe1, 0x14, 0x77,
            0xe1, 0xf0, 0x14, 0xf0, 0x77,
        ];
        assert_eq!(drain(&mut keyboard), set_2);
        keyboard.write(0xf0, false);
        keyboard.write(1, false);
        keyboard.input(&codes, false);
        assert_eq!(drain(&mut keyboard)[2..], codes);
    }

    #[test]
    fn commands_are_answered() {
        let rows: [(&[u8], bool, &[u8]); 12] = [
            (&[0xed, 7], true, &[ACK, ACK]),
            (&[0xee], true, &[ECHO]),
            (&[0xf0, 0], true, &[ACK, ACK, 0x41]),
            (&[0xf0, 0], false, &[ACK, ACK, 2]),
            (&[0xf0, 3], false, &[ACK, RESEND]),
            (&[0xf2], true, &[ACK, ID, 0x41]),
            (&[0xf2], false, &[ACK, ID, 0x83]),
            (&[0xf3, 0x20], true, &[ACK, ACK]),
            (&[0xf4], true, &[ACK]),
            (&[0xff], true, &[ACK, BAT_PASSED]),
            (&[0xfa], true, &[ACK]),
            (&[0x12], true, &[RESEND]),
        ];
        for (bytes, translate, expected) in rows {
            let mut keyboard = KeyboardState::default();
            for &byte in bytes {
                keyboard.write(byte, translate);
            }
            assert_eq!(drain(&mut keyboard), expected, "{bytes:x?}");
        }
    }

    #[test]
    fn answers_go_before_keys_and_are_sent_again_on_request() {
        let mut keyboard = KeyboardState::default();
        keyboard.input(&[0x1e], true);
        keyboard.write(0xed, true);
        assert_eq!(keyboard.take(), Some(ACK));
        keyboard.write(0, true);
        keyboard.write(0xfe, true);
        assert_eq!(drain(&mut keyboard), [ACK, ACK, 0x1e]);
    }

    #[test]
    fn disabled_keyboard_takes_no_keys_and_forgets_those_that_wait() {
        let mut keyboard = KeyboardState::default();
        keyboard.input(&[0x1e], true);
        keyboard.write(0xf5, true);
        assert_eq!(drain(&mut keyboard), [ACK]);
        assert_eq!(keyboard.input(&[0x1e], true), 0);
        keyboard.write(0xf4, true);
        assert_eq!(keyboard.input(&[0x1e], true), 1);
    }

    #[test]
    fn queues_are_bounded_and_codes_stay_whole() {
        let mut keyboard = KeyboardState::default();
        let codes = [0xe0, 0x4d].repeat(1000);
        let taken = keyboard.input(&codes, false);
        assert!(taken > 200 && taken.is_multiple_of(2), "{taken}");
        assert_eq!(keyboard.input(&codes[taken..], false), 0);
        for _ in 0..1000 {
            keyboard.write(0xf2, false);
        }
        assert!(keyboard.is_valid(false));
        assert_eq!(keyboard.codes.len() % 2, 0);
    }
}
