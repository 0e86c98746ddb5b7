//! Elements of a vector register.

/// The contents of a vector register, or of a memory operand.
pub(super) type VectorBytes = [u8; 64];

/// An integer as an element of a vector.
pub(super) trait Element: Copy + PartialEq + Default {
    const SIZE: usize;
    fn get(from: &VectorBytes, n: usize) -> Self;
    fn put(self, to: &mut VectorBytes, n: usize);
}

macro_rules! elements {
    ($($t:ty),*) => { $(
        impl Element for $t {
            const SIZE: usize = size_of::<$t>();
            fn get(from: &VectorBytes, n: usize) -> Self {
                let at = n * Self::SIZE;
                from.get(at..at + Self::SIZE)
                    .and_then(|bytes| bytes.try_into().ok())
                    .map_or(0, Self::from_le_bytes)
            }
            fn put(self, to: &mut VectorBytes, n: usize) {
                let at = n * Self::SIZE;
                if let Some(bytes) = to.get_mut(at..at + Self::SIZE) {
                    bytes.copy_from_slice(&self.to_le_bytes());
                }
            }
        }
    )* };
}

elements!(u8, i8, u16, i16, u32, i32, u64, i64, u128);

/// Reads element `n` of `size` bytes, at most 8.
pub(super) fn get(from: &VectorBytes, size: usize, n: usize) -> u64 {
    match size {
        1 => u8::get(from, n).into(),
        2 => u16::get(from, n).into(),
        4 => u32::get(from, n).into(),
        _ => u64::get(from, n),
    }
}

/// Writes element `n` of `size` bytes; higher bits of the value are dropped.
pub(super) fn put(to: &mut VectorBytes, size: usize, n: usize, v: u64) {
    let at = n * size;
    if let Some(bytes) = to.get_mut(at..at + size) {
        bytes.copy_from_slice(&v.to_le_bytes()[..size]);
    }
}
