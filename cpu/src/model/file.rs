//! The TOML form of a model, and its checks.

use hindsight_regs::branch::{LBR_DEPTH, LbrSelect};
use hindsight_regs::msr as regs;
use hindsight_regs::pmu::{FIXED_COUNTERS_MAX, GP_COUNTERS, GP_COUNTERS_MAX, global};
use serde::Deserialize;
use thiserror::Error;

use super::definition::{LbrModel, ModelDefinition, OffcoreModel, PebsModel, PerfmonModel};
use super::features::FeatureSet;
use crate::facility::{Facilities, parse_facility};
use crate::msr::table::TABLE;
use crate::pmu::access::{IN_TRANSACTIONS, OFFCORE};
use crate::pmu::events::{EventKind, EventKinds};
use crate::pmu::selection::{EventRow, PmuEvent, SampledAccess};

/// A model file that cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModelError {
    /// The file is not TOML, or has other keys.
    #[error("{0}")]
    Syntax(String),
    /// A feature, facility or MSR does not exist.
    #[error("no {kind} `{name}`")]
    Unknown {
        /// What is named.
        kind: &'static str,
        /// The name.
        name: String,
    },
    /// Something is named twice.
    #[error("{kind} `{name}` is named twice")]
    Twice {
        /// What is named.
        kind: &'static str,
        /// The name.
        name: String,
    },
    /// A value is outside of what a processor of this kind can have.
    #[error("{key} = {value} is not {expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// Its value.
        value: u64,
        /// The values that are possible.
        expected: &'static str,
    },
    /// Two keys contradict each other.
    #[error("{0}")]
    Contradiction(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ModelFile {
    summary: String,
    family: u32,
    model: u32,
    stepping: u32,
    brand: String,
    microcode: u32,
    max_leaf: u32,
    bus_hz: u32,
    reference_hz: u32,
    features: Vec<String>,
    facilities: Vec<String>,
    options: Vec<String>,
    lbr: LbrFile,
    pebs: PebsFile,
    perfmon: PerfmonFile,
    offcore: OffcoreFile,
    #[serde(default)]
    event: Vec<EventFile>,
    #[serde(default)]
    msr: Vec<MsrFile>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct LbrFile {
    format: u8,
    depth: usize,
    #[serde(default = "yes")]
    select: bool,
    call_stack: bool,
    tsx_flags: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct PebsFile {
    format: u8,
    #[serde(default = "four_counters")]
    counters: u32,
    #[serde(default)]
    precise_store: bool,
    #[serde(default)]
    cache_latency: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct PerfmonFile {
    version: u32,
    #[serde(default = "four_counters")]
    counters: u32,
    counter_bits: u32,
    fixed_counters: u32,
    full_width_writes: bool,
    cycle_event: Option<(u8, u8)>,
    #[serde(default)]
    missing_events: u32,
    #[serde(default = "five_slots")]
    slots: u32,
    #[serde(default)]
    second_level_metrics: bool,
}

const fn yes() -> bool {
    true
}

const fn four_counters() -> u32 {
    GP_COUNTERS
}

const fn five_slots() -> u32 {
    5
}

const fn offcore_events() -> [(u8, u8); 2] {
    [(0xb7, 0x01), (0xbb, 0x01)]
}

/// Bit numbers of MSR_OFFCORE_RSP_x.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct OffcoreFile {
    any: Vec<u8>,
    hit: Vec<u8>,
    memory: Vec<u8>,
    no_snoop: Vec<u8>,
    #[serde(default = "offcore_events")]
    events: [(u8, u8); 2],
}

/// An event: what perf calls it, its selection, and what it counts.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct EventFile {
    name: String,
    /// Event select and unit mask.
    select: (u8, u8),
    counts: Vec<EventKind>,
    #[serde(default)]
    precise: bool,
    data: Option<SampledAccess>,
    #[serde(default)]
    reference_clock: bool,
    #[serde(default)]
    slots: bool,
}

/// How an MSR differs from the default model's.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MsrFile {
    name: String,
    /// The first of several MSRs of the name that the model lacks; without `writable`.
    from: Option<u32>,
    /// The bits that can be written, of an MSR that the model has.
    writable: Option<u64>,
}

impl ModelDefinition {
    /// Parses the text of a model file.
    ///
    /// # Errors
    ///
    /// The text is not a model, or contradicts itself; the message has one line.
    pub fn from_toml(text: &str) -> Result<Self, ModelError> {
        let file: ModelFile = toml::from_str(text).map_err(|error| {
            let line = error.span().map(|span| {
                let before = text.get(..span.start).unwrap_or(text);
                before.matches('\n').count() + 1
            });
            let line = line.map_or_else(String::new, |line| format!("line {line}: "));
            let message = error.message().lines().next().unwrap_or_default();
            ModelError::Syntax(format!("{line}{message}"))
        })?;
        let mut definition = Self {
            signature: signature(&file)?,
            features: features(&file.features)?,
            facilities: facilities(&file.facilities)?,
            options: facilities(&file.options)?,
            lbr: lbr(&file.lbr)?,
            pebs: pebs(&file.pebs)?,
            perfmon: perfmon(&file.perfmon)?,
            offcore: offcore(&file.offcore)?,
            events: events(&file.event, file.perfmon.slots)?,
            absent_msrs: Vec::new(),
            writable: Vec::new(),
            max_leaf: limited("max-leaf", file.max_leaf, 0xa..=0x1c, "0xa to 0x1c")?,
            bus_hz: limited(
                "bus-hz",
                file.bus_hz,
                100_000_000..=400_000_000,
                "between 100 and 400 MHz",
            )?,
            reference_hz: limited(
                "reference-hz",
                file.reference_hz,
                1_000_000..=1_000_000_000,
                "between 1 MHz and 1 GHz",
            )?,
            microcode: file.microcode,
            summary: file.summary,
            brand: file.brand,
        };
        definition.add_msrs(&file.msr)?;
        definition.check()?;
        Ok(definition)
    }

    fn add_msrs(&mut self, rows: &[MsrFile]) -> Result<(), ModelError> {
        for row in rows {
            let found = TABLE.iter().find(|spec| spec.name == row.name);
            let spec = found.ok_or_else(|| unknown("MSR", &row.name))?;
            let from = row.from.unwrap_or(0);
            if from >= spec.count {
                return Err(ModelError::Value {
                    key: "msr.from",
                    value: from.into(),
                    expected: "below the number of MSRs of the name",
                });
            }
            let indices = spec.indices().skip(from as usize);
            match row.writable {
                None => self.absent_msrs.extend(indices),
                Some(bits) => self.writable.extend(indices.map(|index| (index, bits))),
            }
        }
        self.add_derived();
        self.absent_msrs.sort_unstable();
        self.writable.sort_unstable();
        let absent = self.absent_msrs.windows(2).any(|w| w[0] == w[1]);
        let writable = self.writable.windows(2).any(|w| w[0].0 == w[1].0);
        if absent || writable {
            return Err(contradiction("an MSR has two rows"));
        }
        let absent = std::mem::take(&mut self.absent_msrs);
        self.writable
            .retain(|row| absent.binary_search(&row.0).is_err());
        self.absent_msrs = absent;
        Ok(())
    }

    /// Adds the MSRs that follow from the other keys.
    fn add_derived(&mut self) {
        self.add_lbr_msrs();
        self.add_perfmon_msrs();
        self.add_pebs_msrs();
        if !self.features.has("arch-capabilities") {
            self.add_absent(regs::IA32_ARCH_CAPABILITIES, 0..1);
        }
        for index in regs::MSR_OFFCORE_RSP_0..=regs::MSR_OFFCORE_RSP_1 {
            if !self.writable.iter().any(|row| row.0 == index) {
                self.writable.push((index, OFFCORE));
            }
        }
    }

    /// Adds some of the MSRs that follow `first` to those that the model lacks.
    fn add_absent(&mut self, first: u32, entries: std::ops::Range<u32>) {
        self.absent_msrs.extend(entries.map(|entry| first + entry));
    }

    fn add_lbr_msrs(&mut self) {
        let lbr = self.lbr;
        for &(last, from, to) in LBR_STACKS {
            let depth = u32::try_from(lbr.depth).unwrap_or(last).min(last);
            let present = if from == lbr.from { depth } else { 0 };
            self.add_absent(from, present..last);
            self.add_absent(to, present..last);
        }
        let entries = u32::try_from(LBR_DEPTH).unwrap_or(0);
        if lbr.format != 5 {
            self.add_absent(regs::MSR_LBR_INFO_0, 0..entries);
        }
        if lbr.is_architectural() {
            self.add_absent(regs::MSR_LASTBRANCH_TOS, 0..1);
        } else {
            self.add_absent(regs::IA32_LBR_0_INFO, 0..entries);
            self.add_absent(regs::IA32_LER_INFO, 0..1);
            self.add_absent(regs::IA32_LBR_CTL, 0..1);
            self.add_absent(regs::IA32_LBR_DEPTH, 0..1);
            self.add_absent(regs::IA32_XSS, 0..1);
        }
        if lbr.depth != LBR_DEPTH {
            let mask = lbr.depth as u64 - 1;
            self.writable.push((regs::MSR_LASTBRANCH_TOS, mask));
        }
        if !lbr.select {
            self.add_absent(regs::MSR_LBR_SELECT, 0..1);
        } else if !lbr.call_stack {
            let bits = LbrSelect::all().difference(LbrSelect::EN_CALLSTACK);
            self.writable.push((regs::MSR_LBR_SELECT, bits.bits()));
        }
    }

    fn add_perfmon_msrs(&mut self) {
        let perfmon = self.perfmon;
        if !perfmon.full_width_writes {
            self.add_absent(regs::IA32_A_PMC0, 0..GP_COUNTERS_MAX);
        }
        for first in [regs::IA32_PMC0, regs::IA32_PERFEVTSEL0] {
            self.add_absent(first, perfmon.counters..GP_COUNTERS);
        }
        self.add_absent(
            regs::IA32_FIXED_CTR0,
            perfmon.fixed_counters..FIXED_COUNTERS_MAX,
        );
        if !perfmon.has_metrics() {
            self.add_absent(regs::MSR_PERF_METRICS, 0..1);
        }
        self.writable
            .push((regs::MSR_PERF_METRICS, perfmon.metrics_bits()));
        let counters = perfmon.most_counters_in_global() | perfmon.metrics_in_global();
        self.writable.push((regs::IA32_PERF_GLOBAL_CTRL, counters));
        if perfmon.version < 4 {
            self.add_absent(regs::IA32_PERF_GLOBAL_STATUS_SET, 0..1);
            self.add_absent(regs::IA32_PERF_GLOBAL_INUSE, 0..1);
            let uncore = if perfmon.version < 3 {
                0
            } else {
                global::UNCORE
            };
            let reset = counters | uncore | global::DS_BUFFER | global::COND_CHANGED;
            self.writable
                .push((regs::IA32_PERF_GLOBAL_STATUS_RESET, reset));
        } else {
            for (index, bits) in [
                (regs::IA32_PERF_GLOBAL_STATUS_RESET, global::RESETTABLE),
                (regs::IA32_PERF_GLOBAL_STATUS_SET, global::SETTABLE),
            ] {
                self.writable.push((index, bits | counters));
            }
        }
        let fixed = self.fixed_control_bits();
        self.writable.push((regs::IA32_FIXED_CTR_CTRL, fixed));
        let selects = regs::IA32_PERFEVTSEL0..regs::IA32_PERFEVTSEL0 + GP_COUNTERS_MAX;
        let bits = self.select_bits() | IN_TRANSACTIONS;
        self.writable.extend(selects.map(|index| (index, bits)));
        if perfmon.counter_bits < 48 {
            let fixed = regs::IA32_FIXED_CTR0..regs::IA32_FIXED_CTR0 + perfmon.fixed_counters;
            let mask = perfmon.counter_mask();
            self.writable.extend(fixed.map(|index| (index, mask)));
        }
    }

    fn add_pebs_msrs(&mut self) {
        let pebs = self.pebs;
        if !pebs.precise_store {
            self.writable
                .push((regs::IA32_PEBS_ENABLE, pebs.enable_bits()));
        }
        if !pebs.is_extended() {
            self.add_absent(regs::MSR_PEBS_DATA_CFG, 0..1);
        }
        if pebs.format < 1 {
            self.add_absent(regs::MSR_PEBS_LD_LAT_THRESHOLD, 0..1);
        }
        if pebs.format < 3 {
            self.add_absent(regs::MSR_PEBS_FRONTEND, 0..1);
        }
    }

    /// Checks that the parts agree with each other.
    fn check(&self) -> Result<(), ModelError> {
        if let Some((feature, needs)) = self.features.unmet() {
            let line = format!("feature `{feature}` needs `{needs}`");
            return Err(ModelError::Contradiction(line));
        }
        let rules = [
            (self.brand.len() > 47, "the brand has more than 47 bytes"),
            (
                self.facilities.intersects(self.options),
                "a facility is both present and an option",
            ),
            (
                self.features.has("xsave") && self.max_leaf < 0xd,
                "xsave needs leaf 0xd",
            ),
            (
                self.facilities
                    .union(self.options)
                    .intersects(Facilities::RDT.union(Facilities::L2CAT))
                    && self.max_leaf < 0x10,
                "resource control needs leaf 0x10",
            ),
        ];
        let monitoring = self.monitoring_rules();
        match rules.into_iter().chain(monitoring).find(|rule| rule.0) {
            Some((_, message)) => Err(contradiction(message)),
            None => Ok(()),
        }
    }

    /// What is wrong with branch records and the performance monitor, and whether it is.
    fn monitoring_rules(&self) -> Vec<(bool, &'static str)> {
        vec![
            (
                self.lbr.tsx_flags != (self.lbr.format >= 4),
                "tsx-flags go with LBR formats 4, 5 and 63",
            ),
            (
                (self.lbr.format >= 5) != (self.lbr.depth == 32),
                "LBR formats 5 and 63 and 32 entries go together",
            ),
            (
                self.lbr.is_architectural() && (self.max_leaf < 0x1c || self.lbr.select),
                "LBR format 63 needs leaf 0x1c, and has no MSR_LBR_SELECT",
            ),
            (
                (self.lbr.format == 2) != (self.lbr.depth == 4),
                "LBR format 2 and 4 entries go together",
            ),
            (
                self.lbr.call_stack && !self.lbr.select && !self.lbr.is_architectural(),
                "call-stack mode needs MSR_LBR_SELECT",
            ),
            (
                (self.pebs.format == 0) != (self.pebs.counters == 1),
                "PEBS format 0 and records of one counter go together",
            ),
            (
                self.pebs.is_extended()
                    != (self.pebs.counters == GP_COUNTERS_MAX
                        && self.perfmon.fixed_counters == FIXED_COUNTERS_MAX),
                "PEBS format 4 and records of twelve counters go together",
            ),
            (
                self.perfmon.counters < GP_COUNTERS
                    && (self.pebs.precise_store || self.options.contains(Facilities::PMU8)),
                "precise stores and pmu=8 need four counters",
            ),
            (
                self.perfmon.fixed_counters > 3 && self.perfmon.version < 5,
                "four fixed counters need perfmon version 5",
            ),
            (
                self.facilities.contains(Facilities::PMU8) && self.perfmon.counters != GP_COUNTERS,
                "pmu=8 stands for the number of counters",
            ),
            (
                !self.lbr.tsx_flags && self.options.contains(Facilities::RTM),
                "rtm needs an LBR format with TSX flags",
            ),
            (
                self.pebs.format < 2 && self.options.contains(Facilities::RTM),
                "rtm needs PEBS records of format 2 to 4",
            ),
        ]
    }
}

fn contradiction(message: &str) -> ModelError {
    ModelError::Contradiction(message.to_owned())
}

fn unknown(kind: &'static str, name: &str) -> ModelError {
    let name = name.chars().take(40).flat_map(char::escape_debug).collect();
    ModelError::Unknown { kind, name }
}

fn limited<T: Copy + PartialOrd + Into<u64>>(
    key: &'static str,
    value: T,
    range: std::ops::RangeInclusive<T>,
    expected: &'static str,
) -> Result<T, ModelError> {
    if range.contains(&value) {
        Ok(value)
    } else {
        Err(ModelError::Value {
            key,
            value: value.into(),
            expected,
        })
    }
}

/// The value if it is one of two.
fn one_of(
    key: &'static str,
    value: u32,
    values: [u32; 2],
    expected: &'static str,
) -> Result<u32, ModelError> {
    if values.contains(&value) {
        return Ok(value);
    }
    let value = value.into();
    Err(ModelError::Value {
        key,
        value,
        expected,
    })
}

/// CPUID.1:EAX. SDM Vol. 2A, "CPUID - CPU Identification".
fn signature(file: &ModelFile) -> Result<u32, ModelError> {
    limited("family", file.family, 6..=6, "6")?;
    limited("model", file.model, 0..=0xff, "a byte")?;
    limited("stepping", file.stepping, 0..=0xf, "0 to 15")?;
    let (low, high) = (file.model & 0xf, file.model >> 4);
    Ok(high << 16 | file.family << 8 | low << 4 | file.stepping)
}

fn features(names: &[String]) -> Result<FeatureSet, ModelError> {
    let mut set = FeatureSet::default();
    for name in names {
        let before = set;
        if !set.add(name) {
            return Err(unknown("feature", name));
        }
        if set == before {
            return Err(ModelError::Twice {
                kind: "feature",
                name: name.clone(),
            });
        }
    }
    Ok(set)
}

fn facilities(names: &[String]) -> Result<Facilities, ModelError> {
    let mut set = Facilities::empty();
    for name in names {
        let facility = match name.as_str() {
            "pmu=8" => Some(Facilities::PMU8),
            name => parse_facility(name),
        };
        let facility = facility.ok_or_else(|| unknown("facility", name))?;
        if set.intersects(facility) {
            return Err(ModelError::Twice {
                kind: "facility",
                name: name.clone(),
            });
        }
        set |= facility;
    }
    Ok(set)
}

/// Entries of the LBR stacks that exist, and the MSRs of entry 0.
const LBR_STACKS: &[(u32, u32, u32)] = &[
    (
        4,
        regs::CORE_LASTBRANCH_0_FROM_IP,
        regs::CORE_LASTBRANCH_0_TO_IP,
    ),
    (
        32,
        regs::MSR_LASTBRANCH_0_FROM_IP,
        regs::MSR_LASTBRANCH_0_TO_IP,
    ),
    (32, regs::IA32_LBR_0_FROM_IP, regs::IA32_LBR_0_TO_IP),
];

fn lbr(file: &LbrFile) -> Result<LbrModel, ModelError> {
    let format = match file.format {
        LbrModel::ARCHITECTURAL => file.format,
        format => limited("lbr.format", format, 2..=5, "2 to 5 or 63")?,
    };
    if !matches!(file.depth, 4 | 16 | 32) {
        return Err(ModelError::Value {
            key: "lbr.depth",
            value: file.depth as u64,
            expected: "4, 16 or 32",
        });
    }
    let stack = match (format, file.depth) {
        (LbrModel::ARCHITECTURAL, _) => 2,
        (_, 4) => 0,
        _ => 1,
    };
    let (_, from, to) = LBR_STACKS[stack];
    Ok(LbrModel {
        format,
        depth: file.depth,
        from,
        to,
        select: file.select,
        call_stack: file.call_stack,
        tsx_flags: file.tsx_flags,
    })
}

fn pebs(file: &PebsFile) -> Result<PebsModel, ModelError> {
    Ok(PebsModel {
        format: limited("pebs.format", file.format, 0..=4, "0 to 4")?,
        counters: match file.counters {
            1 | GP_COUNTERS | GP_COUNTERS_MAX => file.counters,
            other => {
                return Err(ModelError::Value {
                    key: "pebs.counters",
                    value: other.into(),
                    expected: "1, 4 or 8",
                });
            }
        },
        precise_store: file.precise_store,
        cache_latency: file.cache_latency,
    })
}

fn perfmon(file: &PerfmonFile) -> Result<PerfmonModel, ModelError> {
    Ok(PerfmonModel {
        version: limited("perfmon.version", file.version, 2..=5, "2 to 5")?,
        counters: one_of("perfmon.counters", file.counters, [2, 4], "2 or 4")?,
        counter_bits: one_of(
            "perfmon.counter-bits",
            file.counter_bits,
            [40, 48],
            "40 or 48",
        )?,
        fixed_counters: limited(
            "perfmon.fixed-counters",
            file.fixed_counters,
            3..=FIXED_COUNTERS_MAX,
            "3 or 4",
        )?,
        full_width_writes: file.full_width_writes,
        cycle_event: file.cycle_event,
        missing_events: limited(
            "perfmon.missing-events",
            file.missing_events,
            0..=0x7f,
            "7 bits",
        )?,
        slots: limited("perfmon.slots", file.slots, 1..=8, "1 to 8")?,
        second_level_metrics: file.second_level_metrics,
    })
}

fn offcore(file: &OffcoreFile) -> Result<OffcoreModel, ModelError> {
    let mask = |bits: &[u8]| {
        bits.iter().try_fold(0, |mask, &bit| {
            Ok(mask | 1 << limited("offcore", bit, 8..=37, "a bit from 8 to 37")?)
        })
    };
    Ok(OffcoreModel {
        any: mask(&file.any)?,
        hit: mask(&file.hit)?,
        memory: mask(&file.memory)?,
        no_snoop: mask(&file.no_snoop)?,
        events: file.events,
    })
}

fn events(rows: &[EventFile], slots: u32) -> Result<Vec<EventRow>, ModelError> {
    let mut events = Vec::<EventRow>::new();
    for row in rows {
        let kinds = EventKinds::of(&row.counts);
        let mut event = PmuEvent::new(kinds, row.reference_clock, row.precise, row.data);
        event.slots = if row.slots { slots } else { 0 };
        let added = EventRow {
            name: row.name.clone(),
            select: row.select,
            event,
        };
        if row.data.is_some() && !row.precise {
            return Err(contradiction(&format!(
                "{} has data but is not precise",
                row.name
            )));
        }
        if events.iter().any(|e| e.select == added.select) {
            return Err(ModelError::Twice {
                kind: "event",
                name: row.name.clone(),
            });
        }
        events.push(added);
    }
    Ok(events)
}
