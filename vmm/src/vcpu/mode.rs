//! Which way the guest runs: natively under KVM, or observed in the interpreter.
//!
//! [`choose`] is the whole rule, and pure: (what the user wants) x (what is armed) x (what this
//! host's KVM was measured to do). [`HostKvm::measure`] asks doctor; [`super::switch`] applies the
//! rule to a machine while it runs.

use std::fmt;

use hindsight_cpu::armed::Armed;

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
    Native {
        /// What of [`Armed`] it does by itself, as exactly as the interpreter.
        does: Armed,
        /// It tells us of MOV DR before it is executed, where we ask for it.
        detects: bool,
    },
    /// It does not: the probe that showed it, with its finding.
    EmulatesRing0(String),
    /// It shows guests another time than their processor's: the probe, with its finding.
    OtherTime(String),
}

/// Probes that a KVM fails when it emulates ring 0 instead of running it: INT n, and SSE.
const RING0_PROBES: [&str; 2] = ["intn-cpl0", "sse-cpl0"];
/// The probe that shows whether a KVM tells us of MOV DR.
const DETECTS: &str = "gd-host";
/// Probes of what a guest does with debug registers that it sets natively.
const DEBUG_PROBES: [&str; 4] = [
    "guestbp-exec-cpl0",
    "guestbp-exec-cpl3",
    "gd",
    "guestbp-data",
];
/// What [`DEBUG_PROBES`] are about. No KVM looks for breakpoints on ports; where an access exits, we
/// do.
const DEBUG: Armed = Armed::CODE_BREAKPOINT
    .union(Armed::DATA_BREAKPOINT)
    .union(Armed::GENERAL_DETECT);
/// Probes that a KVM fails under which RDTSC or RDTSCP is the host's, whatever the guest's MSRs say.
const TIME_PROBES: [&str; 3] = ["tsc-offset", "tsd-cpl3", "tsc-aux"];

impl HostKvm {
    /// Measures the host, or takes what was measured since it booted.
    pub fn measure() -> Self {
        if let Err(error) = kvm::open_device() {
            return Self::Unusable(error.to_string());
        }
        let ring0 = RING0_PROBES.map(|probe| (probe, Self::EmulatesRing0 as fn(_) -> _));
        let time = TIME_PROBES.map(|probe| (probe, Self::OtherTime as fn(_) -> _));
        for (probe, failed) in ring0.into_iter().chain(time) {
            match doctor::unmet(probe) {
                Ok(None) => {}
                Ok(Some(found)) => return failed(format!("{probe}: {found}")),
                Err(error) => return Self::Unusable(error.to_string()),
            }
        }
        match Self::measure_debug() {
            Ok((does, detects)) => Self::Native { does, detects },
            Err(error) => Self::Unusable(error.to_string()),
        }
    }

    /// What this KVM does of a guest's breakpoints, and whether it tells of MOV DR. Where it does not, a native
    /// guest sets them unseen; one that has set them in the interpreter stays there.
    fn measure_debug() -> Result<(Armed, bool), doctor::DoctorError> {
        let detects = doctor::unmet(DETECTS)?.is_none();
        for probe in DEBUG_PROBES {
            if doctor::unmet(probe)?.is_some() {
                // A guest that has some of them can arm the others unseen: it gets none.
                return Ok((Armed::empty(), detects));
            }
        }
        Ok((DEBUG, detects))
    }

    /// A KVM that runs ring 0 natively, of which nothing else is known.
    pub const fn native() -> Self {
        Self::Native {
            does: DEBUG,
            detects: false,
        }
    }
}

/// What must be seen of what the guest executes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// What the guest has armed, on any processor.
    pub armed: Armed,
    /// Somebody outside of the guest wants every instruction seen.
    pub held: bool,
    /// What a debugger wants.
    pub debugger: Debugger,
}

