//! Near branches, and the transitions between blocks.

#![expect(
    unsafe_code,
    reason = "an entry of the jump cache is turned into a live block"
)]

use super::{load_sized, read_sized};
use crate::code::{BlockOp, LiveBlock};
use crate::core::{Core, InnerOp, LastOp, Next, Op, truncate};
use crate::fault::{ExitReason, Fault};
use crate::platform::BranchClass;
use crate::registers::Reg;
use crate::seg::canonical;
use hindsight_cpu::state::seg;

/// An operation of either kind.
type AnyOp<'b> = BlockOp<'b, Core>;

/// Enters a block at `rip`, if the budget covers all of it.
#[inline(always)]
pub(super) fn enter(c: &mut Core, block: LiveBlock<'_, Core>, rip: u64) -> Next {
    if !c.progress.take(block.count()) {
        c.regs.rip = rip;
        return c.leave(ExitReason::Budget);
    }
    c.regs.set(Reg::BlockRip, rip);
    if block.count_run() == c.hot_after {
        return enter_hot(c, block);
    }
    block.go(c)
}

/// Translates a hot block, and enters it.
#[cold]
#[inline(never)]
fn enter_hot(c: &mut Core, block: LiveBlock<'_, Core>) -> Next {
    c.translate_hot(block.first_op());
    block.go(c)
}

/// Continues at any RIP, after the operation `o`.
#[inline(always)]
pub(super) fn jump(c: &mut Core, o: AnyOp<'_>, rip: u64) -> Next {
    match c.code.jump(rip) {
        Some(entry) => {
            // SAFETY: the entry was just read from the cache that contains this operation's block.
            let block = unsafe { o.live_sibling(entry) };
            enter(c, block, rip)
        }
        None => {
            c.regs.rip = rip;
            c.leave(ExitReason::Lookup)
        }
    }
}

/// Continues at a RIP in the page of the branch `o`, and links `o` to its block.
#[inline(always)]
pub(super) fn jump_linked(c: &mut Core, o: AnyOp<'_>, rip: u64) -> Next {
    match o.link() {
        Some(block) => enter(c, block, rip),
        None => {
            c.code.set_pending_link(o);
            c.regs.rip = rip;
            c.leave(ExitReason::Lookup)
        }
    }
}

#[inline(always)]
fn go<const LINK: bool>(c: &mut Core, o: AnyOp<'_>, rip: u64) -> Next {
    if LINK {
        jump_linked(c, o, rip)
    } else {
        jump(c, o, rip)
    }
}

/// The target of a direct branch in 64-bit mode.
#[inline(always)]
fn target64(c: &Core, o: &Op) -> u64 {
    c.regs.get(Reg::BlockRip).wrapping_add(o.imm)
}

/// Checks the target of a near branch.
fn check_target(c: &Core, rip: u64) -> Result<u64, Fault> {
    let ok = if c.mode.is_64bit() {
        canonical(rip)
    } else {
        rip <= c.state.seg[seg::CS].limit.into()
    };
    if ok { Ok(rip) } else { Err(Fault::GP) }
}

/// The target of a direct branch in any mode.
fn target(c: &Core, o: &Op) -> Result<u64, Fault> {
    check_target(c, truncate(target64(c, o), o.size) & c.mode.ip_mask())
}

/// The target of a direct branch that the operand size does not truncate.
pub(crate) fn relative_target(c: &Core, o: &Op) -> Result<u64, Fault> {
    check_target(c, target64(c, o) & c.mode.ip_mask())
}

/// Continues after a conditional branch that is not taken.
///
/// Does what [`fall`] does, which follows the branch in the block.
#[inline(always)]
fn fall_through(c: &mut Core, o: InnerOp<'_>) -> Next {
    let next = o.next_op();
    match next.link() {
        Some(block) => {
            let rip = c.regs.get(Reg::BlockRip).wrapping_add(next.imm);
            enter(c, block, rip)
        }
        None => o.go(c),
    }
}

/// Ends a block by a jump, or by the fault of the jump.
#[inline(always)]
fn finish_branch(c: &mut Core, o: AnyOp<'_>, to: Result<u64, Fault>) -> Next {
    match to {
        Ok(rip) if !c.exit.requested => jump(c, o, rip),
        Ok(rip) => {
            c.regs.rip = rip;
            c.leave_at_boundary()
        }
        Err(fault) => c.fault_at(&o, fault),
    }
}

/// Leaves the dispatch loop for the boundary after a branch to `rip`.
#[cold]
#[inline(never)]
fn leave_to(c: &mut Core, rip: u64) -> Next {
    c.regs.rip = rip;
    c.progress.end_operation();
    c.leave(ExitReason::Poll)
}

