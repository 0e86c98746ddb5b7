//! Traces of what the processors do.

use std::io::{self, Cursor, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hindsight_cpu::branch::BranchClass;
use hindsight_trace::{
    Event, EventKinds, Record, Selection, TraceError, TraceHeader, TraceReader, TraceSummary,
    TraceWriter, WriterOptions,
};

use crate::Error;

/// What a trace has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceRequest {
    /// The kinds of events, without processes.
    pub events: EventKinds,
    /// The privilege levels, as a mask: bit n is CPL n.
    pub cpls: u8,
    /// First and last linear addresses of the code; empty for all.
    pub ranges: Vec<(u64, u64)>,
    /// Keep at least this many of the last records; `None` for all.
    pub last: Option<u64>,
    /// About how many bytes the trace may have, compressed. Then the machine stops with
    /// [`Stop::TraceFull`](crate::Stop::TraceFull).
    pub bytes_max: u64,
}

impl TraceRequest {
    /// The default of [`TraceRequest::bytes_max`]: tens of millions of branches.
    pub const BYTES_MAX: u64 = 64 << 20;
}

impl From<EventKinds> for TraceRequest {
    fn from(events: EventKinds) -> Self {
        Self {
            events,
            cpls: 0xf,
            ranges: Vec::new(),
            last: None,
            bytes_max: Self::BYTES_MAX,
        }
    }
}

/// A taken branch, an interrupt or an exception.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TakenBranch {
    /// The processor.
    pub cpu: u32,
    /// Instructions that this processor had retired, with the branch.
    pub at: u64,
    /// The machine's clock, in nanoseconds.
    pub time: u64,
    /// Linear address of the branch, or of the interrupted instruction.
    pub from: u64,
    /// Linear address of the target.
    pub to: u64,
    /// Kind of branch.
    pub class: BranchClass,
    /// Privilege level before the branch.
    pub cpl: u8,
    /// Privilege level after it.
    pub to_cpl: u8,
    /// The modelled predictor mispredicted it.
    pub mispredicted: bool,
}

/// A load or a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataAccess {
    /// The processor.
    pub cpu: u32,
    /// Instructions that this processor had retired before the one that accesses memory.
    pub at: u64,
    /// The machine's clock, in nanoseconds.
    pub time: u64,
    /// Linear address of the first byte.
    pub address: u64,
    /// Bytes.
    pub size: u16,
    /// It is a store.
    pub write: bool,
}

/// The bytes that the writer's thread has written.
#[derive(Clone, Debug, Default)]
struct SharedBytes(Arc<Mutex<Vec<u8>>>);

impl SharedBytes {
    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Write for SharedBytes {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A trace that the machine adds to.
#[derive(Debug)]
pub(crate) struct OpenTrace {
    pub(crate) writer: TraceWriter,
    bytes: SharedBytes,
    /// The length of `bytes` at which the machine stops.
    full_at: u64,
}

impl OpenTrace {
    pub(crate) fn begin(header: TraceHeader, options: &TraceRequest) -> Result<Self, Error> {
        if options.events.contains(EventKinds::PROCESSES) {
            return Err(Error::Processes);
        }
        let header = TraceHeader {
            events: options.events.names().map(str::to_owned).collect(),
            // Exports then know nothing of the code before the first branch.
            selection: "a program's trace".to_owned(),
            ..header
        };
        let bytes = SharedBytes::default();
        let writer = WriterOptions {
            selection: Selection {
                kinds: options.events,
                cpls: options.cpls,
                ranges: options.ranges.clone(),
                ..Selection::default()
            },
            last: options.last,
            flush_often: false,
            when_over: None,
            begin: None,
        };
        let writer = TraceWriter::start(Box::new(bytes.clone()), &header, writer)?;
        let begin = bytes.lock().len() as u64;
        Ok(Self {
            writer,
            bytes,
            full_at: begin.saturating_add(options.bytes_max),
        })
    }

    /// Whether the machine must stop.
    pub(crate) fn is_full(&self) -> bool {
        self.bytes.lock().len() as u64 >= self.full_at
    }

    /// Completes the trace. The machine has dropped its tracers.
    pub(crate) fn finish(self) -> Result<Trace, Error> {
        let summary = self.writer.finish()?;
        let bytes = std::mem::take(&mut *self.bytes.lock());
        Ok(Trace {
            bytes: bytes.into(),
            summary,
        })
    }
}

/// What the processors did in a part of a run.
#[derive(Clone, Debug)]
pub struct Trace {
    bytes: Arc<[u8]>,
    summary: TraceSummary,
}

impl Trace {
    /// How many records it has.
    pub const fn len(&self) -> u64 {
        self.summary.records
    }

    /// Whether it has no records.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All records, ordered by the machine's clock.
    ///
    /// # Errors
    ///
    /// When the trace is damaged, which is a bug.
    pub fn records(
        &self,
    ) -> Result<impl Iterator<Item = Result<Record, TraceError>> + use<>, Error> {
        let reader = TraceReader::new(Cursor::new(self.bytes.clone()))?;
        Ok(reader.into_records())
    }

    /// The branches, interrupts and exceptions.
    ///
    /// # Errors
    ///
    /// When the trace is damaged, which is a bug.
    pub fn branches(
        &self,
    ) -> Result<impl Iterator<Item = Result<TakenBranch, TraceError>> + use<>, Error> {
        Ok(self.records()?.filter_map(|record| {
            let record = match record {
                Ok(record) => record,
                Err(error) => return Some(Err(error)),
            };
            let Event::Branch(branch) = record.event else {
                return None;
            };
            Some(Ok(TakenBranch {
                cpu: record.cpu,
                at: record.at,
                time: record.ticks,
                from: branch.from,
                to: branch.to,
                class: branch.class,
                cpl: branch.cpl,
                to_cpl: branch.to_cpl,
                mispredicted: branch.mispredicted,
            }))
        }))
    }

    /// The loads and stores.
    ///
    /// # Errors
    ///
    /// When the trace is damaged, which is a bug.
    pub fn accesses(
        &self,
    ) -> Result<impl Iterator<Item = Result<DataAccess, TraceError>> + use<>, Error> {
        Ok(self.records()?.filter_map(|record| {
            let record = match record {
                Ok(record) => record,
                Err(error) => return Some(Err(error)),
            };
            let Event::Access {
                address,
                size,
                store,
            } = record.event
            else {
                return None;
            };
            Some(Ok(DataAccess {
                cpu: record.cpu,
                at: record.at,
                time: record.ticks,
                address,
                size,
                write: store,
            }))
        }))
    }

    /// Writes the trace as a trace file, which `hindsight export` reads.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        let path = path.as_ref();
        std::fs::write(path, &self.bytes).map_err(|source| Error::File {
            path: path.to_owned(),
            source,
        })
    }
}