/// What a debugger wants of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Debugger {
    /// Nothing that the guest must stop for.
    #[default]
    Nothing,
    /// Breakpoints in debug registers, as long as the guest leaves them alone.
    Slots,
    /// What KVM cannot do.
    Beyond,
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
pub fn choose(wanted: Wanted, demand: Demand, host: &HostKvm) -> Choice {
    let (engine, because) = match (wanted, host) {
        (Wanted::Only(engine), _) => (engine, "it was asked for".to_owned()),
        (Wanted::Auto, HostKvm::Unusable(why)) => (Engine::Interp, why.clone()),
        (Wanted::Auto, HostKvm::EmulatesRing0(why)) => (
            Engine::Interp,
            format!("this host's KVM emulates ring 0 ({why})"),
        ),
        (Wanted::Auto, HostKvm::OtherTime(why)) => (
            Engine::Interp,
            format!("this host's KVM does not let a guest have its own time ({why})"),
        ),
        (Wanted::Auto, HostKvm::Native { does, .. }) => {
            let lacking = demand.armed.difference(*does);
            if !lacking.is_empty() {
                (Engine::Interp, format!("{lacking} armed"))
            } else if demand.held {
                (Engine::Interp, "observed from outside".to_owned())
            } else if demand.debugger == Debugger::Beyond {
                let because = "a debugger wants what KVM does not do";
                (Engine::Interp, because.to_owned())
            } else if demand.debugger == Debugger::Slots && demand.armed.intersects(DEBUG) {
                let because = "the guest and a debugger have breakpoints";
                (Engine::Interp, because.to_owned())
            } else if demand.armed.is_empty() {
                (
                    Engine::Kvm,
                    "this host's KVM runs ring 0 natively, and nothing is armed".to_owned(),
                )
            } else {
                let armed = demand.armed;
                (Engine::Kvm, format!("this host's KVM does {armed}"))
            }
        }
    };
    Choice { engine, because }
}

/// What was decided for a machine.
#[derive(Debug)]
pub struct Decision {
    /// What it starts in.
    pub choice: Choice,
    /// KVM, where it is needed.
    pub host: Option<kvm::Host>,
    /// By what it changes while it runs. `None`: it never does.
    pub rule: Option<Rule>,
}

/// [`choose`], with all but the demand known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// What the user wants.
    pub wanted: Wanted,
    /// The host's KVM.
    pub host: HostKvm,
}

impl Rule {
    /// The rule of `--engine auto` on this host.
    pub fn of_host() -> Self {
        Self {
            wanted: Wanted::Auto,
            host: HostKvm::measure(),
        }
    }

    /// Whether MOV DR is to be seen before it is executed: KVM tells of it, and the answer may be
    /// the other engine.
    pub const fn detects(&self) -> bool {
        matches!(self.host, HostKvm::Native { detects: true, .. })
    }

    /// The choice for a demand.
    pub fn choose(&self, demand: Demand) -> Choice {
        choose(self.wanted, demand, &self.host)
    }
}

/// Chooses for this host, opening KVM if it is needed.
///
/// # Errors
///
/// When KVM is asked for and cannot be used.
pub fn decide(wanted: Wanted) -> Result<Decision, KvmError> {
    let rule = match wanted {
        // Nothing to measure: a host without KVM, or with a slow one, is not asked.
        Wanted::Only(_) => Rule {
            wanted,
            host: HostKvm::native(),
        },
        Wanted::Auto => Rule::of_host(),
    };
    let choice = rule.choose(Demand::default());
    let host = match choice.engine {
        Engine::Kvm => Some(kvm::Host::open()?),
        Engine::Interp => None,
    };
    let changes = wanted == Wanted::Auto && host.is_some();
    Ok(Decision {
        choice,
        host,
        rule: changes.then_some(rule),
    })
}