/// Handles a branch that is due, and continues at its target.
#[inline(never)]
pub(super) fn handle_due(c: &mut Core, o: AnyOp<'_>, rip: u64) -> Next {
    if c.handle_due_branches() {
        leave_to(c, rip)
    } else {
        jump(c, o, rip)
    }
}

/// Continues after a branch at `from` that is not taken, alone or fused.
///
/// Records the branch if that is requested.
#[inline(always)]
pub(super) fn not_taken<const REC: bool>(c: &mut Core, o: InnerOp<'_>, from: u64) -> Next {
    if REC && c.records_not_taken() {
        return record_not_taken(c, o, from);
    }
    fall_through(c, o)
}

#[inline(never)]
fn record_not_taken(c: &mut Core, o: InnerOp<'_>, from: u64) -> Next {
    let next = c.rip_after(&o);
    if c.record_not_taken(from, next) {
        leave_to(c, next)
    } else {
        fall_through(c, o)
    }
}

/// Continues with the next block after one whose last instruction does not branch.
pub(crate) fn fall<const LINK: bool>(c: &mut Core, o: LastOp<'_>) -> Next {
    let rip = target64(c, &o) & c.mode.ip_mask();
    go::<LINK>(c, *o, rip)
}

pub(crate) fn jmp64<const LINK: bool, const REC: bool>(c: &mut Core, o: LastOp<'_>) -> Next {
    let rip = target64(c, &o);
    if REC && c.record_near(c.rip64_of(&o), rip, BranchClass::DirectJump) {
        return handle_due(c, *o, rip);
    }
    go::<LINK>(c, *o, rip)
}

pub(crate) fn jmp(c: &mut Core, o: LastOp<'_>) -> Next {
    let to = target(c, &o);
    if let Ok(rip) = to {
        c.record_branch(c.rip_of(&o), rip, BranchClass::DirectJump);
    }
    finish_branch(c, *o, to)
}

pub(crate) fn jcc64<const CC: u8, const LINK: bool, const REC: bool>(
    c: &mut Core,
    o: InnerOp<'_>,
) -> Next {
    if c.regs.flags.condition::<CC>() {
        taken64::<LINK, REC>(c, o)
    } else {
        not_taken::<REC>(c, o, c.rip64_of(&o))
    }
}

/// A conditional branch that is taken, in 64-bit mode.
#[inline(always)]
fn taken64<const LINK: bool, const REC: bool>(c: &mut Core, o: InnerOp<'_>) -> Next {
    let rip = target64(c, &o);
    if REC && c.record_near(c.rip64_of(&o), rip, BranchClass::Conditional) {
        return handle_due(c, *o, rip);
    }
    go::<LINK>(c, *o, rip)
}

pub(crate) fn jcc<const CC: u8>(c: &mut Core, o: InnerOp<'_>) -> Next {
    if c.regs.flags.condition::<CC>() {
        taken(c, o)
    } else {
        untaken(c, o)
    }
}

fn untaken(c: &mut Core, o: InnerOp<'_>) -> Next {
    if c.records_not_taken() {
        let next = c.rip_after(&o);
        if c.record_not_taken(c.rip_of(&o), next) {
            return leave_to(c, next);
        }
    }
    o.go(c)
}

fn taken(c: &mut Core, o: InnerOp<'_>) -> Next {
    let to = target(c, &o);
    if let Ok(rip) = to {
        c.record_branch(c.rip_of(&o), rip, BranchClass::Conditional);
    }
    finish_branch(c, *o, to)
}

/// JCXZ, JECXZ, JRCXZ.
pub(crate) fn jcxz(c: &mut Core, o: InnerOp<'_>) -> Next {
    if truncate(c.regs.get(Reg::Rcx), o.address_size) == 0 {
        taken(c, o)
    } else {
        untaken(c, o)
    }
}

/// LOOP (`KIND` 0), LOOPE (1), LOOPNE (2).
pub(crate) fn loopcc<const KIND: u8>(c: &mut Core, o: InnerOp<'_>) -> Next {
    let count = c.regs.get(Reg::Rcx).wrapping_sub(1);
    let count = truncate(count, o.address_size);
    let takes = count != 0
        && match KIND {
            0 => true,
            1 => c.regs.flags.zf(),
            _ => !c.regs.flags.zf(),
        };
    if takes && let Err(fault) = target(c, &o) {
        return c.fault_at(&o, fault);
    }
    c.regs.write_sized(Reg::Rcx, o.address_size, count);
    if takes { taken(c, o) } else { untaken(c, o) }
}

/// Reads a near target from a register or memory.
fn indirect_target(c: &mut Core, o: &Op) -> Result<u64, Fault> {
    let v = read_sized(c, o, o.dst, o.size)?;
    check_target(c, v)
}

