//! Formats the data of accesses for traces.

/// Formats little-endian bytes as a hexadecimal number.
pub(crate) struct HexBytes<'a>(pub(crate) &'a [u8]);

impl std::fmt::Display for HexBytes<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let value = self
            .0
            .iter()
            .rev()
            .fold(0_u64, |value, &byte| value << 8 | u64::from(byte));
        write!(f, "{value:#0width$x}", width = 2 + 2 * self.0.len())
    }
}
