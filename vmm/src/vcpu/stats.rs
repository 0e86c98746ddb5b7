//! Statistics of a run, as `--stats` prints them.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use hindsight_interp::{Stats, UnitExits};

use crate::vcpu::engine::SwitchStats;
use crate::vcpu::recorder::ExitKind;

/// Kinds of exits, in the order they are counted and shown.
const KINDS: [&str; 10] = [
    "port reads",
    "port writes",
    "MMIO reads",
    "MMIO writes",
    "RDMSR",
    "WRMSR",
    "halts",
    "windows",
    "kicks",
    "other",
];

/// Instructions of the mix that are printed one by one; the others are summed.
const MIX_ROWS_MAX: usize = 16;

/// Exits of a vCPU, by kind. The interpreter counts what would be an exit under KVM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExitCounts([u64; KINDS.len()]);

impl ExitCounts {
    /// Counts one exit.
    pub fn count(&mut self, kind: ExitKind) {
        let index = match kind {
            ExitKind::PortRead(_) => 0,
            ExitKind::PortWrite(_) => 1,
            ExitKind::MmioRead(_) => 2,
            ExitKind::MmioWrite(_) => 3,
            ExitKind::Rdmsr(_) => 4,
            ExitKind::Wrmsr(_) => 5,
            ExitKind::Halt => 6,
            ExitKind::Window => 7,
            ExitKind::Kicked => 8,
            ExitKind::Other => 9,
        };
        self.0[index] += 1;
    }

    fn add(&mut self, other: &Self) {
        for (sum, count) in self.0.iter_mut().zip(other.0) {
            *sum += count;
        }
    }
}

impl fmt::Display for ExitCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.iter().sum::<u64>())?;
        let counted = self.0.iter().zip(KINDS).filter(|(count, _)| **count != 0);
        for (index, (count, name)) in counted.enumerate() {
            let before = if index == 0 { ": " } else { ", " };
            write!(f, "{before}{name} {count}")?;
        }
        Ok(())
    }
}

/// Statistics of one vCPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VcpuStats {
    /// The vCPU.
    pub cpu: usize,
    /// The vCPU's exits.
    pub exits: ExitCounts,
    /// The interpreter's statistics. KVM has none: it does not count instructions.
    pub interpreter: Option<Stats>,
    /// How often each instruction retired in the interpreter, by mnemonic.
    pub mix: Vec<(String, u64)>,
}

/// Adds how often translated code was left.
fn add_unit_exits(sum: &mut UnitExits, exits: &UnitExits) {
    sum.instructions += exits.instructions;
    sum.edges += exits.edges;
    sum.jumps += exits.jumps;
    sum.slices += exits.slices;
    sum.branches += exits.branches;
}

/// Prints how often translated code was left.
struct UnitExitsText<'a>(&'a UnitExits);

impl fmt::Display for UnitExitsText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exits = self.0;
        write!(
            f,
            "translated code left: before other instructions {}, at branches to other code {}, \
             at jumps to other pages {}, at the end of slices {}, with recorded branches {}",
            exits.instructions, exits.edges, exits.jumps, exits.slices, exits.branches,
        )
    }
}

/// The statistics of a whole run; `Display` prints several lines.
#[derive(Clone, Debug)]
pub struct RunReport {
    /// The statistics of each processor.
    pub vcpus: Vec<VcpuStats>,
    /// The engine changes of the machine; `None` if it cannot change engines.
    pub changes: Option<SwitchStats>,
    /// The time that the run took on the host.
    pub host_time: Duration,
}

impl fmt::Display for RunReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.host_time.as_secs_f64();
        writeln!(f, "host time {seconds:.3} s")?;
        let mut exits = ExitCounts::default();
        let mut total = Stats::default();
        let mut interpreted = false;
        for vcpu in &self.vcpus {
            exits.add(&vcpu.exits);
            if let Some(stats) = vcpu.interpreter {
                interpreted = true;
                total.retired += stats.retired;
                total.blocks += stats.blocks;
                total.lookups += stats.lookups;
                total.drops += stats.drops;
                total.tlb_fills += stats.tlb_fills;
                total.translated += stats.translated;
                total.units += stats.units;
                total.translated_bytes += stats.translated_bytes;
                total.evictions += stats.evictions;
                add_unit_exits(&mut total.unit_exits, &stats.unit_exits);
                writeln!(f, "cpu {} retired {}", vcpu.cpu, stats.retired)?;
            }
        }
        if interpreted {
            let ratio = |part: u64, whole: f64| precise(part) / whole.max(f64::MIN_POSITIVE);
            let speed = ratio(total.retired, seconds * 1e6);
            writeln!(f, "retired {} instructions, {speed:.1} MIPS", total.retired)?;
            let per_million = |count| ratio(count, precise(total.retired.max(1)) / 1e6);
            writeln!(
                f,
                "block cache: {} decoded, {} looked up ({:.1} in a million instructions), dropped {} times",
                total.blocks,
                total.lookups,
                per_million(total.lookups),
                total.drops,
            )?;
            writeln!(
                f,
                "TLB: {} fills ({:.1} in a million instructions)",
                total.tlb_fills,
                per_million(total.tlb_fills),
            )?;
            writeln!(
                f,
                "translated: {:.1} % of the instructions, {} units, {} bytes, dropped {} times",
                ratio(total.translated * 100, precise(total.retired.max(1))),
                total.units,
                total.translated_bytes,
                total.evictions,
            )?;
            writeln!(f, "{}", UnitExitsText(&total.unit_exits))?;
            self.write_mix(f, total.retired)?;
        } else {
            writeln!(f, "retired: KVM does not count instructions")?;
        }
        if let Some(changes) = &self.changes {
            writeln!(f, "{changes}")?;
        }
        writeln!(f, "exits {exits}")
    }
}

