//! `hindsight export`: writes a trace in the format of another tool.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, ValueHint};
use hindsight_export::{ExportOptions, Format, FunctionTable, Guest, export, image_hash};
use hindsight_trace::{ProcessEvent, ProcessRecord, TraceError, TraceHeader, TraceReader};

use super::Status;
use super::guest_files::GuestFiles;
use super::read::read;
use super::trace::count;

/// The largest image that is read for its symbols, in bytes.
pub(super) const IMAGE_MAX: u64 = 4 << 30;

/// Write a trace in the format of another tool.
#[derive(Debug, Args)]
#[command(after_help = "\
Symbols come from the image that the trace names, if it is unchanged, or from --symbols.

Examples:
  hindsight export text boot.trace | less
  hindsight export perf boot.trace -o perf.data && perf report
  hindsight export lcov boot.trace -o boot.info && genhtml boot.info
  hindsight export flamegraph boot.trace -o boot.svg")]
pub struct ExportArgs {
    /// Format to write
    #[arg(value_enum)]
    format: Format,
    /// Trace that `hindsight trace` wrote
    #[arg(value_name = "TRACE", value_hint = ValueHint::FilePath)]
    trace: PathBuf,
    /// File to write [default: standard output]
    #[arg(long, short, value_name = "FILE", value_hint = ValueHint::FilePath)]
    output: Option<PathBuf>,
    /// ELF file with the guest's symbols and debug information, at the addresses where it runs, or
    /// directory with the files of a Linux guest
    #[arg(long, value_name = "FILE|DIR", value_hint = ValueHint::AnyPath)]
    symbols: Option<PathBuf>,
    /// Leave out what comes before N instructions
    #[arg(long, value_name = "N", value_parser = count)]
    after: Option<u64>,
    /// Leave out what comes after N more instructions
    #[arg(long = "for", value_name = "N", value_parser = count)]
    length: Option<u64>,
    /// For perf: a sample every N branches, with the last 32 of them
    #[arg(long, value_name = "N", default_value_t = 32)]
    every: u64,
}

/// Prints a warning.
pub(super) fn warn(text: impl std::fmt::Display) {
    let _ = writeln!(io::stderr(), "hindsight: warning: {text}");
}

/// Exports a trace.
///
/// # Errors
///
/// When the trace cannot be read, or the output cannot be written.
pub fn run(args: &ExportArgs) -> anyhow::Result<Status> {
    let name = args.trace.display();
    let mut trace = open(&args.trace)?;
    let guest = guest(args.symbols.as_deref(), &mut trace)?;
    let after = args.after.unwrap_or(0);
    let end = args
        .length
        .map_or(u64::MAX, |length| after.saturating_add(length));
    let options = ExportOptions {
        range: after..=end,
        every: args.every,
    };
    let mut out: Box<dyn Write> = match &args.output {
        Some(path) => {
            let file =
                File::create(path).with_context(|| format!("--output {}", path.display()))?;
            Box::new(BufWriter::new(file))
        }
        None => Box::new(BufWriter::new(io::stdout().lock())),
    };
    let mut skipped =
        |error: &TraceError| warn(format_args!("trace {name}: {error}; it is left out"));
    let format = (args.format, &options);
    let written = export(&mut trace, &guest, format, &mut *out, &mut skipped);
    match written
        .map_err(anyhow::Error::from)
        .and_then(|()| Ok(out.flush()?))
    {
        // A reader such as head(1) that has read enough.
        Err(error) if is_broken_pipe(&error) => Ok(Status::Success),
        result => result
            .context(format!("trace {name}"))
            .map(|()| Status::Success),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let kinds = error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>());
    kinds
        .into_iter()
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// Opens a trace, with a warning if its end is missing.
pub(super) fn open(path: &Path) -> anyhow::Result<TraceReader<BufReader<File>>> {
    let name = path.display();
    let file = File::open(path).with_context(|| format!("trace {name}"))?;
    let trace = TraceReader::new(BufReader::new(file)).with_context(|| format!("trace {name}"))?;
    if let Some(damage) = trace.damage() {
        warn(format_args!("trace {name} is not complete: {damage}"));
    }
    Ok(trace)
}

/// The guest's symbols: of its image, of its kernel and of what its processes map.
pub(super) fn guest(
    symbols: Option<&Path>,
    trace: &mut TraceReader<BufReader<File>>,
) -> anyhow::Result<Guest> {
    let processes = trace.processes(&mut |error| warn(format_args!("{error}; it is left out")));
    let is_truncated = |record: &ProcessRecord| record.event == ProcessEvent::Truncated {};
    if processes.last().is_some_and(is_truncated) {
        warn("the trace's process log was full: later processes have no names");
    }
    let directory = symbols.filter(|path| path.is_dir());
    let file = symbols.filter(|path| !path.is_dir());
    let image = image(file, trace.header(), processes.is_empty())?;
    let mut files = GuestFiles::new(directory);
    let mut host = |path: &str, build_id: &str| files.find(path, build_id);
    let functions = FunctionTable::of(&image).with_processes(&processes, &mut host);
    Ok(Guest {
        functions,
        image,
        processes,
    })
}

/// The image, if it is an ELF file. The symbols of one that was changed since would be wrong.
fn image(
    symbols: Option<&Path>,
    header: &TraceHeader,
    must_have_symbols: bool,
) -> anyhow::Result<Vec<u8>> {
    if let Some(path) = symbols {
        return read("symbols", path, IMAGE_MAX);
    }
    let path = Path::new(&header.image.path);
    let image = read("image", path, IMAGE_MAX).unwrap_or_default();
    let is_same = image_hash(&image) == header.image.hash;
    if must_have_symbols && !is_same {
        let path = path.display();
        warn(format_args!(
            "no symbols: {path} is missing or is not the image that was traced; use --symbols"
        ));
    }
    Ok(if is_same && image.starts_with(b"\x7fELF") {
        image
    } else {
        Vec::new()
    })
}
