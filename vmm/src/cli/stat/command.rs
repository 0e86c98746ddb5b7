//! The command `hindsight stat`.

use std::process::ExitCode;

use anyhow::bail;

use super::args::StatArgs;
use super::session::RunStat;
use crate::cli::Status;
use crate::cli::config::EngineArg;
use crate::cli::run::run_with;

/// Exit status when a count increased too much.
const INCREASED: u8 = 1;

/// Runs a guest to its end and counts what it does.
///
/// # Errors
///
/// When the guest cannot be started, or the baseline cannot be compared.
pub fn run(args: &StatArgs) -> anyhow::Result<ExitCode> {
    let mut config = args.config.load()?;
    if config.machine.engine == EngineArg::Kvm {
        bail!("KVM does not count what a guest does: drop --engine kvm");
    }
    if config.debugging.gdb.is_some() {
        bail!("--gdb does not go with statistics: a debugger may change the past");
    }
    config.machine.engine = EngineArg::Interp;
    config.determinism.deterministic |= !args.options.live;
    config.check()?;
    let mut stat = RunStat::new(&args.options)?;
    let status = run_with(config, &mut stat)?;
    Ok(match status {
        // The counts are valid whatever the guest's own status is.
        Status::Guest(_) | Status::Success | Status::Reset if stat.passed => ExitCode::SUCCESS,
        Status::Guest(_) | Status::Success | Status::Reset => ExitCode::from(INCREASED),
        other => other.into(),
    })
}
