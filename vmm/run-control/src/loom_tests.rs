//! Run control under loom, which explores every interleaving of a test's threads.
//!
//!     RUSTFLAGS='--cfg loom' cargo test -p hindsight-run-control --release
//!
//! A lost wake-up shows as a deadlock, which loom reports.

use std::time::Duration;

use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use super::doorbell::{Doorbell, Kick};
use super::{Checkpoint, CheckpointState, VcpuControl};
use crate::engine::Engine;

const FOREVER: Duration = Duration::from_secs(3600);

/// Explores a test with at most `preemptions` preemptions, and all of them if there is no bound.
fn explore(preemptions: Option<usize>, test: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(test);
}

/// What KVM_RUN does with `immediate_exit` and signals.
#[derive(Default)]
struct KvmRun {
    immediate_exit: AtomicBool,
    in_guest: AtomicBool,
    signalled: Mutex<bool>,
    signal: Condvar,
}

impl KvmRun {
    /// Runs a guest that never exits by itself.
    fn run(&self) {
        self.in_guest.store(true, Ordering::SeqCst);
        // Loom orders SeqCst accesses like AcqRel ones; only its fences are sequentially consistent.
        fence(Ordering::SeqCst);
        if !self.immediate_exit.load(Ordering::SeqCst) {
            let mut signalled = self.signalled.lock().unwrap();
            while !*signalled {
                signalled = self.signal.wait(signalled).unwrap();
            }
            *signalled = false;
        }
        self.in_guest.store(false, Ordering::SeqCst);
    }
}

struct FakeKvm(Arc<KvmRun>);

impl Kick for FakeKvm {
    fn kick(&self) {
        self.0.immediate_exit.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.0.in_guest.load(Ordering::SeqCst) {
            *self.0.signalled.lock().unwrap() = true;
            self.0.signal.notify_all();
        }
    }

    fn clear(&self) {
        self.0.immediate_exit.store(false, Ordering::SeqCst);
    }
}

#[test]
fn ring_wakes_a_thread_that_sleeps() {
    explore(None, || {
        let doorbell = Arc::new(Doorbell::default());
        let work = Arc::new(AtomicBool::new(false));
        let (bell, done) = (doorbell.clone(), work.clone());
        let vcpu = thread::spawn(move || {
            loop {
                bell.answer();
                if done.load(Ordering::SeqCst) {
                    break;
                }
                bell.sleep(FOREVER);
            }
        });
        work.store(true, Ordering::SeqCst);
        doorbell.ring();
        vcpu.join().unwrap();
    });
}

#[test]
fn two_rings_wake_a_thread_for_both_pieces_of_work() {
    explore(Some(3), || {
        let doorbell = Arc::new(Doorbell::default());
        let work = Arc::new(AtomicUsize::new(0));
        let ringer = {
            let (doorbell, work) = (doorbell.clone(), work.clone());
            thread::spawn(move || {
                work.fetch_add(1, Ordering::SeqCst);
                doorbell.ring();
            })
        };
        let vcpu = {
            let (doorbell, work) = (doorbell.clone(), work.clone());
            thread::spawn(move || {
                loop {
                    doorbell.answer();
                    if work.load(Ordering::SeqCst) == 2 {
                        break;
                    }
                    doorbell.sleep(FOREVER);
                }
            })
        };
        work.fetch_add(1, Ordering::SeqCst);
        doorbell.ring();
        ringer.join().unwrap();
        vcpu.join().unwrap();
    });
}

#[test]
fn ring_kicks_a_thread_out_of_kvm_run() {
    explore(Some(3), || {
        let doorbell = Arc::new(Doorbell::default());
        let work = Arc::new(AtomicBool::new(false));
        let (bell, done) = (doorbell.clone(), work.clone());
        let vcpu = thread::spawn(move || {
            let run = Arc::new(KvmRun::default());
            bell.set_kicker(Some(Box::new(FakeKvm(run.clone()))));
            // As in the run loop of KVM: a ring that came before the kicker was installed shows here.
            loop {
                if bell.is_rung() {
                    bell.answer();
                    if done.load(Ordering::SeqCst) {
                        break;
                    }
                } else {
                    run.run();
                    bell.answer();
                    if done.load(Ordering::SeqCst) {
                        break;
                    }
                }
            }
            bell.set_kicker(None);
        });
        work.store(true, Ordering::SeqCst);
        doorbell.ring();
        vcpu.join().unwrap();
    });
}

