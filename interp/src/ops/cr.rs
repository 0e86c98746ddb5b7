//! Control and debug registers. SDM Vol. 3A, "Control Registers".

use super::Done;
use crate::core::{Core, Op, truncate};
use crate::fault::Fault;
use crate::platform::SystemEvent;
use hindsight_cpu::control::{self, ControlMasks};
use hindsight_cpu::state::seg;
use hindsight_regs::cr::{Cr0, Cr4, Efer};

fn privileged(c: &Core) -> Done {
    if c.mode.cpl() == 0 {
        Ok(())
    } else {
        Err(Fault::GP)
    }
}

/// MOV from CRn: register in `o.d`, n in `o.s`.
pub(crate) fn read(c: &mut Core, o: &Op) -> Done {
    privileged(c)?;
    let v = match o.src.number() {
        0 => c.state.cr0,
        2 => c.state.cr2,
        3 => c.state.cr3,
        4 => c.state.cr4,
        8 => c.platform().cr8().into(),
        _ => return Err(Fault::UD),
    };
    let size = c.mode.wide_size();
    c.regs.write_sized(o.dst, size, v);
    Ok(())
}

/// MOV to CRn: n in `o.d`, register in `o.s`.
pub(crate) fn write(c: &mut Core, o: &Op) -> Done {
    privileged(c)?;
    let size = c.mode.wide_size();
    let v = truncate(c.regs.get(o.src), size);
    match o.dst.number() {
        0 => c.write_cr0(v)?,
        2 => c.state.cr2 = v,
        3 => c.write_cr3(v)?,
        4 => c.write_cr4(v)?,
        8 => {
            let priority = u8::try_from(v).ok();
            let priority = priority
                .filter(|_| control::accepts_cr8(v))
                .ok_or(Fault::GP)?;
            c.state.cr8 = v;
            c.platform().set_cr8(priority);
        }
        _ => return Err(Fault::UD),
    }
    let number = o.dst.number();
    c.debug.stops.record_control(number, v);
    c.report_system_event(|_| SystemEvent::ControlRegister { number, value: v });
    c.exit.requested = true;
    Ok(())
}

/// Bit 63 of the source of MOV to CR3: the translations of the PCID are kept.
const NO_FLUSH: u64 = 1 << 63;

impl Core {
    fn write_cr0(&mut self, v: u64) -> Done {
        if !control::accepts_cr0(v) {
            return Err(Fault::GP);
        }
        let v = (v & Cr0::all().bits()) | Cr0::ET.bits();
        let old = self.state.cr0;
        let changed = Cr0::from_bits_retain(v ^ old);
        if changed.contains(Cr0::PG) && v & Cr0::PG.bits() != 0 {
            if self.efer(Efer::LME) {
                if !self.cr4(Cr4::PAE) || self.cs().long() || self.state.tr.access & 8 == 0 {
                    return Err(Fault::GP);
                }
                self.state.efer |= Efer::LMA.bits();
            }
        } else if changed.contains(Cr0::PG) {
            if self.mode.is_64bit() || self.cr4(Cr4::PCIDE) {
                return Err(Fault::GP);
            }
            self.state.efer &= !Efer::LMA.bits();
        }
        let paging = v & Cr0::PG.bits() != 0;
        if paging && changed.intersects(Cr0::PG | Cr0::CD | Cr0::NW) {
            self.reload_pdptrs(self.cr4(Cr4::PAE))?;
        }
        self.state.cr0 = v;
        if changed.intersects(Cr0::PG | Cr0::WP | Cr0::PE) {
            self.flush_tlb();
        }
        if changed.contains(Cr0::PE) {
            // The privilege level of real-address mode is 0 whatever SS says.
            self.mode.set_cpl(0);
            self.state.seg[seg::SS].access &= !(3 << 5);
        }
        self.update_mode();
        Ok(())
    }

    /// Loads the PDPTEs from the address in CR3 if PAE paging is on after a MOV to CR0 or CR4 that
    /// changes one of the bits for which it does so. SDM Vol. 3A, "PDPTE Registers".
    fn reload_pdptrs(&mut self, pae: bool) -> Done {
        if !pae || self.lma() {
            return Ok(());
        }
        self.load_pdptrs(self.state.cr3)
    }

