//! The rules of each kind of thread, compiled.

use std::collections::HashMap;

use seccompiler::{BpfProgram, TargetArch, compile_from_json};
use serde_json::{Value, json};

use super::SandboxError;

/// What the threads of this run must be allowed beyond the rules of their kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SandboxNeeds {
    /// The threads of vCPUs access the files of shared folders.
    pub shares: bool,
    /// A thread connects the guest to unix sockets.
    pub sockets: bool,
}

/// What the kernel does with a call that the rules do not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strictness {
    /// The call fails with EPERM, and a line on standard error names it.
    Refuse,
    /// The call ends the process by SIGSYS.
    Kill,
}

impl Strictness {
    fn action(self) -> Value {
        match self {
            // The handler of SIGSYS names the call and makes it fail.
            Self::Refuse => json!("trap"),
            Self::Kill => json!("kill_process"),
        }
    }
}

/// A kind of thread. Each kind has rules of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ThreadKind {
    /// The main thread. The threads that it starts afterwards cannot do more.
    Main,
    /// Runs one vCPU, or all vCPUs of a deterministic machine.
    Vcpu,
    /// Fires the machine's timers.
    Timer,
    /// Writes what the guest sends to a console.
    ConsoleOutput,
    /// Reads what the user types, or serves a console's socket.
    ConsoleInput,
    /// Serves gdb.
    Debugger,
    /// Receives signals.
    Signals,
    /// Writes a trace.
    Trace,
    /// Receives frames of a network.
    Network,
    /// Connects the guest to unix sockets.
    Vsock,
    /// Shows the guest's screen in the terminal.
    Display,
}

impl ThreadKind {
    /// All kinds.
    pub const ALL: [Self; 11] = [
        Self::Main,
        Self::Vcpu,
        Self::Timer,
        Self::ConsoleOutput,
        Self::ConsoleInput,
        Self::Debugger,
        Self::Signals,
        Self::Trace,
        Self::Network,
        Self::Vsock,
        Self::Display,
    ];

    /// The rules of this kind, in addition to those of `common.json`.
    const fn rules(self) -> &'static str {
        match self {
            Self::Main => include_str!("../../../resources/seccomp/main.json"),
            Self::Vcpu => include_str!("../../../resources/seccomp/vcpu.json"),
            Self::Timer => include_str!("../../../resources/seccomp/timer.json"),
            Self::ConsoleOutput => include_str!("../../../resources/seccomp/console-output.json"),
            Self::ConsoleInput => include_str!("../../../resources/seccomp/console-input.json"),
            Self::Debugger => include_str!("../../../resources/seccomp/debugger.json"),
            Self::Signals => include_str!("../../../resources/seccomp/signals.json"),
            Self::Trace => include_str!("../../../resources/seccomp/trace.json"),
            Self::Network => include_str!("../../../resources/seccomp/network.json"),
            Self::Vsock => include_str!("../../../resources/seccomp/vsock.json"),
            Self::Display => include_str!("../../../resources/seccomp/display.json"),
        }
    }
}

/// The additional rules of the threads that serve shared folders.
const SHARE: &str = include_str!("../../../resources/seccomp/share.json");

/// The additional rules of the threads of vCPUs, which use connected sockets of the guest.
const VSOCK_VCPU: &str = include_str!("../../../resources/seccomp/vsock-vcpu.json");

const COMMON: &str = include_str!("../../../resources/seccomp/common.json");

/// The rules in a file of `resources/seccomp`.
fn rules_of(text: &str) -> Result<Vec<Value>, SandboxError> {
    let mut file: Value = serde_json::from_str(text).map_err(|_| SandboxError::Rules)?;
    match file.get_mut("filter").map(Value::take) {
        Some(Value::Array(rules)) => Ok(rules),
        _ => Err(SandboxError::Rules),
    }
}

/// Restricts `tgkill` to the threads of this process.
fn insert_process(rule: &mut Value) {
    if rule["syscall"] == "tgkill" {
        rule["args"][0]["val"] = json!(std::process::id());
    }
}

/// The files with the rules that `needs` adds to those of `kind`.
fn additional_rules(kind: ThreadKind, needs: SandboxNeeds) -> Vec<&'static str> {
    let guest = matches!(kind, ThreadKind::Vcpu | ThreadKind::Main);
    let mut files = Vec::new();
    if needs.shares && guest {
        files.push(SHARE);
    }
    if needs.sockets && guest {
        files.push(VSOCK_VCPU);
    }
    if needs.sockets && kind == ThreadKind::Main {
        files.push(ThreadKind::Vsock.rules());
    }
    files
}

