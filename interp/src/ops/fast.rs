//! Fast handlers for 64-bit mode with 64-bit addresses, and 32-bit open segments.
//!
//! They access memory through the TLB only. On a miss they call the general handler, which also
//! enters the page into the TLB.

use super::alu::{self, Alu, eval};
use super::{mov, slowly};
use crate::core::{Core, InnerOp, Next, Op};
use crate::width::Width;

/// Computes the linear address of a memory operand.
pub(crate) trait Addressing: 'static {
    fn of(c: &Core, o: &Op) -> u64;
}

/// A base register, in a segment whose base is 0.
pub(crate) struct Based;
/// A base and an index register, in a segment whose base is 0.
pub(crate) struct Indexed;
/// Any form.
pub(crate) struct Anywhere;
/// Any form in 32-bit code, in an [open](crate::seg::is_open) segment.
///
/// An operand that extends beyond the end of the segment crosses a page; the general handler
/// executes it.
pub(crate) struct Open;

impl Addressing for Based {
    #[inline(always)]
    fn of(c: &Core, o: &Op) -> u64 {
        c.regs.get(o.base).wrapping_add(o.disp)
    }
}

impl Addressing for Indexed {
    #[inline(always)]
    fn of(c: &Core, o: &Op) -> u64 {
        Based::of(c, o).wrapping_add(c.regs.get(o.index) << (o.scale & 3))
    }
}

impl Addressing for Anywhere {
    #[inline(always)]
    fn of(c: &Core, o: &Op) -> u64 {
        c.ea64(o)
    }
}

impl Addressing for Open {
    #[inline(always)]
    fn of(c: &Core, o: &Op) -> u64 {
        c.ea64(o) & 0xffff_ffff
    }
}

pub(crate) fn alu_rm<P: Addressing, O: Alu, T: Width>(c: &mut Core, o: InnerOp<'_>) -> Next {
    let Some(b) = c.fast_read::<T>(P::of(c, &o)) else {
        return slowly(c, o, alu::rm::<O::WithFlags, T>);
    };
    let a = c.regs.read::<T>(o.dst);
    let r = eval::<O, T>(c, a, b);
    if O::FLAGS {
        c.regs.flags = O::flags(a, b, r);
    }
    if O::WRITES {
        c.regs.write(o.dst, r);
    }
    o.go(c)
}

#[inline(always)]
fn alu_memory<P: Addressing, O: Alu, T: Width>(c: &mut Core, o: &Op, b: T) -> bool {
    let lin = P::of(c, o);
    if !O::WRITES {
        let Some(a) = c.fast_read::<T>(lin) else {
            return false;
        };
        c.regs.flags = O::flags(a, b, eval::<O, T>(c, a, b));
        return true;
    }
    let Some(target) = c.fast_modify::<T>(lin) else {
        return false;
    };
    let a = target.load();
    let r = eval::<O, T>(c, a, b);
    target.store(r);
    if O::FLAGS {
        c.regs.flags = O::flags(a, b, r);
    }
    true
}

pub(crate) fn alu_mr<P: Addressing, O: Alu, T: Width>(c: &mut Core, o: InnerOp<'_>) -> Next {
    let b = c.regs.read::<T>(o.src);
    if alu_memory::<P, O, T>(c, &o, b) {
        o.go(c)
    } else {
        slowly(c, o, alu::mr::<O::WithFlags, T>)
    }
}

pub(crate) fn alu_mi<P: Addressing, O: Alu, T: Width>(c: &mut Core, o: InnerOp<'_>) -> Next {
    let b = T::from_u64(o.imm);
    if alu_memory::<P, O, T>(c, &o, b) {
        o.go(c)
    } else {
        slowly(c, o, alu::mi::<O::WithFlags, T>)
    }
}

pub(crate) fn mov_rm<T: Width, P: Addressing>(c: &mut Core, o: InnerOp<'_>) -> Next {
    match c.fast_read::<T>(P::of(c, &o)) {
        Some(v) => {
            c.regs.write(o.dst, v);
            o.go(c)
        }
        None => slowly(c, o, mov::rm::<T>),
    }
}

pub(crate) fn mov_mr<T: Width, P: Addressing>(c: &mut Core, o: InnerOp<'_>) -> Next {
    if c.fast_write(P::of(c, &o), c.regs.read::<T>(o.src)) {
        o.go(c)
    } else {
        slowly(c, o, mov::mr::<T>)
    }
}

pub(crate) fn mov_mi<T: Width, P: Addressing>(c: &mut Core, o: InnerOp<'_>) -> Next {
    if c.fast_write(P::of(c, &o), T::from_u64(o.imm)) {
        o.go(c)
    } else {
        slowly(c, o, mov::mi::<T>)
    }
}

/// MOVZX, MOVSX, MOVSXD from memory to a 32- or 64-bit register.
pub(crate) fn extend_rm<P: Addressing, S: Width, D: Width, const SIGN: bool>(
    c: &mut Core,
    o: InnerOp<'_>,
) -> Next {
    match c.fast_read::<S>(P::of(c, &o)) {
        Some(v) => {
            c.regs
                .write(o.dst, D::from_u64(if SIGN { v.sext() } else { v.zext() }));
            o.go(c)
        }
        None => slowly(c, o, mov::extend::<S, SIGN>),
    }
}
