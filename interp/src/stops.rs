//! A debugger's stop conditions, such as breakpoints, which no guest can detect.
//!
//! They are independent of the guest's own debug registers. A breakpoint has a linear address, but
//! a block is shared by all linear addresses that map to its page. A page with a breakpoint
//! therefore has its own blocks for one linear address, which end before every breakpoint. A block
//! that starts at a breakpoint is never linked, so that [`crate::Vcpu::run`] checks its address
//! each time it is entered.

use crate::memory::PAGE;
use crate::stop_sets::{BreakpointAddresses, WatchedSet};
use hindsight_cpu::stops::{MsrStops, StopConditions, StopHit, Watchpoint};
use hindsight_regs::vector::Vector;

/// [`StopConditions`] in the form that the processor checks, and what was hit.
#[derive(Debug)]
pub(crate) struct ActiveStops {
    stops: StopConditions,
    breakpoints: BreakpointAddresses,
    /// The bytes that watchpoints watch for reads and for writes.
    read: WatchedSet,
    written: WatchedSet,
    /// The first condition that was met.
    hit: Option<StopHit>,
    /// Whether the processor has stopped for the exception that it delivers next.
    pub(crate) skip_exception: bool,
    /// Whether interrupts and NMIs are masked, because a debugger steps.
    pub(crate) mask_interrupts: bool,
    /// Whether the run ends after an exception was delivered.
    pub(crate) at_exceptions: bool,
    /// Number of events delivered so far.
    deliveries: u64,
}

/// What a call of [`ActiveStops::set`] changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StopsChange {
    /// Page offsets of the breakpoints that are new: blocks that contain one must be split.
    pub(crate) new_offsets: Vec<u64>,
    /// The breakpoints changed.
    pub(crate) breakpoints: bool,
    /// The watchpoints changed.
    pub(crate) watchpoints: bool,
}

impl ActiveStops {
    pub(crate) fn new() -> Self {
        Self {
            stops: StopConditions::default(),
            breakpoints: BreakpointAddresses::new(Vec::new()),
            read: WatchedSet::new(std::iter::empty()),
            written: WatchedSet::new(std::iter::empty()),
            hit: None,
            skip_exception: false,
            mask_interrupts: false,
            at_exceptions: false,
            deliveries: 0,
        }
    }

    /// Replaces the stop conditions; returns what changed.
    pub(crate) fn set(&mut self, stops: &StopConditions) -> StopsChange {
        let mut stops = stops.clone();
        stops.execute.sort_unstable();
        stops.execute.dedup();
        stops.watchpoints.retain(|watch| watch.len != 0);
        if stops == self.stops {
            return StopsChange::default();
        }
        let mut change = StopsChange {
            new_offsets: Vec::new(),
            breakpoints: stops.execute != self.stops.execute,
            watchpoints: stops.watchpoints != self.stops.watchpoints,
        };
        self.stops = stops;
        if change.breakpoints {
            let breakpoints = BreakpointAddresses::new(self.stops.execute.clone());
            let new = breakpoints.added_to(&self.breakpoints);
            change.new_offsets = new.map(|lin| lin % PAGE).collect();
            self.breakpoints = breakpoints;
        }
        if change.watchpoints {
            self.read = self.watched_by(|watch| watch.read);
            self.written = self.watched_by(|watch| watch.write);
        }
        change
    }

    fn watched_by(&self, selects: impl Fn(&Watchpoint) -> bool) -> WatchedSet {
        let watches = self.stops.watchpoints.iter().filter(|watch| selects(watch));
        WatchedSet::new(watches.map(|watch| (watch.at, watch.at.saturating_add(watch.len - 1))))
    }

    /// Whether there is any breakpoint.
    pub(crate) fn has_breakpoints(&self) -> bool {
        !self.breakpoints.is_empty()
    }

    /// Whether there is a breakpoint in the page of a linear address.
    pub(crate) fn has_breakpoint_on_page(&self, lin: u64) -> bool {
        self.breakpoints.has_on_page(lin)
    }

    /// Whether there is a breakpoint at this linear address.
    pub(crate) fn has_breakpoint(&self, lin: u64) -> bool {
        self.breakpoints.contains(lin)
    }

    /// Whether there is any watchpoint.
    pub(crate) fn has_watchpoints(&self) -> bool {
        !self.stops.watchpoints.is_empty()
    }

