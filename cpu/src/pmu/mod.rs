//! The performance-monitoring unit of one virtual processor, version 4, with PEBS.
//! SDM Vol. 3B, "Architectural Performance Monitoring" and "Processor Event Based Sampling (PEBS)".
//!
//! An engine keeps [`EventTotals`]: how often each kind of event happened, per privilege ring, since
//! it began; they only grow. [`Pmu::sync`] moves the counters by what was added since the last time,
//! and says what an overflow asks for. In between the counters need not be touched: [`Pmu::needs`]
//! says which kinds somebody looks at, and [`Pmu::limits`] how many more of them may happen before
//! the next `sync` is due, so that an engine which keeps within the limits overflows at the exact
//! instruction.
//!
//! An access to an MSR of the unit, RDPMC, and a change of IA32_DEBUGCTL want a `sync` before them.

pub(crate) mod access;
mod counter;
pub mod events;
mod limits;
pub mod pebs;
mod state;
#[cfg(test)]
mod tests;

pub use counter::{Freeze, Pmu, PmuConfig};
pub use events::{DataOf, EventTotals, Kind, Ring};
pub use limits::{Counting, Limits, Needs, Quota};
pub use state::{PmuError, PmuState};
