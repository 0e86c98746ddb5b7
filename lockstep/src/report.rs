//! The progress of long runs as a page of markdown.

use crate::progress::{ClassProgress, ProgressFile};
use std::fmt::Write;

/// How many of the rarest opcodes the page names.
const RAREST: usize = 5;

/// The page.
pub fn page(progress: &ProgressFile) -> String {
    let mut text = String::from(
        "# Coverage of the lock-step tester\n\n\
         <!-- Made by `lockstep --state FILE --report`; see testing.md. -->\n\n\
         The tester runs random instructions on random state, in the interpreter and on a \
         processor, and compares all results.\n\
         A case is one instruction on one state.\n\n",
    );
    if !progress.processor.is_empty() {
        let _ = writeln!(text, "The processor: {}.\n", progress.processor);
    }
    let user = |name: &str| !name.starts_with("system-");
    table(
        &mut text,
        "User-mode classes, against the host's processor",
        progress,
        user,
    );
    system(&mut text, progress);
    differences(&mut text, progress);
    text
}

fn table(text: &mut String, title: &str, progress: &ProgressFile, selects: impl Fn(&str) -> bool) {
    let rows: Vec<_> = progress
        .classes
        .iter()
        .filter(|(name, _)| selects(name))
        .collect();
    if rows.is_empty() {
        return;
    }
    let _ = writeln!(
        text,
        "## {title}\n\n\
         | class | cases | opcodes run | of | cases of an opcode: least, median, most | rarest | differ | seeds |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- |"
    );
    for (name, record) in rows {
        let _ = writeln!(
            text,
            "| {name} | {} | {} | {} | {} | {} | {} | {} |",
            record.cases,
            record.codes.len(),
            record.opcodes,
            spread(record),
            rarest(record),
            record.mismatched,
            seeds(record),
        );
    }
    text.push('\n');
}

/// The table of system classes, which have no list of opcodes to choose from.
fn system(text: &mut String, progress: &ProgressFile) {
    let rows = progress.classes.iter();
    let rows: Vec<_> = rows
        .filter_map(|(name, record)| Some((name.strip_prefix("system-")?, record)))
        .collect();
    if rows.is_empty() {
        return;
    }
    text.push_str(
        "## System classes, against KVM\n\n\
         Task switches are left out, because KVM emulates them and the processor does not \
         execute them.\n\n\
         | class | cases | codes run | differ | seeds |\n| --- | --- | --- | --- | --- |\n",
    );
    for (name, record) in rows {
        let _ = writeln!(
            text,
            "| {name} | {} | {} | {} | {} |",
            record.cases,
            record.codes.len(),
            record.mismatched,
            seeds(record),
        );
    }
    text.push('\n');
}

fn spread(record: &ClassProgress) -> String {
    let mut counts: Vec<u64> = record.codes.values().copied().collect();
    counts.sort_unstable();
    match (counts.first(), counts.get(counts.len() / 2), counts.last()) {
        (Some(least), Some(median), Some(most)) => format!("{least}, {median}, {most}"),
        _ => "none".to_owned(),
    }
}

fn rarest(record: &ClassProgress) -> String {
    let mut list: Vec<_> = record.codes.iter().collect();
    list.sort_by_key(|(_, n)| **n);
    let names: Vec<_> = list
        .iter()
        .take(RAREST)
        .map(|(code, _)| format!("`{code}`"))
        .collect();
    names.join(" ")
}

fn seeds(record: &ClassProgress) -> String {
    let list: Vec<_> = record
        .seeds
        .iter()
        .map(|(seed, n)| format!("{seed:#x} ({n} batches)"))
        .collect();
    list.join(", ")
}

/// A line for every opcode that differed.
fn differences(text: &mut String, progress: &ProgressFile) {
    let mut lines = std::collections::BTreeMap::new();
    for (class, record) in &progress.classes {
        for m in &record.mismatches {
            lines.entry((class, &m.code)).or_insert_with(|| {
                format!(
                    "- {class}, seed {:#x}: `{}`: {}\n",
                    m.seed, m.text, m.difference
                )
            });
        }
    }
    if !lines.is_empty() {
        text.push_str("## Differences\n\n");
        text.extend(lines.into_values());
    }
}
