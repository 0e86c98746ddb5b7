//! The rows of the CPUID table.

use hindsight_regs::branch::xsave as branch_state;
use hindsight_regs::cpuid::{Feature, LEAF_FREQUENCY, LEAF_HYPERVISOR, LEAF_LBR, LEAF_TSC};
use hindsight_regs::rdt;

use super::{
    CRYSTAL_HZ, CpuModel, CpuidConfig, CpuidLeaf, CpuidRegs, EXTENDED, MAX_EXTENDED, OSPKE,
    OSXSAVE, XSAVE_ALIGNED, XSAVE_LEGACY, crystal,
};
use crate::facility::Facilities;
use crate::model::{FeatureWord, ModelDefinition};
use crate::uarch::CacheGeometry;
use crate::uarch::cache::LINE;

/// CPUID.1:ECX: the features of the debug store.
pub(super) const ECX1_DS: u32 = Feature::DTES64.mask() | Feature::DS_CPL.mask();
/// CPUID.1:ECX: features that are never reported: MONITOR, VMX, SMX, TM2, CNXT-ID, SDBG, xTPR, DCA.
const ECX1_NEVER: u32 = Feature::MONITOR.mask()
    | 0b11 << 5
    | 1 << 8
    | 1 << 10
    | Feature::SDBG.mask()
    | 1 << 14
    | 1 << 18;
/// PSN, DS, ACPI, HTT, TM, PBE: decided by the configuration, or never reported.
const EDX1_NEVER: u32 = 1 << 18 | Feature::DS.mask() | 1 << 22 | EDX1_HTT | 1 << 29 | 1 << 31;
/// CPUID.1:EDX: more than one logical processor in the package.
const EDX1_HTT: u32 = 1 << 28;

/// CPUID.7.0:EBX: both halves of TSX.
const EBX7_TSX: u32 = Feature::HLE.mask() | Feature::RTM.mask();
/// SGX, MPX, PT: never reported.
const EBX7_NEVER: u32 = 1 << 2 | 1 << 14 | Feature::PT.mask();
/// Features that change how guests see interrupts or memory: WAITPKG, CET, LA57, RDPID, bus-lock
/// detection.
const ECX7_NEVER: u32 = 1 << 5 | 1 << 7 | 1 << 16 | Feature::RDPID.mask() | 1 << 24;

/// CPUID.7.0:EDX: IBRS and IBPB, STIBP, SSBD.
const EDX7_SPEC_CTRL: u32 =
    Feature::SPEC_CTRL.mask() | Feature::STIBP.mask() | Feature::SSBD.mask();
/// CPUID.7.0:EDX: controls of speculation that exist; others are never reported.
const EDX7_CONTROLS: u32 = EDX7_SPEC_CTRL | Feature::MD_CLEAR.mask() | Feature::L1D_FLUSH.mask();

/// Components of XCR0: AVX, AVX-512 (three), x87 and SSE.
const XCR0_AVX: u64 = 1 << 2;
const XCR0_AVX512: u64 = 0b111 << 5;
const XCR0_X87_AND_SSE: u64 = 0b11;

/// CPUID.(0DH,1):EAX: XSAVES and XRSTORS.
const XSAVES: u32 = 1 << 3;

/// Four bytes of an identification string, as CPUID returns them in a register.
const fn text(bytes: &[u8; 4]) -> u32 {
    u32::from_le_bytes(*bytes)
}

/// All rows of the table, in no particular order.
pub(super) fn leaves(
    config: &CpuidConfig,
    supported: &impl Fn(u32, u32) -> CpuidRegs,
) -> Vec<CpuidLeaf> {
    let mut builder = CpuidBuilder {
        config,
        model: config.model.definition(),
        supported,
        leaves: Vec::new(),
    };
    builder.basic();
    builder.extended();
    builder.push(
        LEAF_HYPERVISOR,
        [LEAF_HYPERVISOR, text(b"Hind"), text(b"sigh"), text(b"tVMM")],
    );
    builder.leaves
}

pub(super) struct CpuidBuilder<'a, F> {
    pub(super) config: &'a CpuidConfig,
    pub(super) model: &'static ModelDefinition,
    pub(super) supported: &'a F,
    pub(super) leaves: Vec<CpuidLeaf>,
}