    fn write_cr3(&mut self, v: u64) -> Done {
        let mut v = v;
        let mut keep = false;
        if self.lma() {
            if !control::accepts_cr3(&self.state, self.mmu.phys_mask(), v) {
                return Err(Fault::GP);
            }
            if self.cr4(Cr4::PCIDE) {
                keep = v & NO_FLUSH != 0;
                v &= !NO_FLUSH;
            }
        } else if self.cr4(Cr4::PAE) && self.cr0(Cr0::PG) {
            self.load_pdptrs(v)?;
        }
        self.state.cr3 = v;
        self.load_context(keep);
        Ok(())
    }

    /// The bits that a write to each control register may set.
    pub(crate) fn controls(&mut self) -> ControlMasks {
        let platform = self.platform();
        ControlMasks::from_cpuid(|leaf, subleaf| platform.cpuid(leaf, subleaf))
    }

    fn write_cr4(&mut self, v: u64) -> Done {
        let old = self.state.cr4;
        let controls = self.controls();
        if !controls.accepts_cr4(&self.state, v) {
            return Err(Fault::GP);
        }
        let changed = Cr4::from_bits_retain(v ^ old);
        let reloads = changed.intersects(Cr4::PAE | Cr4::PGE | Cr4::PSE | Cr4::SMEP);
        if self.cr0(Cr0::PG) && reloads {
            self.reload_pdptrs(v & Cr4::PAE.bits() != 0)?;
        }
        self.state.cr4 = v;
        self.flush_tlb();
        self.update_mode();
        Ok(())
    }
}

/// MOV from DRn.
pub(crate) fn read_dr(c: &mut Core, o: &Op) -> Done {
    let v = c.read_dr(o.src.number())?;
    let size = c.mode.wide_size();
    c.regs.write_sized(o.dst, size, v);
    Ok(())
}

/// MOV to DRn.
pub(crate) fn write_dr(c: &mut Core, o: &Op) -> Done {
    c.write_dr(o.dst.number(), c.regs.get(o.src))
}

pub(crate) fn clts(c: &mut Core, _: &Op) -> Done {
    privileged(c)?;
    c.state.cr0 &= !Cr0::TS.bits();
    c.debug.stops.record_control(0, c.state.cr0);
    c.exit.requested = true;
    Ok(())
}

/// LMSW: can set PE, never clear it.
pub(crate) fn lmsw(c: &mut Core, o: &Op) -> Done {
    privileged(c)?;
    let v: u16 = super::read_rm(c, o, o.dst)?;
    let v = u64::from(v) & 0xf;
    let keep = c.state.cr0 & !0xe;
    c.write_cr0(keep | v)?;
    c.debug.stops.record_control(0, keep | v);
    c.exit.requested = true;
    Ok(())
}

fn umip(c: &Core) -> Done {
    if c.cr4(Cr4::UMIP) && c.mode.cpl() > 0 {
        Err(Fault::GP)
    } else {
        Ok(())
    }
}

/// SMSW.
pub(crate) fn smsw(c: &mut Core, o: &Op) -> Done {
    umip(c)?;
    let v = c.state.cr0;
    store_word(c, o, v)
}

/// Writes 16 bits to memory or the operand size to a register.
fn store_word(c: &mut Core, o: &Op, v: u64) -> Done {
    if o.is_mem() {
        #[expect(clippy::cast_possible_truncation, reason = "a word is stored")]
        return super::store(c, o, v as u16);
    }
    c.regs.write_sized(o.dst, o.size, v);
    Ok(())
}

pub(crate) fn sldt(c: &mut Core, o: &Op) -> Done {
    if !c.mode.protected() {
        return Err(Fault::UD);
    }
    umip(c)?;
    store_word(c, o, c.state.ldtr.selector.into())
}

pub(crate) fn str(c: &mut Core, o: &Op) -> Done {
    if !c.mode.protected() {
        return Err(Fault::UD);
    }
    umip(c)?;
    store_word(c, o, c.state.tr.selector.into())
}

pub(crate) fn lldt(c: &mut Core, o: &Op) -> Done {
    if !c.mode.protected() {
        return Err(Fault::UD);
    }
    privileged(c)?;
    let v: u16 = super::read_rm(c, o, o.dst)?;
    c.load_ldtr(v)?;
    c.serialize();
    Ok(())
}

