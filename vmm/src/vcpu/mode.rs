//! Which way the guest runs: natively under KVM, or observed in the interpreter.
//!
//! [`choose`] is the whole rule, and pure: (what the user wants) x (what this host's KVM was
//! measured to do). [`HostKvm::measure`] asks doctor.

use std::fmt;

use crate::doctor;
use crate::kvm::{self, KvmError};

/// A way to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// KVM.
    Kvm,
    /// The interpreter.
    Interp,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Interp => "interp",
        })
    }
}

/// What the user wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wanted {
    /// This engine, whatever the host.
    Only(Engine),
    /// The best for this host.
    #[default]
    Auto,
}

/// What there is to know of the host's KVM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostKvm {
    /// It cannot be used: why.
    Unusable(String),
    /// It runs ring 0 as the processor does.
    Native,
    /// It does not: the probe that showed it, with its finding.
    EmulatesRing0(String),
}

/// Probes that a KVM fails when it emulates ring 0 instead of running it: INT n, and SSE.
const RING0_PROBES: [&str; 2] = ["intn-cpl0", "sse-cpl0"];

impl HostKvm {
    /// Measures the host, or takes what was measured since it booted.
    pub fn measure() -> Self {
        if let Err(error) = kvm::open_device() {
            return Self::Unusable(error.to_string());
        }
        for probe in RING0_PROBES {
            match doctor::unmet(probe) {
                Ok(None) => {}
                Ok(Some(found)) => return Self::EmulatesRing0(format!("{probe}: {found}")),
                Err(error) => return Self::Unusable(error.to_string()),
            }
        }
        Self::Native
    }
}

/// A choice, and why it was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The way to run.
    pub engine: Engine,
    /// One clause for the user.
    pub because: String,
}

/// The rule.
pub fn choose(wanted: Wanted, host: &HostKvm) -> Choice {
    let (engine, because) = match (wanted, host) {
        (Wanted::Only(engine), _) => (engine, "it was asked for".to_owned()),
        (Wanted::Auto, HostKvm::Native) => (
            Engine::Kvm,
            "this host's KVM runs ring 0 natively".to_owned(),
        ),
        (Wanted::Auto, HostKvm::Unusable(why)) => (Engine::Interp, why.clone()),
        (Wanted::Auto, HostKvm::EmulatesRing0(why)) => (
            Engine::Interp,
            format!("this host's KVM emulates ring 0 ({why})"),
        ),
    };
    Choice { engine, because }
}

/// Chooses for this host, opening KVM if it is needed.
///
/// # Errors
///
/// When KVM is asked for and cannot be used.
pub fn decide(wanted: Wanted) -> Result<(Choice, Option<kvm::Host>), KvmError> {
    let choice = match wanted {
        // Nothing to measure: a host without KVM, or with a slow one, is not asked.
        Wanted::Only(_) => choose(wanted, &HostKvm::Native),
        Wanted::Auto => choose(wanted, &HostKvm::measure()),
    };
    let host = match choice.engine {
        Engine::Kvm => Some(kvm::Host::open()?),
        Engine::Interp => None,
    };
    Ok((choice, host))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_prefers_a_kvm_that_runs_ring_0() {
        assert_eq!(choose(Wanted::Auto, &HostKvm::Native).engine, Engine::Kvm);
    }

    #[test]
    fn auto_says_why_it_interprets() {
        for host in [
            HostKvm::Unusable("/dev/kvm does not exist".to_owned()),
            HostKvm::EmulatesRing0("intn-cpl0: internal error".to_owned()),
        ] {
            let choice = choose(Wanted::Auto, &host);
            assert_eq!(choice.engine, Engine::Interp);
            let (HostKvm::Unusable(why) | HostKvm::EmulatesRing0(why)) = host else {
                panic!()
            };
            assert!(choice.because.contains(&why));
        }
    }

    #[test]
    fn what_the_user_asks_for_is_not_overruled() {
        let host = HostKvm::EmulatesRing0(String::new());
        for engine in [Engine::Kvm, Engine::Interp] {
            assert_eq!(choose(Wanted::Only(engine), &host).engine, engine);
        }
    }
}
