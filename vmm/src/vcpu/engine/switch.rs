//! A machine that changes its engine while it runs.
//!
//! [`EngineSwitch`] knows what the vCPUs have armed and asks the policy. Where the answer differs
//! from the current engine, it has [`VcpuControl`] bring all vCPUs to a checkpoint; each thread
//! then moves its vCPU's state and continues. The change into the interpreter is made at once,
//! since the next instruction must already be observed. The change back waits for a cooldown of at
//! least [`COOLDOWN`], so that a guest that arms and disarms in a loop does not change engines each
//! time.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hindsight_cpu::armed::Armed;

use super::policy::{DebuggerDemand, Engine, EngineDemand, EnginePolicy};
use crate::log_limit::LogLimit;
use crate::platform::TimerBell;
use crate::sync::lock;
use crate::vcpu::run_control::VcpuControl;

/// The shortest cooldown. Hosts where engine changes are slow have a longer one.
const COOLDOWN: Duration = Duration::from_millis(5);

/// The longest cooldown.
const COOLDOWN_MAX: Duration = Duration::from_secs(1);

/// The cooldown lasts at least as long as this many engine changes.
const COOLDOWN_SWITCHES: u32 = 20;

/// For tests: changes the engine repeatedly, whatever is armed (but never to a KVM that lacks what
/// is armed).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForcedSwitch {
    /// After this many exits of any vCPU, at least 1.
    Exits(u64),
    /// Periodically.
    Time(Duration),
}

/// Why a machine changes its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SwitchCause {
    /// A vCPU armed what KVM lacks.
    Armed { cpu: usize, armed: Armed },
    /// A debugger requires what KVM cannot do.
    Debugger,
    /// Nothing was armed for this long.
    CooledDown(Duration),
    /// [`ForcedSwitch`].
    Test,
}

impl fmt::Display for SwitchCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Armed { cpu, armed } => write!(f, "cpu {cpu} armed {armed}"),
            Self::Debugger => f.write_str("the debugger requires what KVM cannot do"),
            Self::CooledDown(time) => write!(f, "nothing armed for {} ms", time.as_millis()),
            Self::Test => f.write_str("test"),
        }
    }
}

/// How often a machine changed its engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwitchStats {
    /// Changes into the interpreter because the guest armed a facility.
    pub armed: u64,
    /// Changes into the interpreter for a debugger.
    pub debugged: u64,
    /// Changes back to KVM because no facility was armed any more.
    pub cooled_down: u64,
    /// Changes into either engine for a test.
    pub test: u64,
    /// Total time in which the boot processor did not run because of changes.
    pub total: Duration,
    /// The longest time in which the boot processor did not run because of one change.
    pub longest: Duration,
}

impl SwitchStats {
    /// The number of all changes.
    pub const fn count(&self) -> u64 {
        self.armed + self.debugged + self.cooled_down + self.test
    }

    /// How long nothing must be armed before the machine returns to KVM. A round trip takes some
    /// hundred microseconds, on a slow host much longer; this bounds its share of the time to a few
    /// percent.
    fn cooldown(&self) -> Duration {
        let count = u32::try_from(self.count()).unwrap_or(u32::MAX);
        let mean = self.total.checked_div(count).unwrap_or_default();
        mean.saturating_mul(COOLDOWN_SWITCHES)
            .clamp(COOLDOWN, COOLDOWN_MAX)
    }
}

impl fmt::Display for SwitchStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.count();
        write!(f, "engine changes {count}")?;
        let kinds = [
            (self.armed, "armed"),
            (self.debugged, "for a debugger"),
            (self.cooled_down, "disarmed"),
            (self.test, "for a test"),
        ];
        let counted = kinds.iter().filter(|(count, _)| *count != 0);
        for (index, (count, name)) in counted.enumerate() {
            let before = if index == 0 { ": " } else { ", " };
            write!(f, "{before}{name} {count}")?;
        }
        if let Some(mean) = self.total.as_micros().checked_div(count.into()) {
            let longest = self.longest.as_micros();
            write!(f, "; {mean} us on average, {longest} us at most")?;
        }
        Ok(())
    }
}

