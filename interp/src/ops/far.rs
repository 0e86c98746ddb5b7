//! Far branches, IRET, and the fast system calls.

use super::{Done, load_sized};
use crate::core::{Core, cut};
use crate::fault::Fault;
use crate::op::Op;
use crate::platform::BranchClass;
use crate::seg::{Descriptor, canonical, gp, np};
use hindsight_cpu::state::{Segment, seg};
use hindsight_regs::cr::Efer;
use hindsight_regs::dr::Dr6;
use hindsight_regs::rflags::Rflags;

fn noted(c: &mut Core, o: &Op, f: impl FnOnce(&mut Core, &Op) -> Done) -> Done {
    let place = (c.rip_of(o), c.cs_base(), c.cpl);
    let old_sp = c.regs[4];
    let done = f(c, o);
    if done.is_err() {
        c.regs[4] = old_sp;
    } else {
        c.note_far(place, c.rip, BranchClass::Far);
    }
    done
}

/// Selector and offset of a far pointer in memory.
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
    noted(c, o, |c, o| jmp(c, o, selector, offset))
}

pub(crate) fn jmp_mem(c: &mut Core, o: &Op) -> Done {
    let (selector, offset) = pointer(c, o)?;
    noted(c, o, |c, o| jmp(c, o, selector, offset))
}

pub(crate) fn call_imm(c: &mut Core, o: &Op) -> Done {
    let (selector, offset) = immediate(o);
    noted(c, o, |c, o| call(c, o, selector, offset))
}

pub(crate) fn call_mem(c: &mut Core, o: &Op) -> Done {
    let (selector, offset) = pointer(c, o)?;
    noted(c, o, |c, o| call(c, o, selector, offset))
}

fn real_target(c: &mut Core, selector: u16, offset: u64) -> Done {
    if offset > c.cs().limit.into() {
        return Err(Fault::GP);
    }
    c.load_segment_real(seg::CS, selector);
    c.rip = offset;
    Ok(())
}

/// Checks a code segment for a jump or call that keeps the privilege level.
fn direct_cs(c: &Core, d: Descriptor, selector: u16) -> Done {
    let rpl = (selector & 3) as u8;
    let allowed = if d.conforming() {
        d.dpl() <= c.cpl
    } else {
        rpl <= c.cpl && d.dpl() == c.cpl
    };
    if !d.is_code() || !allowed || (c.lma() && d.long() && d.big()) {
        return Err(gp(selector));
    }
    if d.present() {
        Ok(())
    } else {
        Err(np(selector))
    }
}

fn jmp(c: &mut Core, o: &Op, selector: u16, offset: u64) -> Done {
    if !c.prot {
        return real_target(c, selector, offset);
    }
    if selector & 0xfffc == 0 {
        return Err(Fault::GP);
    }
    let mut d = c.need_descriptor(selector)?;
    let (selector, offset) = match d.system() {
        None => (selector, offset),
        Some(4 | 12) => {
            let (target, inner, offset) = gate(c, d, selector, false)?;
            d = inner;
            c.check_rip(offset, &d.segment(target))?;
            c.mark_accessed(&mut d)?;
            let cpl = c.cpl;
            c.set_cs(d.segment(target), cpl, offset);
            return Ok(());
        }
        Some(_) => return task(c, o, d, selector, false),
    };
    direct_cs(c, d, selector)?;
    c.check_rip(offset, &d.segment(selector))?;
    c.mark_accessed(&mut d)?;
    let cpl = c.cpl;
    c.set_cs(d.segment(selector), cpl, offset);
    Ok(())
}

/// A task gate or TSS as the target.
fn task(c: &mut Core, o: &Op, d: Descriptor, selector: u16, call: bool) -> Done {
    if c.lma() {
        return Err(gp(selector));
    }
    let after = c.rip_after(o);
    let low = u16::from(c.cpl) > d.dpl().into() || (selector & 3) > d.dpl().into();
    match d.system() {
        Some(1 | 9 | 5 | 3 | 11) if low => Err(gp(selector)),
        Some(5) if !d.present() => Err(np(selector)),
        Some(5) => {
            let (target, _) = d.gate();
            c.rip = after;
            c.task_jump(target, call)
        }
        Some(1 | 9) => {
            c.rip = after;
            c.task_jump(selector, call)
        }
        _ => Err(gp(selector)),
    }
}

