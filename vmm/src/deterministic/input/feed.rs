//! The source of a machine's input: a log, or a queue that is recorded in a log.

use std::fmt;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hindsight_devices::clock::Ticks;

use super::log::{InputEvent, InputLog, LoggedInput, LoggedMachine, MAGIC};
use super::queue::{Accepting, InputDevice, InputQueue};

/// How often a waiting machine polls for its end.
const POLL: Duration = Duration::from_millis(50);

/// A queue, and the log in which its input is recorded.
struct LiveInput {
    queue: Arc<InputQueue>,
    log: Box<dyn Write + Send>,
    /// Other threads fill the queue, and a machine without work waits for them.
    waits: bool,
}

/// The input of a machine: entries of a log, then live input if there is any.
#[derive(Default)]
pub struct InputFeed {
    /// The number of the first entry of `logged`.
    first: u64,
    logged: Vec<LoggedInput>,
    live: Option<LiveInput>,
}

impl fmt::Debug for InputFeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InputFeed")
            .field("logged", &self.logged.len())
            .finish_non_exhaustive()
    }
}

impl InputFeed {
    /// The input of a log, and no other.
    pub fn replay(log: InputLog) -> Self {
        Self {
            first: 0,
            logged: log.inputs,
            live: None,
        }
    }

    /// The input of `queue`, recorded in `log`.
    ///
    /// # Errors
    ///
    /// The log cannot be written.
    pub fn record(
        queue: Arc<InputQueue>,
        machine: LoggedMachine,
        mut log: Box<dyn Write + Send>,
    ) -> io::Result<Self> {
        writeln!(log, "{MAGIC} {machine}")?;
        writeln!(log, "# round instructions time: input")?;
        log.flush()?;
        let waits = true;
        let live = Some(LiveInput { queue, log, waits });
        Ok(Self {
            first: 0,
            logged: Vec::new(),
            live,
        })
    }

    /// The input of `log`, then what the machine's owner sends between runs
    /// ([`super::super::DeterministicMachine::send_input`]).
    pub fn owned(log: Option<InputLog>) -> Self {
        Self {
            first: 0,
            logged: log.map(|log| log.inputs).unwrap_or_default(),
            live: Some(LiveInput {
                queue: Arc::default(),
                log: Box::new(io::sink()),
                waits: false,
            }),
        }
    }

    /// Queues input of the machine's owner. Returns `false` if it does not fit, as it never does
    /// without [`InputFeed::owned`].
    pub(crate) fn send(&self, bytes: &[u8]) -> bool {
        let owned = self.live.as_ref().filter(|live| !live.waits);
        owned.is_some_and(|live| live.queue.push_all(bytes))
    }

    /// Makes the next input entry `count`: forgets what follows the entries before it. Where those
    /// are of the run of another machine, nothing reads them, and `first` counts on from them.
    pub(crate) fn forget_from(&mut self, count: u64) {
        let remaining = count.saturating_sub(self.first);
        let len = self.logged.len() as u64;
        if count < self.first || remaining > len {
            self.logged.clear();
            self.first = count;
        } else {
            self.logged
                .truncate(usize::try_from(remaining).unwrap_or(usize::MAX));
        }
    }

    /// Drops the input that was sent and not taken.
    pub(crate) fn drop_queued(&self) {
        if let Some(live) = &self.live {
            live.queue.clear();
        }
    }

    /// Entry `index` of the log, if it is recorded already.
    pub(crate) fn logged(&self, index: u64) -> Option<&LoggedInput> {
        let index = index.checked_sub(self.first)?;
        self.logged.get(usize::try_from(index).ok()?)
    }

    /// Whether other threads may send input.
    pub(crate) fn is_live(&self) -> bool {
        self.live.as_ref().is_some_and(|live| live.waits)
    }

    /// Takes as much live input as `accept` accepts.
    ///
    /// The input is recorded with the given round, instruction count and time.
    pub(crate) fn take_live(
        &mut self,
        (round, icount, ticks): (u64, u64, Ticks),
        accept: impl Fn(InputDevice, &[u8]) -> usize,
    ) -> io::Result<Option<InputEvent>> {
        let Some(live) = &mut self.live else {
            return Ok(None);
        };
        let Some(event) = live.queue.take(accept) else {
            return Ok(None);
        };
        let input = LoggedInput {
            round,
            icount,
            ticks,
            event: event.clone(),
        };
        writeln!(live.log, "{input}")?;
        live.log.flush()?;
        self.logged.push(input);
        Ok(Some(event))
    }

