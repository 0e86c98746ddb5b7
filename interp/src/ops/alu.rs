//! Addition, subtraction, logic and similar operations.

use super::{Done, dst, load, modify, read_rm, store};
use crate::core::{Core, InnerOp, Next, Op};
use crate::fault::Fault;
use crate::flags::{LazyFlags, flag_if};
use crate::registers::Reg;
use crate::width::Width;
use hindsight_regs::rflags::Rflags;
use std::marker::PhantomData;

/// A two-operand operation.
pub(crate) trait Alu: 'static {
    /// Whether the destination is written.
    const WRITES: bool = true;
    /// Whether CF is an input.
    const CARRY: bool = false;
    /// Whether the flags are set.
    const FLAGS: bool = true;
    /// The same operation with its flags.
    type WithFlags: Alu;
    fn eval(a: u64, b: u64, cf: u64) -> u64;
    fn flags<T: Width>(a: T, b: T, r: T) -> LazyFlags;
}

macro_rules! alu {
    ($name:ident, $writes:expr, $carry:expr, |$a:ident, $b:ident, $c:ident| $eval:expr, $flags:ident) => {
        #[derive(Debug)]
        pub(crate) struct $name;
        impl Alu for $name {
            const WRITES: bool = $writes;
            const CARRY: bool = $carry;
            type WithFlags = Self;
            #[inline(always)]
            fn eval($a: u64, $b: u64, $c: u64) -> u64 {
                $eval
            }
            #[inline(always)]
            fn flags<T: Width>(a: T, b: T, r: T) -> LazyFlags {
                $flags(a, b, r)
            }
        }
    };
}

/// An operation whose flags are dead: they are overwritten before anything reads them.
///
/// A handler that may leave the block afterwards, for a breakpoint or changed code, must use
/// [`Alu::WithFlags`].
#[derive(Debug)]
pub(crate) struct NoFlags<O>(PhantomData<O>);

impl<O: Alu> Alu for NoFlags<O> {
    const WRITES: bool = O::WRITES;
    const CARRY: bool = O::CARRY;
    const FLAGS: bool = false;
    type WithFlags = O;
    #[inline(always)]
    fn eval(a: u64, b: u64, cf: u64) -> u64 {
        O::eval(a, b, cf)
    }
    #[inline(always)]
    fn flags<T: Width>(a: T, b: T, r: T) -> LazyFlags {
        O::flags(a, b, r)
    }
}

#[inline(always)]
fn added<T: Width>(a: T, b: T, r: T) -> LazyFlags {
    LazyFlags::add(a, b, r)
}
#[inline(always)]
fn subtracted<T: Width>(a: T, b: T, r: T) -> LazyFlags {
    LazyFlags::sub(a, b, r)
}
#[inline(always)]
fn logical<T: Width>(_: T, _: T, r: T) -> LazyFlags {
    LazyFlags::result(r, Rflags::empty())
}

alu!(Add, true, false, |a, b, _c| a.wrapping_add(b), added);
alu!(Or, true, false, |a, b, _c| a | b, logical);
alu!(
    Adc,
    true,
    true,
    |a, b, c| a.wrapping_add(b).wrapping_add(c),
    added
);
alu!(
    Sbb,
    true,
    true,
    |a, b, c| a.wrapping_sub(b).wrapping_sub(c),
    subtracted
);
alu!(And, true, false, |a, b, _c| a & b, logical);
alu!(Sub, true, false, |a, b, _c| a.wrapping_sub(b), subtracted);
alu!(Xor, true, false, |a, b, _c| a ^ b, logical);
alu!(Cmp, false, false, |a, b, _c| a.wrapping_sub(b), subtracted);
alu!(Test, false, false, |a, b, _c| a & b, logical);

