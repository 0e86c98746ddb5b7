//! MSRs, CPUID, time, random numbers.

use super::Done;
use crate::core::{Core, Op, truncate};
use crate::fault::Fault;
use crate::flags::LazyFlags;
use crate::platform::SystemEvent;
use crate::registers::Reg;
use crate::seg::canonical;
use crate::width::Width;
use hindsight_cpu::state::seg;
use hindsight_regs::cr::{Cr0, Cr4, Efer};
use hindsight_regs::msr;
use hindsight_regs::rflags::Rflags;

impl Core {
    pub(super) fn read_msr(&mut self, index: u32) -> Result<u64, Fault> {
        let m = &self.state.msrs;
        let value = match index {
            msr::IA32_EFER => self.state.efer,
            msr::IA32_STAR => m.star,
            msr::IA32_LSTAR => m.lstar,
            msr::IA32_CSTAR => m.cstar,
            msr::IA32_FS_BASE => self.state.seg[seg::FS].base,
            msr::IA32_GS_BASE => self.state.seg[seg::GS].base,
            msr::IA32_KERNEL_GS_BASE => m.kernel_gs_base,
            msr::IA32_PAT => m.pat,
            msr::IA32_SYSENTER_CS => m.sysenter_cs,
            msr::IA32_SYSENTER_ESP => m.sysenter_esp,
            msr::IA32_SYSENTER_EIP => m.sysenter_eip,
            _ => {
                self.report_branches();
                return Ok(self.platform().rdmsr(index)?);
            }
        };
        self.report_system_event(|_| SystemEvent::MsrRead { index, value });
        Ok(value)
    }

    pub(super) fn write_msr(&mut self, index: u32, v: u64) -> Done {
        let address = matches!(
            index,
            msr::IA32_LSTAR
                | msr::IA32_CSTAR
                | msr::IA32_FS_BASE
                | msr::IA32_GS_BASE
                | msr::IA32_KERNEL_GS_BASE
                | msr::IA32_SYSENTER_ESP
                | msr::IA32_SYSENTER_EIP
        );
        if address && !canonical(v) {
            return Err(Fault::GP);
        }
        let m = &mut self.state.msrs;
        match index {
            msr::IA32_EFER => self.write_efer(v)?,
            msr::IA32_STAR => m.star = v,
            msr::IA32_LSTAR => m.lstar = v,
            msr::IA32_CSTAR => m.cstar = v,
            msr::IA32_FS_BASE => self.set_base(seg::FS, v),
            msr::IA32_GS_BASE => self.set_base(seg::GS, v),
            msr::IA32_KERNEL_GS_BASE => m.kernel_gs_base = v,
            msr::IA32_PAT => {
                let ok = v.to_le_bytes().iter().all(|t| matches!(t, 0 | 1 | 4..=7));
                if !ok {
                    return Err(Fault::GP);
                }
                m.pat = v;
            }
            msr::IA32_SYSENTER_CS => m.sysenter_cs = v,
            msr::IA32_SYSENTER_ESP => m.sysenter_esp = v,
            msr::IA32_SYSENTER_EIP => m.sysenter_eip = v,
            _ => return self.write_foreign_msr(index, v),
        }
        self.report_system_event(|_| SystemEvent::MsrWritten { index, value: v });
        Ok(())
    }

    /// Writes an MSR that a model owns.
    fn write_foreign_msr(&mut self, index: u32, v: u64) -> Done {
        self.report_branches();
        self.platform().wrmsr(index, v)?;
        if index == msr::IA32_FMASK {
            // The model stores the value, but SYSCALL uses this copy.
            self.state.msrs.fmask = v;
        }
        self.update_observe();
        Ok(())
    }

    fn write_efer(&mut self, v: u64) -> Done {
        let controls = self.controls();
        if !controls.accepts_efer(&self.state, v) {
            return Err(Fault::GP);
        }
        let old = self.state.efer;
        let active = Efer::LMA.bits();
        self.state.efer = (v & !active) | (old & active);
        if (v ^ old) & Efer::NXE.bits() != 0 {
            self.flush_tlb();
        }
        Ok(())
    }

    /// Sets FS.base or GS.base.
    pub(crate) fn set_base(&mut self, index: usize, v: u64) {
        self.state.seg[index].base = v;
        self.regs.set(Reg::segment_base(index), v);
    }
}

pub(crate) fn rdmsr(c: &mut Core, _: &Op) -> Done {
    if c.mode.cpl() != 0 {
        return Err(Fault::GP);
    }
    let v = c.read_msr(c.regs.read(Reg::Rcx))?;
    c.regs.set_edx_eax(v);
    Ok(())
}

