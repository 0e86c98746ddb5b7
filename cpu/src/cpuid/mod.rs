//! CPUID of the virtual processor. SDM Vol. 2A, "CPUID—CPU Identification".
//!
//! A [`CpuModel`] says what the guest should see. CPUID hides every feature that the engine cannot
//! execute, and every facility that [`Facilities`] does not contain.

mod build;
mod crystal;
#[cfg(test)]
mod tests;

use hindsight_regs::cpuid::LEAF_HYPERVISOR;
use hindsight_regs::cr::Cr4;

use crate::facility::Facilities;

pub use crate::model::CpuModel;
pub use crystal::CRYSTAL_HZ;

/// EAX, EBX, ECX, EDX.
pub type CpuidRegs = [u32; 4];

/// One row of the CPUID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct CpuidLeaf {
    /// EAX on input.
    pub leaf: u32,
    /// ECX on input; `None` if the leaf ignores it.
    pub subleaf: Option<u32>,
    /// The registers on output.
    pub regs: CpuidRegs,
}

/// What a [`CpuidTable`] depends on, besides the features that the engine can execute.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CpuidConfig {
    /// The processor model.
    pub model: CpuModel,
    /// The facilities of the processor.
    pub facilities: Facilities,
    /// Number of processors in the machine, 1 to 64.
    pub cpus: u32,
    /// Frequency of the TSC in Hz.
    pub tsc_hz: u64,
}

impl CpuidConfig {
    /// A machine with one processor; `tsc_hz` is the frequency of the TSC in Hz.
    pub const fn new(model: CpuModel, facilities: Facilities, tsc_hz: u64) -> Self {
        Self {
            model,
            facilities,
            cpus: 1,
            tsc_hz,
        }
    }

    /// Sets the number of processors, 1 to 64.
    #[must_use]
    pub const fn with_cpus(self, cpus: u32) -> Self {
        Self { cpus, ..self }
    }
}

/// The CPUID table of a machine. The tables of its processors differ in the APIC ID only.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct CpuidTable {
    model: CpuModel,
    /// By leaf, then sub-leaf.
    leaves: Vec<CpuidLeaf>,
    max_basic: u32,
    max_extended: u32,
}

const MAX_EXTENDED: u32 = 0x8000_0008;
/// First extended leaf.
const EXTENDED: u32 = 0x8000_0000;
/// Bytes of the legacy region and the header of an XSAVE area.
const XSAVE_LEGACY: u32 = 576;
/// CPUID.0DH.1:EAX: XSAVEC, and the size of its area in EBX.
const XSAVEC: u32 = 1 << 1;
/// CPUID.0DH.n:ECX: a compacted area aligns the component to 64 bytes.
const XSAVE_ALIGNED: u32 = 1 << 1;
/// CPUID.7.0:ECX: CR4.PKE is set.
const OSPKE: u32 = 1 << 4;
/// CPUID.1:ECX: CR4.OSXSAVE is set.
const OSXSAVE: u32 = 1 << 27;

impl CpuidTable {
    /// Builds the table.
    ///
    /// `supported` returns what the engine can execute, in the form of CPUID: it takes leaf and
    /// sub-leaf.
    pub fn new(config: &CpuidConfig, supported: impl Fn(u32, u32) -> CpuidRegs) -> Self {
        debug_assert!(matches!(config.cpus, 1..=64), "1 to 64 processors");
        let max_basic = config.model.definition().max_leaf;
        let mut leaves = build::leaves(config, &supported);
        leaves.retain(|l| l.leaf <= max_basic || l.leaf >= LEAF_HYPERVISOR);
        leaves.sort_by_key(|l| (l.leaf, l.subleaf));
        Self {
            model: config.model,
            leaves,
            max_basic,
            max_extended: MAX_EXTENDED,
        }
    }

    /// The processor model that the table describes.
    pub fn model(&self) -> CpuModel {
        self.model
    }