    /// Whether a watchpoint overlaps the page of this linear address.
    pub(crate) fn watches_page(&self, lin: u64) -> bool {
        self.has_watchpoints() && (self.read.overlaps_page(lin) || self.written.overlaps_page(lin))
    }

    /// Whether a data access meets a watchpoint.
    pub(crate) fn watches(&self, lin: u64, len: u64, write: bool) -> bool {
        let last = lin.saturating_add(len.saturating_sub(1));
        let watched = if write { &self.written } else { &self.read };
        watched.overlaps(lin, last)
    }

    /// Returns the condition that was met first.
    pub(crate) fn hit(&self) -> Option<StopHit> {
        self.hit
    }

    /// Returns and clears that condition.
    pub(crate) fn take_hit(&mut self) -> Option<StopHit> {
        self.hit.take()
    }

    fn record(&mut self, hit: StopHit) {
        self.hit.get_or_insert(hit);
    }

    /// Records a hit of the breakpoint at the next instruction.
    pub(crate) fn record_breakpoint(&mut self, lin: u64) {
        debug_assert!(self.has_breakpoint(lin));
        self.record(StopHit::Execute(lin));
    }

    /// Records a data access that meets a watchpoint; false if it meets none.
    pub(crate) fn record_access(&mut self, lin: u64, len: u64, write: bool) -> bool {
        if !self.watches(lin, len, write) {
            return false;
        }
        let found = self.stops.watchpoints.iter().find(|watch| {
            (if write { watch.write } else { watch.read }) && watch.overlaps(lin, len)
        });
        let Some(&watch) = found else {
            return false;
        };
        self.record(StopHit::Watchpoint {
            watchpoint: watch,
            at: lin,
            write,
        });
        true
    }

    /// Records a port access, if a stop condition covers it.
    pub(crate) fn record_port(&mut self, port: u16, size: u8, write: bool) {
        let last = port.saturating_add(u16::from(size.max(1) - 1));
        let hit = self.stops.ports.iter().any(|watch| {
            (if write { watch.write } else { watch.read })
                && watch.first <= last
                && port <= watch.last
        });
        if hit {
            self.record(StopHit::Port { port, write });
        }
    }

    /// Records a write to an MSR, if a stop condition covers it.
    pub(crate) fn record_msr(&mut self, index: u32, value: u64) {
        let hit = match &self.stops.msrs {
            MsrStops::None => false,
            MsrStops::Only(list) => list.contains(&index),
            MsrStops::All => true,
        };
        if hit {
            self.record(StopHit::Msr { index, value });
        }
    }

    /// Records a write to a control register, if such writes stop the processor.
    pub(crate) fn record_control(&mut self, number: u8, value: u64) {
        if self.stops.controls >> (number & 15) & 1 != 0 {
            self.record(StopHit::Control { number, value });
        }
    }

    /// Whether to stop for an exception that is delivered now.
    ///
    /// The processor does not stop again for one that it stopped for before the delivery.
    fn stops_for_exception(&mut self, vector: Vector) -> bool {
        let skip = std::mem::take(&mut self.skip_exception);
        !skip && vector.0 < 32 && self.stops.exceptions >> vector.0 & 1 != 0
    }

    /// Records an exception that is about to be delivered.
    ///
    /// Returns true if its delivery must wait for the debugger.
    pub(crate) fn record_exception(&mut self, vector: Vector, code: Option<u32>) -> bool {
        let stop = self.stops_for_exception(vector);
        if stop {
            self.hit = Some(StopHit::Exception {
                vector: vector.0,
                code,
            });
        }
        stop
    }

    /// Counts an event that was delivered.
    pub(crate) fn count_delivery(&mut self) {
        self.deliveries += 1;
    }

    /// Records the delivery of a double fault, or of an INT3, INTO or INT1.
    ///
    /// The processor stops after the delivery, because such an exception cannot be raised again.
    pub(crate) fn record_delivered_exception(&mut self, vector: Vector, code: Option<u32>) {
        if self.stops_for_exception(vector) {
            self.record(StopHit::Exception {
                vector: vector.0,
                code,
            });
        }
    }

    /// Returns the number of events delivered so far.
    pub(crate) fn deliveries(&self) -> u64 {
        self.deliveries
    }
}
