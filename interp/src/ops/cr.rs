//! Control and debug registers. SDM Vol. 3A, "Control Registers".

use super::Done;
use crate::core::*;
use crate::op::Op;
use hindsight_cpu::control::{self, ControlMasks};
use hindsight_cpu::state::seg;
use hindsight_regs::cr::Cr0;

fn privileged(c: &Core) -> Done {
    if c.cpl == 0 { Ok(()) } else { Err(GP0) }
}

/// MOV from CRn: register in `o.d`, n in `o.s`.
pub(crate) fn read(c: &mut Core, o: &Op) -> Done {
    privileged(c)?;
    let v = match o.s {
        0 => c.st.cr0,
        2 => c.st.cr2,
        3 => c.st.cr3,
        4 => c.st.cr4,
        8 => c.platform().cr8().into(),
        _ => return Err(UD_),
    };
    let size = if c.code == 8 { 8 } else { 4 };
    c.put_sized(o.d, size, v);
    Ok(())
}

/// MOV to CRn: n in `o.d`, register in `o.s`.
pub(crate) fn write(c: &mut Core, o: &Op) -> Done {
    privileged(c)?;
    let size = if c.code == 8 { 8 } else { 4 };
    let v = cut(c.reg(o.s), size);
    match o.d {
        0 => c.write_cr0(v)?,
        2 => c.st.cr2 = v,
        3 => c.write_cr3(v)?,
        4 => c.write_cr4(v)?,
        8 => {
            let priority = u8::try_from(v).ok();
            let priority = priority.filter(|_| control::accepts_cr8(v)).ok_or(GP0)?;
            c.st.cr8 = v;
            c.platform().set_cr8(priority);
        }
        _ => return Err(UD_),
    }
    c.stop_at_control(o.d, v);
    c.leave = true;
    Ok(())
}

impl Core {
    fn write_cr0(&mut self, v: u64) -> Done {
        if !control::accepts_cr0(v) {
            return Err(GP0);
        }
        let v = (v & Cr0::all().bits()) | CR0_ET;
        let old = self.st.cr0;
        let paging = (v ^ old) & CR0_PG != 0;
        if paging && v & CR0_PG != 0 {
            if self.st.efer & EFER_LME != 0 {
                if !self.cr4(CR4_PAE) || self.cs().long() || self.st.tr.access & 8 == 0 {
                    return Err(GP0);
                }
                self.st.efer |= EFER_LMA;
            } else if self.cr4(CR4_PAE) {
                self.load_pdptrs(self.st.cr3)?;
            }
        } else if paging {
            if self.code == 8 || self.cr4(CR4_PCIDE) {
                return Err(GP0);
            }
            self.st.efer &= !EFER_LMA;
        }
        self.st.cr0 = v;
        if (v ^ old) & (CR0_PG | CR0_WP | CR0_PE) != 0 {
            self.flush_tlb();
        }
        if (v ^ old) & CR0_PE != 0 {
            // The privilege level of real-address mode is 0 whatever SS says.
            self.cpl = 0;
            self.st.seg[seg::SS].access &= !(3 << 5);
        }
        self.update_mode();
        Ok(())
    }

    fn write_cr3(&mut self, v: u64) -> Done {
        let mut v = v;
        if self.lma() {
            if !control::accepts_cr3(&self.st, self.phys_mask, v) {
                return Err(GP0);
            }
            if self.cr4(CR4_PCIDE) {
                v &= !(1 << 63);
            }
        } else if self.cr4(CR4_PAE) && self.cr0(CR0_PG) {
            self.load_pdptrs(v)?;
        }
        self.st.cr3 = v;
        self.flush_local_tlb();
        Ok(())
    }

    /// What control registers take.
    pub(crate) fn controls(&mut self) -> ControlMasks {
        let platform = self.platform();
        ControlMasks::from_cpuid(|leaf, subleaf| platform.cpuid(leaf, subleaf))
    }

    fn write_cr4(&mut self, v: u64) -> Done {
        let old = self.st.cr4;
        let controls = self.controls();
        if !controls.accepts_cr4(&self.st, v) {
            return Err(GP0);
        }
        let changed = v ^ old;
        if self.cr0(CR0_PG)
            && !self.lma()
            && v & CR4_PAE != 0
            && changed & (CR4_PAE | CR4_PGE | CR4_PSE) != 0
        {
            self.load_pdptrs(self.st.cr3)?;
        }
        self.st.cr4 = v;
        self.flush_tlb();
        self.update_mode();
        Ok(())
    }
}

/// MOV from DRn.
pub(crate) fn read_dr(c: &mut Core, o: &Op) -> Done {
    let v = c.read_dr(o.s)?;
    let size = if c.code == 8 { 8 } else { 4 };
    c.put_sized(o.d, size, v);
    Ok(())
}

/// MOV to DRn.
pub(crate) fn write_dr(c: &mut Core, o: &Op) -> Done {
    c.write_dr(o.d, c.reg(o.s))
}

pub(crate) fn clts(c: &mut Core, _: &Op) -> Done {
    privileged(c)?;
    c.st.cr0 &= !CR0_TS;
    c.stop_at_control(0, c.st.cr0);
    c.leave = true;
    Ok(())
}

