//! Runs jobs in parallel and hands their results on in the order of the jobs.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

/// What happens while jobs run. Results come in the order of the jobs.
#[derive(Debug)]
pub enum Event<'a, R> {
    /// The set of running jobs changed: their indices, and the number of jobs that have ended.
    Running(&'a [usize], usize),
    /// The next job in order is done.
    Done(R),
}

/// Runs `run(index)` for each index below `count` on at most `threads` threads.
///
/// Ends early when `stop` is set, when `run` gives `None` or an error, and when `on_event` fails;
/// `stop` is set then, so that `run` can end its children. Results before the first gap are still
/// handed on. Returns how many were.
///
/// # Errors
///
/// The first error of `run` or `on_event`.
pub fn run_in_order<R: Send, E: Send>(
    count: usize,
    threads: NonZeroUsize,
    stop: &AtomicBool,
    run: impl Fn(usize) -> Result<R, E> + Sync,
    mut on_event: impl FnMut(Event<'_, R>) -> Result<(), E>,
) -> Result<usize, E> {
    let next = AtomicUsize::new(0);
    let (sender, receiver) = mpsc::channel::<(usize, Option<Result<R, E>>)>();
    std::thread::scope(|scope| {
        for _ in 0..threads.get().min(count) {
            let sender = sender.clone();
            let (next, run) = (&next, &run);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= count || sender.send((index, None)).is_err() {
                        break;
                    }
                    let result = run(index);
                    if sender.send((index, Some(result))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        let mut order = InOrder::default();
        for (index, result) in receiver {
            if let Err(error) = order.take(index, result, &mut on_event) {
                // The threads see the flag, and that nobody listens any more.
                stop.store(true, Ordering::Relaxed);
                return Err(error);
            }
        }
        Ok(order.handed_on)
    })
}

/// Results that wait for those before them.
struct InOrder<R> {
    running: Vec<usize>,
    waiting: BTreeMap<usize, R>,
    handed_on: usize,
}

impl<R> Default for InOrder<R> {
    fn default() -> Self {
        Self {
            running: Vec::new(),
            waiting: BTreeMap::new(),
            handed_on: 0,
        }
    }
}

impl<R> InOrder<R> {
    /// Takes the start (`None`) or the result of job `index`.
    fn take<E>(
        &mut self,
        index: usize,
        result: Option<Result<R, E>>,
        on_event: &mut impl FnMut(Event<'_, R>) -> Result<(), E>,
    ) -> Result<(), E> {
        match result {
            None => self.running.push(index),
            Some(result) => {
                self.running.retain(|running| *running != index);
                self.waiting.insert(index, result?);
            }
        }
        while let Some(result) = self.waiting.remove(&self.handed_on) {
            self.handed_on += 1;
            on_event(Event::Done(result))?;
        }
        on_event(Event::Running(
            &self.running,
            self.handed_on + self.waiting.len(),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const FOUR: NonZeroUsize = NonZeroUsize::new(4).unwrap();

    #[test]
    fn results_come_in_order_though_jobs_end_out_of_order() {
        let mut seen = Vec::new();
        let run = |index: usize| {
            let pause = u64::try_from(20 - index).unwrap();
            std::thread::sleep(Duration::from_millis(pause));
            Ok::<_, ()>(index)
        };
        let count = run_in_order(20, FOUR, &AtomicBool::new(false), run, |event| {
            if let Event::Done(index) = event {
                seen.push(index);
            }
            Ok(())
        });
        assert_eq!(count, Ok(20));
        assert_eq!(seen, (0..20).collect::<Vec<_>>());
    }

    #[test]
    fn never_more_jobs_run_than_threads() {
        let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let run = |_| {
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(2));
            now.fetch_sub(1, Ordering::SeqCst);
            Ok::<_, ()>(())
        };
        run_in_order(40, FOUR, &AtomicBool::new(false), run, |_| Ok(())).unwrap();
        assert!(most.load(Ordering::SeqCst) <= 4);
    }

    #[test]
    fn error_of_a_job_stops_the_rest() {
        let (stop, started) = (AtomicBool::new(false), AtomicUsize::new(0));
        let run = |index| {
            started.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(1));
            if index == 3 {
                Err("no such program")
            } else {
                Ok(())
            }
        };
        let result = run_in_order(10_000, FOUR, &stop, run, |_| Ok(()));
        assert_eq!(result, Err("no such program"));
        assert!(stop.load(Ordering::SeqCst));
        assert!(started.load(Ordering::SeqCst) < 10_000);
    }

    #[test]
    fn stop_flag_ends_the_run_early() {
        let stop = AtomicBool::new(false);
        let run = |index| {
            if index == 5 {
                stop.store(true, Ordering::Relaxed);
            }
            Ok::<_, ()>(())
        };
        let count = run_in_order(10_000, NonZeroUsize::MIN, &stop, run, |_| Ok(()));
        assert_eq!(count, Ok(6));
    }

    #[test]
    fn no_jobs_give_no_events() {
        let run = |_| Ok::<(), ()>(());
        assert_eq!(
            run_in_order(0, FOUR, &AtomicBool::new(false), run, |_| Err(())),
            Ok(0)
        );
    }
}
