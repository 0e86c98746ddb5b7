//! HLT, flags, segment registers, software interrupts, and other instructions.

use super::{Done, read_rm};
use crate::core::{Core, InnerOp, LastOp, Next, Op, truncate};
use crate::fault::{ExitReason, Fault, SoftwareInterruptKind};
use crate::platform::BranchClass;
use crate::registers::Reg;
use hindsight_cpu::state::{Activity, seg};
use hindsight_regs::cr::{Cr0, Cr4};
use hindsight_regs::rflags::Rflags;
use hindsight_regs::vector::Vector;

pub(crate) fn ud(_: &mut Core, _: &Op) -> Done {
    Err(Fault::UD)
}

/// Handles an instruction that the interpreter does not implement.
pub(crate) fn unimplemented(_: &mut Core, _: &Op) -> Done {
    Err(Fault::Unimplemented)
}

/// An instruction of more than 15 bytes.
pub(crate) fn too_long(_: &mut Core, _: &Op) -> Done {
    Err(Fault::GP)
}

pub(crate) fn hlt(c: &mut Core, _: &Op) -> Done {
    if c.mode.cpl() != 0 {
        return Err(Fault::GP);
    }
    c.state.activity = Activity::Halted;
    c.exit.requested = true;
    Ok(())
}

pub(crate) fn cli(c: &mut Core, _: &Op) -> Done {
    let v86 = c.regs.v86();
    if c.mode.cpl() <= c.regs.iopl() || !c.cr0(Cr0::PE) {
        c.regs.set_flag(Rflags::IF, false);
    } else if (v86 && c.cr4(Cr4::VME)) || (!v86 && c.mode.cpl() == 3 && c.cr4(Cr4::PVI)) {
        c.regs.set_flag(Rflags::VIF, false);
    } else {
        return Err(Fault::GP);
    }
    Ok(())
}

pub(crate) fn sti(c: &mut Core, _: &Op) -> Done {
    let v86 = c.regs.v86();
    if c.mode.cpl() <= c.regs.iopl() || !c.cr0(Cr0::PE) {
        if !c.regs.flag(Rflags::IF) {
            c.state.events.sti_shadow = true;
            c.exit.requested = true;
        }
        c.regs.set_flag(Rflags::IF, true);
    } else if (v86 && c.cr4(Cr4::VME)) || (!v86 && c.mode.cpl() == 3 && c.cr4(Cr4::PVI)) {
        if c.regs.flag(Rflags::VIP) {
            return Err(Fault::GP);
        }
        c.regs.set_flag(Rflags::VIF, true);
    } else {
        return Err(Fault::GP);
    }
    Ok(())
}

pub(crate) fn cld(c: &mut Core, o: InnerOp<'_>) -> Next {
    c.regs.set_flag(Rflags::DF, false);
    o.go(c)
}

pub(crate) fn std(c: &mut Core, o: InnerOp<'_>) -> Next {
    c.regs.set_flag(Rflags::DF, true);
    o.go(c)
}

/// CLC (`HOW` 0), STC (1), CMC (2).
pub(crate) fn carry<const HOW: u8>(c: &mut Core, o: InnerOp<'_>) -> Next {
    let on = match HOW {
        0 => false,
        1 => true,
        _ => !c.regs.flags.cf(),
    };
    c.regs.flags = c.regs.flags.with(Rflags::CF, on);
    o.go(c)
}

/// SALC: AL is 0 or FFH by CF.
pub(crate) fn salc(c: &mut Core, o: InnerOp<'_>) -> Next {
    let v = if c.regs.flags.cf() { 0xff_u8 } else { 0 };
    c.regs.write(Reg::Rax, v);
    o.go(c)
}

/// CLAC and STAC (`SET`).
pub(crate) fn smap_ac<const SET: bool>(c: &mut Core, _: &Op) -> Done {
    if c.mode.cpl() != 0 {
        return Err(Fault::UD);
    }
    c.regs.set_flag(Rflags::AC, SET);
    c.update_rights();
    Ok(())
}

/// MOV from a segment register.
pub(crate) fn mov_from_seg(c: &mut Core, o: &Op) -> Done {
    let v = c.state.seg[usize::from(o.src.number()) % 6].selector;
    if o.is_mem() {
        return super::store(c, o, v);
    }
    c.regs.write_sized(o.dst, o.size, v.into());
    Ok(())
}

/// MOV to a segment register.
pub(crate) fn mov_to_seg(c: &mut Core, o: &Op) -> Done {
    let v: u16 = read_rm(c, o, o.src)?;
    let index = usize::from(o.dst.number());
    c.load_segment(index, v)?;
    if index == seg::SS {
        c.shadow_ss();
    }
    c.exit.requested = true;
    Ok(())
}

