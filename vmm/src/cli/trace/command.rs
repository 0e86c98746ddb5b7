//! The command `hindsight trace`.

use anyhow::bail;

use super::args::TraceArgs;
use super::session::RunTrace;
use crate::cli::Status;
use crate::cli::config::EngineArg;
use crate::cli::run::run_with;

/// Runs a guest to its end and traces it.
///
/// # Errors
///
/// When the guest cannot be started, or the trace cannot be created.
pub fn run(args: &TraceArgs) -> anyhow::Result<Status> {
    let mut config = args.config.load()?;
    config.check()?;
    if config.machine.engine == EngineArg::Kvm {
        bail!(
            "KVM does not report branches: drop --engine kvm, the trace is made by the interpreter"
        );
    }
    if config.debugging.gdb.is_some() {
        bail!("--gdb does not go with a trace: a debugger may change the past");
    }
    config.machine.engine = EngineArg::Interp;
    run_with(config, &mut RunTrace::new(&args.options))
}
