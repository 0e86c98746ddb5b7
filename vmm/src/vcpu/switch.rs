//! A machine that changes its engine while it runs.
//!
//! [`Modes`] knows what the processors have armed and asks the rule of [`super::mode`]; where that
//! says otherwise than before, it has [`Control`] bring all processors to a checkpoint. Each thread
//! then moves its processor's state, in [`Processor`], and goes on. The way into the interpreter is
//! taken at once, since the next instruction must already be seen; the way back only after
//! [`CALM`], so that a guest that arms and disarms in a loop does not move each time.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hindsight_cpu::armed::Armed;
use hindsight_interp::Vcpu;

use super::control::{Control, Doorbell, lock};
use super::guard::LoopGuard;
use super::history::History;
use super::mode::{Debugger, Demand, Engine, Rule};
use super::native::NativeVcpu;
use super::observed::ObservedVcpu;
use super::record::Recorder;
use super::report::LastState;
use super::stats::VcpuStats;
use crate::kvm::kick::Kicker;
use crate::kvm::vcpu::KvmVcpu;
use crate::machine::{Board, MachineError, Outcome};

/// How long nothing must have been armed at least before the machine goes back to KVM; on hosts where changes take
/// long, it is longer.
pub const CALM: Duration = Duration::from_millis(5);

/// And at most.
const CALM_MAX: Duration = Duration::from_secs(1);

/// Changes of engine that fit into this time.
const CALM_CHANGES: u32 = 20;

/// For tests: changes the engine again and again, whatever is armed (but never to a KVM that lacks
/// what is).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Every {
    /// After so many exits of any processor, 1 or more.
    Exits(u64),
    /// After so much time.
    Time(Duration),
}

/// Why a machine changes its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// A processor armed what KVM lacks.
    Armed { cpu: usize, armed: Armed },
    /// A debugger wants what KVM cannot do.
    Debugger,
    /// Nothing was armed for so long.
    Calm(Duration),
    /// [`Every`].
    Test,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Armed { cpu, armed } => write!(f, "cpu {cpu} armed {armed}"),
            Self::Debugger => f.write_str("a debugger wants what KVM does not do"),
            Self::Calm(time) => write!(f, "nothing armed for {} ms", time.as_millis()),
            Self::Test => f.write_str("test"),
        }
    }
}

/// How often a machine changed its engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Into the interpreter, because something was armed.
    pub armed: u64,
    /// Into the interpreter, for a debugger.
    pub debugged: u64,
    /// Back to KVM, because nothing was armed any more.
    pub calm: u64,
    /// Either way, for a test.
    pub test: u64,
    /// Time the boot processor did not run meanwhile: all of it.
    pub total: Duration,
    /// The longest of these times.
    pub longest: Duration,
}

impl Tally {
    /// All changes.
    pub const fn count(&self) -> u64 {
        self.armed + self.debugged + self.calm + self.test
    }

