//! The picture of a graphics mode.

use hindsight_devices::vga::GraphicsMode;
use png::{BitDepth, ColorType, Encoder};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::picture::{PictureError, pixel_count};

/// The guest's picture at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphicsScreen {
    mode: GraphicsMode,
    /// The bytes of all rows.
    pixels: Vec<u8>,
}

impl GraphicsScreen {
    /// The picture of `mode`, whose video memory is at `base`.
    pub(super) fn read(memory: &GuestMemoryMmap, base: u64, mode: GraphicsMode) -> Self {
        let mut pixels = vec![0; mode.height * mode.stride];
        let start = GuestAddress(base + mode.start as u64);
        let read = memory.read_slice(&mut pixels, start);
        debug_assert!(read.is_ok(), "the video memory has all pixels");
        Self { mode, pixels }
    }

    /// Pixels in a row, and rows.
    pub const fn size(&self) -> (usize, usize) {
        (self.mode.width, self.mode.height)
    }

    /// The picture as a PNG.
    ///
    /// # Errors
    ///
    /// The picture cannot be encoded.
    pub fn png(&self) -> Result<Vec<u8>, PictureError> {
        let (width, height) = self.size();
        let mut file = Vec::new();
        let mut encoder = Encoder::new(&mut file, pixel_count(width), pixel_count(height));
        encoder.set_color(ColorType::Rgb);
        encoder.set_depth(BitDepth::Eight);
        let mut writer = encoder.write_header()?;
        writer.write_image_data(&self.rgb())?;
        writer.finish()?;
        Ok(file)
    }

    /// Red, green and blue of each pixel.
    fn rgb(&self) -> Vec<u8> {
        let bytes = self.mode.format.bytes();
        let rows = self.pixels.chunks_exact(self.mode.stride);
        let pixels = rows.flat_map(|row| row.chunks_exact(bytes).take(self.mode.width));
        pixels.flat_map(|pixel| self.mode.rgb(pixel)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hindsight_devices::Device;
    use hindsight_devices::vga::{DISPI_OFFSET, ScreenMode, Vga};

    /// The mode that the registers set: width, height, bits, virtual width and X offset.
    fn mode(values: [u16; 5]) -> GraphicsMode {
        let [width, height, bits, virtual_width, x] = values;
        let mut vga = Vga::default();
        let mut set = |index: u16, value: u16| {
            vga.write(DISPI_OFFSET.into(), &index.to_le_bytes());
            vga.write(u64::from(DISPI_OFFSET) + 1, &value.to_le_bytes());
        };
        for (index, value) in [(1, width), (2, height), (3, bits), (4, 1)] {
            set(index, value);
        }
        set(6, virtual_width);
        set(8, x);
        match vga.mode() {
            ScreenMode::Graphics(mode) => mode,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn picture_has_the_pixels_at_the_offset() {
        const BASE: u64 = 0x1000;
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x10_0000)]).unwrap();
        // Row 1, pixel 2 of the picture that begins at pixel 8 of rows of 32 pixels: 4 bytes each.
        let pixel = GuestAddress(BASE + (32 + 8 + 2) * 4);
        memory.write_slice(&[1, 2, 3, 0xff], pixel).unwrap();
        let screen = GraphicsScreen::read(&memory, BASE, mode([16, 2, 32, 32, 8]));
        let mut reader = png::Decoder::new(std::io::Cursor::new(screen.png().unwrap()))
            .read_info()
            .unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height), (16, 2));
        let at = (16 + 2) * 3;
        assert_eq!(pixels[at..at + 3], [3, 2, 1]);
        pixels[at..at + 3].fill(0);
        assert_eq!(pixels, [0; 16 * 2 * 3]);
    }
}
