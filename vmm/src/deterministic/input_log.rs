//! Input from outside for a machine that runs the same every time: what came, and where exactly.
//!
//! Input enters at the beginning of a round of turns, so that the number of the round is all that it
//! takes to bring it again. Place and time are in the log as well, for readers and as a check.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Write};
use std::str::FromStr;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hindsight_devices::clock::Ticks;
use thiserror::Error;

use crate::sync::lock;

/// How a log begins: its kind and version.
const MAGIC: &str = "hindsight-input 1";

/// Most bytes of serial input in one entry; more make several.
pub const ENTRY_MAX: usize = 1024;

/// Bytes from outside that may wait for the guest.
const WAITING_MAX: usize = 4096;

/// What came from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InputEvent {
    /// Bytes for COM1, 1 to [`ENTRY_MAX`].
    Serial(Vec<u8>),
    /// The user ended the run.
    Quit,
}

/// Input, and where it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// At the beginning of which round of turns.
    pub round: u64,
    /// Instructions that all processors together had retired.
    pub place: u64,
    /// The time.
    pub ticks: Ticks,
    /// What.
    pub event: InputEvent,
}

impl fmt::Display for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} ", self.round, self.place, self.ticks)?;
        match &self.event {
            InputEvent::Quit => f.write_str("quit"),
            InputEvent::Serial(bytes) => {
                f.write_str("serial ")?;
                bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }
    }
}

/// Which machine input is for: with another one it would make no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoggedMachine {
    /// Processors.
    pub cpus: u64,
    /// Bytes of memory.
    pub memory: u64,
    /// The seed of its random numbers.
    pub seed: u64,
}

impl fmt::Display for LoggedMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cpus, memory, seed } = self;
        write!(f, "cpus={cpus} memory={memory} seed={seed}")
    }
}

/// A log of input is malformed: where, and what is wrong.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("line {line}: {what}")]
pub struct LogError {
    /// Line, from 1.
    pub line: usize,
    /// What is wrong.
    pub what: String,
}

/// A log of input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputLog {
    /// Whose input it is.
    pub machine: LoggedMachine,
    /// The input, in order.
    pub inputs: Vec<Input>,
}

impl FromStr for InputLog {
    type Err = LogError;

    fn from_str(text: &str) -> Result<Self, LogError> {
        let error = |line, what: &str| LogError {
            line,
            what: what.to_owned(),
        };
        let first = text.lines().next().unwrap_or_default();
        let machine = first
            .strip_prefix(MAGIC)
            .and_then(|rest| rest.strip_prefix(' '))
            .ok_or_else(|| error(1, "not an input log of this version (hindsight-input 1)"))?;
        let machine =
            parse_machine(machine).ok_or_else(|| error(1, "expected cpus=N memory=N seed=N"))?;
        let mut inputs: Vec<Input> = Vec::new();
        for (line, text) in (2..).zip(text.lines().skip(1)) {
            if text.is_empty() || text.starts_with('#') {
                continue;
            }
            let input = parse_input(text).map_err(|what| error(line, what))?;
            if let Some(last) = inputs.last() {
                let key = |input: &Input| (input.round, input.place, input.ticks);
                let (old, new) = (key(last), key(&input));
                if new.0 < old.0 || new.1 < old.1 || new.2 < old.2 {
                    return Err(error(line, "earlier than the line before"));
                }
                if last.event == InputEvent::Quit {
                    return Err(error(line, "there is nothing after quit"));
                }
            }
            inputs.push(input);
        }
        Ok(Self { machine, inputs })
    }
}

fn parse_machine(text: &str) -> Option<LoggedMachine> {
    let mut fields = text.split(' ');
    let mut field = |name: &str| {
        let value = fields.next()?.strip_prefix(name)?.strip_prefix('=')?;
        value.parse().ok()
    };
    let machine = LoggedMachine {
        cpus: field("cpus")?,
        memory: field("memory")?,
        seed: field("seed")?,
    };
    fields.next().is_none().then_some(machine)
}

fn parse_input(text: &str) -> Result<Input, &'static str> {
    let mut words = text.split(' ');
    let mut number = || words.next()?.parse().ok();
    let (Some(round), Some(place), Some(ticks)) = (number(), number(), number()) else {
        return Err("expected three numbers: round, instructions, time");
    };
    let event = match (words.next(), words.next()) {
        (Some("quit"), None) => InputEvent::Quit,
        (Some("serial"), Some(hex)) => InputEvent::Serial(parse_hex(hex)?),
        _ => return Err("expected `serial HEX` or `quit`"),
    };
    match words.next() {
        None => Ok(Input {
            round,
            place,
            ticks,
            event,
        }),
        Some(_) => Err("more words than an entry has"),
    }
}

