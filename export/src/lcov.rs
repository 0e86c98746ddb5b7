//! Coverage in the format of lcov: lines, functions and conditional branches, with counts.

use std::collections::BTreeMap;
use std::io::Write;

use crate::code::{Execution, execution};
use crate::error::ExportError;
use crate::flow::Flow;
use crate::input::Guest;
use crate::lines::{LineTable, SourceLine};

/// Coverage of one source file.
#[derive(Debug, Default)]
struct FileCoverage {
    /// Line and calls of each function.
    functions: BTreeMap<String, (u32, u64)>,
    /// How often each line was executed.
    lines: BTreeMap<u32, u64>,
    /// How often the branches of a line were not taken and taken, in order of their addresses.
    branches: BTreeMap<u32, Vec<[u64; 2]>>,
}

/// Sums coverage up by file, in the order of `lines.files`.
fn by_file(flow: &Flow, counts: &Execution, guest: &Guest, lines: &LineTable) -> Vec<FileCoverage> {
    let mut files = Vec::new();
    files.resize_with(lines.files.len(), FileCoverage::default);
    let count = |address: u64| counts.get(&address).map_or(0, |executed| executed.count);
    for &(address, len, SourceLine { file, line }) in &lines.rows {
        let in_row = counts.range(address..address.saturating_add(len.max(1)));
        let most = in_row
            .map(|(_, executed)| executed.count)
            .max()
            .unwrap_or(0);
        let total: &mut u64 = files[file].lines.entry(line).or_default();
        *total = most.max(*total);
    }
    for function in guest.functions.iter() {
        if let Some(SourceLine { file, line }) = lines.find(function.address) {
            let entry = files[file].functions.entry(function.name.clone());
            entry.or_insert((line, 0)).1 += count(function.address);
        }
    }
    let mut taken = BTreeMap::<u64, u64>::new();
    for (edge, counted) in &flow.edges {
        if counted.class == hindsight_cpu::branch::BranchClass::Conditional {
            *taken.entry(edge.from).or_default() += counted.count;
        }
    }
    for (address, executed) in counts.iter().filter(|(_, executed)| executed.conditional) {
        if let Some(SourceLine { file, line }) = lines.find(*address) {
            let taken = taken.get(address).copied().unwrap_or(0);
            let branches = files[file].branches.entry(line).or_default();
            branches.push([executed.count.saturating_sub(taken), taken]);
        }
    }
    files
}

/// Writes one record for each source file.
pub(crate) fn write(flow: &Flow, guest: &Guest, out: &mut dyn Write) -> Result<(), ExportError> {
    let lines = LineTable::of(&guest.image)?;
    let counts = execution(flow, &guest.image)?;
    let files = by_file(flow, &counts, guest, &lines);
    for (path, coverage) in lines.files.iter().zip(&files) {
        writeln!(out, "TN:\nSF:{path}")?;
        write_file(coverage, out)?;
        writeln!(out, "end_of_record")?;
    }
    Ok(())
}

fn write_file(coverage: &FileCoverage, out: &mut dyn Write) -> std::io::Result<()> {
    let functions = &coverage.functions;
    for (name, (line, _)) in functions {
        writeln!(out, "FN:{line},{name}")?;
    }
    for (name, (_, calls)) in functions {
        writeln!(out, "FNDA:{calls},{name}")?;
    }
    let hit = functions.values().filter(|(_, calls)| *calls != 0).count();
    writeln!(out, "FNF:{}\nFNH:{hit}", functions.len())?;
    let (mut found, mut hit) = (0, 0);
    for (line, branches) in &coverage.branches {
        for (block, ways) in branches.iter().enumerate() {
            for (branch, count) in ways.iter().enumerate() {
                writeln!(out, "BRDA:{line},{block},{branch},{count}")?;
                found += 1;
                hit += usize::from(*count != 0);
            }
        }
    }
    writeln!(out, "BRF:{found}\nBRH:{hit}")?;
    for (line, count) in &coverage.lines {
        writeln!(out, "DA:{line},{count}")?;
    }
    let hit = coverage.lines.values().filter(|&&count| count != 0).count();
    writeln!(out, "LF:{}\nLH:{hit}", coverage.lines.len())
}
