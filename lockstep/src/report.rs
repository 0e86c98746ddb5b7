//! What a state says, as a page of markdown.

use crate::state::{Record, State};
use std::fmt::Write;

/// Opcodes shown of those that came least often.
const RAREST: usize = 5;

/// The page.
pub fn page(state: &State) -> String {
    let mut text = String::from(
        "# What the lock-step tester has covered\n\n\
         <!-- Made by `lockstep --state FILE --report`; see testing.md. -->\n\n\
         Random instructions on random state, in the interpreter and on a processor; all results compared.\n\
         A case is one instruction on one state.\n\n",
    );
    if !state.judge.is_empty() {
        let _ = writeln!(text, "The processor: {}.\n", state.judge);
    }
    let user = |name: &str| !name.starts_with("system-");
    table(
        &mut text,
        "User-mode classes, against the host's processor",
        state,
        user,
    );
    system(&mut text, state);
    differences(&mut text, state);
    text
}

fn table(text: &mut String, title: &str, state: &State, wanted: impl Fn(&str) -> bool) {
    let rows: Vec<_> = state
        .classes
        .iter()
        .filter(|(name, _)| wanted(name))
        .collect();
    if rows.is_empty() {
        return;
    }
    let _ = writeln!(
        text,
        "## {title}\n\n\
         | class | cases | opcodes met | of | cases of an opcode: least, median, most | rarest | differ | seeds |\n\
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

/// The system classes, whose opcodes are no list to choose from.
fn system(text: &mut String, state: &State) {
    let rows = state.classes.iter();
    let rows: Vec<_> = rows
        .filter_map(|(name, record)| Some((name.strip_prefix("system-")?, record)))
        .collect();
    if rows.is_empty() {
        return;
    }
    text.push_str(
        "## System classes, against KVM\n\n\
         Task switches are not among them: under KVM no processor does them, but KVM itself.\n\n\
         | class | cases | codes met | differ | seeds |\n| --- | --- | --- | --- | --- |\n",
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

fn spread(record: &Record) -> String {
    let mut counts: Vec<u64> = record.codes.values().copied().collect();
    counts.sort_unstable();
    match (counts.first(), counts.get(counts.len() / 2), counts.last()) {
        (Some(least), Some(median), Some(most)) => format!("{least}, {median}, {most}"),
        _ => "none".to_owned(),
    }
}

fn rarest(record: &Record) -> String {
    let mut list: Vec<_> = record.codes.iter().collect();
    list.sort_by_key(|(_, n)| **n);
    let names: Vec<_> = list
        .iter()
        .take(RAREST)
        .map(|(code, _)| format!("`{code}`"))
        .collect();
    names.join(" ")
}

fn seeds(record: &Record) -> String {
    let list: Vec<_> = record
        .seeds
        .iter()
        .map(|(seed, n)| format!("{seed:#x} ({n} batches)"))
        .collect();
    list.join(", ")
}

/// Every opcode that differed, once.
fn differences(text: &mut String, state: &State) {
    let mut lines = std::collections::BTreeMap::new();
    for (class, record) in &state.classes {
        for m in &record.mismatches {
            lines.entry((class, &m.code)).or_insert_with(|| {
                format!("- {class}, seed {:#x}: `{}`: {}\n", m.seed, m.text, m.what)
            });
        }
    }
    if !lines.is_empty() {
        text.push_str("## What differs\n\n");
        text.extend(lines.into_values());
    }
}
