//! A record of what happened to a processor, for whoever wants to draw or judge it afterwards.
//!
//! Without a recorder this costs one comparison at an exit. It is for short runs: it keeps what came
//! first and counts the rest.

use std::sync::{Arc, Mutex};

use hindsight_devices::clock::{Clock, Ticks};

use crate::kvm::exit::{KvmExit, PortData};
use crate::sync::lock;

/// Most events a recorder keeps.
const EVENTS_MAX: usize = 1 << 16;

/// Something that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedEvent {
    /// When, by the machine's clock.
    pub at: Ticks,
    /// To which processor.
    pub cpu: usize,
    /// What.
    pub what: RecordedKind,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordedKind {
    /// The processor stopped running the guest. The interpreter tells what would be an exit.
    Exit(ExitKind),
    /// It runs the guest again: what the exit took here is over.
    Enter,
    /// RDMSR was answered; `None` is #GP(0).
    Rdmsr {
        /// MSR number.
        index: u32,
        /// What the guest got.
        answer: Option<u64>,
    },
    /// WRMSR was answered.
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
        /// Its vector.
        vector: u8,
    },
}

/// Why a processor stopped, without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ExitKind {
    /// IN.
    PortRead(u16),
    /// OUT.
    PortWrite(u16),
    /// A read where there is no memory.
    MmioRead(u64),
    /// A write where there is no memory.
    MmioWrite(u64),
    /// RDMSR.
    Rdmsr(u32),
    /// WRMSR.
    Wrmsr(u32),
    /// HLT.
    Halt,
    /// An interrupt can be injected now.
    Window,
    /// Called from another thread: an interrupt waits, or the machine stops.
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
    kept: Vec<RecordedEvent>,
    lost: usize,
}

/// Keeps events, by the time of one machine.
#[derive(Debug)]
pub struct Recorder {
    clock: Arc<Clock>,
    events: Mutex<EventBuffer>,
}

impl Recorder {
    /// A recorder for the machine of `clock`.
    pub fn new(clock: Arc<Clock>) -> Self {
        Self {
            clock,
            events: Mutex::default(),
        }
    }

    /// Keeps an event that happens now.
    pub fn record(&self, cpu: usize, what: RecordedKind) {
        let at = self.clock.now();
        let mut events = lock(&self.events);
        if events.kept.len() < EVENTS_MAX {
            events.kept.push(RecordedEvent { at, cpu, what });
        } else {
            events.lost += 1;
        }
    }

    /// The events so far, in order, and how many found no room.
    pub fn take(&self) -> (Vec<RecordedEvent>, usize) {
        let events = std::mem::take(&mut *lock(&self.events));
        (events.kept, events.lost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorder_keeps_what_came_first_and_counts_the_rest() {
        let recorder = Recorder::new(Arc::new(Clock::new_virtual(1_000_000_000)));
        recorder.record(3, RecordedKind::Exit(ExitKind::Halt));
        (0..EVENTS_MAX).for_each(|_| recorder.record(0, RecordedKind::Enter));
        let (events, lost) = recorder.take();
        assert_eq!((events.len(), lost), (EVENTS_MAX, 1));
        assert_eq!(
            (events[0].cpu, events[0].what),
            (3, RecordedKind::Exit(ExitKind::Halt))
        );
        assert_eq!(recorder.take(), (Vec::new(), 0));
    }

    #[test]
    fn kind_tells_directions_apart() {
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
