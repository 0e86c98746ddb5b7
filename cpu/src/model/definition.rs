//! What a processor model is.

use hindsight_regs::capabilities::perf;
use hindsight_regs::msr as regs;
use hindsight_regs::pmu::{
    EventSelect, FIXED_COUNTERS_MAX, FixedControl, GP_COUNTERS, GP_COUNTERS_MAX, global,
};

use super::features::FeatureSet;
use crate::facility::Facilities;
use crate::pmu::selection::EventRow;

/// The LBR stack of a model. SDM Vol. 3B, "LBR Stack".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LbrModel {
    /// IA32_PERF_CAPABILITIES bits 5:0.
    pub format: u8,
    /// Number of entries.
    pub depth: usize,
    /// The MSR of the source of entry 0; those of the other entries follow.
    pub from: u32,
    /// The MSR of the target of entry 0.
    pub to: u32,
    /// MSR_LBR_SELECT exists.
    pub select: bool,
    /// MSR_LBR_SELECT.EN_CALLSTACK exists.
    pub call_stack: bool,
    /// Records say whether the branch was in a transaction, or its abort.
    pub tsx_flags: bool,
}

impl LbrModel {
    /// The format of architectural LBR, in which CPUID.1CH says what the stack is.
    pub const ARCHITECTURAL: u8 = 0x3f;

    /// Whether the stack is that of architectural LBR. SDM Vol. 3B, "Last Branch Records".
    pub const fn is_architectural(&self) -> bool {
        self.format == Self::ARCHITECTURAL
    }

    /// The MSR of the flags of entry 0, in the formats that have it.
    pub const fn info(&self) -> u32 {
        if self.is_architectural() {
            regs::IA32_LBR_0_INFO
        } else {
            regs::MSR_LBR_INFO_0
        }
    }

    /// The numbers of entries that the stack can have.
    pub(crate) const fn depths(&self) -> &[usize] {
        if self.is_architectural() {
            &[8, 16, 32]
        } else {
            std::slice::from_ref(&self.depth)
        }
    }

    /// CPUID leaf 1CH.
    pub(crate) fn leaf_1c(&self) -> [u32; 4] {
        /// The stack does not lose its records in C-states: bit 30 is clear.
        const LINEAR_ADDRESSES: u32 = 1 << 31;
        /// Filters of privilege level and of branch type, and call-stack mode.
        const FILTERS: u32 = 0b111;
        /// MISPRED, CYC_CNT and BR_TYPE.
        const INFO: u32 = 0b111;
        if !self.is_architectural() {
            return [0; 4];
        }
        let depths = self.depths().iter();
        let depths = depths.fold(0, |bits, depth| bits | 1 << (depth / 8 - 1));
        [LINEAR_ADDRESSES | depths, FILTERS, INFO, 0]
    }
}

/// PEBS of a model. SDM Vol. 3B, "Processor Event Based Sampling (PEBS)".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PebsModel {
    /// IA32_PERF_CAPABILITIES bits 11:8.
    pub format: u8,
    /// Number of general-purpose counters that can take records: the first ones.
    pub counters: u32,
    /// Counter 3 can sample stores: IA32_PEBS_ENABLE.PS_EN.
    pub precise_store: bool,
    /// The latency of the memory group is two: that of the instruction, and of the cache in bits 47:32.
    pub cache_latency: bool,
}

/// The performance monitor of a model. SDM Vol. 3B, "Architectural Performance Monitoring".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerfmonModel {
    /// CPUID.0AH:EAX\[7:0\].
    pub version: u32,
    /// Number of general-purpose counters without the option `pmu=8`.
    pub counters: u32,
    /// Width of all counters in bits.
    pub counter_bits: u32,
    /// Number of fixed counters.
    pub fixed_counters: u32,
    /// Counters can be written in full width through IA32_A_PMCx.
    pub full_width_writes: bool,
    /// The event that perf inverts to sample cycles, besides INST_RETIRED.
    pub cycle_event: Option<(u8, u8)>,
    /// CPUID.0AH:EBX: architectural events that do not exist.
    pub missing_events: u32,
    /// The slots of a cycle: the uops that the pipeline can issue in it.
    pub slots: u32,
    /// MSR_PERF_METRICS has the second level.
    pub second_level_metrics: bool,
}

impl PerfmonModel {
    /// The bits of a counter's value.
    pub const fn counter_mask(&self) -> u64 {
        (1 << self.counter_bits) - 1
    }

    /// The bits of this number of general-purpose counters and of the fixed ones in global registers.
    pub(crate) const fn counters_in_global(&self, counters: u32) -> u64 {
        ((1 << counters) - 1) | ((1 << self.fixed_counters) - 1) << global::FIXED
    }

