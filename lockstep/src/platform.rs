//! The platform of the interpreter's guests: one port, which ends a run.

use hindsight_interp::{Gp, Pending, Platform, supported_cpuid};

/// A platform whose only device is a port that ends the run when it is written.
#[derive(Debug, Default)]
pub(crate) struct ExitPortPlatform {
    /// The port was written.
    pub(crate) exited: bool,
}

impl Platform for ExitPortPlatform {
    fn port_read(&mut self, _: u16, data: &mut [u8]) {
        data.fill(0xff);
    }
    fn port_write(&mut self, _: u16, _: &[u8]) {
        self.exited = true;
    }
    fn mmio_read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }
    fn mmio_write(&mut self, _: u64, _: &[u8]) {}
    fn rdmsr(&mut self, _: u32) -> Result<u64, Gp> {
        Err(Gp)
    }
    fn wrmsr(&mut self, _: u32, _: u64) -> Result<(), Gp> {
        Err(Gp)
    }
    fn cpuid(&self, leaf: u32, subleaf: u32) -> [u32; 4] {
        supported_cpuid(leaf, subleaf)
    }
    fn tsc(&mut self) -> u64 {
        0
    }
    fn tsc_aux(&mut self) -> u32 {
        0
    }
    fn random(&mut self) -> u64 {
        0
    }
    fn cr8(&mut self) -> u8 {
        0
    }
    fn set_cr8(&mut self, _: u8) {}
    fn pending(&mut self) -> Pending {
        Pending {
            leave: self.exited,
            ..Pending::default()
        }
    }
    fn acknowledge(&mut self) -> Option<u8> {
        None
    }
}
