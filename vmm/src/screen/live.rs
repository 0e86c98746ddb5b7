//! The screen in the terminal while the guest runs.

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::{Terminal, TextScreen};
use crate::sandbox::{ThreadKind, enter};
use crate::sync::lock;
use crate::vcpu::board::Board;

/// Time between two reads of the guest's memory.
const PERIOD: Duration = Duration::from_millis(100);
/// Erases the terminal.
const ERASE: &str = "\x1b[2J";

/// Whether the thread ends.
#[derive(Default)]
struct Stop {
    stopped: Mutex<bool>,
    changed: Condvar,
}

impl Stop {
    fn is_requested(&self) -> bool {
        *lock(&self.stopped)
    }
}

/// Shows the screen in the terminal until it is dropped.
pub struct LiveScreen {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for LiveScreen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LiveScreen").finish_non_exhaustive()
    }
}

impl LiveScreen {
    /// Starts a thread that writes the screen of the machine to `terminal` whenever it has changed.
    ///
    /// # Errors
    ///
    /// The thread cannot be started.
    pub fn start(board: Arc<Board>, terminal: Terminal) -> io::Result<Self> {
        let stop = Arc::new(Stop::default());
        let own = stop.clone();
        let thread = thread::Builder::new().name("display".to_owned());
        let thread = thread.spawn(move || {
            enter(ThreadKind::Display);
            run(&board, &terminal, &own);
        })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for LiveScreen {
    fn drop(&mut self) {
        *lock(&self.stop.stopped) = true;
        self.stop.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has printed its message.
            let _ = thread.join();
        }
    }
}

fn run(board: &Board, terminal: &Terminal, stop: &Stop) {
    let mut last = None;
    loop {
        let stopped = lock(&stop.stopped);
        let waited = stop
            .changed
            .wait_timeout_while(stopped, PERIOD, |stopped| !*stopped);
        let ends = *waited.unwrap_or_else(PoisonError::into_inner).0;
        let screen = TextScreen::of(board).ok();
        if let Some(screen) = &screen
            && last.as_ref() != Some(screen)
        {
            let erase = if last.is_none() { ERASE } else { "" };
            let text = erase.to_owned() + &painted(screen);
            terminal.write(text.as_bytes(), || stop.is_requested());
        }
        last = screen.or(last);
        if ends {
            // What is written next begins below the screen.
            terminal.write(b"\r\n", || true);
            return;
        }
    }
}

/// The sequences that paint a screen over the one before it. A last line break would scroll.
fn painted(screen: &TextScreen) -> String {
    let lines = screen.lines().join("\x1b[K\r\n");
    format!("\x1b[H{lines}\x1b[J")
}

#[cfg(test)]
mod tests {
    use super::super::tests::screen;
    use super::*;

    #[test]
    fn paint_covers_the_lines_that_were_there() {
        let text = painted(&screen(b"x", 7));
        assert!(text.starts_with("\x1b[Hx\x1b[K\r\n\x1b[K\r\n"), "{text:?}");
        assert_eq!(text.matches("\r\n").count(), 24);
        assert!(text.ends_with("\r\n\x1b[J"), "{text:?}");
    }
}
