//! CPUID of the virtual processor. SDM Vol. 2A, "CPUID—CPU Identification".
//!
//! A [`CpuModel`] says what the guest should see; what the host (or the interpreter) cannot execute
//! and what [`Facilities`] does not hold is left out, so that nothing is shown that is not there.

use core::fmt;

use hindsight_regs::rdt;
use serde::{Deserialize, Serialize};

use crate::facility::Facilities;
use crate::uarch::Geometry;
use crate::uarch::cache::LINE;

/// EAX, EBX, ECX, EDX.
pub type Regs = [u32; 4];

/// A processor that a guest can be given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CpuModel {
    /// First-generation Xeon Scalable, family 6 model 55H stepping 4.
    #[default]
    SkylakeServer,
    /// What the interpreter executes with the same results on every host: x86-64 with SSE2 and no
    /// XSAVE, and integer and system extensions. Frozen: a change is another profile.
    PortableV1,
    /// Whatever the host has, with our own facilities in place of the host's.
    Host,
}

impl fmt::Display for CpuModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SkylakeServer => "skylake-server",
            Self::PortableV1 => "portable-v1",
            Self::Host => "host",
        })
    }
}

/// One answer of CPUID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leaf {
    /// EAX on input.
    pub leaf: u32,
    /// ECX on input; `None` where it does not matter.
    pub subleaf: Option<u32>,
    /// The answer.
    pub regs: Regs,
}

/// What decides the table besides the model.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Which processor.
    pub model: CpuModel,
    /// What it has.
    pub facilities: Facilities,
    /// Processors in the machine, 1 to 64.
    pub cpus: u32,
    /// Frequency of the TSC in Hz.
    pub tsc_hz: u64,
}

/// The CPUID table of a machine. All processors have the same but for their APIC ids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuidTable {
    model: CpuModel,
    /// By leaf, then sub-leaf.
    leaves: Vec<Leaf>,
    max_basic: u32,
    max_extended: u32,
}

/// Frequency of the always-running timer in Hz (parameter `CRYSTAL_HZ`).
pub const CRYSTAL_HZ: u32 = 25_000_000;

const MAX_BASIC: u32 = 0x16;
const MAX_EXTENDED: u32 = 0x8000_0008;
/// The hypervisor leaves name this monitor, so that guests can tell.
const HYPERVISOR: u32 = 0x4000_0000;
const SIGNATURE_SKYLAKE: u32 = 0x0005_0654;

// CPUID.1:ECX
const ECX1_X2APIC: u32 = 1 << 21;
const ECX1_TSC_DEADLINE: u32 = 1 << 24;
const ECX1_OSXSAVE: u32 = 1 << 27;
const ECX1_XSAVE: u32 = 1 << 26;
const ECX1_HYPERVISOR: u32 = 1 << 31;
const ECX1_PDCM: u32 = 1 << 15;
const ECX1_DS: u32 = 1 << 2 | 1 << 4;
/// MONITOR, VMX, SMX, TM2, CNXT-ID, SDBG, xTPR, DCA: never shown.
const ECX1_NEVER: u32 = 1 << 3 | 0b11 << 5 | 1 << 8 | 0b11 << 10 | 1 << 14 | 1 << 18;
/// SSE3, PCLMULQDQ, SSSE3, FMA, CX16, PCID, SSE4.1, SSE4.2, MOVBE, POPCNT, AES, XSAVE, AVX, F16C,
/// RDRAND.
const ECX1_SKYLAKE: u32 =
    1 | 1 << 1 | 1 << 9 | 0b11 << 12 | 1 << 17 | 0b11 << 19 | 0b11 << 22 | 0b11 << 25 | 0b111 << 28;
