//! MSRs, CPUID, time, random numbers.

use super::Done;
use crate::core::*;
use crate::flags::{CF, Flags};
use crate::op::Op;
use crate::platform::Gp;
use crate::seg::canonical;
use crate::word::Word;
use hindsight_cpu::state::seg;
use hindsight_regs::msr;

const EFER: u32 = 0xc000_0080;
const STAR: u32 = 0xc000_0081;
const LSTAR: u32 = 0xc000_0082;
const CSTAR: u32 = 0xc000_0083;
const FS_BASE: u32 = 0xc000_0100;
const GS_BASE: u32 = 0xc000_0101;
const KERNEL_GS_BASE: u32 = 0xc000_0102;
const PAT: u32 = 0x277;

impl Core {
    fn read_msr(&mut self, index: u32) -> Result<u64, Fault> {
        let m = &self.st.msrs;
        Ok(match index {
            EFER => self.st.efer,
            STAR => m.star,
            LSTAR => m.lstar,
            CSTAR => m.cstar,
            FS_BASE => self.st.seg[seg::FS].base,
            GS_BASE => self.st.seg[seg::GS].base,
            KERNEL_GS_BASE => m.kernel_gs_base,
            PAT => m.pat,
            msr::IA32_SYSENTER_CS => m.sysenter_cs,
            msr::IA32_SYSENTER_ESP => m.sysenter_esp,
            msr::IA32_SYSENTER_EIP => m.sysenter_eip,
            _ => {
                self.tell_branches();
                return self.platform().rdmsr(index).map_err(|Gp| GP0);
            }
        })
    }

    fn write_msr(&mut self, index: u32, v: u64) -> Done {
        let address = matches!(
            index,
            LSTAR
                | CSTAR
                | FS_BASE
                | GS_BASE
                | KERNEL_GS_BASE
                | msr::IA32_SYSENTER_ESP
                | msr::IA32_SYSENTER_EIP
        );
        if address && !canonical(v) {
            return Err(GP0);
        }
        let m = &mut self.st.msrs;
        match index {
            EFER => return self.write_efer(v),
            STAR => m.star = v,
            LSTAR => m.lstar = v,
            CSTAR => m.cstar = v,
            FS_BASE => self.set_base(seg::FS, v),
            GS_BASE => self.set_base(seg::GS, v),
            KERNEL_GS_BASE => m.kernel_gs_base = v,
            PAT => {
                let ok = v.to_le_bytes().iter().all(|t| matches!(t, 0 | 1 | 4..=7));
                if !ok {
                    return Err(GP0);
                }
                m.pat = v;
            }
            msr::IA32_SYSENTER_CS => m.sysenter_cs = v,
            msr::IA32_SYSENTER_ESP => m.sysenter_esp = v,
            msr::IA32_SYSENTER_EIP => m.sysenter_eip = v,
            _ => return self.write_foreign_msr(index, v),
        }
        Ok(())
    }

    /// An MSR that a model owns.
    fn write_foreign_msr(&mut self, index: u32, v: u64) -> Done {
        self.tell_branches();
        self.platform().wrmsr(index, v).map_err(|Gp| GP0)?;
        if index == msr::IA32_FMASK {
            // The model keeps the value; SYSCALL uses it.
            self.st.msrs.fmask = v;
        }
        self.reobserve();
        Ok(())
    }

    fn write_efer(&mut self, v: u64) -> Done {
        let controls = self.controls();
        if !controls.accepts_efer(&self.st, v) {
            return Err(GP0);
        }
        let old = self.st.efer;
        self.st.efer = (v & !EFER_LMA) | (old & EFER_LMA);
        if (v ^ old) & EFER_NXE != 0 {
            self.flush_tlb();
        }
        Ok(())
    }

    /// Sets FS.base or GS.base.
    pub(crate) fn set_base(&mut self, index: usize, v: u64) {
        self.st.seg[index].base = v;
        self.regs[usize::from(crate::op::slot::SEG_BASE) + index] = v;
    }

    fn edx_eax(&self) -> u64 {
        (self.regs[2] << 32) | (self.regs[0] & 0xffff_ffff)
    }

