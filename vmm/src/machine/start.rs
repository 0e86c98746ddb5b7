//! Chooses the engine in which a machine starts, and the policy by which it may change engines.

use hindsight_cpu::armed::Armed;

use crate::exactness::{MeasureMode, Verdicts, verdicts_for_start};
use crate::kvm::exactness::{FacilityGroup, GroupAction};
use crate::kvm::host_support::{GUEST_BREAKPOINTS, HostKvm};
use crate::kvm::{self, KvmError};
use crate::probe::host::measure_kvm;
use crate::vcpu::engine::policy::{
    Engine, EngineChoice, EngineDecision, EngineDemand, EnginePolicy, Preference,
};

/// The engine decision for a machine before it starts.
#[derive(Debug)]
pub struct StartDecision {
    /// The engine it starts in.
    pub decision: EngineDecision,
    /// KVM, if the machine uses it.
    pub host: Option<kvm::KvmDevice>,
    /// The policy by which it changes engines; `None` if it never does.
    pub policy: Option<EnginePolicy>,
    /// The deviations of this host's KVM that [`Preference::Speed`] accepts, each with its reason.
    pub accepted: Vec<(FacilityGroup, String)>,
}

impl StartDecision {
    /// Decides by a policy, and opens KVM if the machine uses it.
    fn by(auto: AutoPolicy) -> Result<Self, KvmError> {
        let AutoPolicy { policy, accepted } = auto;
        let decision = policy.decide(EngineDemand::default());
        let host = match decision.engine {
            Engine::Kvm => Some(kvm::KvmDevice::open()?),
            Engine::Interp => None,
        };
        let changes = policy.choice == EngineChoice::Auto && host.is_some();
        Ok(Self {
            decision,
            accepted: if host.is_some() { accepted } else { Vec::new() },
            host,
            policy: changes.then_some(policy),
        })
    }
}

/// Decides for this host, and opens KVM if the machine uses it.
///
/// # Errors
///
/// When the user requires KVM and it cannot be used.
pub fn decide(choice: EngineChoice, preference: Preference) -> Result<StartDecision, KvmError> {
    StartDecision::by(match choice {
        // The user chose: skip the probes, which take long on a host with a slow KVM.
        EngineChoice::Only(_) => AutoPolicy {
            policy: EnginePolicy {
                choice,
                host: HostKvm::usable(),
            },
            accepted: Vec::new(),
        },
        EngineChoice::Auto => auto_policy(preference),
    })
}

/// The policy of `--engine auto` on this host, and the deviations that it accepts.
#[derive(Debug)]
pub struct AutoPolicy {
    /// The policy.
    pub policy: EnginePolicy,
    /// Accepted deviations, each with its reason.
    pub accepted: Vec<(FacilityGroup, String)>,
}

/// The policy of `--engine auto` on this host.
pub fn auto_policy(preference: Preference) -> AutoPolicy {
    let mut host = measure_kvm();
    let mut accepted = Vec::new();
    if matches!(host, HostKvm::Usable { .. }) {
        accepted = apply_verdicts(&mut host, &verdicts_for_start(), preference);
    }
    AutoPolicy {
        policy: EnginePolicy {
            choice: EngineChoice::Auto,
            host,
        },
        accepted,
    }
}

/// Adds to `host` what the verdicts say of it. Returns the deviations that `preference` accepts.
fn apply_verdicts(
    host: &mut HostKvm,
    verdicts: &Verdicts,
    preference: Preference,
) -> Vec<(FacilityGroup, String)> {
    let HostKvm::Usable {
        exact, deviations, ..
    } = host
    else {
        return Vec::new();
    };
    let found = verdicts.deviations();
    for (group, armed) in [
        (FacilityGroup::DebugRegisters, GUEST_BREAKPOINTS),
        (FacilityGroup::SingleStep, Armed::SINGLE_STEP),
    ] {
        let accepted = preference == Preference::Speed
            && matches!(verdicts.action(group), GroupAction::Interpret(_));
        if accepted || verdicts.action(group) == GroupAction::Stay {
            exact.insert(armed);
        }
    }
    match preference {
        Preference::Exactness => {
            *deviations = found;
            Vec::new()
        }
        Preference::Speed => found,
    }
}

