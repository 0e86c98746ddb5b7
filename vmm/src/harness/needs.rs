//! What a case needs of the host, and whether it is there.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use crate::kvm;
use crate::probe;
use crate::probe::{Finding, ProbeVerdict};

/// Answers which needs of the cases this host meets.
pub trait Capabilities {
    /// Whether `need` is the name of something that can be measured.
    fn is_known(&self, need: &str) -> bool {
        probe::probes().any(|probe| probe.name == need)
    }

    /// Why `need` is not met here; `None` when it is.
    fn unmet(&self, need: &str) -> Option<String>;
}

/// Capabilities where nothing was measured: every need counts as met.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unmeasured;

impl Capabilities for Unmeasured {
    fn unmet(&self, _need: &str) -> Option<String> {
        None
    }
}

/// The host's KVM, as doctor's probes find it.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostKvm;

/// Probes are timed, so they run one at a time, whatever the threads that ask.
static MEASURING: Mutex<()> = Mutex::new(());

impl Capabilities for HostKvm {
    fn unmet(&self, need: &str) -> Option<String> {
        let _one = MEASURING.lock().unwrap_or_else(PoisonError::into_inner);
        match probe::findings([need]) {
            Ok(findings) => findings.get(need).and_then(unconfirmed),
            Err(error) => Some(error.to_string()),
        }
    }
}

/// Why a finding is not what a case can rely on. One that differs from the architecture is not.
fn unconfirmed(finding: &Finding) -> Option<String> {
    (finding.verdict != ProbeVerdict::Works).then(|| finding.detail.clone())
}

/// Capabilities less what the user says is not there: for what cannot be measured without harm.
#[derive(Clone, Copy)]
pub struct Lacking<'a> {
    lacking: &'a [(String, String)],
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
    /// Needs that are not met, each with the reason, and what knows of all others.
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
            Some((_, why)) => Some(why.clone()),
            None => self.rest.unmet(need),
        }
    }
}

/// The value of `--lacking`: the name of a probe, and after `=` the reason that is told.
pub fn parse_lacking(text: &str) -> Result<(String, String), String> {
    let (name, why) = text.split_once('=').unwrap_or((text, "left out"));
    if !Unmeasured.is_known(name) {
        return Err(format!(
            "hindsight doctor has no probe {name:?} (--list shows them)"
        ));
    }
    Ok((name.to_owned(), why.to_owned()))
}

/// Why this host's KVM cannot be used at all; `None` when it can.
pub fn kvm_problem() -> Option<String> {
    kvm::open_device().err().map(|error| error.to_string())
}

/// The reason why needs are unmet, each asked only once.
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

    struct Counting(Cell<u32>);

    impl Capabilities for Counting {
        fn unmet(&self, need: &str) -> Option<String> {
            self.0.set(self.0.get() + 1);
            (need == "gd").then(|| "no #DB".to_owned())
        }
    }

    #[test]
    fn unmet_need_is_named_with_its_reason_and_asked_once() {
        let host = Counting(Cell::new(0));
        let mut cache = NeedCache::new(&host);
        let needs = ["nmi", "gd", "smi"];
        let first = cache.first_unmet(needs.into_iter());
        assert_eq!(first.as_deref(), Some("this KVM: gd: no #DB"));
        assert_eq!(cache.first_unmet(needs.into_iter()), first);
        assert_eq!(host.0.get(), 2);
    }

    #[test]
    fn only_a_finding_that_works_confirms_a_need() {
        let finding = |verdict| Finding {
            verdict,
            detail: "internal error".to_owned(),
        };
        assert_eq!(unconfirmed(&finding(ProbeVerdict::Works)), None);
        let reason = Some("internal error".to_owned());
        assert_eq!(unconfirmed(&finding(ProbeVerdict::Broken)), reason);
        assert_eq!(unconfirmed(&finding(ProbeVerdict::Differs)), reason);
        assert_eq!(unconfirmed(&finding(ProbeVerdict::Absent)), reason);
    }

    #[test]
    fn what_is_said_to_be_lacking_is_not_measured() {
        let lacking = [
            parse_lacking("gd=it crashes").unwrap(),
            parse_lacking("smi").unwrap(),
        ];
        let host = Counting(Cell::new(0));
        let lacking = Lacking::new(&lacking, &host);
        assert_eq!(lacking.unmet("gd").as_deref(), Some("it crashes"));
        assert_eq!(lacking.unmet("smi").as_deref(), Some("left out"));
        assert_eq!((host.0.get(), lacking.unmet("nmi")), (0, None));
        assert_eq!(host.0.get(), 1);
        assert_eq!(
            parse_lacking("gb=x").unwrap_err(),
            "hindsight doctor has no probe \"gb\" (--list shows them)"
        );
    }

    #[test]
    fn need_that_no_probe_measures_is_unknown() {
        assert!(Unmeasured.is_known("int3-cpl0"));
        assert!(!Unmeasured.is_known("int3-cpl1"));
    }
}