/// A vCPU's thread that checks for work, then runs the guest or sleeps, until the machine stops. It
/// panics if it runs while the machine is paused, or in another engine than the other threads.
struct ModelMachine {
    control: VcpuControl<()>,
    paused: AtomicBool,
    running: [AtomicUsize; 2],
    served: Mutex<bool>,
    reply: Condvar,
}

impl ModelMachine {
    fn new(cpus: usize) -> Arc<Self> {
        let control = VcpuControl::new(cpus, Engine::Kvm);
        (0..cpus).for_each(|_| control.enter());
        control.resume();
        Arc::new(Self {
            control,
            paused: AtomicBool::new(false),
            running: [AtomicUsize::new(0), AtomicUsize::new(0)],
            served: Mutex::new(false),
            reply: Condvar::new(),
        })
    }

    fn vcpu(machine: &Arc<Self>, id: usize) -> thread::JoinHandle<Engine> {
        let machine = machine.clone();
        thread::spawn(move || machine.run(id))
    }

    fn run(&self, id: usize) -> Engine {
        let (control, mut engine) = (&self.control, Engine::Kvm);
        loop {
            let state = CheckpointState {
                ids: id..id + 1,
                engine,
                movable: Some(true),
            };
            let serve = &mut |_, ()| {
                *self.served.lock().unwrap() = true;
                self.reply.notify_all();
            };
            match control.checkpoint(state, serve) {
                Checkpoint::Stop => break,
                Checkpoint::Change(to) => {
                    engine = to;
                    continue;
                }
                Checkpoint::Run | Checkpoint::Again => {}
            }
            let [kvm, interp] = &self.running;
            let (mine, other) = match engine {
                Engine::Kvm => (kvm, interp),
                Engine::Interp => (interp, kvm),
            };
            mine.fetch_add(1, Ordering::SeqCst);
            assert_eq!(other.load(Ordering::SeqCst), 0, "two engines run the guest");
            assert!(!self.paused.load(Ordering::SeqCst), "a paused machine runs");
            mine.fetch_sub(1, Ordering::SeqCst);
            control.doorbell(id).sleep(FOREVER);
            control.doorbell(id).answer();
        }
        control.leave();
        engine
    }
}

#[test]
fn paused_machine_does_not_run_until_resumed() {
    explore(Some(2), || {
        let machine = ModelMachine::new(1);
        let vcpu = ModelMachine::vcpu(&machine, 0);
        assert!(machine.control.pause());
        machine.paused.store(true, Ordering::SeqCst);
        assert!(machine.control.request(0, ()));
        machine.paused.store(false, Ordering::SeqCst);
        machine.control.resume();
        machine.control.stop();
        vcpu.join().unwrap();
    });
}

#[test]
fn pause_returns_when_no_thread_runs() {
    explore(Some(2), || {
        let machine = ModelMachine::new(2);
        let vcpus = [
            ModelMachine::vcpu(&machine, 0),
            ModelMachine::vcpu(&machine, 1),
        ];
        assert!(machine.control.pause());
        machine.paused.store(true, Ordering::SeqCst);
        machine.control.stop();
        for vcpu in vcpus {
            vcpu.join().unwrap();
        }
    });
}

#[test]
fn engine_change_is_made_by_all_threads_at_once() {
    explore(Some(2), || {
        let machine = ModelMachine::new(2);
        let vcpus = [
            ModelMachine::vcpu(&machine, 0),
            ModelMachine::vcpu(&machine, 1),
        ];
        assert!(machine.control.change(Engine::Interp));
        machine.control.stop();
        for vcpu in vcpus {
            vcpu.join().unwrap();
        }
    });
}

#[test]
fn engine_change_and_pause_do_not_block_each_other() {
    explore(Some(2), || {
        let machine = ModelMachine::new(1);
        let vcpu = ModelMachine::vcpu(&machine, 0);
        let other = machine.clone();
        let changer = thread::spawn(move || {
            other.control.change(Engine::Interp);
        });
        assert!(machine.control.pause());
        machine.control.resume();
        changer.join().unwrap();
        machine.control.stop();
        vcpu.join().unwrap();
    });
}

#[test]
fn request_is_served_while_the_machine_is_paused() {
    explore(Some(2), || {
        let machine = ModelMachine::new(1);
        let vcpu = ModelMachine::vcpu(&machine, 0);
        assert!(machine.control.pause());
        assert!(machine.control.request(0, ()));
        let mut served = machine.served.lock().unwrap();
        while !*served {
            served = machine.reply.wait(served).unwrap();
        }
        drop(served);
        machine.control.stop();
        vcpu.join().unwrap();
    });
}
