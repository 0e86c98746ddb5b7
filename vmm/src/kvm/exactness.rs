//! Verdicts on this host's KVM: which groups of facilities it executes exactly.
//!
//! [`crate::exactness`] measures them with the built-in payloads. The engine policy uses them:
//! [`GroupVerdict::action`] is the whole rule.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The reason for a group that was not measured.
pub const UNMEASURED: &str = "not measured";

/// Facilities whose rules are measured together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FacilityGroup {
    /// RFLAGS.TF, INT1, and conditions that delay or suppress a single-step trap.
    SingleStep,
    /// DR0-7, RF, interrupt shadows and breakpoint conditions.
    DebugRegisters,
    /// I/O breakpoints: CR4.DE.
    IoBreakpoints,
    /// Exceptions, software interrupts, gates, far transfers and task switches.
    Exceptions,
    /// Control registers, modes, paging, CPUID and plain MSRs.
    SystemRegisters,
    /// The TSC, its MSRs and timers.
    Time,
    /// The local APIC, the I/O APIC and what wakes a vCPU.
    Interrupts,
    /// LBR, BTS, BTF and branch trace messages.
    Branches,
    /// Performance counters and PEBS.
    Counters,
    /// Resource Director Technology.
    Rdt,
    /// Restricted transactional memory.
    Transactions,
    /// System-management mode.
    Smm,
}

impl FacilityGroup {
    /// All groups, in the order in which they are measured: those that most often deviate first.
    pub const ALL: [Self; 12] = [
        Self::SingleStep,
        Self::DebugRegisters,
        Self::IoBreakpoints,
        Self::Exceptions,
        Self::SystemRegisters,
        Self::Time,
        Self::Interrupts,
        Self::Branches,
        Self::Counters,
        Self::Rdt,
        Self::Transactions,
        Self::Smm,
    ];

    /// How the monitor can observe that a guest uses the group.
    pub const fn visibility(self) -> Visibility {
        match self {
            Self::SingleStep | Self::DebugRegisters | Self::IoBreakpoints => {
                Visibility::ByDebugExit
            }
            Self::Branches | Self::Counters | Self::Rdt => Visibility::ByMsr,
            Self::Exceptions
            | Self::SystemRegisters
            | Self::Time
            | Self::Interrupts
            | Self::Transactions
            | Self::Smm => Visibility::Unseen,
        }
    }
}

impl fmt::Display for FacilityGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::SingleStep => "single-step",
            Self::DebugRegisters => "debug registers",
            Self::IoBreakpoints => "I/O breakpoints",
            Self::Exceptions => "exceptions",
            Self::SystemRegisters => "system registers",
            Self::Time => "time",
            Self::Interrupts => "interrupts",
            Self::Branches => "branch recording",
            Self::Counters => "counters",
            Self::Rdt => "RDT",
            Self::Transactions => "transactions",
            Self::Smm => "SMM",
        })
    }
}

/// How the monitor can observe that a guest uses a group of facilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visibility {
    /// By the write to an MSR that arms the group: every such write exits.
    ByMsr,
    /// By MOV DR and the guest's own #DB, which exit on some KVMs.
    ///
    /// The measurement shows whether the machine can then move in time.
    ByDebugExit,
    /// Never: the guest uses the group without an exit.
    Unseen,
}

/// The result of measuring a group of facilities in one mode of running.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exactness {
    /// Not all cases of the group were run.
    #[default]
    Unmeasured,
    /// All cases of the group passed.
    Exact,
    /// A case failed: its name and its failure.
    Inexact(String),
}

/// The verdict on a group of facilities.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupVerdict {
    /// The result while KVM handles the group by itself.
    pub alone: Exactness,
    /// The result while the machine moves to the interpreter as soon as the guest arms the group.
    pub moving: Exactness,
}

/// How a machine runs because of a [`GroupVerdict`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupAction {
    /// The guest may use the group under KVM.
    Stay,
    /// The machine runs under KVM until the guest arms the group.
    MoveWhenArmed,
    /// The machine runs in the interpreter from its first instruction, for this reason.
    Interpret(String),
}

impl GroupVerdict {
    /// Returns how a machine runs because of this verdict.
    ///
    /// A guest runs under KVM only while each group that it can use without an exit was measured to
    /// be exact.
    pub fn action(&self, visibility: Visibility) -> GroupAction {
        match (visibility, &self.alone, &self.moving) {
            (Visibility::ByDebugExit | Visibility::Unseen, Exactness::Exact, _) => {
                GroupAction::Stay
            }
            (Visibility::ByMsr | Visibility::ByDebugExit, _, Exactness::Exact) => {
                GroupAction::MoveWhenArmed
            }
            (Visibility::ByMsr | Visibility::ByDebugExit, _, moving) => moving.interpret(),
            (Visibility::Unseen, alone, _) => alone.interpret(),
        }
    }
}

impl GroupVerdict {
    /// Whether a case failed, so that a guest that may use the group must be interpreted.
    pub fn deviates(&self, visibility: Visibility) -> bool {
        let inexact = |exactness: &Exactness| matches!(exactness, Exactness::Inexact(_));
        match visibility {
            Visibility::ByMsr => inexact(&self.moving),
            Visibility::ByDebugExit => inexact(&self.moving) && inexact(&self.alone),
            Visibility::Unseen => inexact(&self.alone),
        }
    }
}

impl Exactness {
    fn interpret(&self) -> GroupAction {
        GroupAction::Interpret(match self {
            Self::Inexact(reason) => reason.clone(),
            Self::Unmeasured | Self::Exact => UNMEASURED.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The whole table, which docs/guide/exactness.md shows.
    #[test]
    fn action_follows_the_table_of_exactness_and_visibility() {
        use Visibility::{ByDebugExit, ByMsr, Unseen};
        let inexact = || Exactness::Inexact("case x".to_owned());
        let interpret = |reason: &str| GroupAction::Interpret(reason.to_owned());
        let each = [Exactness::Exact, inexact(), Exactness::Unmeasured];
        for alone in &each {
            for moving in &each {
                let verdict = GroupVerdict {
                    alone: alone.clone(),
                    moving: moving.clone(),
                };
                let reason = |exactness: &Exactness| match exactness {
                    Exactness::Inexact(_) => interpret("case x"),
                    _ => interpret("not measured"),
                };
                let moves = match moving {
                    Exactness::Exact => GroupAction::MoveWhenArmed,
                    other => reason(other),
                };
                let stays = match alone {
                    Exactness::Exact => Some(GroupAction::Stay),
                    _ => None,
                };
                assert_eq!(verdict.action(ByMsr), moves);
                assert_eq!(verdict.action(ByDebugExit), stays.clone().unwrap_or(moves));
                assert_eq!(
                    verdict.action(Unseen),
                    stays.unwrap_or_else(|| reason(alone))
                );
            }
        }
    }
}
