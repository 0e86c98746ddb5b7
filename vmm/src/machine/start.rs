//! Chooses the engine in which a machine starts, and the policy by which it may change engines.

use crate::kvm::host_support::HostKvm;
use crate::kvm::{self, KvmError};
use crate::probe::host::measure_kvm;
use crate::vcpu::engine::policy::{
    Engine, EngineChoice, EngineDecision, EngineDemand, EnginePolicy,
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
}

/// Decides for this host, and opens KVM if the machine uses it.
///
/// # Errors
///
/// When the user requires KVM and it cannot be used.
pub fn decide(choice: EngineChoice) -> Result<StartDecision, KvmError> {
    let policy = match choice {
        // The user chose: skip the probes, which take long on a host with a slow KVM.
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
    })
}
