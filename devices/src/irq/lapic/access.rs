//! Register accesses. SDM Vol. 3A, tables "Local APIC Register Address Map" and "x2APIC Register
//! Address Space".

use hindsight_regs::apic::{
    ApicRegister, DeliveryMode, Esr, Icr, LvtEntry, PAGE_SIZE, Svr, TimerDivide,
};
use hindsight_regs::vector::GpFault;

use super::regs::{self, lvt};
use super::{Lapic, LapicEffect};
use crate::clock::Ticks;
use crate::irq::message::Destination;

/// Registers in a run of vector bits: ISR, TMR or IRR.
const VECTOR_REGISTERS: u16 = 8;

/// The index of a register in the local vector table.
fn lvt_index(register: ApicRegister) -> Option<usize> {
    register.index_from(ApicRegister::LVT_TIMER, 6)
}

impl Lapic {
    /// Reads 32 bits at an offset of the memory-mapped registers.
    ///
    /// All ones for an offset without a register.
    pub fn mmio_read(&mut self, offset: u64, now: Ticks) -> u32 {
        let Some(register) = self.xapic_register(offset) else {
            return u32::MAX;
        };
        match register {
            ApicRegister::APR => u32::from(self.arbitration_priority()),
            ApicRegister::EOI | ApicRegister::RRD => 0,
            ApicRegister::DFR => self.s.dfr,
            ApicRegister::ICR_HIGH => (self.s.icr.0 >> 32) as u32,
            _ => self.read_register(register, now).unwrap_or_else(|| {
                self.report_error(Esr::ILLEGAL_REGISTER);
                0
            }),
        }
    }

    /// Writes 32 bits at an offset of the memory-mapped registers.
    pub fn mmio_write(&mut self, offset: u64, value: u32, now: Ticks) -> LapicEffect {
        let Some(register) = self.xapic_register(offset) else {
            return LapicEffect::None;
        };
        let icr = self.s.icr.0;
        match register {
            ApicRegister::ICR => {
                let low = value & regs::ICR_WRITABLE;
                self.s.icr = Icr(icr & !0xffff_ffff | u64::from(low));
                return self.send_icr();
            }
            ApicRegister::ICR_HIGH => {
                let high = u64::from(value & 0xff00_0000) << 32;
                self.s.icr = Icr(icr & 0xffff_ffff | high);
            }
            ApicRegister::LDR => self.s.ldr = value & regs::LDR_WRITABLE,
            ApicRegister::DFR => self.s.dfr = value | regs::DFR_ONES,
            ApicRegister::APR | ApicRegister::RRD => {}
            ApicRegister::SELF_IPI => self.report_error(Esr::ILLEGAL_REGISTER),
            _ if is_writable(register) => return self.write_register(register, value, now),
            _ if self.read_register(register, now).is_some() => {}
            _ => self.report_error(Esr::ILLEGAL_REGISTER),
        }
        LapicEffect::None
    }

    /// The register at an offset of the page, if the page is enabled.
    fn xapic_register(&self, offset: u64) -> Option<ApicRegister> {
        if !self.is_enabled() || self.is_x2apic() || offset >= PAGE_SIZE || offset & 0xf != 0 {
            return None;
        }
        u16::try_from(offset).ok().map(ApicRegister)
    }

    /// Reads an MSR of 800H to 8FFH.
    ///
    /// # Errors
    /// The APIC is not in x2APIC mode, or the register does not exist or is write-only.
    pub fn msr_read(&mut self, msr: u32, now: Ticks) -> Result<u64, GpFault> {
        match self.x2apic_register(msr)? {
            ApicRegister::ICR => Ok(self.s.icr.0),
            register => self
                .read_register(register, now)
                .map(u64::from)
                .ok_or(GpFault),
        }
    }

    /// Writes an MSR of 800H to 8FFH.
    ///
    /// # Errors
    /// The APIC is not in x2APIC mode, the register does not exist or is read-only, or a reserved
    /// bit is set.
    pub fn msr_write(&mut self, msr: u32, value: u64, now: Ticks) -> Result<LapicEffect, GpFault> {
        let register = self.x2apic_register(msr)?;
        if register == ApicRegister::ICR {
            let writable = u64::from(u32::MAX) << 32 | u64::from(regs::ICR_WRITABLE);
            if value & !writable != 0 {
                return Err(GpFault);
            }
            self.s.icr = Icr(value);
            return Ok(self.send_icr());
        }
        if !is_writable(register) || value & !u64::from(self.defined_bits(register)) != 0 {
            return Err(GpFault);
        }
        Ok(self.write_register(register, (value & 0xffff_ffff) as u32, now))
    }

    fn x2apic_register(&self, msr: u32) -> Result<ApicRegister, GpFault> {
        if !self.is_enabled() || !self.is_x2apic() {
            return Err(GpFault);
        }
        ApicRegister::from_x2apic_msr(msr).ok_or(GpFault)
    }