/// Compiles the rules of `kind` in a process with `needs`.
pub(super) fn compile(
    kind: ThreadKind,
    strictness: Strictness,
    needs: SandboxNeeds,
) -> Result<BpfProgram, SandboxError> {
    let mut rules = rules_of(COMMON)?;
    rules.extend(rules_of(kind.rules())?);
    for file in additional_rules(kind, needs) {
        rules.extend(rules_of(file)?);
    }
    rules.iter_mut().for_each(insert_process);
    if cfg!(target_env = "musl") {
        // musl uses tkill, which has no process argument, to signal its own threads.
        rules.push(json!({ "syscall": "tkill" }));
    }
    compile_filter(&json!({
        "mismatch_action": strictness.action(),
        "match_action": "allow",
        "filter": rules,
    }))
}

/// Compiles the filters of all threads for clone and clone3: no thread starts a process.
///
/// With [`Strictness::Refuse`], a refused clone returns an error and raises no SIGSYS, because the
/// C library blocks all signals around it. A filter cannot read the flags of clone3, which are in
/// memory. So clone3 always fails with ENOSYS; the C library then calls clone, whose flags the
/// filter checks.
pub(super) fn compile_clone(strictness: Strictness) -> Result<[BpfProgram; 2], SandboxError> {
    let refused = match strictness {
        Strictness::Refuse => json!({ "errno": libc::EPERM }),
        Strictness::Kill => strictness.action(),
    };
    let starts_process = json!([{
        "index": 0, "type": "qword", "op": { "masked_eq": libc::CLONE_THREAD }, "val": 0,
    }]);
    let filter = |rule: Value, action: Value| {
        compile_filter(&json!({
            "mismatch_action": "allow",
            "match_action": action,
            "filter": [rule],
        }))
    };
    let clone = json!({ "syscall": "clone", "args": starts_process });
    let clone3 = json!({ "syscall": "clone3" });
    Ok([
        filter(clone, refused)?,
        filter(clone3, json!({ "errno": libc::ENOSYS }))?,
    ])
}

fn compile_filter(filter: &Value) -> Result<BpfProgram, SandboxError> {
    const NAME: &str = "thread";
    let text = json!({ NAME: filter }).to_string();
    let mut compiled: HashMap<_, _> = compile_from_json(text.as_bytes(), TargetArch::x86_64)
        .map_err(|error| SandboxError::Compile(Box::new(error)))?;
    compiled.remove(NAME).ok_or(SandboxError::Rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_of_every_thread_compile() {
        for kind in ThreadKind::ALL {
            for strictness in [Strictness::Refuse, Strictness::Kill] {
                let plain = compile(kind, strictness, SandboxNeeds::default()).unwrap();
                assert!(plain.len() > 40, "{kind:?}");
                let shares = SandboxNeeds {
                    shares: true,
                    ..SandboxNeeds::default()
                };
                let sockets = SandboxNeeds {
                    sockets: true,
                    ..SandboxNeeds::default()
                };
                let serves = matches!(kind, ThreadKind::Vcpu | ThreadKind::Main);
                for needs in [shares, sockets] {
                    let more = compile(kind, strictness, needs).unwrap();
                    assert_eq!(more.len() > plain.len(), serves, "{kind:?}: {needs:?}");
                }
            }
        }
    }

    #[test]
    fn main_thread_may_call_what_any_other_may() {
        let keys = |text| -> Vec<String> {
            let rules = rules_of(text).unwrap();
            let keys = rules.iter().map(|rule| rule["syscall"].to_string());
            keys.collect()
        };
        let all = SandboxNeeds {
            shares: true,
            sockets: true,
        };
        let own = [ThreadKind::Main.rules(), COMMON];
        let more = additional_rules(ThreadKind::Main, all);
        let main: Vec<_> = own.into_iter().chain(more).flat_map(keys).collect();
        for kind in ThreadKind::ALL {
            let missing: Vec<_> = keys(kind.rules())
                .into_iter()
                .filter(|name| !main.contains(name))
                .collect();
            assert_eq!(missing, Vec::<String>::new(), "{kind:?}");
        }
    }
}
