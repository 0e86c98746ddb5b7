//! The counts of a run as a table and as JSON.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

use anyhow::bail;
use hindsight_export::{FunctionCost, ProcessCost};
use serde::{Deserialize, Serialize};

use crate::vcpu::run_counter::{Counts, NAMES, RunCounts};

/// The version of the JSON form.
const VERSION: u32 = 1;

/// The counts of one region, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::cli) struct RegionFigures {
    pub(in crate::cli) entries: u64,
    pub(in crate::cli) counts: BTreeMap<String, u64>,
}

/// Instructions of one function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::cli) struct FunctionFigures {
    pub(in crate::cli) name: String,
    pub(in crate::cli) calls: u64,
    /// Instructions that were executed in the function itself.
    pub(in crate::cli) instructions: u64,
    /// Instructions that were executed in the function and the functions that it calls.
    pub(in crate::cli) inclusive: u64,
}

/// Instructions of one process of a Linux guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::cli) struct ProcessFigures {
    /// The process's number; none for code before the first task.
    pub(in crate::cli) pid: Option<u32>,
    pub(in crate::cli) name: String,
    pub(in crate::cli) switches: u64,
    /// Instructions while it ran, with those of the kernel.
    pub(in crate::cli) instructions: u64,
}

/// The counts of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(in crate::cli) struct Figures {
    pub(in crate::cli) version: u32,
    /// XXH3 of the image, in hexadecimal.
    pub(in crate::cli) image: String,
    /// CPU profile, and the seed of a deterministic run.
    pub(in crate::cli) cpu: String,
    pub(in crate::cli) seed: Option<u64>,
    /// XXH3 of the other options and files on which the run depends, in hexadecimal.
    pub(in crate::cli) inputs: String,
    pub(in crate::cli) counts: BTreeMap<String, u64>,
    pub(in crate::cli) regions: BTreeMap<String, RegionFigures>,
    pub(in crate::cli) functions: Vec<FunctionFigures>,
    pub(in crate::cli) processes: Vec<ProcessFigures>,
}

fn add_counts(own: &mut BTreeMap<String, u64>, other: &BTreeMap<String, u64>) {
    for (name, count) in other {
        let sum = own.entry(name.clone()).or_default();
        *sum = sum.saturating_add(*count);
    }
}

/// The rows of two lists, of which those with the same name are added.
fn joined<T>(
    own: Vec<T>,
    other: Vec<T>,
    name: fn(&T) -> &String,
    add: impl Fn(&mut T, T),
) -> Vec<T> {
    let mut rows: BTreeMap<String, T> = BTreeMap::new();
    for row in own.into_iter().chain(other) {
        match rows.entry(name(&row).clone()) {
            Entry::Occupied(mut entry) => add(entry.get_mut(), row),
            Entry::Vacant(entry) => {
                entry.insert(row);
            }
        }
    }
    rows.into_values().collect()
}