/// CX16, PCID, MOVBE, POPCNT, RDRAND.
const ECX1_PORTABLE: u32 = 1 << 13 | 1 << 17 | 0b11 << 22 | 1 << 30;
// CPUID.1:EDX
const EDX1_DS: u32 = 1 << 21;
/// FPU to MMX and FXSR to SS without DS, ACPI, PSN: 0, 1 ... 17, 19, 23 to 27.
const EDX1_SKYLAKE: u32 = 0x0f8b_fbff;
/// PSN, DS, ACPI, HTT, TM, PBE: ours to decide or never shown.
const EDX1_NEVER: u32 = 1 << 18 | 1 << 21 | 1 << 22 | 1 << 28 | 1 << 29 | 1 << 31;
// CPUID.7.0:EBX
const EBX7_TSC_ADJUST: u32 = 1 << 1;
const EBX7_RDT_M: u32 = 1 << 12;
const EBX7_RDT_A: u32 = 1 << 15;
const EBX7_RTM: u32 = 1 << 4 | 1 << 11;
/// SGX, MPX, PT: never shown.
const EBX7_NEVER: u32 = 1 << 2 | 1 << 14 | 1 << 25;
/// FSGSBASE, BMI1, AVX2, FDP_EXCPTN_ONLY, SMEP, BMI2, ERMS, INVPCID, FCS/FDS deprecation, AVX512F,
/// AVX512DQ, RDSEED, ADX, SMAP, CLFLUSHOPT, CLWB, AVX512CD, AVX512BW, AVX512VL.
const EBX7_SKYLAKE: u32 = 1
    | 1 << 3
    | 0b111 << 5
    | 0b111 << 8
    | 1 << 13
    | 0b11 << 16
    | 0b111 << 18
    | 0b11 << 23
    | 1 << 28
    | 0b11 << 30;
/// FSGSBASE, SMEP, ERMS, INVPCID, RDSEED, ADX, SMAP, CLFLUSHOPT, CLWB.
const EBX7_PORTABLE: u32 = 1 | 1 << 7 | 0b11 << 9 | 0b111 << 18 | 0b11 << 23;
/// CPUID.7.0:ECX: UMIP.
const ECX7_PORTABLE: u32 = 1 << 2;
// CPUID.7.0:ECX: UMIP, PKU.
const ECX7_SKYLAKE: u32 = 1 << 2 | 1 << 3;
const ECX7_OSPKE: u32 = 1 << 4;
/// RDPID, and what changes how guests see interrupts or memory: WAITPKG, LA57, bus-lock detection.
const ECX7_NEVER: u32 = 1 << 5 | 1 << 7 | 1 << 16 | 1 << 22 | 1 << 24;
// CPUID.7.0:EDX: IA32_ARCH_CAPABILITIES.
const EDX7_ARCH_CAPABILITIES: u32 = 1 << 29;
// CPUID.80000001H
const EDX_EXT_RDTSCP: u32 = 1 << 27;
/// SYSCALL, NX, 1-GiB pages, long mode.
const EDX_EXT_SKYLAKE: u32 = 1 << 11 | 1 << 20 | 1 << 26 | 1 << 29;
/// LAHF/SAHF, LZCNT, PREFETCHW.
const ECX_EXT_SKYLAKE: u32 = 1 | 1 << 5 | 1 << 8;
/// x87, SSE, AVX, AVX-512 (three), PKRU.
const XCR0_SKYLAKE: u32 = 0b111 | 0b111 << 5 | 1 << 9;

/// Architectural performance monitoring: version 4, counters of 48 bits whose number is put in, 7 events
/// that are all there, 3 fixed counters of 48 bits.
const LEAF_0A: Regs = [0x0730_0004, 0, 0, 0x603];

impl CpuidTable {
    /// Builds the table. `supported` answers what the host under KVM, or the interpreter, can
    /// execute, in CPUID's own form.
    pub fn new(config: &Config, supported: impl Fn(u32, u32) -> Regs) -> Self {
        let mut leaves = Vec::new();
        let builder = Builder {
            config,
            supported: &supported,
        };
        builder.basic(&mut leaves);
        builder.extended(&mut leaves);
        leaves.push(Leaf {
            leaf: HYPERVISOR,
            subleaf: None,
            regs: [HYPERVISOR, text(b"Hind"), text(b"sigh"), text(b"tVMM")],
        });
        leaves.sort_by_key(|l| (l.leaf, l.subleaf));
        Self {
            model: config.model,
            leaves,
            max_basic: MAX_BASIC,
            max_extended: MAX_EXTENDED,
        }
    }

    /// The processor that it describes.
    pub fn model(&self) -> CpuModel {
        self.model
    }

