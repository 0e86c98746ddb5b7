//! Near branches, and how blocks lead to each other.

use super::{is_mem, load_sized, poll, read_sized};
use crate::block::{count, entered};
use crate::core::{Core, cut};
use crate::fault::{ExitReason, Fault};
use crate::op::{Next, Op, run, slot};
use crate::platform::BranchClass;
use crate::seg::canonical;
use hindsight_cpu::state::seg;

/// Starts the block that begins with `first` at `rip`, if the budget covers all of it.
#[inline(always)]
pub(crate) fn enter(c: &mut Core, first: Next, rip: u64) -> Next {
    let budget = c.budget - i64::from(count(first));
    if budget < 0 {
        c.rip = rip;
        return c.exit(ExitReason::Budget);
    }
    c.budget = budget;
    c.regs[slot::BLOCK_RIP as usize] = rip;
    entered(first);
    run(c, first)
}

/// Goes to any RIP.
#[inline(always)]
pub(crate) fn jump(c: &mut Core, rip: u64) -> Next {
    match c.cache.jump(rip, c.ctx) {
        Some(first) => enter(c, first, rip),
        None => {
            c.rip = rip;
            c.exit(ExitReason::Lookup)
        }
    }
}

/// Goes to a RIP in the page of the branch: the block found there is remembered in `o`.
#[inline(always)]
fn linked(c: &mut Core, o: &Op, rip: u64) -> Next {
    let first = o.link.get();
    if first.is_null() {
        c.link_from = o;
        c.rip = rip;
        return c.exit(ExitReason::Lookup);
    }
    enter(c, first, rip)
}

#[inline(always)]
fn go<const LINK: bool>(c: &mut Core, o: &Op, rip: u64) -> Next {
    if LINK {
        linked(c, o, rip)
    } else {
        jump(c, rip)
    }
}

/// The target of a direct branch in 64-bit mode.
#[inline(always)]
fn target64(c: &Core, o: &Op) -> u64 {
    c.reg(slot::BLOCK_RIP).wrapping_add(o.imm)
}

/// Checks the target of a near branch.
fn near(c: &Core, rip: u64) -> Result<u64, Fault> {
    let ok = if c.code == 8 {
        canonical(rip)
    } else {
        rip <= c.st.seg[seg::CS].limit.into()
    };
    if ok { Ok(rip) } else { Err(Fault::GP) }
}

/// The target of a direct branch in any mode.
fn target(c: &Core, o: &Op) -> Result<u64, Fault> {
    near(c, cut(target64(c, o), o.size) & c.ip_mask)
}

/// The target of a direct branch whose operand size does not cut it.
pub(crate) fn relative(c: &Core, o: &Op) -> Result<u64, Fault> {
    near(c, target64(c, o) & c.ip_mask)
}

impl Op {
    /// From a conditional branch that is not taken: what [`fall`], the operation after it, does.
    #[inline(always)]
    pub(crate) fn fall(&self, c: &mut Core) -> Next {
        let (first, distance) = self.after();
        if first.is_null() {
            return self.go(c);
        }
        let rip = c.reg(slot::BLOCK_RIP).wrapping_add(distance);
        enter(c, first, rip)
    }
}

/// Ends a block by a jump, or by its fault.
#[inline(always)]
pub(crate) fn leap(c: &mut Core, o: &Op, to: Result<u64, Fault>) -> Next {
    match to {
        Ok(rip) if !c.leave => jump(c, rip),
        Ok(rip) => {
            c.rip = rip;
            poll(c)
        }
        Err(fault) => c.fault_at(o, fault),
    }
}

/// Leaves for the boundary after a branch to `rip`.
#[cold]
#[inline(never)]
pub(crate) fn look(c: &mut Core, rip: u64) -> Next {
    c.rip = rip;
    c.left = 0;
    c.exit(ExitReason::Poll)
}

/// After a noted branch that somebody waits for.
#[inline(never)]
pub(crate) fn due(c: &mut Core, rip: u64) -> Next {
    if c.branches_due() {
        look(c, rip)
    } else {
        jump(c, rip)
    }
}

