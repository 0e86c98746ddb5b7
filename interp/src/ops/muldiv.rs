//! Multiplication, division, and the decimal adjustments.

use super::{Done, read_rm};
use crate::core::Core;
use crate::fault::Fault;
use crate::flags::{LazyFlags, flag_if};
use crate::op::Op;
use crate::word::Word;
use hindsight_regs::rflags::Rflags;
use hindsight_regs::vector::Vector;

fn overflow<T: Word>(low: T, on: bool) -> LazyFlags {
    LazyFlags::result(low, flag_if(on, Rflags::CF | Rflags::OF))
}

/// Puts a double-width product into AX or DX:AX, EDX:EAX, RDX:RAX.
fn put_pair<T: Word>(c: &mut Core, lo: T, hi: T) {
    if T::SIZE == 1 {
        c.put::<u16>(0, u16::from_u64(lo.zext() | hi.zext() << 8));
    } else {
        c.put(0, lo);
        c.put(2, hi);
    }
}

#[expect(clippy::cast_possible_truncation, reason = "halves of a product")]
pub(crate) fn mul<T: Word>(c: &mut Core, o: &Op) -> Done {
    let b = read_rm::<T>(c, o, o.d)?;
    let p = u128::from(c.get::<T>(0).zext()) * u128::from(b.zext());
    let (lo, hi) = (T::from_u64(p as u64), T::from_u64((p >> T::BITS) as u64));
    put_pair(c, lo, hi);
    c.cc = overflow(lo, hi.zext() != 0);
    Ok(())
}

#[expect(clippy::cast_possible_truncation, reason = "halves of a product")]
fn signed_product<T: Word>(a: T, b: T) -> (T, T, bool) {
    let p = i128::from(a.sext().cast_signed()) * i128::from(b.sext().cast_signed());
    let p = p.cast_unsigned();
    let lo = T::from_u64(p as u64);
    let hi = T::from_u64((p >> T::BITS) as u64);
    let over = i128::from(lo.sext().cast_signed()).cast_unsigned() != p;
    (lo, hi, over)
}

pub(crate) fn imul1<T: Word>(c: &mut Core, o: &Op) -> Done {
    let b = read_rm::<T>(c, o, o.d)?;
    let (lo, hi, over) = signed_product(c.get::<T>(0), b);
    put_pair(c, lo, hi);
    c.cc = overflow(lo, over);
    Ok(())
}

pub(crate) fn imul2<T: Word>(c: &mut Core, o: &Op) -> Done {
    let b = read_rm::<T>(c, o, o.s)?;
    let (lo, _, over) = signed_product(c.get::<T>(o.d), b);
    c.put(o.d, lo);
    c.cc = overflow(lo, over);
    Ok(())
}

pub(crate) fn imul3<T: Word>(c: &mut Core, o: &Op) -> Done {
    let b = read_rm::<T>(c, o, o.s)?;
    let (lo, _, over) = signed_product(T::from_u64(o.imm), b);
    c.put(o.d, lo);
    c.cc = overflow(lo, over);
    Ok(())
}

const DIVIDE: Fault = Fault::NoCode(Vector::DE);

fn dividend<T: Word>(c: &Core) -> u128 {
    if T::SIZE == 1 {
        return c.get::<u16>(0).into();
    }
    u128::from(c.get::<T>(2).zext()) << T::BITS | u128::from(c.get::<T>(0).zext())
}

#[expect(clippy::cast_possible_truncation, reason = "checked to fit")]
pub(crate) fn div<T: Word>(c: &mut Core, o: &Op) -> Done {
    let b = u128::from(read_rm::<T>(c, o, o.d)?.zext());
    let a = dividend::<T>(c);
    // Most dividends fit 64 bits, where the host divides much faster.
    let (q, r) = match (u64::try_from(a), u64::try_from(b)) {
        (_, Ok(0)) => return Err(DIVIDE),
        (Ok(a), Ok(b)) => (u128::from(a / b), u128::from(a % b)),
        _ => (a / b, a % b),
    };
    if q >> T::BITS != 0 {
        return Err(DIVIDE);
    }
    put_pair(c, T::from_u64(q as u64), T::from_u64(r as u64));
    Ok(())
}

