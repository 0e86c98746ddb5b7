//! The breakpoints that the client and the user have set.

use std::collections::HashSet;

use hindsight_cpu::stops::{MsrStops, PortWatchpoint, StopConditions, Watchpoint};

/// A breakpoint as the client sets it. Setting one twice is the same as setting it once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ClientBreakpoint {
    /// `Z0`: what the client calls a software breakpoint. No guest memory is changed for it.
    Software(u64),
    /// `Z1`.
    Hardware(u64),
    /// `Z2`, `Z3` and `Z4`.
    Watch(Watchpoint),
}

/// Everything that the machine stops for.
#[derive(Clone, Debug, Default)]
pub struct BreakpointSet {
    set: HashSet<ClientBreakpoint>,
    /// Ports, set by `monitor watch-io`.
    pub ports: Vec<PortWatchpoint>,
    /// Exceptions, a bit each, set by `monitor catch`.
    pub exceptions: u32,
    /// MSRs, set by `monitor catch`.
    pub msrs: MsrStops,
    /// Control registers, a bit each, set by `monitor catch`.
    pub controls: u16,
}

/// Maximum number of breakpoints and watchpoints that a client can set: far more than a person
/// does.
pub const BREAKPOINTS_MAX: usize = 0x1_0000;

impl BreakpointSet {
    /// Adds a breakpoint; `false` if there are [`BREAKPOINTS_MAX`] already.
    pub fn add(&mut self, breakpoint: ClientBreakpoint) -> bool {
        if self.set.len() >= BREAKPOINTS_MAX && !self.set.contains(&breakpoint) {
            return false;
        }
        self.set.insert(breakpoint);
        true
    }

    /// Removes a breakpoint; no effect if it is not set.
    pub fn remove(&mut self, breakpoint: ClientBreakpoint) {
        self.set.remove(&breakpoint);
    }

    /// Removes all breakpoints of the client. Those of monitor commands stay.
    pub fn clear(&mut self) {
        self.set.clear();
    }

    /// Whether a breakpoint is set.
    pub fn contains(&self, breakpoint: ClientBreakpoint) -> bool {
        self.set.contains(&breakpoint)
    }

    /// All of it, in the form that vCPUs take. Addresses are sorted.
    pub fn conditions(&self) -> StopConditions {
        let mut conditions = StopConditions::default();
        conditions.ports = self.ports.clone();
        conditions.exceptions = self.exceptions;
        conditions.msrs = self.msrs.clone();
        conditions.controls = self.controls;
        for breakpoint in &self.set {
            match *breakpoint {
                ClientBreakpoint::Software(at) | ClientBreakpoint::Hardware(at) => {
                    conditions.execute.push(at);
                }
                ClientBreakpoint::Watch(watchpoint) => conditions.watchpoints.push(watchpoint),
            }
        }
        conditions.execute.sort_unstable();
        conditions.execute.dedup();
        conditions.watchpoints.sort_unstable();
        conditions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_stops_until_its_last_breakpoint_is_removed() {
        let mut set = BreakpointSet::default();
        assert!(set.add(ClientBreakpoint::Software(1)));
        assert!(set.add(ClientBreakpoint::Software(1)));
        assert!(set.add(ClientBreakpoint::Hardware(1)));
        assert_eq!(set.conditions().execute, [1]);
        set.remove(ClientBreakpoint::Software(1));
        assert_eq!(set.conditions().execute, [1]);
        set.remove(ClientBreakpoint::Hardware(1));
        set.remove(ClientBreakpoint::Hardware(1));
        assert_eq!(set.conditions(), StopConditions::default());
    }

    #[test]
    fn client_cannot_exhaust_memory_with_breakpoints() {
        let mut set = BreakpointSet::default();
        let added = (0..=BREAKPOINTS_MAX as u64).map(|i| set.add(ClientBreakpoint::Hardware(i)));
        assert_eq!(added.filter(|&added| added).count(), BREAKPOINTS_MAX);
    }
}
