//! String instructions. A repeated one counts as one instruction, and each of its iterations as one
//! cycle of the budget; a fault or a break between iterations leaves the registers at what was done.

use super::{Done, load_sized, store_sized};
use crate::core::{Core, cut};
use crate::fault::Fault;
use crate::flags::LazyFlags;
use crate::op::{Op, REP, REPNE};
use crate::word::Word;
use hindsight_regs::rflags::Rflags;

const ES: u8 = 0;

fn step(c: &Core, size: u64) -> u64 {
    if c.flag(Rflags::DF) {
        size.wrapping_neg()
    } else {
        size
    }
}

fn advance(c: &mut Core, reg: u8, asz: u8, by: u64) {
    let v = c.reg(reg).wrapping_add(by);
    c.put_sized(reg, asz, v);
}

/// Iterations that the budget allows: the instruction's own cycle pays for one.
fn affordable(c: &Core, o: &Op) -> u64 {
    let rest = c.budget + i64::from(o.left) + c.reserve;
    rest.max(0).cast_unsigned()
}

/// Pays for iterations.
fn charge(c: &mut Core, iterations: u64) {
    let cycles = iterations.cast_signed();
    c.budget -= cycles;
    c.extra += cycles;
    c.update_stamp();
}

/// The repetition is over, which retires the instruction. `before` was [`Core::extra`] when it began
/// or went on: one of the iterations since is the instruction's own cycle.
fn finish(c: &mut Core, o: &Op, before: i64) -> Done {
    if c.extra > before {
        c.extra -= 1;
        c.budget += 1;
        c.update_stamp();
    }
    // The budget does not cover the rest of the block any more.
    if c.budget < 0 && o.left > 1 {
        c.leave = true;
    }
    Ok(())
}

/// One iteration or all of them. `f` does one; it answers false to end the repetition.
pub(crate) fn repeat(
    c: &mut Core,
    o: &Op,
    f: impl FnMut(&mut Core, &Op) -> Result<bool, Fault>,
) -> Done {
    let before = c.extra;
    repeat_from(c, o, before, f)
}

/// As [`repeat`], after iterations that were done in another way since [`Core::extra`] was `before`.
fn repeat_from(
    c: &mut Core,
    o: &Op,
    before: i64,
    mut f: impl FnMut(&mut Core, &Op) -> Result<bool, Fault>,
) -> Done {
    if o.prefix & (REP | REPNE) == 0 {
        return f(c, o).map(|_| ());
    }
    let single = c.flag(Rflags::TF);
    loop {
        let n = cut(c.reg(1), o.asz);
        if n == 0 {
            return finish(c, o, before);
        }
        if affordable(c, o) == 0 {
            return Err(Fault::BetweenIterations);
        }
        let more = f(c, o)?;
        c.put_sized(1, o.asz, n - 1);
        charge(c, 1);
        if !more || n == 1 {
            return finish(c, o, before);
        }
        if single || c.hits != 0 || c.leave {
            return Err(Fault::BetweenIterations);
        }
    }
}

fn source(c: &Core, o: &Op, size: usize) -> Result<u64, Fault> {
    c.linear(o.seg, cut(c.reg(6), o.asz), size as u64, false)
}

fn target(c: &Core, o: &Op, size: usize, write: bool) -> Result<u64, Fault> {
    c.linear(ES, cut(c.reg(7), o.asz), size as u64, write)
}

/// How many iterations of a forward REP may run as one copy: within a page at both ends, with no
/// observer of single iterations.
fn bulk(c: &Core, o: &Op, size: u64, regs: &[u8]) -> u64 {
    if o.prefix & (REP | REPNE) == 0
        || c.flag(Rflags::DF)
        || c.flag(Rflags::TF)
        || c.watching
        || c.counters.tells_accesses()
    {
        return 0;
    }
    let mut n = cut(c.reg(1), o.asz).min(affordable(c, o));
    for &reg in regs {
        let at = c.reg(reg);
        n = n.min((0x1000 - at % 0x1000) / size);
        if o.asz == 2 && at & 0xffff > 0xf000 {
            return 0;
        }
    }
    if n < 4 { 0 } else { n }
}

