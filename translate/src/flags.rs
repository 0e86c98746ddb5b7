//! How translated code passes the arithmetic flags to its caller.
//!
//! A unit does not compute the guest's flags before an exit. It stores the values from which they
//! can be computed: a record of 32 bits, and the operands or the result of an instruction. An exit
//! reads them as a [`FlagState`]. The caller computes the flags with its own formulas, so that they
//! are the same in every execution tier.

#![expect(clippy::cast_possible_truncation, reason = "a record is made of bytes")]

use crate::layout::Context;

/// Which operation on the values of a [`FlagState`] sets the flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FlagKind {
    /// None: the flags are unchanged since the caller entered the code.
    Caller,
    /// `a + b`.
    Add,
    /// `a - b`.
    Sub,
    /// `a + b + carry`.
    Adc,
    /// `a - b - carry`.
    Sbb,
    /// A logical operation with the result `a`.
    Logic,
    /// `a & b`.
    Test,
    /// An addition of `b` with the sum `a`.
    AddResult,
    /// A subtraction of `b` with the difference `a`.
    SubResult,
    /// The negation of `a`.
    Neg,
    /// SHL of `a` by `b`.
    Shl,
    /// SHR of `a` by `b`.
    Shr,
    /// SAR of `a` by `b`.
    Sar,
    /// A multiplication with the low half `a`; it overflows if `carry` is set.
    Product,
    /// TZCNT of `a`.
    Tzcnt,
    /// LZCNT of `a`.
    Lzcnt,
    /// POPCNT of `a`.
    Popcnt,
    /// BSF or BSR of `a`.
    Scan,
    /// `a` holds the flags themselves, as LAHF and SETO AL leave them in AX.
    Explicit,
    /// Like `Explicit`, after a logical operation, which leaves AF undefined.
    ExplicitLogic,
}

pub(crate) const KINDS: [FlagKind; 20] = [
    FlagKind::Caller,
    FlagKind::Add,
    FlagKind::Sub,
    FlagKind::Adc,
    FlagKind::Sbb,
    FlagKind::Logic,
    FlagKind::Test,
    FlagKind::AddResult,
    FlagKind::SubResult,
    FlagKind::Neg,
    FlagKind::Shl,
    FlagKind::Shr,
    FlagKind::Sar,
    FlagKind::Product,
    FlagKind::Tzcnt,
    FlagKind::Lzcnt,
    FlagKind::Popcnt,
    FlagKind::Scan,
    FlagKind::Explicit,
    FlagKind::ExplicitLogic,
];

/// An INC or DEC after the operation [`FlagState::kind`], whose CF it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlagStep {
    /// The instruction is DEC, not INC.
    pub decrement: bool,
    /// Operand size in bytes.
    pub size: u8,
    /// The result; only the low `size` bytes are valid.
    pub result: u64,
}

/// The values from which the caller computes the arithmetic flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlagState {
    /// The operation that set the flags.
    pub kind: FlagKind,
    /// Operand size in bytes.
    pub size: u8,
    /// First value; only the low `size` bytes are valid.
    pub a: u64,
    /// Second value; only the low `size` bytes are valid.
    pub b: u64,
    /// The carry that `kind` refers to.
    pub carry: bool,
    /// An INC or DEC that executed after the operation.
    pub step: Option<FlagStep>,
    /// CF, if a bit test set it after the operation.
    pub cf: Option<bool>,
}

/// In the first byte of a record: the second byte holds `b`, sign-extended.
pub(crate) const IMMEDIATE: u8 = 0x80;

/// Returns the record of an operation; `b` is stored in it if it is given.
pub(crate) fn record(kind: FlagKind, size: u8, b: Option<i8>) -> i32 {
    let first = kind as u8 | ((size.trailing_zeros() as u8) << 5);
    let first = if b.is_some() {
        first | IMMEDIATE
    } else {
        first
    };
    let second = b.unwrap_or(0).cast_unsigned();
    i32::from_le_bytes([first, second, 0, 0])
}

/// Returns the third byte of a record, which describes an INC or DEC.
pub(crate) fn step_byte(decrement: bool, size: u8) -> i32 {
    i32::from(1 | u8::from(decrement) << 1 | size << 2)
}

impl FlagState {
    /// Reads the flag values that translated code has stored in the context.
    pub(crate) fn read(context: &Context) -> Self {
        let [first, second, third, fourth] = context.flag_record.to_le_bytes();
        let kind = KINDS.get(usize::from(first & 0x1f));
        debug_assert!(kind.is_some());
        Self {
            kind: kind.copied().unwrap_or(FlagKind::Caller),
            size: 1 << (first >> 5 & 3),
            a: context.flag_a,
            b: if first & IMMEDIATE == 0 {
                context.flag_b
            } else {
                i64::from(second.cast_signed()).cast_unsigned()
            },
            carry: context.flag_carry & 1 != 0,
            step: (third != 0).then_some(FlagStep {
                decrement: third & 2 != 0,
                size: third >> 2,
                result: context.flag_step,
            }),
            cf: (fourth != 0).then_some(context.flag_cf & 1 != 0),
        }
    }
}
