//! Consoles and serial ports between guest and host. VIRTIO 1.2, "Console Device".
//!
//! Port 0 has queues 0 and 1; then come the two queues of control messages, and two for each
//! further port. Output goes to a port's sink during the guest's notification.

use std::collections::VecDeque;
use std::fmt;
use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::device::{VirtioDevice, VirtioKind};
use super::queues::{QueueError, VirtQueues};
use crate::bus::lock;

/// Maximum number of ports of a device.
pub const PORTS_MAX: usize = 16;
/// Maximum number of bytes of a port's input that wait for the guest.
const INPUT_MAX: usize = 1 << 16;
/// Bytes that are copied at once.
const COPY_LEN: usize = 1 << 14;
/// Bytes of one request of output.
const OUTPUT_MAX: usize = 16 << 20;
/// Control messages that wait for the guest; a driver that makes more is reset.
const MESSAGES_MAX: usize = 64 * PORTS_MAX;

const FEATURE_SIZE: u64 = 1 << 0;
const FEATURE_MULTIPORT: u64 = 1 << 1;

/// Indices of the queues of control messages.
const CONTROL_TO_GUEST: usize = 2;
const CONTROL_TO_HOST: usize = 3;

const DEVICE_READY: u16 = 0;
const PORT_ADD: u16 = 1;
const PORT_READY: u16 = 3;
const CONSOLE_PORT: u16 = 4;
const RESIZE: u16 = 5;
const PORT_OPEN: u16 = 6;
const PORT_NAME: u16 = 7;

/// Input of one port, as the host's side fills it.
#[derive(Debug, Default)]
struct PendingInput {
    bytes: VecDeque<u8>,
    /// No further input comes.
    closed: bool,
    /// Rows and columns of the terminal, if they changed.
    size: Option<(u16, u16)>,
}

/// The host's end of a port's input.
#[derive(Clone, Debug, Default)]
pub struct PortInput {
    pending: Arc<Mutex<PendingInput>>,
    drained: Arc<Condvar>,
}

impl PortInput {
    /// Adds input. Returns how many bytes fitted. The device must be served afterwards.
    pub fn push(&self, bytes: &[u8]) -> usize {
        let mut pending = lock(&self.pending);
        let count = bytes
            .len()
            .min(INPUT_MAX - pending.bytes.len().min(INPUT_MAX));
        pending.bytes.extend(&bytes[..count]);
        count
    }

    /// Ends the input: the guest reads the end of the file after what was pushed.
    pub fn close(&self) {
        lock(&self.pending).closed = true;
    }

    /// Sets the size of the terminal.
    pub fn set_size(&self, rows: u16, columns: u16) {
        lock(&self.pending).size = Some((rows, columns));
    }

