//! Trace files: what a guest's processors executed, as a compressed stream of records.
//!
//! A [`VcpuTracer`] collects what one vCPU does and sends it through a bounded queue to the thread of
//! a [`TraceWriter`], which selects, encodes and compresses it. A [`TraceReader`] reads the file, also
//! one whose end is missing. The format is described in `docs/reference/trace-format.md`.

mod block;
mod chunk;
mod decode;
mod encode;
mod error;
mod event;
mod header;
mod predict;
mod process;
mod process_log;
mod reader;
mod select;
mod varint;
mod writer;

pub use block::{BlockInfo, RECORDS_MAX};
pub use chunk::VcpuTracer;
pub use error::TraceError;
pub use event::{BranchEvent, DeviceAccess, Event, EventKinds, Record, UnknownKind};
pub use header::{TraceHeader, TraceSummary, TracedImage, VERSION};
pub use process::{LinuxTask, LoggedFunction, LoggedMapping, ProcessEvent, ProcessRecord};
pub use reader::{IntoRecords, Records, TraceReader};
pub use select::{End, Passage, ProcessFilter, Selection, Window};
pub use writer::{TraceSink, TraceWriter, WriterOptions};
