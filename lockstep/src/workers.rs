//! Worker processes: each maps the region at the same linear addresses.
//!
//! A batch that ends its process on the host's processor ends only a worker.

#![expect(
    unsafe_code,
    reason = "workers are made by fork and share a mapping with their parent"
)]

use crate::tally::Tally;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A batch takes about a millisecond; one that takes this long has no end.
const STUCK: Duration = Duration::from_secs(60);
/// In place of a seed: the worker has not begun a batch.
const NO_SEED: u64 = u64::MAX;

/// Maximum number of workers.
const WORKERS_MAX: u32 = 32;

/// Memory that the workers share with their parent.
#[derive(Debug)]
#[repr(C)]
struct WorkerTable {
    /// The number of the next batch.
    next: AtomicU64,
    /// For each worker, the seed of the batch that it runs.
    seeds: [AtomicU64; WORKERS_MAX as usize],
}

/// Hands out batches to the workers, and records which batch each of them runs.
#[derive(Debug)]
pub(crate) struct BatchCounter {
    table: *mut WorkerTable,
}

impl BatchCounter {
    /// A counter whose first batch has this number.
    ///
    /// # Errors
    /// If memory cannot be mapped.
    pub(crate) fn new(first: u64) -> Result<Self> {
        // SAFETY: it is a fresh mapping, which replaces none; processes made by fork share it.
        let mapped = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size_of::<WorkerTable>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            bail!(
                "cannot map memory for the workers: {}",
                std::io::Error::last_os_error()
            );
        }
        let counter = Self {
            table: mapped.cast(),
        };
        counter.table().next.store(first, Ordering::Relaxed);
        for seed in &counter.table().seeds {
            seed.store(NO_SEED, Ordering::Relaxed);
        }
        Ok(counter)
    }

    fn table(&self) -> &WorkerTable {
        // SAFETY: `new` mapped the table, aligned to a page and zeroed, and `drop` unmaps it. All
        // fields are atomics, so that other processes may change them.
        unsafe { &*self.table }
    }

    /// Takes the next batch.
    pub(crate) fn take(&self) -> u64 {
        self.table().next.fetch_add(1, Ordering::Relaxed)
    }

    /// Records that a worker begins the batch of this seed.
    pub(crate) fn begin(&self, worker: u32, seed: u64) {
        self.table().seeds[worker as usize].store(seed, Ordering::Relaxed);
    }

    /// The first batch that no worker has taken.
    pub(crate) fn next(&self) -> u64 {
        self.table().next.load(Ordering::Relaxed)
    }

    fn seed_of(&self, worker: u32) -> u64 {
        self.table().seeds[worker as usize].load(Ordering::Relaxed)
    }
}

impl Drop for BatchCounter {
    fn drop(&mut self) {
        // SAFETY: `new` mapped it with this length, and no reference to it outlives the counter.
        unsafe { libc::munmap(self.table.cast(), size_of::<WorkerTable>()) };
    }
}

/// What a worker sends to its parent when it ends.
#[derive(Debug, Serialize, Deserialize)]
enum WorkerResult {
    Done(Tally),
    Failed(String),
}

/// A worker process that runs.
#[derive(Debug)]
struct Worker {
    number: u32,
    pid: libc::pid_t,
    pipe: File,
}

fn start(number: u32, work: impl FnOnce() -> Result<Tally>) -> Result<Worker> {
    let mut ends = [0; 2];
    // SAFETY: the array has space for both descriptors. They are new, and the files take them over.
    let (read, mut write) = unsafe {
        ensure!(
            libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) == 0,
            "cannot make a pipe for a worker"
        );
        (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1]))
    };
    // SAFETY: of the locks that other threads may hold, the child takes only the allocator's, which
    // fork keeps consistent. It computes, writes to its pipe, and leaves by `_exit`.
    match unsafe { libc::fork() } {
        -1 => bail!("cannot start a worker: {}", std::io::Error::last_os_error()),
        0 => {
            drop(read);
            let result = match work() {
                Ok(tally) => WorkerResult::Done(tally),
                Err(e) => WorkerResult::Failed(format!("{e:#}")),
            };
            let sent = serde_json::to_vec(&result).is_ok_and(|text| write.write_all(&text).is_ok());
            // SAFETY: it ends the process without running the parent's destructors and exit
            // handlers.
            unsafe { libc::_exit(i32::from(!sent)) }
        }
        pid => Ok(Worker {
            number,
            pid,
            pipe: read,
        }),
    }
}

impl Worker {
    /// Waits for the worker and returns its tally.
    fn join(mut self, counter: &BatchCounter) -> Result<Tally> {
        let text = self.read_result(counter);
        if text.is_err() {
            // SAFETY: the child was not waited for, so the pid is still its own.
            unsafe { libc::kill(self.pid, libc::SIGKILL) };
        }
        let mut status = 0;
        // SAFETY: it writes only `status`; the child is waited for once.
        unsafe { libc::waitpid(self.pid, &raw mut status, 0) };
        let text = text?;
        let batch = self.batch(counter);
        if libc::WIFSIGNALED(status) {
            bail!(
                "the batch --one {batch} ended its worker with signal {}",
                libc::WTERMSIG(status)
            );
        }
        match serde_json::from_slice(&text)
            .with_context(|| format!("the batch --one {batch} destroyed its worker's result"))?
        {
            WorkerResult::Done(tally) => Ok(tally),
            WorkerResult::Failed(error) => bail!(error),
        }
    }

    /// The seed of the batch that the worker runs, for messages.
    fn batch(&self, counter: &BatchCounter) -> String {
        match counter.seed_of(self.number) {
            NO_SEED => "none".to_owned(),
            seed => format!("{seed:#x}"),
        }
    }

    /// Reads the worker's result; fails if it stays at one batch for too long.
    fn read_result(&mut self, counter: &BatchCounter) -> Result<Vec<u8>> {
        let mut text = Vec::new();
        let mut last = (counter.seed_of(self.number), Instant::now());
        loop {
            let mut poll = libc::pollfd {
                fd: self.pipe.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: the array has one element, and the descriptor is open.
            if unsafe { libc::poll(&raw mut poll, 1, 200) } > 0 {
                let mut piece = [0; 0x1_0000];
                match self.pipe.read(&mut piece)? {
                    0 => return Ok(text),
                    n => text.extend(&piece[..n]),
                }
            }
            let seed = counter.seed_of(self.number);
            if seed != last.0 {
                last = (seed, Instant::now());
            } else if last.1.elapsed() > STUCK {
                bail!("the batch --one {} does not end", self.batch(counter));
            }
        }
    }
}

/// Does work in `workers` processes, each of which gets its number, and returns their tallies.
///
/// # Errors
/// If a process cannot be made, fails, dies or stays at one batch: the error names the batch that
/// it ran.
pub(crate) fn run_all(
    workers: u32,
    counter: &BatchCounter,
    work: impl Fn(u32) -> Result<Tally>,
) -> Result<Vec<Tally>> {
    ensure!(workers <= WORKERS_MAX, "at most {WORKERS_MAX} jobs");
    let started: Vec<_> = (0..workers).map(|n| start(n, || work(n))).collect();
    let ended: Vec<_> = started
        .into_iter()
        .map(|worker| worker?.join(counter))
        .collect();
    ended.into_iter().collect()
}
