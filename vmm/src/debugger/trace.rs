//! The traces that debuggers start and stop, in the file that the run has for them.

use std::fs::File;
use std::io::{self, Seek as _};
use std::sync::{Arc, Mutex};

use anyhow::Context;
use hindsight_trace::{
    EventKinds, Selection, TraceError, TraceHeader, TraceWriter, VcpuTracer, WriterOptions,
};

use crate::sync::lock;

/// A trace that is being written.
#[derive(Debug)]
struct RunningTrace {
    writer: TraceWriter,
    /// The names of the kinds that it has.
    events: String,
}

#[derive(Debug)]
struct TraceFile {
    file: File,
    name: String,
    header: TraceHeader,
    running: Option<RunningTrace>,
}

/// The file of a run for traces, which each trace replaces; shared by the debugger's server and the run.
#[derive(Clone, Debug)]
pub struct DebuggerTrace(Arc<Mutex<TraceFile>>);

impl DebuggerTrace {
    /// The file `file` with this `name`, for traces with `header`. The events, the selection and the start
    /// in `header` are replaced.
    pub fn new(file: File, name: String, header: TraceHeader) -> Self {
        let running = None;
        Self(Arc::new(Mutex::new(TraceFile {
            file,
            name,
            header,
            running,
        })))
    }

    /// Whether a trace is being written.
    pub(super) fn is_running(&self) -> bool {
        lock(&self.0).running.is_some()
    }

    /// Empties the file and begins a trace of these kinds. vCPU 0 is at the linear address `start`.
    ///
    /// # Errors
    ///
    /// When the file cannot be written, or the writer's thread cannot be started.
    pub(super) fn begin(&self, kinds: EventKinds, start: u64) -> Result<(), TraceError> {
        let mut trace = lock(&self.0);
        let events: Vec<_> = kinds.names().map(str::to_owned).collect();
        let names = events.join(",");
        let header = TraceHeader {
            start,
            events,
            // Exports then know nothing of the code before the first branch.
            selection: format!("monitor trace start {names}"),
            ..trace.header.clone()
        };
        let options = WriterOptions {
            selection: Selection {
                kinds,
                ..Selection::default()
            },
            last: None,
            // A deterministic run has the same trace every time.
            flush_often: header.seed.is_none(),
            when_over: None,
            // The thread keeps the rules of the debugger's thread, which starts it.
            begin: None,
        };
        let file = trace.empty()?;
        let writer = TraceWriter::start(Box::new(file), &header, options)?;
        let events = names;
        trace.running = Some(RunningTrace { writer, events });
        Ok(())
    }

    /// The tracer of a vCPU for the trace that is being written.
    pub(super) fn tracer(&self, cpu: u32) -> Option<VcpuTracer> {
        let trace = lock(&self.0);
        let running = trace.running.as_ref()?;
        Some(running.writer.tracer(cpu))
    }

    /// Whether a trace is being written, in a sentence.
    pub(super) fn status(&self) -> String {
        let trace = lock(&self.0);
        let name = &trace.name;
        match &trace.running {
            None => format!("no trace runs; `monitor trace start` replaces {name}"),
            Some(RunningTrace { writer, .. }) if writer.has_ended() => {
                format!("{name} could not be written: `monitor trace stop` says why")
            }
            Some(RunningTrace { events, .. }) => format!("{events} are traced to {name}"),
        }
    }

    /// Completes the trace that is being written, and returns its figures; `None` if there is none.
    /// Drop its tracers before.
    ///
    /// # Errors
    ///
    /// When the file could not be written. It then has all blocks before the failure.
    pub fn finish(&self) -> Option<anyhow::Result<String>> {
        let mut trace = lock(&self.0);
        let RunningTrace { writer, .. } = trace.running.take()?;
        let name = &trace.name;
        let summary = writer.finish();
        let summary = summary.with_context(|| format!("trace {name} is not complete"));
        Some(summary.map(|summary| format!("trace {name}: {summary}")))
    }
}

impl TraceFile {
    /// Empties the file, and returns it for a writer.
    fn empty(&mut self) -> io::Result<File> {
        // A named pipe and a device have no length, and get one trace after the other.
        if self
            .file
            .metadata()
            .is_ok_and(|metadata| metadata.is_file())
        {
            self.file.rewind()?;
            self.file.set_len(0)?;
        }
        self.file.try_clone()
    }
}
