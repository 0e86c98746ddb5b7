//! Debug conditions that were met and not yet reported by a #DB or a stop.

use crate::stops::ActiveStops;
use hindsight_cpu::debug::DebugRegisters;
use hindsight_regs::dr::{BreakpointIndex, Condition, Dr7};

/// Bits of DR6 that stand for breakpoints.
const BREAKPOINTS: u64 = 0xf;

/// Debug conditions that were met, and the memory that is watched.
#[derive(Debug)]
pub(crate) struct DebugState {
    /// DR6 bits of the breakpoints that the current instruction has met.
    hits: u64,
    /// DR6 bits of the trap that is pending at the next boundary.
    trap: Option<u64>,
    /// Suppresses the single-step trap after the current instruction.
    ///
    /// Set by SYSCALL that clears TF (rule TF-09), task switches (TF-22) and RSM, whatever TF was
    /// at the start of the instruction.
    pub(crate) suppress_step: bool,
    /// Whether any data breakpoint of the guest or watchpoint of the debugger is set.
    watching: bool,
    /// First and last byte that the guest's data breakpoints watch.
    ///
    /// If there are none, the first is above the last.
    guest_watched: (u64, u64),
    /// What a debugger outside the guest stops for.
    pub(crate) stops: ActiveStops,
}

impl DebugState {
    pub(crate) fn new() -> Self {
        Self {
            hits: 0,
            trap: None,
            suppress_step: false,
            watching: false,
            guest_watched: (u64::MAX, 0),
            stops: ActiveStops::new(),
        }
    }

    /// Clears the pending trap, because a new state was loaded.
    pub(crate) fn clear_trap(&mut self) {
        self.trap = None;
    }

    /// Clears all conditions, because the instructions that met them were undone.
    pub(crate) fn clear(&mut self) {
        self.hits = 0;
        self.trap = None;
    }

    /// Records breakpoints that the current instruction meets, as bits of DR6.
    pub(crate) fn record_hits(&mut self, bits: u64) {
        self.hits |= bits;
    }

    /// Returns the DR6 bits of the breakpoints that the current instruction has met.
    pub(crate) fn hits(&self) -> u64 {
        self.hits
    }

    /// Sets those bits back, so that accesses since they were read meet no breakpoint.
    pub(crate) fn restore_hits(&mut self, bits: u64) {
        self.hits = bits;
    }

    /// Returns and clears those bits.
    pub(crate) fn take_hits(&mut self) -> u64 {
        std::mem::take(&mut self.hits)
    }

    /// Makes a trap pending, or adds DR6 bits to the one that is.
    pub(crate) fn raise_trap(&mut self, bits: u64) {
        *self.trap.get_or_insert(0) |= bits;
    }

    /// DR6 bits of the pending trap.
    pub(crate) fn pending_trap(&self) -> Option<u64> {
        self.trap
    }

    /// Returns and clears the pending trap.
    pub(crate) fn take_trap(&mut self) -> Option<u64> {
        self.trap.take()
    }

    /// Whether any memory is watched.
    pub(crate) fn watching(&self) -> bool {
        self.watching
    }

    /// Derives what is watched from the guest's debug registers and the debugger's watchpoints.
    /// Returns whether pages may have to leave the TLBs.
    pub(crate) fn update_watched(&mut self, registers: &DebugRegisters) -> bool {
        let data = [Condition::Write, Condition::ReadWrite];
        let watching = self.stops.has_watchpoints() || registers.has_enabled(&data);
        let changed = watching || self.watching;
        self.watching = watching;
        let control = Dr7(registers.control);
        let breakpoints = (0..).map(BreakpointIndex).zip(registers.addresses);
        let armed = breakpoints.filter(|&(index, _)| {
            control.is_enabled(index) && data.contains(&control.condition(index))
        });
        // Whatever its length, a breakpoint lies within eight aligned bytes.
        let guest = armed.map(|(_, address)| (address & !7, address | 7));
        self.guest_watched = guest.fold((u64::MAX, 0), |(first, last), (from, to)| {
            (first.min(from), last.max(to))
        });
        changed
    }

    /// Whether some memory is watched, but none of these bytes for this kind of access.
    pub(crate) fn misses_watched(&self, lin: u64, len: u64, write: bool) -> bool {
        debug_assert!(len != 0);
        let (first, last) = self.guest_watched;
        let misses_guest = lin > last || lin.checked_add(len - 1).is_some_and(|end| end < first);
        self.watching && misses_guest && !self.stops.watches(lin, len, write)
    }

    /// Whether the page of a linear address contains watched memory.
    pub(crate) fn watches_page(&self, lin: u64, registers: &DebugRegisters) -> bool {
        self.watching
            && (self.stops.watches_page(lin) || registers.has_data_breakpoint_on_page(lin))
    }

    /// Raises the debug trap after an instruction, if it met any condition.
    ///
    /// The conditions are its breakpoints, `step`, and those that a previous load of SS has
    /// `deferred`. Not for MOV SS and POP SS, which defer their trap.
    pub(crate) fn finish_instruction(&mut self, step: u64, deferred: u64) {
        let bits = self.take_hits() | step | deferred;
        if bits != 0 {
            self.raise_trap(bits);
        }
    }

    /// Returns and clears the breakpoints that a load of SS met; its #DB is deferred.
    pub(crate) fn take_deferred(&mut self, step: u64) -> u64 {
        (self.take_hits() | step) & BREAKPOINTS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hindsight_regs::dr::Dr6;
    use hindsight_regs::dr::Length;

    fn data_breakpoint(address: u64) -> DebugRegisters {
        let control =
            Dr7::RESET.with_breakpoint(BreakpointIndex(2), Condition::Write, Length::Four);
        DebugRegisters {
            addresses: [0, 0, address, 0],
            control: control.0 | 1 << 4,
            ..DebugRegisters::RESET
        }
    }

    #[test]
    fn watched_range_covers_the_guests_data_breakpoints() {
        let mut debug = DebugState::new();
        assert!(!debug.update_watched(&DebugRegisters::RESET) && !debug.watching());
        assert!(debug.update_watched(&data_breakpoint(0x1004)));
        assert!(debug.misses_watched(0xff8, 8, true) && debug.misses_watched(0x1008, 1, true));
        assert!(!debug.misses_watched(0xff9, 8, true) && !debug.misses_watched(0x1007, 1, true));
        let registers = data_breakpoint(0x1004);
        assert!(debug.watches_page(0x1fff, &registers) && !debug.watches_page(0x2000, &registers));
        assert!(
            debug.update_watched(&DebugRegisters::RESET),
            "pages must be entered again"
        );
        assert!(!debug.misses_watched(0, 1, true), "nothing is watched");
    }

    #[test]
    fn trap_collects_hits_steps_and_deferred_breakpoints() {
        let mut debug = DebugState::new();
        debug.finish_instruction(0, 0);
        assert_eq!(debug.pending_trap(), None);
        debug.record_hits(1);
        debug.finish_instruction(Dr6::BS.bits(), 0b100);
        assert_eq!(debug.take_trap(), Some(Dr6::BS.bits() | 0b101));
        assert_eq!((debug.take_trap(), debug.hits()), (None, 0));
        debug.record_hits(0b10);
        assert_eq!(debug.take_deferred(Dr6::BS.bits()), 0b10, "a step is lost");
    }
}
