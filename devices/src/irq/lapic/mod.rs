//! The local APIC of one virtual processor, in xAPIC and x2APIC mode.
//!
//! SDM Vol. 3A, "Advanced Programmable Interrupt Controller (APIC)". Not modelled: CMCI (the version
//! register says so), remote read, arbitration. Deviation: delivery takes no time, so that no
//! delivery-status bit is ever seen set, and no interrupt turns spurious on its way.

mod deliver;
pub mod regs;
mod state;
#[cfg(test)]
mod tests;
mod timer;

pub use state::LapicState;

use super::GpFault;
use super::message::{Delivery, Destination, Message};
use crate::clock::{Clock, Rate, Ticks};
use regs::lvt;

/// What the local APIC timer counts: the crystal clock of CPUID leaf 15H.
pub const CRYSTAL_HZ: u64 = 25_000_000;

/// What CPUID says about the local APIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LapicFeatures {
    /// `CPUID.1:ECX[21]`.
    pub x2apic: bool,
    /// `CPUID.1:ECX[24]`.
    pub tsc_deadline: bool,
    /// `CPUID.80000008H:EAX[7:0]`.
    pub physical_address_bits: u8,
}

impl Default for LapicFeatures {
    fn default() -> Self {
        Self {
            x2apic: true,
            tsc_deadline: true,
            physical_address_bits: 46,
        }
    }
}

/// What an access wants done outside of this APIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Effect {
    /// Nothing.
    None,
    /// Send this message.
    Send(Message),
    /// Tell the I/O APICs of the end of a level-triggered interrupt.
    Eoi(u8),
}

/// What the processor is to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acknowledged {
    /// This vector, now in service.
    Vector(u8),
    /// A vector from the 8259 pair.
    ExtInt,
}

/// A local APIC.
#[derive(Debug)]
pub struct Lapic {
    id: u32,
    features: LapicFeatures,
    crystal: Rate,
    s: LapicState,
    /// When the timer next does something, by the clock.
    due: Option<Ticks>,
    /// The latest time at which the timer was looked at.
    seen: Ticks,
}

impl Lapic {
    /// The local APIC with initial APIC ID `id`, as after RESET. ID 0 is the bootstrap processor.
    pub fn new(id: u32, features: LapicFeatures, clock: &Clock) -> Self {
        let s = LapicState::reset(id == 0);
        Self {
            id,
            features,
            crystal: clock.rate(CRYSTAL_HZ),
            s,
            due: None,
            seen: 0,
        }
    }

    /// RESET.
    pub fn reset(&mut self) {
        let (lint, tsc_offset) = (self.s.lint, self.s.tsc_offset);
        self.s = LapicState {
            lint,
            tsc_offset,
            ..LapicState::reset(self.id == 0)
        };
        self.due = None;
    }

    /// INIT: the registers as after RESET; IA32_APIC_BASE stays, and with it the mode. An
    /// application processor then waits for a start-up IPI.
    pub fn init(&mut self) {
        let old = self.s.clone();
        let bsp = old.apic_base & regs::BASE_BSP != 0;
        self.s = LapicState {
            apic_base: old.apic_base,
            lint: old.lint,
            tsc_offset: old.tsc_offset,
            nmi: old.nmi,
            smi: old.smi,
            sipi: old.sipi,
            wait_for_sipi: !bsp,
            ..LapicState::reset(bsp)
        };
        self.due = None;
    }

    /// The state, to be saved.
    pub fn save(&self) -> LapicState {
        self.s.clone()
    }

    /// Takes over a state that [`LapicState::is_valid`].
    pub(super) fn restore(&mut self, state: &LapicState, now: Ticks) {
        self.s = state.clone();
        self.seen = now;
        self.update_due();
    }

    /// Whether this APIC could be in `state`.
    pub(super) fn accepts_state(&self, state: &LapicState) -> bool {
        state.is_valid(self.features)
    }

    // ---- IA32_APIC_BASE ----

    /// IA32_APIC_BASE.
    pub fn apic_base(&self) -> u64 {
        self.s.apic_base
    }

