//! Handles signals: restores the terminal, then ends the machine or the process.

use std::io;
use std::thread;

use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use crate::console::terminal::{renew_raw_mode, restore_terminal};
use crate::sandbox::{ThreadKind, enter};

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
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGCONT])?;
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
