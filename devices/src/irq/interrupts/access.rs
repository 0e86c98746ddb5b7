//! Register accesses by the guest: memory-mapped, MSR, CR8 and ports.

use std::sync::atomic::Ordering;

use hindsight_regs::vector::GpFault;

use super::chips::{Chips, send};
use super::{Interrupts, RTC_LINE, TIMER_LINE};

/// The I/O ports that [`Interrupts::port_read`] and [`Interrupts::port_write`] accept.
pub const PORTS: [u16; 13] = [
    0x20, 0x21, 0x40, 0x41, 0x42, 0x43, 0x61, 0x70, 0x71, 0xa0, 0xa1, 0x4d0, 0x4d1,
];

impl Interrupts {
    /// Reads at an offset of the page to which IA32_APIC_BASE points.
    ///
    /// An access that is not of 32 bits or not aligned returns all ones, as does a page that is not
    /// enabled.
    pub fn lapic_read(&self, vcpu: usize, offset: u64, data: &mut [u8]) {
        let value = if data.len() == 4 {
            self.with_lapic(vcpu, |lapic, now| lapic.mmio_read(offset, now))
        } else {
            None
        };
        for (i, byte) in data.iter_mut().enumerate() {
            let bytes = value.unwrap_or(u32::MAX).to_le_bytes();
            *byte = bytes.get(i).copied().unwrap_or(0xff);
        }
    }

    /// Writes at an offset of the page to which IA32_APIC_BASE points.
    ///
    /// An access that is not of 32 bits or not aligned is ignored.
    pub fn lapic_write(&self, vcpu: usize, offset: u64, data: &[u8]) {
        let Ok(bytes) = <[u8; 4]>::try_from(data) else {
            return;
        };
        self.with(|chips, now| {
            if let Some(lapic) = chips.lapics.get_mut(vcpu) {
                let effect = lapic.mmio_write(offset, u32::from_le_bytes(bytes), now);
                chips.apply(vcpu, effect);
            }
        });
    }

    /// Reads an MSR of 800H to 8FFH.
    ///
    /// # Errors
    /// The APIC is not in x2APIC mode, or the register does not exist or is write-only.
    pub fn x2apic_read(&self, vcpu: usize, msr: u32) -> Result<u64, GpFault> {
        self.with_lapic(vcpu, |lapic, now| lapic.msr_read(msr, now))
            .unwrap_or(Err(GpFault))
    }

    /// Writes an MSR of 800H to 8FFH.
    ///
    /// # Errors
    /// The APIC is not in x2APIC mode, the register does not exist or is read-only, or a reserved
    /// bit is set.
    pub fn x2apic_write(&self, vcpu: usize, msr: u32, value: u64) -> Result<(), GpFault> {
        self.with(|chips, now| {
            let lapic = chips.lapics.get_mut(vcpu).ok_or(GpFault)?;
            let effect = lapic.msr_write(msr, value, now)?;
            chips.apply(vcpu, effect);
            Ok(())
        })
    }

    /// IA32_APIC_BASE. Takes no lock.
    pub fn apic_base(&self, vcpu: usize) -> u64 {
        self.bases
            .get(vcpu)
            .map_or(0, |base| base.load(Ordering::Relaxed))
    }

    /// Writes IA32_APIC_BASE.
    ///
    /// # Errors
    /// A reserved bit is set, or the mode cannot be entered from the current one.
    pub fn set_apic_base(&self, vcpu: usize, value: u64) -> Result<(), GpFault> {
        self.with_lapic(vcpu, |lapic, _| lapic.set_apic_base(value))
            .unwrap_or(Err(GpFault))
    }

    /// IA32_TSC_DEADLINE.
    pub fn tsc_deadline(&self, vcpu: usize) -> u64 {
        self.with_lapic(vcpu, |lapic, now| lapic.tsc_deadline(now))
            .unwrap_or(0)
    }

    /// Writes IA32_TSC_DEADLINE. `tsc_offset` is the vCPU's TSC less the clock's ticks.
    pub fn set_tsc_deadline(&self, vcpu: usize, value: u64, tsc_offset: u64) {
        self.with_lapic(vcpu, |lapic, now| {
            lapic.set_tsc_deadline(value, tsc_offset, now);
        });
    }

    /// Sets a vCPU's TSC less the clock's ticks; an armed deadline may have passed by it.
    pub fn tsc_offset_changed(&self, vcpu: usize, tsc_offset: u64) {
        self.with_lapic(vcpu, |lapic, now| lapic.set_tsc_offset(tsc_offset, now));
    }

    /// CR8: bits 7:4 of the task priority. Takes no lock.
    pub fn cr8(&self, vcpu: usize) -> u64 {
        self.tprs
            .get(vcpu)
            .map_or(0, |tpr| u64::from(tpr.load(Ordering::Relaxed) >> 4))
    }

    /// Writes CR8, whose bits 63:4 the caller has checked. Takes no lock if nothing changes.
    pub fn set_cr8(&self, vcpu: usize, value: u64) {
        debug_assert!(value < 16, "CR8 has four bits");
        let tpr = ((value & 0xf) as u8) << 4;
        if self
            .tprs
            .get(vcpu)
            .is_some_and(|old| old.load(Ordering::Relaxed) != tpr)
        {
            self.with_lapic(vcpu, |lapic, _| lapic.set_tpr(tpr));
        }
    }

    /// Reads at an offset of the I/O APIC's page.
    pub fn ioapic_read(&self, offset: u64, data: &mut [u8]) {
        self.with(|chips, _| chips.ioapic.read(offset, data));
    }

    /// Writes at an offset of the I/O APIC's page.
    pub fn ioapic_write(&self, offset: u64, data: &[u8]) {
        self.with(|chips, _| {
            let Chips { lapics, ioapic, .. } = chips;
            ioapic.write(offset, data, &mut |m| send(lapics, m, None));
        });
    }

    /// Reads one of [`PORTS`]; `None` for any other.
    pub fn port_read(&self, port: u16) -> Option<u8> {
        self.with_port(port, |chips| match port {
            0x40..=0x61 => chips.pit.read(port),
            0x70 | 0x71 => chips.rtc.read(port),
            _ => chips.pic.read(port),
        })
    }

    /// Writes one of [`PORTS`]. Returns whether it is one.
    pub fn port_write(&self, port: u16, value: u8) -> bool {
        self.with_port(port, |chips| match port {
            0x40..=0x61 => chips.pit.write(port, value),
            0x70 | 0x71 => chips.rtc.write(port, value),
            _ => chips.pic.write(port, value),
        })
        .is_some()
    }

    fn with_port<R>(&self, port: u16, f: impl FnOnce(&mut Chips) -> R) -> Option<R> {
        PORTS.contains(&port).then(|| {
            self.with(|chips, now| {
                chips.advance_timers(now);
                let result = f(chips);
                chips.update_line(TIMER_LINE);
                chips.update_line(RTC_LINE);
                chips.update_pic_output();
                result
            })
        })
    }
}
