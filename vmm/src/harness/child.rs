//! Supervises the process that runs one case: collects its output, limits its time, gets its
//! status.
//!
//! The child leads a process group of its own. The whole group is killed when the child ends, when
//! its time is up or when the harness is interrupted, so that no process of a runner is left
//! running.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use crate::harness::serial::Transcript;

/// How often the interrupt flag is polled.
const INTERRUPT_POLL: Duration = Duration::from_millis(100);
/// How long output is read after the child has ended, from a process that left its group.
const DRAIN: Duration = Duration::from_millis(500);

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChildEnd {
    /// The child exited with this status.
    Status(i32),
    /// A signal that the harness did not send terminated the child.
    Signal(i32),
    /// The harness killed the child because its time was up.
    Overdue,
    /// The harness killed the child because the harness was interrupted.
    Interrupted,
}

/// A child that has ended, and its output.
#[derive(Debug)]
pub struct FinishedChild {
    /// How it ended.
    pub end: ChildEnd,
    /// The child's standard output: the guest's serial line.
    pub output: Transcript,
    /// The child's standard error: the VMM's messages.
    pub stderr: Transcript,
    /// Time from start to end.
    pub elapsed: Duration,
}

/// Runs `command` until it ends, `limit` has passed or `interrupt` is set.
///
/// # Errors
///
/// The host cannot start the child or wait for it. No child is left running then.
pub fn supervise(
    mut command: Command,
    limit: Duration,
    interrupt: &AtomicBool,
) -> io::Result<FinishedChild> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    let start = Instant::now();
    let mut group = ProcessGroup(command.spawn()?);
    let mut output = OutputPipe::new(group.0.stdout.take());
    let mut stderr = OutputPipe::new(group.0.stderr.take());
    let pidfd = pidfd_open(group.pid(), PidfdFlags::empty())?;
    let deadline = start + limit;
    let killed = loop {
        let now = Instant::now();
        if interrupt.load(Ordering::Relaxed) {
            break Some(ChildEnd::Interrupted);
        }
        if now >= deadline {
            break Some(ChildEnd::Overdue);
        }
        if poll_pipes(
            &mut [&mut output, &mut stderr],
            Some(&pidfd),
            deadline - now,
        )? {
            break None;
        }
    };
    let elapsed = start.elapsed();
    let status = group.end()?;
    let drained = Instant::now() + DRAIN;
    while output.is_open() || stderr.is_open() {
        let left = drained.saturating_duration_since(Instant::now());
        if left.is_zero() || interrupt.load(Ordering::Relaxed) {
            break;
        }
        poll_pipes(
            &mut [&mut output, &mut stderr],
            None::<&std::fs::File>,
            left,
        )?;
    }
    let end = killed.unwrap_or_else(|| match (status.code(), status.signal()) {
        (Some(code), _) => ChildEnd::Status(code),
        (None, signal) => ChildEnd::Signal(signal.unwrap_or(0)),
    });
    Ok(FinishedChild {
        end,
        output: output.finish(),
        stderr: stderr.finish(),
        elapsed,
    })
}

/// A child and the process group it leads. Both are killed when this is dropped.
struct ProcessGroup(Child);

impl ProcessGroup {
    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// Kills the rest of the group, then waits for its leader.
    ///
    /// The order matters: the group's number cannot be reused until its leader has been waited for.
    fn end(&mut self) -> io::Result<std::process::ExitStatus> {
        // Fails if the group has no process left.
        let _ = kill_process_group(self.pid(), Signal::KILL);
        self.0.wait()
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            let _ = self.end();
        }
    }
}

/// One output of the child, and the transcript of what was read from it.
struct OutputPipe<R> {
    pipe: Option<R>,
    transcript: Transcript,
}

impl<R: Read + AsFd> OutputPipe<R> {
    fn new(pipe: Option<R>) -> Self {
        Self {
            pipe,
            transcript: Transcript::default(),
        }
    }

    /// Reads once. The pipe must be readable.
    fn read(&mut self) {
        let mut buffer = [0; 16 << 10];
        let Some(pipe) = &mut self.pipe else { return };
        match pipe.read(&mut buffer) {
            Ok(0) => self.pipe = None,
            Ok(count) => self.transcript.push(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => self.pipe = None,
        }
    }

    fn finish(mut self) -> Transcript {
        self.transcript.finish();
        self.transcript
    }
}

/// An [`OutputPipe`] of any type, for [`poll_pipes`].
trait PolledPipe {
    fn poll_fd(&self) -> Option<PollFd<'_>>;
    fn is_open(&self) -> bool;
    fn on_readable(&mut self);
}

impl<R: Read + AsFd> PolledPipe for OutputPipe<R> {
    fn poll_fd(&self) -> Option<PollFd<'_>> {
        self.pipe
            .as_ref()
            .map(|pipe| PollFd::new(pipe, PollFlags::IN))
    }