#[derive(Debug)]
struct SwitchState {
    /// What each vCPU has armed.
    armed: Vec<Armed>,
    /// A test requires the interpreter.
    forced: bool,
    /// What a debugger requires.
    debugger: DebuggerDemand,
    /// When to return to KVM, if nothing is armed until then.
    back_at: Option<Instant>,
    /// When [`ForcedSwitch::Time`] changes the engine next.
    test_at: Option<Instant>,
    cause: SwitchCause,
    stats: SwitchStats,
}

/// Which engine runs a machine, and why.
pub struct EngineSwitch<R> {
    /// `None`: it never changes.
    policy: Option<EnginePolicy>,
    forced_switch: Option<ForcedSwitch>,
    exits: AtomicU64,
    vcpus: Arc<VcpuControl<R>>,
    /// Wakes the thread that calls [`EngineSwitch::tick`].
    bell: Arc<TimerBell>,
    inner: Mutex<SwitchState>,
}

impl<R> fmt::Debug for EngineSwitch<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineSwitch")
            .field("policy", &self.policy)
            .finish_non_exhaustive()
    }
}

impl<R> EngineSwitch<R> {
    /// The switch of a machine of `cpus` vCPUs, which start with nothing armed.
    pub fn new(
        cpus: usize,
        policy: Option<EnginePolicy>,
        forced: Option<ForcedSwitch>,
        vcpus: Arc<VcpuControl<R>>,
        bell: Arc<TimerBell>,
    ) -> Self {
        let test_at = match forced {
            Some(ForcedSwitch::Time(period)) if policy.is_some() => {
                Instant::now().checked_add(period)
            }
            _ => None,
        };
        Self {
            policy,
            forced_switch: forced,
            exits: AtomicU64::new(0),
            vcpus,
            bell,
            inner: Mutex::new(SwitchState {
                armed: vec![Armed::empty(); cpus],
                forced: false,
                debugger: DebuggerDemand::default(),
                back_at: None,
                test_at,
                cause: SwitchCause::Test,
                stats: SwitchStats::default(),
            }),
        }
    }

    /// Whether the machine can change its engine at all.
    pub const fn can_change(&self) -> bool {
        self.policy.is_some()
    }

    /// Whether to intercept MOV DR: see [`EnginePolicy::intercepts_mov_dr`].
    pub fn intercepts_mov_dr(&self) -> bool {
        let policy = self.policy.as_ref();
        policy.is_some_and(EnginePolicy::intercepts_mov_dr)
    }

    /// How often the machine changed engines so far; `None` if it cannot.
    pub fn stats(&self) -> Option<SwitchStats> {
        self.can_change().then(|| lock(&self.inner).stats)
    }

    /// Sets what vCPU `cpu` has armed.
    pub fn arm(&self, cpu: usize, armed: Armed) {
        self.update(SwitchCause::Armed { cpu, armed }, |inner| {
            if let Some(known) = inner.armed.get_mut(cpu) {
                *known = armed;
            }
        });
    }

    /// Sets what a debugger requires.
    pub fn demand(&self, demand: DebuggerDemand) {
        self.update(SwitchCause::Debugger, |inner| inner.debugger = demand);
    }

    /// Changes what the engine must support, and follows the policy: into the interpreter at once,
    /// back to KVM after the cooldown.
    fn update(&self, cause: SwitchCause, change: impl FnOnce(&mut SwitchState)) {
        let Some(policy) = &self.policy else { return };
        let mut inner = lock(&self.inner);
        change(&mut inner);
        match (inner.required(policy), self.vcpus.engine()) {
            (Engine::Interp, now) => {
                inner.back_at = None;
                if now == Engine::Kvm {
                    inner.cause = cause;
                    self.vcpus.change(Engine::Interp);
                }
            }
            (Engine::Kvm, Engine::Interp) if inner.back_at.is_none() => {
                inner.back_at = Some(Instant::now() + inner.stats.cooldown());
                drop(inner);
                self.bell.ring();
            }
            (Engine::Kvm, _) => {}
        }
    }

