//! The escape key of the terminal, Ctrl-A, with the commands that QEMU users know.

const CTRL_A: u8 = 0x01;

/// What Ctrl-A h prints; the terminal is raw.
pub const HELP: &[u8] = b"\r\n\
    Ctrl-A h       this help\r\n\
    Ctrl-A x       quit\r\n\
    Ctrl-A Ctrl-A  send Ctrl-A to the guest\r\n";

/// What the user asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Ctrl-A h or Ctrl-A ?.
    Help,
    /// Ctrl-A x.
    Quit,
}

/// Takes the escape sequences out of what is typed.
#[derive(Debug, Default)]
pub struct Escape {
    /// Ctrl-A was the last byte.
    armed: bool,
}

impl Escape {
    /// Splits `typed` into what is for the guest and what is for us. A sequence with any other key
    /// is dropped.
    pub fn filter(&mut self, typed: &[u8]) -> (Vec<u8>, Vec<Command>) {
        let (mut guest, mut commands) = (Vec::with_capacity(typed.len()), Vec::new());
        for &byte in typed {
            match (self.armed, byte) {
                (false, CTRL_A) => {
                    self.armed = true;
                    continue;
                }
                (false, _) | (true, CTRL_A) => guest.push(byte),
                (true, b'x') => commands.push(Command::Quit),
                (true, b'h' | b'?') => commands.push(Command::Help),
                (true, _) => {}
            }
            self.armed = false;
        }
        (guest, commands)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_bytes_pass() {
        assert_eq!(
            Escape::default().filter(b"ls\rx\x03"),
            (b"ls\rx\x03".to_vec(), vec![])
        );
    }

    #[test]
    fn sequences_become_commands() {
        let (guest, commands) = Escape::default().filter(b"a\x01hb\x01?\x01zc\x01x");
        assert_eq!(guest, b"abc");
        assert_eq!(commands, [Command::Help, Command::Help, Command::Quit]);
    }

    #[test]
    fn sequence_split_between_reads_is_found() {
        let mut escape = Escape::default();
        assert_eq!(escape.filter(b"a\x01"), (b"a".to_vec(), vec![]));
        assert_eq!(escape.filter(b"xx"), (b"x".to_vec(), vec![Command::Quit]));
    }

    #[test]
    fn doubled_escape_key_is_sent_once() {
        assert_eq!(
            Escape::default().filter(b"\x01\x01x"),
            (b"\x01x".to_vec(), vec![])
        );
    }
}
