//! String instructions. A repeated one counts as one instruction; a fault or a break between
//! iterations leaves the registers at what was done.

use super::{Done, load_sized, store_sized};
use crate::core::{Core, Fault, cut};
use crate::flags::{DF, Flags};
use crate::op::{Op, REP, REPNE};
use crate::word::Word;

const ES: u8 = 0;
/// Iterations in one go; then interrupts are looked at.
const CHUNK: u64 = 0x4000;

fn step(c: &Core, size: u64) -> u64 {
    if c.flag(DF) {
        size.wrapping_neg()
    } else {
        size
    }
}

fn advance(c: &mut Core, reg: u8, asz: u8, by: u64) {
    let v = c.reg(reg).wrapping_add(by);
    c.put_sized(reg, asz, v);
}

/// One iteration or all of them. `f` does one; it answers false to end the repetition.
pub(crate) fn repeat(
    c: &mut Core,
    o: &Op,
    mut f: impl FnMut(&mut Core, &Op) -> Result<bool, Fault>,
) -> Done {
    if o.prefix & (REP | REPNE) == 0 {
        return f(c, o).map(|_| ());
    }
    let single = c.flag(crate::flags::TF);
    for _ in 0..CHUNK {
        let n = cut(c.reg(1), o.asz);
        if n == 0 {
            return Ok(());
        }
        let more = f(c, o)?;
        c.put_sized(1, o.asz, n - 1);
        if !more || n == 1 {
            return Ok(());
        }
        if single || c.hits != 0 || c.leave {
            return Err(Fault::Repeat);
        }
    }
    Err(Fault::Repeat)
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
    if o.prefix & (REP | REPNE) == 0 || c.flag(DF) || c.flag(crate::flags::TF) || c.watching {
        return 0;
    }
    let mut n = cut(c.reg(1), o.asz);
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
    let size = T::SIZE as u64;
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
        if c.leave && cut(c.reg(1), o.asz) != 0 {
            return Err(Fault::Repeat);
        }
    }
    repeat(c, o, |c, o| {
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
    let size = T::SIZE as u64;
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
    }
    repeat(c, o, |c, o| {
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
    c.cc = Flags::sub(a, b, T::from_u64(a.zext().wrapping_sub(b.zext())));
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