    /// Writes IA32_APIC_BASE. SDM Vol. 3A, "x2APIC State Transitions".
    ///
    /// # Errors
    /// Reserved bits, x2APIC mode without the feature, and illegal transitions between modes.
    pub fn set_apic_base(&mut self, value: u64) -> Result<(), GpFault> {
        if !state::apic_base_is_legal(value, self.features) {
            return Err(GpFault);
        }
        let mode = |v: u64| (v & regs::BASE_ENABLE != 0, v & regs::BASE_X2APIC != 0);
        match (mode(self.s.apic_base), mode(value)) {
            ((true, true), (true, false)) | ((false, _), (true, true)) => return Err(GpFault),
            ((true, _), (false, _)) => {
                // Disabled is as if absent; enabled again it is as after RESET.
                let old = self.s.clone();
                self.s = LapicState {
                    lint: old.lint,
                    tsc_offset: old.tsc_offset,
                    nmi: old.nmi,
                    smi: old.smi,
                    init: old.init,
                    sipi: old.sipi,
                    wait_for_sipi: old.wait_for_sipi,
                    ..LapicState::reset(false)
                };
                self.due = None;
            }
            _ => {}
        }
        self.s.apic_base = value;
        Ok(())
    }

    fn is_enabled(&self) -> bool {
        self.s.apic_base & regs::BASE_ENABLE != 0
    }

    fn is_x2apic(&self) -> bool {
        self.s.apic_base & regs::BASE_X2APIC != 0
    }

    fn is_software_enabled(&self) -> bool {
        self.is_enabled() && self.s.svr & regs::SVR_ENABLE != 0
    }

    // ---- register access ----

    /// Reads 32 bits at an offset of the memory-mapped registers. All ones where there is none.
    pub fn mmio_read(&mut self, offset: u64, now: Ticks) -> u32 {
        if !self.is_enabled() || self.is_x2apic() || offset >= 0x1000 || offset & 0xf != 0 {
            return u32::MAX;
        }
        let reg = ((offset >> 4) & 0xff) as u16;
        match reg {
            regs::APR => u32::from(self.arbitration_priority()),
            regs::EOI | regs::RRD => 0,
            regs::DFR => self.s.dfr,
            regs::ICR_HIGH => (self.s.icr >> 32) as u32,
            _ => self.read_register(reg, now).unwrap_or_else(|| {
                self.error(regs::ESR_ILLEGAL_REGISTER);
                0
            }),
        }
    }

    /// Writes 32 bits at an offset of the memory-mapped registers.
    pub fn mmio_write(&mut self, offset: u64, value: u32, now: Ticks) -> Effect {
        if !self.is_enabled() || self.is_x2apic() || offset >= 0x1000 || offset & 0xf != 0 {
            return Effect::None;
        }
        let reg = ((offset >> 4) & 0xff) as u16;
        match reg {
            regs::ICR_LOW => {
                let low = value & regs::ICR_WRITABLE;
                self.s.icr = (self.s.icr & !0xffff_ffff) | u64::from(low);
                self.send()
            }
            regs::ICR_HIGH => {
                let high = u64::from(value & 0xff00_0000) << 32;
                self.s.icr = (self.s.icr & 0xffff_ffff) | high;
                Effect::None
            }
            regs::LDR => {
                self.s.ldr = value & 0xff00_0000;
                Effect::None
            }
            regs::DFR => {
                self.s.dfr = value | 0x0fff_ffff;
                Effect::None
            }
            regs::APR | regs::RRD => Effect::None,
            regs::SELF_IPI => self.illegal_register(),
            _ if self.is_writable(reg) => self.write_register(reg, value, now),
            _ if self.read_register(reg, now).is_some() => Effect::None,
            _ => self.illegal_register(),
        }
    }

    fn illegal_register(&mut self) -> Effect {
        self.error(regs::ESR_ILLEGAL_REGISTER);
        Effect::None
    }

    /// Reads an MSR of 800H to 8FFH.
    ///
    /// # Errors
    /// Not in x2APIC mode; no such register; a write-only one.
    pub fn msr_read(&mut self, msr: u32, now: Ticks) -> Result<u64, GpFault> {
        let reg = self.x2apic_register(msr)?;
        match reg {
            regs::ICR_LOW => Ok(self.s.icr),
            _ => self.read_register(reg, now).map(u64::from).ok_or(GpFault),
        }
    }

    /// Writes an MSR of 800H to 8FFH.
    ///
    /// # Errors
    /// Not in x2APIC mode; no such register; a read-only one; reserved bits.
    pub fn msr_write(&mut self, msr: u32, value: u64, now: Ticks) -> Result<Effect, GpFault> {
        let reg = self.x2apic_register(msr)?;
        if reg == regs::ICR_LOW {
            let writable = (u64::from(u32::MAX) << 32) | u64::from(regs::ICR_WRITABLE);
            if value & !writable != 0 {
                return Err(GpFault);
            }
            self.s.icr = value;
            return Ok(self.send());
        }
        if !self.is_writable(reg) || value & !u64::from(self.unreserved(reg)) != 0 {
            return Err(GpFault);
        }
        Ok(self.write_register(reg, (value & 0xffff_ffff) as u32, now))
    }

