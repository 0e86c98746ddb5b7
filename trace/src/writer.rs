//! Writes trace files on a thread of its own.

mod output;
#[cfg(test)]
mod process_tests;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use hindsight_cpu::branch::Branch;

use crate::block::RECORDS_MAX;
use crate::chunk::{EventChunk, VcpuTracer};
use crate::encode::BlockEncoder;
use crate::error::TraceError;
use crate::event::{Event, EventKinds};
use crate::header::{self, TraceHeader, TraceSummary};
use crate::process::ProcessRecord;
use crate::process_log::ProcessLog;
use crate::select::{Selection, Selector};
use output::BlockOutput;
pub(crate) use output::{END_MAGIC, INDEX_MAGIC};

/// Chunks that may wait for the writer, per vCPU. When the queue is full the vCPU waits.
const QUEUE: usize = 8;
/// Time after which a block is written although it is not full, so that a killed run loses little.
const FLUSH_AFTER: Duration = Duration::from_secs(1);
/// The fewest records of a block where only the last records are kept.
const RING_BLOCK_MIN: u64 = 4096;

type Buffers = (Vec<Branch>, Vec<(u64, Event)>);

enum Message {
    Chunk(EventChunk),
    Process(Box<ProcessRecord>),
    End,
}

/// The sending end of the queue to the writer, shared by all vCPUs.
pub struct TraceSink {
    queue: SyncSender<Message>,
    kinds: EventKinds,
    /// The trace has ended: chunks are dropped.
    over: AtomicBool,
    /// Buffers of chunks that were written, to be filled again.
    empty: Mutex<Vec<Buffers>>,
}

impl fmt::Debug for TraceSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TraceSink")
            .field("kinds", &self.kinds)
            .finish_non_exhaustive()
    }
}

impl TraceSink {
    /// The kinds of events that are still needed.
    pub(crate) fn kinds(&self) -> EventKinds {
        if self.over.load(Ordering::Relaxed) {
            EventKinds::empty()
        } else {
            self.kinds
        }
    }

    /// Waits while the queue is full. After the end of the trace, drops the chunk.
    pub(crate) fn send(&self, chunk: EventChunk) {
        if !self.over.load(Ordering::Relaxed) {
            // The thread is gone only when the trace has been finished.
            let _ = self.queue.send(Message::Chunk(chunk));
        }
    }

    /// Waits while the queue is full. The record is written whatever part of the run is selected.
    pub(crate) fn send_process(&self, record: ProcessRecord) {
        if !self.over.load(Ordering::Relaxed) {
            let _ = self.queue.send(Message::Process(Box::new(record)));
        }
    }

    pub(crate) fn empty_buffers(&self) -> Buffers {
        let mut empty = self.empty.lock().unwrap_or_else(PoisonError::into_inner);
        empty.pop().unwrap_or_default()
    }

    fn put_back(&self, chunk: EventChunk) {
        let EventChunk {
            mut branches,
            mut events,
            ..
        } = chunk;
        branches.clear();
        events.clear();
        let mut empty = self.empty.lock().unwrap_or_else(PoisonError::into_inner);
        if empty.len() < 2 * QUEUE {
            empty.push((branches, events));
        }
    }
}

/// How a trace is written.
pub struct WriterOptions {
    /// Which records it has.
    pub selection: Selection,
    /// Keep at least this many of the last records, in memory until the end; `None` for all.
    pub last: Option<u64>,
    /// Write blocks that are not full after a second, so that a killed run loses little. The bytes
    /// of the file then depend on the host's time.
    pub flush_often: bool,
    /// Called once, when the first vCPU reaches the end of the window.
    pub when_over: Option<Box<dyn FnOnce() + Send>>,
    /// The writer's thread calls it before anything else.
    pub begin: Option<Box<dyn FnOnce() + Send>>,
}

impl fmt::Debug for WriterOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriterOptions")
            .field("selection", &self.selection)
            .field("last", &self.last)
            .finish_non_exhaustive()
    }
}

/// Writes a trace file. The file is complete after [`TraceWriter::finish`].
#[derive(Debug)]
pub struct TraceWriter {
    sink: Arc<TraceSink>,
    selects_processes: bool,
    thread: JoinHandle<Result<TraceSummary, TraceError>>,
}

