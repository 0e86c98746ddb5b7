//! String instructions.
//!
//! A repeated string instruction counts as one instruction, and each of its iterations after the
//! first as one cycle of the budget. A fault or an event between iterations leaves the registers as
//! the previous iterations have set them.

use super::{Done, load_sized, store_sized};
use crate::code::{REP, REPNE};
use crate::core::{Core, Op, truncate};
use crate::fault::Fault;
use crate::flags::LazyFlags;
use crate::registers::Reg;
use crate::width::Width;
use hindsight_cpu::state::seg;
use hindsight_regs::rflags::Rflags;

/// Minimum number of iterations that are worth a bulk copy.
const BULK_MIN: u64 = 4;

/// Returns what is added to the index registers after an element of `size` bytes.
fn stride(c: &Core, size: u64) -> u64 {
    if c.regs.flag(Rflags::DF) {
        size.wrapping_neg()
    } else {
        size
    }
}

fn advance(c: &mut Core, reg: Reg, address_size: u8, by: u64) {
    let v = c.regs.get(reg).wrapping_add(by);
    c.regs.write_sized(reg, address_size, v);
}

/// Whether the instruction has a repeat prefix.
fn is_repeated(o: &Op) -> bool {
    o.prefix & (REP | REPNE) != 0
}

/// Returns the iterations that are left, from the count register.
fn iterations(c: &Core, o: &Op) -> u64 {
    truncate(c.regs.get(Reg::Rcx), o.address_size)
}

/// Ends the repetition, which retires the instruction.
///
/// `before` was the count of extra cycles when it began or continued.
fn finish(c: &mut Core, before: i64) -> Done {
    if !c.progress.finish_repetition(before) {
        c.exit.requested = true;
    }
    Ok(())
}

/// Executes one iteration, or all of them with a repeat prefix.
///
/// `f` executes one iteration, and returns false to end the repetition.
fn repeat(c: &mut Core, o: &Op, f: impl FnMut(&mut Core, &Op) -> Result<bool, Fault>) -> Done {
    let before = c.progress.extra();
    repeat_from(c, o, before, f)
}

/// Like [`repeat`], after iterations that were executed in bulk.
///
/// `before` was the count of extra cycles before them.
fn repeat_from(
    c: &mut Core,
    o: &Op,
    before: i64,
    mut f: impl FnMut(&mut Core, &Op) -> Result<bool, Fault>,
) -> Done {
    if !is_repeated(o) {
        return f(c, o).map(|_| ());
    }
    let single = c.regs.flag(Rflags::TF);
    loop {
        let left = iterations(c, o);
        if left == 0 {
            return finish(c, before);
        }
        if c.progress.affordable_iterations() == 0 {
            return Err(Fault::BetweenIterations);
        }
        let more = f(c, o)?;
        c.regs.write_sized(Reg::Rcx, o.address_size, left - 1);
        c.progress.charge_iterations(1);
        if !more || left == 1 {
            return finish(c, before);
        }
        if single || c.debug.hits() != 0 || c.exit.requested {
            return Err(Fault::BetweenIterations);
        }
    }
}

/// Returns the linear address of the element at the source index.
fn source(c: &Core, o: &Op, size: u64) -> Result<u64, Fault> {
    let offset = truncate(c.regs.get(Reg::Rsi), o.address_size);
    c.linear(o.segment(), offset, size, false)
}

/// Returns the linear address of the element at the destination index.
fn target(c: &Core, o: &Op, size: u64, write: bool) -> Result<u64, Fault> {
    let offset = truncate(c.regs.get(Reg::Rdi), o.address_size);
    c.linear(seg::ES, offset, size, write)
}

/// Returns how many iterations of a forward REP may be done as one copy.
///
/// All of them lie within a page for each of these index registers, and none of them must be
/// observed on its own. Returns 0 if there should be no such copy.
fn bulk(c: &Core, o: &Op, size: u64, index_regs: &[Reg]) -> u64 {
    if !is_repeated(o)
        || c.regs.flag(Rflags::DF | Rflags::TF)
        || c.debug.watching()
        || c.counters.counts_accesses()
    {
        return 0;
    }
    let mut n = iterations(c, o).min(c.progress.affordable_iterations());
    for &reg in index_regs {
        let at = c.regs.get(reg);
        n = n.min((0x1000 - at % 0x1000) / size);
        if o.address_size == 2 && at & 0xffff > 0xf000 {
            return 0;
        }
    }
    if n < BULK_MIN { 0 } else { n }
}

