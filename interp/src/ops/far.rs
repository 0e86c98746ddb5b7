//! Far branches, IRET, and the fast system calls.

use super::{Done, load_sized};
use crate::core::{Core, Op, truncate};
use crate::descriptor::{Descriptor, gp, np};
use crate::fault::Fault;
use crate::platform::BranchClass;
use crate::registers::Reg;
use crate::seg::canonical;
use hindsight_cpu::state::{Segment, seg};
use hindsight_regs::cr::Efer;
use hindsight_regs::dr::Dr6;
use hindsight_regs::rflags::Rflags;

fn recorded(c: &mut Core, o: &Op, f: impl FnOnce(&mut Core, &Op) -> Done) -> Done {
    let from = c.branch_source(c.rip_of(o));
    let old_sp = c.regs.get(Reg::Rsp);
    let done = f(c, o);
    if done.is_err() && !c.exit.switched_task {
        c.regs.set(Reg::Rsp, old_sp);
    } else {
        c.record_far(from, c.regs.rip, BranchClass::Far);
    }
    done
}

/// Reads selector and offset of a far pointer in memory.
fn pointer(c: &mut Core, o: &Op) -> Result<(u16, u64), Fault> {
    let lin = super::src(c, o, usize::from(o.size) + 2)?;
    let offset = load_sized(c, lin, o.size)?;
    let selector: u16 = c.read(lin.wrapping_add(o.size.into()))?;
    Ok((selector, offset))
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the selector was decoded from 16 bits"
)]
fn immediate(o: &Op) -> (u16, u64) {
    (o.disp as u16, o.imm)
}

pub(crate) fn jmp_imm(c: &mut Core, o: &Op) -> Done {
    let (selector, offset) = immediate(o);
    recorded(c, o, |c, o| jmp(c, o, selector, offset))
}

pub(crate) fn jmp_mem(c: &mut Core, o: &Op) -> Done {
    let (selector, offset) = pointer(c, o)?;
    recorded(c, o, |c, o| jmp(c, o, selector, offset))
}

pub(crate) fn call_imm(c: &mut Core, o: &Op) -> Done {
    let (selector, offset) = immediate(o);
    recorded(c, o, |c, o| call(c, o, selector, offset))
}

pub(crate) fn call_mem(c: &mut Core, o: &Op) -> Done {
    let (selector, offset) = pointer(c, o)?;
    recorded(c, o, |c, o| call(c, o, selector, offset))
}

fn real_target(c: &mut Core, selector: u16, offset: u64) -> Done {
    if offset > c.cs().limit.into() {
        return Err(Fault::GP);
    }
    c.load_segment_real(seg::CS, selector);
    c.regs.rip = offset;
    Ok(())
}

/// Checks a code segment for a jump or call that keeps the privilege level.
fn direct_cs(c: &Core, d: Descriptor, selector: u16) -> Done {
    let rpl = (selector & 3) as u8;
    let allowed = if d.is_conforming() {
        d.dpl() <= c.mode.cpl()
    } else {
        rpl <= c.mode.cpl() && d.dpl() == c.mode.cpl()
    };
    if !d.is_code() || !allowed || (c.lma() && d.is_long() && d.is_big()) {
        return Err(gp(selector));
    }
    if d.present() {
        Ok(())
    } else {
        Err(np(selector))
    }
}

fn jmp(c: &mut Core, o: &Op, selector: u16, offset: u64) -> Done {
    if !c.mode.protected() {
        return real_target(c, selector, offset);
    }
    if selector & 0xfffc == 0 {
        return Err(Fault::GP);
    }
    let mut d = c.need_descriptor(selector)?;
    let (selector, offset) = match d.system_type() {
        None => (selector, offset),
        Some(4 | 12) => {
            let (target, inner, offset) = gate(c, d, selector, false)?;
            d = inner;
            c.check_rip(offset, &d.segment(target))?;
            c.mark_accessed(&mut d)?;
            let cpl = c.mode.cpl();
            c.set_cs(d.segment(target), cpl, offset);
            return Ok(());
        }
        Some(_) => return task(c, o, d, selector, false),
    };
    direct_cs(c, d, selector)?;
    c.check_rip(offset, &d.segment(selector))?;
    c.mark_accessed(&mut d)?;
    let cpl = c.mode.cpl();
    c.set_cs(d.segment(selector), cpl, offset);
    Ok(())
}