/// LMSW: can set PE, never clear it.
pub(crate) fn lmsw(c: &mut Core, o: &Op) -> Done {
    privileged(c)?;
    let v: u16 = super::read_rm(c, o, o.d)?;
    let v = u64::from(v) & 0xf;
    let keep = c.st.cr0 & !0xe;
    c.write_cr0(keep | v)?;
    c.stop_at_control(0, keep | v);
    c.leave = true;
    Ok(())
}

fn umip(c: &Core) -> Done {
    if c.cr4(CR4_UMIP) && c.cpl > 0 {
        Err(GP0)
    } else {
        Ok(())
    }
}

/// SMSW.
pub(crate) fn smsw(c: &mut Core, o: &Op) -> Done {
    umip(c)?;
    let v = c.st.cr0;
    store_word(c, o, v)
}

/// Writes 16 bits to memory or the operand size to a register.
fn store_word(c: &mut Core, o: &Op, v: u64) -> Done {
    if super::is_mem(o) {
        #[expect(clippy::cast_possible_truncation, reason = "a word is stored")]
        return super::store(c, o, v as u16);
    }
    c.put_sized(o.d, o.size, v);
    Ok(())
}

pub(crate) fn sldt(c: &mut Core, o: &Op) -> Done {
    if !c.prot {
        return Err(UD_);
    }
    umip(c)?;
    store_word(c, o, c.st.ldtr.selector.into())
}

pub(crate) fn str(c: &mut Core, o: &Op) -> Done {
    if !c.prot {
        return Err(UD_);
    }
    umip(c)?;
    store_word(c, o, c.st.tr.selector.into())
}

pub(crate) fn lldt(c: &mut Core, o: &Op) -> Done {
    if !c.prot {
        return Err(UD_);
    }
    privileged(c)?;
    let v: u16 = super::read_rm(c, o, o.d)?;
    c.load_ldtr(v)
}

pub(crate) fn ltr(c: &mut Core, o: &Op) -> Done {
    if !c.prot {
        return Err(UD_);
    }
    privileged(c)?;
    let v: u16 = super::read_rm(c, o, o.d)?;
    c.load_tr(v)
}

fn read_table(c: &mut Core, o: &Op) -> Result<(u16, u64), Fault> {
    privileged(c)?;
    let wide = c.code == 8;
    let lin = super::src(c, o, if wide { 10 } else { 6 })?;
    let limit: u16 = c.read(lin)?;
    let base = if wide {
        c.read::<u64>(lin + 2)?
    } else {
        c.read::<u32>(lin + 2)?.into()
    };
    if wide && !crate::seg::canonical(base) {
        return Err(GP0);
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
    c.st.gdtr = hindsight_cpu::state::DescriptorTable { base, limit };
    Ok(())
}

pub(crate) fn lidt(c: &mut Core, o: &Op) -> Done {
    let (limit, base) = read_table(c, o)?;
    c.st.idtr = hindsight_cpu::state::DescriptorTable { base, limit };
    Ok(())
}

fn store_table(c: &mut Core, o: &Op, table: hindsight_cpu::state::DescriptorTable) -> Done {
    umip(c)?;
    let len = if c.code == 8 { 10 } else { 6 };
    let lin = super::dst(c, o, len)?;
    let mut data = [0; 10];
    data[..2].copy_from_slice(&table.limit.to_le_bytes());
    data[2..].copy_from_slice(&table.base.to_le_bytes());
    c.write_bytes(lin, &data[..len])
}

pub(crate) fn sgdt(c: &mut Core, o: &Op) -> Done {
    store_table(c, o, c.st.gdtr)
}

pub(crate) fn sidt(c: &mut Core, o: &Op) -> Done {
    store_table(c, o, c.st.idtr)
}

pub(crate) fn invlpg(c: &mut Core, o: &Op) -> Done {
    privileged(c)?;
    let ea = c.offset(o);
    let lin = if c.code == 8 {
        c.ea64(o)
    } else {
        c.st.seg[usize::from(o.seg) % 6].base.wrapping_add(ea) & 0xffff_ffff
    };
    if c.code == 8 && !crate::seg::canonical(lin) {
        return Ok(());
    }
    c.invalidate_page(lin);
    c.leave = true;
    Ok(())
}

/// INVPCID. Only one process context is ever cached, so that all of them is as good as one.
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
    let kind = cut(c.reg(o.d), if c.code == 8 { 8 } else { 4 });
    let one = matches!(kind, ADDRESS | CONTEXT);
    if kind > LOCALS
        || pcid & !0xfff != 0
        || (one && !c.cr4(CR4_PCIDE) && pcid != 0)
        || (kind == ADDRESS && !crate::seg::canonical(address))
    {
        return Err(GP0);
    }
    match kind {
        ADDRESS => c.invalidate_page(address),
        ALL => c.flush_tlb(),
        _ => c.flush_local_tlb(),
    }
    c.leave = true;
    Ok(())
}

/// WBINVD, INVD: memory is always current; the model of the caches is told.
pub(crate) fn wbinvd(c: &mut Core, _: &Op) -> Done {
    privileged(c)?;
    c.platform().flushed(None);
    Ok(())
}
