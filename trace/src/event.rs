//! The records of a trace.

use std::str::FromStr;

use bitflags::bitflags;
use hindsight_cpu::branch::BranchClass;
use thiserror::Error;

use crate::process::LinuxTask;

bitflags! {
    /// Kinds of events that a trace may have.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct EventKinds: u32 {
        /// Every taken branch, interrupt and exception.
        const BRANCHES = 1 << 0;
        /// Calls, returns, far branches, interrupts and exceptions.
        const CALLS = 1 << 1;
        /// Exceptions and software interrupts, with vector and error code.
        const EXCEPTIONS = 1 << 2;
        /// External interrupts, with their vector.
        const INTERRUPTS = 1 << 3;
        /// RDMSR and WRMSR.
        const MSR = 1 << 4;
        /// Accesses to ports and to memory-mapped devices.
        const IO = 1 << 5;
        /// MOV to control registers, and HLT.
        const MODE = 1 << 6;
        /// Loads and stores of memory.
        const ACCESSES = 1 << 7;
        /// Processes of a Linux guest: switches of tasks, programs and mapped files.
        const PROCESSES = 1 << 8;
    }
}

impl EventKinds {
    /// Names of the kinds, as options and headers have them.
    pub const NAMES: [(&'static str, Self); 9] = [
        ("branches", Self::BRANCHES),
        ("calls", Self::CALLS),
        ("exceptions", Self::EXCEPTIONS),
        ("interrupts", Self::INTERRUPTS),
        ("msr", Self::MSR),
        ("io", Self::IO),
        ("mode", Self::MODE),
        ("accesses", Self::ACCESSES),
        ("processes", Self::PROCESSES),
    ];

    /// The kind with this name.
    pub fn named(name: &str) -> Option<Self> {
        let found = Self::NAMES.iter().find(|(own, _)| *own == name);
        found.map(|&(_, kind)| kind)
    }

    /// The names of the kinds in this set.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        let members = Self::NAMES
            .iter()
            .filter(move |(_, kind)| self.contains(*kind));
        members.map(|&(name, _)| name)
    }

    /// Whether an engine must report branches for these kinds.
    pub const fn needs_branches(self) -> bool {
        self.intersects(Self::BRANCHES.union(Self::CALLS))
            || self.intersects(Self::EXCEPTIONS.union(Self::INTERRUPTS))
    }

    /// Whether an engine must report system events for these kinds.
    pub const fn needs_system_events(self) -> bool {
        self.intersects(Self::MSR.union(Self::MODE))
    }
}

/// A word that names no kind of events.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{0}: the kinds are {names}", names = EventKinds::all().names().collect::<Vec<_>>().join(", "))]
pub struct UnknownKind(pub String);

impl FromStr for EventKinds {
    type Err = UnknownKind;

    /// Parses names of kinds with commas between them.
    fn from_str(text: &str) -> Result<Self, UnknownKind> {
        let kinds = text.split(',');
        let kinds = kinds.map(|name| Self::named(name).ok_or_else(|| UnknownKind(name.to_owned())));
        kinds.collect()
    }
}

/// An access to a port, or to a guest-physical address that is not memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceAccess {
    /// Whether `address` is a port.
    pub port: bool,
    /// Whether the guest writes to the device.
    pub write: bool,
    /// Port number or guest-physical address.
    pub address: u64,
    /// Bytes, 1 to 8.
    pub size: u8,
    /// The value that was read or written.
    pub value: u64,
}

/// A taken branch, interrupt or exception.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BranchEvent {
    /// Linear address of the branch, or of the interrupted instruction.
    pub from: u64,
    /// Linear address of the target.
    pub to: u64,
    /// Kind of branch.
    pub class: BranchClass,
    /// Privilege level before the branch, 0 to 3.
    pub cpl: u8,
    /// Privilege level after the branch, 0 to 3.
    pub to_cpl: u8,
    /// The modelled predictor mispredicted it.
    pub mispredicted: bool,
}

/// One event of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A taken branch, interrupt or exception.
    Branch(BranchEvent),
    /// Vector and error code of the delivery whose branch has the same count of instructions.
    Delivery {
        /// The vector of the exception or interrupt.
        vector: u8,
        /// The error code that was pushed.
        error_code: Option<u32>,
        /// CR2, for a page fault.
        address: Option<u64>,
    },
    /// RDMSR.
    MsrRead {
        /// MSR number.
        index: u32,
        /// The value; `None` is #GP(0).
        value: Option<u64>,
    },
    /// WRMSR.
    MsrWrite {
        /// MSR number.
        index: u32,
        /// EDX:EAX.
        value: u64,
        /// `false`: the guest got #GP(0).
        accepted: bool,
    },
    /// An access to a device.
    Device(DeviceAccess),
    /// MOV to a control register.
    ControlRegister {
        /// The register's number.
        number: u8,
        /// The value.
        value: u64,
    },
    /// HLT: the processor stops until an interrupt arrives.
    Halt,
    /// A load from memory, or a store.
    Access {
        /// Linear address.
        address: u64,
        /// Bytes, at most a page.
        size: u16,
        /// Whether it is a store.
        store: bool,
    },
    /// The kernel switches to a task, or the task gets a new name; `None`: the task that runs from
    /// here on is not known.
    Task(Option<LinuxTask>),
    /// The machine's clock, where it does not follow the count of instructions.
    Time {
        /// Ticks of the TSC's frequency.
        ticks: u64,
    },
}

/// An event with its position in the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The vCPU.
    pub cpu: u32,
    /// Instructions that this vCPU had retired: up to and with a branch, before any other event.
    pub at: u64,
    /// The machine's clock, in ticks of the TSC's frequency; between two readings it is
    /// extrapolated by one tick an instruction.
    pub ticks: u64,
    /// The event.
    pub event: Event,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_a_name() {
        let all = EventKinds::NAMES.iter().map(|&(_, kind)| kind);
        assert_eq!(all.collect::<EventKinds>(), EventKinds::all());
        for (name, kind) in EventKinds::NAMES {
            assert_eq!(EventKinds::named(name), Some(kind));
        }
        assert_eq!(EventKinds::named("pages"), None);
        let two = EventKinds::MSR | EventKinds::CALLS;
        assert!(two.names().eq(["calls", "msr"]));
    }

    #[test]
    fn kinds_are_parsed_from_names_with_commas() {
        let two = EventKinds::MSR | EventKinds::CALLS;
        assert_eq!("msr,calls".parse(), Ok(two));
        for bad in ["", "msr,", "Msr", "msr calls"] {
            let error = bad.parse::<EventKinds>().unwrap_err().to_string();
            assert!(
                error.contains(": the kinds are branches, calls, "),
                "{error}"
            );
        }
    }
}
