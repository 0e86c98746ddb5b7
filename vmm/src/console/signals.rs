//! Handles signals: restores the terminal, then ends the machine or the process.

use std::io;
use std::thread;

use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use crate::console::terminal::{renew_raw_mode, restore_terminal};
use crate::sandbox::{ThreadKind, enter};

/// Signals that would end the process. They are kept from when this is made until they are handled.
#[derive(Debug)]
pub struct CaughtSignals(Signals);

impl CaughtSignals {
    /// Catches the signals from now on.
    ///
    /// # Errors
    ///
    /// The handlers cannot be installed.
    pub fn catch() -> io::Result<Self> {
        Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGCONT]).map(Self)
    }

    /// Handles the signals as [`watch_signals`] does, those that were caught before included.
    ///
    /// # Errors
    ///
    /// The thread cannot be started.
    pub fn handle(self, stop: impl Fn(i32) + Send + 'static) -> io::Result<()> {
        let Self(mut signals) = self;
        thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                enter(ThreadKind::Signals);
                let mut is_second = false;
                for signal in signals.forever() {
                    if signal == SIGCONT {
                        renew_raw_mode();
                        continue;
                    }
                    restore_terminal();
                    if is_second {
                        let _ = emulate_default_handler(signal);
                    }
                    is_second = true;
                    stop(signal);
                }
            })?;
        Ok(())
    }
}

/// Calls `stop` with the number of the first SIGHUP, SIGINT, SIGQUIT or SIGTERM.
///
/// The call is made on a thread of its own, with the terminal restored, and must make the machine
/// end in order. A second signal ends the process at once.
///
/// After SIGCONT, the terminal is raw again if it was.
///
/// # Errors
///
/// The handlers cannot be installed or the thread cannot be started.
pub fn watch_signals(stop: impl Fn(i32) + Send + 'static) -> io::Result<()> {
    CaughtSignals::catch()?.handle(stop)
}
