//! Confines each thread by the rules of its kind.

use std::io;
use std::sync::OnceLock;

use seccompiler::{BpfProgram, apply_filter};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use thiserror::Error;
use vmm_sys_util::signal::block_signal;

use super::filters::{SandboxNeeds, Strictness, ThreadKind, compile, compile_clone};
use super::{limits, trap};

/// Why the process cannot be confined.
#[derive(Debug, Error)]
pub enum SandboxError {
    /// A file of rules is malformed, which is a bug of the monitor.
    #[error("the rules of a thread have not the form of rules")]
    Rules,
    /// The rules cannot be compiled, which is a bug of the monitor.
    #[error("the rules of a thread cannot be compiled")]
    Compile(#[source] Box<seccompiler::Error>),
    /// The handler of SIGSYS cannot be installed.
    #[error("the handler of refused system calls cannot be installed")]
    Handler(#[source] io::Error),
    /// A resource limit cannot be set.
    #[error("the limit of {0} cannot be set")]
    Limit(&'static str, #[source] io::Error),
    /// This kernel has no seccomp filters.
    #[error("this kernel has no seccomp filters: system calls are not confined")]
    NoSeccomp(#[source] Box<seccompiler::Error>),
    /// This kernel has no Landlock.
    #[error("this kernel has no Landlock: files are not confined")]
    NoLandlock,
    /// Landlock refused its rules.
    #[error("Landlock refuses its rules")]
    Landlock(#[source] Box<landlock::RulesetError>),
}

/// The arguments of [`prepare`]; empty until it was called.
static RULES: OnceLock<(Strictness, SandboxNeeds)> = OnceLock::new();

fn apply(filters: &[BpfProgram]) -> Result<(), SandboxError> {
    let applied = filters.iter().try_for_each(|filter| apply_filter(filter));
    applied.map_err(|error| SandboxError::NoSeccomp(Box::new(error)))
}

/// Prepares the process: resource limits, the handler of SIGSYS, and no new processes.
///
/// This thread, and each thread that it starts from now on, cannot create a process. Afterwards
/// [`enter`] confines the thread that calls it.
///
/// # Errors
///
/// A limit or the handler of SIGSYS cannot be set, or the kernel has no seccomp filters. The
/// threads are not confined then.
pub fn prepare(strictness: Strictness, needs: SandboxNeeds) -> Result<(), SandboxError> {
    if strictness == Strictness::Refuse {
        trap::install()?;
    }
    limits::lower(needs)?;
    apply(&compile_clone(strictness)?)?;
    // A second call in one process leaves the first one in force.
    let _ = RULES.set((strictness, needs));
    Ok(())
}

/// Confines the calling thread by the rules of `kind`, if [`prepare`] was called.
///
/// Signals that end or continue the process are blocked in all threads but those whose rules let
/// their handler wake the thread that waits for signals.
///
/// [`prepare`] has checked that the kernel supports filters. If the kernel refuses this one, the
/// process ends, so that no thread runs without a filter.
pub fn enter(kind: ThreadKind) {
    let Some(&(strictness, needs)) = RULES.get() else {
        return;
    };
    if !matches!(kind, ThreadKind::Main | ThreadKind::Signals) {
        for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGCONT] {
            // Only a signal that is blocked already is an error.
            let _ = block_signal(signal);
        }
    }
    let entered = compile(kind, strictness, needs).and_then(|filter| apply(&[filter]));
    if let Err(error) = entered {
        tracing::error!("--sandbox: a thread cannot be confined: {error}");
        std::process::abort();
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Output};
    use std::thread;

    use rustix::process::{Pid, Resource, Signal, getrlimit, kill_process};
    use vm_memory::MmapRegion;

    use super::*;
    use crate::sandbox::settle_allocator;

    /// Calls that no thread of a run may make, each with whether it failed by EPERM.
    fn forbidden_calls() -> Vec<(&'static str, bool)> {
        let refused = |error: Option<io::Error>| {
            error.is_some_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
        };
        let own = Pid::from_raw(std::process::id().cast_signed()).unwrap();
        let writable_code = MmapRegion::<()>::build(
            None,
            4096,
            libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        vec![
            ("writable code", writable_code.is_err()),
            ("open", refused(File::open("/etc/hostname").err())),
            (
                "create",
                refused(File::create("/tmp/hindsight-forbidden").err()),
            ),
            ("execute", refused(Command::new("/bin/true").spawn().err())),
            ("listen", refused(TcpListener::bind("127.0.0.1:0").err())),
            ("connect", refused(TcpStream::connect("127.0.0.1:9").err())),
            ("unix socket", refused(UnixStream::pair().err())),
            ("read folder", refused(std::fs::read_dir("/").err())),
            (
                "folder",
                refused(std::fs::create_dir("/tmp/hindsight-forbidden").err()),
            ),
            (
                "signal",
                refused(kill_process(own, Signal::CONT).err().map(Into::into)),
            ),
        ]
    }

    #[test]
    fn every_kind_of_thread_is_refused_what_its_task_does_not_need() {
        trap::install().unwrap();
        for kind in ThreadKind::ALL {
            let mut filters = Vec::from(compile_clone(Strictness::Refuse).unwrap());
            filters.push(compile(kind, Strictness::Refuse, SandboxNeeds::default()).unwrap());
            let calls = thread::spawn(move || {
                apply(&filters).unwrap();
                forbidden_calls()
            });
            for (call, refused) in calls.join().unwrap() {
                assert!(refused, "{kind:?}: {call}");
            }
        }
    }

    #[test]
    fn refused_thread_continues_its_task() {
        trap::install().unwrap();
        let filter = compile(
            ThreadKind::Vcpu,
            Strictness::Refuse,
            SandboxNeeds::default(),
        )
        .unwrap();
        let sum = thread::spawn(move || {
            apply(&[filter]).unwrap();
            assert!(File::open("/etc/hostname").is_err());
            let large: Vec<u64> = (0..1 << 20).collect();
            large.iter().sum::<u64>()
        });
        assert_eq!(sum.join().unwrap(), (1 << 19) * ((1 << 20) - 1));
    }

    /// Runs an ignored test of this module in a process of its own.
    fn run_in_child(test: &str) -> Output {
        let mut child = Command::new(std::env::current_exe().unwrap());
        let name = format!("sandbox::threads::tests::{test}");
        child
            .args(["--ignored", "--exact", &name])
            .output()
            .unwrap()
    }

    #[test]
    #[ignore = "ends its process; strict_sandbox_kills_the_process runs it in a child"]
    fn killed_child() {
        prepare(Strictness::Kill, SandboxNeeds::default()).unwrap();
        enter(ThreadKind::Vcpu);
        let _ = File::open("/etc/hostname");
    }

    #[test]
    fn strict_sandbox_kills_the_process() {
        use std::os::unix::process::ExitStatusExt;
        let status = run_in_child("killed_child").status;
        assert_eq!(status.signal(), Some(libc::SIGSYS), "{status}");
    }

    #[test]
    fn strict_sandbox_lets_a_thread_shrink_its_heap() {
        let output = run_in_child("shrinking_child");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("1 passed"), "{}: {text}", output.status);
    }

    #[test]
    #[ignore = "confines its process; strict_sandbox_lets_a_thread_shrink_its_heap runs it in a child"]
    fn shrinking_child() {
        settle_allocator();
        prepare(Strictness::Kill, SandboxNeeds::default()).unwrap();
        let freed = thread::spawn(|| {
            enter(ThreadKind::Vcpu);
            let blocks: Vec<Vec<u8>> = (0..64).map(|_| vec![1; 64 << 10]).collect();
            std::hint::black_box(blocks).len()
        });
        assert_eq!(freed.join().unwrap(), 64);
    }

    #[test]
    fn prepared_process_leaves_no_core_and_few_descriptors() {
        let output = run_in_child("limited_child");
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("1 passed"), "{text}");
    }

    #[test]
    #[ignore = "lowers the limits of its process; \
                prepared_process_leaves_no_core_and_few_descriptors runs it in a child"]
    fn limited_child() {
        prepare(Strictness::Refuse, SandboxNeeds::default()).unwrap();
        assert_eq!(getrlimit(Resource::Core).current, Some(0));
        let files = getrlimit(Resource::Nofile);
        assert_eq!(files.current, files.maximum);
        assert!(files.current.is_some_and(|files| files <= 1024));
    }
}
