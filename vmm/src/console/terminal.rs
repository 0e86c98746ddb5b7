//! Sets the terminal to raw mode, and restores it however the process ends.

use std::io;
use std::os::fd::OwnedFd;
use std::panic;
use std::sync::{Mutex, Once, PoisonError};

use rustix::process::getpgrp;
use rustix::termios::{
    ControlModes, InputModes, LocalModes, OptionalActions, OutputModes, SpecialCodeIndex, Termios,
    tcgetattr, tcgetpgrp, tcsetattr,
};

/// The terminal that is raw now.
static RAW: Mutex<Option<RawModes>> = Mutex::new(None);
static PANIC_HOOK: Once = Once::new();

/// A terminal in raw mode, its modes before, and its raw modes.
struct RawModes {
    terminal: OwnedFd,
    before: Termios,
    raw: Termios,
}

/// Sets the terminal to raw mode again, if it should be raw and this process is in the foreground.
///
/// A shell sets its own modes when it stops a process, and leaves them when the process continues.
pub fn renew_raw_mode() {
    let raw = RAW.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(modes) = &*raw else { return };
    // In the background, setting the modes would stop this process again.
    let foreground = tcgetpgrp(&modes.terminal).map_or(true, |group| group == getpgrp());
    if foreground {
        let _ = tcsetattr(&modes.terminal, OptionalActions::Now, &modes.raw);
    }
}

/// Restores the terminal if it is raw.
///
/// Any thread may call this, any number of times. It must come before `std::process::exit`.
pub fn restore_terminal() {
    let raw = RAW.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(modes) = raw {
        let _ = tcsetattr(&modes.terminal, OptionalActions::Now, &modes.before);
    }
}

/// A terminal in raw mode until dropped.
#[derive(Debug)]
pub struct RawTerminal(());

impl RawTerminal {
    /// Sets `terminal` to raw mode: every key reaches the guest, also those that send signals.
    ///
    /// Output processing stays on, so that the monitor's own messages look right. From the first call
    /// on, a panic of any thread restores the terminal before its message.
    pub fn enter(terminal: &OwnedFd) -> io::Result<Self> {
        PANIC_HOOK.call_once(|| {
            let next = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                restore_terminal();
                next(info);
            }));
        });
        restore_terminal();
        let before = tcgetattr(terminal)?;
        let mut raw = before.clone();
        raw.input_modes -= InputModes::IGNBRK
            | InputModes::BRKINT
            | InputModes::PARMRK
            | InputModes::ISTRIP
            | InputModes::INLCR
            | InputModes::IGNCR
            | InputModes::ICRNL
            | InputModes::IXON;
        raw.output_modes |= OutputModes::OPOST;
        raw.local_modes -= LocalModes::ECHO
            | LocalModes::ECHONL
            | LocalModes::ICANON
            | LocalModes::IEXTEN
            | LocalModes::ISIG;
        raw.control_modes -= ControlModes::CSIZE | ControlModes::PARENB;
        raw.control_modes |= ControlModes::CS8;
        raw.special_codes[SpecialCodeIndex::VMIN] = 1;
        raw.special_codes[SpecialCodeIndex::VTIME] = 0;
        let copy = terminal.try_clone()?;
        // Stored first, so that a signal between the two lines restores the modes.
        *RAW.lock().unwrap_or_else(PoisonError::into_inner) = Some(RawModes {
            terminal: copy,
            before,
            raw: raw.clone(),
        });
        tcsetattr(terminal, OptionalActions::Now, &raw).inspect_err(|_| restore_terminal())?;
        Ok(Self(()))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        restore_terminal();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::tests::{TERMINAL, pseudo_terminal};

    /// The modes in which a raw terminal differs from one in line mode.
    fn modes(terminal: &OwnedFd) -> (InputModes, OutputModes, LocalModes) {
        let now = tcgetattr(terminal).unwrap();
        (now.input_modes, now.output_modes, now.local_modes)
    }

    #[test]
    fn terminal_is_raw_until_dropped() {
        let _alone = TERMINAL.lock().unwrap_or_else(PoisonError::into_inner);
        let (_control, terminal) = pseudo_terminal();
        let before = modes(&terminal);
        let raw = RawTerminal::enter(&terminal).unwrap();
        let (input, output, local) = modes(&terminal);
        assert!(!local.intersects(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG));
        assert!(!input.intersects(InputModes::ICRNL | InputModes::IXON));
        assert!(output.contains(OutputModes::OPOST));
        drop(raw);
        assert_eq!(modes(&terminal), before);
    }

    #[test]
    fn terminal_is_restored_by_a_panic_of_another_thread() {
        let _alone = TERMINAL.lock().unwrap_or_else(PoisonError::into_inner);
        let (_control, terminal) = pseudo_terminal();
        let before = modes(&terminal);
        let raw = RawTerminal::enter(&terminal).unwrap();
        assert_ne!(modes(&terminal), before);
        std::thread::spawn(|| panic!("expected by the test"))
            .join()
            .unwrap_err();
        assert_eq!(modes(&terminal), before);
        drop(raw);
    }

    #[test]
    fn terminal_becomes_raw_again_after_a_shell_has_set_its_modes() {
        let _alone = TERMINAL.lock().unwrap_or_else(PoisonError::into_inner);
        let (_control, terminal) = pseudo_terminal();
        let before = tcgetattr(&terminal).unwrap();
        let raw = RawTerminal::enter(&terminal).unwrap();
        let raw_modes = modes(&terminal);
        tcsetattr(&terminal, OptionalActions::Now, &before).unwrap();
        renew_raw_mode();
        assert_eq!(modes(&terminal), raw_modes);
        drop(raw);
        renew_raw_mode();
        assert!(modes(&terminal).2.contains(LocalModes::ICANON));
    }

    #[test]
    fn restore_works_before_an_exit_without_drop() {
        let _alone = TERMINAL.lock().unwrap_or_else(PoisonError::into_inner);
        let (_control, terminal) = pseudo_terminal();
        let before = modes(&terminal);
        std::mem::forget(RawTerminal::enter(&terminal).unwrap());
        restore_terminal();
        assert_eq!(modes(&terminal), before);
    }
}
