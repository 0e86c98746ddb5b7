//! What a debugger outside the machine stops for: breakpoints that no guest can see.
//!
//! They are kept apart from the guest's own debug registers. A breakpoint goes by linear address.
//! Blocks are shared by all linear addresses that lead to their page, so a block ends before every
//! place whose offset in its page is that of a breakpoint; and a block that starts at such a place
//! is never linked, so that [`crate::Vcpu::run`] looks at its address each time it is entered.

use hindsight_cpu::stops::{MsrStops, StopConditions, StopHit};

use crate::core::Core;
use crate::memory::PAGE;

/// [`StopConditions`] in the form that the processor asks.
#[derive(Debug)]
pub(crate) struct Armed {
    stops: StopConditions,
    /// Some breakpoint is set.
    pub(crate) execute: bool,
    /// Offsets in a page that some breakpoint has, a bit each.
    offsets: Box<[u64; 64]>,
    /// Memory is watched.
    pub(crate) watching: bool,
    /// The first thing that was hit.
    pub(crate) hit: Option<StopHit>,
    /// The next exception was already stopped at.
    pub(crate) pass: bool,
    /// Interrupts and NMIs wait: a debugger steps.
    pub(crate) quiet: bool,
    /// Counts deliveries of events.
    pub(crate) deliveries: u64,
    /// The run ends when an exception was delivered.
    pub(crate) at_exceptions: bool,
}

impl Armed {
    pub(crate) fn new() -> Self {
        Self {
            stops: StopConditions::default(),
            execute: false,
            offsets: Box::new([0; 64]),
            watching: false,
            hit: None,
            pass: false,
            quiet: false,
            deliveries: 0,
            at_exceptions: false,
        }
    }

    /// Some breakpoint has this place in its page.
    pub(crate) fn splits(&self, lin: u64) -> bool {
        let offset = lin % PAGE;
        self.execute
            && self
                .offsets
                .get(usize::try_from(offset / 64).unwrap_or(0))
                .is_some_and(|bits| bits >> (offset % 64) & 1 != 0)
    }

    /// A breakpoint is set at this linear address.
    pub(crate) fn at(&self, lin: u64) -> bool {
        self.splits(lin) && self.stops.execute.binary_search(&lin).is_ok()
    }

    pub(crate) fn watches_page(&self, lin: u64) -> bool {
        self.watching
            && self
                .stops
                .watchpoints
                .iter()
                .any(|w| w.overlaps(lin & !(PAGE - 1), PAGE))
    }

    /// First and last bytes of what is watched.
    pub(crate) fn watched(&self) -> impl Iterator<Item = (u64, u64)> {
        let watches = self.stops.watchpoints.iter();
        watches.map(|watch| (watch.at, watch.at.saturating_add(watch.len - 1)))
    }

    fn wants(&self, vector: u8) -> bool {
        vector < 32 && self.stops.exceptions >> vector & 1 != 0
    }

    fn note(&mut self, hit: StopHit) {
        self.hit.get_or_insert(hit);
    }
}

impl Core {
    /// Stops for these conditions from now on.
    pub(crate) fn set_stops(&mut self, stops: &StopConditions) {
        let mut stops = stops.clone();
        stops.execute.sort_unstable();
        stops.execute.dedup();
        stops.watchpoints.retain(|watchpoint| watchpoint.len != 0);
        if stops == self.stops.stops {
            return;
        }
        let mut fresh = Vec::new();
        let mut offsets = Box::new([0_u64; 64]);
        for &lin in &stops.execute {
            if !self.stops.splits(lin) {
                fresh.push(lin % PAGE);
            }
            let offset = lin % PAGE;
            if let Some(bits) = offsets.get_mut(usize::try_from(offset / 64).unwrap_or(0)) {
                *bits |= 1 << (offset % 64);
            }
        }
        if !fresh.is_empty() {
            self.cache.kill_at(&fresh);
            self.new_context();
        }
        let watches_changed = stops.watchpoints != self.stops.stops.watchpoints;
        self.stops.execute = !stops.execute.is_empty();
        self.stops.offsets = offsets;
        self.stops.watching = !stops.watchpoints.is_empty();
        self.stops.stops = stops;
        if watches_changed {
            self.update_debug();
            self.flush_tlb();
        }
    }

    /// A data access was made: looks for the debugger's watches.
    pub(crate) fn stop_at_access(&mut self, lin: u64, len: u64, write: bool) {
        let found = self.stops.stops.watchpoints.iter().find(|watchpoint| {
            let enabled = if write {
                watchpoint.write
            } else {
                watchpoint.read
            };
            enabled && watchpoint.overlaps(lin, len)
        });
        if let Some(&watchpoint) = found {
            self.stops.note(StopHit::Watchpoint {
                watchpoint,
                at: lin,
                write,
            });
            self.leave = true;
        }
    }

    /// A port access was made; the processor leaves its block after it anyway.
    pub(crate) fn stop_at_port(&mut self, port: u16, size: u8, write: bool) {
        let last = port.saturating_add(u16::from(size.max(1) - 1));
        let hit = self.stops.stops.ports.iter().any(|watch| {
            (if write { watch.write } else { watch.read })
                && watch.first <= last
                && port <= watch.last
        });
        if hit {
            self.stops.note(StopHit::Port { port, write });
        }
    }

    /// An MSR was written; the processor leaves its block after it anyway.
    pub(crate) fn stop_at_msr(&mut self, index: u32, value: u64) {
        let hit = match &self.stops.stops.msrs {
            MsrStops::None => false,
            MsrStops::Only(list) => list.contains(&index),
            MsrStops::All => true,
        };
        if hit {
            self.stops.note(StopHit::Msr { index, value });
        }
    }

    /// A control register was written; the processor leaves its block after it anyway.
    pub(crate) fn stop_at_control(&mut self, number: u8, value: u64) {
        if self.stops.stops.controls >> (number & 15) & 1 != 0 {
            self.stops.note(StopHit::Control { number, value });
        }
    }

    /// A double fault, or an exception that an instruction raises by its name, was delivered: these
    /// are stopped at behind it, because they cannot be raised anew.
    pub(crate) fn stop_after_delivery(&mut self, vector: u8, code: Option<u32>) {
        let passed = std::mem::take(&mut self.stops.pass);
        if !passed && self.stops.wants(vector) {
            self.stops.note(StopHit::Exception { vector, code });
        }
    }

    /// An exception is about to be delivered: true if the debugger sees it first.
    pub(crate) fn stop_at_exception(
        &mut self,
        vector: u8,
        code: Option<u32>,
        payload: Option<u64>,
    ) -> bool {
        let passed = std::mem::take(&mut self.stops.pass);
        if passed || !self.stops.wants(vector) {
            return false;
        }
        self.stops.hit = Some(StopHit::Exception { vector, code });
        self.st.events.exception = Some(hindsight_cpu::state::Exception {
            vector,
            error_code: code,
            payload,
        });
        true
    }
}
