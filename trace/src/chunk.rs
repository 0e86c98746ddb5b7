//! Collects the events of one vCPU, on that vCPU's thread.

use std::sync::Arc;

use hindsight_cpu::branch::{Branch, BranchClass};

use crate::event::{BranchEvent, Event, EventKinds};
use crate::process::{ProcessEvent, ProcessRecord};
use crate::writer::TraceSink;

/// Number of branches at which a chunk is sent to the writer.
const BRANCHES: usize = 8192;
/// Number of other events at which a chunk is sent to the writer.
const EVENTS: usize = 8192;
/// Maximum number of events that are held until the engine has reported the branches before them.
const EVENTS_HELD: usize = 1 << 16;

/// A part of the events of one vCPU.
#[derive(Debug, Default)]
pub(crate) struct EventChunk {
    pub(crate) cpu: u32,
    /// The count of instructions of the first branch.
    pub(crate) first_at: u64,
    /// The branches; their addresses are linear.
    pub(crate) branches: Vec<Branch>,
    /// The other events, each with the count of instructions before it.
    pub(crate) events: Vec<(u64, Event)>,
}

impl EventChunk {
    /// Calls `each` for all records in order: an event comes before the branches that retire later.
    pub(crate) fn for_each(&self, mut each: impl FnMut(u64, &Event)) {
        let mut events = self.events.iter().peekable();
        let mut at = self.first_at;
        for branch in &self.branches {
            at = at.wrapping_add(stamp_difference(branch.at, at));
            while let Some((before, event)) = events.next_if(|(before, _)| *before < at) {
                each(*before, event);
            }
            let event = Event::Branch(BranchEvent {
                from: branch.from,
                to: branch.to,
                class: branch.class,
                cpl: branch.cpl,
                to_cpl: branch.to_cpl,
                mispredicted: branch.mispredicted,
            });
            each(at, &event);
        }
        for (at, event) in events {
            each(*at, event);
        }
    }
}

/// How many instructions `stamp`, a count modulo 2^32, is after `at`.
fn stamp_difference(stamp: u32, at: u64) -> u64 {
    let low = u32::try_from(at & 0xffff_ffff).unwrap_or(0);
    u64::from(stamp.wrapping_sub(low))
}

/// The linear address of an instruction pointer. The base of a 64-bit code segment is 0.
const fn linear(ip: u64, base: u64) -> u64 {
    match base {
        0 => ip,
        base => ip.wrapping_add(base) & 0xffff_ffff,
    }
}

/// Collects what one vCPU does and sends it to the writer. Sends the rest when it is dropped.
#[derive(Debug)]
pub struct VcpuTracer {
    sink: Arc<TraceSink>,
    chunk: EventChunk,
    /// The base of CS before the next branch.
    from_base: u64,
    /// The count of instructions of the last branch.
    last_at: u64,
    /// Ticks minus instructions at the last reading of the clock.
    clock: Option<u64>,
}

impl VcpuTracer {
    pub(crate) fn new(sink: Arc<TraceSink>, cpu: u32) -> Self {
        Self {
            chunk: EventChunk {
                cpu,
                ..EventChunk::default()
            },
            sink,
            from_base: 0,
            last_at: 0,
            clock: None,
        }
    }

    /// The kinds of events that the engine must report; none after the trace has ended.
    pub fn kinds(&self) -> EventKinds {
        self.sink.kinds()
    }

    /// Sets the base of CS where the vCPU starts without a branch, such as after a start-up IPI.
    pub fn restart(&mut self, base: u64) {
        self.from_base = base;
    }

    /// Adds branches in the order of execution. All of them are in the code segment with base
    /// `cs_base`, except that the first may be a far branch into it. The vCPU has retired `retired`
    /// instructions when the clock is at `ticks`.
    pub fn branches(&mut self, cs_base: u64, branches: &[Branch], retired: u64, ticks: u64) {
        let (Some(first), Some(last)) = (branches.first(), branches.last()) else {
            return;
        };
        let is_taken = |branch: &&Branch| branch.class != BranchClass::NotTaken;
        if !branches.iter().all(|branch| is_taken(&branch)) {
            let taken: Vec<_> = branches.iter().filter(is_taken).copied().collect();
            return self.branches(cs_base, &taken, retired, ticks);
        }
        if self.chunk.branches.is_empty() {
            self.chunk.first_at = before(retired, first.at);
        }
        let added = self.chunk.branches.len();
        self.chunk.branches.extend_from_slice(branches);
        if cs_base != 0 || self.from_base != 0 {
            self.make_linear(cs_base, added);
        }
        self.last_at = before(retired, last.at);
        if self.clock.is_none() {
            // The trace needs a clock for its first record: this reading, extrapolated back.
            let at = before(retired, first.at).saturating_sub(1);
            self.read_clock(at, ticks.wrapping_sub(retired).wrapping_add(at));
        }
        self.read_clock(retired, ticks);
        if self.chunk.branches.len() >= BRANCHES {
            self.flush();
        }
    }