/// For tests of the change itself: KVM, whatever it is, and the interpreter in turn.
///
/// # Errors
///
/// When KVM cannot be used.
pub fn decide_both() -> Result<Decision, KvmError> {
    let rule = Rule {
        wanted: Wanted::Auto,
        host: HostKvm::native(),
    };
    Ok(Decision {
        choice: Choice {
            engine: Engine::Kvm,
            because: "its changes are tested".to_owned(),
        },
        host: Some(kvm::Host::open()?),
        rule: Some(rule),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Demand = Demand {
        armed: Armed::empty(),
        held: false,
        debugger: Debugger::Nothing,
    };

    fn armed(armed: Armed) -> Demand {
        Demand { armed, ..IDLE }
    }

    fn auto(demand: Demand) -> Engine {
        choose(Wanted::Auto, demand, &HostKvm::native()).engine
    }

    #[test]
    fn auto_prefers_a_kvm_that_runs_ring_0() {
        assert_eq!(auto(IDLE), Engine::Kvm);
    }

    #[test]
    fn auto_interprets_exactly_while_something_is_armed_that_kvm_lacks() {
        for one in Armed::all().iter() {
            let HostKvm::Native { does, .. } = HostKvm::native() else {
                panic!()
            };
            let expected = if does.contains(one) {
                Engine::Kvm
            } else {
                Engine::Interp
            };
            assert_eq!(auto(armed(one)), expected, "{one}");
            let choice = choose(Wanted::Auto, armed(one), &HostKvm::native());
            assert!(choice.because.contains(&one.to_string()), "{choice:?}");
        }
        for lacking in [Armed::LBR, Armed::BTS, Armed::PEBS, Armed::IO_BREAKPOINT] {
            assert_eq!(auto(armed(lacking)), Engine::Interp, "{lacking}");
            let both = lacking | Armed::CODE_BREAKPOINT;
            assert_eq!(auto(armed(both)), Engine::Interp, "{both}");
        }
    }

    #[test]
    fn a_kvm_that_lacks_breakpoints_gets_none() {
        let lacking = HostKvm::Native {
            does: Armed::empty(),
            detects: true,
        };
        for one in DEBUG.iter() {
            let choice = choose(Wanted::Auto, armed(one), &lacking);
            assert_eq!(choice.engine, Engine::Interp, "{one}");
        }
        assert_eq!(
            choose(Wanted::Auto, IDLE, &lacking).engine,
            Engine::Kvm,
            "what is not armed does not matter"
        );
    }

    #[test]
    fn auto_interprets_what_somebody_observes() {
        assert_eq!(auto(Demand { held: true, ..IDLE }), Engine::Interp);
    }

    #[test]
    fn debugger_gets_the_interpreter_for_what_kvm_does_not_do() {
        let demand = |debugger, armed| Demand {
            armed,
            debugger,
            ..IDLE
        };
        let none = Armed::empty();
        assert_eq!(auto(demand(Debugger::Slots, none)), Engine::Kvm);
        assert_eq!(auto(demand(Debugger::Beyond, none)), Engine::Interp);
        for own in DEBUG.iter() {
            assert_eq!(auto(demand(Debugger::Nothing, own)), Engine::Kvm, "{own}");
            assert_eq!(auto(demand(Debugger::Slots, own)), Engine::Interp, "{own}");
        }
    }

    #[test]
    fn auto_says_why_it_interprets() {
        for host in [
            HostKvm::Unusable("/dev/kvm does not exist".to_owned()),
            HostKvm::EmulatesRing0("intn-cpl0: internal error".to_owned()),
            HostKvm::OtherTime("tsc-offset: ignored".to_owned()),
        ] {
            let choice = choose(Wanted::Auto, IDLE, &host);
            assert_eq!(choice.engine, Engine::Interp);
            let (HostKvm::Unusable(why) | HostKvm::EmulatesRing0(why) | HostKvm::OtherTime(why)) =
                host
            else {
                panic!()
            };
            assert!(choice.because.contains(&why));
        }
    }

    #[test]
    fn what_the_user_asks_for_is_not_overruled() {
        let host = HostKvm::EmulatesRing0(String::new());
        for engine in [Engine::Kvm, Engine::Interp] {
            let choice = choose(Wanted::Only(engine), armed(Armed::LBR), &host);
            assert_eq!(choice.engine, engine);
        }
    }
}
