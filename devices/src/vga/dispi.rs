//! The DISPI registers of the Bochs display adapter, which set graphics modes with a linear framebuffer.
//!
//! Bochs, "VBE DISPI interface"; QEMU, "QEMU Standard VGA". A value that is out of range is corrected when
//! the mode is enabled, as QEMU does. Deviations: there are no modes of 4 bits per pixel, and the bank register
//! has no effect: the window at A0000H is RAM.

use super::memory::{VIDEO_MEMORY_BLOCKS, VIDEO_MEMORY_LEN};

/// First port: the index register. The data register follows, at 1CFH and 1D0H.
pub const DISPI_PORT: u16 = 0x1ce;
/// Number of ports.
pub const DISPI_PORTS: u16 = 4;

/// Numbers of registers.
const ID: usize = 0;
const XRES: usize = 1;
const YRES: usize = 2;
const BPP: usize = 3;
const ENABLE: usize = 4;
const BANK: usize = 5;
const VIRT_WIDTH: usize = 6;
const VIRT_HEIGHT: usize = 7;
const X_OFFSET: usize = 8;
const Y_OFFSET: usize = 9;
const VIDEO_MEMORY_64K: u16 = 10;
/// Number of registers that are stored.
const REGISTERS: usize = 10;

/// The first and the last version of the interface.
const ID_FIRST: u16 = 0xb0c0;
const ID_LAST: u16 = 0xb0c5;
/// Bits of the enable register.
const ENABLED: u16 = 1 << 0;
const GET_CAPABILITIES: u16 = 1 << 1;
const DAC_8_BIT: u16 = 1 << 5;
const NO_CLEAR_MEMORY: u16 = 1 << 7;
/// The largest values.
const XRES_MAX: u16 = 16000;
const YRES_MAX: u16 = 12000;
const BPP_MAX: u16 = 32;
/// The last bank.
const BANK_MASK: u16 = 0xff;

/// How a pixel is stored. Numbers are little endian, with blue in the lowest bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PixelFormat {
    /// The number of a colour.
    Indexed,
    /// 5 bits for each of red, green and blue.
    Rgb555,
    /// 5, 6 and 5 bits.
    Rgb565,
    /// 8 bits for each, in 3 bytes.
    Rgb24,
    /// 8 bits for each, in 4 bytes.
    Rgb32,
}

impl PixelFormat {
    /// The format of a number of bits per pixel.
    const fn of(bpp: u16) -> Option<Self> {
        Some(match bpp {
            8 => Self::Indexed,
            15 => Self::Rgb555,
            16 => Self::Rgb565,
            24 => Self::Rgb24,
            32 => Self::Rgb32,
            _ => return None,
        })
    }

    /// Bytes of a pixel.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Indexed => 1,
            Self::Rgb555 | Self::Rgb565 => 2,
            Self::Rgb24 => 3,
            Self::Rgb32 => 4,
        }
    }
}

/// A graphics mode: the size of the picture, and where its pixels are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphicsMode {
    /// Pixels in a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// How a pixel is stored.
    pub format: PixelFormat,
    /// Bytes from a row to the next.
    pub stride: usize,
    /// The first pixel's offset in the video memory, which has all pixels.
    pub start: usize,
    /// The red, green and blue of the 256 colours of [`PixelFormat::Indexed`].
    pub palette: Vec<[u8; 3]>,
}

impl GraphicsMode {
    /// The red, green and blue of a pixel, whose bytes `pixel` has.
    pub fn rgb(&self, pixel: &[u8]) -> [u8; 3] {
        let byte = |at: usize| pixel.get(at).copied().unwrap_or(0);
        let word = u16::from_le_bytes([byte(0), byte(1)]);
        // The highest bits are repeated below, so that the brightest colour has 255.
        let part = |shift: u32, bits: u32| {
            let [value, _] = (word >> shift & ((1 << bits) - 1)).to_le_bytes();
            value << (8 - bits) | value >> (2 * bits - 8)
        };
        match self.format {
            PixelFormat::Indexed => {
                let colour = self.palette.get(usize::from(byte(0)));
                colour.copied().unwrap_or_default()
            }
            PixelFormat::Rgb555 => [part(10, 5), part(5, 5), part(0, 5)],
            PixelFormat::Rgb565 => [part(11, 5), part(5, 6), part(0, 5)],
            PixelFormat::Rgb24 | PixelFormat::Rgb32 => [byte(2), byte(1), byte(0)],
        }
    }
}

/// The registers as plain data.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct DispiState {
    /// The selected register.
    pub index: u16,
    /// The registers by number, from the ID to the Y offset.
    pub registers: [u16; REGISTERS],
}

impl Default for DispiState {
    fn default() -> Self {
        let mut registers = [0; REGISTERS];
        registers[ID] = ID_LAST;
        Self {
            index: 0,
            registers,
        }
    }
}

