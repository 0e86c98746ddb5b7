//! `hindsight completions`.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Args, Command};
use clap_complete::{Shell, generate};

/// Print a script that completes hindsight's options in a shell.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hindsight completions bash > ~/.local/share/bash-completion/completions/hindsight
  hindsight completions zsh > ~/.zfunc/_hindsight      (with ~/.zfunc in fpath)
  hindsight completions fish > ~/.config/fish/completions/hindsight.fish")]
pub struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Prints the script for `command`.
///
/// # Errors
///
/// When standard output cannot be written.
pub fn run(args: &CompletionsArgs, command: &mut Command) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    generate(args.shell, command, "hindsight", &mut script);
    io::stdout().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}