impl TraceWriter {
    /// Writes the header to `out` and starts the thread.
    ///
    /// # Errors
    ///
    /// When the header cannot be written, or the thread cannot be started.
    pub fn start(
        mut out: Box<dyn Write + Send>,
        header: &TraceHeader,
        options: WriterOptions,
    ) -> Result<Self, TraceError> {
        let begin = header::write(header, &mut *out)?;
        out.flush()?;
        let cpus = usize::try_from(header.cpus.max(1)).unwrap_or(1);
        let (queue, chunks) = sync_channel(QUEUE * cpus);
        let sink = Arc::new(TraceSink {
            queue,
            kinds: options.selection.reported_kinds(),
            over: AtomicBool::new(false),
            empty: Mutex::default(),
        });
        let selects_processes = !options.selection.processes.is_empty();
        let block_max = options.last.map_or(u64::from(RECORDS_MAX), |last| {
            (last / 8).max(RING_BLOCK_MIN)
        });
        let state = WriterState {
            vcpus: Vec::new(),
            log: ProcessLog::new(),
            cpus: cpus.max(1),
            output: BlockOutput::new(out, begin, options.last),
            selection: options.selection,
            when_over: options.when_over,
            sink: sink.clone(),
            flush_often: options.flush_often,
            flushed: Instant::now(),
            block_max: u32::try_from(block_max)
                .unwrap_or(RECORDS_MAX)
                .min(RECORDS_MAX),
        };
        let builder = thread::Builder::new().name("trace".to_owned());
        let thread = builder
            .spawn(move || {
                if let Some(begin) = options.begin {
                    // The allocator reads the number of processors from a file when a thread first
                    // allocates, which may be forbidden from here on.
                    drop(std::hint::black_box(vec![0_u8; 64]));
                    begin();
                }
                state.run(&chunks)
            })
            .map_err(TraceError::Thread)?;
        Ok(Self {
            sink,
            selects_processes,
            thread,
        })
    }

    /// The kinds of events that the engine must report.
    pub fn kinds(&self) -> EventKinds {
        self.sink.kinds()
    }

    /// Whether the trace has ended by itself: its window is over, or the file could not be written.
    pub fn has_ended(&self) -> bool {
        self.sink.over.load(Ordering::Relaxed)
    }

    /// Whether the trace is of some processes only.
    pub const fn selects_processes(&self) -> bool {
        self.selects_processes
    }

    /// The tracer of a vCPU.
    pub fn tracer(&self, cpu: u32) -> VcpuTracer {
        VcpuTracer::new(self.sink.clone(), cpu)
    }

    /// Writes the remaining records and the index. Drop all tracers before: what they still hold is
    /// lost.
    ///
    /// # Errors
    ///
    /// When the file could not be written. It then has all blocks before the failure.
    pub fn finish(self) -> Result<TraceSummary, TraceError> {
        let _ = self.sink.queue.send(Message::End);
        let ended = self.thread.join();
        self.sink.over.store(true, Ordering::Relaxed);
        ended.unwrap_or(Err(TraceError::Io(std::io::ErrorKind::Other.into())))
    }
}

/// The encoder and the selector of one vCPU.
#[derive(Debug)]
struct VcpuStream {
    encoder: BlockEncoder,
    selector: Selector,
    /// The last event of a switch of tasks: every block begins with it.
    task: Option<Event>,
    /// The last reading of the clock, if the block does not have it because the code at it is not
    /// selected: the next record follows it.
    clock: Option<(u64, u64)>,
}

impl VcpuStream {
    /// Adds a record that is selected, after the clock and the task that it needs.
    fn add(
        &mut self,
        at: u64,
        event: &Event,
        output: &mut BlockOutput,
        block_max: u32,
    ) -> std::io::Result<()> {
        match self.clock.take() {
            // The header of a block has the clock of its first record.
            Some((at, ticks)) if self.encoder.is_empty() => self.encoder.set_clock(at, ticks),
            Some((at, ticks)) if !matches!(event, Event::Time { .. }) => {
                self.encoder.add(at, &Event::Time { ticks });
                self.put_full(output, block_max)?;
            }
            _ => {}
        }
        if let (true, Some(task)) = (self.encoder.is_empty(), self.task)
            && !matches!(event, Event::Task(_))
        {
            self.encoder.add(at, &task);
        }
        self.encoder.add(at, event);
        self.put_full(output, block_max)
    }

