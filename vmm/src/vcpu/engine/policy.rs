//! Which engine runs the guest: KVM or the interpreter.
//!
//! [`decide`] is the whole policy, and pure: (the user's choice) x (what is armed) x (what this host's
//! KVM was measured to do, [`HostKvm`]). [`super::EngineSwitch`] applies it to a running machine.

use hindsight_cpu::armed::Armed;
pub use hindsight_run_control::Engine;

use crate::kvm::exactness::{FacilityGroup, UNMEASURED};
use crate::kvm::host_support::{GUEST_BREAKPOINTS, HostKvm};

/// What the user chose by `--engine`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// This engine, whatever the host.
    Only(Engine),
    /// The best for this host.
    #[default]
    Auto,
}

/// What `--engine auto` prefers on a KVM that is not exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preference {
    /// Exact behaviour: the guest runs in the interpreter.
    #[default]
    Exactness,
    /// Speed: the guest runs under KVM, with the deviations of that KVM.
    Speed,
}

/// Who needs to observe the guest's instructions, and for what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineDemand {
    /// What the guest has armed, on any vCPU.
    pub armed: Armed,
    /// A test requires the interpreter.
    pub forced: bool,
    /// What a debugger requires.
    pub debugger: DebuggerDemand,
}

/// What a debugger requires of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DebuggerDemand {
    /// Nothing.
    #[default]
    Nothing,
    /// Breakpoints in debug registers, as long as the guest leaves them alone.
    HwBreakpoints,
    /// Something that KVM cannot do.
    BeyondKvm,
}

/// An engine, and why it was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineDecision {
    /// The engine.
    pub engine: Engine,
    /// One clause for the user.
    pub because: String,
}

/// The policy: the engine for a user's choice, a demand and a host.
pub fn decide(choice: EngineChoice, demand: EngineDemand, host: &HostKvm) -> EngineDecision {
    let (engine, because) = match (choice, host) {
        (EngineChoice::Only(engine), _) => (engine, "it was asked for".to_owned()),
        (EngineChoice::Auto, HostKvm::Unusable(why)) => (Engine::Interp, why.clone()),
        (EngineChoice::Auto, HostKvm::EmulatesRing0(why)) => (
            Engine::Interp,
            format!("this host's KVM emulates ring 0 ({why})"),
        ),
        (EngineChoice::Auto, HostKvm::ForeignTime(why)) => (
            Engine::Interp,
            format!("this host's KVM does not let a guest have its own time ({why})"),
        ),
        (EngineChoice::Auto, HostKvm::Usable { deviations, .. }) if !deviations.is_empty() => {
            (Engine::Interp, describe_deviations(deviations))
        }
        (EngineChoice::Auto, HostKvm::Usable { exact, .. }) => {
            let lacking = demand.armed.difference(*exact);
            if !lacking.is_empty() {
                (Engine::Interp, format!("{lacking} armed"))
            } else if demand.forced {
                (Engine::Interp, "a test requires the interpreter".to_owned())
            } else if demand.debugger == DebuggerDemand::BeyondKvm {
                let because = "the debugger requires what KVM cannot do";
                (Engine::Interp, because.to_owned())
            } else if demand.debugger == DebuggerDemand::HwBreakpoints
                && demand.armed.intersects(GUEST_BREAKPOINTS)
            {
                let because = "the guest and a debugger have breakpoints";
                (Engine::Interp, because.to_owned())
            } else if demand.armed.is_empty() {
                (
                    Engine::Kvm,
                    "this host's KVM runs ring 0 natively, and nothing is armed".to_owned(),
                )
            } else {
                let armed = demand.armed;
                (
                    Engine::Kvm,
                    format!("this host's KVM handles {armed} exactly"),
                )
            }
        }
    };
    EngineDecision { engine, because }
}

/// One clause about the groups in which a KVM deviates, of which there is at least one.
fn describe_deviations(deviations: &[(FacilityGroup, String)]) -> String {
    match deviations {
        [] => "this host's KVM is exact".to_owned(),
        [(_, reason), ..] if reason == UNMEASURED => {
            "this host's KVM is not known to be exact; `hindsight doctor` measures it".to_owned()
        }
        [(group, reason), ..] => format!("this host's KVM is not exact: {group}: {reason}"),
    }
}

/// [`decide`] with all but the demand known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnginePolicy {
    /// What the user chose.
    pub choice: EngineChoice,
    /// The host's KVM.
    pub host: HostKvm,
}

impl EnginePolicy {
    /// Whether to intercept MOV DR by general detect, so that KVM exits before it executes and the
    /// machine can change engines first.
    pub const fn intercepts_mov_dr(&self) -> bool {
        matches!(
            self.host,
            HostKvm::Usable {
                detects_mov_dr: true,
                ..
            }
        )
    }