#[expect(clippy::cast_possible_truncation, reason = "checked to fit")]
pub(crate) fn idiv<T: Word>(c: &mut Core, o: &Op) -> Done {
    let b = i128::from(read_rm::<T>(c, o, o.d)?.sext().cast_signed());
    let shift = 128 - 2 * T::BITS;
    let a = (dividend::<T>(c) << shift).cast_signed() >> shift;
    let (Some(q), Some(r)) = (a.checked_div(b), a.checked_rem(b)) else {
        return Err(DIVIDE);
    };
    let half = 1_i128 << (T::BITS - 1);
    if q < -half || q >= half {
        return Err(DIVIDE);
    }
    let (q, r) = (q.cast_unsigned() as u64, r.cast_unsigned() as u64);
    put_pair(c, T::from_u64(q), T::from_u64(r));
    Ok(())
}

fn al(c: &Core) -> u8 {
    c.get(0)
}

pub(crate) fn aaa(c: &mut Core, _: &Op) -> Done {
    adjust(c, 0x106_u16);
    Ok(())
}

pub(crate) fn aas(c: &mut Core, _: &Op) -> Done {
    adjust(c, 0x106_u16.wrapping_neg());
    Ok(())
}

fn adjust(c: &mut Core, by: u16) {
    let mut ax: u16 = c.get(0);
    let carry = ax & 0xf > 9 || c.cc.rflags().contains(Rflags::AF);
    if carry {
        ax = ax.wrapping_add(by);
    }
    ax &= 0xff0f;
    c.put(0, ax);
    c.cc = LazyFlags::result(al(c), flag_if(carry, Rflags::CF | Rflags::AF));
}

pub(crate) fn aad(c: &mut Core, o: &Op) -> Done {
    let ax: u16 = c.get(0);
    let v = u64::from(ax) + u64::from(ax >> 8) * (o.imm & 0xff);
    let v = u8::from_u64(v);
    c.put::<u16>(0, v.into());
    c.cc = LazyFlags::result(v, Rflags::empty());
    Ok(())
}

pub(crate) fn aam(c: &mut Core, o: &Op) -> Done {
    let base = u8::from_u64(o.imm);
    let al = al(c);
    let (Some(q), Some(r)) = (al.checked_div(base), al.checked_rem(base)) else {
        return Err(DIVIDE);
    };
    c.put::<u16>(0, u16::from(q) << 8 | u16::from(r));
    c.cc = LazyFlags::result(r, Rflags::empty());
    Ok(())
}

pub(crate) fn daa(c: &mut Core, _: &Op) -> Done {
    decimal(c, u8::wrapping_add);
    Ok(())
}

pub(crate) fn das(c: &mut Core, _: &Op) -> Done {
    let old = al(c);
    let before = c.cc.rflags();
    decimal(c, u8::wrapping_sub);
    // DAS also carries when the low adjustment borrows.
    if (old & 0xf > 9 || before.contains(Rflags::AF)) && old < 6 {
        c.cc = c.cc.with(Rflags::CF, true);
    }
    Ok(())
}

fn decimal(c: &mut Core, f: fn(u8, u8) -> u8) {
    let old = al(c);
    let before = c.cc.rflags();
    let mut v = old;
    let mut set = Rflags::empty();
    if old & 0xf > 9 || before.contains(Rflags::AF) {
        v = f(v, 6);
        set |= Rflags::AF;
    }
    if old > 0x99 || before.contains(Rflags::CF) {
        v = f(v, 0x60);
        set |= Rflags::CF;
    }
    c.put(0, v);
    c.cc = LazyFlags::result(v, set);
}

/// LAHF.
pub(crate) fn lahf(c: &mut Core, _: &Op) -> Done {
    let v = u8::from_u64((c.cc.rflags() | Rflags::FIXED).bits());
    c.put(crate::op::HIGH, v);
    Ok(())
}

/// SAHF.
pub(crate) fn sahf(c: &mut Core, _: &Op) -> Done {
    let ah: u8 = c.get(crate::op::HIGH);
    let kept = c.cc.rflags() & Rflags::OF;
    let loaded = Rflags::from_bits_retain(ah.into()) & !Rflags::OF;
    c.cc = LazyFlags::explicit(kept | loaded);
    Ok(())
}