    #[cold]
    fn make_linear(&mut self, cs_base: u64, added: usize) {
        for branch in &mut self.chunk.branches[added..] {
            let near = branch.class.is_near();
            branch.from = linear(branch.from, if near { cs_base } else { self.from_base });
            branch.to = linear(branch.to, cs_base);
            self.from_base = cs_base;
        }
    }

    /// Adds an event after `retired` instructions, at `ticks`.
    pub fn event(&mut self, retired: u64, ticks: u64, event: Event) {
        self.read_clock(retired, ticks);
        self.chunk.events.push((retired, event));
        if self.chunk.events.len() >= EVENTS {
            self.flush();
        }
    }

    /// Adds an event of the guest's kernel after `retired` instructions, at `ticks`.
    pub fn process(&self, retired: u64, ticks: u64, event: ProcessEvent) {
        self.sink.send_process(ProcessRecord {
            cpu: self.chunk.cpu,
            at: retired,
            ticks,
            event,
        });
    }

    /// Adds a reading of the clock, if it did not follow the instructions.
    fn read_clock(&mut self, retired: u64, ticks: u64) {
        let clock = Some(ticks.wrapping_sub(retired));
        if self.clock != clock {
            self.clock = clock;
            self.chunk.events.push((retired, Event::Time { ticks }));
        }
    }

    /// Sends all events up to the last branch. Later ones are held, because the engine may still
    /// report branches that precede them.
    fn flush(&mut self) {
        let last_at = self.last_at;
        let held = if self.kinds().needs_branches() && self.chunk.events.len() < EVENTS_HELD {
            let ready = self.chunk.events.partition_point(|(at, _)| *at <= last_at);
            self.chunk.events.split_off(ready)
        } else {
            Vec::new()
        };
        self.send(held);
    }

    fn send(&mut self, held: Vec<(u64, Event)>) {
        let (branches, events) = self.sink.empty_buffers();
        let next = EventChunk {
            cpu: self.chunk.cpu,
            first_at: 0,
            branches,
            events,
        };
        let chunk = std::mem::replace(&mut self.chunk, next);
        self.chunk.events.extend(held);
        if !chunk.branches.is_empty() || !chunk.events.is_empty() {
            self.sink.send(chunk);
        }
    }
}

impl Drop for VcpuTracer {
    fn drop(&mut self) {
        self.send(Vec::new());
    }
}

/// The largest count up to `retired` whose lower 32 bits are `stamp`.
fn before(retired: u64, stamp: u32) -> u64 {
    let low = u32::try_from(retired & 0xffff_ffff).unwrap_or(0);
    retired.wrapping_sub(u64::from(low.wrapping_sub(stamp)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn branch(from: u64, at: u32) -> Branch {
        Branch {
            at,
            ..Branch::new(BranchClass::DirectJump, from, from + 1)
        }
    }

    #[test]
    fn records_of_a_chunk_come_in_order_of_their_instructions() {
        let chunk = EventChunk {
            cpu: 0,
            first_at: 0xffff_fffe,
            branches: vec![branch(1, 0xffff_fffe), branch(2, 0xffff_fffe), branch(3, 4)],
            events: vec![
                (3, Event::Halt),
                (0xffff_fffe, Event::Halt),
                (0x1_0000_0004, Event::Halt),
            ],
        };
        let mut order = Vec::new();
        chunk.for_each(|at, event| order.push((at, matches!(event, Event::Halt))));
        let expected = [
            (3, true),
            (0xffff_fffe, false),
            (0xffff_fffe, false),
            (0xffff_fffe, true),
            (0x1_0000_0004, false),
            (0x1_0000_0004, true),
        ];
        assert_eq!(order, expected);
    }

    #[test]
    fn stamp_is_extended_to_the_count_before_the_report() {
        assert_eq!(before(0x2_0000_0005, 5), 0x2_0000_0005);
        assert_eq!(before(0x2_0000_0005, 0xffff_ffff), 0x1_ffff_ffff);
    }
}
