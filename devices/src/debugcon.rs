//! The debug console of Bochs and QEMU: each byte written to port 0xe9 is a byte of output.

use std::fmt;
use std::io::Write;

use crate::bus::Device;

/// Port of the console; it reads as its own number, by which guests detect it.
pub const DEBUGCON_PORT: u16 = 0xe9;

/// The debug console, which has no state.
pub struct DebugCon {
    output: Box<dyn Write + Send>,
}

impl DebugCon {
    /// A console that writes to `output`, which should buffer and must not block without end.
    /// Output that fails is lost.
    pub fn new(output: impl Write + Send + 'static) -> Self {
        Self {
            output: Box::new(output),
        }
    }
}

impl Device for DebugCon {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(DEBUGCON_PORT.to_le_bytes()[0]);
    }

    fn write(&mut self, _offset: u64, data: &[u8]) {
        let _ = self
            .output
            .write_all(data)
            .and_then(|()| self.output.flush());
    }
}

impl fmt::Debug for DebugCon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DebugCon")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::sync::mpsc;

    struct Sink(mpsc::Sender<Vec<u8>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.send(bytes.to_vec()).unwrap();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn read_returns_the_port_number() {
        let mut data = [0];
        DebugCon::new(io::sink()).read(0, &mut data);
        assert_eq!(data, [0xe9]);
    }

    #[test]
    fn written_bytes_reach_the_output() {
        let (sender, written) = mpsc::channel();
        DebugCon::new(Sink(sender)).write(0, b"x");
        assert_eq!(written.recv().unwrap(), b"x");
    }
}