fn software_interrupt(c: &mut Core, o: &Op, vector: Vector, kind: SoftwareInterruptKind) -> Next {
    c.exit.software_rip = c.rip_of(o);
    c.exit.software_op = o.id();
    c.regs.rip = c.rip_after(o);
    c.progress.end_operation();
    c.leave(ExitReason::SoftwareInterrupt(vector, kind))
}

#[expect(clippy::cast_possible_truncation, reason = "an 8-bit immediate")]
pub(crate) fn int_n(c: &mut Core, o: LastOp<'_>) -> Next {
    let vector = Vector(o.imm as u8);
    if c.regs.v86() && (c.regs.iopl() < 3 || c.cr4(Cr4::VME)) {
        match vme_redirects(c, vector) {
            Ok(true) => {
                c.progress.begin_operation(o.remaining);
                return match int_v86(c, &o, vector) {
                    Ok(()) => c.leave_at_boundary(),
                    Err(fault) => c.fault_at(&o, fault),
                };
            }
            Ok(false) if c.regs.iopl() < 3 => return c.fault_at(&o, Fault::GP),
            Ok(false) => {}
            Err(fault) => return c.fault_at(&o, fault),
        }
    }
    software_interrupt(c, &o, vector, SoftwareInterruptKind::IntN)
}

/// Whether, with CR4.VME, the TSS redirects INT n to the guest's own table.
fn vme_redirects(c: &mut Core, vector: Vector) -> Result<bool, Fault> {
    if !c.cr4(Cr4::VME) {
        return Ok(false);
    }
    let tr = c.state.tr;
    let base: u16 = c.read_sys(tr.base.wrapping_add(0x66) & 0xffff_ffff)?;
    let at = u64::from(base).wrapping_sub(32) + u64::from(vector.0 / 8);
    if base < 32 || at > tr.limit.into() {
        return Ok(false);
    }
    let bits: u8 = c.read_sys(tr.base.wrapping_add(at) & 0xffff_ffff)?;
    Ok(bits >> (vector.0 % 8) & 1 == 0)
}

/// INT n through the virtual-8086 task's own vector table.
fn int_v86(c: &mut Core, o: &Op, vector: Vector) -> Done {
    let entry: u32 = c.read(u64::from(vector.0) * 4)?;
    // Below IOPL 3, VIF stands for the task's IF, and its flags image shows IOPL 3.
    let (flags, cleared) = if c.regs.iopl() == 3 {
        (c.regs.rflags(), Rflags::IF)
    } else {
        let mut image = c.regs.rflags() | Rflags::IOPL;
        image.set(Rflags::IF, c.regs.flag(Rflags::VIF));
        (image, Rflags::VIF)
    };
    let (cs, after) = (c.cs().selector, c.rip_after(o));
    c.push_all(2, &[flags.bits(), cs.into(), after])?;
    let from = c.branch_source(c.rip_of(o));
    c.regs.set_flag(cleared | Rflags::TF, false);
    // TF is clear now, so no single-step trap follows.
    c.debug.suppress_step = true;
    c.load_segment_real(seg::CS, (entry >> 16) as u16);
    c.regs.rip = (entry & 0xffff).into();
    c.record_far(from, c.regs.rip, BranchClass::SoftwareInterrupt);
    Ok(())
}

pub(crate) fn int3(c: &mut Core, o: LastOp<'_>) -> Next {
    software_interrupt(c, &o, Vector::BP, SoftwareInterruptKind::Trap)
}

pub(crate) fn int1(c: &mut Core, o: LastOp<'_>) -> Next {
    software_interrupt(c, &o, Vector::DB, SoftwareInterruptKind::Int1)
}

pub(crate) fn into(c: &mut Core, o: InnerOp<'_>) -> Next {
    if c.regs.flags.condition::<0>() {
        software_interrupt(c, &o, Vector::OF, SoftwareInterruptKind::Trap)
    } else {
        o.go(c)
    }
}

fn set_zf(c: &mut Core, on: bool) {
    c.regs.flags = c.regs.flags.with(Rflags::ZF, on);
}

/// VERR and VERW (`WRITE`).
pub(crate) fn verify<const WRITE: bool>(c: &mut Core, o: &Op) -> Done {
    if !c.mode.protected() {
        return Err(Fault::UD);
    }
    let selector: u16 = read_rm(c, o, o.dst)?;
    let ok = c.inspect(selector)?.is_some_and(|d| {
        if WRITE {
            d.is_writable()
        } else {
            d.is_code_or_data() && (!d.is_code() || d.access() & 2 != 0)
        }
    });
    set_zf(c, ok);
    Ok(())
}

pub(crate) fn lar(c: &mut Core, o: &Op) -> Done {
    if !c.mode.protected() {
        return Err(Fault::UD);
    }
    let selector: u16 = read_rm(c, o, o.src)?;
    let long = c.lma();
    let found = c.inspect(selector)?.filter(|d| match d.system_type() {
        None => true,
        Some(2 | 9 | 11 | 12) => true,
        Some(1 | 3 | 4 | 5) => !long,
        _ => false,
    });
    if let Some(d) = found {
        let v = d.raw >> 32 & 0x00ff_ff00;
        c.regs.write_sized(o.dst, o.size, v);
    }
    set_zf(c, found.is_some());
    Ok(())
}