pub(crate) fn movs<T: Word>(c: &mut Core, o: &Op) -> Done {
    let (size, before) = (T::SIZE as u64, c.extra);
    loop {
        let n = bulk(c, o, size, &[6, 7]);
        if n == 0 {
            break;
        }
        let len = n * size;
        let from = c.linear(o.seg, cut(c.reg(6), o.asz), len, false)?;
        let to = c.linear(ES, cut(c.reg(7), o.asz), len, true)?;
        let overlap = to.wrapping_sub(from) < len;
        if overlap || !c.copy(from, to, len)? {
            break;
        }
        advance(c, 6, o.asz, len);
        advance(c, 7, o.asz, len);
        advance(c, 1, o.asz, n.wrapping_neg());
        charge(c, n);
        if c.leave && cut(c.reg(1), o.asz) != 0 {
            return Err(Fault::BetweenIterations);
        }
    }
    repeat_from(c, o, before, |c, o| {
        let from = source(c, o, T::SIZE)?;
        let to = target(c, o, T::SIZE, true)?;
        let v: T = c.read(from)?;
        c.write(to, v)?;
        let by = step(c, size);
        advance(c, 6, o.asz, by);
        advance(c, 7, o.asz, by);
        Ok(true)
    })
}

pub(crate) fn stos<T: Word>(c: &mut Core, o: &Op) -> Done {
    let (size, before) = (T::SIZE as u64, c.extra);
    loop {
        let n = bulk(c, o, size, &[7]);
        if n == 0 {
            break;
        }
        let len = n * size;
        let to = c.linear(ES, cut(c.reg(7), o.asz), len, true)?;
        if !c.fill::<T>(to, n)? {
            break;
        }
        advance(c, 7, o.asz, len);
        advance(c, 1, o.asz, n.wrapping_neg());
        charge(c, n);
    }
    repeat_from(c, o, before, |c, o| {
        let to = target(c, o, T::SIZE, true)?;
        let v = c.get::<T>(0);
        c.write(to, v)?;
        let by = step(c, size);
        advance(c, 7, o.asz, by);
        Ok(true)
    })
}

pub(crate) fn lods<T: Word>(c: &mut Core, o: &Op) -> Done {
    repeat(c, o, |c, o| {
        let from = source(c, o, T::SIZE)?;
        let v: T = c.read(from)?;
        c.put(0, v);
        let by = step(c, T::SIZE as u64);
        advance(c, 6, o.asz, by);
        Ok(true)
    })
}

/// The condition of REPE or REPNE after a comparison.
fn goes_on(c: &Core, o: &Op) -> bool {
    c.cc.zf() == (o.prefix & REP != 0)
}

fn compare<T: Word>(c: &mut Core, a: T, b: T) {
    c.cc = LazyFlags::sub(a, b, T::from_u64(a.zext().wrapping_sub(b.zext())));
}

pub(crate) fn scas<T: Word>(c: &mut Core, o: &Op) -> Done {
    repeat(c, o, |c, o| {
        let at = target(c, o, T::SIZE, false)?;
        let v: T = c.read(at)?;
        let a = c.get::<T>(0);
        compare(c, a, v);
        let by = step(c, T::SIZE as u64);
        advance(c, 7, o.asz, by);
        Ok(goes_on(c, o))
    })
}

pub(crate) fn cmps<T: Word>(c: &mut Core, o: &Op) -> Done {
    repeat(c, o, |c, o| {
        let from = source(c, o, T::SIZE)?;
        let to = target(c, o, T::SIZE, false)?;
        let a: T = c.read(from)?;
        let b: T = c.read(to)?;
        compare(c, a, b);
        let by = step(c, T::SIZE as u64);
        advance(c, 6, o.asz, by);
        advance(c, 7, o.asz, by);
        Ok(goes_on(c, o))
    })
}

pub(crate) fn ins(c: &mut Core, o: &Op) -> Done {
    let port = c.get::<u16>(2);
    c.check_port(port, o.size)?;
    repeat(c, o, |c, o| {
        let to = target(c, o, o.size.into(), true)?;
        c.probe_write(to, o.size.into())?;
        let v = c.port_in(port, o.size);
        store_sized(c, to, o.size, v)?;
        let by = step(c, o.size.into());
        advance(c, 7, o.asz, by);
        Ok(true)
    })
}

pub(crate) fn outs(c: &mut Core, o: &Op) -> Done {
    let port = c.get::<u16>(2);
    c.check_port(port, o.size)?;
    repeat(c, o, |c, o| {
        let from = source(c, o, o.size.into())?;
        let v = load_sized(c, from, o.size)?;
        c.port_out(port, o.size, v);
        let by = step(c, o.size.into());
        advance(c, 6, o.asz, by);
        Ok(true)
    })
}
