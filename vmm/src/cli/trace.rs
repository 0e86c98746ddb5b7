//! `--trace`: what happened and why, one line each.

use std::fmt;
use std::fs::File;
use std::io;
use std::sync::Mutex;

use anyhow::{Context, bail};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

/// What can be traced.
const KINDS: [(&str, &str); 6] = [
    ("exit", "every stop of a processor"),
    ("msr", "RDMSR and WRMSR"),
    (
        "irq",
        "interrupts, NMIs, INIT and start-up IPIs as they are taken",
    ),
    ("io", "port and MMIO accesses"),
    ("mode", "which way the guest runs, and why"),
    ("gdb", "packets of a debugger, and what is answered"),
];

/// One line: the kind, then the text.
struct Line;

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        match *metadata.level() {
            Level::TRACE | Level::DEBUG => write!(writer, "{:<4} ", metadata.target())?,
            Level::INFO => write!(writer, "hindsight: ")?,
            Level::WARN => write!(writer, "hindsight: warning: ")?,
            Level::ERROR => write!(writer, "hindsight: error: ")?,
        }
        context
            .field_format()
            .format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

/// Starts logging: warnings always, and what `spec` asks for (`KIND[,KIND...][=FILE]`).
///
/// # Errors
///
/// An unknown kind, or a file that cannot be written.
pub(super) fn start(spec: Option<&str>) -> anyhow::Result<()> {
    let (kinds, file) = match spec {
        None => ("", None),
        Some(spec) => match spec.split_once('=') {
            None => (spec, None),
            Some((kinds, file)) => (kinds, Some(file)),
        },
    };
    let mut targets = Targets::new().with_default(Level::WARN);
    for kind in kinds.split(',').filter(|kind| !kind.is_empty()) {
        match kind {
            "all" => targets = targets.with_targets(KINDS.map(|(name, _)| (name, Level::TRACE))),
            _ if KINDS.iter().any(|(name, _)| *name == kind) => {
                targets = targets.with_target(kind, Level::TRACE);
            }
            _ => bail!("--trace: {kind:?} is not one of {}, all", names()),
        }
    }
    let writer = match file {
        None => None,
        Some(path) => {
            let file =
                File::create(path).with_context(|| format!("--trace: {path} cannot be written"))?;
            Some(Mutex::new(io::BufWriter::with_capacity(1, file)))
        }
    };
    let base = tracing_subscriber::registry().with(targets);
    let layer = tracing_subscriber::fmt::layer()
        .event_format(Line)
        .with_ansi(false)
        // It would report lost lines by a macro that panics when standard error is closed.
        .log_internal_errors(false);
    match writer {
        None => base.with(layer.with_writer(io::stderr)).init(),
        Some(writer) => base.with(layer.with_writer(writer)).init(),
    }
    Ok(())
}

fn names() -> String {
    KINDS.map(|(name, _)| name).join(", ")
}

/// For `--help`.
pub(super) fn help() -> String {
    let kinds = KINDS
        .map(|(name, about)| format!("{name} ({about})"))
        .join(", ");
    format!(
        "Write a line for each event of KIND[,KIND...], to standard error or =FILE: {kinds}, all"
    )
}
