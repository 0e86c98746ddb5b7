//! Jobs are processes: each has the regions at the same linear addresses for itself, and one that runs away on the
//! host's processor takes nothing with it.

#![expect(unsafe_code, reason = "processes are made by fork")]

use crate::judge::Tally;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A batch takes a millisecond; one that takes this long has no end.
const STUCK: Duration = Duration::from_secs(60);
/// What a job has at hand before its first batch.
const NONE: u64 = u64::MAX;

/// What all jobs and their parent see.
#[derive(Debug)]
#[repr(C)]
struct Shared {
    /// The next batch.
    next: AtomicU64,
    /// The seed of the batch that each job has at hand.
    at: [AtomicU64; MOST as usize],
}

/// Most jobs.
pub const MOST: u32 = 32;

/// Counts batches for jobs.
#[derive(Debug)]
pub struct Counter {
    shared: *mut Shared,
}

impl Counter {
    /// Begins with this batch.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(first: u64) -> Result<Self> {
        // SAFETY: a fresh mapping, which forked processes share.
        let p = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size_of::<Shared>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if p == libc::MAP_FAILED {
            bail!("no memory for jobs: {}", std::io::Error::last_os_error());
        }
        let counter = Self { shared: p.cast() };
        counter.shared().next.store(first, Ordering::Relaxed);
        for at in &counter.shared().at {
            at.store(NONE, Ordering::Relaxed);
        }
        Ok(counter)
    }

    fn shared(&self) -> &Shared {
        // SAFETY: mapped by `new`, zeroed, until `drop`; it has only atomics.
        unsafe { &*self.shared }
    }

    /// Takes the next batch.
    pub fn take(&self) -> u64 {
        self.shared().next.fetch_add(1, Ordering::Relaxed)
    }

    /// A job begins with the batch of this seed.
    pub fn begin(&self, job: u32, seed: u64) {
        self.shared().at[job as usize].store(seed, Ordering::Relaxed);
    }

    /// The first batch that nobody has taken.
    pub fn next(&self) -> u64 {
        self.shared().next.load(Ordering::Relaxed)
    }

    fn at(&self, job: u32) -> u64 {
        self.shared().at[job as usize].load(Ordering::Relaxed)
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`.
        unsafe { libc::munmap(self.shared.cast(), size_of::<Shared>()) };
    }
}

/// What a job says at its end.
#[derive(Debug, Serialize, Deserialize)]
enum Report {
    Done(Tally),
    Failed(String),
}

/// A process at work.
#[derive(Debug)]
struct Job {
    number: u32,
    pid: libc::pid_t,
    pipe: File,
}

fn start(number: u32, work: impl FnOnce() -> Result<Tally>) -> Result<Job> {
    let mut ends = [0; 2];
    // SAFETY: the array takes both descriptors, which are then owned here.
    let (read, mut write) = unsafe {
        ensure!(
            libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) == 0,
            "no pipe for a job"
        );
        (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1]))
    };
    // SAFETY: the child only computes, writes to its pipe and leaves by `_exit`.
    match unsafe { libc::fork() } {
        -1 => bail!("no process for a job: {}", std::io::Error::last_os_error()),
        0 => {
            drop(read);
            let report = match work() {
                Ok(tally) => Report::Done(tally),
                Err(e) => Report::Failed(format!("{e:#}")),
            };
            let told = serde_json::to_vec(&report).is_ok_and(|text| write.write_all(&text).is_ok());
            // SAFETY: nothing of the parent's is to be dropped here.
            unsafe { libc::_exit(i32::from(!told)) }
        }
        pid => Ok(Job {
            number,
            pid,
            pipe: read,
        }),
    }
}

impl Job {
    /// Its tally.
    fn join(mut self, counter: &Counter) -> Result<Tally> {
        let text = self.listen(counter);
        if text.is_err() {
            // SAFETY: our child, not yet waited for.
            unsafe { libc::kill(self.pid, libc::SIGKILL) };
        }
        let mut status = 0;
        // SAFETY: our child, waited for once.
        unsafe { libc::waitpid(self.pid, &raw mut status, 0) };
        let text = text?;
        if libc::WIFSIGNALED(status) {
            bail!(
                "batch --one {} ended its job with signal {}",
                self.place(counter),
                libc::WTERMSIG(status)
            );
        }
        let at = self.place(counter);
        match serde_json::from_slice(&text)
            .with_context(|| format!("batch --one {at} broke its job"))?
        {
            Report::Done(tally) => Ok(tally),
            Report::Failed(why) => bail!(why),
        }
    }

    fn place(&self, counter: &Counter) -> String {
        match counter.at(self.number) {
            NONE => "none".to_owned(),
            at => format!("{at:#x}"),
        }
    }

    /// All that it says, as long as it gets on.
    fn listen(&mut self, counter: &Counter) -> Result<Vec<u8>> {
        let mut text = Vec::new();
        let mut seen = (counter.at(self.number), Instant::now());
        loop {
            let mut poll = libc::pollfd {
                fd: self.pipe.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one descriptor, which is open.
            if unsafe { libc::poll(&raw mut poll, 1, 200) } > 0 {
                let mut piece = [0; 0x1_0000];
                match self.pipe.read(&mut piece)? {
                    0 => return Ok(text),
                    n => text.extend(&piece[..n]),
                }
            }
            let at = counter.at(self.number);
            if at != seen.0 {
                seen = (at, Instant::now());
            } else if seen.1.elapsed() > STUCK {
                bail!("batch --one {} has no end", self.place(counter));
            }
        }
    }
}

/// Does work in so many processes.
///
/// # Errors
/// When a process cannot be made, fails, dies or gets stuck: with the batch that it had at hand.
pub fn all(
    jobs: u32,
    counter: &Counter,
    work: impl Fn(u32) -> Result<Tally>,
) -> Result<Vec<Tally>> {
    ensure!(jobs <= MOST, "at most {MOST} jobs");
    let started: Vec<_> = (0..jobs).map(|n| start(n, || work(n))).collect();
    let ended: Vec<_> = started.into_iter().map(|job| job?.join(counter)).collect();
    ended.into_iter().collect()
}
