//! The escape key of the terminal, Ctrl-A, with the same commands as in QEMU.

const CTRL_A: u8 = 0x01;

/// The text of Ctrl-A h, for a raw terminal.
pub const HELP: &[u8] = b"\r\n\
    Ctrl-A h       this help\r\n\
    Ctrl-A x       quit\r\n\
    Ctrl-A Ctrl-A  send Ctrl-A to the guest\r\n";

/// A command of the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EscapeCommand {
    /// Ctrl-A h or Ctrl-A ?.
    Help,
    /// Ctrl-A x.
    Quit,
}

/// Separates escape sequences from other typed bytes.
#[derive(Debug, Default)]
pub struct EscapeFilter {
    /// Whether Ctrl-A was the last byte.
    after_escape: bool,
}

impl EscapeFilter {
    /// Splits `typed` into bytes for the guest and commands for the monitor. A sequence with an unknown
    /// key is dropped.
    pub fn filter(&mut self, typed: &[u8]) -> (Vec<u8>, Vec<EscapeCommand>) {
        let (mut guest, mut commands) = (Vec::with_capacity(typed.len()), Vec::new());
        for &byte in typed {
            match (self.after_escape, byte) {
                (false, CTRL_A) => {
                    self.after_escape = true;
                    continue;
                }
                (false, _) | (true, CTRL_A) => guest.push(byte),
                (true, b'x') => commands.push(EscapeCommand::Quit),
                (true, b'h' | b'?') => commands.push(EscapeCommand::Help),
                (true, _) => {}
            }
            self.after_escape = false;
        }
        (guest, commands)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_bytes_reach_the_guest() {
        assert_eq!(
            EscapeFilter::default().filter(b"ls\rx\x03"),
            (b"ls\rx\x03".to_vec(), vec![])
        );
    }

    #[test]
    fn escape_sequences_become_commands() {
        let (guest, commands) = EscapeFilter::default().filter(b"a\x01hb\x01?\x01zc\x01x");
        assert_eq!(guest, b"abc");
        assert_eq!(
            commands,
            [
                EscapeCommand::Help,
                EscapeCommand::Help,
                EscapeCommand::Quit
            ]
        );
    }

    #[test]
    fn escape_sequence_split_between_reads_is_recognized() {
        let mut escape = EscapeFilter::default();
        assert_eq!(escape.filter(b"a\x01"), (b"a".to_vec(), vec![]));
        assert_eq!(
            escape.filter(b"xx"),
            (b"x".to_vec(), vec![EscapeCommand::Quit])
        );
    }

    #[test]
    fn doubled_escape_key_reaches_the_guest_once() {
        assert_eq!(
            EscapeFilter::default().filter(b"\x01\x01x"),
            (b"\x01x".to_vec(), vec![])
        );
    }
}