impl DispiState {
    /// Whether the registers can have these values.
    pub(super) fn is_valid(&self) -> bool {
        let mut corrected = self.clone();
        corrected.correct();
        (ID_FIRST..=ID_LAST).contains(&self.registers[ID]) && corrected == *self
    }

    /// Whether a graphics mode is set.
    pub(super) const fn is_enabled(&self) -> bool {
        self.registers[ENABLE] & ENABLED != 0
    }

    /// Whether the colour table has 8 bits for each of red, green and blue, not 6.
    pub(super) const fn has_8_bit_dac(&self) -> bool {
        self.registers[ENABLE] & DAC_8_BIT != 0
    }

    /// The data register, which shows register `index`.
    pub(super) fn read(&self, index: u16) -> u16 {
        if index == VIDEO_MEMORY_64K {
            return VIDEO_MEMORY_BLOCKS;
        }
        let index = usize::from(index);
        if self.registers[ENABLE] & GET_CAPABILITIES != 0 {
            match index {
                XRES => return XRES_MAX,
                YRES => return YRES_MAX,
                BPP => return BPP_MAX,
                _ => {}
            }
        }
        self.registers.get(index).copied().unwrap_or(0)
    }

    /// Writes register `index`. Returns the number of bytes of video memory that this clears.
    pub(super) fn write(&mut self, index: u16, value: u16) -> usize {
        let index = usize::from(index);
        match index {
            ID if (ID_FIRST..=ID_LAST).contains(&value) => self.registers[ID] = value,
            XRES | YRES | BPP | VIRT_WIDTH | X_OFFSET | Y_OFFSET => {
                self.registers[index] = value;
                self.correct();
            }
            BANK => self.registers[BANK] = value & BANK_MASK,
            ENABLE => return self.write_enable(value),
            _ => {}
        }
        0
    }

    fn write_enable(&mut self, value: u16) -> usize {
        let enables = value & ENABLED != 0 && !self.is_enabled();
        self.registers[ENABLE] = value;
        if !enables {
            self.registers[BANK] = 0;
            return 0;
        }
        for register in [VIRT_WIDTH, X_OFFSET, Y_OFFSET] {
            self.registers[register] = 0;
        }
        self.correct();
        if value & NO_CLEAR_MEMORY != 0 {
            return 0;
        }
        usize::from(self.registers[YRES]) * self.stride()
    }

    /// Bytes of a pixel, and the format, of an enabled mode.
    fn format(&self) -> PixelFormat {
        PixelFormat::of(self.registers[BPP]).unwrap_or(PixelFormat::Indexed)
    }

    /// Bytes from a row to the next.
    fn stride(&self) -> usize {
        usize::from(self.registers[VIRT_WIDTH]) * self.format().bytes()
    }

    /// The offset of the first pixel.
    fn start(&self) -> usize {
        let [x, y] = [X_OFFSET, Y_OFFSET].map(|register| usize::from(self.registers[register]));
        x * self.format().bytes() + y * self.stride()
    }

    /// Corrects the registers of an enabled mode so that all of its pixels are in the video memory.
    fn correct(&mut self) {
        if !self.is_enabled() {
            return;
        }
        let r = &mut self.registers;
        if PixelFormat::of(r[BPP]).is_none() {
            r[BPP] = 8;
        }
        r[XRES] = (r[XRES] & !7).clamp(8, XRES_MAX);
        r[VIRT_WIDTH] = (r[VIRT_WIDTH] & !7).clamp(r[XRES], XRES_MAX);
        let rows = VIDEO_MEMORY_LEN / self.stride();
        let rows = u16::try_from(rows).unwrap_or(u16::MAX);
        let r = &mut self.registers;
        r[YRES] = r[YRES].clamp(1, YRES_MAX).min(rows);
        r[VIRT_HEIGHT] = rows;
        r[X_OFFSET] = r[X_OFFSET].min(XRES_MAX);
        r[Y_OFFSET] = r[Y_OFFSET].min(YRES_MAX);
        for register in [Y_OFFSET, X_OFFSET] {
            let len = usize::from(self.registers[YRES]) * self.stride();
            if self.start() + len > VIDEO_MEMORY_LEN {
                self.registers[register] = 0;
            }
        }
    }

