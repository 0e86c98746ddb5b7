//! Branch trace messages: what a processor with IA32_DEBUGCTL.TR sends to its bus, where a debug
//! port would listen. SDM Vol. 3B, "Branch Trace Messages".

use std::fmt;
use std::io::{self, Write};
use std::sync::Mutex;

use hindsight_cpu::branch::{Branch, BranchClass};

use crate::sync::lock;

/// Receives branch trace messages, one line of text each.
///
/// `CPU FROM TO KIND CPL`: the vCPU's number, two addresses in hexadecimal, the kind of branch, and the
/// privilege level of its source.
pub struct BtmSink {
    /// `None` after a write failed.
    sink: Mutex<Option<Box<dyn Write + Send>>>,
}

impl fmt::Debug for BtmSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BtmSink")
    }
}

impl BtmSink {
    /// Writes messages to `sink`.
    pub fn new(sink: Box<dyn Write + Send>) -> Self {
        Self {
            sink: Mutex::new(Some(sink)),
        }
    }

    /// Writes the messages of vCPU `cpu`. The first one that cannot be written ends all messages; the
    /// sink reports its errors itself.
    pub fn send<'a>(&self, cpu: usize, branches: impl Iterator<Item = &'a Branch>) {
        let mut sink = lock(&self.sink);
        let Some(writer) = sink.as_mut() else { return };
        if let Err(error) = write_all(writer, cpu, branches) {
            tracing::info!("branch trace messages end: they cannot be written: {error}");
            *sink = None;
        }
    }

    /// Flushes buffered messages.
    pub fn flush(&self) {
        if let Some(writer) = lock(&self.sink).as_mut()
            && let Err(error) = writer.flush()
        {
            tracing::info!("the last branch trace messages cannot be written: {error}");
        }
    }
}

fn write_all<'a>(
    writer: &mut Box<dyn Write + Send>,
    cpu: usize,
    branches: impl Iterator<Item = &'a Branch>,
) -> io::Result<()> {
    for branch in branches.filter(|branch| branch.class != BranchClass::NotTaken) {
        let Branch { from, to, cpl, .. } = branch;
        let kind = branch.class.short_name();
        // One write: a line is written whole or not at all.
        let line = format!("{cpu} {from:#018x} {to:#018x} {kind} {cpl}\n");
        writer.write_all(line.as_bytes())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[derive(Clone, Default)]
    struct SharedBuffer(Arc<Mutex<Vec<u8>>>);

    impl Write for SharedBuffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.0.lock().unwrap().len() > 80 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn messages_are_lines_until_writing_fails() {
        let buffer = SharedBuffer::default();
        let messages = BtmSink::new(Box::new(buffer.clone()));
        let branch = Branch {
            from: 0x10,
            to: 0xffff_8000_0000_0000,
            at: 0,
            class: BranchClass::Return,
            cpl: 3,
            to_cpl: 3,
            mispredicted: false,
        };
        for _ in 0..5 {
            messages.send(1, [branch].iter());
        }
        let text = String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap();
        let line = "1 0x0000000000000010 0xffff800000000000 ret 3\n";
        assert_eq!(text, line.repeat(2));
    }
}
