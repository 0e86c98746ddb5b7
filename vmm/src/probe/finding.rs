//! A probe, and its finding.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::probe::context::{ProbeContext, RefusedCall};

/// The verdict of a probe, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProbeVerdict {
    /// The facility behaves as the architecture or the KVM API specifies.
    Works,
    /// The facility works in another way, which the detail describes.
    Differs,
    /// The facility was tried, and does something wrong or nothing.
    Broken,
    /// This KVM lacks the facility.
    Absent,
    /// The facility was not measured.
    Skipped,
}

impl fmt::Display for ProbeVerdict {
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

/// The finding of a probe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The verdict.
    pub verdict: ProbeVerdict,
    /// The measured facts, in words.
    pub detail: String,
}

impl Finding {
    pub(crate) fn new(verdict: ProbeVerdict, detail: impl Into<String>) -> Self {
        Self {
            verdict,
            detail: detail.into(),
        }
    }

    pub(crate) fn works(detail: impl Into<String>) -> Self {
        Self::new(ProbeVerdict::Works, detail)
    }

    pub(crate) fn differs(detail: impl Into<String>) -> Self {
        Self::new(ProbeVerdict::Differs, detail)
    }

    pub(crate) fn broken(detail: impl fmt::Display) -> Self {
        Self::new(ProbeVerdict::Broken, detail.to_string())
    }

    pub(crate) fn absent(detail: impl Into<String>) -> Self {
        Self::new(ProbeVerdict::Absent, detail)
    }
}

/// The function that measures.
pub(crate) type Measure = fn(&ProbeContext) -> Result<Finding, RefusedCall>;

/// A tiny guest that measures one property of this host's KVM.
#[derive(Debug, Clone, Copy)]
pub struct Probe {
    /// The name, in kebab-case. It is stable: payloads name it in `needs`.
    pub name: &'static str,
    /// What the probe measures, in one line.
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

    /// Measures. A refusal by KVM is a finding too.
    ///
    /// A probe that hangs is tried once more: on a host that is itself an emulated machine, stolen
    /// time counts as CPU time of the guest.
    pub(crate) fn run(&self, context: &ProbeContext) -> Finding {
        let measure = || (self.measure)(context).unwrap_or_else(Finding::broken);
        context.hung.set(false);
        let finding = measure();
        if context.hung.replace(false) && finding.verdict == ProbeVerdict::Broken {
            return measure();
        }
        finding
    }
}