    /// Makes the change that is due, if one is. Returns when to call again; `None`: only after the
    /// bell rings.
    pub fn tick(&self) -> Option<Duration> {
        let policy = self.policy.as_ref()?;
        let mut inner = lock(&self.inner);
        let now = Instant::now();
        if inner.test_at.is_some_and(|at| at <= now) {
            if let Some(ForcedSwitch::Time(period)) = self.forced_switch {
                inner.test_at = now.checked_add(period);
            }
            self.toggle(policy, &mut inner);
        }
        if inner.back_at.is_some_and(|at| at <= now) {
            inner.back_at = None;
            if inner.required(policy) == Engine::Kvm && self.vcpus.change(Engine::Kvm) {
                inner.cause = SwitchCause::CooledDown(inner.stats.cooldown());
            }
        }
        let next = [inner.back_at, inner.test_at].into_iter().flatten().min()?;
        Some(next.saturating_duration_since(now))
    }

    /// Counts an exit, or what would be an exit under KVM, for [`ForcedSwitch::Exits`].
    pub fn count_exit(&self) {
        let (Some(ForcedSwitch::Exits(every)), Some(policy)) = (self.forced_switch, &self.policy)
        else {
            return;
        };
        let exits = self.exits.fetch_add(1, Ordering::Relaxed) + 1;
        if exits.is_multiple_of(every.max(1)) {
            self.toggle(policy, &mut lock(&self.inner));
        }
    }

    /// Changes to the other engine for a test, if the policy allows it.
    fn toggle(&self, policy: &EnginePolicy, inner: &mut SwitchState) {
        inner.forced = self.vcpus.engine() == Engine::Kvm;
        if self.vcpus.change(inner.required(policy)) {
            inner.cause = SwitchCause::Test;
            inner.back_at = None;
        }
    }

    /// Counts a change that vCPU `cpu` has completed; it did not run for `took`.
    pub fn count_change(&self, cpu: usize, from: Engine, to: Engine, took: Duration) {
        let mut inner = lock(&self.inner);
        let cause = inner.cause;
        if cpu == 0 {
            let stats = &mut inner.stats;
            *match cause {
                SwitchCause::Armed { .. } => &mut stats.armed,
                SwitchCause::Debugger => &mut stats.debugged,
                SwitchCause::CooledDown(_) => &mut stats.cooled_down,
                SwitchCause::Test => &mut stats.test,
            } += 1;
            stats.total += took;
            stats.longest = stats.longest.max(took);
        }
        drop(inner);
        let us = took.as_micros();
        // The vCPUs change together: one message is enough.
        static LIMIT: LogLimit = LogLimit::new();
        if cpu == 0
            && let Some(suppressed) = LIMIT.admit()
        {
            tracing::info!("engine changes from {from} to {to}: {cause}{suppressed}");
        }
        tracing::trace!(target: "mode", "cpu {cpu} {from} -> {to}: {cause}, {us} us");
    }
}

impl SwitchState {
    fn required(&self, policy: &EnginePolicy) -> Engine {
        let armed = self.armed.iter().copied().collect();
        policy
            .decide(EngineDemand {
                armed,
                forced: self.forced,
                debugger: self.debugger,
            })
            .engine
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cooldown_grows_with_the_time_that_changes_take() {
        let stats = |armed, total| SwitchStats {
            armed,
            total: Duration::from_micros(total),
            ..SwitchStats::default()
        };
        let cooldown = |armed, total| stats(armed, total).cooldown().as_micros();
        assert_eq!(cooldown(0, 0), 5000);
        assert_eq!(cooldown(4, 400), 5000);
        assert_eq!(cooldown(4, 40_000), 200_000);
        assert_eq!(cooldown(1, 10_000_000), 1_000_000);
    }
}