    /// How long nothing must have been armed before the machine goes back to KVM. Going there and back takes some
    /// hundred microseconds, and much longer on a slow host: at the worst some percent of the time.
    fn calm_time(&self) -> Duration {
        let count = u32::try_from(self.count()).unwrap_or(u32::MAX);
        let mean = self.total.checked_div(count).unwrap_or_default();
        mean.saturating_mul(CALM_CHANGES).clamp(CALM, CALM_MAX)
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.count();
        write!(f, "changes of engine {count}")?;
        let kinds = [
            (self.armed, "armed"),
            (self.debugged, "for a debugger"),
            (self.calm, "disarmed"),
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
struct Inner {
    /// What each processor has armed.
    armed: Vec<Armed>,
    /// A test wants the interpreter.
    held: bool,
    /// What a debugger wants.
    debugger: Debugger,
    /// When to go back to KVM, if nothing is armed meanwhile.
    back_at: Option<Instant>,
    /// When [`Every::Time`] is over.
    test_at: Option<Instant>,
    cause: Cause,
    tally: Tally,
}

/// Which engine a machine runs in, and why.
#[derive(Debug)]
pub struct Modes {
    /// `None`: it never changes.
    rule: Option<Rule>,
    every: Option<Every>,
    exits: AtomicU64,
    control: Arc<Control>,
    inner: Mutex<Inner>,
}

impl Modes {
    /// For a machine of `cpus` processors, which start with nothing armed.
    pub fn new(
        cpus: usize,
        rule: Option<Rule>,
        every: Option<Every>,
        control: Arc<Control>,
    ) -> Self {
        let test_at = match every {
            Some(Every::Time(period)) if rule.is_some() => Instant::now().checked_add(period),
            _ => None,
        };
        Self {
            rule,
            every,
            exits: AtomicU64::new(0),
            control,
            inner: Mutex::new(Inner {
                armed: vec![Armed::empty(); cpus],
                held: false,
                debugger: Debugger::default(),
                back_at: None,
                test_at,
                cause: Cause::Test,
                tally: Tally::default(),
            }),
        }
    }

    /// Whether the machine can change its engine at all.
    pub const fn can_change(&self) -> bool {
        self.rule.is_some()
    }

    /// Whether KVM tells of MOV DR, and it matters.
    pub(super) fn detects(&self) -> bool {
        self.rule.as_ref().is_some_and(Rule::detects)
    }

    /// How often it did.
    pub fn tally(&self) -> Tally {
        lock(&self.inner).tally
    }

    /// Processor `cpu` has this armed from now on. `true`: [`Modes::tick`] has something new to
    /// wait for.
    pub(crate) fn arm(&self, cpu: usize, armed: Armed) -> bool {
        let Some(rule) = &self.rule else { return false };
        let mut inner = lock(&self.inner);
        if let Some(known) = inner.armed.get_mut(cpu) {
            *known = armed;
        }
        self.follow(rule, &mut inner, Cause::Armed { cpu, armed })
    }

    /// A debugger wants this from now on. As [`Modes::arm`] otherwise.
    pub(crate) fn debug(&self, wanted: Debugger) -> bool {
        let Some(rule) = &self.rule else { return false };
        let mut inner = lock(&self.inner);
        inner.debugger = wanted;
        self.follow(rule, &mut inner, Cause::Debugger)
    }

    /// Does what the rule says, for this cause: into the interpreter at once, back to KVM later.
    /// `true`: [`Modes::tick`] has something new to wait for.
    fn follow(&self, rule: &Rule, inner: &mut Inner, cause: Cause) -> bool {
        match (inner.wants(rule), self.control.engine()) {
            (Engine::Interp, now) => {
                inner.back_at = None;
                if now == Engine::Kvm {
                    inner.cause = cause;
                    self.control.change(Engine::Interp);
                }
                false
            }
            (Engine::Kvm, Engine::Interp) if inner.back_at.is_none() => {
                inner.back_at = Some(Instant::now() + inner.tally.calm_time());
                true
            }
            (Engine::Kvm, _) => false,
        }
    }

    /// Does what is due. Answers how long there is nothing to do.
    pub(crate) fn tick(&self) -> Option<Duration> {
        let rule = self.rule.as_ref()?;
        let mut inner = lock(&self.inner);
        let now = Instant::now();
        if inner.test_at.is_some_and(|at| at <= now) {
            if let Some(Every::Time(period)) = self.every {
                inner.test_at = now.checked_add(period);
            }
            self.toggle(rule, &mut inner);
        }
        if inner.back_at.is_some_and(|at| at <= now) {
            inner.back_at = None;
            if inner.wants(rule) == Engine::Kvm && self.control.change(Engine::Kvm) {
                inner.cause = Cause::Calm(inner.tally.calm_time());
            }
        }
        let next = [inner.back_at, inner.test_at].into_iter().flatten().min()?;
        Some(next.saturating_duration_since(now))
    }

    /// A processor had an exit, or what would be one.
    pub(crate) fn exited(&self) {
        let (Some(Every::Exits(every)), Some(rule)) = (self.every, &self.rule) else {
            return;
        };
        let exits = self.exits.fetch_add(1, Ordering::Relaxed) + 1;
        if exits.is_multiple_of(every.max(1)) {
            self.toggle(rule, &mut lock(&self.inner));
        }
    }

    /// The engine that a test did not want last, if the rule allows it.
    fn toggle(&self, rule: &Rule, inner: &mut Inner) {
        inner.held = self.control.engine() == Engine::Kvm;
        if self.control.change(inner.wants(rule)) {
            inner.cause = Cause::Test;
            inner.back_at = None;
        }
    }

    /// Processor `cpu` goes on in `to`, after so much time of not running.
    fn moved(&self, cpu: usize, from: Engine, to: Engine, took: Duration) {
        let mut inner = lock(&self.inner);
        let cause = inner.cause;
        if cpu == 0 {
            let tally = &mut inner.tally;
            *match cause {
                Cause::Armed { .. } => &mut tally.armed,
                Cause::Debugger => &mut tally.debugged,
                Cause::Calm(_) => &mut tally.calm,
                Cause::Test => &mut tally.test,
            } += 1;
            tally.total += took;
            tally.longest = tally.longest.max(took);
        }
        drop(inner);
        let us = took.as_micros();
        tracing::trace!(target: "mode", "cpu {cpu} {from} -> {to}: {cause}, {us} us");
    }
}

impl Inner {
    fn wants(&self, rule: &Rule) -> Engine {
        let armed = self.armed.iter().copied().collect();
        rule.choose(Demand {
            armed,
            held: self.held,
            debugger: self.debugger,
        })
        .engine
    }
}

/// Why a processor stopped running its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// The machine stops.
    Stopped,
    /// The machine goes on in this engine; the processor does not run since then.
    Change(Engine, Instant),
    /// The interpreter executes one instruction of this processor, which then goes on under KVM.
    Emulate,
}

/// A processor of a machine, in one engine, with what it needs for the other.
#[derive(Debug)]
pub struct Processor {
    id: usize,
    way: Way,
}

#[derive(Debug)]
enum Way {
    /// The interpreter's part is made when it is first needed.
    Native(Box<NativeVcpu>, Option<Box<Vcpu>>),
    /// KVM's part is there if the machine began in KVM.
    Observed(Box<ObservedVcpu>, Option<Box<KvmVcpu>>),
}

impl From<NativeVcpu> for Processor {
    fn from(vcpu: NativeVcpu) -> Self {
        Self {
            id: vcpu.id(),
            way: Way::Native(Box::new(vcpu), None),
        }
    }
}

impl From<ObservedVcpu> for Processor {
    fn from(vcpu: ObservedVcpu) -> Self {
        Self {
            id: vcpu.id(),
            way: Way::Observed(Box::new(vcpu), None),
        }
    }
}

impl Processor {
    /// The processor, if it runs in the interpreter.
    pub fn into_observed(self) -> Option<ObservedVcpu> {
        match self.way {
            Way::Observed(vcpu, _) => Some(*vcpu),
            Way::Native(..) => None,
        }
    }

    /// Has everything that happens to this processor kept.
    pub fn set_recorder(&mut self, recorder: Arc<Recorder>) {
        match &mut self.way {
            Way::Native(vcpu, _) => vcpu.models_mut().recorder = Some(recorder),
            Way::Observed(vcpu, _) => vcpu.models_mut().recorder = Some(recorder),
        }
    }

    /// Keeps its last `limit` branches from now on, while it runs in the interpreter.
    pub fn record_branches(&mut self, limit: usize, (start, base): (u64, u64)) {
        let models = match &mut self.way {
            Way::Native(vcpu, _) => vcpu.models_mut(),
            Way::Observed(vcpu, _) => vcpu.models_mut(),
        };
        models.history = Some(Box::new(History::new(limit, start, base)));
        models.recorded_from_start = true;
    }

    /// Runs until the machine stops. Gives the state it stopped in where the board asks for it.
    pub fn thread(mut self, board: &Arc<Board>) -> Option<LastState> {
        let id = self.id;
        // Declared after `self` and so dropped before it: the kicker points into it.
        let guard = LoopGuard { id, board };
        let doorbell = board.control.doorbell(id);
        self.way.set_kicker(doorbell);
        loop {
            let (ended, from) = (self.way.run(board, doorbell), self.way.engine());
            doorbell.set_kicker(None);
            let moved = match ended {
                Ended::Stopped => break,
                Ended::Change(..) => self.way.change(board),
                Ended::Emulate => self.way.emulate(board, doorbell),
            };
            match moved {
                Ok(way) => self.way = way,
                Err(error) => {
                    board.finish(Outcome::Failed(Box::new(error)));
                    return None;
                }
            }
            self.way.set_kicker(doorbell);
            if let Ended::Change(to, since) = ended {
                board.modes.moved(id, from, to, since.elapsed());
            }
        }
        drop(guard);
        board.add_stats(self.way.stats());
        board.wants_last_state().then(|| self.way.last_state(board))
    }
}

impl Way {
    const fn engine(&self) -> Engine {
        match self {
            Self::Native(..) => Engine::Kvm,
            Self::Observed(..) => Engine::Interp,
        }
    }

    /// The interpreter looks at the doorbell by itself.
    fn set_kicker(&mut self, doorbell: &Doorbell) {
        if let Self::Native(vcpu, _) = self {
            doorbell.set_kicker(Some(Kicker::of_this_thread(vcpu.kvm_mut())));
        }
    }

    fn run(&mut self, board: &Arc<Board>, doorbell: &Doorbell) -> Ended {
        match self {
            Self::Native(vcpu, _) => vcpu.run(board, doorbell),
            Self::Observed(vcpu, _) => vcpu.run(board, doorbell),
        }
    }

    /// Moves the state into the other engine.
    fn change(self, board: &Board) -> Result<Self, MachineError> {
        match self {
            Self::Native(mut vcpu, idle) => {
                let state = vcpu.state()?;
                let (kvm, models) = vcpu.into_parts();
                let mut interpreter = match idle {
                    Some(interpreter) => interpreter,
                    None => Box::new(Vcpu::new(board.interpreter_memory()?)),
                };
                // KVM ran: what it wrote was not seen.
                interpreter.distrust_code();
                let vcpu = ObservedVcpu::from_parts(*interpreter, models, &state);
                Ok(Self::Observed(Box::new(vcpu), Some(Box::new(kvm))))
            }
            Self::Observed(mut vcpu, Some(kvm)) => {
                let mut state = vcpu.state();
                let (mut interpreter, models) = vcpu.into_parts();
                state.cr8 = board.irq.cr8(models.id);
                let mut kvm = kvm;
                if interpreter.take_flushed() {
                    kvm.forget_translations();
                }
                let vcpu = NativeVcpu::new(*kvm, models, &state)?;
                Ok(Self::Native(Box::new(vcpu), Some(Box::new(interpreter))))
            }
            // Without a rule nobody asks for it.
            same @ Self::Observed(_, None) => Ok(same),
        }
    }

    /// Executes one instruction in the interpreter, while the other processors run on under KVM: it
    /// touches nothing but its own processor.
    fn emulate(self, board: &Arc<Board>, doorbell: &Doorbell) -> Result<Self, MachineError> {
        let mut way = self.change(board)?;
        if let Self::Observed(vcpu, _) = &mut way {
            // Whoever rings wants the loop of KVM, which is back soon.
            let rung = doorbell.answer();
            vcpu.run_one(board);
            if rung {
                doorbell.ring();
            }
        }
        way.change(board)
    }

    fn stats(&self) -> VcpuStats {
        match self {
            Self::Native(vcpu, idle) => VcpuStats {
                interpreter: idle.as_ref().map(|idle| idle.stats()),
                mix: idle.as_ref().map(|idle| idle.mix()).unwrap_or_default(),
                ..vcpu.stats()
            },
            Self::Observed(vcpu, _) => vcpu.stats(),
        }
    }

    fn last_state(&mut self, board: &Board) -> LastState {
        match self {
            Self::Native(vcpu, _) => vcpu.last_state(),
            Self::Observed(vcpu, _) => vcpu.last_state(board),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calm_lasts_longer_where_changes_take_long() {
        let tally = |armed, total| Tally {
            armed,
            total: Duration::from_micros(total),
            ..Tally::default()
        };
        let calm = |armed, total| tally(armed, total).calm_time().as_micros();
        assert_eq!(calm(0, 0), 5000);
        assert_eq!(calm(4, 400), 5000);
        assert_eq!(calm(4, 40_000), 200_000);
        assert_eq!(calm(1, 10_000_000), 1_000_000);
    }
}