/// Subtracts bulk iterations from the count register and the budget.
fn charge_bulk(c: &mut Core, o: &Op, n: u64) {
    advance(c, Reg::Rcx, o.address_size, n.wrapping_neg());
    c.progress.charge_iterations(n);
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "bulk copies lie within a page"
)]
pub(crate) fn movs<T: Width>(c: &mut Core, o: &Op) -> Done {
    let (size, before) = (T::SIZE as u64, c.progress.extra());
    loop {
        let n = bulk(c, o, size, &[Reg::Rsi, Reg::Rdi]);
        if n == 0 {
            break;
        }
        let len = n * size;
        let from = source(c, o, len)?;
        let to = target(c, o, len, true)?;
        let overlaps = to.wrapping_sub(from) < len;
        if overlaps || !c.copy(from, to, len as usize)? {
            break;
        }
        advance(c, Reg::Rsi, o.address_size, len);
        advance(c, Reg::Rdi, o.address_size, len);
        charge_bulk(c, o, n);
        if c.exit.requested && iterations(c, o) != 0 {
            return Err(Fault::BetweenIterations);
        }
    }
    repeat_from(c, o, before, |c, o| {
        let from = source(c, o, size)?;
        let to = target(c, o, size, true)?;
        let v: T = c.read(from)?;
        c.write(to, v)?;
        let by = stride(c, size);
        advance(c, Reg::Rsi, o.address_size, by);
        advance(c, Reg::Rdi, o.address_size, by);
        Ok(true)
    })
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "bulk stores lie within a page"
)]
pub(crate) fn stos<T: Width>(c: &mut Core, o: &Op) -> Done {
    let (size, before) = (T::SIZE as u64, c.progress.extra());
    loop {
        let n = bulk(c, o, size, &[Reg::Rdi]);
        if n == 0 {
            break;
        }
        let to = target(c, o, n * size, true)?;
        if !c.fill::<T>(to, n as usize)? {
            break;
        }
        advance(c, Reg::Rdi, o.address_size, n * size);
        charge_bulk(c, o, n);
    }
    repeat_from(c, o, before, |c, o| {
        let to = target(c, o, size, true)?;
        let v = c.regs.read::<T>(Reg::Rax);
        c.write(to, v)?;
        let by = stride(c, size);
        advance(c, Reg::Rdi, o.address_size, by);
        Ok(true)
    })
}

pub(crate) fn lods<T: Width>(c: &mut Core, o: &Op) -> Done {
    repeat(c, o, |c, o| {
        let from = source(c, o, T::SIZE as u64)?;
        let v: T = c.read(from)?;
        c.regs.write(Reg::Rax, v);
        let by = stride(c, T::SIZE as u64);
        advance(c, Reg::Rsi, o.address_size, by);
        Ok(true)
    })
}

/// Whether REPE or REPNE continues after a comparison.
fn continues(c: &Core, o: &Op) -> bool {
    c.regs.flags.zf() == (o.prefix & REP != 0)
}

fn compare<T: Width>(c: &mut Core, a: T, b: T) {
    c.regs.flags = LazyFlags::sub(a, b, T::from_u64(a.zext().wrapping_sub(b.zext())));
}

pub(crate) fn scas<T: Width>(c: &mut Core, o: &Op) -> Done {
    repeat(c, o, |c, o| {
        let at = target(c, o, T::SIZE as u64, false)?;
        let v: T = c.read(at)?;
        let a = c.regs.read::<T>(Reg::Rax);
        compare(c, a, v);
        let by = stride(c, T::SIZE as u64);
        advance(c, Reg::Rdi, o.address_size, by);
        Ok(continues(c, o))
    })
}

pub(crate) fn cmps<T: Width>(c: &mut Core, o: &Op) -> Done {
    repeat(c, o, |c, o| {
        let from = source(c, o, T::SIZE as u64)?;
        let to = target(c, o, T::SIZE as u64, false)?;
        let a: T = c.read(from)?;
        let b: T = c.read(to)?;
        compare(c, a, b);
        let by = stride(c, T::SIZE as u64);
        advance(c, Reg::Rsi, o.address_size, by);
        advance(c, Reg::Rdi, o.address_size, by);
        Ok(continues(c, o))
    })
}

pub(crate) fn ins(c: &mut Core, o: &Op) -> Done {
    let port = c.regs.read::<u16>(Reg::Rdx);
    c.check_port(port, o.size)?;
    repeat(c, o, |c, o| {
        let to = target(c, o, o.size.into(), true)?;
        // A store that faults must not read the port.
        c.probe_write(to, o.size.into())?;
        let v = c.port_in(port, o.size);
        store_sized(c, to, o.size, v)?;
        let by = stride(c, o.size.into());
        advance(c, Reg::Rdi, o.address_size, by);
        Ok(true)
    })
}

pub(crate) fn outs(c: &mut Core, o: &Op) -> Done {
    let port = c.regs.read::<u16>(Reg::Rdx);
    c.check_port(port, o.size)?;
    repeat(c, o, |c, o| {
        let from = source(c, o, o.size.into())?;
        let v = load_sized(c, from, o.size)?;
        c.port_out(port, o.size, v);
        let by = stride(c, o.size.into());
        advance(c, Reg::Rsi, o.address_size, by);
        Ok(true)
    })
}