fn parse_hex(text: &str) -> Result<Vec<u8>, &'static str> {
    let digits = text.as_bytes();
    if digits.is_empty() || !digits.len().is_multiple_of(2) || digits.len() / 2 > ENTRY_MAX {
        return Err("expected 1 to 1024 bytes, two digits each");
    }
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let bytes = digits.chunks_exact(2).map(|pair| {
        let value = digit(pair[0])? << 4 | digit(pair[1])?;
        u8::try_from(value).ok()
    });
    bytes
        .collect::<Option<_>>()
        .ok_or("not a hexadecimal number")
}

#[derive(Debug, Default)]
struct Waiting {
    bytes: VecDeque<u8>,
    quit: bool,
}

impl Waiting {
    fn ready(&self, room: bool) -> bool {
        self.quit || room && !self.bytes.is_empty()
    }
}

/// Input on its way to a machine, from any thread.
#[derive(Debug, Default)]
pub struct InputQueue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

impl InputQueue {
    /// Takes bytes for COM1; answers how many found room.
    pub fn put(&self, bytes: &[u8]) -> usize {
        let mut waiting = lock(&self.waiting);
        let count = bytes.len().min(WAITING_MAX - waiting.bytes.len());
        waiting.bytes.extend(&bytes[..count]);
        self.changed.notify_all();
        count
    }

    /// Ends the run.
    pub fn quit(&self) {
        lock(&self.waiting).quit = true;
        self.changed.notify_all();
    }

    /// Sleeps until there is input, `limit` at most. Without `room`, bytes count as none.
    fn sleep(&self, room: bool, limit: Duration) {
        let waiting = lock(&self.waiting);
        let empty = |waiting: &mut Waiting| !waiting.ready(room);
        let slept = self.changed.wait_timeout_while(waiting, limit, empty);
        drop(slept.unwrap_or_else(PoisonError::into_inner));
    }

    /// What comes next: bytes, as many as `accept` takes, or the end.
    fn take(&self, accept: impl FnOnce(&[u8]) -> usize) -> Option<InputEvent> {
        let mut waiting = lock(&self.waiting);
        let front: Vec<u8> = waiting.bytes.iter().copied().take(ENTRY_MAX).collect();
        let count = if front.is_empty() { 0 } else { accept(&front) };
        if count != 0 {
            waiting.bytes.drain(..count);
            return Some(InputEvent::Serial(front[..count].to_vec()));
        }
        // A guest that takes no input can be left all the same.
        waiting.quit.then_some(InputEvent::Quit)
    }

    fn ready(&self, room: bool) -> bool {
        lock(&self.waiting).ready(room)
    }
}

/// Where new input comes from, and where it is written down.
struct Live {
    inbox: Arc<InputQueue>,
    log: Box<dyn Write + Send>,
}

/// The input of a machine: what is known of it, then what comes.
#[derive(Default)]
pub struct InputFeed {
    known: Vec<Input>,
    live: Option<Live>,
}

impl fmt::Debug for InputFeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InputFeed")
            .field("known", &self.known.len())
            .finish_non_exhaustive()
    }
}

impl InputFeed {
    /// The input of a log, and no other.
    pub fn replay(log: InputLog) -> Self {
        Self {
            known: log.inputs,
            live: None,
        }
    }

    /// The input of `inbox`, written to `log`.
    ///
    /// # Errors
    ///
    /// When the log cannot be written.
    pub fn record(
        inbox: Arc<InputQueue>,
        machine: LoggedMachine,
        mut log: Box<dyn Write + Send>,
    ) -> io::Result<Self> {
        writeln!(log, "{MAGIC} {machine}")?;
        writeln!(log, "# round instructions time: what came")?;
        log.flush()?;
        let live = Some(Live { inbox, log });
        Ok(Self {
            known: Vec::new(),
            live,
        })
    }

    /// Entry `index`, if it is known.
    pub(super) fn known(&self, index: u64) -> Option<&Input> {
        self.known.get(usize::try_from(index).ok()?)
    }

    /// What came from outside since, if input is recorded: as much of it as `accept` takes goes into
    /// the log, at the place that `at` gives.
    pub(super) fn take_live(
        &mut self,
        (round, place, ticks): (u64, u64, Ticks),
        accept: impl FnOnce(&[u8]) -> usize,
    ) -> io::Result<Option<InputEvent>> {
        let Some(live) = &mut self.live else {
            return Ok(None);
        };
        let Some(event) = live.inbox.take(accept) else {
            return Ok(None);
        };
        let input = Input {
            round,
            place,
            ticks,
            event: event.clone(),
        };
        writeln!(live.log, "{input}")?;
        live.log.flush()?;
        self.known.push(input);
        Ok(Some(event))
    }

