//! The registers of a VGA and of the Bochs display adapter, and the screen that follows from them.
//!
//! IBM, "Video Subsystem" (VGA); FreeVGA. After RESET the registers have mode 3, 80x25 in colour, as a BIOS
//! leaves it. Deviation: the text memory at B8000H is RAM, which the VMM reads; there are no planes, so that
//! a font that the guest loads is not shown, and the graphics modes of a VGA have no picture; those of the DISPI
//! registers have one. A retrace begins and ends at each read of the status.

mod dispi;
pub(crate) mod memory;
mod mode;
#[cfg(test)]
mod tests;

pub use dispi::{DISPI_PORT, DISPI_PORTS, DispiState, GraphicsMode, PixelFormat};
pub use memory::{VIDEO_MEMORY_LEN, VideoMemory};
pub use mode::{Cursor, TextMode};

use bitflags::bitflags;
use thiserror::Error;

use crate::bus::Device;

/// First port: the attribute controller. [`Vga`] is mapped with offset 0 there.
pub const VGA_PORT: u16 = 0x3c0;
/// Number of ports, up to 3DFH.
pub const VGA_PORTS: u16 = 0x20;
/// The offset of the DISPI ports in [`Vga`]: map [`DISPI_PORT`] with it.
pub const DISPI_OFFSET: u16 = 0x100;

/// The text memory of colour modes.
pub const TEXT_MEMORY: u64 = 0xb_8000;
/// Bytes of the text memory.
pub const TEXT_MEMORY_LEN: usize = 0x8000;

/// Registers of mode 3. IBM VGA BIOS, "Video Parameter Table".
const SEQUENCER_MODE_3: [u8; 5] = [3, 0, 3, 0, 2];
const CRTC_MODE_3: [u8; 25] = [
    0x5f, 0x4f, 0x50, 0x82, 0x55, 0x81, 0xbf, 0x1f, 0, 0x4f, 0x0d, 0x0e, 0, 0, 0, 0, 0x9c, 0x8e,
    0x8f, 0x28, 0x1f, 0x96, 0xb9, 0xa3, 0xff,
];
const GRAPHICS_MODE_3: [u8; 9] = [0, 0, 0, 0, 0, 0x10, 0x0e, 0, 0xff];
const ATTRIBUTE_MODE_3: [u8; 21] = [
    0, 1, 2, 3, 4, 5, 0x14, 7, 0x38, 0x39, 0x3a, 0x3b, 0x3c, 0x3d, 0x3e, 0x3f, 0x0c, 0, 0x0f, 8, 0,
];
const MISC_MODE_3: u8 = 0x67;

/// Bytes of the colour table: 256 colours of 6 bits for red, green and blue.
const DAC_BYTES: usize = 768;
/// The CRTC's register with the bit that protects the first eight.
const CRTC_PROTECT: usize = 0x11;
const CRTC_OVERFLOW: usize = 7;
/// The bit of the overflow register that is never protected: line compare.
const OVERFLOW_UNPROTECTED: u8 = 1 << 4;

bitflags! {
    /// Input status 1.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct InputStatus: u8 {
        /// The beam is outside of the picture.
        const DISPLAY_DISABLED = 1 << 0;
        /// The beam returns to the top.
        const VERTICAL_RETRACE = 1 << 3;
    }
}

/// The registers as plain data.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct VgaState {
    /// Miscellaneous output.
    pub misc: u8,
    /// Feature control.
    pub feature: u8,
    /// The selected registers: sequencer, CRTC, graphics and attribute controller.
    pub indices: [u8; 4],
    /// The sequencer's registers.
    pub sequencer: [u8; 5],
    /// The CRTC's registers.
    pub crtc: [u8; 25],
    /// The graphics controller's registers.
    pub graphics: [u8; 9],
    /// The attribute controller's registers.
    pub attribute: [u8; 21],
    /// The next write to 3C0H is data.
    pub attribute_data: bool,
    /// The mask of colour numbers.
    pub dac_mask: u8,
    /// The next byte of the colour table that is read, and that is written.
    pub dac_next: [u16; 2],
    /// The last access set the number to read from.
    pub dac_reads: bool,
    /// The colour table.
    pub dac: Vec<u8>,
    /// The next read of the status shows a retrace.
    pub retrace: bool,
    /// The DISPI registers.
    #[cfg_attr(feature = "serde", serde(default))]
    pub dispi: DispiState,
}

/// A saved state that the registers cannot have.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the state of the VGA is invalid")]
pub struct VgaError;

impl Default for VgaState {
    fn default() -> Self {
        Self {
            misc: MISC_MODE_3,
            feature: 0,
            indices: [0; 4],
            sequencer: SEQUENCER_MODE_3,
            crtc: CRTC_MODE_3,
            graphics: GRAPHICS_MODE_3,
            attribute: ATTRIBUTE_MODE_3,
            attribute_data: false,
            dac_mask: 0xff,
            dac_next: [0; 2],
            dac_reads: false,
            dac: first_colours(),
            retrace: false,
            dispi: DispiState::default(),
        }
    }
}