#[inline(always)]
pub(crate) fn eval<O: Alu, T: Width>(c: &Core, a: T, b: T) -> T {
    let carry = if O::CARRY {
        c.regs.flags.cf().into()
    } else {
        0
    };
    T::from_u64(O::eval(a.zext(), b.zext(), carry))
}

/// Register, register.
pub(crate) fn rr<O: Alu, T: Width>(c: &mut Core, o: InnerOp<'_>) -> Next {
    let (a, b) = (c.regs.read::<T>(o.dst), c.regs.read::<T>(o.src));
    let r = eval::<O, T>(c, a, b);
    if O::FLAGS {
        c.regs.flags = O::flags(a, b, r);
    }
    if O::WRITES {
        c.regs.write(o.dst, r);
    }
    o.go(c)
}

/// Register, immediate.
pub(crate) fn ri<O: Alu, T: Width>(c: &mut Core, o: InnerOp<'_>) -> Next {
    let (a, b) = (c.regs.read::<T>(o.dst), T::from_u64(o.imm));
    let r = eval::<O, T>(c, a, b);
    if O::FLAGS {
        c.regs.flags = O::flags(a, b, r);
    }
    if O::WRITES {
        c.regs.write(o.dst, r);
    }
    o.go(c)
}

/// Register, memory.
pub(crate) fn rm<O: Alu, T: Width>(c: &mut Core, o: &Op) -> Done {
    let b: T = load(c, o)?;
    let a = c.regs.read::<T>(o.dst);
    let r = eval::<O, T>(c, a, b);
    c.regs.flags = O::flags(a, b, r);
    if O::WRITES {
        c.regs.write(o.dst, r);
    }
    Ok(())
}

fn memory<O: Alu, T: Width>(c: &mut Core, o: &Op, b: T) -> Done {
    let carry = if O::CARRY {
        c.regs.flags.cf().into()
    } else {
        0
    };
    let f = |a: T| T::from_u64(O::eval(a.zext(), b.zext(), carry));
    let a = if O::WRITES {
        modify(c, o, f)?
    } else {
        load(c, o)?
    };
    c.regs.flags = O::flags(a, b, f(a));
    Ok(())
}

/// Memory, register.
pub(crate) fn mr<O: Alu, T: Width>(c: &mut Core, o: &Op) -> Done {
    let b = c.regs.read::<T>(o.src);
    memory::<O, T>(c, o, b)
}

/// Memory, immediate.
pub(crate) fn mi<O: Alu, T: Width>(c: &mut Core, o: &Op) -> Done {
    memory::<O, T>(c, o, T::from_u64(o.imm))
}

/// INC and DEC keep CF.
#[inline(always)]
pub(crate) fn step_flags<T: Width, const DEC: bool>(c: &Core, a: T, r: T) -> LazyFlags {
    flags_of_step::<T, DEC>(c.regs.flags, a, r)
}

/// Returns the flags after INC or DEC of `a` with the result `r`.
///
/// `before` are the flags before it, whose CF stays.
#[inline(always)]
pub(crate) fn flags_of_step<T: Width, const DEC: bool>(before: LazyFlags, a: T, r: T) -> LazyFlags {
    let half = 1_u64 << (T::BITS - 1);
    let overflow = r.zext() == if DEC { half - 1 } else { half };
    let adjust = Rflags::from_bits_retain((a.zext() ^ r.zext()) & Rflags::AF.bits());
    let carry = flag_if(before.cf(), Rflags::CF);
    LazyFlags::result(r, carry | flag_if(overflow, Rflags::OF) | adjust)
}

#[inline(always)]
pub(crate) fn step<T: Width, const DEC: bool>(a: T) -> T {
    T::from_u64(if DEC {
        a.zext().wrapping_sub(1)
    } else {
        a.zext().wrapping_add(1)
    })
}

