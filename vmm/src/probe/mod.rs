//! Measures what this host's KVM really does with tiny guests: the probes of `hindsight doctor`.
//!
//! Nothing is derived from version numbers. Each [`Probe`] runs guests of its own (`guest`), so a
//! guest that dies costs only the probe's row; a guest that hangs is kicked after 50 ms.
//! [`findings()`] measures only what is requested, and caches it for this boot of the host.

pub(crate) mod context;
pub(crate) mod finding;
mod findings;
pub(crate) mod findings_cache;
mod guest;
pub mod host;
mod probes;
pub mod report;

pub use finding::{Finding, Probe, ProbeVerdict};
pub(crate) use findings::store_findings;
pub use findings::{ProbeError, findings, unmet};
pub use findings_cache::Findings;
pub use probes::all as probes;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The page with a row for each probe.
    const DOCUMENT: &str = include_str!("../../../docs/guide/doctor.md");

    #[test]
    fn probe_names_are_unique_and_kebab_case() {
        let names: BTreeSet<_> = probes().map(|probe| probe.name).collect();
        assert_eq!(names.len(), probes().count());
        for name in names {
            let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            assert!(name.chars().all(fits), "{name}");
            assert!(name.len() <= 18, "{name} is wider than its column");
        }
    }

    #[test]
    fn probe_names_and_meanings_are_documented() {
        for probe in probes() {
            let row = format!("| `{}` | {} |", probe.name, probe.about);
            assert!(DOCUMENT.contains(&row), "docs/guide/doctor.md lacks: {row}");
        }
    }
}