impl<F: Fn(u32, u32) -> CpuidRegs> CpuidBuilder<'_, F> {
    fn push(&mut self, leaf: u32, regs: CpuidRegs) {
        self.leaves.push(CpuidLeaf {
            leaf,
            subleaf: None,
            regs,
        });
    }

    fn push_sub(&mut self, leaf: u32, subleaf: u32, regs: CpuidRegs) {
        self.leaves.push(CpuidLeaf {
            leaf,
            subleaf: Some(subleaf),
            regs,
        });
    }

    /// Whether the processor has all of `facilities`.
    fn has(&self, facilities: Facilities) -> bool {
        self.config.facilities.contains(facilities)
    }

    /// Whether the processor has any of `facilities`.
    fn has_any(&self, facilities: Facilities) -> bool {
        self.config.facilities.intersects(facilities)
    }

    /// Whether vendor, signature and brand are the model's, and not the host's.
    fn has_own_identity(&self) -> bool {
        self.config.model != CpuModel::Host
    }

    /// The bits of `supported` that the model has, or for the host model all but `never`.
    fn offered(&self, supported: u32, word: FeatureWord, never: u32) -> u32 {
        match self.config.model {
            CpuModel::Host => supported & !never,
            _ => supported & self.model.features.word(word),
        }
    }

    fn basic(&mut self) {
        let vendor = if self.has_own_identity() {
            [text(b"Genu"), text(b"ntel"), text(b"ineI")]
        } else {
            let [_, ebx, ecx, edx] = (self.supported)(0, 0);
            [ebx, ecx, edx]
        };
        self.push(0, [self.model.max_leaf, vendor[0], vendor[1], vendor[2]]);
        self.push(1, self.leaf_1());
        self.push(2, [0x7603_6301, 0x00f0_b5ff, 0, 0x00c3_0000]);
        self.caches();
        self.push(5, [0; 4]);
        self.push(
            6,
            [self.model.features.word(FeatureWord::Leaf6Eax), 0, 0, 0],
        );
        self.push_sub(7, 0, self.leaf_7());
        if self.has(Facilities::PMU) {
            let counters = self.model.gp_counters(self.config.facilities);
            self.push(0xa, self.model.leaf_0a(counters));
        }
        self.topology();
        self.xsave();
        self.rdt_monitoring();
        self.rdt_allocation();
        let (denominator, numerator) = crystal::ratio(self.config.tsc_hz);
        self.push(LEAF_TSC, [denominator, numerator, CRYSTAL_HZ, 0]);
        let mhz = u32::try_from((self.config.tsc_hz + 500_000) / 1_000_000).unwrap_or(u32::MAX);
        self.push(LEAF_FREQUENCY, [mhz, mhz, 100, 0]);
        if self.has_architectural_lbr() {
            self.push(LEAF_LBR, self.model.lbr.leaf_1c());
        }
    }

    fn has_architectural_lbr(&self) -> bool {
        self.has(Facilities::LBR) && self.model.lbr.is_architectural()
    }

    fn leaf_1(&self) -> CpuidRegs {
        let host = (self.supported)(1, 0);
        let decided = Feature::X2APIC.mask()
            | Feature::TSC_DEADLINE.mask()
            | Feature::PDCM.mask()
            | ECX1_DS
            | OSXSAVE;
        let mut ecx = self.offered(host[2], FeatureWord::Leaf1Ecx, ECX1_NEVER | decided);
        ecx |= Feature::HYPERVISOR.mask();
        let mut edx = self.offered(host[3], FeatureWord::Leaf1Edx, EDX1_NEVER);
        for (facilities, bits) in [
            (Facilities::X2APIC, Feature::X2APIC.mask()),
            (Facilities::TSC_DEADLINE, Feature::TSC_DEADLINE.mask()),
            (Facilities::PERF_CAPABILITIES, Feature::PDCM.mask()),
            (Facilities::DEBUG_STORE, ECX1_DS),
        ] {
            if self.has_any(facilities) {
                ecx |= bits;
            }
        }
        if self.has_any(Facilities::DEBUG_STORE) {
            edx |= Feature::DS.mask();
        }
        // The local APIC is ours, whatever the engine says.
        edx |= Feature::APIC.mask();
        if self.config.cpus > 1 {
            edx |= EDX1_HTT;
        }
        let signature = if self.has_own_identity() {
            self.model.signature
        } else {
            host[0]
        };
        let ids = self.config.cpus.next_power_of_two().min(0xff);
        // A CLFLUSH line has 8 quadwords. `with_apic_id` fills in the APIC ID of each processor.
        [signature, ids << 16 | 8 << 8, ecx, edx]
    }

    pub(super) fn leaf_7(&self) -> CpuidRegs {
        let host = (self.supported)(7, 0);
        let facilities = [
            (Facilities::TSC_ADJUST, Feature::TSC_ADJUST.mask()),
            (Facilities::RDT_MONITORING, Feature::RDT_M.mask()),
            (Facilities::RDT_ALLOCATION, Feature::RDT_A.mask()),
            (Facilities::RTM, EBX7_TSX),
        ];
        let decided = facilities.iter().fold(0, |all, (_, bits)| all | bits);
        let mut ebx = self.offered(host[1], FeatureWord::Leaf7Ebx, EBX7_NEVER | decided);
        for (facilities, bits) in facilities {
            if self.has_any(facilities) {
                ebx |= bits;
            }
        }
        let mut ecx = self.offered(host[2], FeatureWord::Leaf7Ecx, ECX7_NEVER | OSPKE);
        if !self.has(Facilities::RDTSCP) {
            // RDPID reads IA32_TSC_AUX.
            ecx &= !Feature::RDPID.mask();
        }
        let mut edx = self.offered(host[3], FeatureWord::Leaf7Edx, !EDX7_CONTROLS);
        if self.has_architectural_lbr() {
            edx |= Feature::ARCH_LBR.mask();
        }
        if edx & EDX7_SPEC_CTRL != EDX7_SPEC_CTRL {
            // IA32_SPEC_CTRL has all of its bits, or does not exist.
            edx &= !EDX7_SPEC_CTRL;
        }
        // IA32_ARCH_CAPABILITIES is ours, whatever the engine says.
        let own = self.model.features.word(FeatureWord::Leaf7Edx);
        [0, ebx, ecx, edx | own & Feature::ARCH_CAPABILITIES.mask()]
    }

    /// Leaf 4: the caches of the cache model, with a shared L3 (rule CPU-24).
    fn caches(&mut self) {
        let cores = (self.config.cpus.next_power_of_two().min(64) - 1) << 26;
        let cache = |kind: u32, level: u32, shared: u32, geometry: CacheGeometry, edx: u32| {
            [
                kind | level << 5 | 1 << 8 | shared << 14 | cores,
                (geometry.ways - 1) << 22 | (LINE - 1),
                geometry.sets - 1,
                edx,
            ]
        };
        let all = self.config.cpus.next_power_of_two() - 1;
        self.push_sub(4, 0, cache(1, 1, 0, CacheGeometry::L1, 0));
        self.push_sub(4, 1, cache(2, 1, 0, CacheGeometry::L1, 0));
        self.push_sub(4, 2, cache(3, 2, 0, CacheGeometry::L2, 0));
        self.push_sub(4, 3, cache(3, 3, all, CacheGeometry::L3, 0b100));
        self.push_sub(4, 4, [0; 4]);
    }

    /// Leaf 0BH: one thread per core, all cores in one package.
    fn topology(&mut self) {
        let bits = self.config.cpus.next_power_of_two().trailing_zeros();
        self.push_sub(0xb, 0, [0, 1, 1 << 8, 0]);
        self.push_sub(0xb, 1, [bits, self.config.cpus, 2 << 8 | 1, 0]);
        self.push_sub(0xb, 2, [0, 0, 2, 0]);
    }

    /// Leaf 0DH: sizes and offsets are the host's own, because XSAVE executes natively.
    fn xsave(&mut self) {
        let supported = self.supported;
        let [low, ..] = supported(0xd, 0);
        let low = u64::from(low);
        let xsave = supported(1, 0)[2] & Feature::XSAVE.mask() != 0
            && low & XCR0_X87_AND_SSE == XCR0_X87_AND_SSE;
        let xcr0 = self.model.features.xcr0();
        if xcr0 == 0 || !xsave {
            self.push_sub(0xd, 0, [0; 4]);
            return;
        }
        let mut components = low & xcr0;
        if components & XCR0_AVX == 0 || components & XCR0_AVX512 != XCR0_AVX512 {
            components &= !XCR0_AVX512;
        }
        let mut size = XSAVE_LEGACY;
        for component in (2..32).filter(|i| components & 1 << i != 0) {
            let [len, offset, flags, _] = supported(0xd, component);
            size = size.max(len.saturating_add(offset));
            self.push_sub(0xd, component, [len, offset, flags & XSAVE_ALIGNED, 0]);
        }
        let components = u32::try_from(components).unwrap_or(0);
        self.push_sub(0xd, 0, [components, XSAVE_LEGACY, size, 0]);
        // XSAVEOPT, XSAVEC, XGETBV with ECX = 1, XSAVES.
        let mut extended = supported(0xd, 1)[0] & self.model.features.word(FeatureWord::LeafDEax);
        // The engine must save the modelled LBR stack.
        let [lbr, ..] = supported(0xd, branch_state::COMPONENT);
        let mut xss = 0;
        if lbr != 0 && self.has_architectural_lbr() && extended & XSAVES != 0 {
            /// The component is one of IA32_XSS.
            const SUPERVISOR: u32 = 1;
            let regs = [branch_state::BYTES, 0, SUPERVISOR, 0];
            self.push_sub(0xd, branch_state::COMPONENT, regs);
            xss = 1 << branch_state::COMPONENT;
        } else {
            extended &= !XSAVES;
        }
        self.push_sub(0xd, 1, [extended, 0, xss, 0]);
    }

    /// `bit` if the processor has `facility`, otherwise 0.
    fn bit(&self, facility: Facilities, bit: u32) -> u32 {
        if self.has(facility) { bit } else { 0 }
    }

    /// Leaf 0FH: monitoring of the L3 and of bandwidth (rules CPU-11 to CPU-13).
    fn rdt_monitoring(&mut self) {
        if !self.has_any(Facilities::RDT_MONITORING) {
            return;
        }
        let events = self.bit(Facilities::CMT, 1) | self.bit(Facilities::MBM, 0b110);
        self.push_sub(0xf, 0, [0, rdt::MAX_RMID, 0, 1 << 1]);
        self.push_sub(0xf, 1, [0, rdt::UPSCALE, rdt::MAX_RMID, events]);
    }

    /// Leaf 10H: allocation of the L3, the L2 and of bandwidth (rules CPU-14 to CPU-16).
    fn rdt_allocation(&mut self) {
        const CDP: u32 = 1 << 2;
        const LINEAR: u32 = 1 << 2;
        if !self.has_any(Facilities::RDT_ALLOCATION) {
            return;
        }
        let resources = self.bit(Facilities::L3CAT, 1 << 1)
            | self.bit(Facilities::L2CAT, 1 << 2)
            | self.bit(Facilities::MBA, 1 << 3);
        self.push_sub(0x10, 0, [0, resources, 0, 0]);
        if self.has(Facilities::L3CAT) {
            let (length, cdp) = (rdt::L3_MASK_BITS - 1, self.bit(Facilities::CDP, CDP));
            let regs = [length, rdt::L3_SHARED_WAYS, cdp, rdt::L3_COS - 1];
            self.push_sub(0x10, 1, regs);
        }
        if self.has(Facilities::L2CAT) {
            let regs = [rdt::L2_MASK_BITS - 1, 0, CDP, rdt::L2_COS - 1];
            self.push_sub(0x10, 2, regs);
        }
        if self.has(Facilities::MBA) {
            let regs = [rdt::MBA_MAX - 1, 0, LINEAR, rdt::MBA_COS - 1];
            self.push_sub(0x10, 3, regs);
        }
    }

    fn extended(&mut self) {
        self.push(EXTENDED, [MAX_EXTENDED, 0, 0, 0]);
        let [_, _, host_ecx, host_edx] = (self.supported)(0x8000_0001, 0);
        let rdtscp = Feature::RDTSCP.mask();
        let mut edx = self.offered(host_edx, FeatureWord::ExtendedEdx, rdtscp);
        if self.has(Facilities::RDTSCP) {
            edx |= rdtscp;
        }
        // The host's SVM, IBS, performance counters and the like are not provided.
        let ecx = host_ecx & self.model.features.word(FeatureWord::ExtendedEcx);
        self.push(0x8000_0001, [0, 0, ecx, edx]);
        self.brand();
        self.push(0x8000_0006, [0, 0, 0x0100_6040, 0]);
        self.push(0x8000_0007, [0, 0, 0, Feature::INVARIANT_TSC.mask()]);
        let physical = (self.supported)(0x8000_0008, 0)[0] & 0xff;
        let widths = 48 << 8 | physical.clamp(36, 52);
        self.push(0x8000_0008, [widths, 0, 0, 0]);
    }

    /// Leaves 80000002H to 80000004H.
    fn brand(&mut self) {
        let mut brand = [0; 48];
        for (byte, from) in brand.iter_mut().zip(self.model.brand.bytes()) {
            *byte = from;
        }
        for (leaf, part) in (0x8000_0002..).zip(brand.chunks_exact(16)) {
            let word =
                |n: usize| u32::from_le_bytes([part[n], part[n + 1], part[n + 2], part[n + 3]]);
            let regs = if self.has_own_identity() {
                [word(0), word(4), word(8), word(12)]
            } else {
                (self.supported)(leaf, 0)
            };
            self.push(leaf, regs);
        }
    }
}
