//! Runs jobs in parallel, and delivers their results in the order of the jobs.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

/// An event while jobs run. Results are delivered in the order of the jobs.
#[derive(Debug)]
pub enum PoolEvent<'a, R> {
    /// The set of running jobs has changed: their indices, and the number of jobs that have ended.
    Running(&'a [usize], usize),
    /// The result of the next job in order.
    Done(R),
}

/// Runs `run(index)` for each index below `count` on at most `threads` threads.
///
/// It ends early when `stop` is set, and when `run` or `on_event` fails. In the latter cases it
/// sets `stop`, so that `run` can end its children. Results before the first missing one are still
/// delivered. Returns the number of delivered results.
///
/// # Errors
///
/// Returns the first error of `run` or `on_event`.
pub fn run_in_order<R: Send, E: Send>(
    count: usize,
    threads: NonZeroUsize,
    stop: &AtomicBool,
    run: impl Fn(usize) -> Result<R, E> + Sync,
    mut on_event: impl FnMut(PoolEvent<'_, R>) -> Result<(), E>,
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
                // The threads end: by the flag, or because they cannot send any more.
                stop.store(true, Ordering::Relaxed);
                return Err(error);
            }
        }
        Ok(order.delivered)
    })
}

/// Reorders results: each waits for those before it.
struct InOrder<R> {
    running: Vec<usize>,
    waiting: BTreeMap<usize, R>,
    delivered: usize,
}

impl<R> Default for InOrder<R> {
    fn default() -> Self {
        Self {
            running: Vec::new(),
            waiting: BTreeMap::new(),
            delivered: 0,
        }
    }
}

impl<R> InOrder<R> {
    /// Takes the start (`None`) or the result of job `index`.
    fn take<E>(
        &mut self,
        index: usize,
        result: Option<Result<R, E>>,
        on_event: &mut impl FnMut(PoolEvent<'_, R>) -> Result<(), E>,
    ) -> Result<(), E> {
        match result {
            None => self.running.push(index),
            Some(result) => {
                self.running.retain(|running| *running != index);
                self.waiting.insert(index, result?);
            }
        }
        while let Some(result) = self.waiting.remove(&self.delivered) {
            self.delivered += 1;
            on_event(PoolEvent::Done(result))?;
        }
        on_event(PoolEvent::Running(
            &self.running,
            self.delivered + self.waiting.len(),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const FOUR: NonZeroUsize = NonZeroUsize::new(4).unwrap();

    #[test]
    fn results_are_delivered_in_order_when_jobs_end_out_of_order() {
        let mut delivered = Vec::new();
        let run = |index: usize| {
            let pause = u64::try_from(20 - index).unwrap();
            std::thread::sleep(Duration::from_millis(pause));
            Ok::<_, ()>(index)
        };
        let count = run_in_order(20, FOUR, &AtomicBool::new(false), run, |event| {
            if let PoolEvent::Done(index) = event {
                delivered.push(index);
            }
            Ok(())
        });
        assert_eq!(count, Ok(20));
        assert_eq!(delivered, (0..20).collect::<Vec<_>>());
    }

    #[test]
    fn at_most_one_job_runs_on_each_thread() {
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
    fn error_of_a_job_stops_the_other_jobs() {
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
    fn empty_list_of_jobs_has_no_events() {
        let run = |_| Ok::<(), ()>(());
        assert_eq!(
            run_in_order(0, FOUR, &AtomicBool::new(false), run, |_| Err(())),
            Ok(0)
        );
    }
}