/// The colour table of mode 3: colours of two bits for red, green and blue; all others are black.
fn first_colours() -> Vec<u8> {
    let mut dac = vec![0; DAC_BYTES];
    for (number, colour) in (0_u8..64).zip(dac.chunks_exact_mut(3)) {
        for (bit, part) in [2_u8, 1, 0].into_iter().zip(colour) {
            *part = (number >> bit & 1) * 0x2a + (number >> (bit + 3) & 1) * 0x15;
        }
    }
    dac
}

/// The index registers in [`VgaState::indices`].
const SEQUENCER: usize = 0;
const CRTC: usize = 1;
const GRAPHICS: usize = 2;
const ATTRIBUTE: usize = 3;
/// The bits of the attribute controller's index that number a register.
const ATTRIBUTE_INDEX: u8 = 0x1f;

/// What the screen shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScreenMode {
    /// Text.
    Text(TextMode),
    /// A picture in the video memory.
    Graphics(GraphicsMode),
    /// A graphics mode of a VGA, which is not modelled.
    Planar,
}

/// The registers of a VGA.
#[derive(Clone, Debug, Default)]
pub struct Vga {
    state: VgaState,
    memory: Option<VideoMemory>,
}

impl Vga {
    /// An adapter with video memory.
    pub fn with_memory(memory: VideoMemory) -> Self {
        Self {
            state: VgaState::default(),
            memory: Some(memory),
        }
    }

    /// The video memory, if there is any.
    pub const fn memory(&self) -> Option<&VideoMemory> {
        self.memory.as_ref()
    }

    /// The state, to be saved.
    pub fn save(&self) -> VgaState {
        self.state.clone()
    }

    /// Restores a state.
    ///
    /// # Errors
    /// The colour table has another size, its next byte is outside of it, or the DISPI registers have
    /// impossible values; nothing has changed.
    pub fn restore(&mut self, state: &VgaState) -> Result<(), VgaError> {
        let inside = |&next: &u16| usize::from(next) < DAC_BYTES;
        if state.dac.len() != DAC_BYTES
            || !state.dac_next.iter().all(inside)
            || !state.dispi.is_valid()
        {
            return Err(VgaError);
        }
        self.state = state.clone();
        Ok(())
    }

    /// What the screen shows.
    pub fn mode(&self) -> ScreenMode {
        if let Some(mode) = self.state.dispi.mode(|| self.colours()) {
            return ScreenMode::Graphics(mode);
        }
        TextMode::of(&self.state).map_or(ScreenMode::Planar, ScreenMode::Text)
    }

    /// The text mode that is set; `None` in a graphics mode.
    pub fn text_mode(&self) -> Option<TextMode> {
        match self.mode() {
            ScreenMode::Text(mode) => Some(mode),
            ScreenMode::Graphics(_) | ScreenMode::Planar => None,
        }
    }

    /// The red, green and blue of the 256 colours.
    fn colours(&self) -> Vec<[u8; 3]> {
        let wide = self.state.dispi.has_8_bit_dac();
        let part = |part: u8| if wide { part } else { part << 2 | part >> 4 };
        let colour = |colour: &[u8; 3]| colour.map(part);
        self.state.dac.as_chunks().0.iter().map(colour).collect()
    }

    /// Reads DISPI register `index`.
    pub(crate) fn read_dispi(&self, index: u16) -> u16 {
        self.state.dispi.read(index)
    }

    /// Writes DISPI register `index`. Enabling a mode clears its memory.
    pub(crate) fn write_dispi(&mut self, index: u16, value: u16) {
        let cleared = self.state.dispi.write(index, value);
        if let Some(memory) = &self.memory {
            memory.clear(cleared);
        }
    }

    /// Reads the DISPI ports: index at offset 0, data above.
    fn read_dispi_port(&self, offset: u64, data: &mut [u8]) {
        let index = self.state.dispi.index;
        let value = if offset == 0 {
            index
        } else {
            self.read_dispi(index)
        };
        for (to, from) in data.iter_mut().zip(value.to_le_bytes()) {
            *to = from;
        }
    }

    /// Writes to the DISPI ports.
    fn write_dispi_port(&mut self, offset: u64, data: &[u8]) {
        let byte = |at: usize| data.get(at).copied().unwrap_or(0);
        let value = u16::from_le_bytes([byte(0), byte(1)]);
        if offset == 0 {
            self.state.dispi.index = value;
        } else {
            self.write_dispi(self.state.dispi.index, value);
        }
    }

    fn index(&self, controller: usize) -> usize {
        self.state.indices[controller].into()
    }

