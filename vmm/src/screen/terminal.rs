//! A terminal that may take no output for a while, or never again.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::output::Output;

/// How long a terminal that takes no output delays the end of the run.
const GRACE: Duration = Duration::from_millis(500);
/// Time between two checks whether the run has ended.
const PERIOD: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// A terminal whose writes do not block.
///
/// A terminal takes no output while the user has stopped it, or while the program behind it is stopped.
#[derive(Debug)]
pub struct Terminal {
    output: Output,
    file: File,
}

impl Terminal {
    /// Opens the terminal that is standard output.
    ///
    /// The descriptor that this process has inherited stays as it is: other programs share it.
    ///
    /// # Errors
    ///
    /// The terminal cannot be opened a second time.
    pub fn of_stdout(output: Output) -> io::Result<Self> {
        let mut options = File::options();
        options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
        let file = options.write(true).open("/proc/self/fd/1")?;
        Ok(Self { output, file })
    }

    /// Writes `text` when the terminal takes it. Drops the rest if it takes none for [`GRACE`] while
    /// `ends` is true.
    pub(super) fn write(&self, mut text: &[u8], ends: impl Fn() -> bool) {
        let mut deadline = None;
        while !text.is_empty() {
            let written = self
                .output
                .write_with(text, |part| (&self.file).write(part));
            match written {
                Ok(count) => {
                    text = text.get(count..).unwrap_or_default();
                    deadline = None;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if ends() {
                        let now = Instant::now();
                        if now >= *deadline.get_or_insert(now + GRACE) {
                            return;
                        }
                    }
                    let mut polled = [PollFd::new(&self.file, PollFlags::OUT)];
                    // After an error, the next write fails, too.
                    let _ = poll(&mut polled, Some(&PERIOD));
                }
                // The output has reported it, which ends the run.
                Err(_) => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::OwnedFd;
    use std::sync::mpsc;
    use std::thread;

    use super::*;
    use crate::console::tests::pseudo_terminal;
    use crate::output::RunOutputs;

    /// A terminal, and the user's end of it.
    fn terminal() -> (Terminal, OwnedFd) {
        let (control, terminal) = pseudo_terminal();
        rustix::io::ioctl_fionbio(&terminal, true).unwrap();
        let output = RunOutputs::new(None).output("--display text");
        let file = File::from(terminal);
        (Terminal { output, file }, control)
    }

    #[test]
    fn stopped_terminal_does_not_delay_the_end() {
        let (terminal, _control) = terminal();
        let (ended, ends) = mpsc::channel();
        thread::spawn(move || {
            terminal.write(&[b'x'; 1 << 20], || true);
            ended.send(())
        });
        ends.recv_timeout(Duration::from_secs(10)).unwrap();
    }

    #[test]
    fn slow_terminal_gets_all_of_the_text() {
        let (terminal, control) = terminal();
        let text = vec![b'x'; 1 << 16];
        let writer = {
            let text = text.clone();
            thread::spawn(move || {
                terminal.write(&text, || false);
                terminal
            })
        };
        let mut read = vec![0; text.len()];
        thread::sleep(Duration::from_millis(50));
        File::from(control).read_exact(&mut read).unwrap();
        assert_eq!(read, text);
        drop(writer.join().unwrap());
    }
}