    pub(crate) fn put_edx_eax(&mut self, v: u64) {
        self.regs[0] = v & 0xffff_ffff;
        self.regs[2] = v >> 32;
    }
}

pub(crate) fn rdmsr(c: &mut Core, _: &Op) -> Done {
    if c.cpl != 0 {
        return Err(GP0);
    }
    let v = c.read_msr(c.get(1))?;
    c.put_edx_eax(v);
    Ok(())
}

pub(crate) fn wrmsr(c: &mut Core, _: &Op) -> Done {
    if c.cpl != 0 {
        return Err(GP0);
    }
    let (index, value) = (c.get(1), c.edx_eax());
    c.write_msr(index, value)?;
    c.stop_at_msr(index, value);
    c.leave = true;
    Ok(())
}

pub(crate) fn rdpmc(c: &mut Core, _: &Op) -> Done {
    if c.cpl != 0 && !c.cr4(CR4_PCE) && c.cr0(CR0_PE) {
        return Err(GP0);
    }
    let index = c.get(1);
    c.tell_branches();
    let v = c.platform().rdpmc(index).map_err(|Gp| GP0)?;
    c.put_edx_eax(v);
    Ok(())
}

/// RDTSC and, with `AUX`, RDTSCP.
pub(crate) fn rdtsc<const AUX: bool>(c: &mut Core, _: &Op) -> Done {
    if c.cpl != 0 && c.cr4(CR4_TSD) && c.cr0(CR0_PE) {
        return Err(GP0);
    }
    if AUX {
        super::mov::wait_for_earlier();
    }
    let v = c.platform().tsc();
    c.put_edx_eax(v);
    if AUX {
        c.regs[1] = c.platform().tsc_aux().into();
    }
    Ok(())
}

pub(crate) fn rdpid(c: &mut Core, o: &Op) -> Done {
    let v = c.platform().tsc_aux();
    c.put_sized(o.d, if c.code == 8 { 8 } else { 4 }, v.into());
    Ok(())
}

pub(crate) fn cpuid(c: &mut Core, _: &Op) -> Done {
    let (leaf, sub): (u32, u32) = (c.get(0), c.get(1));
    let mut v = c.platform().cpuid(leaf, sub);
    match (leaf, sub) {
        (1, _) => {
            v[2] = (v[2] & !(1 << 27)) | if c.cr4(CR4_OSXSAVE) { 1 << 27 } else { 0 };
        }
        (7, 0) => v[2] = (v[2] & !(1 << 4)) | if c.cr4(CR4_PKE) { 1 << 4 } else { 0 },
        (0xd, 0) => v[1] = c.xsave_size(c.st.xcr0, false),
        (0xd, 1) if v[0] & 2 != 0 => v[1] = c.xsave_size(c.st.xcr0, true),
        _ => {}
    }
    for (reg, v) in [0, 3, 1, 2].into_iter().zip(v) {
        c.set_reg(reg, v.into());
    }
    Ok(())
}

/// RDRAND and RDSEED always succeed.
pub(crate) fn random<T: Word>(c: &mut Core, o: &Op) -> Done {
    let v = c.platform().random();
    c.put(o.d, T::from_u64(v));
    c.cc = Flags::explicit(CF);
    Ok(())
}

/// RDFSBASE and its relatives: `o.s` is the segment.
pub(crate) fn read_base(c: &mut Core, o: &Op) -> Done {
    if !c.cr4(CR4_FSGSBASE) {
        return Err(UD_);
    }
    let v = c.st.seg[usize::from(o.s) % 6].base;
    c.put_sized(o.d, o.size, v);
    Ok(())
}

pub(crate) fn write_base(c: &mut Core, o: &Op) -> Done {
    if !c.cr4(CR4_FSGSBASE) {
        return Err(UD_);
    }
    let v = cut(c.reg(o.d), o.size);
    if !canonical(v) {
        return Err(GP0);
    }
    c.set_base(usize::from(o.s) % 6, v);
    Ok(())
}

pub(crate) fn swapgs(c: &mut Core, _: &Op) -> Done {
    if c.cpl != 0 {
        return Err(GP0);
    }
    let v = std::mem::replace(&mut c.st.msrs.kernel_gs_base, c.st.seg[seg::GS].base);
    c.set_base(seg::GS, v);
    Ok(())
}
