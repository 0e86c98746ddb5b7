//! Operand widths.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "registers are cut to the operand width on purpose"
)]

/// An operand width: 8, 16, 32 or 64 bits.
pub(crate) trait Width: Copy + Eq + 'static {
    /// Width in bits.
    const BITS: u32;
    /// Width in bytes.
    const SIZE: usize;
    /// A register operand may be AH, CH, DH or BH.
    const HIGH_BYTES: bool = false;
    /// The low bits of `v`.
    fn from_u64(v: u64) -> Self;
    /// Zero extension.
    fn zext(self) -> u64;
    /// Sign extension.
    fn sext(self) -> u64;
    /// Puts the value into a 64-bit register; 32-bit writes clear the upper half, narrower writes
    /// keep the rest.
    fn merge(self, old: u64) -> u64;
}

macro_rules! width {
    ($t:ty, $i:ty, $merge:expr) => {
        impl Width for $t {
            const BITS: u32 = <$t>::BITS;
            const SIZE: usize = size_of::<$t>();
            const HIGH_BYTES: bool = size_of::<$t>() == 1;
            #[inline(always)]
            fn from_u64(v: u64) -> Self {
                v as $t
            }
            #[inline(always)]
            fn zext(self) -> u64 {
                u64::from(self)
            }
            #[inline(always)]
            fn sext(self) -> u64 {
                (self as $i) as i64 as u64
            }
            #[inline(always)]
            fn merge(self, old: u64) -> u64 {
                let f: fn(u64, u64) -> u64 = $merge;
                f(old, u64::from(self))
            }
        }
    };
}

width!(u8, i8, |old, v| (old & !0xff) | v);
width!(u16, i16, |old, v| (old & !0xffff) | v);
width!(u32, i32, |_, v| v);
width!(u64, i64, |_, v| v);

/// A byte, in registers always the lowest one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Low(u8);

impl Width for Low {
    const BITS: u32 = 8;
    const SIZE: usize = 1;
    #[inline(always)]
    fn from_u64(v: u64) -> Self {
        Self(v as u8)
    }
    #[inline(always)]
    fn zext(self) -> u64 {
        self.0.zext()
    }
    #[inline(always)]
    fn sext(self) -> u64 {
        self.0.sext()
    }
    #[inline(always)]
    fn merge(self, old: u64) -> u64 {
        self.0.merge(old)
    }
}
