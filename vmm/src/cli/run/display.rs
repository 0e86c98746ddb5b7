//! `--display`: the guest's screen on standard output or in a file.

use std::fs::File;
use std::io::{self, IsTerminal, Seek as _, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use anyhow::Context;

use crate::cli::config::{ConsoleOptions, DisplayTarget};
use crate::console::Backend;
use crate::debugger::Screendump;
use crate::output::{Output, RunOutputs};
use crate::screen::{LiveScreen, Screen, Terminal, TextScreen};
use crate::sync::lock;
use crate::vcpu::board::Board;

/// Where the screen is shown.
enum Target {
    None,
    /// On standard output at the end.
    Text(Output),
    /// On a terminal while the guest runs. Taken when the machine starts.
    Live(Option<Terminal>),
    /// In a file at the end, which keeps an earlier picture until then, and when a debugger requests it.
    Picture(Arc<PictureFile>),
}

/// The file of a picture, which each picture replaces.
struct PictureFile {
    output: Output,
    file: Mutex<File>,
}

impl PictureFile {
    /// Writes the screen of a machine.
    ///
    /// # Errors
    ///
    /// The screen is in a mode that is not shown, or the file cannot be emptied. The inner result is that of writing, whose failure
    /// the outputs record.
    fn write(&self, board: &Board) -> anyhow::Result<io::Result<()>> {
        let screen = Screen::of(board).context("--display")?;
        let png = screen.png().context("--display")?;
        let mut file = lock(&self.file);
        // A named pipe and a device have no length, and get one picture after the other.
        if file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            file.rewind().context("--display")?;
            file.set_len(0).context("--display")?;
        }
        Ok(self.output.clone().writer(&mut *file).write_all(&png))
    }
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
                    live(output)
                } else {
                    Target::Text(output)
                }
            }
            DisplayTarget::Picture(path) => {
                let name = format!("--display {}", path.display());
                let file = create(path).with_context(|| name.clone())?;
                Target::Picture(Arc::new(PictureFile {
                    file: Mutex::new(file),
                    output: outputs.output(name),
                }))
            }
        };
        Ok(Self {
            target,
            live: None,
            board: None,
        })
    }

    /// Writes the picture of `board` when a debugger requests it; `None` without a file for pictures.
    pub(super) fn screendump(&self, board: &Arc<Board>) -> Option<Screendump> {
        let Target::Picture(picture) = &self.target else {
            return None;
        };
        let (picture, board) = (picture.clone(), board.clone());
        Some(Box::new(move || {
            picture.write(&board)?.context("--display")
        }))
    }

    /// Begins to show the screen.
    ///
    /// # Errors
    ///
    /// A thread cannot be started.
    pub(super) fn start(&mut self, board: &Arc<Board>) -> anyhow::Result<()> {
        self.board = Some(board.clone());
        if let Target::Live(terminal) = &mut self.target
            && let Some(terminal) = terminal.take()
        {
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
            Target::Picture(picture) => picture.write(&board).map(|_| ()),
        };
        if let Err(error) = written {
            tracing::warn!("{error:#}");
        }
    }
}

/// The target for standard output, which is a terminal.
fn live(output: Output) -> Target {
    match Terminal::of_stdout(output.clone()) {
        Ok(terminal) => Target::Live(Some(terminal)),
        Err(error) => {
            tracing::warn!(
                "--display text: the screen is shown at the end, because this terminal cannot be \
                 opened again: {error}"
            );
            Target::Text(output)
        }
    }
}

/// Opens the file of a picture. A named pipe without a reader is an error.
///
/// A temporary file that replaces it at the end would need the right to change its folder while
/// the guest runs.
fn create(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.write(true).create(true).truncate(false);
    options.custom_flags(libc::O_NONBLOCK).open(path)
}
