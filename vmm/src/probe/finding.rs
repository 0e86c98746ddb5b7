//! What a probe is, and what it finds.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::probe::guest::{Bench, Refused};

/// The verdict in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// As the architecture, or the KVM API, says.
    Works,
    /// It happens, but in another way, which the detail describes.
    Differs,
    /// It is offered, or was tried, and does something wrong or nothing.
    Broken,
    /// This KVM does not have it.
    Absent,
    /// Nobody asked.
    Skipped,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Works => "works",
            Self::Differs => "differs",
            Self::Broken => "broken",
            Self::Absent => "absent",
            Self::Skipped => "skipped",
        })
    }
}

/// What a probe found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// In one word.
    pub verdict: Verdict,
    /// The measured facts, in words.
    pub detail: String,
}

impl Finding {
    pub(crate) fn new(verdict: Verdict, detail: impl Into<String>) -> Self {
        Self {
            verdict,
            detail: detail.into(),
        }
    }

    pub(crate) fn works(detail: impl Into<String>) -> Self {
        Self::new(Verdict::Works, detail)
    }

    pub(crate) fn differs(detail: impl Into<String>) -> Self {
        Self::new(Verdict::Differs, detail)
    }

    pub(crate) fn broken(detail: impl fmt::Display) -> Self {
        Self::new(Verdict::Broken, detail.to_string())
    }

    pub(crate) fn absent(detail: impl Into<String>) -> Self {
        Self::new(Verdict::Absent, detail)
    }
}

/// How a probe measures.
pub(crate) type Measure = fn(&Bench) -> Result<Finding, Refused>;

/// One row of the report.
#[derive(Debug, Clone, Copy)]
pub struct Probe {
    /// Kebab-case and stable: payloads name it in `needs`.
    pub name: &'static str,
    /// What it measures, in one line.
    pub about: &'static str,
    pub(crate) measure: Measure,
}

impl Probe {
    pub(crate) const fn new(name: &'static str, about: &'static str, measure: Measure) -> Self {
        Self {
            name,
            about,
            measure,
        }
    }

    /// Measures. A refusal by KVM is a finding too. What hangs is tried once more: on a host that
    /// is itself an emulated machine, time that it was not given looks like time that it used.
    pub(crate) fn run(&self, bench: &Bench) -> Finding {
        let measure = || (self.measure)(bench).unwrap_or_else(Finding::broken);
        bench.hung.set(false);
        let finding = measure();
        if bench.hung.replace(false) && finding.verdict == Verdict::Broken {
            return measure();
        }
        finding
    }
}