    /// The bits of a writable register that are not reserved.
    fn defined_bits(&self, register: ApicRegister) -> u32 {
        match register {
            ApicRegister::TPR | ApicRegister::SELF_IPI => 0xff,
            ApicRegister::EOI | ApicRegister::ESR => 0,
            ApicRegister::SVR => regs::SVR_WRITABLE,
            ApicRegister::TIMER_DIVIDE => TimerDivide::MASK,
            _ => match lvt_index(register) {
                Some(index) => {
                    let pin = if regs::is_lint(index) {
                        LvtEntry::REMOTE_IRR
                    } else {
                        0
                    };
                    regs::lvt_writable(index, self.features) | LvtEntry::DELIVERY_STATUS | pin
                }
                None => u32::MAX,
            },
        }
    }

    /// Reads a register that has the same form in both modes.
    fn read_register(&mut self, register: ApicRegister, now: Ticks) -> Option<u32> {
        Some(match register {
            ApicRegister::ID if self.is_x2apic() => self.id,
            ApicRegister::ID => self.id << 24,
            ApicRegister::VERSION => regs::VERSION,
            ApicRegister::TPR => u32::from(self.s.tpr),
            ApicRegister::PPR => u32::from(self.ppr()),
            ApicRegister::LDR => self.logical_id(),
            ApicRegister::SVR => self.s.svr,
            ApicRegister::ESR => self.s.esr,
            ApicRegister::ICR => (self.s.icr.0 & 0xffff_ffff) as u32,
            ApicRegister::TIMER_INITIAL => self.s.initial_count,
            ApicRegister::TIMER_CURRENT => self.current_count(now),
            ApicRegister::TIMER_DIVIDE => self.s.divide.0,
            _ => match lvt_index(register) {
                Some(index) => self.s.lvt[index].0,
                None => return self.read_vectors(register),
            },
        })
    }

    /// Reads a register of the ISR, TMR or IRR.
    fn read_vectors(&self, register: ApicRegister) -> Option<u32> {
        let runs = [
            (ApicRegister::ISR, &self.s.isr),
            (ApicRegister::TMR, &self.s.tmr),
            (ApicRegister::IRR, &self.s.irr),
        ];
        runs.iter().find_map(|&(first, vectors)| {
            let index = register.index_from(first, VECTOR_REGISTERS)?;
            Some(vectors.0[index])
        })
    }

    /// Writes a register that has the same form in both modes; ignores reserved bits.
    fn write_register(&mut self, register: ApicRegister, value: u32, now: Ticks) -> LapicEffect {
        let [byte, ..] = value.to_le_bytes();
        match register {
            ApicRegister::TPR => self.set_tpr(byte),
            ApicRegister::EOI => return self.eoi(),
            ApicRegister::SVR => self.write_svr(value),
            ApicRegister::ESR => self.s.esr = std::mem::take(&mut self.s.errors),
            ApicRegister::LVT_TIMER => self.write_lvt_timer(value, now),
            ApicRegister::TIMER_INITIAL => self.write_initial_count(value, now),
            ApicRegister::TIMER_DIVIDE => self.write_divide(value, now),
            ApicRegister::SELF_IPI => {
                return self.send_message(Destination::Myself, DeliveryMode::Fixed, byte);
            }
            _ => {
                if let Some(index) = lvt_index(register) {
                    self.write_lvt(index, value);
                }
            }
        }
        LapicEffect::None
    }

    fn write_svr(&mut self, value: u32) {
        self.s.svr = value & regs::SVR_WRITABLE;
        if !self.s.svr_flags().contains(Svr::ENABLE) {
            for entry in &mut self.s.lvt {
                *entry = entry.with(LvtEntry::MASKED);
            }
            self.update_due();
        }
    }

    fn write_lvt(&mut self, index: usize, value: u32) {
        debug_assert_ne!(index, lvt::TIMER, "the timer must be advanced before");
        let mut entry = self.writable_lvt(index, value);
        if entry.is_level() && self.s.lvt[index].remote_irr() {
            entry = entry.with(LvtEntry::REMOTE_IRR);
        }
        self.s.lvt[index] = entry;
        if regs::is_lint(index) {
            self.deliver_lint_level(index);
        }
    }

    /// The value that a write gives to the writable bits of an LVT entry.
    ///
    /// An APIC that software has disabled keeps the mask bit set.
    pub(super) fn writable_lvt(&self, index: usize, value: u32) -> LvtEntry {
        let entry = LvtEntry(value & regs::lvt_writable(index, self.features));
        if self.is_software_enabled() {
            entry
        } else {
            entry.with(LvtEntry::MASKED)
        }
    }
}

/// Whether software may write a register, in either mode.
fn is_writable(register: ApicRegister) -> bool {
    matches!(
        register,
        ApicRegister::TPR
            | ApicRegister::EOI
            | ApicRegister::SVR
            | ApicRegister::ESR
            | ApicRegister::TIMER_INITIAL
            | ApicRegister::TIMER_DIVIDE
            | ApicRegister::SELF_IPI
    ) || lvt_index(register).is_some()
}
