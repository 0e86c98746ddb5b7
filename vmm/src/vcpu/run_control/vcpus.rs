//! Pause, resume, stop and change of engine for all vCPU threads of a machine.
//!
//! A machine changes its engine as a whole: [`VcpuControl::change`] requests the change, every thread
//! comes to its [`VcpuControl::checkpoint`] between two instructions, and when the last one has
//! arrived all of them continue in the other engine. No thread runs guest code in one engine while
//! another thread still runs it in the other.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::doorbell::Doorbell;
use crate::sync::lock;
use crate::vcpu::engine::Engine;

/// What all processors of a machine should do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Running,
    Paused,
    Stopped,
}

struct Inner<R> {
    phase: Phase,
    /// Threads inside of their run loop.
    active: usize,
    /// Threads that wait for the end of a pause, or for the others before a change.
    waiting: usize,
    /// What runs the guest.
    engine: Engine,
    /// What is to run it, once all threads have arrived.
    wanted: Option<Engine>,
    /// Threads that have.
    arrived: usize,
    /// Counts changes made and given up: those who wait see that theirs is over.
    round: u64,
    /// Processors that stay paused when the others run on, a bit each. A thread that runs several pauses with
    /// the last of them.
    held: u64,
    /// What the processors' threads are to do before they run on.
    asked: Vec<VecDeque<R>>,
}

impl<R> Inner<R> {
    /// Ends the wait for a change, which was made or given up.
    fn end_round(&mut self) {
        self.wanted = None;
        self.arrived = 0;
        self.round += 1;
    }

    fn pauses(&self, ids: u64) -> bool {
        self.phase == Phase::Paused || (self.phase == Phase::Running && self.held & ids == ids)
    }

    fn has_request(&self, mut ids: Range<usize>) -> bool {
        ids.any(|id| self.asked.get(id).is_some_and(|asked| !asked.is_empty()))
    }

    fn take_request(&mut self, ids: Range<usize>) -> Option<(usize, R)> {
        ids.into_iter()
            .find_map(|id| Some((id, self.asked.get_mut(id)?.pop_front()?)))
    }
}

impl<R> fmt::Debug for VcpuControl<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VcpuControl")
            .field("phase", &lock(&self.inner).phase)
            .finish_non_exhaustive()
    }
}

/// The processors `ids`, a bit each.
fn mask(ids: &Range<usize>) -> u64 {
    ids.clone().filter(|&id| id < 64).map(|id| 1 << id).sum()
}

/// The machine's run state, and the doorbells of its vCPUs. `R` is a request that a vCPU's thread
/// serves at its checkpoint.
pub struct VcpuControl<R> {
    inner: Mutex<Inner<R>>,
    /// The processors' threads wait here. Whoever wakes them lets go of `inner` first: they need it.
    changed: Condvar,
    /// Those who wait for the threads to wait.
    settled: Condvar,
    doorbells: Vec<Doorbell>,
}

/// What a thread does after a [`VcpuControl::checkpoint`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Checkpoint {
    /// Runs on.
    Run,
    /// Ends.
    Stop,
    /// Says whether it can be moved, and comes again.
    Again,
    /// Goes on in this engine; comes to another checkpoint before it runs the guest there.
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

/// Where a thread is when it comes to a [`VcpuControl::checkpoint`].
#[derive(Clone, Debug)]
pub struct CheckpointState {
    /// The processors that it runs.
    pub ids: Range<usize>,
    /// What it runs them in.
    pub engine: Engine,
    /// Whether their state is complete, between two instructions with nothing under way. `None`:
    /// it has not looked.
    pub movable: Option<bool>,
}

impl<R> VcpuControl<R> {
    /// For a machine of `cpus` processors, which starts paused, in `engine`.
    pub fn new(cpus: usize, engine: Engine) -> Self {
        Self {
            inner: Mutex::new(Inner {
                phase: Phase::Paused,
                active: 0,
                waiting: 0,
                engine,
                wanted: None,
                arrived: 0,
                round: 0,
                held: 0,
                asked: (0..cpus).map(|_| VecDeque::new()).collect(),
            }),
            changed: Condvar::new(),
            settled: Condvar::new(),
            doorbells: (0..cpus).map(|_| Doorbell::default()).collect(),
        }
    }