    fn read_byte(&mut self, offset: u64) -> u8 {
        let at = |registers: &[u8], index| registers.get(index).copied().unwrap_or(0);
        match offset {
            0x00 => self.state.indices[ATTRIBUTE],
            0x01 => {
                let index = self.index(ATTRIBUTE) & usize::from(ATTRIBUTE_INDEX);
                at(&self.state.attribute, index)
            }
            // Input status 0: a colour monitor is connected.
            0x02 => 0x10,
            0x04 => self.state.indices[SEQUENCER],
            0x05 => at(&self.state.sequencer, self.index(SEQUENCER)),
            0x06 => self.state.dac_mask,
            0x07 => {
                if self.state.dac_reads {
                    3
                } else {
                    0
                }
            }
            0x08 => (self.state.dac_next[1] / 3).to_le_bytes()[0],
            0x09 => {
                let next = self.advance_dac(0);
                at(&self.state.dac, next)
            }
            0x0a => self.state.feature,
            0x0c => self.state.misc,
            0x0e => self.state.indices[GRAPHICS],
            0x0f => at(&self.state.graphics, self.index(GRAPHICS)),
            0x14 => self.state.indices[CRTC],
            0x15 => at(&self.state.crtc, self.index(CRTC)),
            0x1a => self.read_status(),
            _ => 0xff,
        }
    }

    fn read_status(&mut self) -> u8 {
        self.state.attribute_data = false;
        let retrace = self.state.retrace;
        self.state.retrace = !retrace;
        let status = InputStatus::DISPLAY_DISABLED | InputStatus::VERTICAL_RETRACE;
        if retrace { status.bits() } else { 0 }
    }

    /// The byte of the colour table that is accessed, for reading (0) or writing (1).
    fn advance_dac(&mut self, direction: usize) -> usize {
        let next = &mut self.state.dac_next[direction];
        let byte = usize::from(*next);
        *next = if byte + 1 < DAC_BYTES { *next + 1 } else { 0 };
        byte
    }

    fn write_byte(&mut self, offset: u64, value: u8) {
        match offset {
            0x00 => self.write_attribute(value),
            0x02 => self.state.misc = value,
            0x04 => self.state.indices[SEQUENCER] = value,
            0x05 => {
                let index = self.index(SEQUENCER);
                set(&mut self.state.sequencer, index, value);
            }
            0x06 => self.state.dac_mask = value,
            0x07 | 0x08 => {
                let direction = usize::from(offset == 0x08);
                self.state.dac_next[direction] = u16::from(value) * 3;
                self.state.dac_reads = direction == 0;
            }
            0x09 => {
                let next = self.advance_dac(1);
                let wide = self.state.dispi.has_8_bit_dac();
                let value = if wide { value } else { value & 0x3f };
                set(&mut self.state.dac, next, value);
            }
            0x0e => self.state.indices[GRAPHICS] = value,
            0x0f => {
                let index = self.index(GRAPHICS);
                set(&mut self.state.graphics, index, value);
            }
            0x14 => self.state.indices[CRTC] = value,
            0x15 => self.write_crtc(value),
            0x1a => self.state.feature = value,
            _ => {}
        }
    }

    fn write_attribute(&mut self, value: u8) {
        if self.state.attribute_data {
            let index = self.index(ATTRIBUTE) & usize::from(ATTRIBUTE_INDEX);
            set(&mut self.state.attribute, index, value);
        } else {
            self.state.indices[ATTRIBUTE] = value;
        }
        self.state.attribute_data = !self.state.attribute_data;
    }

    fn write_crtc(&mut self, value: u8) {
        let index = self.index(CRTC);
        let protects = self.state.crtc[CRTC_PROTECT] & 0x80 != 0;
        let value = match index {
            CRTC_OVERFLOW if protects => {
                let old = self.state.crtc[CRTC_OVERFLOW];
                old & !OVERFLOW_UNPROTECTED | value & OVERFLOW_UNPROTECTED
            }
            0..CRTC_OVERFLOW if protects => return,
            _ => value,
        };
        set(&mut self.state.crtc, index, value);
    }
}

/// Sets a register, if it exists.
fn set(registers: &mut [u8], index: usize, value: u8) {
    if let Some(register) = registers.get_mut(index) {
        *register = value;
    }
}

impl Device for Vga {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        if let Some(offset) = offset.checked_sub(DISPI_OFFSET.into()) {
            return self.read_dispi_port(offset, data);
        }
        for (byte, offset) in data.iter_mut().zip(offset..) {
            *byte = self.read_byte(offset);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let Some(offset) = offset.checked_sub(DISPI_OFFSET.into()) {
            return self.write_dispi_port(offset, data);
        }
        for (&byte, offset) in data.iter().zip(offset..) {
            self.write_byte(offset, byte);
        }
    }
}
