//! Supervises the process that runs one case: its output, its time, its end.
//!
//! The child leads a process group of its own, and the whole group is killed when the child ends,
//! runs out of time or the harness is interrupted: nothing that a runner started stays behind.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use crate::harness::serial::Transcript;

/// How often the interrupt flag is looked at.
const INTERRUPT_POLL: Duration = Duration::from_millis(100);
/// How long output may still come after the end of the child, from a process that left its group.
const DRAIN: Duration = Duration::from_millis(500);

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It exited with this status.
    Status(i32),
    /// A signal, which the harness did not send, ended it.
    Signal(i32),
    /// It was killed because its time was over.
    Overdue,
    /// It was killed because the harness was interrupted.
    Interrupted,
}

/// A child that has ended, and what it said.
#[derive(Debug)]
pub struct Finished {
    /// How it ended.
    pub end: End,
    /// Its standard output: the guest's serial line.
    pub output: Transcript,
    /// Its standard error: what the VMM says.
    pub stderr: Transcript,
    /// From start to end.
    pub elapsed: Duration,
}

/// Runs `command` until it ends, `limit` is over or `interrupt` is set.
///
/// # Errors
///
/// When the host cannot start the child or wait for it; then no child remains.
pub fn supervise(
    mut command: Command,
    limit: Duration,
    interrupt: &AtomicBool,
) -> io::Result<Finished> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    let start = Instant::now();
    let mut group = Group(command.spawn()?);
    let mut output = Stream::new(group.0.stdout.take());
    let mut stderr = Stream::new(group.0.stderr.take());
    let pidfd = pidfd_open(group.pid(), PidfdFlags::empty())?;
    let deadline = start + limit;
    let killed = loop {
        let now = Instant::now();
        if interrupt.load(Ordering::Relaxed) {
            break Some(End::Interrupted);
        }
        if now >= deadline {
            break Some(End::Overdue);
        }
        if poll_streams(
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
        poll_streams(
            &mut [&mut output, &mut stderr],
            None::<&std::fs::File>,
            left,
        )?;
    }
    let end = killed.unwrap_or_else(|| match (status.code(), status.signal()) {
        (Some(code), _) => End::Status(code),
        (None, signal) => End::Signal(signal.unwrap_or(0)),
    });
    Ok(Finished {
        end,
        output: output.finish(),
        stderr: stderr.finish(),
        elapsed,
    })
}

/// A child and the process group it leads. Both are killed when this is dropped.
struct Group(Child);

impl Group {
    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// Kills what is left of the group, then takes the status of its leader. In this order, since
    /// the group's number stays taken as long as its leader has not been waited for.
    fn end(&mut self) -> io::Result<std::process::ExitStatus> {
        // No such group: the leader has ended, and has just been waited for.
        let _ = kill_process_group(self.pid(), Signal::KILL);
        self.0.wait()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            let _ = self.end();
        }
    }
}

/// One output of the child, and what was read from it.
struct Stream<R> {
    pipe: Option<R>,
    transcript: Transcript,
}

impl<R: Read + AsFd> Stream<R> {
    fn new(pipe: Option<R>) -> Self {
        Self {
            pipe,
            transcript: Transcript::default(),
        }
    }

    /// Reads once; the pipe must be readable.
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

/// What [`poll_streams`] needs of a stream, whatever its pipe is.
trait Source {
    fn poll_fd(&self) -> Option<PollFd<'_>>;
    fn is_open(&self) -> bool;
    fn ready(&mut self);
}

impl<R: Read + AsFd> Source for Stream<R> {
    fn poll_fd(&self) -> Option<PollFd<'_>> {
        self.pipe
            .as_ref()
            .map(|pipe| PollFd::new(pipe, PollFlags::IN))
    }

    fn is_open(&self) -> bool {
        self.pipe.is_some()
    }

    fn ready(&mut self) {
        self.read();
    }
}

/// Waits at most `limit` (and no longer than [`INTERRUPT_POLL`]), reads what can be read, and
/// returns whether the process behind `pidfd` has ended.
fn poll_streams(
    streams: &mut [&mut dyn Source],
    pidfd: Option<&impl AsFd>,
    limit: Duration,
) -> io::Result<bool> {
    let limit = Timespec::try_from(limit.min(INTERRUPT_POLL)).map_err(io::Error::other)?;
    let mut fds: Vec<PollFd<'_>> = pidfd
        .iter()
        .map(|fd| PollFd::new(fd, PollFlags::IN))
        .collect();
    let mut polled = Vec::with_capacity(streams.len());
    for (index, stream) in streams.iter().enumerate() {
        if let Some(fd) = stream.poll_fd() {
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
        streams[index].ready();
    }
    Ok(ended == [true])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Finished {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        supervise(command, limit, &AtomicBool::new(false)).unwrap()
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn child_that_exits_gives_status_and_both_outputs() {
        let finished = shell("echo ok a cpl=0; echo oops >&2; exit 7", LONG);
        assert_eq!(finished.end, End::Status(7));
        assert_eq!(finished.output.tail(), ["ok a cpl=0"]);
        assert_eq!(finished.stderr.tail(), ["oops"]);
        assert!(finished.elapsed < LONG);
    }

    #[test]
    fn child_that_dies_gives_its_signal() {
        assert_eq!(shell("kill -SEGV $$", LONG).end, End::Signal(11));
    }

    #[test]
    fn child_that_hangs_is_killed_with_its_children() {
        let finished = shell("sleep 1000 & echo $!; wait", Duration::from_secs(1));
        assert_eq!(finished.end, End::Overdue);
        let sleeper = finished.output.tail()[0].clone();
        let stat = || std::fs::read_to_string(format!("/proc/{sleeper}/stat")).unwrap_or_default();
        // Where the machine is busy it takes the signal a while to end the process.
        let start = Instant::now();
        let mut state = stat();
        while !state.is_empty() && !state.contains(") Z") {
            assert!(start.elapsed() < Duration::from_secs(10), "{state}");
            std::thread::sleep(Duration::from_millis(5));
            state = stat();
        }
    }

    #[test]
    fn descendant_that_holds_the_pipes_does_not_hold_the_harness() {
        let start = Instant::now();
        let finished = shell("setsid sleep 20 & echo $!; exit 1", LONG);
        assert_eq!(finished.end, End::Status(1));
        assert!(start.elapsed() < Duration::from_secs(10));
        let sleeper = finished.output.tail()[0].parse().unwrap();
        let _ = rustix::process::kill_process(Pid::from_raw(sleeper).unwrap(), Signal::KILL);
    }

    #[test]
    fn child_that_floods_its_output_is_stopped_in_time() {
        let start = Instant::now();
        let finished = shell("cat /dev/zero", Duration::from_millis(300));
        assert_eq!(finished.end, End::Overdue);
        assert!(start.elapsed() < Duration::from_secs(10));
        assert!(finished.output.tail()[0].contains("more bytes]"));
    }

    #[test]
    fn interrupt_ends_the_child() {
        let interrupt = AtomicBool::new(false);
        let mut command = Command::new("/bin/sleep");
        command.arg("1000");
        let finished = std::thread::scope(|scope| {
            let child = scope.spawn(|| supervise(command, LONG, &interrupt));
            std::thread::sleep(Duration::from_millis(50));
            interrupt.store(true, Ordering::Relaxed);
            child.join().unwrap()
        });
        assert_eq!(finished.unwrap().end, End::Interrupted);
    }

    #[test]
    fn missing_program_is_an_error() {
        let command = Command::new("/no/such/program");
        let error = supervise(command, LONG, &AtomicBool::new(false)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
