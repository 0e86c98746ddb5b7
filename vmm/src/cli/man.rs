//! `hindsight man`: writes the man pages, for packages.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Command, ValueHint};

/// Write the man pages of hindsight and its subcommands.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// The folder, which is created if it does not exist
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    folder: PathBuf,
}

/// Writes a page for `command` and one for each of its subcommands that is not hidden.
///
/// # Errors
///
/// When the folder cannot be written.
pub fn run(args: &ManArgs, command: Command) -> anyhow::Result<ExitCode> {
    let folder = &args.folder;
    fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(command.disable_help_subcommand(true), folder))
        .with_context(|| format!("man pages cannot be written to {}", folder.display()))?;
    Ok(ExitCode::SUCCESS)
}
