//! How generated code leaves the arithmetic flags.
//!
//! Code that an exit may follow does not compute the flags. It stores what they follow from: a record
//! of 32 bits, and the operands or the result. [`FlagState`] is what an exit finds. The formulas are
//! the caller's, so that they are the same in every execution tier.

#![expect(clippy::cast_possible_truncation, reason = "a record is made of bytes")]

use crate::layout::Context;

/// How the flags follow from the values of a [`FlagState`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FlagKind {
    /// The flags are those that the caller had when it entered the code.
    Caller,
    /// Of `a + b`.
    Add,
    /// Of `a - b`.
    Sub,
    /// Of `a + b + carry`.
    Adc,
    /// Of `a - b - carry`.
    Sbb,
    /// Of a logical operation with the result `a`.
    Logic,
    /// Of `a & b`.
    Test,
    /// Of an addition of `b` with the sum `a`.
    AddResult,
    /// Of a subtraction of `b` with the difference `a`.
    SubResult,
    /// Of the negation of `a`.
    Neg,
    /// Of SHL of `a` by `b`.
    Shl,
    /// Of SHR of `a` by `b`.
    Shr,
    /// Of SAR of `a` by `b`.
    Sar,
    /// Of a multiplication with the low half `a`; it overflows if `carry`.
    Product,
    /// Of TZCNT of `a`.
    Tzcnt,
    /// Of LZCNT of `a`.
    Lzcnt,
    /// Of POPCNT of `a`.
    Popcnt,
    /// Of BSF and BSR of `a`.
    Scan,
    /// `a` has the flags themselves, as LAHF and SETO AL leave them in AX.
    Explicit,
    /// The same, after a logical operation, which leaves AF undefined.
    ExplicitLogic,
}

const KINDS: [FlagKind; 20] = [
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

/// INC or DEC, which came after what [`FlagState::kind`] says and kept CF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlagStep {
    /// It is DEC.
    pub decrement: bool,
    /// Operand size in bytes.
    pub size: u8,
    /// The result; only its low `size` bytes count.
    pub result: u64,
}

/// What the arithmetic flags follow from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlagState {
    /// How.
    pub kind: FlagKind,
    /// Operand size in bytes.
    pub size: u8,
    /// First value; only its low `size` bytes count.
    pub a: u64,
    /// Second value; only its low `size` bytes count.
    pub b: u64,
    /// The carry.
    pub carry: bool,
    /// An INC or DEC after that.
    pub step: Option<FlagStep>,
    /// CF, if BT or the like set it after that.
    pub cf: Option<bool>,
}

/// In the first byte of a record: `b` is the second byte, sign-extended.
const IMMEDIATE: u8 = 0x80;

/// The record of a kind, with a small `b` in it.
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

/// The third byte of a record, after INC or DEC.
pub(crate) fn step_byte(decrement: bool, size: u8) -> i32 {
    i32::from(1 | u8::from(decrement) << 1 | size << 2)
}

impl FlagState {
    /// Reads what generated code stored.
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
