//! Short texts on the stack.

use core::ffi::CStr;

/// A text of up to 511 bytes that ends with a NUL.
pub struct Text {
    bytes: [u8; 512],
    len: usize,
}

impl Text {
    /// The parts, one after the other; what does not fit is cut off.
    pub fn of(parts: &[&[u8]]) -> Self {
        let mut text = Self {
            bytes: [0; 512],
            len: 0,
        };
        for byte in parts.iter().copied().flatten().copied() {
            if text.len < text.bytes.len() - 1 && byte != 0 {
                text.bytes[text.len] = byte;
                text.len += 1;
            }
        }
        text
    }

    /// The text for a system call.
    pub fn as_c(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or(c"")
    }

    /// The bytes, without the NUL.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The decimal digits of a number.
pub fn decimal(mut number: u32, digits: &mut [u8; 10]) -> &[u8] {
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10).to_le_bytes()[0];
        number /= 10;
        if number == 0 {
            return &digits[at..];
        }
    }
}
