//! `--trace`: which events are written, one line each.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use tracing_subscriber::filter::{LevelFilter, Targets};

/// The kinds of events, which are the targets of the trace, with their descriptions.
const KINDS: [(&str, &str); 7] = [
    ("exit", "every exit of a vCPU"),
    ("msr", "RDMSR and WRMSR"),
    (
        "irq",
        "interrupts, NMIs, INIT and start-up IPIs as vCPUs take them",
    ),
    (
        "exception",
        "exceptions and software interrupts, and what their delivery met; in the interpreter",
    ),
    ("io", "port and MMIO accesses"),
    ("mode", "the engine, and why it changes"),
    ("gdb", "packets of a debugger, and the replies"),
];

/// The word for all kinds.
const ALL: &str = "all";

/// Whether `text` is the name of a kind.
pub(super) fn is_target(text: &str) -> bool {
    KINDS.iter().any(|(name, _)| *name == text)
}

/// `KIND[,KIND...][=FILE]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceSpec {
    /// Names of kinds; `all` stands for all of them.
    pub kinds: Vec<String>,
    /// Where the lines go; `None` is standard error.
    pub file: Option<PathBuf>,
}

impl TraceSpec {
    /// The filter that selects the events.
    pub(super) fn targets(&self) -> Targets {
        let is_traced = |name| self.kinds.iter().any(|kind| kind == name || kind == ALL);
        let targets = KINDS.iter().map(|&(name, _)| name);
        Targets::new().with_targets(
            targets
                .filter(|name| is_traced(*name))
                .map(|t| (t, LevelFilter::TRACE)),
        )
    }
}

impl FromStr for TraceSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kinds, file) = match text.split_once('=') {
            None => (text, None),
            Some((kinds, file)) => (kinds, Some(file.into())),
        };
        let kinds: Vec<String> = kinds
            .split(',')
            .filter(|kind| !kind.is_empty())
            .map(str::to_owned)
            .collect();
        let unknown = kinds.iter().find(|kind| !is_target(kind) && *kind != ALL);
        match unknown {
            Some(kind) => Err(format!("{kind:?} is not one of {}, {ALL}", names())),
            None => Ok(Self { kinds, file }),
        }
    }
}

impl fmt::Display for TraceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.kinds.join(","))?;
        match &self.file {
            Some(file) => write!(f, "={}", file.display()),
            None => Ok(()),
        }
    }
}

fn names() -> String {
    KINDS.map(|(name, _)| name).join(", ")
}

/// The help text of `--trace`.
pub fn trace_help() -> String {
    let kinds = KINDS
        .map(|(name, about)| format!("{name} ({about})"))
        .join(", ");
    format!(
        "Write a line for each event of these kinds, KIND[,KIND...], to standard error or =FILE: \
         {kinds}, {ALL}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The document with a row for each kind.
    const DOCUMENT: &str = include_str!("../../../../docs/reference/logging.md");

    #[test]
    fn trace_kinds_are_documented() {
        for (name, about) in KINDS {
            let row = format!("| `{name}` | {about} |");
            assert!(
                DOCUMENT.contains(&row),
                "docs/reference/logging.md lacks: {row}"
            );
        }
    }

    #[test]
    fn unknown_kinds_are_refused() {
        let error = "exit,bogus".parse::<TraceSpec>().unwrap_err();
        let expected = "\"bogus\" is not one of exit, msr, irq, exception, io, mode, gdb, all";
        assert_eq!(error, expected);
    }
}
