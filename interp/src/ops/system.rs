//! HLT, flags, segment registers, software interrupts, and what else is left.

use super::{Done, read_rm};
use crate::core::{Core, cut};
use crate::fault::{ExitReason, Fault, SoftwareInterruptKind};
use crate::op::{Next, Op};
use crate::platform::BranchClass;
use hindsight_cpu::state::{Activity, seg};
use hindsight_regs::cr::{Cr0, Cr4};
use hindsight_regs::rflags::Rflags;
use hindsight_regs::vector::Vector;

pub(crate) fn ud(_: &mut Core, _: &Op) -> Done {
    Err(Fault::UD)
}

/// An instruction that the interpreter lacks.
pub(crate) fn missing(_: &mut Core, _: &Op) -> Done {
    Err(Fault::Unimplemented)
}

/// An instruction of more than 15 bytes.
pub(crate) fn too_long(_: &mut Core, _: &Op) -> Done {
    Err(Fault::GP)
}

pub(crate) fn hlt(c: &mut Core, _: &Op) -> Done {
    if c.cpl != 0 {
        return Err(Fault::GP);
    }
    c.st.activity = Activity::Halted;
    c.leave = true;
    Ok(())
}

pub(crate) fn cli(c: &mut Core, _: &Op) -> Done {
    let v86 = c.v86();
    if c.cpl <= c.iopl() || !c.cr0(Cr0::PE) {
        c.fl &= !Rflags::IF;
    } else if (v86 && c.cr4(Cr4::VME)) || (!v86 && c.cpl == 3 && c.cr4(Cr4::PVI)) {
        c.fl &= !Rflags::VIF;
    } else {
        return Err(Fault::GP);
    }
    Ok(())
}

pub(crate) fn sti(c: &mut Core, _: &Op) -> Done {
    let v86 = c.v86();
    if c.cpl <= c.iopl() || !c.cr0(Cr0::PE) {
        if !c.flag(Rflags::IF) {
            c.st.events.sti_shadow = true;
            c.leave = true;
        }
        c.fl |= Rflags::IF;
    } else if (v86 && c.cr4(Cr4::VME)) || (!v86 && c.cpl == 3 && c.cr4(Cr4::PVI)) {
        if c.flag(Rflags::VIP) {
            return Err(Fault::GP);
        }
        c.fl |= Rflags::VIF;
    } else {
        return Err(Fault::GP);
    }
    Ok(())
}

pub(crate) fn cld(c: &mut Core, o: &Op) -> Next {
    c.fl &= !Rflags::DF;
    o.go(c)
}

pub(crate) fn std(c: &mut Core, o: &Op) -> Next {
    c.fl |= Rflags::DF;
    o.go(c)
}

/// CLC (`HOW` 0), STC (1), CMC (2).
pub(crate) fn carry<const HOW: u8>(c: &mut Core, o: &Op) -> Next {
    let on = match HOW {
        0 => false,
        1 => true,
        _ => !c.cc.cf(),
    };
    c.cc = c.cc.with(Rflags::CF, on);
    o.go(c)
}

/// SALC: AL is 0 or FFH by CF.
pub(crate) fn salc(c: &mut Core, o: &Op) -> Next {
    let v = if c.cc.cf() { 0xff_u8 } else { 0 };
    c.put(0, v);
    o.go(c)
}

/// CLAC and STAC (`SET`).
pub(crate) fn smap_ac<const SET: bool>(c: &mut Core, _: &Op) -> Done {
    if c.cpl != 0 {
        return Err(Fault::UD);
    }
    c.fl.set(Rflags::AC, SET);
    c.update_set();
    Ok(())
}

/// MOV from a segment register.
pub(crate) fn mov_from_seg(c: &mut Core, o: &Op) -> Done {
    let v = c.st.seg[usize::from(o.s) % 6].selector;
    if super::is_mem(o) {
        return super::store(c, o, v);
    }
    c.put_sized(o.d, o.size, v.into());
    Ok(())
}

/// MOV to a segment register.
pub(crate) fn mov_to_seg(c: &mut Core, o: &Op) -> Done {
    let v: u16 = read_rm(c, o, o.s)?;
    c.load_segment(usize::from(o.d), v)?;
    if usize::from(o.d) == seg::SS {
        c.shadow_ss();
    }
    c.leave = true;
    Ok(())
}

