//! `--trace-out` of `hindsight run`: the file for the traces that a debugger starts.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use hindsight_trace::TraceHeader;

use super::session::header;
use crate::cli::config::RunConfig;
use crate::cli::run::RunHook;
use crate::debugger::DebuggerTrace;
use crate::machine::Machine;

/// The traces that a debugger may start in this run; none without `--trace-out`.
#[derive(Default)]
pub(in crate::cli) struct RequestedTrace {
    /// The file, and the header of its traces, until the file is opened.
    checked: Option<(PathBuf, TraceHeader)>,
    trace: Option<DebuggerTrace>,
}

impl RunHook for RequestedTrace {
    fn check(&mut self, config: &RunConfig, image: (&Path, &[u8])) -> anyhow::Result<()> {
        if let Some(path) = &config.debugging.trace_out {
            self.checked = Some((path.to_path_buf(), header(config, image)?));
        }
        Ok(())
    }

    fn start(&mut self, machine: &mut Machine) -> anyhow::Result<()> {
        let Some((path, mut header)) = self.checked.take() else {
            return Ok(());
        };
        header.tsc_hz = machine.board().time.clock.hz();
        // The file keeps an earlier trace until a debugger starts the next one.
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path);
        let name = path.display().to_string();
        let file = file.with_context(|| format!("--trace-out {name}"))?;
        self.trace = Some(DebuggerTrace::new(file, name, header));
        Ok(())
    }

    /// Completes a trace that no debugger has stopped.
    fn finish(&mut self) -> anyhow::Result<()> {
        if let Some(finished) = self.trace.take().and_then(|trace| trace.finish()) {
            let _ = writeln!(io::stderr(), "hindsight: {}", finished?);
        }
        Ok(())
    }

    fn debugger_trace(&self) -> Option<DebuggerTrace> {
        self.trace.clone()
    }
}