    fn x2apic_register(&self, msr: u32) -> Result<u16, GpFault> {
        if !self.is_enabled() || !self.is_x2apic() || !(0x800..0x900).contains(&msr) {
            return Err(GpFault);
        }
        Ok((msr & 0xff) as u16)
    }

    /// Whether software may write a register, in either mode.
    fn is_writable(&self, reg: u16) -> bool {
        matches!(
            reg,
            regs::TPR | regs::EOI | regs::SVR | regs::ESR | regs::LVT_TIMER
                ..=regs::LVT_ERROR | regs::INITIAL_COUNT | regs::DIVIDE | regs::SELF_IPI
        )
    }

    /// The bits of a writable register that are not reserved.
    fn unreserved(&self, reg: u16) -> u32 {
        match reg {
            regs::TPR | regs::SELF_IPI => 0xff,
            regs::EOI | regs::ESR => 0,
            regs::SVR => regs::SVR_WRITABLE,
            regs::DIVIDE => 0b1011,
            regs::LVT_TIMER..=regs::LVT_ERROR => {
                let index = usize::from(reg - regs::LVT_TIMER);
                let pin = index == lvt::LINT0 || index == lvt::LINT1;
                let read_only = lvt::DELIVERY_STATUS | if pin { lvt::REMOTE_IRR } else { 0 };
                state::lvt_writable(index, self.features) | read_only
            }
            _ => u32::MAX,
        }
    }

    /// Registers that read alike in both modes.
    fn read_register(&mut self, reg: u16, now: Ticks) -> Option<u32> {
        Some(match reg {
            regs::ID if self.is_x2apic() => self.id,
            regs::ID => self.id << 24,
            regs::VERSION => regs::VERSION_VALUE,
            regs::TPR => u32::from(self.s.tpr),
            regs::PPR => u32::from(self.ppr()),
            regs::LDR => self.logical_id(),
            regs::SVR => self.s.svr,
            regs::ISR..regs::TMR => self.s.isr[usize::from(reg - regs::ISR)],
            regs::TMR..regs::IRR => self.s.tmr[usize::from(reg - regs::TMR)],
            regs::IRR..regs::ESR => self.s.irr[usize::from(reg - regs::IRR)],
            regs::ESR => self.s.esr,
            regs::ICR_LOW => (self.s.icr & 0xffff_ffff) as u32,
            regs::LVT_TIMER..=regs::LVT_ERROR => self.s.lvt[usize::from(reg - regs::LVT_TIMER)],
            regs::INITIAL_COUNT => self.s.initial_count,
            regs::CURRENT_COUNT => self.current_count(now),
            regs::DIVIDE => self.s.divide,
            _ => return None,
        })
    }

    /// Registers that are written alike in both modes; reserved bits are dropped.
    fn write_register(&mut self, reg: u16, value: u32, now: Ticks) -> Effect {
        match reg {
            regs::TPR => self.set_tpr((value & 0xff) as u8),
            regs::EOI => return self.eoi(),
            regs::SVR => self.write_svr(value),
            regs::ESR => self.s.esr = std::mem::take(&mut self.s.errors),
            regs::LVT_TIMER => self.write_lvt_timer(value, now),
            regs::LVT_THERMAL..=regs::LVT_ERROR => {
                self.write_lvt(usize::from(reg - regs::LVT_TIMER), value);
            }
            regs::INITIAL_COUNT => self.write_initial_count(value, now),
            regs::DIVIDE => self.write_divide(value, now),
            regs::SELF_IPI => {
                let vector = (value & 0xff) as u8;
                return self.send_message(Destination::Myself, Delivery::Fixed, vector, false);
            }
            _ => {}
        }
        Effect::None
    }

    fn write_svr(&mut self, value: u32) {
        self.s.svr = value & regs::SVR_WRITABLE;
        if self.s.svr & regs::SVR_ENABLE == 0 {
            for entry in &mut self.s.lvt {
                *entry |= lvt::MASKED;
            }
            self.update_due();
        }
    }