    /// Writes the block if it is full.
    fn put_full(&mut self, output: &mut BlockOutput, block_max: u32) -> std::io::Result<()> {
        if self.encoder.is_full() || self.encoder.records() >= block_max {
            let block = self.encoder.take()?;
            output.put(block)?;
        }
        Ok(())
    }
}

struct WriterState {
    vcpus: Vec<VcpuStream>,
    log: ProcessLog,
    cpus: usize,
    output: BlockOutput,
    selection: Selection,
    when_over: Option<Box<dyn FnOnce() + Send>>,
    sink: Arc<TraceSink>,
    flush_often: bool,
    flushed: Instant,
    block_max: u32,
}

impl WriterState {
    fn run(mut self, chunks: &Receiver<Message>) -> Result<TraceSummary, TraceError> {
        let mut failure = None;
        loop {
            let result = match chunks.recv_timeout(FLUSH_AFTER) {
                Ok(Message::Chunk(chunk)) => {
                    let added = if failure.is_none() {
                        self.add(&chunk)
                    } else {
                        Ok(())
                    };
                    self.sink.put_back(chunk);
                    added
                }
                Ok(Message::Process(record)) if failure.is_none() => {
                    let block = self.log.add(&record);
                    block.and_then(|block| self.output.put_log(block))
                }
                Ok(Message::Process(_)) => Ok(()),
                Err(RecvTimeoutError::Timeout) if failure.is_none() && self.flush_often => {
                    self.flush()
                }
                Err(RecvTimeoutError::Timeout) => Ok(()),
                Ok(Message::End) | Err(RecvTimeoutError::Disconnected) => break,
            };
            if let Err(error) = result {
                tracing::error!("the trace ends, the guest continues: {error}");
                self.sink.over.store(true, Ordering::Relaxed);
                failure = Some(error);
            }
        }
        match failure {
            Some(error) => Err(error.into()),
            None => {
                self.flush()?;
                Ok(self.output.finish(self.log.unlogged())?)
            }
        }
    }

    /// The stream of a vCPU.
    fn stream(&mut self, cpu: u32) -> usize {
        let index = usize::try_from(cpu).unwrap_or(0).min(self.cpus - 1);
        for id in self.vcpus.len()..=index {
            self.vcpus.push(VcpuStream {
                encoder: BlockEncoder::new(u32::try_from(id).unwrap_or(cpu)),
                selector: Selector::new(self.selection.clone()),
                task: None,
                clock: None,
            });
        }
        index
    }

    fn add(&mut self, chunk: &EventChunk) -> std::io::Result<()> {
        let index = self.stream(chunk.cpu);
        let (output, block_max) = (&mut self.output, self.block_max);
        let stream = &mut self.vcpus[index];
        let mut result = Ok(());
        chunk.for_each(|at, event| {
            if result.is_err() {
                return;
            }
            let selected = stream.selector.selects(at, event);
            if let Event::Time { ticks } = *event {
                stream.clock = Some((at, ticks));
                if !selected || stream.encoder.is_empty() {
                    return;
                }
            }
            if let Event::Task(_) = event {
                stream.task = Some(*event);
            }
            if selected {
                result = stream.add(at, event, output, block_max);
            }
        });
        result?;
        if self.vcpus[index].selector.is_over() {
            self.end_window();
        }
        if self.flush_often && self.flushed.elapsed() >= FLUSH_AFTER {
            self.flush()?;
        }
        Ok(())
    }

    /// Records that the window of a vCPU has ended.
    fn end_window(&mut self) {
        let over = self
            .vcpus
            .iter()
            .filter(|vcpu| vcpu.selector.is_over())
            .count();
        if over == self.cpus {
            self.sink.over.store(true, Ordering::Relaxed);
        }
        if let Some(when_over) = self.when_over.take() {
            when_over();
        }
    }

    /// Writes all blocks that have records.
    fn flush(&mut self) -> std::io::Result<()> {
        self.output.put_log(self.log.take()?)?;
        for vcpu in &mut self.vcpus {
            let block = vcpu.encoder.take()?;
            self.output.put(block)?;
        }
        self.output.flush()?;
        self.flushed = Instant::now();
        Ok(())
    }
}
