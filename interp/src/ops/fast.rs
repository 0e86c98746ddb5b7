//! Fast forms for 64-bit mode with 64-bit addresses: memory through the TLB only. On a miss the
//! general form does the work, and enters the page for the next time.

use super::alu::{self, Alu, eval};
use super::{mov, slowly};
use crate::core::Core;
use crate::op::{Next, Op};
use crate::word::Word;

pub(crate) fn alu_rm<O: Alu, T: Word>(c: &mut Core, o: &Op) -> Next {
    let Some(b) = c.fast_read::<T>(c.ea64(o)) else {
        return slowly(c, o, alu::rm::<O, T>);
    };
    let a = c.get::<T>(o.d);
    let r = eval::<O, T>(c, a, b);
    c.cc = O::flags(a, b, r);
    if O::WRITES {
        c.put(o.d, r);
    }
    o.go(c)
}

#[inline(always)]
fn alu_memory<O: Alu, T: Word>(c: &mut Core, o: &Op, b: T) -> bool {
    let lin = c.ea64(o);
    if !O::WRITES {
        let Some(a) = c.fast_read::<T>(lin) else {
            return false;
        };
        c.cc = O::flags(a, b, eval::<O, T>(c, a, b));
        return true;
    }
    let Some(place) = c.fast_modify::<T>(lin) else {
        return false;
    };
    let a = place.get();
    let r = eval::<O, T>(c, a, b);
    place.set(r);
    c.cc = O::flags(a, b, r);
    true
}

pub(crate) fn alu_mr<O: Alu, T: Word>(c: &mut Core, o: &Op) -> Next {
    let b = c.get::<T>(o.s);
    if alu_memory::<O, T>(c, o, b) {
        o.go(c)
    } else {
        slowly(c, o, alu::mr::<O, T>)
    }
}

pub(crate) fn alu_mi<O: Alu, T: Word>(c: &mut Core, o: &Op) -> Next {
    let b = T::from_u64(o.imm);
    if alu_memory::<O, T>(c, o, b) {
        o.go(c)
    } else {
        slowly(c, o, alu::mi::<O, T>)
    }
}

pub(crate) fn mov_rm<T: Word>(c: &mut Core, o: &Op) -> Next {
    match c.fast_read::<T>(c.ea64(o)) {
        Some(v) => {
            c.put(o.d, v);
            o.go(c)
        }
        None => slowly(c, o, mov::rm::<T>),
    }
}

pub(crate) fn mov_mr<T: Word>(c: &mut Core, o: &Op) -> Next {
    if c.fast_write(c.ea64(o), c.get::<T>(o.s)) {
        o.go(c)
    } else {
        slowly(c, o, mov::mr::<T>)
    }
}

pub(crate) fn mov_mi<T: Word>(c: &mut Core, o: &Op) -> Next {
    if c.fast_write(c.ea64(o), T::from_u64(o.imm)) {
        o.go(c)
    } else {
        slowly(c, o, mov::mi::<T>)
    }
}

/// MOVZX, MOVSX, MOVSXD from memory to a 32- or 64-bit register.
pub(crate) fn extend_rm<S: Word, D: Word, const SIGN: bool>(c: &mut Core, o: &Op) -> Next {
    match c.fast_read::<S>(c.ea64(o)) {
        Some(v) => {
            c.put(o.d, D::from_u64(if SIGN { v.sext() } else { v.zext() }));
            o.go(c)
        }
        None => slowly(c, o, mov::extend::<S, SIGN>),
    }
}
