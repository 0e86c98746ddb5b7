//! Multiplication, division, and the decimal adjustments.

use super::{Done, read_rm};
use crate::core::{Core, Op};
use crate::fault::Fault;
use crate::flags::{LazyFlags, flag_if};
use crate::registers::Reg;
use crate::width::Width;
use hindsight_regs::rflags::Rflags;
use hindsight_regs::vector::Vector;

pub(crate) fn overflow<T: Width>(low: T, on: bool) -> LazyFlags {
    LazyFlags::result(low, flag_if(on, Rflags::CF | Rflags::OF))
}

/// Puts a double-width product into AX or DX:AX, EDX:EAX, RDX:RAX.
fn put_pair<T: Width>(c: &mut Core, lo: T, hi: T) {
    if T::SIZE == 1 {
        c.regs
            .write::<u16>(Reg::Rax, u16::from_u64(lo.zext() | hi.zext() << 8));
    } else {
        c.regs.write(Reg::Rax, lo);
        c.regs.write(Reg::Rdx, hi);
    }
}

#[expect(clippy::cast_possible_truncation, reason = "halves of a product")]
pub(crate) fn mul<T: Width>(c: &mut Core, o: &Op) -> Done {
    let b = read_rm::<T>(c, o, o.dst)?;
    let p = u128::from(c.regs.read::<T>(Reg::Rax).zext()) * u128::from(b.zext());
    let (lo, hi) = (T::from_u64(p as u64), T::from_u64((p >> T::BITS) as u64));
    put_pair(c, lo, hi);
    c.regs.flags = overflow(lo, hi.zext() != 0);
    Ok(())
}

#[expect(clippy::cast_possible_truncation, reason = "halves of a product")]
fn signed_product<T: Width>(a: T, b: T) -> (T, T, bool) {
    let p = i128::from(a.sext().cast_signed()) * i128::from(b.sext().cast_signed());
    let p = p.cast_unsigned();
    let lo = T::from_u64(p as u64);
    let hi = T::from_u64((p >> T::BITS) as u64);
    let over = i128::from(lo.sext().cast_signed()).cast_unsigned() != p;
    (lo, hi, over)
}

pub(crate) fn imul1<T: Width>(c: &mut Core, o: &Op) -> Done {
    let b = read_rm::<T>(c, o, o.dst)?;
    let (lo, hi, over) = signed_product(c.regs.read::<T>(Reg::Rax), b);
    put_pair(c, lo, hi);
    c.regs.flags = overflow(lo, over);
    Ok(())
}

pub(crate) fn imul2<T: Width>(c: &mut Core, o: &Op) -> Done {
    let b = read_rm::<T>(c, o, o.src)?;
    let (lo, _, over) = signed_product(c.regs.read::<T>(o.dst), b);
    c.regs.write(o.dst, lo);
    c.regs.flags = overflow(lo, over);
    Ok(())
}

pub(crate) fn imul3<T: Width>(c: &mut Core, o: &Op) -> Done {
    let b = read_rm::<T>(c, o, o.src)?;
    let (lo, _, over) = signed_product(T::from_u64(o.imm), b);
    c.regs.write(o.dst, lo);
    c.regs.flags = overflow(lo, over);
    Ok(())
}

const DIVIDE: Fault = Fault::NoCode(Vector::DE);

fn dividend<T: Width>(c: &Core) -> u128 {
    if T::SIZE == 1 {
        return c.regs.read::<u16>(Reg::Rax).into();
    }
    u128::from(c.regs.read::<T>(Reg::Rdx).zext()) << T::BITS
        | u128::from(c.regs.read::<T>(Reg::Rax).zext())
}

#[expect(clippy::cast_possible_truncation, reason = "checked to fit")]
pub(crate) fn div<T: Width>(c: &mut Core, o: &Op) -> Done {
    let b = u128::from(read_rm::<T>(c, o, o.dst)?.zext());
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
pub(crate) fn idiv<T: Width>(c: &mut Core, o: &Op) -> Done {
    let b = i128::from(read_rm::<T>(c, o, o.dst)?.sext().cast_signed());
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
    c.regs.read(Reg::Rax)
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
    let mut ax: u16 = c.regs.read(Reg::Rax);
    let carry = ax & 0xf > 9 || c.regs.flags.rflags().contains(Rflags::AF);
    if carry {
        ax = ax.wrapping_add(by);
    }
    ax &= 0xff0f;
    c.regs.write(Reg::Rax, ax);
    c.regs.flags = LazyFlags::result(al(c), flag_if(carry, Rflags::CF | Rflags::AF));
}

pub(crate) fn aad(c: &mut Core, o: &Op) -> Done {
    let ax: u16 = c.regs.read(Reg::Rax);
    let v = u64::from(ax) + u64::from(ax >> 8) * (o.imm & 0xff);
    let v = u8::from_u64(v);
    c.regs.write::<u16>(Reg::Rax, v.into());
    c.regs.flags = LazyFlags::result(v, Rflags::empty());
    Ok(())
}

pub(crate) fn aam(c: &mut Core, o: &Op) -> Done {
    let base = u8::from_u64(o.imm);
    let al = al(c);
    let (Some(q), Some(r)) = (al.checked_div(base), al.checked_rem(base)) else {
        return Err(DIVIDE);
    };
    c.regs
        .write::<u16>(Reg::Rax, u16::from(q) << 8 | u16::from(r));
    c.regs.flags = LazyFlags::result(r, Rflags::empty());
    Ok(())
}

pub(crate) fn daa(c: &mut Core, _: &Op) -> Done {
    decimal(c, u8::wrapping_add);
    Ok(())
}

pub(crate) fn das(c: &mut Core, _: &Op) -> Done {
    let old = al(c);
    let before = c.regs.flags.rflags();
    decimal(c, u8::wrapping_sub);
    // DAS also carries when the low adjustment borrows.
    if (old & 0xf > 9 || before.contains(Rflags::AF)) && old < 6 {
        c.regs.flags = c.regs.flags.with(Rflags::CF, true);
    }
    Ok(())
}

fn decimal(c: &mut Core, f: fn(u8, u8) -> u8) {
    let old = al(c);
    let before = c.regs.flags.rflags();
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
    c.regs.write(Reg::Rax, v);
    c.regs.flags = LazyFlags::result(v, set);
}

/// LAHF.
pub(crate) fn lahf(c: &mut Core, _: &Op) -> Done {
    let v = u8::from_u64((c.regs.flags.rflags() | Rflags::FIXED).bits());
    c.regs.write(Reg::Ah, v);
    Ok(())
}

/// SAHF.
pub(crate) fn sahf(c: &mut Core, _: &Op) -> Done {
    let ah: u8 = c.regs.read(Reg::Ah);
    let overflow = c.regs.flags.rflags() & Rflags::OF;
    let loaded = Rflags::from_bits_retain(ah.into()) & !Rflags::OF;
    c.regs.flags = LazyFlags::explicit(overflow | loaded);
    Ok(())
}