/// Jumps to or calls a task, through a task gate or a TSS descriptor.
fn task(c: &mut Core, o: &Op, d: Descriptor, selector: u16, call: bool) -> Done {
    if c.lma() {
        return Err(gp(selector));
    }
    let after = c.rip_after(o);
    let low = u16::from(c.mode.cpl()) > d.dpl().into() || (selector & 3) > d.dpl().into();
    match d.system_type() {
        Some(1 | 9 | 5 | 3 | 11) if low => Err(gp(selector)),
        Some(5) if !d.present() => Err(np(selector)),
        Some(5) => {
            let (target, _) = d.gate_target();
            c.regs.rip = after;
            c.task_jump(target, call)
        }
        Some(1 | 9) => {
            c.regs.rip = after;
            c.task_jump(selector, call)
        }
        _ => Err(gp(selector)),
    }
}

/// Checks a call gate, and returns its selector, code segment and offset.
///
/// JMP cannot reach an inner level.
fn gate(
    c: &mut Core,
    d: Descriptor,
    selector: u16,
    call: bool,
) -> Result<(u16, Descriptor, u64), Fault> {
    let rpl = (selector & 3) as u8;
    let long = c.lma();
    if d.dpl() < c.mode.cpl() || d.dpl() < rpl || (long && d.system_type() != Some(12)) {
        return Err(gp(selector));
    }
    if !d.present() {
        return Err(np(selector));
    }
    let (target, mut offset) = d.gate_target();
    if long {
        offset |= c.descriptor_high(d, selector)?;
    } else if d.system_type() == Some(4) {
        offset &= 0xffff;
    }
    if target & 0xfffc == 0 {
        return Err(Fault::GP);
    }
    let code = c.need_descriptor(target)?;
    let inner = code.dpl() < c.mode.cpl() && !code.is_conforming();
    let level_ok = code.dpl() <= c.mode.cpl() && (call || !inner);
    if !code.is_code() || !level_ok || (long && (!code.is_long() || code.is_big())) {
        return Err(gp(target));
    }
    if !code.present() {
        return Err(np(target));
    }
    Ok((target, code, offset))
}

fn call(c: &mut Core, o: &Op, selector: u16, offset: u64) -> Done {
    let (old_cs, after) = (c.cs().selector, c.rip_after(o));
    if !c.mode.protected() {
        if offset > c.cs().limit.into() {
            return Err(Fault::GP);
        }
        c.push(o.size, old_cs.into())?;
        c.push(o.size, after)?;
        return real_target(c, selector, offset);
    }
    if selector & 0xfffc == 0 {
        return Err(Fault::GP);
    }
    let mut d = c.need_descriptor(selector)?;
    match d.system_type() {
        None => {}
        Some(4 | 12) => return call_gate(c, d, selector, after),
        Some(_) => return task(c, o, d, selector, true),
    }
    direct_cs(c, d, selector)?;
    c.check_rip(offset, &d.segment(selector))?;
    c.push(o.size, old_cs.into())?;
    c.push(o.size, after)?;
    c.mark_accessed(&mut d)?;
    let cpl = c.mode.cpl();
    c.set_cs(d.segment(selector), cpl, offset);
    Ok(())
}

fn call_gate(c: &mut Core, d: Descriptor, selector: u16, after: u64) -> Done {
    let (target, mut code, offset) = gate(c, d, selector, true)?;
    let old_cs = c.cs().selector;
    let cpl = if code.is_conforming() {
        c.mode.cpl()
    } else {
        code.dpl()
    };
    if c.lma() {
        c.check_rip(offset, &code.segment(target))?;
        return call_gate_long(c, code, target, offset, cpl, after);
    }
    let size = if d.system_type() == Some(12) { 4 } else { 2 };
    if cpl >= c.mode.cpl() {
        c.check_rip(offset, &code.segment(target))?;
        c.push(size, old_cs.into())?;
        c.push(size, after)?;
        c.mark_accessed(&mut code)?;
        c.set_cs(code.segment(target), cpl, offset);
        return Ok(());
    }
    let (stack, sp) = c.inner_stack(cpl)?;
    c.check_rip(offset, &code.segment(target))?;
    let mut frame = vec![c.state.seg[seg::SS].selector.into(), c.regs.get(Reg::Rsp)];
    let params = (d.raw >> 32 & 31) as u8;
    for i in (0..params).rev() {
        frame.push(c.peek(size, u64::from(i) * u64::from(size))?);
    }
    frame.extend([old_cs.into(), after]);
    let sp = c.write_frame(&stack.segment(), sp, size, &frame, cpl)?;
    let ss = c.take_ss(stack)?;
    c.mark_accessed(&mut code)?;
    c.mode.set_cpl(cpl);
    c.put_segment(seg::SS, ss);
    c.set_cs(code.segment(target), cpl, offset);
    c.set_sp(sp);
    Ok(())
}

