//! The text screen as a PNG, in a font of 8x16 pixels.

use std::collections::BTreeMap;

use png::{BitDepth, ColorType, Encoder, EncodingError};
use spleen_font::FONT_8X16;

use super::TextScreen;
use super::code_page::character;

/// Pixels of a character.
const WIDTH: usize = 8;
const HEIGHT: usize = 16;
/// The rows of pixels that the cursor covers.
const CURSOR_ROWS: std::ops::Range<usize> = 13..15;

/// The glyphs of the font, in a file of the Linux console's format PSF 1: a header with the magic and the
/// mode, the glyphs, and for each of them its characters in UTF-16, up to [`PSF_END`].
const PSF_HEADER: [u8; 4] = [0x36, 0x04, 3, 16];
/// Glyphs of a font whose mode is 3.
const PSF_GLYPHS: usize = 512;
const PSF_END: u16 = 0xffff;
/// The character that is shown for those that the font lacks, some of Greek and some arrows.
const SUBSTITUTE: char = '?';

/// Why there is no picture.
#[derive(Debug, thiserror::Error)]
pub enum PictureError {
    /// The picture cannot be encoded.
    #[error("the picture cannot be encoded")]
    Encoding(#[from] EncodingError),
    /// The font is not of the expected format.
    #[error("the font cannot be read")]
    Font,
}

/// The rows of pixels of a character, bit 7 on the left.
type GlyphRows = [u8; HEIGHT];

/// A number of pixels, as the encoder takes it.
pub(super) fn pixel_count(pixels: usize) -> u32 {
    u32::try_from(pixels).unwrap_or(u32::MAX)
}

/// The glyph of each character of the font.
fn font() -> Option<BTreeMap<char, GlyphRows>> {
    let data = FONT_8X16.strip_prefix(&PSF_HEADER)?;
    let (glyphs, table) = data.split_at_checked(PSF_GLYPHS * HEIGHT)?;
    let words = table
        .chunks_exact(2)
        .map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
    let words: Vec<u16> = words.collect();
    let mut font = BTreeMap::new();
    let characters = words.split(|&word| word == PSF_END);
    for (rows, characters) in glyphs.chunks_exact(HEIGHT).zip(characters) {
        let rows: GlyphRows = rows.try_into().ok()?;
        let single = characters
            .iter()
            .filter_map(|&word| char::from_u32(word.into()));
        font.extend(single.map(|character| (character, rows)));
    }
    Some(font)
}

/// The glyph of each byte.
fn glyphs() -> Result<Vec<GlyphRows>, PictureError> {
    let font = font().ok_or(PictureError::Font)?;
    let substitute = font.get(&SUBSTITUTE).ok_or(PictureError::Font)?;
    let glyph = |byte| font.get(&character(byte)).unwrap_or(substitute);
    Ok((0..=255).map(glyph).copied().collect())
}

impl TextScreen {
    /// The screen as a PNG. Characters that blink are shown.
    ///
    /// # Errors
    ///
    /// The picture cannot be encoded.
    pub fn png(&self) -> Result<Vec<u8>, PictureError> {
        let (width, height) = (self.mode.columns * WIDTH, self.mode.rows * HEIGHT);
        let mut file = Vec::new();
        let mut encoder = Encoder::new(&mut file, pixel_count(width), pixel_count(height));
        encoder.set_color(ColorType::Indexed);
        encoder.set_depth(BitDepth::Eight);
        encoder.set_palette(self.mode.palette.concat());
        let mut writer = encoder.write_header()?;
        writer.write_image_data(&self.pixels(width, height)?)?;
        writer.finish()?;
        Ok(file)
    }

    /// The colour of each pixel.
    fn pixels(&self, width: usize, height: usize) -> Result<Vec<u8>, PictureError> {
        let glyphs = glyphs()?;
        let mut pixels = vec![0; width * height];
        for row in 0..self.mode.rows {
            for column in 0..self.mode.columns {
                let (byte, attribute) = self.cell(row, column);
                let back = attribute >> 4 & if self.mode.blinks { 7 } else { 15 };
                let mut glyph = glyphs[usize::from(byte)];
                if self
                    .mode
                    .cursor
                    .is_some_and(|at| (at.row, at.column) == (row, column))
                {
                    glyph[CURSOR_ROWS].fill(0xff);
                }
                let first = row * HEIGHT * width + column * WIDTH;
                let lines = pixels[first..].chunks_mut(width);
                for (line, bits) in lines.zip(glyph) {
                    for (x, pixel) in line.iter_mut().take(WIDTH).enumerate() {
                        let on = bits << x & 0x80 != 0;
                        *pixel = if on { attribute & 15 } else { back };
                    }
                }
            }
        }
        Ok(pixels)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::screen;
    use super::*;

    #[test]
    fn picture_has_the_pixels_of_the_screen() {
        let screen = screen(b"\xdb\xdb", 0x1e);
        let png = screen.png().unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(png))
            .read_info()
            .unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height), (640, 400));
        // The decoder leaves the numbers of colours as they are.
        assert_eq!(info.color_type, ColorType::Indexed);
        // Blocks in yellow, then spaces in black on black.
        let row = &pixels[640 * 5..];
        assert_eq!([row[3], row[15], row[16]], [14, 14, 0]);
        let palette = reader.info().palette.as_ref().unwrap();
        assert_eq!(&palette[14 * 3..15 * 3], [0xff, 0xff, 0x55]);
    }

    #[test]
    fn font_has_most_characters_of_a_vga() {
        let font = font().unwrap();
        let missing = (0..=255).map(character).filter(|c| !font.contains_key(c));
        assert_eq!(missing.collect::<String>(), "►◄∟αΣστΘδφε");
        let glyphs = glyphs().unwrap();
        let empty = (0..=255_usize).filter(|&byte| glyphs[byte] == [0; HEIGHT]);
        assert_eq!(empty.collect::<Vec<_>>(), [0, 32, 255]);
    }
}