/// From a conditional branch that is not taken, alone or fused: notes that where it is wanted.
#[inline(always)]
pub(crate) fn fall_noted<const REC: bool>(c: &mut Core, o: &Op, from: u64) -> Next {
    if REC && c.wants_not_taken() {
        return fall_slowly(c, o, from);
    }
    o.fall(c)
}

#[inline(never)]
fn fall_slowly(c: &mut Core, o: &Op, from: u64) -> Next {
    let next = c.rip_after(o);
    if c.note_not_taken(from, next) {
        look(c, next)
    } else {
        o.fall(c)
    }
}

/// After the last operation of a block that does not branch.
pub(crate) fn fall<const LINK: bool>(c: &mut Core, o: &Op) -> Next {
    let rip = target64(c, o) & c.ip_mask;
    go::<LINK>(c, o, rip)
}

pub(crate) fn jmp64<const LINK: bool, const REC: bool>(c: &mut Core, o: &Op) -> Next {
    let rip = target64(c, o);
    if REC && c.note_and_store(c.rip64_of(o), rip, BranchClass::DirectJump) {
        return due(c, rip);
    }
    go::<LINK>(c, o, rip)
}

pub(crate) fn jmp(c: &mut Core, o: &Op) -> Next {
    let to = target(c, o);
    if let Ok(rip) = to {
        c.record(c.rip_of(o), rip, BranchClass::DirectJump);
    }
    leap(c, o, to)
}

pub(crate) fn jcc64<const CC: u8, const LINK: bool, const REC: bool>(c: &mut Core, o: &Op) -> Next {
    if c.cc.condition::<CC>() {
        taken64::<LINK, REC>(c, o)
    } else {
        fall_noted::<REC>(c, o, c.rip64_of(o))
    }
}

/// A conditional branch that is taken, in 64-bit mode.
#[inline(always)]
pub(crate) fn taken64<const LINK: bool, const REC: bool>(c: &mut Core, o: &Op) -> Next {
    let rip = target64(c, o);
    if REC && c.note_and_store(c.rip64_of(o), rip, BranchClass::Conditional) {
        return due(c, rip);
    }
    go::<LINK>(c, o, rip)
}

pub(crate) fn jcc<const CC: u8>(c: &mut Core, o: &Op) -> Next {
    if c.cc.condition::<CC>() {
        taken(c, o)
    } else {
        untaken(c, o)
    }
}

fn untaken(c: &mut Core, o: &Op) -> Next {
    if c.wants_not_taken() {
        let next = c.rip_after(o);
        if c.note_not_taken(c.rip_of(o), next) {
            return look(c, next);
        }
    }
    o.go(c)
}

fn taken(c: &mut Core, o: &Op) -> Next {
    let to = target(c, o);
    if let Ok(rip) = to {
        c.record(c.rip_of(o), rip, BranchClass::Conditional);
    }
    leap(c, o, to)
}

/// JCXZ, JECXZ, JRCXZ.
pub(crate) fn jcxz(c: &mut Core, o: &Op) -> Next {
    if cut(c.reg(1), o.asz) == 0 {
        taken(c, o)
    } else {
        untaken(c, o)
    }
}

/// LOOP (`KIND` 0), LOOPE (1), LOOPNE (2).
pub(crate) fn loopcc<const KIND: u8>(c: &mut Core, o: &Op) -> Next {
    let n = cut(c.reg(1).wrapping_sub(1), o.asz);
    let go = n != 0
        && match KIND {
            0 => true,
            1 => c.cc.zf(),
            _ => !c.cc.zf(),
        };
    if go && let Err(fault) = target(c, o) {
        return c.fault_at(o, fault);
    }
    c.put_sized(1, o.asz, n);
    if go { taken(c, o) } else { untaken(c, o) }
}

/// Reads a near target from a register or memory.
fn indirect_target(c: &mut Core, o: &Op) -> Result<u64, Fault> {
    let v = read_sized(c, o, o.d, o.size)?;
    near(c, v)
}

pub(crate) fn jmp_rm(c: &mut Core, o: &Op) -> Next {
    c.left = o.left;
    let to = indirect_target(c, o);
    if let Ok(rip) = to {
        c.record(c.rip_of(o), rip, BranchClass::IndirectJump);
    }
    leap(c, o, to)
}

