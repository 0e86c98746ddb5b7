//! `--display`: the guest's screen on standard output or in a file.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;

use crate::cli::config::{ConsoleOptions, DisplayTarget};
use crate::console::Backend;
use crate::output::{Output, RunOutputs};
use crate::screen::{LiveScreen, TextScreen};
use crate::vcpu::board::Board;

/// Where the screen is shown.
enum Target {
    None,
    /// On standard output at the end.
    Text(Output),
    /// On standard output, a terminal, while the guest runs.
    Live(Output),
    /// In a file at the end.
    Picture {
        output: Output,
        file: File,
    },
}

/// The display of a run. Dropping it shows the last screen.
pub(super) struct Display {
    target: Target,
    live: Option<LiveScreen>,
    /// The machine, from its start on.
    board: Option<Arc<Board>>,
}

impl Display {
    /// Makes the file of a picture.
    ///
    /// # Errors
    ///
    /// The file cannot be made.
    pub(super) fn open(options: &ConsoleOptions, outputs: &RunOutputs) -> anyhow::Result<Self> {
        let target = match &options.display.0 {
            DisplayTarget::None => Target::None,
            DisplayTarget::Text => {
                let output = outputs.output("--display text");
                let consoles = [&options.serial.0, &options.debugcon.0];
                if io::stdout().is_terminal() && !consoles.contains(&&Backend::Stdio) {
                    Target::Live(output)
                } else {
                    Target::Text(output)
                }
            }
            DisplayTarget::Picture(path) => {
                let name = format!("--display {}", path.display());
                Target::Picture {
                    file: create(path).with_context(|| name.clone())?,
                    output: outputs.output(name),
                }
            }
        };
        Ok(Self {
            target,
            live: None,
            board: None,
        })
    }

    /// Begins to show the screen.
    ///
    /// # Errors
    ///
    /// A thread cannot be started.
    pub(super) fn start(&mut self, board: &Arc<Board>) -> anyhow::Result<()> {
        self.board = Some(board.clone());
        if let Target::Live(output) = &self.target {
            let terminal = Box::new(output.clone().writer(io::stdout()));
            self.live = Some(LiveScreen::start(board.clone(), terminal).context("--display")?);
        }
        Ok(())
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        // The thread shows the last screen.
        self.live = None;
        let Some(board) = self.board.take() else {
            return;
        };
        let screen = || TextScreen::of(&board).context("--display");
        let written = match &mut self.target {
            Target::None | Target::Live(_) => Ok(()),
            Target::Text(output) => screen().map(|screen| {
                let text = screen.to_string();
                // The outputs record a failure.
                let _ = output
                    .clone()
                    .writer(io::stdout())
                    .write_all(text.as_bytes());
            }),
            Target::Picture { output, file } => screen().and_then(|screen| {
                let png = screen.png().context("--display")?;
                let _ = output.clone().writer(file).write_all(&png);
                Ok(())
            }),
        };
        if let Err(error) = written {
            tracing::warn!("{error:#}");
        }
    }
}

/// Creates the file of a picture. A named pipe without a reader is an error.
fn create(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.write(true).create(true).truncate(true);
    options.custom_flags(libc::O_NONBLOCK).open(path)
}
