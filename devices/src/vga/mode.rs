//! The text mode that follows from the registers.

use super::{TEXT_MEMORY_LEN, VgaState};

/// Registers of the CRTC.
const END_HORIZONTAL_DISPLAY: usize = 1;
const OVERFLOW: usize = 7;
const MAXIMUM_SCAN_LINE: usize = 9;
const CURSOR_START: usize = 0x0a;
const START_ADDRESS: usize = 0x0c;
const CURSOR_ADDRESS: usize = 0x0e;
const VERTICAL_DISPLAY_END: usize = 0x12;
const OFFSET: usize = 0x13;
/// Register of the graphics controller whose bit 0 selects graphics.
const MISCELLANEOUS: usize = 6;
/// Register of the attribute controller whose bit 3 makes characters blink.
const MODE_CONTROL: usize = 0x10;

/// Cells of the text memory: a character and its attribute.
const CELLS: usize = TEXT_MEMORY_LEN / 2;
/// Most rows of a screen.
const ROWS_MAX: usize = 128;

/// The position of the cursor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// Row, from 0.
    pub row: usize,
    /// Column, from 0.
    pub column: usize,
}

/// A text mode: the size of the screen, and where its cells are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextMode {
    /// Characters in a row, 1 to 256.
    pub columns: usize,
    /// Rows, 1 to 128.
    pub rows: usize,
    /// The red, green and blue of the 16 colours.
    pub palette: [[u8; 3]; 16],
    /// Bit 7 of an attribute makes the character blink, and is no part of the background.
    pub blinks: bool,
    /// The cursor, if it is on and on the screen.
    pub cursor: Option<Cursor>,
    /// The first cell.
    start: usize,
    /// Cells from a row to the next.
    stride: usize,
}

impl TextMode {
    pub(super) fn of(state: &VgaState) -> Option<Self> {
        let crtc = &state.crtc;
        if state.graphics[MISCELLANEOUS] & 1 != 0 {
            return None;
        }
        let overflow = usize::from(crtc[OVERFLOW]);
        let lines = usize::from(crtc[VERTICAL_DISPLAY_END])
            | (overflow & 1 << 1) << 7
            | (overflow & 1 << 6) << 3;
        let height = usize::from(crtc[MAXIMUM_SCAN_LINE] & 0x1f) + 1;
        let columns = usize::from(crtc[END_HORIZONTAL_DISPLAY]) + 1;
        let stride = match usize::from(crtc[OFFSET]) * 2 {
            0 => columns,
            stride => stride,
        };
        let word = |at: usize| usize::from(u16::from_be_bytes([crtc[at], crtc[at + 1]]));
        let mut mode = Self {
            columns,
            rows: ((lines + 1) / height).clamp(1, ROWS_MAX),
            palette: palette(state),
            blinks: state.attribute[MODE_CONTROL] & 1 << 3 != 0,
            cursor: None,
            start: word(START_ADDRESS),
            stride,
        };
        let on = crtc[CURSOR_START] & 1 << 5 == 0;
        mode.cursor = mode.position(word(CURSOR_ADDRESS)).filter(|_| on);
        Some(mode)
    }

    /// Where the cell with this number is on the screen.
    fn position(&self, cell: usize) -> Option<Cursor> {
        let within = cell.checked_sub(self.start)?;
        let (row, column) = (within / self.stride, within % self.stride);
        (row < self.rows && column < self.columns).then_some(Cursor { row, column })
    }

    /// The character and the attribute of a cell, from the contents of the text memory.
    pub fn cell(&self, memory: &[u8], row: usize, column: usize) -> (u8, u8) {
        let cell = (self.start + row * self.stride + column) % CELLS;
        match memory.get(2 * cell..2 * cell + 2) {
            Some(&[character, attribute]) => (character, attribute),
            _ => (0, 0),
        }
    }
}

/// The 16 colours: each is a register of the attribute controller, which numbers one of the DAC's.
fn palette(state: &VgaState) -> [[u8; 3]; 16] {
    let mut palette = [[0; 3]; 16];
    for (colour, &register) in palette.iter_mut().zip(&state.attribute) {
        let number = usize::from(register & 0x3f & state.dac_mask);
        for (to, from) in colour.iter_mut().zip(state.dac.iter().skip(3 * number)) {
            *to = from << 2 | from >> 4;
        }
    }
    palette
}
