//! Sizes of memory in messages.

use std::fmt;

/// A number of bytes, printed in the largest binary unit that it reaches: `63.6 MiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSize(pub u64);

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u32, &str); 5] = [
            (50, "PiB"),
            (40, "TiB"),
            (30, "GiB"),
            (20, "MiB"),
            (10, "KiB"),
        ];
        let bytes = self.0;
        let Some((shift, unit)) = UNITS.into_iter().find(|(shift, _)| bytes >> shift != 0) else {
            return write!(f, "{bytes} bytes");
        };
        // Tenths are rounded up: a size that is needed must not look smaller than it is.
        let tenths = (u128::from(bytes) * 10).div_ceil(1 << shift);
        match (tenths / 10, tenths % 10) {
            (whole, 0) => write!(f, "{whole} {unit}"),
            (whole, tenth) => write!(f, "{whole}.{tenth} {unit}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_size_prints_the_largest_unit_and_rounds_up() {
        let rows = [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1024, "1 KiB"),
            (0x3f9_7000, "63.6 MiB"),
            (64 << 20, "64 MiB"),
            ((64 << 20) + 1, "64.1 MiB"),
            (3 << 30, "3 GiB"),
            (u64::MAX, "16384 PiB"),
        ];
        for (bytes, text) in rows {
            assert_eq!(ByteSize(bytes).to_string(), text);
        }
    }
}
