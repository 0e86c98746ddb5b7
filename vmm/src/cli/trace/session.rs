//! A trace from its options to the end of the run.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use anyhow::Context;
use hindsight_export::{FunctionTable, image_hash};
use hindsight_trace::{Selection, TraceHeader, TraceWriter, TracedImage, WriterOptions};

use super::args::TraceOptions;
use crate::cli::config::RunConfig;
use crate::cli::run::RunHook;
use crate::machine::Machine;
use crate::sandbox::{ThreadKind, enter};
use crate::vcpu::run_control::Outcome;

/// The trace of a run.
pub(in crate::cli) struct RunTrace<'a> {
    options: &'a TraceOptions,
    checked: Option<CheckedTrace<'a>>,
    session: Option<TraceSession<'a>>,
}

impl<'a> RunTrace<'a> {
    /// A trace with these options.
    pub(in crate::cli) fn new(options: &'a TraceOptions) -> Self {
        Self {
            options,
            checked: None,
            session: None,
        }
    }
}

impl RunHook for RunTrace<'_> {
    fn check(&mut self, config: &RunConfig, image: (&Path, &[u8])) -> anyhow::Result<()> {
        self.checked = Some(CheckedTrace::new(self.options, config, image)?);
        Ok(())
    }

    fn start(&mut self, machine: &mut Machine) -> anyhow::Result<()> {
        if let Some(checked) = self.checked.take() {
            self.session = Some(checked.start(machine)?);
        }
        Ok(())
    }

    fn finish(&mut self) -> anyhow::Result<()> {
        self.session.take().map_or(Ok(()), TraceSession::finish)
    }
}

/// The part of a trace's header that does not depend on the selection of its records.
pub(super) fn header(
    config: &RunConfig,
    (path, image): (&Path, &[u8]),
) -> anyhow::Result<TraceHeader> {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    Ok(TraceHeader {
        writer: format!("hindsight {}", env!("CARGO_PKG_VERSION")),
        image: TracedImage {
            path: path.display().to_string(),
            size: image.len() as u64,
            hash: image_hash(image),
        },
        cpus: u32::try_from(config.machine.cpus)?,
        cpu: config.cpu().to_string(),
        seed: config.deterministic_seed(),
        ..TraceHeader::default()
    })
}

/// A trace that was checked and has not begun.
struct CheckedTrace<'a> {
    options: &'a TraceOptions,
    selection: Selection,
    header: TraceHeader,
}

impl<'a> CheckedTrace<'a> {
    fn new(
        options: &'a TraceOptions,
        config: &RunConfig,
        image: (&Path, &[u8]),
    ) -> anyhow::Result<Self> {
        let selection = options.selection(&FunctionTable::of(image.1))?;
        let header = TraceHeader {
            events: selection.kinds.names().map(str::to_owned).collect(),
            selection: options.description(),
            ..header(config, image)?
        };
        Ok(Self {
            options,
            selection,
            header,
        })
    }

    fn start(self, machine: &mut Machine) -> anyhow::Result<TraceSession<'a>> {
        let path = &self.options.output;
        let header = TraceHeader {
            tsc_hz: machine.board().time.clock.hz(),
            start: machine.start_address(),
            ..self.header
        };
        let board = machine.board().clone();
        let quit = move || board.run.finish(Outcome::Quit);
        let ends = !self.options.keep_running;
        let options = WriterOptions {
            selection: self.selection,
            last: self.options.last,
            // A deterministic run has the same trace every time.
            flush_often: header.seed.is_none(),
            when_over: ends.then(|| Box::new(quit) as Box<dyn FnOnce() + Send>),
            begin: Some(Box::new(|| enter(ThreadKind::Trace))),
        };
        let file = File::create(path).with_context(|| format!("--output {}", path.display()))?;
        let writer = TraceWriter::start(Box::new(file), &header, options)
            .with_context(|| format!("--output {}", path.display()))?;
        machine.trace(&writer);
        Ok(TraceSession { path, writer })
    }
}

/// A trace that is being written.
struct TraceSession<'a> {
    path: &'a Path,
    writer: TraceWriter,
}

impl TraceSession<'_> {
    fn finish(self) -> anyhow::Result<()> {
        let name = self.path.display();
        let summary = self.writer.finish();
        let summary = summary.with_context(|| format!("trace {name} is not complete"))?;
        let _ = writeln!(io::stderr(), "hindsight: trace {name}: {summary}");
        Ok(())
    }
}