pub(crate) fn jmp_rm(c: &mut Core, o: LastOp<'_>) -> Next {
    c.progress.begin_operation(o.remaining);
    let to = indirect_target(c, &o);
    if let Ok(rip) = to {
        c.record_branch(c.rip_of(&o), rip, BranchClass::IndirectJump);
    }
    finish_branch(c, *o, to)
}

fn do_call(c: &mut Core, o: AnyOp<'_>, to: Result<u64, Fault>, class: BranchClass) -> Next {
    let to = to.and_then(|rip| {
        c.push(o.size, c.rip_after(&o))?;
        Ok(rip)
    });
    if let Ok(rip) = to {
        c.record_branch(c.rip_of(&o), rip, class);
    }
    finish_branch(c, o, to)
}

pub(crate) fn call(c: &mut Core, o: LastOp<'_>) -> Next {
    c.progress.begin_operation(o.remaining);
    let to = target(c, &o);
    let class = to.map_or(BranchClass::DirectCall, |rip| c.call_class(&o, rip));
    do_call(c, *o, to, class)
}

pub(crate) fn call64<const LINK: bool, const REC: bool>(c: &mut Core, o: LastOp<'_>) -> Next {
    let sp = c.regs.get(Reg::Rsp).wrapping_sub(8);
    if !c.fast_write(sp, c.rip_after(&o)) {
        return call(c, o);
    }
    c.regs.set(Reg::Rsp, sp);
    let rip = target64(c, &o);
    if REC && c.record_near(c.rip64_of(&o), rip, c.call_class(&o, rip)) {
        return handle_due(c, *o, rip);
    }
    go::<LINK>(c, *o, rip)
}

pub(crate) fn call_rm(c: &mut Core, o: LastOp<'_>) -> Next {
    c.progress.begin_operation(o.remaining);
    let to = indirect_target(c, &o);
    do_call(c, *o, to, BranchClass::IndirectCall)
}

/// Near RET; `o.imm` more bytes are popped.
pub(crate) fn ret(c: &mut Core, o: LastOp<'_>) -> Next {
    c.progress.begin_operation(o.remaining);
    let to = ret_target(c, &o);
    if let Ok(rip) = to {
        let sp = c.sp().wrapping_add(u64::from(o.size)).wrapping_add(o.imm);
        c.set_sp(sp);
        c.record_branch(c.rip_of(&o), rip, BranchClass::Return);
    }
    finish_branch(c, *o, to)
}

fn ret_target(c: &mut Core, o: &Op) -> Result<u64, Fault> {
    let lin = c.linear(seg::SS, c.sp(), o.size.into(), false)?;
    let v = load_sized(c, lin, o.size)?;
    check_target(c, v)
}

pub(crate) fn ret64<const REC: bool>(c: &mut Core, o: LastOp<'_>) -> Next {
    let sp = c.regs.get(Reg::Rsp);
    match c.fast_read::<u64>(sp) {
        Some(rip) if canonical(rip) => {
            c.regs.set(Reg::Rsp, sp.wrapping_add(8).wrapping_add(o.imm));
            if REC && c.record_near(c.rip64_of(&o), rip, BranchClass::Return) {
                return handle_due(c, *o, rip);
            }
            jump(c, *o, rip)
        }
        _ => ret(c, o),
    }
}

/// JMP through a register or memory in 64-bit mode.
pub(crate) fn jmp_rm64<const REC: bool>(c: &mut Core, o: LastOp<'_>) -> Next {
    let rip = if o.is_mem() {
        c.fast_read::<u64>(c.ea64(&o))
    } else {
        Some(c.regs.get(o.dst))
    };
    match rip {
        Some(rip) if canonical(rip) => {
            if REC && c.record_near(c.rip64_of(&o), rip, BranchClass::IndirectJump) {
                return handle_due(c, *o, rip);
            }
            jump(c, *o, rip)
        }
        _ => jmp_rm(c, o),
    }
}

/// CALL through a register or memory in 64-bit mode.
pub(crate) fn call_rm64<const REC: bool>(c: &mut Core, o: LastOp<'_>) -> Next {
    let rip = if o.is_mem() {
        c.fast_read::<u64>(c.ea64(&o))
    } else {
        Some(c.regs.get(o.dst))
    };
    let sp = c.regs.get(Reg::Rsp).wrapping_sub(8);
    match rip {
        Some(rip) if canonical(rip) && c.fast_write(sp, c.rip_after(&o)) => {
            c.regs.set(Reg::Rsp, sp);
            if REC && c.record_near(c.rip64_of(&o), rip, BranchClass::IndirectCall) {
                return handle_due(c, *o, rip);
            }
            jump(c, *o, rip)
        }
        _ => call_rm(c, o),
    }
}
