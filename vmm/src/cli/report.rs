//! `hindsight report`: one page about a trace.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, ValueHint};
use hindsight_export::report;
use hindsight_trace::TraceError;

use super::Status;
use super::export::{guest, open, warn};

/// Write one page about a trace: time line, flame graph, branches, events and coverage.
#[derive(Debug, Args)]
#[command(after_help = "\
The page needs no other file and no network. It has sums, so that it opens quickly however long the
run was.

Examples:
  hindsight report boot.trace -o report.html
  hindsight report boot.trace -o report.html --symbols vmlinux")]
pub struct ReportArgs {
    /// Trace that `hindsight trace` wrote
    #[arg(value_name = "TRACE", value_hint = ValueHint::FilePath)]
    trace: PathBuf,
    /// File to write
    #[arg(long, short, value_name = "FILE", default_value = "report.html", value_hint = ValueHint::FilePath)]
    output: PathBuf,
    /// ELF file with the guest's symbols and debug information, at the addresses where it runs, or
    /// directory with the files of a Linux guest
    #[arg(long, value_name = "FILE|DIR", value_hint = ValueHint::AnyPath)]
    symbols: Option<PathBuf>,
}

/// Writes the page.
///
/// # Errors
///
/// When the trace cannot be read, or the page cannot be written.
pub fn run(args: &ReportArgs) -> anyhow::Result<Status> {
    let name = args.trace.display();
    let mut trace = open(&args.trace)?;
    let guest = guest(args.symbols.as_deref(), &mut trace)?;
    let output = || format!("--output {}", args.output.display());
    let mut out = BufWriter::new(File::create(&args.output).with_context(output)?);
    let mut skipped =
        |error: &TraceError| warn(format_args!("trace {name}: {error}; it is left out"));
    report(&mut trace, &guest, &mut out, &mut skipped).with_context(|| format!("trace {name}"))?;
    out.flush().with_context(output)?;
    Ok(Status::Success)
}
