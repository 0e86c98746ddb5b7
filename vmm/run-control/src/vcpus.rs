//! Pause, resume, stop and change of engine for all vCPU threads of a machine.
//!
//! A machine changes its engine as a whole: [`VcpuControl::change`] requests the change, every
//! thread reaches its [`VcpuControl::checkpoint`] between two instructions, and when the last one
//! has arrived all of them continue in the other engine. No thread runs guest code in one engine
//! while another thread still runs it in the other.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::time::Instant;

use super::doorbell::Doorbell;
use crate::engine::Engine;
use crate::sync::{Condvar, Mutex, MutexGuard, lock, wait};

/// What all vCPUs of a machine should do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Running,
    Paused,
    Stopped,
}

/// Where an engine change is. The phases of a change are counted in rounds: threads that wait for
/// one see by the number that it was made or withdrawn.
#[derive(Debug)]
struct EngineChange {
    /// The engine that runs the guest.
    engine: Engine,
    /// The engine that runs the guest once all threads have arrived.
    requested: Option<Engine>,
    /// Threads that wait at their checkpoint for the change.
    arrived: usize,
    /// Changes made and withdrawn so far.
    round: u64,
}

impl EngineChange {
    /// Ends a round: the change was made or withdrawn.
    fn end_round(&mut self) {
        self.requested = None;
        self.arrived = 0;
        self.round += 1;
    }

    /// The engine that runs the guest, or is about to.
    fn target(&self) -> Engine {
        self.requested.unwrap_or(self.engine)
    }
}

struct ControlState<R> {
    phase: Phase,
    /// Threads inside their run loop.
    active: usize,
    /// Threads that wait for the end of a pause, or for the others before a change.
    waiting: usize,
    change: EngineChange,
    /// vCPUs that stay paused when the others resume, one bit each. A thread that runs several
    /// vCPUs pauses when all of them are held.
    held: u64,
    /// All vCPUs stay paused until the machine is reset.
    resetting: bool,
    /// Requests that the vCPUs' threads serve before they resume.
    requests: Vec<VecDeque<R>>,
}

impl<R> ControlState<R> {
    fn pauses(&self, ids: u64) -> bool {
        let held = self.resetting || self.held & ids == ids;
        self.phase == Phase::Paused || (self.phase == Phase::Running && held)
    }

    fn has_request(&self, mut ids: Range<usize>) -> bool {
        ids.any(|id| self.requests.get(id).is_some_and(|queue| !queue.is_empty()))
    }

    fn take_request(&mut self, ids: Range<usize>) -> Option<(usize, R)> {
        ids.into_iter()
            .find_map(|id| Some((id, self.requests.get_mut(id)?.pop_front()?)))
    }
}

/// The vCPUs `ids`, one bit each.
fn mask(ids: &Range<usize>) -> u64 {
    ids.clone().filter(|&id| id < 64).map(|id| 1 << id).sum()
}

/// The machine's run state, and the doorbells of its vCPUs. `R` is a request that a vCPU's thread
/// serves at its checkpoint.
pub struct VcpuControl<R> {
    inner: Mutex<ControlState<R>>,
    /// vCPU threads wait here. Release `inner` before notifying: they need it.
    changed: Condvar,
    /// Notified when all vCPU threads have arrived in a wait; other threads wait for that.
    settled: Condvar,
    doorbells: Vec<Doorbell>,
}

impl<R> fmt::Debug for VcpuControl<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VcpuControl")
            .field("phase", &lock(&self.inner).phase)
            .finish_non_exhaustive()
    }
}

/// What a thread does after a [`VcpuControl::checkpoint`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Checkpoint {
    /// The thread resumes its vCPU.
    Run,
    /// The thread ends.
    Stop,
    /// The thread finds out whether its vCPUs can be moved, and calls again.
    Again,
    /// The thread continues in this engine, and reaches a checkpoint before it runs the guest.
    Change(Engine),
}

/// Why a vCPU's run loop returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunLoopEnd {
    /// The machine stops.
    Stopped,
    /// The machine continues in this engine; the vCPU has not run since this time.
    Change(Engine, Instant),
    /// The interpreter executes one instruction of this vCPU, which then continues under KVM.
    Emulate,
}

