//! The platform of the interpreter's guests: one port, which ends a run.

use hindsight_cpu::pmu::pebs::{PebsLbr, PebsOutcome};
use hindsight_interp::{
    Accesses, Branch, Bus, Counting, GpFault, InterruptSource, MemoryAccess, MsrHandler, Observe,
    Observer, Pending, RetiredCounts, Ring, SystemEvent, TransactionEvent, supported_cpuid,
};

/// A platform whose only device is a port that ends the run when it is written.
#[derive(Debug, Default)]
pub(crate) struct ExitPortPlatform {
    /// The port was written.
    pub(crate) exited: bool,
}

impl Bus for ExitPortPlatform {
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
}

impl MsrHandler for ExitPortPlatform {
    fn rdmsr(&mut self, _: u32) -> Result<u64, GpFault> {
        Err(GpFault)
    }
    fn wrmsr(&mut self, _: u32, _: u64) -> Result<(), GpFault> {
        Err(GpFault)
    }
    fn rdpmc(&mut self, _: u32) -> Result<u64, GpFault> {
        Err(GpFault)
    }
    fn tsc_aux(&mut self) -> u32 {
        0
    }
    fn cpuid(&self, leaf: u32, subleaf: u32) -> [u32; 4] {
        /// CPUID.(0DH,1):EAX: XSAVES, which saves a component that hosts lack.
        const XSAVES: u32 = 1 << 3;
        let mut registers = supported_cpuid(leaf, subleaf);
        if (leaf, subleaf) == (0xd, 1) {
            registers[0] &= !XSAVES;
        }
        registers
    }
    fn portable_results(&self) -> bool {
        false
    }
}

impl InterruptSource for ExitPortPlatform {
    fn pending(&mut self) -> Pending {
        Pending {
            leave: self.exited,
            ..Pending::default()
        }
    }
    fn acknowledge(&mut self) -> Option<u8> {
        None
    }
    fn acknowledge_nmi(&mut self) {}
    fn nmis_unblocked(&mut self) {}
    fn acknowledge_smi(&mut self) {}
    fn smm(&mut self, _: bool) {}
    fn cr8(&mut self) -> u8 {
        0
    }
    fn set_cr8(&mut self, _: u8) {}
    fn advance(&mut self, _: RetiredCounts) {}
    fn tsc(&mut self) -> u64 {
        0
    }
    fn set_ferr(&mut self, _: bool) -> bool {
        false
    }
    fn random(&mut self) -> Option<u64> {
        None
    }
}

impl Observer for ExitPortPlatform {
    fn observe(&mut self) -> Observe {
        Observe::default()
    }
    fn branches(&mut self, _: u64, _: &mut [Branch]) {}
    fn debug_exception(&mut self) {}
    fn counting(&mut self) -> Counting {
        Counting::NONE
    }
    fn accesses(&mut self, _: Ring, _: &Accesses<'_>) -> u64 {
        1
    }

    fn line_access(&mut self, _: Ring, _: &MemoryAccess) {}

    fn accesses_of_block(&mut self, _: Ring, _: u64, _: u64) {}
    fn caches_flushed(&mut self, _: Option<u64>) {}
    fn pebs_lbr(&mut self) -> PebsLbr {
        PebsLbr::default()
    }
    fn pebs_stored(&mut self, _: &PebsOutcome) {}
    fn request_pmi(&mut self) {}
    fn allows_transactions(&self) -> bool {
        true
    }
    fn transaction(&mut self, _: TransactionEvent, _: Ring) {}
    fn system_event(&mut self, _: SystemEvent) {}
}