    /// Lets the machine wait in real time while nothing runs, for `limit` at most, until there is
    /// input for which the guest has `room`, or `stopped`. Answers how long it took; `None`: it does not wait, because no input can
    /// come.
    pub(super) fn wait(
        &self,
        limit: Option<Duration>,
        room: bool,
        stopped: impl Fn() -> bool,
    ) -> Option<Duration> {
        /// How often the end of the machine is looked for.
        const LOOK: Duration = Duration::from_millis(50);
        let live = self.live.as_ref()?;
        let start = Instant::now();
        loop {
            let waited = start.elapsed();
            let left = limit.map(|limit| limit.saturating_sub(waited));
            if left == Some(Duration::ZERO) || live.inbox.ready(room) || stopped() {
                return Some(waited);
            }
            live.inbox
                .sleep(room, left.map_or(LOOK, |left| left.min(LOOK)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: LoggedMachine = LoggedMachine {
        cpus: 2,
        memory: 0x10_0000,
        seed: 7,
    };

    /// A log in memory that can be read while it is written.
    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            lock(&self.0).write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn recorded_input_is_read_back_from_its_log() {
        let (inbox, text) = (Arc::new(InputQueue::default()), Shared::default());
        let mut feed = InputFeed::record(inbox.clone(), MACHINE, Box::new(text.clone())).unwrap();
        inbox.put(b"ls\r");
        let serial = |bytes: &[u8]| InputEvent::Serial(bytes.to_vec());
        let take = |feed: &mut InputFeed, at, room: usize| {
            feed.take_live(at, |bytes| bytes.len().min(room)).unwrap()
        };
        assert_eq!(take(&mut feed, (1, 2, 3), 0), None, "no room");
        assert_eq!(take(&mut feed, (4, 5, 6), 2), Some(serial(b"ls")));
        assert_eq!(take(&mut feed, (4, 5, 6), 9), Some(serial(b"\r")));
        assert_eq!(take(&mut feed, (4, 5, 6), 9), None, "nothing waits");
        inbox.put(b"more");
        inbox.quit();
        assert_eq!(take(&mut feed, (7, 8, 9), 0), Some(InputEvent::Quit));
        let text = String::from_utf8(lock(&text.0).clone()).unwrap();
        let log: InputLog = text.parse().unwrap();
        assert_eq!(log.machine, MACHINE);
        assert_eq!(log.inputs, feed.known);
        assert_eq!(log.inputs[0].to_string(), "4 5 6 serial 6c73");
    }

    #[test]
    fn malformed_logs_are_refused_with_their_line() {
        let head = format!("{MAGIC} {MACHINE}\n");
        let rows = [
            ("", 1),
            ("hindsight-input 2 cpus=1 memory=1 seed=1", 1),
            ("hindsight-input 1 cpus=1 memory=1", 1),
            ("hindsight-input 1 cpus=1 memory=1 seed=1 more", 1),
            (&*format!("{head}1 2 serial 00"), 2),
            (&*format!("{head}1 2 3 serial 0"), 2),
            (&*format!("{head}1 2 3 serial +0"), 2),
            (&*format!("{head}1 2 3 serial "), 2),
            (&*format!("{head}1 2 3 serial 00 00"), 2),
            (&*format!("{head}1 2 3 mouse 00"), 2),
            (&*format!("{head}\n# so\n9 9 9 quit\n9 9 9 quit"), 5),
            (&*format!("{head}9 9 9 serial 00\n9 8 9 quit"), 3),
            (&*format!("{head}99999999999999999999 1 1 quit"), 2),
        ];
        for (text, line) in rows {
            let error = text.parse::<InputLog>().unwrap_err();
            assert_eq!(error.line, line, "{text:?}: {error}");
        }
    }

    #[test]
    fn inbox_is_bounded() {
        let inbox = InputQueue::default();
        assert_eq!(inbox.put(&[0; 2 * WAITING_MAX]), WAITING_MAX);
        assert_eq!(inbox.put(b"x"), 0);
    }

    #[test]
    fn waiting_ends_with_input_or_time_or_the_machine() {
        let inbox = Arc::new(InputQueue::default());
        let feed = InputFeed::record(inbox.clone(), MACHINE, Box::new(io::sink())).unwrap();
        let short = Some(Duration::from_millis(1));
        assert!(feed.wait(short, true, || false).is_some());
        assert!(feed.wait(None, true, || true).is_some());
        inbox.put(b"x");
        assert!(feed.wait(None, true, || false).is_some());
        assert!(feed.wait(short, false, || false) >= short, "no room");
        assert_eq!(InputFeed::default().wait(None, true, || false), None);
    }
}
