//! What the user of a `ModelPlatform` supplies, and empty implementations of it.

use crate::platform::{Bus, GpFault, Pending};

/// The interrupt controller, local APIC included, of a [`ModelPlatform`](crate::ModelPlatform).
pub trait InterruptController {
    /// Returns the events that are pending for the processor.
    ///
    /// See [`InterruptSource::pending`](crate::InterruptSource::pending).
    fn pending(&mut self) -> Pending;
    /// Acknowledges the highest interrupt; returns its vector, or `None` if there is none.
    fn acknowledge(&mut self) -> Option<u8>;
    /// Takes the pending NMI.
    fn acknowledge_nmi(&mut self);
    /// NMIs are no longer blocked: of those that arrived meanwhile one is pending.
    fn nmis_unblocked(&mut self);
    /// Takes the pending system-management interrupt.
    fn acknowledge_smi(&mut self);
    /// Drives the FERR# pin; see [`InterruptSource::set_ferr`](crate::InterruptSource::set_ferr).
    /// Unless implemented, the pin is connected to nothing, and IGNNE# is never asserted.
    fn set_ferr(&mut self, _asserted: bool) -> bool {
        false
    }
    /// Requests a performance-monitoring interrupt, which the LVT of the local APIC delivers.
    fn request_pmi(&mut self);
    /// The task priority that MOV from CR8 reads, 0 to 15.
    fn cr8(&mut self) -> u8;
    /// Sets the task priority, 0 to 15.
    fn set_cr8(&mut self, priority: u8);
    /// RDMSR of an MSR of the local APIC: IA32_APIC_BASE, IA32_TSC_DEADLINE, or 0x800 to 0x8ff.
    ///
    /// # Errors
    /// [`GpFault`] where the processor raises #GP(0).
    fn rdmsr(&mut self, index: u32) -> Result<u64, GpFault>;
    /// WRMSR of such an MSR.
    ///
    /// # Errors
    /// [`GpFault`] where the processor raises #GP(0).
    fn wrmsr(&mut self, index: u32, value: u64) -> Result<(), GpFault>;
    /// Reports the clock in `ticks` since the start, and the time-stamp counter `tsc`.
    ///
    /// Called at least before everything that may depend on time. WRMSR moves the time-stamp
    /// counter, but never the clock.
    fn advance(&mut self, ticks: u64, tsc: u64);
}

/// A bus without devices: reads return all ones, writes are dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoDevices;

impl Bus for NoDevices {
    fn port_read(&mut self, _: u16, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn port_write(&mut self, _: u16, _: &[u8]) {}

    fn mmio_read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn mmio_write(&mut self, _: u64, _: &[u8]) {}
}

/// A processor without a local APIC, to which no interrupt is ever delivered.
///
/// Performance-monitoring interrupts are dropped, and the MSRs of the local APIC raise #GP(0).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoInterrupts {
    priority: u8,
}

impl InterruptController for NoInterrupts {
    fn pending(&mut self) -> Pending {
        Pending::default()
    }

    fn acknowledge(&mut self) -> Option<u8> {
        None
    }

    fn acknowledge_nmi(&mut self) {}

    fn nmis_unblocked(&mut self) {}

    fn acknowledge_smi(&mut self) {}

    fn request_pmi(&mut self) {}

    fn cr8(&mut self) -> u8 {
        self.priority
    }

    fn set_cr8(&mut self, priority: u8) {
        self.priority = priority;
    }

    fn rdmsr(&mut self, _: u32) -> Result<u64, GpFault> {
        Err(GpFault)
    }

    fn wrmsr(&mut self, _: u32, _: u64) -> Result<(), GpFault> {
        Err(GpFault)
    }

    fn advance(&mut self, _: u64, _: u64) {}
}