    /// The table as processor `apic_id` sees it, without the bits that follow control registers.
    pub fn for_cpu(&self, apic_id: u32) -> impl Iterator<Item = Leaf> + '_ {
        self.leaves.iter().map(move |leaf| Leaf {
            regs: with_apic_id(leaf, apic_id),
            ..*leaf
        })
    }

    /// CPUID as processor `apic_id` executes it. A leaf above the highest answers as the highest
    /// basic leaf, as on Intel processors; `cr4` decides OSXSAVE and OSPKE, `xcr0` the size in
    /// leaf 0DH.
    pub fn query(&self, leaf: u32, subleaf: u32, apic_id: u32, cr4: u64, xcr0: u64) -> Regs {
        let found = self.find(leaf, subleaf).or_else(|| {
            let basic = leaf > self.max_basic && leaf < HYPERVISOR;
            let hypervisor = leaf > HYPERVISOR && leaf < 0x8000_0000;
            let extended = leaf > self.max_extended;
            if basic || hypervisor || extended {
                self.find(self.max_basic, subleaf)
            } else {
                None
            }
        });
        let Some(found) = found else { return [0; 4] };
        let mut regs = with_apic_id(found, apic_id);
        match (leaf, subleaf) {
            (1, _) if cr4 & 1 << 18 != 0 => regs[2] |= ECX1_OSXSAVE,
            (7, 0) if cr4 & 1 << 22 != 0 => regs[2] |= ECX7_OSPKE,
            (0xd, 0) => regs[1] = self.xsave_size(xcr0),
            (0xd, 1) if regs[0] & 0b10 != 0 => regs[1] = self.xsave_size(xcr0),
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
            .fold(576, u32::max)
    }

    fn find(&self, leaf: u32, subleaf: u32) -> Option<&Leaf> {
        let start = self.leaves.partition_point(|l| l.leaf < leaf);
        self.leaves[start..]
            .iter()
            .take_while(|l| l.leaf == leaf)
            .find(|l| l.subleaf.is_none_or(|s| s == subleaf))
    }
}

/// Four bytes of an identification string, as CPUID gives them in a register.
const fn text(bytes: &[u8; 4]) -> u32 {
    u32::from_le_bytes(*bytes)
}

fn with_apic_id(leaf: &Leaf, apic_id: u32) -> Regs {
    let mut regs = leaf.regs;
    match leaf.leaf {
        1 => regs[1] = (regs[1] & 0x00ff_ffff) | (apic_id & 0xff) << 24,
        0xb => regs[3] = apic_id,
        _ => {}
    }
    regs
}

/// The bits of one register, by model.
#[derive(Clone, Copy)]
struct Wanted {
    skylake: u32,
    portable: u32,
}

/// The same bits in all models that do not ask the host.
const fn both(bits: u32) -> Wanted {
    Wanted {
        skylake: bits,
        portable: bits,
    }
}

struct Builder<'a, F> {
    config: &'a Config,
    supported: &'a F,
}

