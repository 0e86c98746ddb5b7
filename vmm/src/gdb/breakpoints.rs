//! What the client and the user want the guest to stop for.

use std::collections::HashSet;

use hindsight_cpu::stops::{MsrStops, PortWatchpoint, StopConditions, Watchpoint};

/// A breakpoint as the client set it. Setting the same twice is setting it once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Breakpoint {
    /// `Z0`: the client calls it a software breakpoint. No guest memory is touched for it.
    Software(u64),
    /// `Z1`.
    Hardware(u64),
    /// `Z2` and `Z4`.
    Watch(Watchpoint),
}

/// All that is to be stopped for.
#[derive(Clone, Debug, Default)]
pub(super) struct Breakpoints {
    set: HashSet<Breakpoint>,
    /// Ports by `monitor watch-io`.
    pub(super) ports: Vec<PortWatchpoint>,
    /// Exceptions by `monitor catch`, a bit each.
    pub(super) exceptions: u32,
    /// MSRs by `monitor catch`.
    pub(super) msrs: MsrStops,
    /// Control registers by `monitor catch`, a bit each.
    pub(super) controls: u16,
}

/// The most breakpoints and watches that are kept: far more than a person sets.
pub(super) const BREAKPOINTS_MAX: usize = 0x1_0000;

impl Breakpoints {
    /// Adds one; `false` if there are too many.
    pub(super) fn add(&mut self, breakpoint: Breakpoint) -> bool {
        if self.set.len() >= BREAKPOINTS_MAX && !self.set.contains(&breakpoint) {
            return false;
        }
        self.set.insert(breakpoint);
        true
    }

    /// Takes one away; taking away what is not there is no error.
    pub(super) fn remove(&mut self, breakpoint: Breakpoint) {
        self.set.remove(&breakpoint);
    }

    /// Whether this one is set.
    pub(super) fn has(&self, breakpoint: Breakpoint) -> bool {
        self.set.contains(&breakpoint)
    }

    /// All of it, as a processor takes it.
    pub(super) fn stops(&self) -> StopConditions {
        let mut stops = StopConditions {
            ports: self.ports.clone(),
            exceptions: self.exceptions,
            msrs: self.msrs.clone(),
            controls: self.controls,
            ..StopConditions::default()
        };
        for breakpoint in &self.set {
            match *breakpoint {
                Breakpoint::Software(at) | Breakpoint::Hardware(at) => stops.execute.push(at),
                Breakpoint::Watch(watch) => stops.watchpoints.push(watch),
            }
        }
        stops.execute.sort_unstable();
        stops.execute.dedup();
        stops.watchpoints.sort_unstable();
        stops
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_stays_a_breakpoint_until_the_last_one_is_gone() {
        let mut all = Breakpoints::default();
        assert!(all.add(Breakpoint::Software(1)) && all.add(Breakpoint::Software(1)));
        assert!(all.add(Breakpoint::Hardware(1)));
        assert_eq!(all.stops().execute, [1]);
        all.remove(Breakpoint::Software(1));
        assert_eq!(all.stops().execute, [1]);
        all.remove(Breakpoint::Hardware(1));
        all.remove(Breakpoint::Hardware(1));
        assert_eq!(all.stops(), StopConditions::default());
    }

    #[test]
    fn a_client_cannot_fill_memory_with_breakpoints() {
        let mut all = Breakpoints::default();
        let added = (0..=BREAKPOINTS_MAX as u64).map(|i| all.add(Breakpoint::Hardware(i)));
        assert_eq!(added.filter(|&added| added).count(), BREAKPOINTS_MAX);
    }
}