    /// How many processors there are.
    pub const fn cpus(&self) -> usize {
        self.doorbells.len()
    }

    /// The doorbell of processor `id`.
    pub fn doorbell(&self, id: usize) -> &Doorbell {
        &self.doorbells[id]
    }

    /// Makes all processors look for work.
    pub fn ring_all(&self) {
        self.doorbells.iter().for_each(Doorbell::ring);
    }

    /// Lets the processors run. No effect on a stopped machine.
    pub fn resume(&self) {
        let mut inner = lock(&self.inner);
        if inner.phase == Phase::Paused {
            inner.phase = Phase::Running;
            drop(inner);
            self.changed.notify_all();
            // Whoever waits for this pause waits for nothing now.
            self.settled.notify_all();
        }
    }

    /// Holds all processors, and returns when none runs any more. `false`: the machine is stopped.
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
            inner = self
                .settled
                .wait(inner)
                .unwrap_or_else(PoisonError::into_inner);
        }
        inner.phase == Phase::Paused
    }

    /// Has these processors (a bit each) stay where they are when the machine runs on, and no
    /// others. They stop at their next checkpoint: call this while the machine is paused.
    pub fn hold_only(&self, ids: u64) {
        let mut inner = lock(&self.inner);
        inner.held = ids;
        let waits = inner.phase == Phase::Paused;
        drop(inner);
        if !waits {
            self.changed.notify_all();
        }
    }

    /// Has processor `id` stop at its next checkpoint, and stay there until
    /// [`VcpuControl::hold_only`] lets it go.
    pub fn hold(&self, id: usize) {
        lock(&self.inner).held |= mask(&(id..id + 1));
        self.doorbells[id].ring();
    }

    /// Has the thread of processor `id` do something while it is paused, which it must be or become
    /// soon. `false`: the machine is stopped, and the request was dropped. A request that is
    /// accepted is done, or dropped when the machine stops: answer through a channel.
    pub fn request(&self, id: usize, request: R) -> bool {
        let accepted = self.queue_request(id, request);
        if accepted {
            self.changed.notify_all();
        }
        accepted
    }

    /// As [`VcpuControl::request`], but when the machine runs on will do: the thread is not woken for it.
    pub fn queue_request(&self, id: usize, request: R) -> bool {
        let mut inner = lock(&self.inner);
        if inner.phase == Phase::Stopped {
            return false;
        }
        let Some(asked) = inner.asked.get_mut(id) else {
            return false;
        };
        asked.push_back(request);
        true
    }

    /// Ends all processors for good; does not wait for them.
    pub fn stop(&self) {
        let mut inner = lock(&self.inner);
        inner.phase = Phase::Stopped;
        inner.asked.iter_mut().for_each(VecDeque::clear);
        drop(inner);
        self.changed.notify_all();
        self.settled.notify_all();
        self.ring_all();
    }

    /// Lets a stopped machine run again: it was set back to before its end.
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

    /// A thread enters its run loop. It must reach [`VcpuControl::checkpoint`] before it runs a guest.
    pub fn enter(&self) {
        lock(&self.inner).active += 1;
    }

    /// A thread leaves its run loop.
    pub fn leave(&self) {
        lock(&self.inner).active -= 1;
        self.changed.notify_all();
        self.settled.notify_all();
    }

    /// What runs the guest, or is about to.
    pub fn engine(&self) -> Engine {
        let inner = lock(&self.inner);
        inner.wanted.unwrap_or(inner.engine)
    }

    /// The machine is to run in `engine`. Takes back a wish for the other one that not all threads
    /// have followed yet. `false`: it runs there already.
    pub fn change(&self, engine: Engine) -> bool {
        let mut inner = lock(&self.inner);
        if inner.wanted.unwrap_or(inner.engine) == engine {
            return false;
        }
        if inner.wanted.is_some() {
            inner.end_round();
        } else {
            inner.wanted = Some(engine);
        }
        drop(inner);
        self.changed.notify_all();
        self.ring_all();
        true
    }

    /// Called by a processor's thread, with nothing locked, when its doorbell rang: waits out a
    /// pause, has `serve` do what [`VcpuControl::request`] wants of a processor, and waits for the others
    /// where the engine is to change. A thread that cannot be moved goes on as it did then, and
    /// must come again soon.
    pub fn checkpoint(
        &self,
        mut place: CheckpointState,
        serve: &mut dyn FnMut(usize, R),
    ) -> Checkpoint {
        let mut inner = lock(&self.inner);
        loop {
            if let Some((id, request)) = inner.take_request(place.ids.clone()) {
                drop(inner);
                serve(id, request);
                // It may have been given another state.
                place.movable = None;
                inner = lock(&self.inner);
                continue;
            }
            match inner.phase {
                Phase::Stopped => return Checkpoint::Stop,
                // A pause goes first: while it lasts nobody moves.
                Phase::Paused => {}
                Phase::Running if inner.engine != place.engine => {
                    return Checkpoint::Change(inner.engine);
                }
                Phase::Running if inner.wanted.is_some() => match place.movable {
                    Some(true) => {
                        inner = self.arrive(inner, &place);
                        continue;
                    }
                    Some(false) => {}
                    None => return Checkpoint::Again,
                },
                Phase::Running => {}
            }
            if !inner.pauses(mask(&place.ids)) {
                return Checkpoint::Run;
            }
            inner = self.wait(inner);
        }
    }

    /// Waits for something to change, as one of those that do not run.
    fn wait<'a>(&'a self, mut inner: MutexGuard<'a, Inner<R>>) -> MutexGuard<'a, Inner<R>> {
        inner.waiting += 1;
        if inner.waiting >= inner.active {
            self.settled.notify_all();
        }
        inner = self
            .changed
            .wait(inner)
            .unwrap_or_else(PoisonError::into_inner);
        inner.waiting -= 1;
        inner
    }

    /// Waits until all threads have arrived, and the change is made; or until it is given up, or
    /// there is something else to do first.
    fn arrive<'a>(
        &'a self,
        mut inner: MutexGuard<'a, Inner<R>>,
        place: &CheckpointState,
    ) -> MutexGuard<'a, Inner<R>> {
        let round = inner.round;
        inner.arrived += 1;
        while inner.round == round {
            let paused = inner.phase == Phase::Paused;
            if inner.phase == Phase::Stopped || inner.has_request(place.ids.clone()) {
                inner.arrived -= 1;
                break;
            }
            if !paused && inner.arrived >= inner.active {
                inner.engine = inner.wanted.unwrap_or(inner.engine);
                inner.end_round();
                self.changed.notify_all();
            } else {
                inner = self.wait(inner);
            }
        }
        inner
    }

    /// Whether the thread of processors `ids` must come to a [`VcpuControl::checkpoint`].
    pub fn checkpoint_requested(&self, ids: Range<usize>) -> bool {
        let inner = lock(&self.inner);
        inner.phase != Phase::Running || inner.pauses(mask(&ids)) || inner.wanted.is_some()
    }

    /// Whether the engine is to change.
    pub fn switch_requested(&self) -> bool {
        lock(&self.inner).wanted.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;
    use std::time::Duration;

    fn place(id: usize, engine: Engine, movable: bool) -> CheckpointState {
        CheckpointState {
            ids: id..id + 1,
            engine,
            movable: Some(movable),
        }
    }

    /// Runs `cpus` threads that count until stopped, looking only when their doorbell rings.
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
                            && control.checkpoint(place(id, Engine::Kvm, true), &mut |_, _| {})
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

    /// Threads that follow engine changes, and how many changes each has made.
    struct Followers {
        threads: Vec<thread::JoinHandle<()>>,
        changes: Arc<Vec<AtomicU64>>,
    }

    impl Followers {
        /// Starts `cpus` threads. Every third checkpoint of a thread is one at which it cannot move. A
        /// thread panics if another one runs in the other engine at the same time.
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
                        let place = place(id, engine, !turn.is_multiple_of(3));
                        match control.checkpoint(place, &mut |_, ()| {}) {
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
    fn change_to_the_present_engine_is_none() {
        let control = VcpuControl::<()>::new(2, Engine::Kvm);
        assert!(!control.change(Engine::Kvm));
        assert!(control.change(Engine::Interp));
        assert!(!control.change(Engine::Interp));
        assert_eq!(control.engine(), Engine::Interp);
        assert!(control.change(Engine::Kvm), "takes the wish back");
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
        assert_eq!(lock(&control.inner).engine, Engine::Kvm);
        control.resume();
        while lock(&control.inner).engine == Engine::Kvm {
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