    fn is_open(&self) -> bool {
        self.pipe.is_some()
    }

    fn on_readable(&mut self) {
        self.read();
    }
}

/// Waits for at most `limit` and [`INTERRUPT_POLL`], and reads the pipes that are readable.
///
/// Returns whether the process of `pidfd` has ended.
fn poll_pipes(
    pipes: &mut [&mut dyn PolledPipe],
    pidfd: Option<&impl AsFd>,
    limit: Duration,
) -> io::Result<bool> {
    let limit = Timespec::try_from(limit.min(INTERRUPT_POLL)).map_err(io::Error::other)?;
    let mut fds: Vec<PollFd<'_>> = pidfd
        .iter()
        .map(|fd| PollFd::new(fd, PollFlags::IN))
        .collect();
    let mut polled = Vec::with_capacity(pipes.len());
    for (index, pipe) in pipes.iter().enumerate() {
        if let Some(fd) = pipe.poll_fd() {
            fds.push(fd);
            polled.push(index);
        }
    }
    match poll(&mut fds, Some(&limit)) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Ok(false),
        Err(error) => return Err(error.into()),
    }
    let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
    let (ended, ready) = ready.split_at(usize::from(pidfd.is_some()));
    for (index, _) in polled.into_iter().zip(ready).filter(|(_, ready)| **ready) {
        pipes[index].on_readable();
    }
    Ok(ended == [true])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> FinishedChild {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        supervise(command, limit, &AtomicBool::new(false)).unwrap()
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn exited_child_has_its_status_and_both_outputs() {
        let finished = shell("echo ok a cpl=0; echo oops >&2; exit 7", LONG);
        assert_eq!(finished.end, ChildEnd::Status(7));
        assert_eq!(finished.output.tail(), ["ok a cpl=0"]);
        assert_eq!(finished.stderr.tail(), ["oops"]);
        assert!(finished.elapsed < LONG);
    }

    #[test]
    fn child_killed_by_a_signal_has_that_signal() {
        assert_eq!(shell("kill -SEGV $$", LONG).end, ChildEnd::Signal(11));
    }

    #[test]
    fn hanging_child_is_killed_with_its_children() {
        let finished = shell("sleep 1000 & echo $!; wait", Duration::from_secs(1));
        assert_eq!(finished.end, ChildEnd::Overdue);
        let sleeper = finished.output.tail()[0].clone();
        let stat = || std::fs::read_to_string(format!("/proc/{sleeper}/stat")).unwrap_or_default();
        // On a busy host, the process does not end at once.
        let start = Instant::now();
        let mut state = stat();
        while !state.is_empty() && !state.contains(") Z") {
            assert!(start.elapsed() < Duration::from_secs(10), "{state}");
            std::thread::sleep(Duration::from_millis(5));
            state = stat();
        }
    }

    #[test]
    fn descendant_that_keeps_the_pipes_open_does_not_block_the_harness() {
        let start = Instant::now();
        let finished = shell("setsid sleep 20 & echo $!; exit 1", LONG);
        assert_eq!(finished.end, ChildEnd::Status(1));
        assert!(start.elapsed() < Duration::from_secs(10));
        let sleeper = finished.output.tail()[0].parse().unwrap();
        let _ = rustix::process::kill_process(Pid::from_raw(sleeper).unwrap(), Signal::KILL);
    }

    #[test]
    fn child_that_floods_its_output_is_killed_when_its_time_is_up() {
        let start = Instant::now();
        let finished = shell("cat /dev/zero", Duration::from_millis(300));
        assert_eq!(finished.end, ChildEnd::Overdue);
        assert!(start.elapsed() < Duration::from_secs(10));
        assert!(finished.output.tail()[0].contains("more bytes]"));
    }

    #[test]
    fn interrupt_kills_the_child() {
        let interrupt = AtomicBool::new(false);
        let mut command = Command::new("/bin/sleep");
        command.arg("1000");
        let finished = std::thread::scope(|scope| {
            let child = scope.spawn(|| supervise(command, LONG, &interrupt));
            std::thread::sleep(Duration::from_millis(50));
            interrupt.store(true, Ordering::Relaxed);
            child.join().unwrap()
        });
        assert_eq!(finished.unwrap().end, ChildEnd::Interrupted);
    }

    #[test]
    fn missing_program_is_an_error() {
        let command = Command::new("/no/such/program");
        let error = supervise(command, LONG, &AtomicBool::new(false)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
