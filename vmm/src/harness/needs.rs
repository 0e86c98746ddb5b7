//! What a case needs of the host, and whether it is there.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::ErrorKind;

/// Answers which needs of the cases this host meets.
pub trait Capabilities {
    /// Whether `need` is the name of something that can be measured.
    fn is_known(&self, need: &str) -> bool {
        PROBES.contains(&need)
    }

    /// Why `need` is not met here; `None` when it is.
    fn unmet(&self, need: &str) -> Option<String>;
}

/// The names of doctor's probes.
pub const PROBES: &[&str] = &[
    "msr-exit",
    "rdpmc",
    "step-cpl0",
    "step-cpl3",
    "step-hides-tf",
    "hostbp-exec-cpl0",
    "hostbp-exec-cpl3",
    "hostbp-data",
    "hostbp-io",
    "guestbp-exec-cpl0",
    "guestbp-exec-cpl3",
    "guestbp-data",
    "guestbp-io",
    "gd",
    "tf-cpl0",
    "tf-cpl3",
    "host-int3-cpl0",
    "host-int3-cpl3",
    "int3-cpl0",
    "int1-cpl0",
    "intn-cpl0",
    "int3-cpl3",
    "intn-cpl3",
    "syscall-cpl3",
    "iretq-cpl3",
    "exceptions",
    "inject-db",
    "inject-bp",
    "events-db",
    "events-pf",
    "events-gp",
    "nmi",
    "interrupt",
    "irq-window-cpl0",
    "irq-window-cpl3",
    "tsc-offset",
    "tsc-msr",
    "tsd-cpl3",
    "tsc-aux",
    "rdtscp-cpl0",
    "tsc-deadline-exit",
    "sse-cpl0",
    "avx-cpl0",
    "bmi-cpl0",
    "popcnt-cpl0",
    "xsave-cpl0",
    "hlt-exit",
    "io-exit",
    "mmio-exit",
    "cpuid",
    "smi",
    "prefault",
    "sync-regs",
    "speed-cpl0",
    "speed-cpl3",
];

/// Capabilities where nothing was measured: every need counts as met.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unmeasured;

impl Capabilities for Unmeasured {
    fn unmet(&self, _need: &str) -> Option<String> {
        None
    }
}

/// The host's KVM.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostKvm;

impl Capabilities for HostKvm {
    fn unmet(&self, _need: &str) -> Option<String> {
        None
    }
}

/// Why this host's KVM cannot be used at all; `None` when it can.
pub fn kvm_problem() -> Option<String> {
    let error = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .err()?;
    Some(match error.kind() {
        ErrorKind::NotFound => "/dev/kvm is missing".to_owned(),
        ErrorKind::PermissionDenied => "no permission to open /dev/kvm".to_owned(),
        _ => format!("cannot open /dev/kvm: {error}"),
    })
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
    fn need_that_no_probe_measures_is_unknown() {
        assert!(Unmeasured.is_known("int3-cpl0"));
        assert!(!Unmeasured.is_known("int3-cpl1"));
    }
}