fn software(c: &mut Core, o: &Op, vector: Vector, kind: SoftwareInterruptKind) -> Next {
    c.soft_rip = c.rip_of(o);
    c.soft_op = o;
    c.rip = c.rip_after(o);
    c.left = 0;
    c.exit(ExitReason::SoftwareInterrupt(vector, kind))
}

#[expect(clippy::cast_possible_truncation, reason = "an 8-bit immediate")]
pub(crate) fn int_n(c: &mut Core, o: &Op) -> Next {
    let vector = Vector(o.imm as u8);
    if c.v86() && (c.iopl() < 3 || c.cr4(Cr4::VME)) {
        match vme_redirects(c, vector) {
            Ok(true) => {
                c.left = o.left;
                return match int_v86(c, o, vector) {
                    Ok(()) => super::poll(c),
                    Err(fault) => c.fault_at(o, fault),
                };
            }
            Ok(false) if c.iopl() < 3 => return c.fault_at(o, Fault::GP),
            Ok(false) => {}
            Err(fault) => return c.fault_at(o, fault),
        }
    }
    software(c, o, vector, SoftwareInterruptKind::IntN)
}

/// With CR4.VME, the redirection bitmap in the TSS sends INT n to the guest's own table.
fn vme_redirects(c: &mut Core, vector: Vector) -> Result<bool, Fault> {
    if !c.cr4(Cr4::VME) {
        return Ok(false);
    }
    let tr = c.st.tr;
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
    // Below IOPL 3 the task's IF is VIF, and its image shows IOPL 3.
    let (flags, cleared) = if c.iopl() == 3 {
        (c.rflags(), Rflags::IF)
    } else {
        let mut image = c.rflags() | Rflags::IOPL;
        image.set(Rflags::IF, c.flag(Rflags::VIF));
        (image, Rflags::VIF)
    };
    let old = c.regs[4];
    let cs = c.cs().selector;
    let after = c.rip_after(o);
    let pushed = c
        .push(2, flags.bits())
        .and_then(|()| c.push(2, cs.into()))
        .and_then(|()| c.push(2, after));
    if let Err(fault) = pushed {
        c.regs[4] = old;
        return Err(fault);
    }
    let place = (c.rip_of(o), c.cs_base(), c.cpl);
    c.fl &= !(cleared | Rflags::TF);
    // With TF clear nothing is left to trap.
    c.no_step = true;
    c.load_segment_real(seg::CS, (entry >> 16) as u16);
    c.rip = (entry & 0xffff).into();
    c.note_far(place, c.rip, BranchClass::SoftwareInterrupt);
    Ok(())
}

pub(crate) fn int3(c: &mut Core, o: &Op) -> Next {
    software(c, o, Vector::BP, SoftwareInterruptKind::Trap)
}

pub(crate) fn int1(c: &mut Core, o: &Op) -> Next {
    software(c, o, Vector::DB, SoftwareInterruptKind::Int1)
}

pub(crate) fn into(c: &mut Core, o: &Op) -> Next {
    if c.cc.condition::<0>() {
        software(c, o, Vector::OF, SoftwareInterruptKind::Trap)
    } else {
        o.go(c)
    }
}

fn set_zf(c: &mut Core, on: bool) {
    c.cc = c.cc.with(Rflags::ZF, on);
}

/// VERR and VERW (`WRITE`).
pub(crate) fn verify<const WRITE: bool>(c: &mut Core, o: &Op) -> Done {
    if !c.prot {
        return Err(Fault::UD);
    }
    let selector: u16 = read_rm(c, o, o.d)?;
    let ok = c.inspect(selector)?.is_some_and(|d| {
        if WRITE {
            d.writable()
        } else {
            d.ordinary() && (!d.is_code() || d.access() & 2 != 0)
        }
    });
    set_zf(c, ok);
    Ok(())
}