    /// The bits of the most counters that a processor of the model can have in global registers.
    pub(crate) const fn most_counters_in_global(&self) -> u64 {
        self.counters_in_global(match self.counters {
            GP_COUNTERS => GP_COUNTERS_MAX,
            counters => counters,
        })
    }

    /// Whether MSR_PERF_METRICS exists: with the fixed counter of slots.
    pub(crate) const fn has_metrics(&self) -> bool {
        self.fixed_counters == FIXED_COUNTERS_MAX
    }

    /// The bits of MSR_PERF_METRICS that exist.
    pub(crate) const fn metrics_bits(&self) -> u64 {
        if self.second_level_metrics {
            u64::MAX
        } else {
            0xffff_ffff
        }
    }

    /// The bit of MSR_PERF_METRICS in global registers, if it exists.
    pub(crate) const fn metrics_in_global(&self) -> u64 {
        if self.has_metrics() {
            global::PERF_METRICS
        } else {
            0
        }
    }

    /// Whether counters can count for all threads of the core: from version 3 to version 4.
    pub(crate) const fn has_any_thread(&self) -> bool {
        matches!(self.version, 3 | 4)
    }

    /// The writable bits of IA32_PERFEVTSELx, besides those of transactions and PEBS.
    const fn select_bits(&self) -> u64 {
        if self.has_any_thread() {
            EventSelect::WRITABLE
        } else {
            EventSelect::WRITABLE & !EventSelect::ANY_THREAD
        }
    }

    /// The writable bits of IA32_FIXED_CTR_CTRL, besides those of PEBS.
    const fn fixed_control_bits(&self) -> u64 {
        let bits = (1 << (4 * self.fixed_counters)) - 1;
        if self.has_any_thread() {
            bits
        } else {
            bits & !FixedControl::ANY_THREAD_OF_ALL
        }
    }
}

impl PebsModel {
    /// Whether records are adaptive, and all events in all counters can take them: from format 4 on.
    pub(crate) const fn is_extended(&self) -> bool {
        self.format >= 4
    }

    /// The bits of IA32_PEBS_ENABLE of the counters that take records, as in the global registers.
    pub(crate) const fn counter_bits(&self) -> u64 {
        let general = (1 << self.counters) - 1;
        if self.is_extended() {
            general | ((1 << FIXED_COUNTERS_MAX) - 1) << global::FIXED
        } else {
            general
        }
    }

    /// The bits of IA32_PEBS_ENABLE: records of each counter, and in formats 1 to 3 of late loads.
    pub(crate) const fn enable_bits(&self) -> u64 {
        let counters = self.counter_bits();
        let late_loads = match self.format {
            1..=3 => counters << 32,
            _ => 0,
        };
        let stores = (self.precise_store as u64) << 63;
        counters | late_loads | stores
    }
}

/// What MSR_OFFCORE_RSP_x selects of the requests to the L3, by masks of the register.
///
/// SDM Vol. 3B, "Off-core Response Performance Monitoring". There are no prefetches and no other
/// sockets, and no request is snooped in another core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffcoreModel {
    /// All responses, whatever the other bits say.
    pub any: u64,
    /// The L3 had the line.
    pub hit: u64,
    /// The memory of this socket had it.
    pub memory: u64,
    /// No snoop was needed: one of these is needed besides `hit` or `memory`, unless the mask is 0.
    pub no_snoop: u64,
    /// The selections of the events of MSR_OFFCORE_RSP_0 and 1.
    pub events: [(u8, u8); 2],
}

/// What a processor model is, as its file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelDefinition {
    /// One line for lists.
    pub summary: String,
    /// CPUID.1:EAX: family, model and stepping.
    pub signature: u32,
    /// The revision that IA32_BIOS_SIGN_ID shows.
    pub microcode: u32,
    /// The brand string: at most 47 bytes.
    pub brand: String,
    /// The highest basic leaf of CPUID.
    pub max_leaf: u32,
    /// Frequency in Hz of the bus clock, of which MSR_PLATFORM_INFO gives the ratio.
    pub bus_hz: u32,
    /// Frequency in Hz of the reference clock that event 3CH/01H counts.
    pub reference_hz: u32,
    /// CPUID features that do not follow facilities.
    pub features: FeatureSet,
    /// The facilities that the model has unless a profile leaves them out.
    pub facilities: Facilities,
    /// The facilities that a profile can add.
    pub options: Facilities,
    /// The LBR stack.
    pub lbr: LbrModel,
    /// Processor event-based sampling.
    pub pebs: PebsModel,
    /// The performance monitor.
    pub perfmon: PerfmonModel,
    /// What MSR_OFFCORE_RSP_x selects.
    pub offcore: OffcoreModel,
    /// The events that count something.
    pub events: Vec<EventRow>,
    /// The MSRs that the model lacks though its facilities would bring them, by index.
    pub(crate) absent_msrs: Vec<u32>,
    /// Writable bits of the MSRs that have fewer of them than in the default model, by index.
    pub(crate) writable: Vec<(u32, u64)>,
}