    fn write_lvt(&mut self, index: usize, value: u32) {
        let writable = state::lvt_writable(index, self.features);
        let mut entry = (value & writable) | (self.s.lvt[index] & lvt::REMOTE_IRR);
        if !self.is_software_enabled() {
            entry |= lvt::MASKED;
        }
        if entry & lvt::LEVEL == 0 {
            entry &= !lvt::REMOTE_IRR;
        }
        self.s.lvt[index] = entry;
        if index == lvt::LINT0 || index == lvt::LINT1 {
            self.deliver_lint_level(index);
        }
    }

    // ---- priorities ----

    /// The task priority register.
    pub fn tpr(&self) -> u8 {
        self.s.tpr
    }

    /// Sets the task priority register. CR8 is its bits 7:4.
    pub fn set_tpr(&mut self, value: u8) {
        self.s.tpr = value;
    }

    /// The processor priority register.
    pub fn ppr(&self) -> u8 {
        let in_service = highest(&self.s.isr).unwrap_or(0) & 0xf0;
        if self.s.tpr & 0xf0 >= in_service {
            self.s.tpr
        } else {
            in_service
        }
    }

    fn arbitration_priority(&self) -> u8 {
        let requested = highest(&self.s.irr).unwrap_or(0) & 0xf0;
        let in_service = highest(&self.s.isr).unwrap_or(0) & 0xf0;
        let task = self.s.tpr & 0xf0;
        if task >= requested && task > in_service {
            self.s.tpr
        } else {
            task.max(requested).max(in_service)
        }
    }

    /// The requested vector that the processor priority lets through.
    fn deliverable(&self) -> Option<u8> {
        let vector = highest(&self.s.irr)?;
        (self.is_enabled() && vector & 0xf0 > self.ppr() & 0xf0).then_some(vector)
    }

    /// Whether only the task priority keeps an interrupt from the processor.
    pub fn has_held_interrupt(&self) -> bool {
        let in_service = highest(&self.s.isr).unwrap_or(0) & 0xf0;
        let class = highest(&self.s.irr).map_or(0, |vector| vector & 0xf0);
        self.is_enabled() && class > in_service && class <= self.s.tpr & 0xf0
    }

    fn ext_int(&self) -> bool {
        let lint0 = self.s.lvt[lvt::LINT0];
        let through = !self.is_enabled()
            || self.s.ext_int
            || lint0 & lvt::MASKED == 0 && delivery(lint0) == Some(Delivery::ExtInt);
        through && self.s.lint[0]
    }

    /// Whether a maskable interrupt waits for the processor.
    pub fn has_interrupt(&self) -> bool {
        self.deliverable().is_some() || self.ext_int()
    }

    /// The processor takes an interrupt: its own first, then one from the 8259 pair.
    pub fn acknowledge(&mut self) -> Option<Acknowledged> {
        if let Some(vector) = self.deliverable() {
            set(&mut self.s.irr, vector, false);
            set(&mut self.s.isr, vector, true);
            return Some(Acknowledged::Vector(vector));
        }
        if self.ext_int() {
            self.s.ext_int = false;
            return Some(Acknowledged::ExtInt);
        }
        None
    }

    fn eoi(&mut self) -> Effect {
        let Some(vector) = highest(&self.s.isr) else {
            return Effect::None;
        };
        set(&mut self.s.isr, vector, false);
        if !get(&self.s.tmr, vector) {
            return Effect::None;
        }
        for index in [lvt::LINT0, lvt::LINT1] {
            let entry = self.s.lvt[index];
            if entry & lvt::REMOTE_IRR != 0 && entry & 0xff == u32::from(vector) {
                self.s.lvt[index] &= !lvt::REMOTE_IRR;
                self.deliver_lint_level(index);
            }
        }
        if self.s.svr & regs::SVR_NO_EOI_BROADCAST != 0 {
            return Effect::None;
        }
        Effect::Eoi(vector)
    }
}

fn delivery(entry: u32) -> Option<Delivery> {
    Delivery::from_bits(entry >> 8)
}

/// The highest vector whose bit is set.
fn highest(bits: &[u32; 8]) -> Option<u8> {
    let (word, bits) = (0_u8..8).zip(bits).rev().find(|&(_, &bits)| bits != 0)?;
    Some(word * 32 + (bits.ilog2() & 31) as u8)
}

fn get(bits: &[u32; 8], vector: u8) -> bool {
    bits[usize::from(vector >> 5)] & (1 << (vector & 31)) != 0
}

fn set(bits: &mut [u32; 8], vector: u8, value: bool) {
    let word = &mut bits[usize::from(vector >> 5)];
    *word = *word & !(1 << (vector & 31)) | u32::from(value) << (vector & 31);
}