pub(crate) fn wrmsr(c: &mut Core, _: &Op) -> Done {
    if c.mode.cpl() != 0 {
        return Err(Fault::GP);
    }
    let (index, value) = (c.regs.read(Reg::Rcx), c.regs.edx_eax());
    c.write_msr(index, value)?;
    c.debug.stops.record_msr(index, value);
    c.exit.requested = true;
    Ok(())
}

pub(crate) fn rdpmc(c: &mut Core, _: &Op) -> Done {
    if c.mode.cpl() != 0 && !c.cr4(Cr4::PCE) && c.cr0(Cr0::PE) {
        return Err(Fault::GP);
    }
    let index = c.regs.read(Reg::Rcx);
    c.report_branches();
    let v = c.platform().rdpmc(index)?;
    c.regs.set_edx_eax(v);
    Ok(())
}

/// RDTSC and, with `AUX`, RDTSCP.
pub(crate) fn rdtsc<const AUX: bool>(c: &mut Core, _: &Op) -> Done {
    if c.mode.cpl() != 0 && c.cr4(Cr4::TSD) && c.cr0(Cr0::PE) {
        return Err(Fault::GP);
    }
    if AUX {
        super::mov::wait_for_earlier();
    }
    let v = c.platform().tsc();
    c.regs.set_edx_eax(v);
    if AUX {
        let aux = c.platform().tsc_aux();
        c.regs.set(Reg::Rcx, aux.into());
    }
    Ok(())
}

pub(crate) fn rdpid(c: &mut Core, o: &Op) -> Done {
    let v = c.platform().tsc_aux();
    c.regs.write_sized(o.dst, c.mode.wide_size(), v.into());
    Ok(())
}

pub(crate) fn cpuid(c: &mut Core, _: &Op) -> Done {
    let (leaf, sub): (u32, u32) = (c.regs.read(Reg::Rax), c.regs.read(Reg::Rcx));
    let mut v = c.platform().cpuid(leaf, sub);
    match (leaf, sub) {
        (1, _) => {
            v[2] = (v[2] & !(1 << 27)) | if c.cr4(Cr4::OSXSAVE) { 1 << 27 } else { 0 };
        }
        (7, 0) => v[2] = (v[2] & !(1 << 4)) | if c.cr4(Cr4::PKE) { 1 << 4 } else { 0 },
        (0xd, 0) => v[1] = c.xsave_size(c.state.xcr0, false),
        (0xd, 1) if v[0] & 2 != 0 => {
            let supervisor = if v[0] & 8 != 0 { c.xss() } else { 0 };
            v[1] = c.xsave_size(c.state.xcr0 | supervisor, true);
        }
        _ => {}
    }
    for (reg, v) in [Reg::Rax, Reg::Rbx, Reg::Rcx, Reg::Rdx].into_iter().zip(v) {
        c.regs.set(reg, v.into());
    }
    c.serialize();
    Ok(())
}

/// RDRAND and RDSEED. Without random bits they write 0 and clear CF.
pub(crate) fn random<T: Width>(c: &mut Core, o: &Op) -> Done {
    let v = c.platform().random();
    c.regs.write(o.dst, T::from_u64(v.unwrap_or(0)));
    let flags = v.map_or(Rflags::empty(), |_| Rflags::CF);
    c.regs.flags = LazyFlags::explicit(flags);
    Ok(())
}

/// RDFSBASE and its relatives: `o.s` is the segment.
pub(crate) fn read_base(c: &mut Core, o: &Op) -> Done {
    if !c.cr4(Cr4::FSGSBASE) {
        return Err(Fault::UD);
    }
    let v = c.state.seg[usize::from(o.src.number()) % 6].base;
    c.regs.write_sized(o.dst, o.size, v);
    Ok(())
}

pub(crate) fn write_base(c: &mut Core, o: &Op) -> Done {
    if !c.cr4(Cr4::FSGSBASE) {
        return Err(Fault::UD);
    }
    let v = truncate(c.regs.get(o.dst), o.size);
    if !canonical(v) {
        return Err(Fault::GP);
    }
    c.set_base(usize::from(o.src.number()) % 6, v);
    Ok(())
}

pub(crate) fn swapgs(c: &mut Core, _: &Op) -> Done {
    if c.mode.cpl() != 0 {
        return Err(Fault::GP);
    }
    let v = std::mem::replace(&mut c.state.msrs.kernel_gs_base, c.state.seg[seg::GS].base);
    c.set_base(seg::GS, v);
    Ok(())
}