impl<F: Fn(u32, u32) -> Regs> Builder<'_, F> {
    fn has(&self, facility: Facilities) -> bool {
        self.config.facilities.contains(facility)
    }

    /// Whether the model says itself who it is.
    fn is_frozen(&self) -> bool {
        self.config.model != CpuModel::Host
    }

    /// `wanted` of the model, or all that the host offers, less what the host lacks.
    fn offered(&self, supported: u32, wanted: Wanted, never: u32) -> u32 {
        match self.config.model {
            CpuModel::SkylakeServer => supported & wanted.skylake,
            CpuModel::PortableV1 => supported & wanted.portable,
            CpuModel::Host => supported & !never,
        }
    }

    fn basic(&self, out: &mut Vec<Leaf>) {
        let host = |leaf| (self.supported)(leaf, 0);
        let vendor = if self.is_frozen() {
            [text(b"Genu"), text(b"ntel"), text(b"ineI")]
        } else {
            let h = host(0);
            [h[1], h[2], h[3]]
        };
        push(out, 0, [MAX_BASIC, vendor[0], vendor[1], vendor[2]]);
        push(out, 1, self.leaf_1());
        push(out, 2, [0x7603_6301, 0x00f0_b5ff, 0, 0x00c3_0000]);
        self.caches(out);
        push(out, 5, [0; 4]);
        push(out, 6, [1 << 2, 0, 0, 0]);
        push_sub(out, 7, 0, self.leaf_7());
        if self.has(Facilities::PMU) {
            let [eax, ebx, ecx, edx] = LEAF_0A;
            let counters = self.config.facilities.gp_counters();
            push(out, 0xa, [eax | counters << 8, ebx, ecx, edx]);
        }
        self.topology(out);
        self.xsave(out);
        self.resources(out);
        push(out, 0x15, self.leaf_15());
        let mhz = u32::try_from((self.config.tsc_hz + 500_000) / 1_000_000).unwrap_or(u32::MAX);
        push(out, 0x16, [mhz, mhz, 100, 0]);
    }

    fn leaf_1(&self) -> Regs {
        let host = (self.supported)(1, 0);
        let ours = ECX1_X2APIC | ECX1_TSC_DEADLINE | ECX1_PDCM | ECX1_DS | ECX1_OSXSAVE;
        let wanted = Wanted {
            skylake: ECX1_SKYLAKE,
            portable: ECX1_PORTABLE,
        };
        let mut ecx = self.offered(host[2], wanted, ECX1_NEVER | ours) | ECX1_HYPERVISOR;
        let mut edx = self.offered(host[3], both(EDX1_SKYLAKE), EDX1_NEVER | EDX1_DS);
        for (facility, bit) in [
            (Facilities::X2APIC, ECX1_X2APIC),
            (Facilities::TSC_DEADLINE, ECX1_TSC_DEADLINE),
        ] {
            if self.has(facility) {
                ecx |= bit;
            }
        }
        if self.config.facilities.perf_capabilities().is_some() {
            ecx |= ECX1_PDCM;
        }
        // The area that BTS and PEBS share.
        let users = Facilities::BTS.union(Facilities::PEBS);
        if self.config.facilities.intersects(users) {
            ecx |= ECX1_DS;
            edx |= EDX1_DS;
        }
        // APIC: always there, in user space. HTT: more than one logical processor in the package.
        edx |= 1 << 9;
        if self.config.cpus > 1 {
            edx |= 1 << 28;
        }
        let signature = if self.is_frozen() {
            SIGNATURE_SKYLAKE
        } else {
            host[0]
        };
        let ids = self.config.cpus.next_power_of_two().min(0xff);
        // CLFLUSH line of 8 quadwords; the APIC id is filled in for each processor.
        [signature, ids << 16 | 8 << 8, ecx, edx]
    }

    fn leaf_7(&self) -> Regs {
        let host = (self.supported)(7, 0);
        let ours = EBX7_TSC_ADJUST | EBX7_RDT_M | EBX7_RDT_A | EBX7_RTM;
        let wanted = Wanted {
            skylake: EBX7_SKYLAKE,
            portable: EBX7_PORTABLE,
        };
        let mut ebx = self.offered(host[1], wanted, EBX7_NEVER | ours);
        for (facility, bits) in [
            (Facilities::TSC_ADJUST, EBX7_TSC_ADJUST),
            (Facilities::RDT_MONITORING, EBX7_RDT_M),
            (Facilities::RDT_ALLOCATION, EBX7_RDT_A),
            (Facilities::RTM, EBX7_RTM),
        ] {
            if self.config.facilities.intersects(facility) {
                ebx |= bits;
            }
        }
        let wanted = Wanted {
            skylake: ECX7_SKYLAKE,
            portable: ECX7_PORTABLE,
        };
        let ecx = self.offered(host[2], wanted, ECX7_NEVER | ECX7_OSPKE);
        [0, ebx, ecx, EDX7_ARCH_CAPABILITIES]
    }

    /// Leaf 4: the caches that are modelled, the third level shared (rule CPU-24).
    fn caches(&self, out: &mut Vec<Leaf>) {
        let cores = (self.config.cpus.next_power_of_two().min(64) - 1) << 26;
        let cache = |kind: u32, level: u32, shared: u32, geometry: Geometry, edx: u32| {
            [
                kind | level << 5 | 1 << 8 | shared << 14 | cores,
                (geometry.ways - 1) << 22 | (LINE - 1),
                geometry.sets - 1,
                edx,
            ]
        };
        let all = self.config.cpus.next_power_of_two() - 1;
        push_sub(out, 4, 0, cache(1, 1, 0, Geometry::L1, 0));
        push_sub(out, 4, 1, cache(2, 1, 0, Geometry::L1, 0));
        push_sub(out, 4, 2, cache(3, 2, 0, Geometry::L2, 0));
        push_sub(out, 4, 3, cache(3, 3, all, Geometry::L3, 0b100));
        push_sub(out, 4, 4, [0; 4]);
    }

    /// Leaf 0BH: one thread per core, all cores in one package.
    fn topology(&self, out: &mut Vec<Leaf>) {
        let bits = self.config.cpus.next_power_of_two().trailing_zeros();
        push_sub(out, 0xb, 0, [0, 1, 1 << 8, 0]);
        push_sub(out, 0xb, 1, [bits, self.config.cpus, 2 << 8 | 1, 0]);
        push_sub(out, 0xb, 2, [0, 0, 2, 0]);
    }

    /// Leaf 0DH: sizes and offsets are the host's own, because XSAVE runs natively.
    fn xsave(&self, out: &mut Vec<Leaf>) {
        let host = (self.supported)(0xd, 0);
        let portable = self.config.model == CpuModel::PortableV1;
        if portable || (self.supported)(1, 0)[2] & ECX1_XSAVE == 0 || host[0] & 0b11 != 0b11 {
            push_sub(out, 0xd, 0, [0; 4]);
            return;
        }
        let mut mask = host[0] & XCR0_SKYLAKE;
        if mask & 0b100 == 0 || mask & 0b111 << 5 != 0b111 << 5 {
            mask &= !(0b111 << 5);
        }
        let mut size = 576;
        for component in (2..32).filter(|i| mask & 1 << i != 0) {
            let [len, offset, ..] = (self.supported)(0xd, component);
            size = size.max(len.saturating_add(offset));
            push_sub(out, 0xd, component, [len, offset, 0, 0]);
        }
        push_sub(out, 0xd, 0, [mask, 576, size, 0]);
        // XSAVEOPT and XGETBV with ECX = 1; no compacted format.
        push_sub(out, 0xd, 1, [(self.supported)(0xd, 1)[0] & 0b101, 0, 0, 0]);
    }

    /// Leaves 0FH and 10H: monitoring and allocation of the L3, the L2 and bandwidth (rules CPU-11 to
    /// CPU-16).
    fn resources(&self, out: &mut Vec<Leaf>) {
        const CDP: u32 = 1 << 2;
        const LINEAR: u32 = 1 << 2;
        let bit = |facility, bit: u32| if self.has(facility) { bit } else { 0 };
        if self
            .config
            .facilities
            .intersects(Facilities::RDT_MONITORING)
        {
            let events = bit(Facilities::CMT, 1) | bit(Facilities::MBM, 0b110);
            push_sub(out, 0xf, 0, [0, rdt::MAX_RMID, 0, 1 << 1]);
            push_sub(out, 0xf, 1, [0, rdt::UPSCALE, rdt::MAX_RMID, events]);
        }
        if !self
            .config
            .facilities
            .intersects(Facilities::RDT_ALLOCATION)
        {
            return;
        }
        let kinds = bit(Facilities::L3CAT, 1 << 1)
            | bit(Facilities::L2CAT, 1 << 2)
            | bit(Facilities::MBA, 1 << 3);
        push_sub(out, 0x10, 0, [0, kinds, 0, 0]);
        if self.has(Facilities::L3CAT) {
            let cdp = bit(Facilities::CDP, CDP);
            let length = rdt::L3_MASK_BITS - 1;
            push_sub(
                out,
                0x10,
                1,
                [length, rdt::L3_SHARED_WAYS, cdp, rdt::L3_COS - 1],
            );
        }
        if self.has(Facilities::L2CAT) {
            push_sub(
                out,
                0x10,
                2,
                [rdt::L2_MASK_BITS - 1, 0, CDP, rdt::L2_COS - 1],
            );
        }
        if self.has(Facilities::MBA) {
            push_sub(
                out,
                0x10,
                3,
                [rdt::MBA_MAX - 1, 0, LINEAR, rdt::MBA_COS - 1],
            );
        }
    }

    /// Leaf 15H: the TSC as a ratio of the crystal, within 1 ppm (rule ART-03).
    fn leaf_15(&self) -> Regs {
        let (denominator, numerator) = crystal_ratio(self.config.tsc_hz);
        [denominator, numerator, CRYSTAL_HZ, 0]
    }

    fn extended(&self, out: &mut Vec<Leaf>) {
        let host = |leaf| (self.supported)(leaf, 0);
        push(out, 0x8000_0000, [MAX_EXTENDED, 0, 0, 0]);
        let ext = host(0x8000_0001);
        let mut edx = self.offered(ext[3], both(EDX_EXT_SKYLAKE), EDX_EXT_RDTSCP);
        if self.has(Facilities::RDTSCP) {
            edx |= EDX_EXT_RDTSCP;
        }
        // Of the host's own ECX bits, SVM, IBS, performance counters and the like are not ours.
        let ecx = ext[2] & ECX_EXT_SKYLAKE;
        push(out, 0x8000_0001, [0, 0, ecx, edx]);
        let brand = match self.config.model {
            CpuModel::PortableV1 => {
                *b"Hindsight portable-v1 processor\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
            }
            _ => *b"Intel(R) Xeon(R) Gold 6140 CPU (Hindsight)\0\0\0\0\0\0",
        };
        for (i, part) in brand.chunks_exact(16).enumerate() {
            let word =
                |n: usize| u32::from_le_bytes([part[n], part[n + 1], part[n + 2], part[n + 3]]);
            let leaf = 0x8000_0002 + u32::try_from(i).unwrap_or(0);
            let ours = [word(0), word(4), word(8), word(12)];
            push(out, leaf, if self.is_frozen() { ours } else { host(leaf) });
        }
        push(out, 0x8000_0006, [0, 0, 0x0100_6040, 0]);
        push(out, 0x8000_0007, [0, 0, 0, 1 << 8]);
        let physical = host(0x8000_0008)[0] & 0xff;
        push(
            out,
            0x8000_0008,
            [48 << 8 | physical.clamp(36, 52), 0, 0, 0],
        );
    }
}

