//! The needs of cases, and whether this host meets them.

use std::collections::HashMap;
use std::fmt;
use std::sync::Mutex;

use crate::kvm;
use crate::probe;
use crate::probe::{Finding, ProbeVerdict};
use crate::sync::lock;

/// Which needs of the cases this host meets.
pub trait Capabilities {
    /// Whether `need` is the name of a probe.
    fn is_known(&self, need: &str) -> bool {
        probe::probes().any(|probe| probe.name == need)
    }

    /// Why this host does not meet `need`; `None` if it does.
    fn unmet(&self, need: &str) -> Option<String>;
}

/// Capabilities that are not measured: every need counts as met.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unmeasured;

impl Capabilities for Unmeasured {
    fn unmet(&self, _need: &str) -> Option<String> {
        None
    }
}

/// The capabilities of this host's KVM, measured by probes.
#[derive(Clone, Copy, Debug, Default)]
pub struct MeasuredHost;

/// Held by the thread that measures: probes measure times, so only one may run.
static MEASURING: Mutex<()> = Mutex::new(());

impl Capabilities for MeasuredHost {
    fn unmet(&self, need: &str) -> Option<String> {
        let _guard = lock(&MEASURING);
        match probe::findings([need]) {
            Ok(findings) => findings.get(need).and_then(unmet_reason),
            Err(error) => Some(error.to_string()),
        }
    }
}

/// Why a case cannot rely on a finding; `None` if it can. A facility that differs does not count.
fn unmet_reason(finding: &Finding) -> Option<String> {
    (finding.verdict != ProbeVerdict::Works).then(|| finding.detail.clone())
}

/// Capabilities without those that the user excludes, because measuring them does harm.
#[derive(Clone, Copy)]
pub struct Lacking<'a> {
    /// Needs that are not met, each with the reason.
    lacking: &'a [(String, String)],
    /// The capabilities that decide about all other needs.
    rest: &'a dyn Capabilities,
}

impl fmt::Debug for Lacking<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lacking")
            .field("lacking", &self.lacking)
            .finish_non_exhaustive()
    }
}

impl<'a> Lacking<'a> {
    /// `rest` without the needs in `lacking`, each of which has a reason.
    pub fn new(lacking: &'a [(String, String)], rest: &'a dyn Capabilities) -> Self {
        Self { lacking, rest }
    }
}

impl Capabilities for Lacking<'_> {
    fn is_known(&self, need: &str) -> bool {
        self.rest.is_known(need)
    }

    fn unmet(&self, need: &str) -> Option<String> {
        match self.lacking.iter().find(|(name, _)| name == need) {
            Some((_, reason)) => Some(reason.clone()),
            None => self.rest.unmet(need),
        }
    }
}

/// Parses the value of `--lacking`: the name of a probe and, after `=`, the reason to report.
///
/// # Errors
///
/// No probe has this name.
pub fn parse_lacking(text: &str) -> Result<(String, String), String> {
    let (name, reason) = text.split_once('=').unwrap_or((text, "left out"));
    if !Unmeasured.is_known(name) {
        return Err(format!(
            "there is no probe {name:?}; `hindsight doctor --list` lists all probes"
        ));
    }
    Ok((name.to_owned(), reason.to_owned()))
}

/// Why this host's KVM cannot be used at all; `None` if it can.
pub fn kvm_problem() -> Option<String> {
    kvm::open_device().err().map(|error| error.to_string())
}

/// Asks each need only once.
pub(super) struct NeedCache<'a> {
    capabilities: &'a dyn Capabilities,
    answers: HashMap<String, Option<String>>,
}

impl<'a> NeedCache<'a> {
    pub(super) fn new(capabilities: &'a dyn Capabilities) -> Self {
        Self {
            capabilities,
            answers: HashMap::new(),
        }
    }

    /// The first of `needs` that is not met, with its reason.
    pub(super) fn first_unmet<'n>(
        &mut self,
        needs: impl Iterator<Item = &'n str>,
    ) -> Option<String> {
        for need in needs {
            if !self.answers.contains_key(need) {
                self.answers
                    .insert(need.to_owned(), self.capabilities.unmet(need));
            }
            if let Some(Some(reason)) = self.answers.get(need) {
                return Some(format!("this KVM: {need}: {reason}"));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    struct CountingCapabilities(Cell<u32>);

    impl Capabilities for CountingCapabilities {
        fn unmet(&self, need: &str) -> Option<String> {
            self.0.set(self.0.get() + 1);
            (need == "gd").then(|| "no #DB".to_owned())
        }
    }

    #[test]
    fn first_unmet_need_is_named_and_asked_only_once() {
        let host = CountingCapabilities(Cell::new(0));
        let mut cache = NeedCache::new(&host);
        let needs = ["nmi", "gd", "smi"];
        let first = cache.first_unmet(needs.into_iter());
        assert_eq!(first.as_deref(), Some("this KVM: gd: no #DB"));
        assert_eq!(cache.first_unmet(needs.into_iter()), first);
        assert_eq!(host.0.get(), 2);
    }

    #[test]
    fn need_is_met_only_if_the_finding_works() {
        let finding = |verdict| Finding {
            verdict,
            detail: "internal error".to_owned(),
        };
        assert_eq!(unmet_reason(&finding(ProbeVerdict::Works)), None);
        let reason = Some("internal error".to_owned());
        assert_eq!(unmet_reason(&finding(ProbeVerdict::Broken)), reason);
        assert_eq!(unmet_reason(&finding(ProbeVerdict::Differs)), reason);
        assert_eq!(unmet_reason(&finding(ProbeVerdict::Absent)), reason);
    }

    #[test]
    fn lacking_need_is_unmet_without_measuring() {
        let lacking = [
            parse_lacking("gd=it crashes").unwrap(),
            parse_lacking("smi").unwrap(),
        ];
        let host = CountingCapabilities(Cell::new(0));
        let lacking = Lacking::new(&lacking, &host);
        assert_eq!(lacking.unmet("gd").as_deref(), Some("it crashes"));
        assert_eq!(lacking.unmet("smi").as_deref(), Some("left out"));
        assert_eq!((host.0.get(), lacking.unmet("nmi")), (0, None));
        assert_eq!(host.0.get(), 1);
        assert_eq!(
            parse_lacking("gb=x").unwrap_err(),
            "there is no probe \"gb\"; `hindsight doctor --list` lists all probes"
        );
    }

    #[test]
    fn need_without_a_probe_is_unknown() {
        assert!(Unmeasured.is_known("int3-cpl0"));
        assert!(!Unmeasured.is_known("int3-cpl1"));
    }
}
