//! Joins folded stacks: lines of a stack and its instructions.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::bail;

use super::merged::MergedReport;

/// Adds up the instructions of equal stacks.
pub(super) fn merge(files: &[(String, String)]) -> anyhow::Result<MergedReport> {
    let mut stacks = BTreeMap::<&str, u64>::new();
    for (name, text) in files {
        for (number, line) in (1..).zip(text.lines()) {
            let parsed = line.rsplit_once(' ');
            let Some((stack, count)) = parsed.and_then(|(s, n)| Some((s, n.parse::<u64>().ok()?)))
            else {
                bail!("{name}, line {number}: neither a report nor a stack with its count");
            };
            let sum = stacks.entry(stack).or_default();
            *sum = sum.saturating_add(count);
        }
    }
    let mut text = String::new();
    for (stack, count) in stacks {
        writeln!(text, "{stack} {count}")?;
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
    fn counts_of_equal_stacks_are_added() {
        let file = |text: &str| ("a".to_owned(), text.to_owned());
        let merged = merge(&[file("a;b 3\na 1\n"), file("a;b 4\n")]).unwrap();
        assert_eq!(merged.text, "a 1\na;b 7\n");
        assert!(merge(&[file("a;b\n")]).is_err() && merge(&[file("a -1\n")]).is_err());
    }
}
