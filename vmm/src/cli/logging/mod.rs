//! What the monitor writes about itself: the log (`--log`) and the trace (`--trace`).
//!
//! The log has levels: `error`, a requested action failed; `warn`, the guest or the host did something
//! odd, at a limited rate; `info`, a rare change of state, such as of the engine; `debug`, what belongs
//! into a bug report; `trace`, single events. The trace has one target for each kind of event, and a
//! format of its own that tools read.

mod filter;
mod format;
mod lazy_file;
mod start;
mod trace;

pub use filter::LogFilter;
pub use start::{LogSettings, Logging};
pub use trace::{TraceSpec, trace_help};
