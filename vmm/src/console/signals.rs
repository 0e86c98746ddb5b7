//! The signals that end the process: the terminal is restored first.

use std::io;
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use crate::console::terminal::restore_terminal;

/// Calls `stop` with the number of the first SIGHUP, SIGINT, SIGQUIT or SIGTERM, on a thread of its
/// own and with the terminal restored; `stop` makes the machine end in order. A second signal ends
/// the process at once.
///
/// # Errors
/// The handlers cannot be installed or the thread cannot be started.
pub fn watch_signals(stop: impl Fn(i32) + Send + 'static) -> io::Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM])?;
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            let mut seen = false;
            for signal in signals.forever() {
                restore_terminal();
                if seen {
                    let _ = emulate_default_handler(signal);
                }
                seen = true;
                stop(signal);
            }
        })?;
    Ok(())
}