/// A call gate: the selector, code segment and offset it leads to; with JMP none of an inner level.
fn gate(
    c: &mut Core,
    d: Descriptor,
    selector: u16,
    call: bool,
) -> Result<(u16, Descriptor, u64), Fault> {
    let rpl = (selector & 3) as u8;
    let long = c.lma();
    if d.dpl() < c.cpl || d.dpl() < rpl || (long && d.system() != Some(12)) {
        return Err(gp(selector));
    }
    if !d.present() {
        return Err(np(selector));
    }
    let (target, mut offset) = d.gate();
    if long {
        offset |= c.descriptor_high(d, selector)?;
    } else if d.system() == Some(4) {
        offset &= 0xffff;
    }
    if target & 0xfffc == 0 {
        return Err(Fault::GP);
    }
    let code = c.need_descriptor(target)?;
    let inner = code.dpl() < c.cpl && !code.conforming();
    let level_ok = code.dpl() <= c.cpl && (call || !inner);
    if !code.is_code() || !level_ok || (long && (!code.long() || code.big())) {
        return Err(gp(target));
    }
    if !code.present() {
        return Err(np(target));
    }
    Ok((target, code, offset))
}

fn call(c: &mut Core, o: &Op, selector: u16, offset: u64) -> Done {
    let (old_cs, after) = (c.cs().selector, c.rip_after(o));
    if !c.prot {
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
    match d.system() {
        None => {}
        Some(4 | 12) => return call_gate(c, d, selector, after),
        Some(_) => return task(c, o, d, selector, true),
    }
    direct_cs(c, d, selector)?;
    c.check_rip(offset, &d.segment(selector))?;
    c.push(o.size, old_cs.into())?;
    c.push(o.size, after)?;
    c.mark_accessed(&mut d)?;
    let cpl = c.cpl;
    c.set_cs(d.segment(selector), cpl, offset);
    Ok(())
}

fn call_gate(c: &mut Core, d: Descriptor, selector: u16, after: u64) -> Done {
    let (target, mut code, offset) = gate(c, d, selector, true)?;
    let old_cs = c.cs().selector;
    let cpl = if code.conforming() { c.cpl } else { code.dpl() };
    if c.lma() {
        c.check_rip(offset, &code.segment(target))?;
        return call_gate_long(c, code, target, offset, cpl, after);
    }
    let size = if d.system() == Some(12) { 4 } else { 2 };
    if cpl >= c.cpl {
        c.check_rip(offset, &code.segment(target))?;
        c.push(size, old_cs.into())?;
        c.push(size, after)?;
        c.mark_accessed(&mut code)?;
        c.set_cs(code.segment(target), cpl, offset);
        return Ok(());
    }
    let (stack, sp) = c.inner_stack(cpl)?;
    c.check_rip(offset, &code.segment(target))?;
    let mut frame = vec![c.st.seg[seg::SS].selector.into(), c.regs[4]];
    let params = (d.raw >> 32 & 31) as u8;
    for i in (0..params).rev() {
        frame.push(c.peek(size, u64::from(i) * u64::from(size))?);
    }
    frame.extend([old_cs.into(), after]);
    let sp = c.write_frame(&stack.segment(), sp, size, &frame, cpl)?;
    let ss = c.take_ss(stack)?;
    c.mark_accessed(&mut code)?;
    c.cpl = cpl;
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
    let old = (c.cs().selector, c.st.seg[seg::SS].selector, c.regs[4]);
    let inner = cpl < c.cpl;
    let sp = if inner {
        c.tss_pointer(4 + u64::from(cpl) * 8, 8)?
    } else {
        c.regs[4]
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
    c.cpl = cpl;
    if inner {
        c.null_ss(cpl);
    }
    c.set_cs(code.segment(target), cpl, offset);
    c.regs[4] = at;
    Ok(())
}

pub(crate) fn retf(c: &mut Core, o: &Op) -> Done {
    noted(c, o, far_return)
}

#[expect(clippy::cast_possible_truncation, reason = "selectors have 16 bits")]
fn far_return(c: &mut Core, o: &Op) -> Done {
    let size = u64::from(o.size);
    let (rip, selector) = (c.peek(o.size, 0)?, c.peek(o.size, size)? as u16);
    if !c.prot {
        if rip > c.cs().limit.into() {
            return Err(Fault::GP);
        }
        c.set_sp(c.sp().wrapping_add(2 * size).wrapping_add(o.imm));
        c.load_segment_real(seg::CS, selector);
        c.rip = rip;
        return Ok(());
    }
    let rpl = (selector & 3) as u8;
    let mut cs = c.return_cs(selector)?;
    if rpl == c.cpl {
        c.check_rip(rip, &cs.segment(selector))?;
        c.mark_accessed(&mut cs)?;
        c.set_sp(c.sp().wrapping_add(2 * size).wrapping_add(o.imm));
        c.set_cs(cs.segment(selector), rpl, rip);
        return Ok(());
    }
    let sp = c.peek(o.size, 2 * size + o.imm)?;
    let ss_selector = c.peek(o.size, 3 * size + o.imm)? as u16;
    let ss = c.return_ss(ss_selector, rpl, cs.long())?;
    c.check_rip(rip, &cs.segment(selector))?;
    let ss = c.take_ss(ss)?;
    c.mark_accessed(&mut cs)?;
    c.cpl = rpl;
    c.put_segment(seg::SS, ss);
    c.set_cs(cs.segment(selector), rpl, rip);
    c.set_popped_sp(sp, o.size);
    c.set_sp(c.sp().wrapping_add(o.imm));
    c.drop_private_segments();
    Ok(())
}

pub(crate) fn iret(c: &mut Core, o: &Op) -> Done {
    c.rip = c.rip_of(o);
    noted(c, o, |c, o| c.iret(o.size, c.rip_after(o)))
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
    if !c.efer(Efer::SCE) || c.code != 8 {
        return Err(Fault::UD);
    }
    noted(c, o, |c, o| {
        c.regs[1] = c.rip_after(o);
        c.regs[11] = (c.rflags() & !Rflags::RF).bits();
        let m = c.st.msrs;
        let cleared = Rflags::from_bits_truncate(m.fmask) | Rflags::RF;
        c.set_rflags(c.rflags() & !cleared);
        c.no_step = !c.tf();
        let base = (m.star >> 32) as u16;
        c.cpl = 0;
        flat_ss(c, base.wrapping_add(8), 0);
        c.set_flat_cs(base & 0xfffc, CODE64, 0);
        c.rip = m.lstar;
        Ok(())
    })
}

pub(crate) fn sysret(c: &mut Core, o: &Op) -> Done {
    if !c.efer(Efer::SCE) || c.code != 8 {
        return Err(Fault::UD);
    }
    if c.cpl != 0 || (o.size == 8 && !canonical(c.regs[1])) {
        return Err(Fault::GP);
    }
    noted(c, o, |c, o| {
        let base = (c.st.msrs.star >> 48) as u16;
        let wide = o.size == 8;
        c.rip = if wide {
            c.regs[1]
        } else {
            c.regs[1] & 0xffff_ffff
        };
        let flags = Rflags::from_bits_truncate(c.regs[11]);
        c.set_rflags(flags & !(Rflags::RF | Rflags::VM));
        if c.tf() {
            // The trap comes before the first instruction of the target.
            c.hits |= Dr6::BS.bits();
            c.leave = true;
        }
        c.cpl = 3;
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
    let m = c.st.msrs;
    let selector = m.sysenter_cs as u16 & 0xfffc;
    if !c.prot && !c.v86() || selector == 0 {
        return Err(Fault::GP);
    }
    noted(c, o, |c, _| {
        let long = c.lma();
        c.set_rflags(c.rflags() & !(Rflags::VM | Rflags::IF | Rflags::RF));
        c.cpl = 0;
        flat_ss(c, selector.wrapping_add(8), 0);
        c.set_flat_cs(selector, if long { CODE64 } else { CODE32 }, 0);
        c.regs[4] = cut(m.sysenter_esp, if long { 8 } else { 4 });
        c.rip = cut(m.sysenter_eip, if long { 8 } else { 4 });
        Ok(())
    })
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "IA32_SYSENTER_CS holds a selector"
)]
pub(crate) fn sysexit(c: &mut Core, o: &Op) -> Done {
    let selector = c.st.msrs.sysenter_cs as u16 & 0xfffc;
    if c.cpl != 0 || selector == 0 || !c.prot {
        return Err(Fault::GP);
    }
    let wide = o.size == 8;
    let (rip, sp) = (
        cut(c.regs[2], if wide { 8 } else { 4 }),
        cut(c.regs[1], if wide { 8 } else { 4 }),
    );
    if wide && (!canonical(rip) || !canonical(sp)) {
        return Err(Fault::GP);
    }
    noted(c, o, |c, _| {
        c.regs[4] = sp;
        c.rip = rip;
        c.cpl = 3;
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
    c.load_segment(usize::from(o.s), selector)?;
    c.put_sized(o.d, o.size, offset);
    c.leave = true;
    Ok(())
}
