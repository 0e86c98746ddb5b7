//! The saved totals behind the performance counters of one vCPU.

use hindsight_cpu::pmu::EventTotals;
use hindsight_devices::clock::Ticks;
use serde::{Deserialize, Serialize};

/// The saved totals of one vCPU since the machine was created. Every value is valid.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PmuTotalsState {
    /// Events of all kinds; cycles up to the last time they were divided between the rings.
    pub totals: EventTotals,
    /// Ticks spent halted, up to `halted_since`.
    pub halted: Ticks,
    /// When the vCPU halted, if it is halted.
    pub halted_since: Option<Ticks>,
    /// The counts when cycles were last divided between the rings.
    pub split: RingShare,
}

/// Counts when cycles were last divided between the rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingShare {
    /// Unhalted ticks.
    pub cycles: Ticks,
    /// Instructions retired at CPL 0, and at CPL 1 to 3.
    pub instructions: [u64; 2],
}