    /// Waits in real time, while all vCPUs are halted, for live input or until `stopped`.
    ///
    /// It waits for at most `limit`. Bytes count only for devices that are `accepting`. Returns how
    /// long it waited, or `None` without waiting if there is no live input.
    pub(crate) fn wait(
        &self,
        limit: Option<Duration>,
        accepting: Accepting,
        stopped: impl Fn() -> bool,
    ) -> Option<Duration> {
        let live = self.live.as_ref().filter(|live| live.waits)?;
        let start = Instant::now();
        loop {
            let waited = start.elapsed();
            let left = limit.map(|limit| limit.saturating_sub(waited));
            if left == Some(Duration::ZERO) || live.queue.is_ready(accepting) || stopped() {
                return Some(waited);
            }
            live.queue
                .sleep(accepting, left.map_or(POLL, |left| left.min(POLL)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::sync::lock;

    const MACHINE: LoggedMachine = LoggedMachine {
        cpus: 2,
        memory: 0x10_0000,
        seed: 7,
    };

    /// A log in memory that the test reads while it is written.
    #[derive(Clone, Default)]
    struct SharedLog(Arc<Mutex<Vec<u8>>>);

    impl Write for SharedLog {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            lock(&self.0).write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn recorded_input_is_read_back_from_its_log() {
        let (queue, text) = (Arc::new(InputQueue::default()), SharedLog::default());
        let mut feed = InputFeed::record(queue.clone(), MACHINE, Box::new(text.clone())).unwrap();
        queue.push(b"ls\r");
        let serial = |bytes: &[u8]| InputEvent::Serial(bytes.to_vec());
        let take = |feed: &mut InputFeed, at, capacity: usize| {
            feed.take_live(at, |_, bytes| bytes.len().min(capacity))
                .unwrap()
        };
        assert_eq!(take(&mut feed, (1, 2, 3), 0), None, "no capacity");
        assert_eq!(take(&mut feed, (4, 5, 6), 2), Some(serial(b"ls")));
        assert_eq!(take(&mut feed, (4, 5, 6), 9), Some(serial(b"\r")));
        assert_eq!(take(&mut feed, (4, 5, 6), 9), None, "the queue is empty");
        queue.push_keys(&[0x1e, 0x9e]);
        let keys = InputEvent::Keys(vec![0x1e, 0x9e]);
        assert_eq!(take(&mut feed, (4, 5, 7), 9), Some(keys));
        queue.push(b"more");
        queue.quit();
        assert_eq!(take(&mut feed, (7, 8, 9), 0), Some(InputEvent::Quit));
        let text = String::from_utf8(lock(&text.0).clone()).unwrap();
        let log: InputLog = text.parse().unwrap();
        assert_eq!(log.machine, MACHINE);
        assert_eq!(log.inputs, feed.logged);
        assert_eq!(log.inputs[0].to_string(), "4 5 6 serial 6c73");
        assert_eq!(log.inputs[2].to_string(), "4 5 7 keys 1e9e");
    }

    #[test]
    fn owned_feed_takes_all_of_an_input_or_none_and_never_waits() {
        let mut feed = InputFeed::owned(None);
        assert!(feed.send(b"abc") && !feed.send(&[0; 4096]));
        assert!(!feed.is_live());
        let accepting = Accepting {
            serial: true,
            keyboard: true,
        };
        assert_eq!(feed.wait(None, accepting, || false), None);
        let taken = feed.take_live((1, 2, 3), |_, bytes| bytes.len()).unwrap();
        assert_eq!(taken, Some(InputEvent::Serial(b"abc".to_vec())));
        assert_eq!(feed.logged(0).map(|input| input.round), Some(1));
        assert!(feed.send(b"later"));
        feed.drop_queued();
        assert_eq!(
            feed.take_live((4, 5, 6), |_, bytes| bytes.len()).unwrap(),
            None
        );
        assert!(!InputFeed::default().send(b"nobody takes it"));
    }

    #[test]
    fn another_future_forgets_later_entries_and_keeps_the_numbers_of_the_next() {
        let mut feed = InputFeed::owned(None);
        for round in 1..=3 {
            assert!(feed.send(b"x"));
            feed.take_live((round, 0, 0), |_, bytes| bytes.len())
                .unwrap();
        }
        let rounds = |feed: &InputFeed| -> Vec<_> {
            let numbers = 0..9;
            let logged = numbers.filter_map(|index| Some((index, feed.logged(index)?.round)));
            logged.collect()
        };
        feed.forget_from(2);
        assert_eq!(rounds(&feed), [(0, 1), (1, 2)]);
        // A snapshot of a machine that has taken seven inputs, and one that has taken one.
        for (count, round) in [(7, 8), (1, 9)] {
            feed.forget_from(count);
            assert_eq!(rounds(&feed), []);
            assert!(feed.send(b"y"));
            feed.take_live((round, 0, 0), |_, bytes| bytes.len())
                .unwrap();
            assert_eq!(rounds(&feed), [(count, round)]);
        }
    }

    #[test]
    fn wait_ends_with_input_or_its_limit_or_the_machine() {
        let queue = Arc::new(InputQueue::default());
        let feed = InputFeed::record(queue.clone(), MACHINE, Box::new(io::sink())).unwrap();
        let short = Some(Duration::from_millis(1));
        let accepting = |serial, keyboard| Accepting { serial, keyboard };
        let (all, none) = (accepting(true, true), accepting(false, false));
        assert!(feed.wait(short, all, || false).is_some());
        assert!(feed.wait(None, all, || true).is_some());
        queue.push(b"x");
        assert!(feed.wait(None, all, || false).is_some());
        assert!(feed.wait(short, none, || false) >= short, "no capacity");
        let keyboard = accepting(false, true);
        assert!(feed.wait(short, keyboard, || false) >= short, "no key");
        queue.push_keys(b"x");
        assert!(feed.wait(None, keyboard, || false).is_some());
        assert_eq!(InputFeed::default().wait(None, all, || false), None);
    }
}