    /// The engine for a demand.
    pub fn decide(&self, demand: EngineDemand) -> EngineDecision {
        decide(self.choice, demand, &self.host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: EngineDemand = EngineDemand {
        armed: Armed::empty(),
        forced: false,
        debugger: DebuggerDemand::Nothing,
    };

    fn armed(armed: Armed) -> EngineDemand {
        EngineDemand { armed, ..IDLE }
    }

    fn auto(demand: EngineDemand) -> Engine {
        decide(EngineChoice::Auto, demand, &HostKvm::usable()).engine
    }

    #[test]
    fn auto_prefers_a_kvm_that_runs_ring_0() {
        assert_eq!(auto(IDLE), Engine::Kvm);
    }

    #[test]
    fn auto_interprets_exactly_while_something_is_armed_that_kvm_lacks() {
        for one in Armed::all().iter() {
            let HostKvm::Usable { exact, .. } = HostKvm::usable() else {
                panic!()
            };
            let expected = if exact.contains(one) {
                Engine::Kvm
            } else {
                Engine::Interp
            };
            assert_eq!(auto(armed(one)), expected, "{one}");
            let decision = decide(EngineChoice::Auto, armed(one), &HostKvm::usable());
            assert!(decision.because.contains(&one.to_string()), "{decision:?}");
        }
        for lacking in [Armed::LBR, Armed::BTS, Armed::PEBS, Armed::IO_BREAKPOINT] {
            assert_eq!(auto(armed(lacking)), Engine::Interp, "{lacking}");
            let both = lacking | Armed::CODE_BREAKPOINT;
            assert_eq!(auto(armed(both)), Engine::Interp, "{both}");
        }
    }

    #[test]
    fn kvm_without_exact_breakpoints_runs_no_guest_that_arms_one() {
        let lacking = HostKvm::Usable {
            exact: Armed::empty(),
            detects_mov_dr: true,
            deviations: Vec::new(),
        };
        for one in GUEST_BREAKPOINTS.iter() {
            let decision = decide(EngineChoice::Auto, armed(one), &lacking);
            assert_eq!(decision.engine, Engine::Interp, "{one}");
        }
        assert_eq!(
            decide(EngineChoice::Auto, IDLE, &lacking).engine,
            Engine::Kvm,
            "what is not armed does not matter"
        );
    }

    #[test]
    fn auto_interprets_if_the_interpreter_is_forced() {
        assert_eq!(
            auto(EngineDemand {
                forced: true,
                ..IDLE
            }),
            Engine::Interp
        );
    }

    #[test]
    fn debugger_gets_the_interpreter_for_what_kvm_does_not_do() {
        let demand = |debugger, armed| EngineDemand {
            armed,
            debugger,
            ..IDLE
        };
        let none = Armed::empty();
        assert_eq!(
            auto(demand(DebuggerDemand::HwBreakpoints, none)),
            Engine::Kvm
        );
        assert_eq!(
            auto(demand(DebuggerDemand::BeyondKvm, none)),
            Engine::Interp
        );
        for own in GUEST_BREAKPOINTS.iter() {
            assert_eq!(
                auto(demand(DebuggerDemand::Nothing, own)),
                Engine::Kvm,
                "{own}"
            );
            assert_eq!(
                auto(demand(DebuggerDemand::HwBreakpoints, own)),
                Engine::Interp,
                "{own}"
            );
        }
    }

    #[test]
    fn kvm_with_deviations_is_not_used_and_the_first_is_named() {
        let host = |deviations| HostKvm::Usable {
            exact: Armed::all(),
            detects_mov_dr: true,
            deviations,
        };
        let deviations = vec![
            (FacilityGroup::SingleStep, "tf/hlt cpl=0: no #DB".to_owned()),
            (FacilityGroup::Time, UNMEASURED.to_owned()),
        ];
        let decision = decide(EngineChoice::Auto, IDLE, &host(deviations.clone()));
        assert_eq!(decision.engine, Engine::Interp);
        assert_eq!(
            decision.because,
            "this host's KVM is not exact: single-step: tf/hlt cpl=0: no #DB"
        );
        let unmeasured = decide(EngineChoice::Auto, IDLE, &host(deviations[1..].to_vec()));
        assert_eq!(unmeasured.engine, Engine::Interp);
        assert!(unmeasured.because.contains("hindsight doctor"));
        assert_eq!(
            decide(EngineChoice::Auto, IDLE, &host(Vec::new())).engine,
            Engine::Kvm
        );
    }

    #[test]
    fn auto_says_why_it_interprets() {
        for host in [
            HostKvm::Unusable("/dev/kvm does not exist".to_owned()),
            HostKvm::EmulatesRing0("intn-cpl0: internal error".to_owned()),
            HostKvm::ForeignTime("tsc-offset: ignored".to_owned()),
        ] {
            let decision = decide(EngineChoice::Auto, IDLE, &host);
            assert_eq!(decision.engine, Engine::Interp);
            let (HostKvm::Unusable(why) | HostKvm::EmulatesRing0(why) | HostKvm::ForeignTime(why)) =
                host
            else {
                panic!()
            };
            assert!(decision.because.contains(&why));
        }
    }

    #[test]
    fn what_the_user_asks_for_is_not_overruled() {
        let host = HostKvm::EmulatesRing0(String::new());
        for engine in [Engine::Kvm, Engine::Interp] {
            let decision = decide(EngineChoice::Only(engine), armed(Armed::LBR), &host);
            assert_eq!(decision.engine, engine);
        }
    }
}