fn push(out: &mut Vec<Leaf>, leaf: u32, regs: Regs) {
    out.push(Leaf {
        leaf,
        subleaf: None,
        regs,
    });
}

fn push_sub(out: &mut Vec<Leaf>, leaf: u32, subleaf: u32, regs: Regs) {
    out.push(Leaf {
        leaf,
        subleaf: Some(subleaf),
        regs,
    });
}

/// The (EAX, EBX) of leaf 15H: the best ratio EBX / EAX of `tsc_hz` to the crystal with
/// EBX at most 171798, which keeps kHz * EBX below 2^32 (rule ART-03).
fn crystal_ratio(tsc_hz: u64) -> (u32, u32) {
    const NUMERATOR_MAX: u64 = 171_798;
    // Convergents of the continued fraction tsc_hz / CRYSTAL_HZ, then the last semiconvergent.
    let (mut a, mut b) = (tsc_hz, u64::from(CRYSTAL_HZ));
    let (mut p0, mut q0, mut p1, mut q1) = (0_u64, 1_u64, 1_u64, 0_u64);
    while b != 0 {
        let digit = a / b;
        let room = (NUMERATOR_MAX - p0) / p1.max(1);
        let used = digit.min(room);
        (p0, q0, p1, q1) = (p1, q1, used * p1 + p0, used * q1 + q0);
        if used < digit {
            let better = |p: u64, q: u64| {
                let exact = u128::from(tsc_hz) * u128::from(q);
                let got = u128::from(CRYSTAL_HZ) * u128::from(p);
                // Error relative to q, compared by cross-multiplication below.
                (exact.abs_diff(got), q)
            };
            let (new, old) = (better(p1, q1), better(p0, q0));
            if q1 == 0 || (q0 != 0 && old.0 * u128::from(new.1) < new.0 * u128::from(old.1)) {
                (p1, q1) = (p0, q0);
            }
            break;
        }
        (a, b) = (b, a % b);
    }
    let narrow = |v: u64| u32::try_from(v.max(1)).unwrap_or(u32::MAX);
    (narrow(q1), narrow(p1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(facilities: Facilities) -> Config {
        Config {
            model: CpuModel::SkylakeServer,
            facilities,
            cpus: 2,
            tsc_hz: 2_599_998_123,
        }
    }

    fn table(facilities: Facilities) -> CpuidTable {
        CpuidTable::new(&config(facilities), |leaf, subleaf| match (leaf, subleaf) {
            (0xd, 0) => [0x2e7, 0, 0, 0],
            (0xd, 2) => [256, 576, 0, 0],
            (0xd, 9) => [8, 2688, 0, 0],
            _ => [u32::MAX; 4],
        })
    }

    #[test]
    fn model_is_skylake_server_with_all_features_of_the_host() {
        let t = table(Facilities::NATIVE);
        let [eax, ebx, ecx, edx] = t.query(1, 0, 1, 0, 0);
        assert_eq!(eax, 0x0005_0654);
        assert_eq!(ebx >> 24, 1, "the APIC id");
        assert_eq!(
            ecx & (1 << 21 | 1 << 24 | 1 << 31),
            1 << 21 | 1 << 24 | 1 << 31
        );
        assert_eq!(
            ecx & (1 << 2 | 1 << 3 | 1 << 4 | 1 << 11 | 1 << 15),
            0,
            "hidden"
        );
        assert_eq!(
            edx & (1 << 2 | 1 << 4 | 1 << 5 | 1 << 9),
            1 << 2 | 1 << 4 | 1 << 5 | 1 << 9
        );
        assert_eq!(edx & 1 << 21, 0, "no DS");
    }

    #[test]
    fn ds_is_there_for_bts_and_for_pebs() {
        let pmu = Facilities::PMU;
        for (facilities, there) in [
            (pmu, false),
            (Facilities::BTS, true),
            (pmu | Facilities::PEBS, true),
            (pmu | Facilities::PEBS | Facilities::BTS, true),
        ] {
            let [_, _, ecx, edx] = table(facilities).query(1, 0, 0, 0, 0);
            assert_eq!(edx & EDX1_DS != 0, there, "{facilities:?}");
            assert_eq!(ecx & ECX1_DS == ECX1_DS, there, "{facilities:?}");
        }
    }

    #[test]
    fn portable_profile_is_the_same_on_a_host_with_everything_and_one_with_only_its_features() {
        let config = Config {
            model: CpuModel::PortableV1,
            ..config(Facilities::NATIVE)
        };
        let rich = CpuidTable::new(&config, |leaf, _| match leaf {
            0x8000_0008 => [48 << 8 | 46, 0, 0, 0],
            _ => [u32::MAX; 4],
        });
        let poor = CpuidTable::new(&config, |leaf, subleaf| match (leaf, subleaf) {
            (1, _) => [0, 0, ECX1_PORTABLE, EDX1_SKYLAKE],
            (7, 0) => [0, EBX7_PORTABLE, ECX7_PORTABLE, 0],
            (0x8000_0001, _) => [0, 0, ECX_EXT_SKYLAKE, EDX_EXT_SKYLAKE],
            (0x8000_0008, _) => [48 << 8 | 46, 0, 0, 0],
            _ => [0; 4],
        });
        assert_eq!(rich, poor);
        let [.., ecx, edx] = rich.query(1, 0, 0, 0, 0);
        assert_eq!(ecx & (1 << 26 | 1 << 28 | 1), 0, "no XSAVE, AVX, SSE3");
        assert_eq!(edx & 1 << 26, 1 << 26, "SSE2");
        assert_eq!(rich.query(0xd, 0, 0, 0, 0)[0], 0, "no XCR0");
    }

    #[test]
    fn pmu_and_rdt_leaves_are_empty_without_the_facility() {
        let t = table(Facilities::NATIVE);
        for leaf in [0xa, 0xf, 0x10, 0x14] {
            assert_eq!(t.query(leaf, 0, 0, 0, 0), [0; 4], "{leaf:#x}");
        }
        assert_eq!(
            t.query(7, 0, 0, 0, 0)[1] & (1 << 12 | 1 << 15 | 1 << 25 | 1 << 11),
            0
        );
    }

    /// Rules CPU-05, CPU-11 to CPU-16, CPU-22 and L2C-01.
    #[test]
    fn resource_leaves_are_those_of_the_processor() {
        let t = table(Facilities::OBSERVED);
        assert_eq!(
            t.query(7, 0, 0, 0, 0)[1] & (1 << 12 | 1 << 15),
            1 << 12 | 1 << 15
        );
        assert_eq!(t.query(0xf, 0, 0, 0, 0), [0, 143, 0, 2]);
        assert_eq!(t.query(0xf, 1, 0, 0, 0), [0, 73_728, 143, 7]);
        assert_eq!(t.query(0x10, 0, 0, 0, 0), [0, 0xa, 0, 0]);
        assert_eq!(t.query(0x10, 1, 0, 0, 0), [0xa, 0x600, 4, 0xf]);
        assert_eq!(t.query(0x10, 2, 0, 0, 0), [0; 4]);
        assert_eq!(t.query(0x10, 3, 0, 0, 0), [0x59, 0, 4, 7]);
        assert_eq!(t.query(0x10, 4, 0, 0, 0), [0; 4]);
        let t = table(Facilities::OBSERVED | Facilities::L2CAT);
        assert_eq!(t.query(0x10, 0, 0, 0, 0), [0, 0xe, 0, 0]);
        assert_eq!(t.query(0x10, 2, 0, 0, 0), [7, 0, 4, 7]);
    }

    #[test]
    fn resource_leaves_follow_single_facilities() {
        let t = table(Facilities::MBM | Facilities::L3CAT);
        assert_eq!(t.query(0xf, 1, 0, 0, 0)[3], 0b110);
        assert_eq!(t.query(0x10, 0, 0, 0, 0)[1], 1 << 1);
        assert_eq!(t.query(0x10, 1, 0, 0, 0)[2], 0, "no CDP");
        let t = table(Facilities::CMT);
        assert_eq!(t.query(7, 0, 0, 0, 0)[1] & (1 << 12 | 1 << 15), 1 << 12);
        assert_eq!(t.query(0x10, 0, 0, 0, 0), [0; 4]);
    }

    /// Rules CPU-08 to CPU-10.
    #[test]
    fn pmu_leaf_is_that_of_the_processor() {
        let t = table(Facilities::NATIVE | Facilities::PMU);
        assert_eq!(t.query(0xa, 0, 0, 0, 0), [0x0730_0404, 0, 0, 0x603]);
        assert_ne!(
            t.query(1, 0, 0, 0, 0)[2] & ECX1_PDCM,
            0,
            "full-width writes"
        );
        let t = table(Facilities::PMU | Facilities::PMU8);
        assert_eq!(t.query(0xa, 0, 0, 0, 0)[0], 0x0730_0804);
    }

    #[test]
    fn osxsave_follows_cr4() {
        let t = table(Facilities::NATIVE);
        assert_eq!(t.query(1, 0, 0, 0, 0)[2] & 1 << 27, 0);
        assert_ne!(t.query(1, 0, 0, 1 << 18, 0)[2] & 1 << 27, 0);
    }

    #[test]
    fn leaf_beyond_the_highest_answers_as_the_highest_basic_leaf() {
        let t = table(Facilities::NATIVE);
        assert_eq!(t.query(0x17, 0, 0, 0, 0), t.query(0x16, 0, 0, 0, 0));
        assert_eq!(t.query(0x8000_0009, 0, 0, 0, 0), t.query(0x16, 0, 0, 0, 0));
        assert_eq!(
            t.query(3, 0, 0, 0, 0),
            [0; 4],
            "inside the range but undefined"
        );
    }

    #[test]
    fn host_without_a_feature_hides_it() {
        let t = CpuidTable::new(&config(Facilities::NATIVE), |_, _| [0; 4]);
        assert_eq!(t.query(1, 0, 0, 0, 0)[2] & ECX1_XSAVE, 0);
        assert_eq!(t.query(0xd, 0, 0, 0, 7), [0, 576, 0, 0]);
    }

    #[test]
    fn xsave_size_follows_xcr0() {
        let t = table(Facilities::NATIVE);
        assert_eq!(t.query(0xd, 0, 0, 0, 3)[1], 576);
        assert_eq!(t.query(0xd, 0, 0, 0, 7)[1], 832);
        assert_eq!(t.query(0xd, 0, 0, 0, 0x207)[1], 2696);
    }

    #[test]
    fn crystal_ratio_is_within_one_ppm_and_fits_linux() {
        let odd = [
            1_000_000_000,
            2_000_000_000,
            2_599_998_123,
            2_445_406_001,
            3_700_000_019,
            50_000_001,
        ];
        for hz in odd {
            let (eax, ebx) = crystal_ratio(hz);
            assert!(ebx <= 171_798, "{hz}");
            let got = u128::from(CRYSTAL_HZ) * u128::from(ebx) / u128::from(eax);
            assert!(
                got.abs_diff(u128::from(hz)) * 1_000_000 <= u128::from(hz),
                "{hz}: {eax} {ebx}"
            );
        }
    }

    #[test]
    fn l3_is_sized_as_the_monitoring_leaf_implies() {
        let [_, ebx, ecx, _] = table(Facilities::NATIVE).query(4, 3, 0, 0, 0);
        let bytes = ((ebx >> 22) + 1) * ((ebx & 0xfff) + 1) * (ecx + 1);
        assert_eq!(bytes, 73_728 * 352);
        assert_eq!((ebx >> 22) + 1, 11);
    }
}