fn do_call(c: &mut Core, o: &Op, to: Result<u64, Fault>, class: BranchClass) -> Next {
    let to = to.and_then(|rip| {
        c.push(o.size, c.rip_after(o))?;
        Ok(rip)
    });
    if let Ok(rip) = to {
        c.record(c.rip_of(o), rip, class);
    }
    leap(c, o, to)
}

pub(crate) fn call(c: &mut Core, o: &Op) -> Next {
    c.left = o.left;
    let to = target(c, o);
    let class = to.map_or(BranchClass::DirectCall, |rip| c.call_class(o, rip));
    do_call(c, o, to, class)
}

pub(crate) fn call64<const LINK: bool, const REC: bool>(c: &mut Core, o: &Op) -> Next {
    let sp = c.regs[4].wrapping_sub(8);
    if !c.fast_write(sp, c.rip_after(o)) {
        return call(c, o);
    }
    c.regs[4] = sp;
    let rip = target64(c, o);
    if REC && c.note_and_store(c.rip64_of(o), rip, c.call_class(o, rip)) {
        return due(c, rip);
    }
    go::<LINK>(c, o, rip)
}

pub(crate) fn call_rm(c: &mut Core, o: &Op) -> Next {
    c.left = o.left;
    let to = indirect_target(c, o);
    do_call(c, o, to, BranchClass::IndirectCall)
}

/// Near RET; `o.imm` more bytes are popped.
pub(crate) fn ret(c: &mut Core, o: &Op) -> Next {
    c.left = o.left;
    let to = ret_target(c, o);
    if let Ok(rip) = to {
        let sp = c.sp().wrapping_add(u64::from(o.size)).wrapping_add(o.imm);
        c.set_sp(sp);
        c.record(c.rip_of(o), rip, BranchClass::Return);
    }
    leap(c, o, to)
}

fn ret_target(c: &mut Core, o: &Op) -> Result<u64, Fault> {
    let lin = c.linear(2, c.sp(), o.size.into(), false)?;
    let v = load_sized(c, lin, o.size)?;
    near(c, v)
}

pub(crate) fn ret64<const REC: bool>(c: &mut Core, o: &Op) -> Next {
    let sp = c.regs[4];
    match c.fast_read::<u64>(sp) {
        Some(rip) if canonical(rip) => {
            c.regs[4] = sp.wrapping_add(8).wrapping_add(o.imm);
            if REC && c.note_and_store(c.rip64_of(o), rip, BranchClass::Return) {
                return due(c, rip);
            }
            jump(c, rip)
        }
        _ => ret(c, o),
    }
}

/// JMP through a register or memory in 64-bit mode.
pub(crate) fn jmp_rm64<const REC: bool>(c: &mut Core, o: &Op) -> Next {
    let rip = if is_mem(o) {
        c.fast_read::<u64>(c.ea64(o))
    } else {
        Some(c.reg(o.d))
    };
    match rip {
        Some(rip) if canonical(rip) => {
            if REC && c.note_and_store(c.rip64_of(o), rip, BranchClass::IndirectJump) {
                return due(c, rip);
            }
            jump(c, rip)
        }
        _ => jmp_rm(c, o),
    }
}

/// CALL through a register or memory in 64-bit mode.
pub(crate) fn call_rm64<const REC: bool>(c: &mut Core, o: &Op) -> Next {
    let rip = if is_mem(o) {
        c.fast_read::<u64>(c.ea64(o))
    } else {
        Some(c.reg(o.d))
    };
    let sp = c.regs[4].wrapping_sub(8);
    match rip {
        Some(rip) if canonical(rip) && c.fast_write(sp, c.rip_after(o)) => {
            c.regs[4] = sp;
            if REC && c.note_and_store(c.rip64_of(o), rip, BranchClass::IndirectCall) {
                return due(c, rip);
            }
            jump(c, rip)
        }
        _ => call_rm(c, o),
    }
}

/// Starts the block at RIP; its instructions fit the budget.
pub(crate) fn start(c: &mut Core, first: Next) {
    c.budget -= i64::from(count(first));
    c.regs[slot::BLOCK_RIP as usize] = c.rip;
    entered(first);
}
