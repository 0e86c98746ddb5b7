//! Shifts and rotates.

use super::{Done, dst};
use crate::core::{Core, InnerOp, Next, Op};
use crate::flags::{LazyFlags, flag_if};
use crate::registers::Reg;
use crate::width::Width;
use hindsight_regs::rflags::Rflags;

/// Values of the opcode's reg field: this one and the following.
pub(crate) const ROL: u8 = 0;
pub(crate) const ROR: u8 = 1;
pub(crate) const RCL: u8 = 2;
pub(crate) const RCR: u8 = 3;
pub(crate) const SHL: u8 = 4;
pub(crate) const SHR: u8 = 5;
pub(crate) const SAR: u8 = 7;

/// Shifts `a` by `n`, which is masked and not 0. Returns result and flags.
#[inline(always)]
pub(crate) fn eval<T: Width, const OP: u8>(cc: LazyFlags, a: T, n: u32) -> (T, LazyFlags) {
    let bits = T::BITS;
    let (v, top) = (a.zext(), T::BITS - 1);
    match OP {
        SHL => {
            let r = T::from_u64(if n < 64 { v << n } else { 0 });
            let cf = n <= bits && v >> (bits - n) & 1 != 0;
            let of = (r.zext() >> top & 1 != 0) != cf;
            (
                r,
                LazyFlags::result(r, flag_if(cf, Rflags::CF) | flag_if(of, Rflags::OF)),
            )
        }
        SHR => {
            let r = T::from_u64(v.checked_shr(n).unwrap_or(0));
            let cf = v.checked_shr(n - 1).unwrap_or(0) & 1 != 0;
            let of = n == 1 && v >> top & 1 != 0;
            (
                r,
                LazyFlags::result(r, flag_if(cf, Rflags::CF) | flag_if(of, Rflags::OF)),
            )
        }
        SAR => {
            let s = a.sext().cast_signed();
            let r = T::from_u64((s >> n.min(63)).cast_unsigned());
            let cf = s >> (n - 1).min(63) & 1 != 0;
            (r, LazyFlags::result(r, flag_if(cf, Rflags::CF)))
        }
        _ => rotate::<T, OP>(cc, a, n),
    }
}

fn rotate<T: Width, const OP: u8>(cc: LazyFlags, a: T, n: u32) -> (T, LazyFlags) {
    let bits = T::BITS;
    let (v, top) = (u128::from(a.zext()), T::BITS - 1);
    // RCL and RCR rotate through CF: one bit wider.
    let width = if OP >= RCL { bits + 1 } else { bits };
    let m = n % width;
    if OP >= RCL && m == 0 {
        return (a, cc);
    }
    let wide = if OP >= RCL {
        v | u128::from(cc.cf()) << bits
    } else {
        v
    };
    let mask = (1_u128 << width) - 1;
    let turned = match OP {
        ROL | RCL => wide << m | wide >> ((width - m) % 128),
        _ => wide >> m | wide << (width - m),
    };
    let turned = if m == 0 { wide } else { turned } & mask;
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the low bits are the result"
    )]
    let r = T::from_u64(turned as u64);
    let msb = r.zext() >> top & 1 != 0;
    let second = r.zext() >> (top - 1) & 1 != 0;
    let (cf, of) = match OP {
        ROL => (r.zext() & 1 != 0, msb != (r.zext() & 1 != 0)),
        ROR => (msb, msb != second),
        RCL => {
            let cf = turned >> bits & 1 != 0;
            (cf, msb != cf)
        }
        _ => (turned >> bits & 1 != 0, msb != second),
    };
    (r, cc.with(Rflags::CF, cf).with(Rflags::OF, of))
}

#[inline(always)]
pub(crate) fn count<T: Width>(n: u64) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "masked to six bits")]
    let n = (n & if T::SIZE == 8 { 63 } else { 31 }) as u32;
    n
}

#[inline(always)]
fn reg<T: Width, const OP: u8>(c: &mut Core, o: InnerOp<'_>, n: u64) -> Next {
    let n = count::<T>(n);
    let a = c.regs.read::<T>(o.dst);
    if n != 0 {
        let (r, cc) = eval::<T, OP>(c.regs.flags, a, n);
        c.regs.flags = cc;
        c.regs.write(o.dst, r);
    } else {
        // A 32-bit destination is zero-extended even if the count is 0.
        c.regs.write(o.dst, a);
    }
    o.go(c)
}