/// INC or DEC of a register; the flags are set if `FLAGS`.
pub(crate) fn step_r<T: Width, const DEC: bool, const FLAGS: bool>(
    c: &mut Core,
    o: InnerOp<'_>,
) -> Next {
    let a = c.regs.read::<T>(o.dst);
    let r = step::<T, DEC>(a);
    if FLAGS {
        c.regs.flags = step_flags::<T, DEC>(c, a, r);
    }
    c.regs.write(o.dst, r);
    o.go(c)
}

pub(crate) fn inc_m<T: Width>(c: &mut Core, o: &Op) -> Done {
    let a: T = modify(c, o, step::<T, false>)?;
    c.regs.flags = step_flags::<T, false>(c, a, step::<T, false>(a));
    Ok(())
}

pub(crate) fn dec_m<T: Width>(c: &mut Core, o: &Op) -> Done {
    let a: T = modify(c, o, step::<T, true>)?;
    c.regs.flags = step_flags::<T, true>(c, a, step::<T, true>(a));
    Ok(())
}

fn negated<T: Width>(a: T) -> T {
    T::from_u64(a.zext().wrapping_neg())
}

fn inverted<T: Width>(a: T) -> T {
    T::from_u64(!a.zext())
}

pub(crate) fn neg_r<T: Width>(c: &mut Core, o: InnerOp<'_>) -> Next {
    let a = c.regs.read::<T>(o.dst);
    c.regs.flags = LazyFlags::sub(T::from_u64(0), a, negated(a));
    c.regs.write(o.dst, negated(a));
    o.go(c)
}

pub(crate) fn neg_m<T: Width>(c: &mut Core, o: &Op) -> Done {
    let a: T = modify(c, o, negated)?;
    c.regs.flags = LazyFlags::sub(T::from_u64(0), a, negated(a));
    Ok(())
}

pub(crate) fn not_r<T: Width>(c: &mut Core, o: InnerOp<'_>) -> Next {
    let a = c.regs.read::<T>(o.dst);
    c.regs.write(o.dst, inverted(a));
    o.go(c)
}

pub(crate) fn not_m<T: Width>(c: &mut Core, o: &Op) -> Done {
    modify::<T>(c, o, inverted).map(|_| ())
}

/// XADD with a register or memory.
pub(crate) fn xadd<T: Width>(c: &mut Core, o: &Op) -> Done {
    let b = c.regs.read::<T>(o.src);
    let sum = |a: T| T::from_u64(a.zext().wrapping_add(b.zext()));
    let a = if o.is_mem() {
        modify(c, o, sum)?
    } else {
        c.regs.read(o.dst)
    };
    c.regs.write(o.src, a);
    if !o.is_mem() {
        c.regs.write(o.dst, sum(a));
    }
    c.regs.flags = LazyFlags::add(a, b, sum(a));
    Ok(())
}

/// CMPXCHG: always writes its destination.
pub(crate) fn cmpxchg<T: Width>(c: &mut Core, o: &Op) -> Done {
    let acc = c.regs.read::<T>(Reg::Rax);
    let new = c.regs.read::<T>(o.src);
    let mem = o.is_mem();
    let old = if mem {
        modify(c, o, |a: T| if a == acc { new } else { a })?
    } else {
        c.regs.read(o.dst)
    };
    let r = T::from_u64(acc.zext().wrapping_sub(old.zext()));
    c.regs.flags = LazyFlags::sub(acc, old, r);
    if old == acc {
        if !mem {
            c.regs.write(o.dst, new);
        }
    } else {
        c.regs.write(Reg::Rax, old);
    }
    Ok(())
}