/// The state of a thread that reaches a [`VcpuControl::checkpoint`].
#[derive(Clone, Debug)]
pub struct CheckpointState {
    /// The vCPUs that it runs.
    pub ids: Range<usize>,
    /// The engine that it runs them in.
    pub engine: Engine,
    /// Whether its vCPUs can change engines: their state is between two instructions, and no event
    /// is being delivered. `None`: the thread has not checked that.
    pub movable: Option<bool>,
}

impl<R> VcpuControl<R> {
    /// The control of a machine of `cpus` vCPUs, which starts paused, in `engine`.
    pub fn new(cpus: usize, engine: Engine) -> Self {
        Self {
            inner: Mutex::new(ControlState {
                phase: Phase::Paused,
                active: 0,
                waiting: 0,
                change: EngineChange {
                    engine,
                    requested: None,
                    arrived: 0,
                    round: 0,
                },
                held: 0,
                resetting: false,
                requests: (0..cpus).map(|_| VecDeque::new()).collect(),
            }),
            changed: Condvar::new(),
            settled: Condvar::new(),
            doorbells: (0..cpus).map(|_| Doorbell::default()).collect(),
        }
    }

    /// The number of vCPUs.
    pub const fn cpus(&self) -> usize {
        self.doorbells.len()
    }

    /// The doorbell of vCPU `id`.
    pub fn doorbell(&self, id: usize) -> &Doorbell {
        &self.doorbells[id]
    }

    /// Makes all vCPU threads check for work.
    pub fn ring_all(&self) {
        self.doorbells.iter().for_each(Doorbell::ring);
    }

    /// Resumes the vCPUs. No effect on a stopped machine.
    pub fn resume(&self) {
        let mut inner = lock(&self.inner);
        if inner.phase == Phase::Paused {
            inner.phase = Phase::Running;
            drop(inner);
            self.changed.notify_all();
            // Another thread may wait for this pause in `pause`: it is over.
            self.settled.notify_all();
        }
    }

    /// Pauses all vCPUs, and returns when none runs any more.
    ///
    /// Returns `false` if the machine is stopped, or another thread resumed it meanwhile.
    pub fn pause(&self) -> bool {
        let mut inner = lock(&self.inner);
        if inner.phase == Phase::Stopped {
            return false;
        }
        inner.phase = Phase::Paused;
        drop(inner);
        self.ring_all();
        inner = lock(&self.inner);
        while inner.phase == Phase::Paused && inner.waiting < inner.active {
            inner = wait(&self.settled, inner);
        }
        inner.phase == Phase::Paused
    }

    /// Holds these vCPUs (one bit each), and no others, when the machine resumes. They stop at
    /// their next checkpoint: call this while the machine is paused.
    pub fn hold_only(&self, ids: u64) {
        let mut inner = lock(&self.inner);
        inner.held = ids;
        let waits = inner.phase == Phase::Paused;
        drop(inner);
        if !waits {
            self.changed.notify_all();
        }
    }

    /// Makes vCPU `id` stop at its next checkpoint, and stay there until
    /// [`VcpuControl::hold_only`] releases it.
    pub fn hold(&self, id: usize) {
        lock(&self.inner).held |= mask(&(id..id + 1));
        self.doorbells[id].ring();
    }

    /// Has the thread of vCPU `id` serve a request while it is paused, which it must be or become
    /// soon. `false`: the machine is stopped, and the request was dropped. A request that is
    /// accepted is served, or dropped when the machine stops: reply through a channel.
    pub fn request(&self, id: usize, request: R) -> bool {
        let accepted = self.queue_request(id, request);
        if accepted {
            self.changed.notify_all();
        }
        accepted
    }

    /// Like [`VcpuControl::request`], but the request may wait until the machine resumes: the
    /// thread is not woken for it.
    pub fn queue_request(&self, id: usize, request: R) -> bool {
        let mut inner = lock(&self.inner);
        if inner.phase == Phase::Stopped {
            return false;
        }
        let Some(queue) = inner.requests.get_mut(id) else {
            return false;
        };
        queue.push_back(request);
        true
    }

    /// Makes all vCPUs stop at their next checkpoints, until [`VcpuControl::end_reset`], without
    /// waiting for them.
    pub fn begin_reset(&self) {
        lock(&self.inner).resetting = true;
        self.ring_all();
    }

