//! Findings on demand: cached ones of this boot, and the rest measured.

use thiserror::Error;

use crate::kvm::KvmError;
use crate::probe::context::ProbeContext;
use crate::probe::finding::ProbeVerdict;
use crate::probe::findings_cache::{Findings, FindingsCache};
use crate::probe::probes;

/// Why no probe could run.
#[derive(Debug, Error)]
pub enum ProbeError {
    /// KVM cannot be used at all.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// No probe has this name.
    #[error("there is no probe {0:?}; `hindsight doctor --list` lists all probes")]
    Unknown(String),
}

/// Returns the findings of the named probes.
///
/// Those that this boot's cache lacks are measured and stored in it.
///
/// # Errors
///
/// KVM cannot be used and a finding is not cached, or a name is unknown.
pub fn findings<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Findings, ProbeError> {
    let cache = FindingsCache::of_this_boot();
    let mut cached = cache.as_ref().map(FindingsCache::load).unwrap_or_default();
    let mut requested = Findings::new();
    let mut measured = Findings::new();
    let mut context = None;
    for name in names {
        if requested.contains_key(name) {
            continue;
        }
        let probe = probes::all()
            .find(|probe| probe.name == name)
            .ok_or_else(|| ProbeError::Unknown(name.to_owned()))?;
        if let Some(finding) = cached.remove(name) {
            requested.insert(name.to_owned(), finding);
            continue;
        }
        let context = match &context {
            Some(context) => context,
            None => context.insert(ProbeContext::open()?),
        };
        let finding = probe.run(context);
        measured.insert(name.to_owned(), finding.clone());
        requested.insert(name.to_owned(), finding);
    }
    store_findings(cache.as_ref(), &measured);
    Ok(requested)
}

/// The finding of the named probe if its verdict is not [`ProbeVerdict::Works`], in words.
///
/// # Errors
///
/// As for [`findings`].
pub fn unmet(name: &str) -> Result<Option<String>, ProbeError> {
    let finding = findings([name])?.remove(name);
    Ok(finding
        .filter(|f| f.verdict != ProbeVerdict::Works)
        .map(|f| f.detail))
}

/// Stores findings in the cache. If that fails, they are measured again next time.
pub(crate) fn store_findings(cache: Option<&FindingsCache>, measured: &Findings) {
    if measured.is_empty() {
        return;
    }
    if let Some(Err(error)) = cache.map(|cache| cache.store(measured)) {
        tracing::debug!(%error, "findings are not cached");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_probe_is_refused() {
        let error = findings(["no-such-probe"]).unwrap_err();
        assert!(matches!(error, ProbeError::Unknown(name) if name == "no-such-probe"));
    }
}