fn call_gate_long(
    c: &mut Core,
    mut code: Descriptor,
    target: u16,
    offset: u64,
    cpl: u8,
    after: u64,
) -> Done {
    let old = (
        c.cs().selector,
        c.state.seg[seg::SS].selector,
        c.regs.get(Reg::Rsp),
    );
    let inner = cpl < c.mode.cpl();
    let sp = if inner {
        c.tss_pointer(4 + u64::from(cpl) * 8, 8)?
    } else {
        c.regs.get(Reg::Rsp)
    };
    let mut frame = if inner {
        vec![old.1.into(), old.2]
    } else {
        vec![]
    };
    frame.extend([u64::from(old.0), after]);
    let mut at = sp;
    for v in &frame {
        at = at.wrapping_sub(8);
        if !canonical(at) || !canonical(at.wrapping_add(7)) {
            return Err(Fault::SS);
        }
        c.probe_write_as(at, 8, cpl)?;
        c.write_as(at, *v, cpl)?;
    }
    c.mark_accessed(&mut code)?;
    c.mode.set_cpl(cpl);
    if inner {
        c.null_ss(cpl);
    }
    c.set_cs(code.segment(target), cpl, offset);
    c.regs.set(Reg::Rsp, at);
    Ok(())
}

pub(crate) fn retf(c: &mut Core, o: &Op) -> Done {
    recorded(c, o, far_return)
}

#[expect(clippy::cast_possible_truncation, reason = "selectors have 16 bits")]
fn far_return(c: &mut Core, o: &Op) -> Done {
    let size = u64::from(o.size);
    let (rip, selector) = (c.peek(o.size, 0)?, c.peek(o.size, size)? as u16);
    if !c.mode.protected() {
        if rip > c.cs().limit.into() {
            return Err(Fault::GP);
        }
        c.set_sp(c.sp().wrapping_add(2 * size).wrapping_add(o.imm));
        c.load_segment_real(seg::CS, selector);
        c.regs.rip = rip;
        return Ok(());
    }
    let rpl = (selector & 3) as u8;
    let mut cs = c.return_cs(selector)?;
    if rpl == c.mode.cpl() {
        c.check_rip(rip, &cs.segment(selector))?;
        c.mark_accessed(&mut cs)?;
        c.set_cs(cs.segment(selector), rpl, rip);
        // Truncated to the width of the stack pointer in the new code segment.
        c.set_sp(c.sp().wrapping_add(2 * size).wrapping_add(o.imm));
        return Ok(());
    }
    let sp = c.peek(o.size, 2 * size + o.imm)?;
    let ss_selector = c.peek(o.size, 3 * size + o.imm)? as u16;
    let ss = c.return_ss(ss_selector, rpl, cs.is_long())?;
    c.check_rip(rip, &cs.segment(selector))?;
    let ss = c.take_ss(ss)?;
    c.mark_accessed(&mut cs)?;
    c.mode.set_cpl(rpl);
    c.put_segment(seg::SS, ss);
    c.set_cs(cs.segment(selector), rpl, rip);
    c.set_sp(sp);
    c.set_sp(c.sp().wrapping_add(o.imm));
    c.drop_private_segments();
    Ok(())
}

pub(crate) fn iret(c: &mut Core, o: &Op) -> Done {
    c.regs.rip = c.rip_of(o);
    recorded(c, o, |c, o| c.iret(o.size, c.rip_after(o)))
}

const CODE64: u16 = 0xa09b;
const CODE32: u16 = 0xc09b;
const DATA: u16 = 0xc093;
const RING3: u16 = 3 << 5;

fn flat_ss(c: &mut Core, selector: u16, cpl: u8) {
    let access = DATA | u16::from(cpl) << 5;
    let s = Segment {
        selector,
        base: 0,
        limit: u32::MAX,
        access,
        unusable: false,
    };
    c.put_segment(seg::SS, s);
}