pub(crate) fn lsl(c: &mut Core, o: &Op) -> Done {
    if !c.mode.protected() {
        return Err(Fault::UD);
    }
    let selector: u16 = read_rm(c, o, o.src)?;
    let long = c.lma();
    let found = c.inspect(selector)?.filter(|d| match d.system_type() {
        None => true,
        Some(2 | 9 | 11) => true,
        Some(1 | 3) => !long,
        _ => false,
    });
    if let Some(d) = found {
        c.regs.write_sized(o.dst, o.size, d.limit().into());
    }
    set_zf(c, found.is_some());
    Ok(())
}

/// ARPL.
pub(crate) fn arpl(c: &mut Core, o: &Op) -> Done {
    if !c.mode.protected() {
        return Err(Fault::UD);
    }
    let rpl = c.regs.read::<u16>(o.src) & 3;
    let raise = |a: u16| if a & 3 < rpl { (a & !3) | rpl } else { a };
    // Without a change there is no write.
    let old: u16 = read_rm(c, o, o.dst)?;
    if raise(old) != old {
        super::write_rm(c, o, o.dst, raise(old))?;
    }
    set_zf(c, raise(old) != old);
    Ok(())
}

/// BOUND.
pub(crate) fn bound(c: &mut Core, o: &Op) -> Done {
    let lin = super::src(c, o, o.size.into())?;
    let above = truncate(c.offset(o).wrapping_add(o.size.into()), o.address_size);
    let above = c.linear(o.segment(), above, o.size.into(), false)?;
    let signed = |v: u64| {
        if o.size == 2 {
            i64::from((v & 0xffff) as u16 as i16)
        } else {
            i64::from((v & 0xffff_ffff) as u32 as i32)
        }
    };
    let low = super::load_sized(c, lin, o.size)?;
    let high = super::load_sized(c, above, o.size)?;
    let v = signed(c.regs.get(o.dst));
    if v < signed(low) || v > signed(high) {
        Err(Fault::NoCode(Vector::BR))
    } else {
        Ok(())
    }
}

/// FWAIT.
pub(crate) fn wait(c: &mut Core, _: &Op) -> Done {
    if c.cr0(Cr0::MP) && c.cr0(Cr0::TS) {
        return Err(Fault::NM);
    }
    c.check_x87_pending()
}

/// MONITOR and MWAIT: the wait ends at once.
pub(crate) fn monitor(c: &mut Core, _: &Op) -> Done {
    if c.mode.cpl() != 0 {
        Err(Fault::UD)
    } else {
        Ok(())
    }
}

/// XGETBV.
pub(crate) fn xgetbv(c: &mut Core, _: &Op) -> Done {
    if !c.cr4(Cr4::OSXSAVE) {
        return Err(Fault::UD);
    }
    let v = match c.regs.read::<u32>(Reg::Rcx) {
        0 => c.state.xcr0,
        1 => c.xinuse(),
        _ => return Err(Fault::GP),
    };
    c.regs.set_edx_eax(v);
    Ok(())
}

pub(crate) fn xsetbv(c: &mut Core, _: &Op) -> Done {
    if !c.cr4(Cr4::OSXSAVE) {
        return Err(Fault::UD);
    }
    let v = (c.regs.get(Reg::Rdx) << 32) | (c.regs.get(Reg::Rax) & 0xffff_ffff);
    let supported: u64 = c.platform().cpuid(0xd, 0)[0].into();
    let avx = v & 4 == 0 || v & 2 != 0;
    let avx512 = v & 0xe0 == 0 || v & 0xe6 == 0xe6;
    if c.mode.cpl() != 0
        || c.regs.read::<u32>(Reg::Rcx) != 0
        || v & 1 == 0
        || v & !supported != 0
        || !avx
        || !avx512
    {
        return Err(Fault::GP);
    }
    c.state.xcr0 = v;
    Ok(())
}

/// RDPKRU and WRPKRU (`WRITE`).
pub(crate) fn pkru<const WRITE: bool>(c: &mut Core, _: &Op) -> Done {
    if !c.cr4(Cr4::PKE) {
        return Err(Fault::UD);
    }
    if c.regs.read::<u32>(Reg::Rcx) != 0 || (WRITE && c.regs.read::<u32>(Reg::Rdx) != 0) {
        return Err(Fault::GP);
    }
    if WRITE {
        c.vec.pkru = c.regs.read(Reg::Rax);
        c.flush_tlb();
        c.exit.requested = true;
    } else {
        let v = c.vec.pkru.into();
        c.regs.set_edx_eax(v);
    }
    Ok(())
}