fn by_name(counts: &Counts, models: bool) -> BTreeMap<String, u64> {
    let modelled = |name: &str| {
        ["loads", "stores", "llc", "mispredictions"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
    };
    let all = NAMES.iter().zip(counts.0);
    let counted = all.filter(|(name, _)| models || !modelled(name));
    counted
        .map(|(name, count)| ((*name).to_owned(), count))
        .collect()
}

impl Figures {
    /// Adds the counts of another run on the same processor.
    ///
    /// # Errors
    ///
    /// When the runs are of different processors.
    pub(in crate::cli) fn add(&mut self, other: Self) -> anyhow::Result<()> {
        if (self.version, &self.cpu) != (other.version, &other.cpu) {
            bail!("runs on {} and {} cannot be added", self.cpu, other.cpu);
        }
        if self.image != other.image {
            self.image.clear();
        }
        if self.inputs != other.inputs {
            self.inputs.clear();
        }
        self.seed = None;
        add_counts(&mut self.counts, &other.counts);
        for (name, region) in other.regions {
            let own = self.regions.entry(name).or_default();
            own.entries = own.entries.saturating_add(region.entries);
            add_counts(&mut own.counts, &region.counts);
        }
        let own = std::mem::take(&mut self.functions);
        self.functions = joined(
            own,
            other.functions,
            |function| &function.name,
            |own, function| {
                own.calls = own.calls.saturating_add(function.calls);
                own.instructions = own.instructions.saturating_add(function.instructions);
                own.inclusive = own.inclusive.saturating_add(function.inclusive);
            },
        );
        self.functions.sort_by(|a, b| {
            let order = b.instructions.cmp(&a.instructions);
            order.then_with(|| a.name.cmp(&b.name))
        });
        // The same number is another process in another run.
        let own = std::mem::take(&mut self.processes);
        self.processes = joined(
            own,
            other.processes,
            |process| &process.name,
            |own, process| {
                own.pid = own.pid.filter(|_| own.pid == process.pid);
                own.switches = own.switches.saturating_add(process.switches);
                own.instructions = own.instructions.saturating_add(process.instructions);
            },
        );
        self.processes.sort_by(|a, b| {
            let order = b.instructions.cmp(&a.instructions);
            order.then_with(|| a.name.cmp(&b.name))
        });
        Ok(())
    }

    /// The figures of a run. `models`: whether loads, caches and mispredictions were counted.
    pub(super) fn new(
        run: &RunCounts,
        models: bool,
        functions: Vec<FunctionCost>,
        processes: Vec<ProcessCost>,
    ) -> Self {
        let regions = run.regions.iter().map(|(name, region)| {
            let figures = RegionFigures {
                entries: region.entries,
                counts: by_name(&region.counts, models),
            };
            (name.clone(), figures)
        });
        let functions = functions.into_iter().map(|cost| FunctionFigures {
            name: cost.name,
            calls: cost.calls,
            instructions: cost.own,
            inclusive: cost.inclusive,
        });
        let processes = processes.into_iter().map(|cost| ProcessFigures {
            pid: cost.tgid,
            name: cost.name,
            switches: cost.switches,
            instructions: cost.instructions,
        });
        Self {
            processes: processes.collect(),
            version: VERSION,
            counts: by_name(&run.total, models),
            regions: regions.collect(),
            functions: functions.collect(),
            ..Self::default()
        }
    }
}

/// A number with a space between each three digits.
pub(super) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index != 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row = |name: &str, count: u64| writeln!(f, "{:>20}  {name}", grouped(count));
        for name in NAMES {
            if let Some(&count) = self.counts.get(name) {
                row(name, count)?;
            }
        }
        for (name, region) in &self.regions {
            writeln!(f, "region {name}, entered {} times", region.entries)?;
            let nonzero = NAMES
                .iter()
                .filter_map(|name| Some((*name, *region.counts.get(*name)?)));
            for (name, count) in nonzero.filter(|(_, count)| *count != 0) {
                writeln!(f, "{:>20}  {name}", grouped(count))?;
            }
        }
        if !self.processes.is_empty() {
            writeln!(
                f,
                "{:>20}  {:>12}  {:>8}  process",
                "instructions", "switches", "pid"
            )?;
        }
        for process in &self.processes {
            let pid = process.pid.map_or("-".to_owned(), |pid| pid.to_string());
            let (own, switches) = (grouped(process.instructions), grouped(process.switches));
            writeln!(f, "{own:>20}  {switches:>12}  {pid:>8}  {}", process.name)?;
        }
        if !self.functions.is_empty() {
            writeln!(
                f,
                "{:>20}  {:>20}  {:>12}  function",
                "instructions", "with callees", "calls"
            )?;
        }
        for function in &self.functions {
            let (own, all) = (grouped(function.instructions), grouped(function.inclusive));
            let calls = grouped(function.calls);
            writeln!(f, "{own:>20}  {all:>20}  {calls:>12}  {}", function.name)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped_by_three() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1_234_567), "1 234 567");
    }

    #[test]
    fn many_functions_are_added_by_name_in_little_time() {
        let run = |instructions| Figures {
            functions: (0_u64..60_000)
                .map(|n| FunctionFigures {
                    name: format!("f{n}"),
                    calls: 1,
                    instructions: instructions + n,
                    inclusive: 1,
                })
                .collect(),
            ..Figures::default()
        };
        let start = std::time::Instant::now();
        let mut total = run(0);
        total.add(run(1)).unwrap();
        let last = &total.functions[0];
        assert_eq!(
            (last.name.as_str(), last.calls, last.instructions),
            ("f59999", 2, 119_999)
        );
        assert_eq!(total.functions.len(), 60_000);
        assert!(start.elapsed().as_secs() < 10);
    }

    #[test]
    fn modelled_counts_are_left_out_where_nothing_counted_them() {
        let run = RunCounts::default();
        let names = |models| {
            Figures::new(&run, models, Vec::new(), Vec::new())
                .counts
                .len()
        };
        assert_eq!(names(true), NAMES.len());
        assert_eq!(names(false), NAMES.len() - 9);
    }
}