    /// Waits until no vCPU runs any more after [`VcpuControl::begin_reset`].
    ///
    /// Returns `false` if the machine is stopped.
    pub fn wait_for_reset(&self) -> bool {
        let mut inner = lock(&self.inner);
        while inner.phase != Phase::Stopped && inner.waiting < inner.active {
            inner = wait(&self.settled, inner);
        }
        inner.phase != Phase::Stopped
    }

    /// Lets the vCPUs run again after a reset, unless they are paused for another reason.
    pub fn end_reset(&self) {
        lock(&self.inner).resetting = false;
        self.changed.notify_all();
    }

    /// Stops all vCPUs for good, without waiting for them.
    pub fn stop(&self) {
        let mut inner = lock(&self.inner);
        inner.phase = Phase::Stopped;
        inner.requests.iter_mut().for_each(VecDeque::clear);
        drop(inner);
        self.changed.notify_all();
        self.settled.notify_all();
        self.ring_all();
    }

    /// Lets a stopped machine run again: it was restored to a state before its end.
    pub fn reopen(&self) {
        let mut inner = lock(&self.inner);
        if inner.phase == Phase::Stopped {
            inner.phase = Phase::Running;
        }
    }

    /// Whether [`VcpuControl::stop`] was called.
    pub fn is_stopped(&self) -> bool {
        lock(&self.inner).phase == Phase::Stopped
    }

    /// A thread enters its run loop. It must reach [`VcpuControl::checkpoint`] before it runs a
    /// guest.
    pub fn enter(&self) {
        lock(&self.inner).active += 1;
    }

    /// A thread leaves its run loop.
    pub fn leave(&self) {
        let mut inner = lock(&self.inner);
        debug_assert!(inner.active > 0, "leave without enter");
        inner.active -= 1;
        drop(inner);
        self.changed.notify_all();
        self.settled.notify_all();
    }

    /// The engine that runs the guest, or is about to.
    pub fn engine(&self) -> Engine {
        lock(&self.inner).change.target()
    }

    /// Requests a change to `engine`. A request for the other one that not all threads have
    /// followed yet is withdrawn. `false`: the machine runs in `engine` already.
    pub fn change(&self, engine: Engine) -> bool {
        let mut inner = lock(&self.inner);
        let change = &mut inner.change;
        if change.target() == engine {
            return false;
        }
        if change.requested.is_some() {
            change.end_round();
        } else {
            change.requested = Some(engine);
        }
        drop(inner);
        self.changed.notify_all();
        self.ring_all();
        true
    }

    /// Called by a vCPU's thread, with no lock held, when its doorbell rang: waits out a pause,
    /// calls `serve` for each request, and waits for the other threads where the engine is to
    /// change. A thread whose vCPUs cannot be moved runs them on in its engine, and must call again
    /// soon.
    pub fn checkpoint(
        &self,
        mut state: CheckpointState,
        serve: &mut dyn FnMut(usize, R),
    ) -> Checkpoint {
        let mut inner = lock(&self.inner);
        loop {
            if let Some((id, request)) = inner.take_request(state.ids.clone()) {
                drop(inner);
                serve(id, request);
                // The request may have replaced the vCPU's state.
                state.movable = None;
                inner = lock(&self.inner);
                continue;
            }
            match inner.phase {
                Phase::Stopped => return Checkpoint::Stop,
                // A pause comes first: while it lasts, no thread changes engines.
                Phase::Paused => {}
                Phase::Running if inner.change.engine != state.engine => {
                    return Checkpoint::Change(inner.change.engine);
                }
                Phase::Running if inner.change.requested.is_some() => match state.movable {
                    Some(true) => {
                        inner = self.arrive(inner, &state);
                        continue;
                    }
                    Some(false) => {}
                    None => return Checkpoint::Again,
                },
                Phase::Running => {}
            }
            if !inner.pauses(mask(&state.ids)) {
                return Checkpoint::Run;
            }
            inner = self.wait(inner);
        }
    }

