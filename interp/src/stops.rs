//! What a debugger outside the machine stops for: breakpoints that no guest can see.
//!
//! They are kept apart from the guest's own debug registers. A breakpoint goes by linear address.
//! Blocks are shared by all linear addresses that lead to their page, so a block ends before every
//! place whose offset in its page is that of a breakpoint; and a block that starts at such a place
//! is never linked, so that [`crate::Vcpu::run`] looks at its address each time it is entered.

use crate::core::Core;
use crate::memory::PAGE;

/// Accesses to a range of linear addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Watch {
    /// First address.
    pub at: u64,
    /// Length in bytes, at least 1.
    pub len: u64,
    /// Stops at reads.
    pub read: bool,
    /// Stops at writes.
    pub write: bool,
}

impl Watch {
    fn covers(&self, at: u64, len: u64) -> bool {
        let last = |at: u64, len: u64| at.saturating_add(len.saturating_sub(1));
        at <= last(self.at, self.len) && self.at <= last(at, len)
    }

    fn in_page(&self, lin: u64) -> bool {
        self.covers(lin & !(PAGE - 1), PAGE)
    }
}

/// Accesses to I/O ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortWatch {
    /// First port.
    pub first: u16,
    /// Last port.
    pub last: u16,
    /// Stops at IN and INS.
    pub read: bool,
    /// Stops at OUT and OUTS.
    pub write: bool,
}

/// Which writes to MSRs are stopped at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MsrStops {
    /// None.
    #[default]
    None,
    /// Those of these indices.
    These(Vec<u32>),
    /// All.
    All,
}

/// Everything that a processor stops for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stops {
    /// Linear addresses of instructions, before which it stops.
    pub execute: Vec<u64>,
    /// Data accesses, after which it stops.
    pub watch: Vec<Watch>,
    /// Port accesses, after which it stops.
    pub ports: Vec<PortWatch>,
    /// Vectors of exceptions, a bit each: it stops before they are delivered, or behind that where
    /// [`Hit::Exception`] says so.
    pub exceptions: u32,
    /// Writes to MSRs, after which it stops.
    pub msrs: MsrStops,
    /// Writes to control registers, a bit each, after which it stops.
    pub controls: u16,
}

/// What a processor stopped for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hit {
    /// It is about to execute the instruction at this linear address.
    Execute(u64),
    /// An access to watched memory: the watch, and the address that was accessed.
    Watch {
        /// Which of [`Stops::watch`].
        watch: Watch,
        /// First byte accessed.
        at: u64,
        /// It was a write.
        write: bool,
    },
    /// An access to a watched port.
    Port {
        /// The port.
        port: u16,
        /// It was a write.
        write: bool,
    },
    /// An exception. It waits in [`hindsight_cpu::state::Events::exception`], except for a double
    /// fault, INT3, INTO and INT1, which were delivered.
    Exception {
        /// Its vector.
        vector: u8,
        /// Its error code, if it has one.
        code: Option<u32>,
    },
    /// An MSR was written.
    Msr {
        /// Its index.
        index: u32,
        /// What was written.
        value: u64,
    },
    /// A control register was written.
    Control {
        /// Its number.
        number: u8,
        /// What was written.
        value: u64,
    },
}

/// [`Stops`] in the form that the processor asks.
#[derive(Debug)]
pub(crate) struct Armed {
    stops: Stops,
    /// Some breakpoint is set.
    pub(crate) execute: bool,
    /// Offsets in a page that some breakpoint has, a bit each.
    offsets: Box<[u64; 64]>,
    /// Memory is watched.
    pub(crate) watching: bool,
    /// The first thing that was hit.
    pub(crate) hit: Option<Hit>,
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
            stops: Stops::default(),
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
        self.watching && self.stops.watch.iter().any(|watch| watch.in_page(lin))
    }

    /// First and last bytes of what is watched.
    pub(crate) fn watched(&self) -> impl Iterator<Item = (u64, u64)> {
        let watches = self.stops.watch.iter();
        watches.map(|watch| (watch.at, watch.at.saturating_add(watch.len - 1)))
    }

    fn wants(&self, vector: u8) -> bool {
        vector < 32 && self.stops.exceptions >> vector & 1 != 0
    }

    fn note(&mut self, hit: Hit) {
        self.hit.get_or_insert(hit);
    }
}

impl Core {
    /// Stops for these things from now on.
    pub(crate) fn set_stops(&mut self, stops: &Stops) {
        let mut stops = stops.clone();
        stops.execute.sort_unstable();
        stops.execute.dedup();
        stops.watch.retain(|watch| watch.len != 0);
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
        let watches_changed = stops.watch != self.stops.stops.watch;
        self.stops.execute = !stops.execute.is_empty();
        self.stops.offsets = offsets;
        self.stops.watching = !stops.watch.is_empty();
        self.stops.stops = stops;
        if watches_changed {
            self.update_debug();
            self.flush_tlb();
        }
    }

    /// A data access was made: looks for the debugger's watches.
    pub(crate) fn stop_at_access(&mut self, lin: u64, len: u64, write: bool) {
        let found =
            self.stops.stops.watch.iter().find(|watch| {
                (if write { watch.write } else { watch.read }) && watch.covers(lin, len)
            });
        if let Some(&watch) = found {
            self.stops.note(Hit::Watch {
                watch,
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
            self.stops.note(Hit::Port { port, write });
        }
    }

    /// An MSR was written; the processor leaves its block after it anyway.
    pub(crate) fn stop_at_msr(&mut self, index: u32, value: u64) {
        let hit = match &self.stops.stops.msrs {
            MsrStops::None => false,
            MsrStops::These(list) => list.contains(&index),
            MsrStops::All => true,
        };
        if hit {
            self.stops.note(Hit::Msr { index, value });
        }
    }

    /// A control register was written; the processor leaves its block after it anyway.
    pub(crate) fn stop_at_control(&mut self, number: u8, value: u64) {
        if self.stops.stops.controls >> (number & 15) & 1 != 0 {
            self.stops.note(Hit::Control { number, value });
        }
    }

    /// A double fault, or an exception that an instruction raises by its name, was delivered: these
    /// are stopped at behind it, because they cannot be raised anew.
    pub(crate) fn stop_after_delivery(&mut self, vector: u8, code: Option<u32>) {
        let passed = std::mem::take(&mut self.stops.pass);
        if !passed && self.stops.wants(vector) {
            self.stops.note(Hit::Exception { vector, code });
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
        self.stops.hit = Some(Hit::Exception { vector, code });
        self.st.events.exception = Some(hindsight_cpu::state::PendingException {
            vector,
            error_code: code,
            payload,
        });
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watch_covers_what_overlaps_it() {
        let watch = Watch {
            at: 0x1ffe,
            len: 4,
            read: false,
            write: true,
        };
        assert!(watch.covers(0x2001, 1) && watch.covers(0x1ff8, 8));
        assert!(!watch.covers(0x2002, 8) && !watch.covers(0x1ff0, 8));
        assert!(watch.in_page(0x1000) && watch.in_page(0x2fff) && !watch.in_page(0x3000));
    }

    #[test]
    fn watch_at_the_end_of_the_address_space() {
        let watch = Watch {
            at: u64::MAX,
            len: u64::MAX,
            read: true,
            write: true,
        };
        assert!(watch.in_page(u64::MAX) && !watch.in_page(0));
    }
}