    /// Width of physical addresses in bits.
    pub fn physical_bits(&self) -> u32 {
        self.query(0x8000_0008, 0, 0, 0, 0)[0] & 0xff
    }

    /// The controls of speculation: leaf 7, EDX.
    pub fn speculation(&self) -> u32 {
        self.query(7, 0, 0, 0, 0)[3]
    }

    /// The table of processor `apic_id`, without the bits that follow control registers.
    pub fn for_cpu(&self, apic_id: u32) -> impl Iterator<Item = CpuidLeaf> + '_ {
        self.leaves.iter().map(move |leaf| CpuidLeaf {
            regs: with_apic_id(leaf, apic_id),
            ..*leaf
        })
    }

    /// The registers after CPUID on processor `apic_id`.
    ///
    /// A leaf above the highest one returns the highest basic leaf, as on Intel processors. `cr4`
    /// decides OSXSAVE and OSPKE, `xcr0` the size in leaf 0DH.
    pub fn query(&self, leaf: u32, subleaf: u32, apic_id: u32, cr4: u64, xcr0: u64) -> CpuidRegs {
        let found = self.find(leaf, subleaf).or_else(|| {
            let basic = leaf > self.max_basic && leaf < LEAF_HYPERVISOR;
            let hypervisor = leaf > LEAF_HYPERVISOR && leaf < EXTENDED;
            let extended = leaf > self.max_extended;
            if basic || hypervisor || extended {
                self.find(self.max_basic, subleaf)
            } else {
                None
            }
        });
        let Some(found) = found else { return [0; 4] };
        let mut regs = with_apic_id(found, apic_id);
        // A leaf above the highest one has the registers of another.
        match (found.leaf, subleaf) {
            (1, _) if cr4 & Cr4::OSXSAVE.bits() != 0 => regs[2] |= OSXSAVE,
            (7, 0) if cr4 & Cr4::PKE.bits() != 0 => regs[2] |= OSPKE,
            (0xd, 0) => regs[1] = self.xsave_size(xcr0),
            (0xd, 1) if regs[0] & XSAVEC != 0 => regs[1] = self.compacted_size(xcr0),
            _ => {}
        }
        regs
    }

    /// Bytes of the standard-format XSAVE area for the components in `xcr0`.
    fn xsave_size(&self, xcr0: u64) -> u32 {
        (2..63)
            .filter(|&i| xcr0 & 1 << i != 0)
            .filter_map(|i| self.find(0xd, i))
            .map(|l| l.regs[0].saturating_add(l.regs[1]))
            .fold(XSAVE_LEGACY, u32::max)
    }

    /// Bytes of the compacted XSAVE area for the components in `xcr0`.
    fn compacted_size(&self, xcr0: u64) -> u32 {
        (2..63)
            .filter(|&i| xcr0 & 1 << i != 0)
            .filter_map(|i| self.find(0xd, i))
            .fold(XSAVE_LEGACY, |end, component| {
                let [len, _, flags, _] = component.regs;
                let start = if flags & XSAVE_ALIGNED != 0 {
                    end.next_multiple_of(64)
                } else {
                    end
                };
                start.saturating_add(len)
            })
    }

    fn find(&self, leaf: u32, subleaf: u32) -> Option<&CpuidLeaf> {
        let start = self.leaves.partition_point(|l| l.leaf < leaf);
        self.leaves[start..]
            .iter()
            .take_while(|l| l.leaf == leaf)
            .find(|l| l.subleaf.is_none_or(|s| s == subleaf))
    }
}

fn with_apic_id(leaf: &CpuidLeaf, apic_id: u32) -> CpuidRegs {
    let mut regs = leaf.regs;
    match leaf.leaf {
        1 => regs[1] = (regs[1] & 0x00ff_ffff) | (apic_id & 0xff) << 24,
        0xb => regs[3] = apic_id,
        _ => {}
    }
    regs
}