/// CMPXCHG8B and, with `T` = u64, CMPXCHG16B.
pub(crate) fn cmpxchg_pair<T: Width>(c: &mut Core, o: &Op) -> Done {
    let lin = dst(c, o, 2 * T::SIZE)?;
    if T::SIZE == 8 && lin & 15 != 0 {
        return Err(Fault::GP);
    }
    let expected = (c.regs.read::<T>(Reg::Rax), c.regs.read::<T>(Reg::Rdx));
    let new = (c.regs.read::<T>(Reg::Rbx), c.regs.read::<T>(Reg::Rcx));
    let equal = exchange_pair(c, lin, expected, new)?;
    c.regs.flags = c.regs.flags.with(Rflags::ZF, equal.is_none());
    if let Some((lo, hi)) = equal {
        c.regs.write(Reg::Rax, lo);
        c.regs.write(Reg::Rdx, hi);
    }
    Ok(())
}

/// Compares, and writes if equal. Returns the old pair if it differed.
fn exchange_pair<T: Width>(
    c: &mut Core,
    lin: u64,
    expected: (T, T),
    new: (T, T),
) -> Result<Option<(T, T)>, Fault> {
    if T::SIZE == 4 {
        let join = |p: (T, T)| p.0.zext() | p.1.zext() << 32;
        let expected_pair = join(expected);
        let old = c.modify::<u64>(
            lin,
            true,
            |v| if v == expected_pair { join(new) } else { v },
        )?;
        let pair = (T::from_u64(old), T::from_u64(old >> 32));
        return Ok((old != expected_pair).then_some(pair));
    }
    // The lock serves accesses for which the host's own instruction cannot be used.
    let memory = std::sync::Arc::clone(c.memory.shared_memory());
    let _guard = memory
        .split_lock
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let old = c.modify_pair(
        lin,
        (expected.0.zext(), expected.1.zext()),
        (new.0.zext(), new.1.zext()),
    )?;
    let pair = (T::from_u64(old.0), T::from_u64(old.1));
    Ok((pair != expected).then_some(pair))
}

/// XCHG with a register or memory; memory is always locked.
pub(crate) fn xchg<T: Width>(c: &mut Core, o: &Op) -> Done {
    let b = c.regs.read::<T>(o.src);
    if o.is_mem() {
        let lin = dst(c, o, T::SIZE)?;
        let a = c.modify(lin, true, |_| b)?;
        c.regs.write(o.src, a);
    } else {
        let a = c.regs.read::<T>(o.dst);
        c.regs.write(o.dst, b);
        c.regs.write(o.src, a);
    }
    Ok(())
}

/// MOVBE and BSWAP differ only in where the value is.
pub(crate) fn movbe_load<T: Width>(c: &mut Core, o: &Op) -> Done {
    let v: T = load(c, o)?;
    c.regs.write(o.dst, swapped(v));
    Ok(())
}

pub(crate) fn movbe_store<T: Width>(c: &mut Core, o: &Op) -> Done {
    let v = c.regs.read::<T>(o.src);
    store(c, o, swapped(v))
}

pub(crate) fn bswap<T: Width>(c: &mut Core, o: InnerOp<'_>) -> Next {
    // With a 16-bit operand the result is undefined; processors give 0.
    let v = c.regs.read::<T>(o.dst);
    c.regs.write(
        o.dst,
        if T::SIZE == 2 {
            T::from_u64(0)
        } else {
            swapped(v)
        },
    );
    o.go(c)
}

fn swapped<T: Width>(v: T) -> T {
    T::from_u64(v.zext().swap_bytes() >> (64 - T::BITS))
}

/// ADCX and ADOX: `FLAG` is carried.
pub(crate) fn adx<T: Width, const FLAG: u64>(c: &mut Core, o: &Op) -> Done {
    let b = read_rm::<T>(c, o, o.src)?;
    let flag = Rflags::from_bits_retain(FLAG);
    let carry = c.regs.flags.rflags().contains(flag);
    let sum = u128::from(c.regs.read::<T>(o.dst).zext()) + u128::from(b.zext()) + u128::from(carry);
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the low half is the result"
    )]
    c.regs.write(o.dst, T::from_u64(sum as u64));
    c.regs.flags = c.regs.flags.with(flag, sum >> T::BITS != 0);
    Ok(())
}
