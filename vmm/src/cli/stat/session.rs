//! The counting of a run, from its options to the figures.

use std::fs::File;
use std::io::{self, Cursor, Write};
use std::path::Path;
use std::sync::{Arc, Mutex};

use anyhow::{Context, bail};
use hindsight_export::{
    FunctionCost, FunctionTable, ProcessCost, function_costs, image_hash, process_costs,
};
use hindsight_trace::{
    EventKinds, Selection, TraceHeader, TraceReader, TraceWriter, WriterOptions,
};

use super::args::StatOptions;
use super::baseline::{Comparison, IncreaseLimit, compare};
use super::figures::Figures;
use super::inputs::inputs_hash;
use crate::cli::config::RunConfig;
use crate::cli::read::read;
use crate::cli::run::RunHook;
use crate::machine::Machine;
use crate::sandbox::{ThreadKind, enter};
use crate::sync::lock;
use crate::vcpu::board::Board;
use crate::vcpu::run_counter::{CountOptions, RunCounts};

/// The largest baseline that is read, in bytes.
const BASELINE_MAX: u64 = 16 << 20;
/// Maximum number of bytes that the branches of a run may take in memory, compressed.
const TRACE_MAX: usize = 1 << 30;

/// A trace in memory.
#[derive(Clone, Default)]
struct TraceBuffer(Arc<Mutex<Vec<u8>>>);

impl Write for TraceBuffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut buffer = lock(&self.0);
        if buffer.len() + bytes.len() > TRACE_MAX {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        buffer.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A run that is being counted.
struct Counting {
    board: Arc<Board>,
    run: Arc<Mutex<RunCounts>>,
    trace: (TraceWriter, TraceBuffer),
}

/// The statistics of a run.
pub(super) struct RunStat<'a> {
    options: &'a StatOptions,
    limit: IncreaseLimit,
    baseline: Option<Figures>,
    functions: FunctionTable,
    counting: CountOptions,
    image: String,
    cpu: String,
    seed: Option<u64>,
    inputs: String,
    cpus: u32,
    output: Option<File>,
    running: Option<Counting>,
    /// After the run: whether nothing increased too much.
    pub(super) passed: bool,
}

impl<'a> RunStat<'a> {
    /// Checks the options and reads the baseline.
    ///
    /// # Errors
    ///
    /// When the options name no counts, or the baseline cannot be read.
    pub(super) fn new(options: &'a StatOptions) -> anyhow::Result<Self> {
        options.check()?;
        let baseline = options.baseline.as_deref().map(read_baseline).transpose()?;
        Ok(Self {
            options,
            limit: IncreaseLimit::parse(&options.max_increase)?,
            baseline,
            functions: FunctionTable::default(),
            counting: CountOptions::default(),
            image: String::new(),
            cpu: String::new(),
            seed: None,
            inputs: String::new(),
            cpus: 1,
            output: None,
            running: None,
            passed: true,
        })
    }

    fn figures(&self, running: Counting) -> anyhow::Result<Figures> {
        let mut run = lock(&running.run).clone();
        // The vCPUs' counters are exact up to the end of the run.
        let stats = running.board.run.stats();
        let retired = stats
            .iter()
            .filter_map(|vcpu| Some(vcpu.interpreter?.retired));
        run.total.0[0] = retired.clone().sum();
        let retired: Vec<_> = retired.collect();
        let (writer, buffer) = running.trace;
        let (functions, processes) = self.costs(writer, &buffer, &retired)?;
        Ok(Figures {
            image: self.image.clone(),
            cpu: self.cpu.clone(),
            seed: self.seed,
            inputs: self.inputs.clone(),
            ..Figures::new(&run, self.counting.models, functions, processes)
        })
    }

    /// The functions and the processes with the most instructions.
    fn costs(
        &self,
        writer: TraceWriter,
        buffer: &TraceBuffer,
        retired: &[u64],
    ) -> anyhow::Result<(Vec<FunctionCost>, Vec<ProcessCost>)> {
        writer
            .finish()
            .context("the branches of the run do not fit in memory: use --functions 0")?;
        let bytes = std::mem::take(&mut *lock(&buffer.0));
        let mut trace = TraceReader::new(Cursor::new(bytes))?;
        let mut processes = process_costs(&mut trace, retired);
        processes.truncate(self.options.processes);
        let mut functions = Vec::new();
        if self.lists_functions() {
            functions = function_costs(&mut trace, &self.functions)?;
            functions.truncate(self.options.functions);
        }
        Ok((functions, processes))
    }

