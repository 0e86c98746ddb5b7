//! What the guest prints.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The most output that is kept, in bytes. Older output is dropped.
const OUTPUT_MAX: usize = 16 << 20;

#[derive(Debug, Default)]
struct OutputBuffer {
    bytes: Vec<u8>,
    /// Bytes that were dropped before the first of `bytes`.
    dropped: u64,
}

/// The output of COM1 and of the debug console, in the order in which the guest wrote it.
#[derive(Clone, Debug, Default)]
pub(crate) struct GuestOutput(Arc<Mutex<OutputBuffer>>);

impl GuestOutput {
    fn lock(&self) -> MutexGuard<'_, OutputBuffer> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How much was written so far.
    pub(crate) fn position(&self) -> u64 {
        let output = self.lock();
        output.dropped + output.bytes.len() as u64
    }

    /// What was written from `position` on, as far as it is kept.
    pub(crate) fn since(&self, position: u64) -> Vec<u8> {
        let output = self.lock();
        let start = position.saturating_sub(output.dropped);
        let start = usize::try_from(start).unwrap_or(usize::MAX);
        output.bytes.get(start..).unwrap_or_default().to_vec()
    }
}

impl Write for GuestOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut output = self.lock();
        output.bytes.extend_from_slice(bytes);
        if output.bytes.len() > OUTPUT_MAX {
            let drop = output.bytes.len() - OUTPUT_MAX / 2;
            output.bytes.drain(..drop);
            output.dropped += drop as u64;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_bounded_and_positions_keep_their_meaning() {
        let mut console = GuestOutput::default();
        console.write_all(&vec![b'a'; OUTPUT_MAX]).unwrap();
        let position = console.position();
        console.write_all(b"end").unwrap();
        assert_eq!(console.since(position), b"end");
        assert_eq!(console.since(0).len(), OUTPUT_MAX / 2);
        assert_eq!(console.position(), OUTPUT_MAX as u64 + 3);
        assert_eq!(console.since(u64::MAX), b"");
    }
}
