//! `hindsight man`: writes the man pages, for packages.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Command, ValueHint};
use clap_mangen::Man;

/// Write the man pages of hindsight and its subcommands.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// The folder, which is created if it does not exist
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    folder: PathBuf,
}

/// Writes a page for `command` and one for each subcommand at any depth that is not hidden.
///
/// # Errors
///
/// When the folder cannot be written.
pub fn run(args: &ManArgs, command: Command) -> anyhow::Result<ExitCode> {
    let folder = &args.folder;
    write_pages(command, folder)
        .with_context(|| format!("man pages cannot be written to {}", folder.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn write_pages(command: Command, folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut command = command.disable_help_subcommand(true);
    // Gives the subcommands their full names.
    command.build();
    let mut pages = vec![&command];
    while let Some(page) = pages.pop() {
        pages.extend(page.get_subcommands().filter(|sub| !sub.is_hide_set()));
        let man = Man::new(page.clone())
            .source(concat!("hindsight ", env!("CARGO_PKG_VERSION")))
            .manual("Hindsight");
        let mut text = Vec::new();
        man.render(&mut text)?;
        // The exit statuses and the examples, which clap knows as the end of the help.
        let text = String::from_utf8_lossy(&text).replace(".SH EXTRA", ".SH NOTES");
        fs::write(folder.join(man.get_filename()), text)?;
    }
    Ok(())
}