    const fn lists_functions(&self) -> bool {
        self.options.functions != 0 && !self.functions.is_empty()
    }

    /// The kinds of events that the lists of functions and of processes need.
    fn traced_kinds(&self) -> EventKinds {
        if self.lists_functions() {
            EventKinds::BRANCHES | EventKinds::PROCESSES
        } else if self.options.processes != 0 {
            EventKinds::PROCESSES
        } else {
            EventKinds::empty()
        }
    }

    fn judge(&self, figures: &Figures) -> anyhow::Result<Vec<Comparison>> {
        match &self.baseline {
            Some(baseline) => compare(baseline, figures, &self.options.compare, self.limit),
            None => Ok(Vec::new()),
        }
    }
}

/// Reads what an earlier run wrote.
fn read_baseline(path: &Path) -> anyhow::Result<Figures> {
    let bytes = read("baseline", path, BASELINE_MAX)?;
    let name = path.display();
    let figures: Figures = serde_json::from_slice(&bytes)
        .with_context(|| format!("baseline {name} was not written by hindsight stat"))?;
    if figures.version != 1 {
        bail!(
            "baseline {name} has version {}, this program reads 1",
            figures.version
        );
    }
    Ok(figures)
}

impl RunHook for RunStat<'_> {
    fn check(&mut self, config: &RunConfig, (_, image): (&Path, &[u8])) -> anyhow::Result<()> {
        self.functions = FunctionTable::of(image);
        self.counting = self.options.counting(&self.functions)?;
        self.image = image_hash(image);
        self.cpu = config.cpu().to_string();
        self.seed = config.deterministic_seed();
        self.inputs = inputs_hash(config)?;
        self.cpus = u32::try_from(config.machine.cpus)?;
        Ok(())
    }

    fn start(&mut self, machine: &mut Machine) -> anyhow::Result<()> {
        if let Some(path) = &self.options.output {
            let file = File::create(path);
            self.output = Some(file.with_context(|| format!("--output {}", path.display()))?);
        }
        let run = machine.count(self.counting.clone());
        let kinds = self.traced_kinds();
        let header = TraceHeader {
            cpus: self.cpus,
            start: machine.start_address(),
            events: kinds.names().map(str::to_owned).collect(),
            ..TraceHeader::default()
        };
        let options = WriterOptions {
            selection: Selection {
                kinds,
                ..Selection::default()
            },
            last: None,
            flush_often: false,
            when_over: None,
            begin: Some(Box::new(|| enter(ThreadKind::Trace))),
        };
        let buffer = TraceBuffer::default();
        let writer = TraceWriter::start(Box::new(buffer.clone()), &header, options)?;
        machine.trace(&writer);
        self.running = Some(Counting {
            board: machine.board().clone(),
            run,
            trace: (writer, buffer),
        });
        Ok(())
    }

    fn finish(&mut self) -> anyhow::Result<()> {
        let Some(running) = self.running.take() else {
            return Ok(());
        };
        let figures = self.figures(running)?;
        let mut text = figures.to_string();
        if let Some(file) = &mut self.output {
            serde_json::to_writer_pretty(&mut *file, &figures)?;
            file.write_all(b"\n")?;
        }
        for comparison in self.judge(&figures)? {
            self.passed &= !comparison.exceeded;
            text += &format!("{comparison}\n");
        }
        if self.baseline.is_some() {
            let limit = &self.options.max_increase;
            text += &match self.passed {
                true => format!("passed: nothing increased by more than {limit}\n"),
                false => format!("failed: an increase is above {limit}\n"),
            };
        }
        io::stderr().write_all(text.as_bytes())?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct TestCommand {
        #[command(flatten)]
        options: StatOptions,
    }

    #[test]
    fn processes_are_traced_only_if_a_list_needs_them() {
        let kinds = |words: &[&str]| {
            let words = ["stat"].iter().chain(words);
            let options = TestCommand::try_parse_from(words).unwrap().options;
            RunStat::new(&options).unwrap().traced_kinds()
        };
        // Without an image there are no functions.
        assert_eq!(kinds(&[]), EventKinds::PROCESSES);
        let none = ["--processes", "0", "--functions", "0"];
        assert_eq!(kinds(&none), EventKinds::empty());
    }
}
