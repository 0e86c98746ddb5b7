//! Short text from values, smaller and faster than by `core::fmt`.

/// A buffer for text; text that does not fit is dropped.
#[derive(Debug)]
pub struct TextBuffer<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> TextBuffer<N> {
    /// An empty text.
    pub const fn new() -> Self {
        Self {
            bytes: [0; N],
            len: 0,
        }
    }

    /// Empties the buffer.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// The text so far.
    pub fn as_str(&self) -> &str {
        let bytes = self.bytes.get(..self.len).unwrap_or_default();
        core::str::from_utf8(bytes).unwrap_or("?")
    }
}

impl<const N: usize> Default for TextBuffer<N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const N: usize> TextSink for TextBuffer<N> {
    fn put(&mut self, text: &str) {
        for &byte in text.as_bytes() {
            if let Some(next) = self.bytes.get_mut(self.len) {
                *next = byte;
                self.len += 1;
            }
        }
    }
}

/// A destination of text.
pub trait TextSink {
    /// Appends `text`.
    fn put(&mut self, text: &str);
}

/// A value that a failed check can print.
pub trait Show {
    /// Writes the value as one word.
    fn show(&self, out: &mut dyn TextSink);
}

/// Writes `value` in base `base`, 10 or 16, without a prefix.
fn digits(value: u64, base: u64, out: &mut dyn TextSink) {
    let mut buffer = [0_u8; 20];
    let mut rest = value;
    let mut at = buffer.len();
    while at > 0 {
        at -= 1;
        buffer[at] = b"0123456789abcdef"[usize::try_from(rest % base).unwrap_or(0)];
        rest /= base;
        if rest == 0 {
            break;
        }
    }
    out.put(core::str::from_utf8(&buffer[at..]).unwrap_or("?"));
}

/// Writes `value` in decimal.
pub fn decimal(value: u64, out: &mut dyn TextSink) {
    digits(value, 10, out);
}

/// Writes `value` in hexadecimal with the prefix `0x`.
pub fn hex(value: u64, out: &mut dyn TextSink) {
    out.put("0x");
    digits(value, 16, out);
}

macro_rules! show_as_hex {
    ($($kind:ty),*) => {
        $(impl Show for $kind {
            fn show(&self, out: &mut dyn TextSink) {
                hex(u64::from(*self), out);
            }
        })*
    };
}

show_as_hex!(u8, u16, u32, u64);

impl Show for usize {
    fn show(&self, out: &mut dyn TextSink) {
        hex(*self as u64, out);
    }
}

impl Show for i32 {
    fn show(&self, out: &mut dyn TextSink) {
        if *self < 0 {
            out.put("-");
        }
        decimal(u64::from(self.unsigned_abs()), out);
    }
}

impl Show for bool {
    fn show(&self, out: &mut dyn TextSink) {
        out.put(if *self { "true" } else { "false" });
    }
}

impl Show for &str {
    fn show(&self, out: &mut dyn TextSink) {
        out.put(self);
    }
}

impl Show for () {
    fn show(&self, out: &mut dyn TextSink) {
        out.put("()");
    }
}

impl<T: Show> Show for Option<T> {
    fn show(&self, out: &mut dyn TextSink) {
        match self {
            None => out.put("none"),
            Some(value) => value.show(out),
        }
    }
}

impl<T: Show, E: Show> Show for Result<T, E> {
    fn show(&self, out: &mut dyn TextSink) {
        match self {
            Ok(value) => value.show(out),
            Err(error) => {
                out.put("error:");
                error.show(out);
            }
        }
    }
}

impl<A: Show, B: Show> Show for (A, B) {
    fn show(&self, out: &mut dyn TextSink) {
        self.0.show(out);
        out.put(",");
        self.1.show(out);
    }
}

impl<T: Show, const N: usize> Show for [T; N] {
    fn show(&self, out: &mut dyn TextSink) {
        out.put("[");
        for (n, value) in self.iter().enumerate() {
            if n != 0 {
                out.put(",");
            }
            value.show(out);
        }
        out.put("]");
    }
}