fn mem<T: Width, const OP: u8>(c: &mut Core, o: &Op, n: u64) -> Done {
    let n = count::<T>(n);
    let lin = dst(c, o, T::SIZE)?;
    let cc = c.regs.flags;
    if n == 0 {
        return c.modify::<T>(lin, false, |a| a).map(|_| ());
    }
    let a = c.modify::<T>(lin, false, |a| eval::<T, OP>(cc, a, n).0)?;
    c.regs.flags = eval::<T, OP>(cc, a, n).1;
    Ok(())
}

pub(crate) fn r_imm<T: Width, const OP: u8>(c: &mut Core, o: InnerOp<'_>) -> Next {
    reg::<T, OP>(c, o, o.imm)
}

/// SHL, SHR or SAR of a register by a number that is not 0, with dead flags.
pub(crate) fn without_flags<T: Width, const OP: u8>(c: &mut Core, o: InnerOp<'_>) -> Next {
    let a = c.regs.read::<T>(o.dst);
    let (r, _) = eval::<T, OP>(c.regs.flags, a, count::<T>(o.imm));
    c.regs.write(o.dst, r);
    o.go(c)
}

pub(crate) fn r_cl<T: Width, const OP: u8>(c: &mut Core, o: InnerOp<'_>) -> Next {
    let n = c.regs.get(Reg::Rcx);
    reg::<T, OP>(c, o, n)
}

pub(crate) fn m_imm<T: Width, const OP: u8>(c: &mut Core, o: &Op) -> Done {
    mem::<T, OP>(c, o, o.imm)
}

pub(crate) fn m_cl<T: Width, const OP: u8>(c: &mut Core, o: &Op) -> Done {
    let n = c.regs.get(Reg::Rcx);
    mem::<T, OP>(c, o, n)
}

/// SHLD and SHRD (`RIGHT`); the count is in `o.imm`, or in CL if that is all ones.
pub(crate) fn double<T: Width, const RIGHT: bool>(c: &mut Core, o: &Op) -> Done {
    let n = count::<T>(if o.imm == u64::MAX {
        c.regs.get(Reg::Rcx)
    } else {
        o.imm
    });
    let b = c.regs.read::<T>(o.src);
    let cc = c.regs.flags;
    let f = |a: T| double_eval::<T, RIGHT>(cc, a, b, n);
    let a = if o.is_mem() {
        let lin = dst(c, o, T::SIZE)?;
        c.modify::<T>(lin, false, |a| f(a).0)?
    } else {
        let a = c.regs.read::<T>(o.dst);
        c.regs.write(o.dst, f(a).0);
        a
    };
    c.regs.flags = f(a).1;
    Ok(())
}

fn double_eval<T: Width, const RIGHT: bool>(cc: LazyFlags, a: T, b: T, n: u32) -> (T, LazyFlags) {
    if n == 0 {
        return (a, cc);
    }
    let bits = T::BITS;
    // With 16-bit operands a count above 16 is undefined; processors repeat the operands.
    let (hi, lo) = if RIGHT { (b, a) } else { (a, b) };
    let wide = u128::from(hi.zext()) << bits | u128::from(lo.zext());
    let wide = if bits == 16 {
        wide | wide << 32 | wide << 64
    } else {
        wide
    };
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the low bits are the result"
    )]
    let (r, cf) = if RIGHT {
        (T::from_u64((wide >> n) as u64), wide >> (n - 1) & 1 != 0)
    } else {
        let total = if bits == 16 { 64 } else { 2 * bits };
        let out = wide >> (total - n) & 1 != 0;
        (T::from_u64((wide >> (total - bits - n)) as u64), out)
    };
    let of = (r.zext() ^ a.zext()) >> (bits - 1) & 1 != 0;
    (
        r,
        LazyFlags::result(r, flag_if(cf, Rflags::CF) | flag_if(of, Rflags::OF)),
    )
}
