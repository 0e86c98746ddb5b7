//! The performance-monitoring unit of one virtual processor, versions 2 to 5, with PEBS.
//!
//! SDM Vol. 3B, "Architectural Performance Monitoring" and "Processor Event Based Sampling (PEBS)".
//!
//! An engine keeps [`EventTotals`]: how often each kind of event has happened, by privilege ring;
//! totals only grow. [`Pmu::sync`] advances the counters by the difference to the last call, and
//! returns whether an overflow requests an interrupt. Between two calls the counters are not
//! touched: [`Pmu::needs`] says which kinds some counter counts, and [`Pmu::limits`] how many more
//! of them may happen before the next call. An engine that keeps within the limits overflows at the
//! exact instruction.
//!
//! The caller must call [`Pmu::sync`] before an access to an MSR of the unit, RDPMC, and a change
//! of IA32_DEBUGCTL.

pub(crate) mod access;
mod counter;
pub mod events;
mod limits;
mod metrics;
pub mod pebs;
pub mod selection;
mod state;
#[cfg(test)]
mod tests;

pub use counter::{PmiFreeze, Pmu, PmuConfig};
pub use events::{EventKind, EventTotals, Ring};
pub use limits::{EngineCounting, EventQuota, PmuLimits, PmuNeeds};
pub use metrics::SlotTotals;
pub use selection::SampledAccess;
pub use state::{PmuState, PmuStateError};
