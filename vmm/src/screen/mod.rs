//! The guest's screen: as lines of text, as a picture, and in the terminal while the guest runs.
//!
//! The registers are a device's. The text is guest memory at B8000H, and pixels are in the video memory; the
//! guest may change both while they are read: a screen may have parts of two.

mod code_page;
mod graphics;
mod live;
mod picture;
mod terminal;

use std::fmt;

use hindsight_devices::vga::{ScreenMode, TEXT_MEMORY, TEXT_MEMORY_LEN, TextMode};
use vm_memory::{Bytes, GuestAddress};

pub use graphics::GraphicsScreen;
pub use live::LiveScreen;
pub use picture::PictureError;
pub use terminal::Terminal;

use crate::vcpu::board::Board;
use code_page::character;

/// The guest's screen at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Screen {
    /// Text.
    Text(TextScreen),
    /// A picture.
    Graphics(GraphicsScreen),
}

impl Screen {
    /// The screen of a machine now.
    ///
    /// # Errors
    ///
    /// The machine has no screen, or the screen is in a mode that is not shown.
    pub fn of(board: &Board) -> Result<Self, ScreenError> {
        let memory = &board.ram.map;
        let (mode, base) = board.buses.screen_mode().ok_or(ScreenError::Absent)?;
        match mode {
            ScreenMode::Text(mode) => {
                let mut text = vec![0; TEXT_MEMORY_LEN];
                let read = memory.read_slice(&mut text, GuestAddress(TEXT_MEMORY));
                debug_assert!(read.is_ok(), "every machine has 1 MiB of RAM");
                Ok(Self::Text(TextScreen { mode, memory: text }))
            }
            ScreenMode::Graphics(mode) => {
                let screen = GraphicsScreen::read(memory, base, mode);
                Ok(Self::Graphics(screen))
            }
            ScreenMode::Planar => Err(ScreenError::Planar),
        }
    }

    /// The screen as a PNG.
    ///
    /// # Errors
    ///
    /// The picture cannot be encoded.
    pub fn png(&self) -> Result<Vec<u8>, PictureError> {
        match self {
            Self::Text(screen) => screen.png(),
            Self::Graphics(screen) => screen.png(),
        }
    }
}

/// The guest's text screen at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextScreen {
    mode: TextMode,
    memory: Vec<u8>,
}

/// Why there is no screen, or no text on it.
#[derive(Clone, Copy, Debug, thiserror::Error, PartialEq, Eq)]
pub enum ScreenError {
    /// The machine has no screen.
    #[error("the machine has no screen: --display adds one")]
    Absent,
    /// The guest has set a graphics mode, with a picture of this width and height.
    #[error("the screen has a picture of {0}x{1} pixels and no text: --display FILE.png shows it")]
    Graphics(usize, usize),
    /// The guest has set a graphics mode of a VGA.
    #[error("the screen is in a graphics mode of a VGA, which is not shown")]
    Planar,
}

impl TextScreen {
    /// The screen of a machine now.
    ///
    /// # Errors
    ///
    /// The machine has no screen, or the screen no text.
    pub fn of(board: &Board) -> Result<Self, ScreenError> {
        match Screen::of(board)? {
            Screen::Text(screen) => Ok(screen),
            Screen::Graphics(screen) => {
                let (width, height) = screen.size();
                Err(ScreenError::Graphics(width, height))
            }
        }
    }

    fn cell(&self, row: usize, column: usize) -> (u8, u8) {
        self.mode.cell(&self.memory, row, column)
    }

    /// The rows, without spaces at their ends.
    pub fn lines(&self) -> Vec<String> {
        let line = |row| {
            let cells = (0..self.mode.columns).map(|column| self.cell(row, column).0);
            let line: String = cells.map(character).collect();
            line.trim_end_matches(' ').to_owned()
        };
        (0..self.mode.rows).map(line).collect()
    }
}

/// The rows up to the last one that is not empty.
impl fmt::Display for TextScreen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = self.lines();
        let used = lines.iter().rposition(|line| !line.is_empty());
        let used = used.map_or(0, |last| last + 1);
        lines[..used]
            .iter()
            .try_for_each(|line| writeln!(f, "{line}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hindsight_devices::vga::Vga;

    /// A screen with this text from its first cell on.
    pub(super) fn screen(text: &[u8], attribute: u8) -> TextScreen {
        let mut memory = vec![0; TEXT_MEMORY_LEN];
        for (cell, &character) in memory.chunks_exact_mut(2).zip(text) {
            cell.copy_from_slice(&[character, attribute]);
        }
        let mode = Vga::default().text_mode().unwrap();
        TextScreen { mode, memory }
    }

    #[test]
    fn text_has_the_characters_of_code_page_437_and_no_control_characters() {
        let mut text: Vec<u8> = (0..=255).collect();
        text.resize(320, b' ');
        let lines = screen(&text, 7).lines();
        assert_eq!(lines.len(), 25);
        assert!(lines[0].starts_with(" ☺☻♥"), "{}", lines[0]);
        assert!(lines[1].contains("PQRSTUVWXYZ["), "{}", lines[1]);
        assert!(lines[2].contains("░▒▓│┤"), "{}", lines[2]);
        assert!(
            lines
                .iter()
                .flat_map(|line| line.chars())
                .all(|c| !c.is_control())
        );
    }

    #[test]
    fn text_ends_with_the_last_row_that_is_used() {
        assert_eq!(screen(b"", 7).to_string(), "");
        let text = [&[b' '; 160][..], b"kernel  "].concat();
        assert_eq!(screen(&text, 7).to_string(), "\n\nkernel\n");
    }
}