impl RunReport {
    /// The report of a machine that has run for `host_time`. `changes`: its engine changes, if it
    /// can change engines.
    pub fn new(vcpus: Vec<VcpuStats>, changes: Option<SwitchStats>, host_time: Duration) -> Self {
        Self {
            vcpus,
            changes,
            host_time,
        }
    }

    /// Writes the most frequent instructions with their share in percent, and the sum of the
    /// others.
    fn write_mix(&self, f: &mut fmt::Formatter<'_>, retired: u64) -> fmt::Result {
        let mut sums = BTreeMap::<&str, u64>::new();
        for (name, count) in self.vcpus.iter().flat_map(|vcpu| &vcpu.mix) {
            *sums.entry(name).or_default() += count;
        }
        let mut list: Vec<_> = sums.into_iter().collect();
        list.sort_by_key(|(name, count)| (Reverse(*count), *name));
        let rest = list.split_off(list.len().min(MIX_ROWS_MAX));
        let share = |count: u64| 100.0 * precise(count) / precise(retired.max(1));
        write!(f, "instructions:")?;
        for (index, (name, count)) in list.iter().enumerate() {
            let before = if index == 0 { " " } else { ", " };
            write!(f, "{before}{name} {count} ({:.1} %)", share(*count))?;
        }
        if !rest.is_empty() {
            let count = rest.iter().map(|(_, count)| count).sum();
            write!(f, ", {} others {count} ({:.1} %)", rest.len(), share(count))?;
        }
        writeln!(f)
    }
}

/// A count as a float; counts beyond 2^53 lose their last digits.
fn precise(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The statistics of an interpreter that retired `count` instructions.
    fn retired(count: u64) -> Stats {
        let mut stats = Stats::default();
        stats.retired = count;
        stats
    }

    #[test]
    fn report_sums_all_vcpus_and_names_exits_that_occurred() {
        let mut exits = ExitCounts::default();
        exits.count(ExitKind::PortWrite(0xf4));
        let vcpus = [0, 1].map(|cpu| VcpuStats {
            cpu,
            exits,
            interpreter: Some(retired(3_000_000)),
            mix: vec![("mov".to_owned(), 2_000_000), ("add".to_owned(), 1_000_000)],
        });
        let report = RunReport {
            vcpus: vcpus.to_vec(),
            changes: Some(SwitchStats {
                armed: 1,
                cooled_down: 1,
                total: Duration::from_micros(300),
                longest: Duration::from_micros(200),
                ..SwitchStats::default()
            }),
            host_time: Duration::from_secs(2),
        };
        let text = report.to_string();
        assert!(text.contains("cpu 1 retired 3000000\n"), "{text}");
        assert!(text.contains("6000000 instructions, 3.0 MIPS"), "{text}");
        let mix = "instructions: mov 4000000 (66.7 %), add 2000000 (33.3 %)\n";
        assert!(text.contains(mix), "{text}");
        let changes = "engine changes 2: armed 1, disarmed 1; 150 us on average, 200 us at most\n";
        assert!(text.contains(changes), "{text}");
        assert!(text.ends_with("exits 2: port writes 2\n"), "{text}");
    }

    #[test]
    fn mix_sums_the_less_frequent_instructions() {
        let counts = (0..20).map(|n| (format!("insn{n:02}"), 100 - n));
        let report = RunReport {
            vcpus: vec![VcpuStats {
                cpu: 0,
                exits: ExitCounts::default(),
                interpreter: Some(retired(1810)),
                mix: counts.collect(),
            }],
            changes: None,
            host_time: Duration::from_secs(1),
        };
        let text = report.to_string();
        assert!(
            text.contains("insn15 85 (4.7 %), 4 others 330 (18.2 %)\n"),
            "{text}"
        );
    }
}
