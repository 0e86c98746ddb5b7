//! The consoles of a run: the serial port, the debug console and branch trace messages.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::sync::Arc;

use anyhow::Context;

use super::display::Display;
use crate::cli::config::{BtmTarget, ConsoleOptions, DisplayTarget, OptionWord};
use crate::console::{Backend, CaughtSignals, Console, Deliver, Releaser};
use crate::debugger::Screendump;
use crate::output::{Output, RunOutputs};
use crate::platform::Sinks;
use crate::vcpu::board::Board;

const NO_HANDLERS: &str = "signal handlers cannot be installed";

/// The open consoles. Dropping them writes the buffered output and restores the terminal.
pub(super) struct Consoles<'a> {
    options: &'a ConsoleOptions,
    outputs: &'a RunOutputs,
    serial: Console,
    debugcon: Console,
    /// What is typed on the keyboard.
    keyboard: Console,
    /// Signals that came since the consoles were opened: their sockets must be removed.
    signals: Option<CaughtSignals>,
    /// Writes to standard output, and so is dropped after the consoles.
    display: Display,
}

impl<'a> Consoles<'a> {
    /// Opens the consoles for output.
    pub(super) fn open(
        options: &'a ConsoleOptions,
        outputs: &'a RunOutputs,
    ) -> anyhow::Result<Self> {
        let open = |option: &'static str, backend: &Backend| {
            let output = outputs.output(format!("{option} {backend}"));
            Console::open_counted(backend, Some(output)).context(option)
        };
        let serial = open("--serial", &options.serial.0)?;
        let debugcon = open("--debugcon", &options.debugcon.0)?;
        // Not before here: opening a FIFO can take for ever.
        let signals = CaughtSignals::catch().context(NO_HANDLERS)?;
        Ok(Self {
            options,
            outputs,
            serial,
            debugcon,
            keyboard: Console::closed(),
            signals: Some(signals),
            display: Display::open(options, outputs)?,
        })
    }

    /// The devices' ends of the consoles.
    pub(super) fn sinks(&self) -> anyhow::Result<Sinks> {
        let btm = self.options.btm.as_ref().map(|OptionWord(target)| {
            let name = match target {
                BtmTarget::Stdout => "--btm -".to_owned(),
                BtmTarget::File(path) => format!("--btm {}", path.display()),
            };
            open_btm(target, self.outputs.output(name))
        });
        Ok(Sinks {
            serial: self.serial.output(),
            debugcon: self.debugcon.output(),
            btm: btm.transpose()?,
        })
    }

    /// Installs the handlers of signals that end the process.
    ///
    /// Such a signal wakes all threads that wait for a console, and then calls `quit`.
    pub(super) fn watch_signals(&mut self, quit: impl Fn() + Send + 'static) -> anyhow::Result<()> {
        let waiting = [self.serial.releaser(), self.debugcon.releaser()];
        let stop = move |signal| {
            tracing::info!("signal {signal}: ending the run");
            waiting.iter().for_each(Releaser::release);
            quit();
        };
        match self.signals.take() {
            Some(signals) => signals.handle(stop).context(NO_HANDLERS),
            None => Ok(()),
        }
    }

    /// Starts input. `serial` receives the serial port's input, and `keyboard` what is typed while the text of the
    /// screen is shown, unless the serial port has standard input; Ctrl-A x calls `quit`.
    pub(super) fn start_input(
        &mut self,
        serial: Deliver,
        keyboard: Deliver,
        quit: impl Fn() + Clone + Send + 'static,
    ) -> anyhow::Result<()> {
        let types = self.options.display.0 == DisplayTarget::Text;
        if types && self.options.serial.0 != Backend::Stdio {
            self.keyboard = Console::keyboard();
            let started = self.keyboard.start_input(keyboard, quit.clone());
            started.context("--display text")?;
        }
        self.serial.start_input(serial, quit).context("--serial")?;
        if matches!(self.options.debugcon.0, Backend::Unix(_)) {
            // Accept clients of the debug console, and drop their input.
            self.debugcon
                .start_input(Box::new(<[u8]>::len), || {})
                .context("--debugcon")?;
        }
        Ok(())
    }

    /// Writes a picture of the screen for a debugger; `None` without a file for pictures.
    pub(super) fn screendump(&self, board: &Arc<Board>) -> Option<Screendump> {
        self.display.screendump(board)
    }

    /// Begins to show the screen of a machine, until the consoles are dropped.
    pub(super) fn show_screen(&mut self, board: &Arc<Board>) -> anyhow::Result<()> {
        self.display.start(board)
    }

    /// Wakes all threads that wait for a console, and lets none wait again.
    pub(super) fn release(&self) {
        self.serial.release();
        self.debugcon.release();
    }
}

/// Opens the receiver of branch trace messages.
fn open_btm(target: &BtmTarget, output: Output) -> anyhow::Result<Box<dyn Write + Send>> {
    match target {
        BtmTarget::Stdout => Ok(Box::new(output.writer(io::stdout()))),
        BtmTarget::File(path) => {
            let file = File::create(path).with_context(|| format!("--btm {}", path.display()))?;
            Ok(Box::new(BufWriter::new(output.writer(file))))
        }
    }
}
