//! Records the events of a machine's vCPUs, to draw or check them after the run.
//!
//! Without a recorder this costs one comparison at an exit. It is meant for short runs: it keeps
//! the first events and counts the others.

use std::sync::{Arc, Mutex};

use hindsight_devices::clock::{Clock, Ticks};

use crate::kvm::exit::{KvmExit, PortData};
use crate::sync::lock;

/// Maximum number of events a recorder keeps.
const EVENTS_MAX: usize = 1 << 16;

/// An event of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedEvent {
    /// The time, by the machine's clock.
    pub at: Ticks,
    /// The vCPU.
    pub cpu: usize,
    /// The event.
    pub kind: RecordedKind,
}

/// What happened to a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordedKind {
    /// The vCPU stopped running the guest. In the interpreter: what would be an exit under KVM.
    Exit(ExitKind),
    /// The vCPU runs the guest again: the exit was served.
    Enter,
    /// RDMSR completed; `None` is #GP(0).
    Rdmsr {
        /// MSR number.
        index: u32,
        /// The value that the guest read.
        answer: Option<u64>,
    },
    /// WRMSR completed.
    Wrmsr {
        /// MSR number.
        index: u32,
        /// EDX:EAX.
        value: u64,
        /// `false`: the guest got #GP(0).
        accepted: bool,
    },
    /// An external interrupt was injected.
    Interrupt {
        /// The interrupt's vector.
        vector: u8,
    },
}

/// Why a vCPU stopped running the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ExitKind {
    /// IN.
    PortRead(u16),
    /// OUT.
    PortWrite(u16),
    /// A read of an address that is not memory.
    MmioRead(u64),
    /// A write to an address that is not memory.
    MmioWrite(u64),
    /// RDMSR.
    Rdmsr(u32),
    /// WRMSR.
    Wrmsr(u32),
    /// HLT.
    Halt,
    /// An interrupt can be injected now.
    Window,
    /// Kicked by another thread: an interrupt is pending, or the machine stops.
    Kicked,
    /// Anything else.
    Other,
}

impl From<&KvmExit<'_>> for ExitKind {
    fn from(exit: &KvmExit<'_>) -> Self {
        match *exit {
            KvmExit::Io {
                port,
                data: PortData::In(_),
                ..
            } => Self::PortRead(port),
            KvmExit::Io { port, .. } => Self::PortWrite(port),
            KvmExit::MmioRead { address, .. } => Self::MmioRead(address),
            KvmExit::MmioWrite { address, .. } => Self::MmioWrite(address),
            KvmExit::Rdmsr { index, .. } => Self::Rdmsr(index),
            KvmExit::Wrmsr { index, .. } => Self::Wrmsr(index),
            KvmExit::Halt => Self::Halt,
            KvmExit::InterruptWindow => Self::Window,
            KvmExit::Kicked => Self::Kicked,
            _ => Self::Other,
        }
    }
}

#[derive(Debug, Default)]
struct EventBuffer {
    recorded: Vec<RecordedEvent>,
    lost: usize,
}

/// Records events with the time of one machine.
#[derive(Debug)]
pub struct Recorder {
    clock: Arc<Clock>,
    events: Mutex<EventBuffer>,
}

impl Recorder {
    /// The recorder of the machine with this clock.
    pub fn new(clock: Arc<Clock>) -> Self {
        Self {
            clock,
            events: Mutex::default(),
        }
    }

    /// Records an event that happens now.
    pub fn record(&self, cpu: usize, kind: RecordedKind) {
        let at = self.clock.now();
        let mut events = lock(&self.events);
        if events.recorded.len() < EVENTS_MAX {
            events.recorded.push(RecordedEvent { at, cpu, kind });
        } else {
            events.lost += 1;
        }
    }

    /// Takes the events so far, in order, and the number of events that were dropped.
    pub fn take(&self) -> (Vec<RecordedEvent>, usize) {
        let events = std::mem::take(&mut *lock(&self.events));
        (events.recorded, events.lost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorder_keeps_the_first_events_and_counts_the_others() {
        let recorder = Recorder::new(Arc::new(Clock::new_virtual(1_000_000_000)));
        recorder.record(3, RecordedKind::Exit(ExitKind::Halt));
        (0..EVENTS_MAX).for_each(|_| recorder.record(0, RecordedKind::Enter));
        let (events, lost) = recorder.take();
        assert_eq!((events.len(), lost), (EVENTS_MAX, 1));
        assert_eq!(
            (events[0].cpu, events[0].kind),
            (3, RecordedKind::Exit(ExitKind::Halt))
        );
        assert_eq!(recorder.take(), (Vec::new(), 0));
    }

    #[test]
    fn exit_kind_distinguishes_port_reads_from_writes() {
        let mut data = [0];
        let read = KvmExit::Io {
            port: 0x61,
            size: 1,
            data: PortData::In(&mut data),
        };
        assert_eq!(ExitKind::from(&read), ExitKind::PortRead(0x61));
        let write = KvmExit::Io {
            port: 0x61,
            size: 1,
            data: PortData::Out(&[0]),
        };
        assert_eq!(ExitKind::from(&write), ExitKind::PortWrite(0x61));
    }
}
