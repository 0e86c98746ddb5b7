//! What this host's KVM really does, measured with tiny guests: the probes of `hindsight doctor`.
//!
//! Nothing is taken from version numbers. Each [`Probe`] runs guests of its own (`guest`), so one
//! that dies costs only its row; a guest that hangs is kicked after 50 ms. [`findings`] measures
//! only what is asked for, and keeps it for this boot of the host.

pub(crate) mod cache;
mod code;
pub(crate) mod finding;
pub(crate) mod guest;
pub mod host;
mod image;
mod probes;
pub mod report;
mod stop;

pub use cache::Findings;
pub use finding::{Finding, Probe, Verdict};

use cache::Cache;
use guest::Bench;
use thiserror::Error;

use crate::kvm::KvmError;

/// Why nothing could be measured.
#[derive(Debug, Error)]
pub enum ProbeError {
    /// KVM cannot be used at all.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// No probe has this name.
    #[error("there is no probe {0:?}; `hindsight doctor --list` names them all")]
    Unknown(String),
}

/// All probes, in the order in which they are measured.
pub fn probes() -> impl Iterator<Item = &'static Probe> {
    probes::all()
}

/// The findings of the named probes: kept ones of this boot, the rest measured now and kept.
///
/// # Errors
///
/// When KVM cannot be used and a finding is not kept, or a name is unknown.
pub fn findings<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Findings, ProbeError> {
    let cache = Cache::here();
    let mut kept = cache.as_ref().map(Cache::load).unwrap_or_default();
    let mut wanted = Findings::new();
    let mut measured = Findings::new();
    let mut bench = None;
    for name in names {
        if wanted.contains_key(name) {
            continue;
        }
        let probe = probes()
            .find(|probe| probe.name == name)
            .ok_or_else(|| ProbeError::Unknown(name.to_owned()))?;
        if let Some(finding) = kept.remove(name) {
            wanted.insert(name.to_owned(), finding);
            continue;
        }
        let bench = match &bench {
            Some(bench) => bench,
            None => bench.insert(Bench::open()?),
        };
        let finding = probe.run(bench);
        measured.insert(name.to_owned(), finding.clone());
        wanted.insert(name.to_owned(), finding);
    }
    keep(cache.as_ref(), &measured);
    Ok(wanted)
}

/// Why this host does not do what the named probe measures; `None` when it does.
///
/// # Errors
///
/// As [`findings`].
pub fn unmet(name: &str) -> Result<Option<String>, ProbeError> {
    let finding = findings([name])?.remove(name);
    Ok(finding
        .filter(|f| f.verdict != Verdict::Works)
        .map(|f| f.detail))
}

/// Keeps findings where that is possible; where not, they are measured again next time.
pub(crate) fn keep(cache: Option<&Cache>, measured: &Findings) {
    if measured.is_empty() {
        return;
    }
    if let Some(Err(error)) = cache.map(|cache| cache.store(measured)) {
        tracing::debug!(%error, "findings are not kept");
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The chapter with a row for each probe.
    const DOCUMENT: &str = include_str!("../../../docs/doctor.md");

    #[test]
    fn probe_names_are_unique_and_kebab_case() {
        let names: BTreeSet<_> = probes().map(|probe| probe.name).collect();
        assert_eq!(names.len(), probes().count());
        for name in names {
            let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            assert!(name.chars().all(fits), "{name}");
            assert!(name.len() <= 18, "{name} breaks the table");
        }
    }

    #[test]
    fn probe_names_and_meanings_are_documented() {
        for probe in probes() {
            let row = format!("| `{}` | {} |", probe.name, probe.about);
            assert!(DOCUMENT.contains(&row), "docs/doctor.md lacks: {row}");
        }
    }

    #[test]
    fn unknown_probe_is_refused() {
        let error = findings(["no-such-probe"]).unwrap_err();
        assert!(matches!(error, ProbeError::Unknown(name) if name == "no-such-probe"));
    }
}