impl ModelDefinition {
    /// Family, model and stepping, without the split of the signature into extended fields.
    pub const fn identity(&self) -> (u32, u32, u32) {
        let s = self.signature;
        let (family, model) = (s >> 8 & 0xf, s >> 4 & 0xf);
        (family + (s >> 20 & 0xff), model | (s >> 12 & 0xf0), s & 0xf)
    }

    /// Whether the model lacks the MSR though its facilities would bring it.
    pub fn lacks_msr(&self, index: u32) -> bool {
        self.absent_msrs.binary_search(&index).is_ok()
    }

    /// The writable bits of IA32_PERFEVTSELx, besides those of transactions.
    pub(crate) const fn select_bits(&self) -> u64 {
        let bits = self.perfmon.select_bits();
        if self.pebs.is_extended() {
            bits | EventSelect::ADAPTIVE_RECORD
        } else {
            bits
        }
    }

    /// The writable bits of IA32_FIXED_CTR_CTRL.
    pub(crate) fn fixed_control_bits(&self) -> u64 {
        let bits = self.perfmon.fixed_control_bits();
        if !self.pebs.is_extended() {
            return bits;
        }
        let counters = 0..self.perfmon.fixed_counters as usize;
        counters.fold(bits, |bits, n| bits | FixedControl::adaptive_record(n))
    }

    /// Whether the model has INST_RETIRED.PREC_DIST, as all from Sandy Bridge on.
    pub(crate) fn has_prec_dist(&self) -> bool {
        self.pebs.precise_store || self.pebs.format > 1
    }

    /// Number of general-purpose counters of a processor with these facilities.
    pub const fn gp_counters(&self, facilities: Facilities) -> u32 {
        if facilities.contains(Facilities::PMU8) {
            GP_COUNTERS_MAX
        } else {
            self.perfmon.counters
        }
    }

    /// Whether the model's table has an event of this event select and unit mask.
    pub(crate) fn has_event(&self, select: (u8, u8)) -> bool {
        self.events.iter().any(|row| row.select == select)
    }

    /// The writable bits of an MSR that has fewer of them than in the default model.
    pub(crate) fn writable_bits(&self, index: u32) -> Option<u64> {
        let at = self.writable.binary_search_by_key(&index, |row| row.0);
        at.ok().map(|at| self.writable[at].1)
    }

    /// The value of IA32_PERF_CAPABILITIES, or `None` where CPUID.1:ECX.PDCM is clear.
    ///
    /// SDM Vol. 3B, "IA32_PERF_CAPABILITIES MSR Enumeration".
    pub fn perf_capabilities(&self, facilities: Facilities) -> Option<u64> {
        let format = u64::from(self.pebs.format) << perf::PEBS_FORMAT_SHIFT;
        let baseline = match self.pebs.is_extended() {
            true => perf::PEBS_BASELINE,
            false => 0,
        };
        let mut counters = perf::FREEZE_WHILE_SMM;
        if self.perfmon.full_width_writes {
            counters |= perf::FULL_WIDTH_WRITE;
        }
        if self.perfmon.has_metrics() {
            counters |= perf::PERF_METRICS;
        }
        let fields = [
            (Facilities::LBR, u64::from(self.lbr.format)),
            (
                Facilities::PEBS,
                perf::PEBS_TRAP | perf::PEBS_ARCH_REG | format | baseline,
            ),
            (Facilities::PMU, counters),
        ];
        let present = fields.iter().filter(|row| facilities.contains(row.0));
        match present.fold(0, |value, row| value | row.1) {
            0 => None,
            value => Some(value),
        }
    }

    /// The registers of CPUID leaf 0AH with this number of general-purpose counters.
    pub fn leaf_0a(&self, counters: u32) -> [u32; 4] {
        const ANY_THREAD_DEPRECATED: u32 = 1 << 15;
        let p = &self.perfmon;
        let version_5 = p.version >= 5;
        // The architectural events in EBX; the last is that of topdown slots.
        let events = if version_5 { 8 } else { 7 };
        let eax = p.version | counters << 8 | p.counter_bits << 16 | events << 24;
        let mut edx = p.fixed_counters | p.counter_bits << 5;
        let mut fixed = 0;
        if version_5 {
            fixed = (1 << p.fixed_counters) - 1;
            edx |= ANY_THREAD_DEPRECATED;
        }
        [eax, p.missing_events, fixed, edx]
    }
}
