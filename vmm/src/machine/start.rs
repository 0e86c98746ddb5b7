//! Which engine a machine starts in, and by what policy it may change.

use crate::kvm::host_support::HostKvm;
use crate::kvm::{self, KvmError};
use crate::probe::host::measure_kvm;
use crate::vcpu::engine::policy::{
    Engine, EngineChoice, EngineDecision, EngineDemand, EnginePolicy,
};

/// What was decided for a machine before it starts.
#[derive(Debug)]
pub struct StartDecision {
    /// The engine it starts in.
    pub decision: EngineDecision,
    /// KVM, where it is needed.
    pub host: Option<kvm::KvmDevice>,
    /// The policy by which it changes engines. `None`: it never does.
    pub policy: Option<EnginePolicy>,
}

/// Decides for this host, and opens KVM if it is needed.
///
/// # Errors
///
/// When KVM is requested and cannot be used.
pub fn decide(choice: EngineChoice) -> Result<StartDecision, KvmError> {
    let policy = match choice {
        // The choice is made: a host without KVM, or with a slow one, is not measured.
        EngineChoice::Only(_) => EnginePolicy {
            choice,
            host: HostKvm::usable(),
        },
        EngineChoice::Auto => auto_policy(),
    };
    let decision = policy.decide(EngineDemand::default());
    let host = match decision.engine {
        Engine::Kvm => Some(kvm::KvmDevice::open()?),
        Engine::Interp => None,
    };
    let changes = choice == EngineChoice::Auto && host.is_some();
    Ok(StartDecision {
        decision,
        host,
        policy: changes.then_some(policy),
    })
}

/// The policy of `--engine auto` on this host.
pub fn auto_policy() -> EnginePolicy {
    EnginePolicy {
        choice: EngineChoice::Auto,
        host: measure_kvm(),
    }
}

/// For tests of the engine change itself: KVM, whatever it is, and the interpreter in turn.
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
            because: "its changes are tested".to_owned(),
        },
        host: Some(kvm::KvmDevice::open()?),
        policy: Some(policy),
    })
}