/// The decision for a machine that is measured: it starts in KVM, whatever the verdicts are.
///
/// # Errors
///
/// When KVM cannot be used.
pub fn decide_for_measurement(mode: MeasureMode) -> Result<StartDecision, KvmError> {
    let mut host = measure_kvm();
    if let HostKvm::Usable { exact, .. } = &mut host {
        *exact = match mode {
            MeasureMode::Alone => GUEST_BREAKPOINTS | Armed::SINGLE_STEP,
            MeasureMode::Moving => Armed::empty(),
        };
    }
    StartDecision::by(AutoPolicy {
        policy: EnginePolicy {
            choice: EngineChoice::Auto,
            host,
        },
        accepted: Vec::new(),
    })
}

/// For tests of engine changes: starts in KVM, whatever the probes would find.
///
/// # Errors
///
/// When KVM cannot be used.
pub fn decide_both() -> Result<StartDecision, KvmError> {
    let policy = EnginePolicy {
        choice: EngineChoice::Auto,
        host: HostKvm::usable(),
    };
    Ok(StartDecision {
        decision: EngineDecision {
            engine: Engine::Kvm,
            because: "--switch-every tests engine changes".to_owned(),
        },
        host: Some(kvm::KvmDevice::open()?),
        policy: Some(policy),
        accepted: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::exactness::{Exactness, GroupVerdict};

    fn measured() -> HostKvm {
        HostKvm::Usable {
            exact: Armed::empty(),
            detects_mov_dr: true,
            deviations: Vec::new(),
        }
    }

    fn applied(verdicts: &Verdicts, preference: Preference) -> (Armed, usize, usize) {
        let mut host = measured();
        let accepted = apply_verdicts(&mut host, verdicts, preference);
        let HostKvm::Usable {
            exact, deviations, ..
        } = host
        else {
            panic!("the host is usable")
        };
        (exact, deviations.len(), accepted.len())
    }

    fn exact_but(group: FacilityGroup, verdict: GroupVerdict) -> Verdicts {
        let exact = GroupVerdict {
            alone: Exactness::Exact,
            moving: Exactness::Exact,
        };
        let mut verdicts = Verdicts::default();
        for group in FacilityGroup::ALL {
            verdicts.0.insert(group, exact.clone());
        }
        verdicts.0.insert(group, verdict);
        verdicts
    }

    #[test]
    fn exact_kvm_handles_breakpoints_and_steps_by_itself() {
        let verdicts = exact_but(
            FacilityGroup::Smm,
            GroupVerdict {
                alone: Exactness::Exact,
                moving: Exactness::Unmeasured,
            },
        );
        let both = GUEST_BREAKPOINTS | Armed::SINGLE_STEP;
        assert_eq!(applied(&verdicts, Preference::Exactness), (both, 0, 0));
    }

    #[test]
    fn kvm_that_is_exact_by_moving_hands_over_what_the_guest_arms() {
        let verdicts = exact_but(
            FacilityGroup::SingleStep,
            GroupVerdict {
                alone: Exactness::Inexact("x".to_owned()),
                moving: Exactness::Exact,
            },
        );
        for preference in [Preference::Exactness, Preference::Speed] {
            assert_eq!(applied(&verdicts, preference), (GUEST_BREAKPOINTS, 0, 0));
        }
    }

    #[test]
    fn speed_accepts_the_deviations_that_exactness_refuses() {
        let verdicts = exact_but(
            FacilityGroup::SingleStep,
            GroupVerdict {
                alone: Exactness::Inexact("x".to_owned()),
                moving: Exactness::Inexact("y".to_owned()),
            },
        );
        let exactness = applied(&verdicts, Preference::Exactness);
        assert_eq!(exactness, (GUEST_BREAKPOINTS, 1, 0));
        let both = GUEST_BREAKPOINTS | Armed::SINGLE_STEP;
        assert_eq!(applied(&verdicts, Preference::Speed), (both, 0, 1));
    }
}