    /// Waits for a change of the run state. The thread counts as one that does not run.
    fn wait<'a>(
        &'a self,
        mut inner: MutexGuard<'a, ControlState<R>>,
    ) -> MutexGuard<'a, ControlState<R>> {
        inner.waiting += 1;
        debug_assert!(
            inner.waiting <= inner.active,
            "a thread waits outside its run loop"
        );
        if inner.waiting >= inner.active {
            self.settled.notify_all();
        }
        inner = wait(&self.changed, inner);
        inner.waiting -= 1;
        inner
    }

    /// Waits until all threads have arrived, and then makes the engine change.
    ///
    /// Also returns if the change is withdrawn, or if a request must be served first.
    fn arrive<'a>(
        &'a self,
        mut inner: MutexGuard<'a, ControlState<R>>,
        state: &CheckpointState,
    ) -> MutexGuard<'a, ControlState<R>> {
        let round = inner.change.round;
        inner.change.arrived += 1;
        while inner.change.round == round {
            if inner.phase == Phase::Stopped || inner.has_request(state.ids.clone()) {
                inner.change.arrived -= 1;
                break;
            }
            let paused = inner.phase == Phase::Paused || inner.resetting;
            if !paused && inner.change.arrived >= inner.active {
                inner.change.engine = inner.change.target();
                inner.change.end_round();
                self.changed.notify_all();
            } else {
                inner = self.wait(inner);
            }
        }
        inner
    }

    /// Whether the thread of vCPUs `ids` must come to a [`VcpuControl::checkpoint`].
    pub fn checkpoint_requested(&self, ids: Range<usize>) -> bool {
        let inner = lock(&self.inner);
        inner.phase != Phase::Running
            || inner.pauses(mask(&ids))
            || inner.change.requested.is_some()
    }

    /// Whether an engine change is requested and not made yet.
    pub fn switch_requested(&self) -> bool {
        lock(&self.inner).change.requested.is_some()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;
    use std::time::Duration;

    fn state(id: usize, engine: Engine, movable: bool) -> CheckpointState {
        CheckpointState {
            ids: id..id + 1,
            engine,
            movable: Some(movable),
        }
    }

    /// Starts `cpus` threads that count until stopped, and come to a checkpoint only when their
    /// doorbell rings.
    fn counters(
        cpus: usize,
    ) -> (
        Arc<VcpuControl<()>>,
        Arc<AtomicU64>,
        Vec<thread::JoinHandle<()>>,
    ) {
        let control = Arc::new(VcpuControl::<()>::new(cpus, Engine::Kvm));
        let count = Arc::new(AtomicU64::new(0));
        let threads = (0..cpus)
            .map(|id| {
                let (control, count) = (control.clone(), count.clone());
                control.enter();
                thread::spawn(move || {
                    control.doorbell(id).ring();
                    loop {
                        if control.doorbell(id).answer()
                            && control.checkpoint(state(id, Engine::Kvm, true), &mut |_, _| {})
                                == Checkpoint::Stop
                        {
                            break;
                        }
                        count.fetch_add(1, Ordering::SeqCst);
                        thread::yield_now();
                    }
                    control.leave();
                })
            })
            .collect();
        (control, count, threads)
    }

    #[test]
    fn paused_machine_does_not_run_until_resumed() {
        let (control, count, threads) = counters(4);
        for _ in 0..50 {
            control.resume();
            assert!(control.pause());
            let before = count.load(Ordering::SeqCst);
            thread::yield_now();
            assert_eq!(count.load(Ordering::SeqCst), before);
        }
        control.stop();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert!(!control.pause(), "a stopped machine cannot be paused");
    }

    #[test]
    fn reset_holds_the_vcpus_also_when_a_debugger_resumes_them() {
        let (control, count, threads) = counters(3);
        control.resume();
        for _ in 0..50 {
            control.begin_reset();
            assert!(control.wait_for_reset());
            let before = count.load(Ordering::SeqCst);
            assert!(control.pause());
            control.resume();
            thread::yield_now();
            assert_eq!(count.load(Ordering::SeqCst), before);
            control.end_reset();
        }
        control.begin_reset();
        control.stop();
        assert!(!control.wait_for_reset(), "a stopped machine is not reset");
        threads.into_iter().for_each(|t| t.join().unwrap());
    }

    /// Threads that follow engine changes, and how many changes each has made.
    struct Followers {
        threads: Vec<thread::JoinHandle<()>>,
        changes: Arc<Vec<AtomicU64>>,
    }

    impl Followers {
        /// Starts `cpus` threads. Every third checkpoint of a thread is one at which it cannot
        /// move. A thread panics if another one runs in the other engine at the same time.
        fn start(cpus: usize, control: &Arc<VcpuControl<()>>) -> Self {
            let running = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
            let changes: Arc<Vec<_>> = Arc::new((0..cpus).map(|_| AtomicU64::new(0)).collect());
            let follow = |id: usize| {
                let (control, running) = (control.clone(), running.clone());
                let changes = changes.clone();
                control.enter();
                thread::spawn(move || {
                    let mut engine = Engine::Kvm;
                    for turn in 0_u64.. {
                        let state = state(id, engine, !turn.is_multiple_of(3));
                        match control.checkpoint(state, &mut |_, ()| {}) {
                            Checkpoint::Stop => break,
                            Checkpoint::Change(to) => {
                                engine = to;
                                changes[id].fetch_add(1, Ordering::SeqCst);
                                continue;
                            }
                            Checkpoint::Run | Checkpoint::Again => {}
                        }
                        let (mine, other) = match engine {
                            Engine::Kvm => (&running[0], &running[1]),
                            Engine::Interp => (&running[1], &running[0]),
                        };
                        mine.fetch_add(1, Ordering::SeqCst);
                        assert_eq!(other.load(Ordering::SeqCst), 0, "cpu {id}");
                        thread::yield_now();
                        assert_eq!(other.load(Ordering::SeqCst), 0, "cpu {id}");
                        mine.fetch_sub(1, Ordering::SeqCst);
                    }
                    control.leave();
                })
            };
            Self {
                threads: (0..cpus).map(follow).collect(),
                changes,
            }
        }

        fn all_have_changed(&self) -> bool {
            let mut changes = self.changes.iter();
            changes.all(|count| count.load(Ordering::SeqCst) > 0)
        }

        fn join(self) {
            for thread in self.threads {
                thread.join().unwrap();
            }
        }
    }

    #[test]
    fn no_two_threads_run_in_different_engines() {
        let control = Arc::new(VcpuControl::<()>::new(4, Engine::Kvm));
        let followers = Followers::start(4, &control);
        control.resume();
        for round in 0.. {
            if round >= 200 && followers.all_have_changed() {
                break;
            }
            let to = [Engine::Interp, Engine::Kvm][round % 2];
            control.change(to);
            if round % 5 == 0 {
                // Withdrawn before all have arrived, or made and made again: both are allowed.
                control.change([Engine::Kvm, Engine::Interp][round % 2]);
                control.change(to);
            }
            if round % 7 == 0 {
                assert!(control.pause());
                control.resume();
            }
            thread::yield_now();
        }
        control.stop();
        followers.join();
    }

    #[test]
    fn change_to_the_current_engine_is_refused() {
        let control = VcpuControl::<()>::new(2, Engine::Kvm);
        assert!(!control.change(Engine::Kvm));
        assert!(control.change(Engine::Interp));
        assert!(!control.change(Engine::Interp));
        assert_eq!(control.engine(), Engine::Interp);
        assert!(control.change(Engine::Kvm), "withdraws the request");
        assert!(!control.change(Engine::Kvm));
    }

    #[test]
    fn change_is_not_made_while_the_machine_is_paused() {
        let control = Arc::new(VcpuControl::<()>::new(2, Engine::Kvm));
        let followers = Followers::start(2, &control);
        control.resume();
        assert!(control.pause());
        control.change(Engine::Interp);
        thread::yield_now();
        assert_eq!(lock(&control.inner).change.engine, Engine::Kvm);
        control.resume();
        while lock(&control.inner).change.engine == Engine::Kvm {
            thread::yield_now();
        }
        control.stop();
        followers.join();
    }

    #[test]
    fn stop_ends_sleeping_threads() {
        let control = Arc::new(VcpuControl::<()>::new(1, Engine::Kvm));
        let other = control.clone();
        let sleeper = thread::spawn(move || {
            while !other.is_stopped() {
                other.doorbell(0).sleep(Duration::from_secs(60));
                other.doorbell(0).answer();
            }
        });
        control.stop();
        sleeper.join().unwrap();
    }
}
