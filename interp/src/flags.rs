//! The six arithmetic flags, kept lazily.
//!
//! Operands are stored sign-extended, so that one formula serves every width.

#![expect(
    clippy::cast_possible_truncation,
    reason = "parity looks at the low byte"
)]

use crate::word::Word;

pub(crate) const CF: u64 = 1;
pub(crate) const PF: u64 = 1 << 2;
pub(crate) const AF: u64 = 1 << 4;
pub(crate) const ZF: u64 = 1 << 6;
pub(crate) const SF: u64 = 1 << 7;
pub(crate) const TF: u64 = 1 << 8;
pub(crate) const IF: u64 = 1 << 9;
pub(crate) const DF: u64 = 1 << 10;
pub(crate) const OF: u64 = 1 << 11;
pub(crate) const IOPL: u64 = 3 << 12;
pub(crate) const NT: u64 = 1 << 14;
pub(crate) const RF: u64 = 1 << 16;
pub(crate) const VM: u64 = 1 << 17;
pub(crate) const AC: u64 = 1 << 18;
pub(crate) const VIF: u64 = 1 << 19;
pub(crate) const VIP: u64 = 1 << 20;
pub(crate) const ID: u64 = 1 << 21;
/// CF, PF, AF, ZF, SF, OF.
pub(crate) const ARITH: u64 = CF | PF | AF | ZF | SF | OF;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
enum Kind {
    /// All six flags are in `a`.
    Explicit,
    /// `a + b (+ carry) = r`.
    Add,
    /// `a - b (- borrow) = r`.
    Sub,
    /// CF, OF, AF are in `a`; SF, ZF, PF follow from `r`.
    Result,
}

/// The arithmetic flags, as the operation that made them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flags {
    kind: Kind,
    a: u64,
    b: u64,
    r: u64,
}

impl Default for Flags {
    fn default() -> Self {
        Self::explicit(0)
    }
}

fn parity(r: u64) -> bool {
    (r as u8).count_ones() & 1 == 0
}

impl Flags {
    /// From the bits of RFLAGS.
    #[inline(always)]
    pub(crate) const fn explicit(bits: u64) -> Self {
        Self {
            kind: Kind::Explicit,
            a: bits & ARITH,
            b: 0,
            r: 0,
        }
    }

    /// After an addition with or without carry.
    #[inline(always)]
    pub(crate) fn add<T: Word>(a: T, b: T, r: T) -> Self {
        Self {
            kind: Kind::Add,
            a: a.sext(),
            b: b.sext(),
            r: r.sext(),
        }
    }

    /// After a subtraction with or without borrow.
    #[inline(always)]
    pub(crate) fn sub<T: Word>(a: T, b: T, r: T) -> Self {
        Self {
            kind: Kind::Sub,
            a: a.sext(),
            b: b.sext(),
            r: r.sext(),
        }
    }

    /// SF, ZF, PF from a result; `rest` holds CF, OF and AF.
    #[inline(always)]
    pub(crate) fn result<T: Word>(r: T, rest: u64) -> Self {
        Self {
            kind: Kind::Result,
            a: rest,
            b: 0,
            r: r.sext(),
        }
    }

    #[inline(always)]
    pub(crate) fn cf(self) -> bool {
        let Self { a, b, r, .. } = self;
        match self.kind {
            Kind::Explicit | Kind::Result => a & CF != 0,
            Kind::Add => ((a & b) | ((a | b) & !r)) >> 63 != 0,
            Kind::Sub => ((!a & b) | ((!a | b) & r)) >> 63 != 0,
        }
    }

    #[inline(always)]
    pub(crate) fn zf(self) -> bool {
        match self.kind {
            Kind::Explicit => self.a & ZF != 0,
            _ => self.r == 0,
        }
    }

    #[inline(always)]
    fn sf(self) -> bool {
        match self.kind {
            Kind::Explicit => self.a & SF != 0,
            _ => self.r >> 63 != 0,
        }
    }

    #[inline(always)]
    fn of(self) -> bool {
        let Self { a, b, r, .. } = self;
        match self.kind {
            Kind::Explicit | Kind::Result => a & OF != 0,
            Kind::Add => ((a ^ r) & (b ^ r)) >> 63 != 0,
            Kind::Sub => ((a ^ b) & (a ^ r)) >> 63 != 0,
        }
    }

    fn pf(self) -> bool {
        match self.kind {
            Kind::Explicit => self.a & PF != 0,
            _ => parity(self.r),
        }
    }

    fn af(self) -> bool {
        match self.kind {
            Kind::Explicit | Kind::Result => self.a & AF != 0,
            Kind::Add | Kind::Sub => (self.a ^ self.b ^ self.r) & 0x10 != 0,
        }
    }

    /// The six bits as in RFLAGS.
    pub(crate) fn bits(self) -> u64 {
        if self.kind == Kind::Explicit {
            return self.a;
        }
        let bit = |on: bool, mask: u64| if on { mask } else { 0 };
        bit(self.cf(), CF)
            | bit(self.pf(), PF)
            | bit(self.af(), AF)
            | bit(self.zf(), ZF)
            | bit(self.sf(), SF)
            | bit(self.of(), OF)
    }

    /// The condition `cc`, as encoded in Jcc, SETcc and CMOVcc.
    #[inline(always)]
    pub(crate) fn condition<const CC: u8>(self) -> bool {
        let Self { kind, a, r, .. } = self;
        let yes = match CC >> 1 {
            0 => self.of(),
            1 => self.cf(),
            2 => self.zf(),
            3 => match kind {
                Kind::Explicit => a & (CF | ZF) != 0,
                _ => r == 0 || self.cf(),
            },
            4 => self.sf(),
            5 => self.pf(),
            6 => self.sf() != self.of(),
            _ => self.zf() || self.sf() != self.of(),
        };
        yes ^ (CC & 1 != 0)
    }
}