    /// The mode that is set, with the colours of `palette`; `None` if none is enabled.
    pub(super) fn mode(&self, palette: impl FnOnce() -> Vec<[u8; 3]>) -> Option<GraphicsMode> {
        if !self.is_enabled() {
            return None;
        }
        let format = self.format();
        Some(GraphicsMode {
            width: self.registers[XRES].into(),
            height: self.registers[YRES].into(),
            format,
            stride: self.stride(),
            start: self.start(),
            palette: match format {
                PixelFormat::Indexed => palette(),
                _ => Vec::new(),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn enabled(width: u16, height: u16, bpp: u16) -> DispiState {
        let mut dispi = DispiState::default();
        for (index, value) in [(1, width), (2, height), (3, bpp), (4, 0x41)] {
            dispi.write(index, value);
        }
        dispi
    }

    #[test]
    fn registers_identify_the_interface_and_its_limits() {
        let mut dispi = DispiState::default();
        assert_eq!((dispi.read(0), dispi.read(10)), (0xb0c5, 256));
        dispi.write(0, 0xb0c4);
        dispi.write(0, 0x1234);
        assert_eq!(dispi.read(0), 0xb0c4);
        dispi.write(4, 2);
        assert_eq!([1, 2, 3].map(|index| dispi.read(index)), [16000, 12000, 32]);
        dispi.write(4, 0);
        assert_eq!([1, 2, 3].map(|index| dispi.read(index)), [0; 3]);
        assert_eq!(dispi.read(11), 0);
    }

    #[test]
    fn enabled_mode_has_the_picture_at_the_offsets() {
        let mut dispi = DispiState::default();
        assert_eq!(dispi.mode(Vec::new), None);
        for (index, value) in [(1, 1024), (2, 768), (3, 32)] {
            assert_eq!(dispi.write(index, value), 0);
        }
        assert_eq!(dispi.write(4, 0x41), 1024 * 768 * 4, "memory is cleared");
        assert_eq!(dispi.write(4, 0x41), 0, "the mode is enabled already");
        assert_eq!(dispi.read(7), 4096, "rows in the video memory");
        for (index, value) in [(6, 1280), (8, 16), (9, 768)] {
            dispi.write(index, value);
        }
        let mode = dispi.mode(Vec::new).unwrap();
        assert_eq!((mode.width, mode.height, mode.stride), (1024, 768, 5120));
        assert_eq!(mode.start, 768 * 5120 + 64);
        dispi.write(4, 0);
        assert_eq!(dispi.write(4, 0xc1), 0, "memory is kept");
        assert_eq!(dispi.mode(Vec::new).unwrap().start, 0);
    }

    #[test]
    fn values_out_of_range_are_corrected() {
        let mode = enabled(0, 0, 7).mode(Vec::new).unwrap();
        assert_eq!(
            (mode.width, mode.height, mode.format),
            (8, 1, PixelFormat::Indexed)
        );
        let mode = enabled(0xffff, 0xffff, 32).mode(Vec::new).unwrap();
        assert_eq!((mode.width, mode.height), (16000, 262));
        let mut dispi = enabled(1023, 4096, 32);
        assert_eq!(dispi.read(1), 1016);
        dispi.write(9, 300);
        assert_eq!(dispi.read(9), 0, "the picture would leave the memory");
    }

    #[test]
    fn pixels_of_each_format_have_their_colours() {
        let rows: [(u16, &[u8], [u8; 3]); 5] = [
            (8, &[3], [1, 2, 3]),
            (15, &[0x1f, 0x7c], [255, 0, 255]),
            (16, &[0xe0, 0x87], [0x84, 255, 0]),
            (24, &[1, 2, 3], [3, 2, 1]),
            (32, &[1, 2, 3, 0xff], [3, 2, 1]),
        ];
        for (bpp, pixel, expected) in rows {
            let palette = || vec![[0; 3], [0; 3], [0; 3], [1, 2, 3]];
            let mode = enabled(640, 480, bpp).mode(palette).unwrap();
            assert_eq!(mode.format.bytes(), pixel.len(), "{bpp}");
            assert_eq!(mode.rgb(pixel), expected, "{bpp}");
        }
    }

    #[test]
    fn state_with_pixels_outside_of_the_memory_is_invalid() {
        let mut dispi = enabled(1024, 768, 32);
        assert!(dispi.is_valid());
        dispi.registers[Y_OFFSET] = 4000;
        assert!(!dispi.is_valid());
        let mut dispi = DispiState::default();
        dispi.registers[ID] = 0;
        assert!(!dispi.is_valid());
    }

    proptest! {
        #[test]
        fn pixels_are_always_in_the_memory(
            writes in prop::collection::vec((0..12_u16, any::<u16>()), 0..40),
        ) {
            let mut dispi = DispiState::default();
            for (index, value) in writes {
                prop_assert!(dispi.write(index, value) <= VIDEO_MEMORY_LEN);
                prop_assert!(dispi.is_valid());
                if let Some(mode) = dispi.mode(Vec::new) {
                    prop_assert!(mode.width * mode.format.bytes() <= mode.stride);
                    prop_assert!(mode.start + mode.height * mode.stride <= VIDEO_MEMORY_LEN);
                }
            }
        }
    }
}