pub(crate) fn ltr(c: &mut Core, o: &Op) -> Done {
    if !c.mode.protected() {
        return Err(Fault::UD);
    }
    privileged(c)?;
    let v: u16 = super::read_rm(c, o, o.dst)?;
    c.load_tr(v)?;
    c.serialize();
    Ok(())
}

fn read_table(c: &mut Core, o: &Op) -> Result<(u16, u64), Fault> {
    privileged(c)?;
    let wide = c.mode.is_64bit();
    let lin = super::src(c, o, if wide { 10 } else { 6 })?;
    let limit: u16 = c.read(lin)?;
    let base = if wide {
        c.read::<u64>(lin + 2)?
    } else {
        c.read::<u32>(lin + 2)?.into()
    };
    if wide && !crate::seg::canonical(base) {
        return Err(Fault::GP);
    }
    Ok((
        limit,
        if o.size == 2 && !wide {
            base & 0xff_ffff
        } else {
            base
        },
    ))
}

pub(crate) fn lgdt(c: &mut Core, o: &Op) -> Done {
    let (limit, base) = read_table(c, o)?;
    c.state.gdtr = hindsight_cpu::state::DescriptorTable { base, limit };
    c.serialize();
    Ok(())
}

pub(crate) fn lidt(c: &mut Core, o: &Op) -> Done {
    let (limit, base) = read_table(c, o)?;
    c.state.idtr = hindsight_cpu::state::DescriptorTable { base, limit };
    c.serialize();
    Ok(())
}

fn store_table(c: &mut Core, o: &Op, table: hindsight_cpu::state::DescriptorTable) -> Done {
    umip(c)?;
    let len = if c.mode.is_64bit() { 10 } else { 6 };
    let lin = super::dst(c, o, len)?;
    c.check_alignment(lin, 4)?;
    let mut data = [0; 10];
    data[..2].copy_from_slice(&table.limit.to_le_bytes());
    data[2..].copy_from_slice(&table.base.to_le_bytes());
    c.write_bytes(lin, &data[..len])
}

pub(crate) fn sgdt(c: &mut Core, o: &Op) -> Done {
    store_table(c, o, c.state.gdtr)
}

pub(crate) fn sidt(c: &mut Core, o: &Op) -> Done {
    store_table(c, o, c.state.idtr)
}

pub(crate) fn invlpg(c: &mut Core, o: &Op) -> Done {
    privileged(c)?;
    let ea = c.offset(o);
    let lin = if c.mode.is_64bit() {
        c.ea64(o)
    } else {
        c.state.seg[o.segment()].base.wrapping_add(ea) & 0xffff_ffff
    };
    if c.mode.is_64bit() && !crate::seg::canonical(lin) {
        return Ok(());
    }
    c.invalidate_page(lin);
    c.exit.requested = true;
    Ok(())
}

/// INVPCID.
pub(crate) fn invpcid(c: &mut Core, o: &Op) -> Done {
    /// Types: one address, one context, everything, everything but global pages.
    const ADDRESS: u64 = 0;
    const CONTEXT: u64 = 1;
    const ALL: u64 = 2;
    const LOCALS: u64 = 3;
    privileged(c)?;
    let lin = super::src(c, o, 16)?;
    let pcid: u64 = c.read(lin)?;
    let address: u64 = c.read(lin.wrapping_add(8))?;
    let kind = truncate(c.regs.get(o.dst), c.mode.wide_size());
    let one = matches!(kind, ADDRESS | CONTEXT);
    if kind > LOCALS
        || pcid & !0xfff != 0
        || (one && !c.cr4(Cr4::PCIDE) && pcid != 0)
        || (kind == ADDRESS && !crate::seg::canonical(address))
    {
        return Err(Fault::GP);
    }
    let pcid = (pcid & 0xfff) as u16;
    match kind {
        ADDRESS if pcid == c.pcid() => c.invalidate_page(address),
        CONTEXT if pcid == c.pcid() => c.load_context(false),
        // More than one address may be invalidated.
        ADDRESS | CONTEXT => c.mmu.flush_other(pcid),
        ALL => c.flush_tlb(),
        _ => c.flush_local_tlb(),
    }
    c.exit.requested = true;
    Ok(())
}

/// WBINVD and INVD: guest memory is always current, so only the cache models are flushed.
pub(crate) fn wbinvd(c: &mut Core, _: &Op) -> Done {
    privileged(c)?;
    c.platform().caches_flushed(None);
    c.jit.forget_lines();
    c.serialize();
    Ok(())
}
