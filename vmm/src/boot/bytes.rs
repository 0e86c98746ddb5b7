//! Little-endian fields at offsets that the boot protocols define.

/// The two bytes at `at`, if `bytes` is long enough.
pub(super) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The four bytes at `at`, if `bytes` is long enough.
pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The eight bytes at `at`, if `bytes` is long enough.
pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Writes `field` at `at` of a structure that is large enough.
pub(super) fn put<const N: usize>(bytes: &mut [u8], at: usize, field: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&field);
}

/// An address below 4 GiB as bytes. All addresses of [`crate::boot::placement::Placement`] are.
pub(super) fn address32(address: u64) -> [u8; 4] {
    debug_assert!(u32::try_from(address).is_ok());
    #[expect(clippy::cast_possible_truncation, reason = "below the PCI hole")]
    (address as u32).to_le_bytes()
}
