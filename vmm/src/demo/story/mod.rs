//! The story of a run: what the guest logged and what the monitor recorded, on one time line.

mod build;
mod profile;

pub use profile::SampleProfile;

use std::ops::Range;

use hindsight_devices::clock::Ticks;

use crate::demo::explain::MsrAccess;
use crate::demo::log::DemoPicture;

/// What the guest did, ready to be drawn.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Story {
    /// Why the guest did not complete its run, if it did not.
    pub problem: Option<String>,
    /// The clock's frequency.
    pub hz: u64,
    /// The end of the run.
    pub end: Ticks,
    /// The phases of the run, in order.
    pub phases: Vec<StoryPhase>,
    /// What the guest computed.
    pub results: Vec<(String, u64)>,
    /// What the guest drew.
    pub picture: Option<DemoPicture>,
    /// Exceptions that the guest's handlers took.
    pub exceptions: Vec<ExceptionRow>,
    /// MSR accesses that the models completed, in the phase about MSRs.
    pub msrs: Vec<MsrRow>,
    /// When the guest took its timer's interrupts.
    pub ticks: Vec<Ticks>,
    /// When the vCPU exited to the monitor.
    pub exits: Vec<Ticks>,
    /// Exits by kind, the most frequent first.
    pub exit_rows: Vec<ExitRow>,
    /// Profiles of sampled addresses.
    pub profiles: Vec<SampleProfile>,
    /// The entries of the guest's LBR stack before a fault, oldest first.
    pub branches: Vec<BranchRow>,
    /// The fault after these branches.
    pub fault: Option<FaultRow>,
    /// How many times longer the same work takes at ring 0 than at ring 3.
    pub ring0_slower: Option<u64>,
}

/// A phase of the guest's run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoryPhase {
    /// The phase's name.
    pub name: String,
    /// The privilege level of its work.
    pub cpl: u8,
    /// From its beginning to its end.
    pub time: Range<Ticks>,
}

/// An exception.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExceptionRow {
    /// When the guest's handler took it.
    pub at: Ticks,
    /// Privilege level of the code that raised it.
    pub cpl: u8,
    /// Mnemonic, such as #PF.
    pub mnemonic: String,
    /// Symbol or address of the instruction.
    pub location: String,
    /// The instruction.
    pub instruction: String,
    /// Why the instruction raised it.
    pub reason: String,
}

/// An entry of the LBR stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BranchRow {
    /// Symbol of the branch.
    pub from: String,
    /// The mnemonic of the branch.
    pub instruction: String,
    /// Symbol of the target.
    pub to: String,
}

/// The fault after the branches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultRow {
    /// Mnemonic, such as #DE.
    pub mnemonic: String,
    /// Symbol of the instruction.
    pub location: String,
    /// The instruction.
    pub instruction: String,
}

/// An access to an MSR.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MsrRow {
    /// When it was completed.
    pub at: Ticks,
    /// The access and its outcome.
    pub access: MsrAccess,
    /// The manual's name of the MSR.
    pub name: String,
    /// Why it had this outcome.
    pub reason: String,
}

/// Exits of one kind, or another operation whose time the guest measured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExitRow {
    /// The kind of exit, or the operation.
    pub name: String,
    /// The number of exits; 0 for an operation that does not exit to the monitor.
    pub count: usize,
    /// The monitor's time for one exit in nanoseconds: the median.
    pub monitor_ns: Option<u64>,
    /// The guest's time for one exit in nanoseconds: the median of its stopwatch.
    pub guest_ns: Option<u64>,
}

/// Converts ticks to nanoseconds.
pub fn nanoseconds(ticks: Ticks, hz: u64) -> u64 {
    let ns = u128::from(ticks) * 1_000_000_000 / u128::from(hz.max(1));
    u64::try_from(ns).unwrap_or(u64::MAX)
}