#[expect(clippy::cast_possible_truncation, reason = "fields of STAR")]
pub(crate) fn syscall(c: &mut Core, o: &Op) -> Done {
    if !c.efer(Efer::SCE) || !c.mode.is_64bit() {
        return Err(Fault::UD);
    }
    recorded(c, o, |c, o| {
        c.regs.set(Reg::Rcx, c.rip_after(o));
        c.regs.set(Reg::R11, (c.regs.rflags() & !Rflags::RF).bits());
        let m = c.state.msrs;
        let cleared = Rflags::from_bits_truncate(m.fmask) | Rflags::RF;
        c.regs.set_rflags(c.regs.rflags() & !cleared);
        c.debug.suppress_step = !c.regs.flag(Rflags::TF);
        let base = (m.star >> 32) as u16;
        c.mode.set_cpl(0);
        flat_ss(c, base.wrapping_add(8), 0);
        c.set_flat_cs(base & 0xfffc, CODE64, 0);
        c.regs.rip = m.lstar;
        Ok(())
    })
}

pub(crate) fn sysret(c: &mut Core, o: &Op) -> Done {
    if !c.efer(Efer::SCE) || !c.mode.is_64bit() {
        return Err(Fault::UD);
    }
    if c.mode.cpl() != 0 || (o.size == 8 && !canonical(c.regs.get(Reg::Rcx))) {
        return Err(Fault::GP);
    }
    recorded(c, o, |c, o| {
        let base = (c.state.msrs.star >> 48) as u16;
        let wide = o.size == 8;
        c.regs.rip = if wide {
            c.regs.get(Reg::Rcx)
        } else {
            c.regs.get(Reg::Rcx) & 0xffff_ffff
        };
        let flags = Rflags::from_bits_truncate(c.regs.get(Reg::R11));
        c.regs.set_rflags(flags & !(Rflags::RF | Rflags::VM));
        if c.regs.flag(Rflags::TF) {
            // The trap comes before the first instruction of the target.
            c.debug.record_hits(Dr6::BS.bits());
            c.exit.requested = true;
        }
        c.mode.set_cpl(3);
        flat_ss(c, base.wrapping_add(8) | 3, 3);
        let (selector, access) = if wide {
            (base.wrapping_add(16), CODE64)
        } else {
            (base, CODE32)
        };
        c.set_flat_cs(selector | 3, access | RING3, 3);
        Ok(())
    })
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "IA32_SYSENTER_CS holds a selector"
)]
pub(crate) fn sysenter(c: &mut Core, o: &Op) -> Done {
    let m = c.state.msrs;
    let selector = m.sysenter_cs as u16 & 0xfffc;
    if !c.mode.protected() && !c.regs.v86() || selector == 0 {
        return Err(Fault::GP);
    }
    recorded(c, o, |c, _| {
        let long = c.lma();
        c.regs
            .set_rflags(c.regs.rflags() & !(Rflags::VM | Rflags::IF | Rflags::RF));
        c.mode.set_cpl(0);
        flat_ss(c, selector.wrapping_add(8), 0);
        c.set_flat_cs(selector, if long { CODE64 } else { CODE32 }, 0);
        c.regs
            .set(Reg::Rsp, truncate(m.sysenter_esp, if long { 8 } else { 4 }));
        c.regs.rip = truncate(m.sysenter_eip, if long { 8 } else { 4 });
        Ok(())
    })
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "IA32_SYSENTER_CS holds a selector"
)]
pub(crate) fn sysexit(c: &mut Core, o: &Op) -> Done {
    let selector = c.state.msrs.sysenter_cs as u16 & 0xfffc;
    if c.mode.cpl() != 0 || selector == 0 || !c.mode.protected() {
        return Err(Fault::GP);
    }
    let wide = o.size == 8;
    let (rip, sp) = (
        truncate(c.regs.get(Reg::Rdx), if wide { 8 } else { 4 }),
        truncate(c.regs.get(Reg::Rcx), if wide { 8 } else { 4 }),
    );
    if wide && (!canonical(rip) || !canonical(sp)) {
        return Err(Fault::GP);
    }
    recorded(c, o, |c, _| {
        c.regs.set(Reg::Rsp, sp);
        c.regs.rip = rip;
        c.mode.set_cpl(3);
        let offset = if wide { 32 } else { 16 };
        flat_ss(c, selector.wrapping_add(offset + 8) | 3, 3);
        let access = if wide { CODE64 } else { CODE32 } | RING3;
        c.set_flat_cs(selector.wrapping_add(offset) | 3, access, 3);
        Ok(())
    })
}

/// LDS, LES, LFS, LGS, LSS: segment number in `o.s`.
pub(crate) fn load_far(c: &mut Core, o: &Op) -> Done {
    let (selector, offset) = pointer(c, o)?;
    c.load_segment(o.src.number().into(), selector)?;
    c.regs.write_sized(o.dst, o.size, offset);
    c.exit.requested = true;
    Ok(())
}
