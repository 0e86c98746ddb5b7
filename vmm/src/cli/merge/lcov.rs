//! Joins coverage in the format of lcov.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Context, bail};

use super::merged::MergedReport;

/// Coverage of one source file.
#[derive(Debug, Default)]
struct SourceCoverage {
    /// Functions: line, if a file has it, and executions, by name.
    functions: BTreeMap<String, (Option<u64>, u64)>,
    /// Executions by line.
    lines: BTreeMap<u64, u64>,
    /// Executions by line, block and branch; none if the line was never reached.
    branches: BTreeMap<(u64, String, String), Option<u64>>,
}

/// The fields of a line; the last one has the rest of it.
fn fields<const N: usize>(text: &str) -> Option<[&str; N]> {
    let found: Vec<_> = text.splitn(N, ',').collect();
    found.try_into().ok()
}

impl SourceCoverage {
    /// Adds a line of a file; `None` if it is malformed.
    fn add(&mut self, kind: &str, value: &str) -> Option<()> {
        match kind {
            "FN" => {
                let [line, name] = fields(value)?;
                let line = line.parse().ok()?;
                // Functions of one name count as one, wherever they are: at the first of the lines.
                let own = &mut self.functions.entry(name.to_owned()).or_default().0;
                *own = Some(own.map_or(line, |own| own.min(line)));
            }
            "FNDA" => {
                let [count, name] = fields(value)?;
                let sum = &mut self.functions.entry(name.to_owned()).or_default().1;
                *sum = sum.saturating_add(count.parse().ok()?);
            }
            "DA" => {
                let [line, rest] = fields(value)?;
                // A checksum may follow.
                let count = rest.split(',').next()?;
                let sum = self.lines.entry(line.parse().ok()?).or_default();
                *sum = sum.saturating_add(count.parse().ok()?);
            }
            "BRDA" => {
                let [line, block, branch, count] = fields(value)?;
                let key = (line.parse().ok()?, block.to_owned(), branch.to_owned());
                let sum = self.branches.entry(key).or_default();
                if count != "-" {
                    let count = count.parse().ok()?;
                    *sum = Some(sum.unwrap_or(0).saturating_add(count));
                }
            }
            _ => {}
        }
        Some(())
    }

    fn write(&self, path: &str, out: &mut String) -> std::fmt::Result {
        writeln!(out, "SF:{path}")?;
        for (name, (line, _)) in &self.functions {
            writeln!(out, "FN:{},{name}", line.unwrap_or(0))?;
        }
        for (name, (_, count)) in &self.functions {
            writeln!(out, "FNDA:{count},{name}")?;
        }
        let hit = self.functions.values().filter(|(_, count)| *count != 0);
        writeln!(out, "FNF:{}\nFNH:{}", self.functions.len(), hit.count())?;
        for ((line, block, branch), count) in &self.branches {
            let count = count.map_or("-".to_owned(), |count| count.to_string());
            writeln!(out, "BRDA:{line},{block},{branch},{count}")?;
        }
        let hit = self
            .branches
            .values()
            .filter(|count| count.unwrap_or(0) != 0);
        writeln!(out, "BRF:{}\nBRH:{}", self.branches.len(), hit.count())?;
        for (line, count) in &self.lines {
            writeln!(out, "DA:{line},{count}")?;
        }
        let hit = self.lines.values().filter(|count| **count != 0);
        writeln!(
            out,
            "LF:{}\nLH:{}\nend_of_record",
            self.lines.len(),
            hit.count()
        )
    }
}

/// Adds up the counts of all files.
pub(super) fn merge(files: &[(String, String)]) -> anyhow::Result<MergedReport> {
    let mut sources = BTreeMap::<String, SourceCoverage>::new();
    for (name, text) in files {
        let mut source = None;
        for (number, line) in (1..).zip(text.lines()) {
            let (kind, value) = line.split_once(':').unwrap_or((line, ""));
            match kind {
                "SF" => source = Some(sources.entry(value.to_owned()).or_default()),
                "end_of_record" => source = None,
                "TN" | "" => {}
                _ => {
                    let at = || format!("{name}, line {number}");
                    let Some(source) = &mut source else {
                        bail!("{}: no source file before it", at());
                    };
                    source
                        .add(kind, value)
                        .with_context(|| format!("{}: malformed", at()))?;
                }
            }
        }
    }
    let mut text = "TN:\n".to_owned();
    for (path, coverage) in &sources {
        coverage.write(path, &mut text)?;
    }
    Ok(MergedReport {
        text,
        remarks: Vec::new(),
        passed: true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_lines_functions_and_branches_are_added() {
        let file = |text: &str| ("a".to_owned(), text.to_owned());
        let first = "TN:\nSF:a.c\nFN:3,main\nFNDA:1,main\nBRDA:4,0,0,2\nBRDA:4,0,1,-\nDA:3,1\nend_of_record\n";
        let second = "TN:\nSF:a.c\nFN:3,main\nFNDA:0,main\nBRDA:4,0,0,1\nBRDA:4,0,1,0\nDA:3,2\nDA:9,0\nend_of_record\n";
        let merged = merge(&[file(first), file(second)]).unwrap().text;
        let expected = "TN:\nSF:a.c\nFN:3,main\nFNDA:1,main\nFNF:1\nFNH:1\nBRDA:4,0,0,3\nBRDA:4,0,1,0\n\
                        BRF:2\nBRH:1\nDA:3,3\nDA:9,0\nLF:2\nLH:1\nend_of_record\n";
        assert_eq!(merged, expected);
        assert_eq!(merge(&[file(second), file(first)]).unwrap().text, expected);
        let moved = file("SF:a.c\nFN:2,main\n");
        for files in [[file(first), moved.clone()], [moved, file(first)]] {
            assert!(merge(&files).unwrap().text.contains("FN:2,main\nFNDA:1,"));
        }
        for bad in [
            "SF:a\nDA:x,1\n",
            "DA:1,1\n",
            "SF:a\nDA:1\n",
            "SF:a\nBRDA:1,0,0,x\n",
        ] {
            assert!(merge(&[file(bad)]).is_err(), "{bad}");
        }
    }
}