pub(crate) fn lar(c: &mut Core, o: &Op) -> Done {
    if !c.prot {
        return Err(Fault::UD);
    }
    let selector: u16 = read_rm(c, o, o.s)?;
    let long = c.lma();
    let found = c.inspect(selector)?.filter(|d| match d.system() {
        None => true,
        Some(2 | 9 | 11 | 12) => true,
        Some(1 | 3 | 4 | 5) => !long,
        _ => false,
    });
    if let Some(d) = found {
        let v = d.raw >> 32 & 0x00ff_ff00;
        c.put_sized(o.d, o.size, v);
    }
    set_zf(c, found.is_some());
    Ok(())
}

pub(crate) fn lsl(c: &mut Core, o: &Op) -> Done {
    if !c.prot {
        return Err(Fault::UD);
    }
    let selector: u16 = read_rm(c, o, o.s)?;
    let long = c.lma();
    let found = c.inspect(selector)?.filter(|d| match d.system() {
        None => true,
        Some(2 | 9 | 11) => true,
        Some(1 | 3) => !long,
        _ => false,
    });
    if let Some(d) = found {
        c.put_sized(o.d, o.size, d.limit().into());
    }
    set_zf(c, found.is_some());
    Ok(())
}

/// ARPL.
pub(crate) fn arpl(c: &mut Core, o: &Op) -> Done {
    if !c.prot {
        return Err(Fault::UD);
    }
    let rpl = c.get::<u16>(o.s) & 3;
    let raise = |a: u16| if a & 3 < rpl { (a & !3) | rpl } else { a };
    // Without a change there is no write.
    let old: u16 = read_rm(c, o, o.d)?;
    if raise(old) != old {
        super::write_rm(c, o, o.d, raise(old))?;
    }
    set_zf(c, raise(old) != old);
    Ok(())
}

/// BOUND.
pub(crate) fn bound(c: &mut Core, o: &Op) -> Done {
    let lin = super::src(c, o, o.size.into())?;
    let above = cut(c.offset(o).wrapping_add(o.size.into()), o.asz);
    let above = c.linear(o.seg, above, o.size.into(), false)?;
    let signed = |v: u64| {
        if o.size == 2 {
            i64::from((v & 0xffff) as u16 as i16)
        } else {
            i64::from((v & 0xffff_ffff) as u32 as i32)
        }
    };
    let low = super::load_sized(c, lin, o.size)?;
    let high = super::load_sized(c, above, o.size)?;
    let v = signed(c.reg(o.d));
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
    if c.cpl != 0 { Err(Fault::UD) } else { Ok(()) }
}

/// XGETBV.
pub(crate) fn xgetbv(c: &mut Core, _: &Op) -> Done {
    if !c.cr4(Cr4::OSXSAVE) {
        return Err(Fault::UD);
    }
    let v = match c.get::<u32>(1) {
        0 => c.st.xcr0,
        1 => c.st.xcr0 & c.vec.in_use(),
        _ => return Err(Fault::GP),
    };
    c.put_edx_eax(v);
    Ok(())
}

pub(crate) fn xsetbv(c: &mut Core, _: &Op) -> Done {
    if !c.cr4(Cr4::OSXSAVE) {
        return Err(Fault::UD);
    }
    let v = (c.regs[2] << 32) | (c.regs[0] & 0xffff_ffff);
    let supported: u64 = c.platform().cpuid(0xd, 0)[0].into();
    let avx = v & 4 == 0 || v & 2 != 0;
    let avx512 = v & 0xe0 == 0 || v & 0xe6 == 0xe6;
    if c.cpl != 0 || c.get::<u32>(1) != 0 || v & 1 == 0 || v & !supported != 0 || !avx || !avx512 {
        return Err(Fault::GP);
    }
    c.st.xcr0 = v;
    Ok(())
}

/// RDPKRU and WRPKRU (`WRITE`).
pub(crate) fn pkru<const WRITE: bool>(c: &mut Core, _: &Op) -> Done {
    if !c.cr4(Cr4::PKE) {
        return Err(Fault::UD);
    }
    if c.get::<u32>(1) != 0 || (WRITE && c.get::<u32>(2) != 0) {
        return Err(Fault::GP);
    }
    if WRITE {
        c.vec.pkru = c.get(0);
        c.flush_tlb();
        c.leave = true;
    } else {
        let v = c.vec.pkru.into();
        c.put_edx_eax(v);
    }
    Ok(())
}