    /// Waits until the guest has taken input, at most for `limit`.
    pub fn wait(&self, limit: Duration) {
        let pending = lock(&self.pending);
        let full = |pending: &mut PendingInput| pending.bytes.len() >= INPUT_MAX;
        let waited = self.drained.wait_timeout_while(pending, limit, full);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

/// A port of a console device.
pub struct ConsolePort {
    /// The name that the guest finds in sysfs.
    pub name: String,
    /// The guest uses the port as a terminal.
    pub is_console: bool,
    /// Receives what the guest writes.
    pub output: Box<dyn Write + Send>,
    /// Holds the input that the guest reads.
    pub input: PortInput,
}

impl fmt::Debug for ConsolePort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsolePort")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// A virtio console with several ports.
#[derive(Debug)]
pub struct VirtioConsole {
    ports: Vec<ConsolePort>,
    /// Ports whose end of input was reported to the guest.
    closed: Vec<bool>,
    /// Ports that the guest has opened. It drops the input of others.
    open: Vec<bool>,
    /// Control messages for the guest.
    messages: VecDeque<Vec<u8>>,
    multiport: bool,
}

impl VirtioConsole {
    /// A console with `ports`, of which those beyond [`PORTS_MAX`] are dropped.
    pub fn new(mut ports: Vec<ConsolePort>) -> Self {
        ports.truncate(PORTS_MAX);
        Self {
            closed: vec![false; ports.len()],
            open: vec![false; ports.len()],
            ports,
            messages: VecDeque::new(),
            multiport: false,
        }
    }

    fn message(&mut self, port: usize, event: u16, value: u16, extra: &[u8]) {
        let mut message = u32::try_from(port)
            .unwrap_or(u32::MAX)
            .to_le_bytes()
            .to_vec();
        message.extend(event.to_le_bytes());
        message.extend(value.to_le_bytes());
        message.extend(extra);
        self.messages.push_back(message);
    }

    /// Serves a control message of the driver. Returns the port that it opened or closed.
    fn control(&mut self, message: &[u8]) -> Result<Option<usize>, QueueError> {
        let &[a, b, c, d, e, f, g, h] = message else {
            return Err(QueueError::Request("a control message has not 8 bytes"));
        };
        if self.messages.len() > MESSAGES_MAX {
            return Err(QueueError::Request(
                "too many control messages are not answered",
            ));
        }
        let port = usize::try_from(u32::from_le_bytes([a, b, c, d])).unwrap_or(usize::MAX);
        match (u16::from_le_bytes([e, f]), u16::from_le_bytes([g, h])) {
            (DEVICE_READY, 1) => {
                for port in 0..self.ports.len() {
                    self.message(port, PORT_ADD, 0, &[]);
                }
            }
            (PORT_READY, 1) if port < self.ports.len() => {
                if self.ports[port].is_console {
                    self.message(port, CONSOLE_PORT, 1, &[]);
                }
                let name = self.ports[port].name.clone();
                self.message(port, PORT_NAME, 1, name.as_bytes());
                self.message(port, PORT_OPEN, 1, &[]);
            }
            (PORT_OPEN, open) if port < self.ports.len() => {
                self.open[port] = open != 0;
                return Ok(Some(port));
            }
            _ => {}
        }
        Ok(None)
    }

    /// The port of a queue that carries data, and whether to the host.
    fn port_of(index: usize) -> (usize, bool) {
        let port = if index < CONTROL_TO_GUEST {
            0
        } else {
            index / 2 - 1
        };
        (port, index % 2 == 1)
    }

    /// The queue of a port's input.
    fn input_queue(port: usize) -> usize {
        if port == 0 { 0 } else { 2 * port + 2 }
    }

    fn send_output(
        &mut self,
        queues: &mut VirtQueues<'_>,
        index: usize,
        port: usize,
    ) -> Result<(), QueueError> {
        let mut buffer = [0; COPY_LEN];
        while let Some(chain) = queues.pop(index)? {
            if chain.readable_len() > OUTPUT_MAX {
                return Err(QueueError::Request("output is longer than 16 MiB"));
            }
            let mut offset = 0;
            loop {
                let count = chain.read(queues.memory(), offset, &mut buffer)?;
                if count == 0 {
                    break;
                }
                offset += count;
                // A sink reports its own failures; the guest continues without it.
                let _ = self.ports[port].output.write_all(&buffer[..count]);
            }
            let _ = self.ports[port].output.flush();
            queues.complete(index, &chain, 0)?;
        }
        Ok(())
    }

    fn deliver_input(
        &mut self,
        queues: &mut VirtQueues<'_>,
        index: usize,
        port: usize,
    ) -> Result<(), QueueError> {
        if self.multiport && !self.open[port] {
            return Ok(());
        }
        let input = self.ports[port].input.clone();
        let mut pending = lock(&input.pending);
        while !pending.bytes.is_empty() {
            let Some(chain) = queues.pop(index)? else {
                break;
            };
            let count = pending.bytes.len().min(chain.writable_len()).min(COPY_LEN);
            if count == 0 {
                return Err(QueueError::Request("an input buffer is empty"));
            }
            let bytes: Vec<u8> = pending.bytes.drain(..count).collect();
            let written = chain.write(queues.memory(), 0, &bytes)?;
            queues.complete(index, &chain, written)?;
        }
        input.drained.notify_all();
        if let Some((rows, columns)) = pending.size.take()
            && self.multiport
        {
            let [a, b] = rows.to_le_bytes();
            let [c, d] = columns.to_le_bytes();
            self.message(port, RESIZE, 0, &[a, b, c, d]);
        }
        if pending.closed && pending.bytes.is_empty() && self.multiport && !self.closed[port] {
            self.closed[port] = true;
            self.message(port, PORT_OPEN, 0, &[]);
        }
        Ok(())
    }

    fn deliver_messages(&mut self, queues: &mut VirtQueues<'_>) -> Result<(), QueueError> {
        while let Some(message) = self.messages.front() {
            let Some(chain) = queues.pop(CONTROL_TO_GUEST)? else {
                break;
            };
            let written = chain.write(queues.memory(), 0, message)?;
            queues.complete(CONTROL_TO_GUEST, &chain, written)?;
            self.messages.pop_front();
        }
        Ok(())
    }
}

impl VirtioDevice for VirtioConsole {
    fn kind(&self) -> VirtioKind {
        VirtioKind::Console
    }

    fn features(&self) -> u64 {
        FEATURE_SIZE | FEATURE_MULTIPORT
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![64; 2 * self.ports.len() + 2]
    }

    fn config(&self) -> Vec<u8> {
        // Columns and rows come by RESIZE.
        let mut config = vec![80, 0, 25, 0];
        config.extend(u32::try_from(self.ports.len()).unwrap_or(1).to_le_bytes());
        config
    }

    fn activate(&mut self, features: u64) {
        self.multiport = features & FEATURE_MULTIPORT != 0;
    }

    fn reset(&mut self) {
        self.messages.clear();
        self.closed.fill(false);
        self.open.fill(false);
        self.multiport = false;
    }

    fn process(&mut self, queues: &mut VirtQueues<'_>, index: usize) -> Result<(), QueueError> {
        match (index, Self::port_of(index)) {
            (CONTROL_TO_GUEST, _) => {}
            (CONTROL_TO_HOST, _) => {
                while let Some(chain) = queues.pop(index)? {
                    let mut message = vec![0; chain.readable_len().min(9)];
                    chain.read(queues.memory(), 0, &mut message)?;
                    let changed = self.control(&message)?;
                    queues.complete(index, &chain, 0)?;
                    if let Some(port) = changed {
                        self.deliver_input(queues, Self::input_queue(port), port)?;
                    }
                }
            }
            (_, (port, _)) if port >= self.ports.len() => {}
            (_, (port, true)) => self.send_output(queues, index, port)?,
            (_, (port, false)) => self.deliver_input(queues, index, port)?,
        }
        self.deliver_messages(queues)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::test_driver::Driver;
    use std::io;

    #[derive(Clone, Default)]
    struct SharedSink(Arc<Mutex<Vec<u8>>>);

    impl Write for SharedSink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn driver() -> (Driver, SharedSink, PortInput) {
        let (sink, input) = (SharedSink::default(), PortInput::default());
        let port = |name: &str, is_console| ConsolePort {
            name: name.to_owned(),
            is_console,
            output: Box::new(sink.clone()),
            input: input.clone(),
        };
        let ports = vec![port("zero", true), port("one", false)];
        let mut driver = Driver::new(Box::new(VirtioConsole::new(ports)));
        driver.start(2);
        (driver, sink, input)
    }

    fn control(event: u16, port: u8) -> Vec<u8> {
        let [low, high] = event.to_le_bytes();
        vec![port, 0, 0, 0, low, high, 1, 0]
    }

    /// Offers a buffer to queue 2, and returns the message in it.
    fn message(driver: &mut Driver) -> Vec<u8> {
        driver.request(2, &[], 16)
    }

    #[test]
    fn ports_are_announced_named_and_opened() {
        let (mut driver, _, _) = driver();
        assert_eq!(driver.read(0x2004, 4), 2, "ports");
        driver.request(3, &control(DEVICE_READY, 0), 1);
        assert_eq!(message(&mut driver)[..8], [0, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(message(&mut driver)[..8], [1, 0, 0, 0, 1, 0, 0, 0]);
        driver.request(3, &control(PORT_READY, 1), 1);
        assert_eq!(message(&mut driver)[..11], *b"\x01\0\0\0\x07\0\x01\0one");
        assert_eq!(message(&mut driver)[..8], [1, 0, 0, 0, 6, 0, 1, 0]);
    }

    #[test]
    fn output_of_a_port_goes_to_its_sink() {
        let (mut driver, sink, _) = driver();
        driver.request(1, b"hello ", 0);
        driver.request(5, b"world", 0);
        assert_eq!(*sink.0.lock().unwrap(), b"hello world");
    }

    #[test]
    fn input_waits_for_a_buffer_and_its_end_is_announced() {
        let (mut driver, _, input) = driver();
        assert_eq!(input.push(b"key"), 3);
        input.close();
        driver.descriptor(4, 0, 0x9_0000, 8, 2, 0);
        driver.offer(4, 0);
        assert_eq!(driver.used(4), 0, "the port is not open");
        driver.request(3, &control(PORT_OPEN, 1), 1);
        assert_eq!(driver.used(4), 1);
        assert_eq!(driver.memory_read(0x9_0000, 3), b"key");
        assert_eq!(message(&mut driver)[..8], [1, 0, 0, 0, 6, 0, 0, 0]);
    }

    #[test]
    fn input_beyond_the_limit_is_not_accepted() {
        let input = PortInput::default();
        assert_eq!(input.push(&[0; INPUT_MAX + 1]), INPUT_MAX);
        assert_eq!(input.push(&[0]), 0);
        input.wait(Duration::from_millis(1));
    }

    #[test]
    fn terminal_size_reaches_the_guest() {
        let (mut driver, _, input) = driver();
        input.set_size(24, 80);
        driver.request(3, &control(PORT_OPEN, 0), 1);
        assert_eq!(
            message(&mut driver)[..12],
            [0, 0, 0, 0, 5, 0, 0, 0, 24, 0, 80, 0]
        );
    }

    #[test]
    fn malformed_control_message_stops_the_device() {
        let (mut driver, _, _) = driver();
        driver.descriptor(3, 0, 0x8_0000, 5, 0, 0);
        driver.offer(3, 0);
        assert_eq!(driver.status(), 0x4f);
    }

    #[test]
    fn flood_of_unanswered_control_messages_stops_the_device() {
        let (mut driver, _, _) = driver();
        for _ in 0..1000 {
            if driver.status() == 0x4f {
                return;
            }
            driver.memory_write(0x8_0000, &control(DEVICE_READY, 0));
            driver.descriptor(3, 0, 0x8_0000, 8, 0, 0);
            driver.offer(3, 0);
        }
        panic!("messages are not limited");
    }
}
