//! INTx: the interrupt lines that devices of several slots share.

use std::sync::Arc;

use super::{DEVICES_MAX, intx_gsi};

/// Lines that slots share; INTA# of slot N drives line N modulo 8.
const LINES: usize = 8;

/// The interrupt lines of bus 0. A line is asserted while any of its devices asserts it.
#[derive(Clone)]
pub struct IntxLines {
    /// By line: the slots that assert it, a bit each.
    asserted: [u32; LINES],
    drive: Arc<dyn Fn(u32, bool) + Send + Sync>,
}

impl std::fmt::Debug for IntxLines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IntxLines")
            .field("asserted", &self.asserted)
            .finish_non_exhaustive()
    }
}

impl IntxLines {
    /// Lines of which `drive` receives the global system interrupt and the level, when it changes.
    pub fn new(drive: impl Fn(u32, bool) + Send + Sync + 'static) -> Self {
        Self {
            asserted: [0; LINES],
            drive: Arc::new(drive),
        }
    }

    /// Drives pin INTA# of a slot.
    pub fn set(&mut self, slot: u8, level: bool) {
        debug_assert!(usize::from(slot) <= DEVICES_MAX, "a bus has 32 slots");
        let line = &mut self.asserted[usize::from(slot) % LINES];
        let before = *line != 0;
        let bit = 1_u32 << (slot & 31);
        *line = if level { *line | bit } else { *line & !bit };
        let after = *line != 0;
        if before != after {
            (self.drive)(intx_gsi(slot), after);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn shared_line_stays_asserted_until_its_last_slot_releases_it() {
        let driven = Arc::new(Mutex::new(Vec::new()));
        let log = driven.clone();
        let mut lines = IntxLines::new(move |gsi, level| log.lock().unwrap().push((gsi, level)));
        lines.set(1, true);
        lines.set(9, true);
        lines.set(1, false);
        lines.set(2, false);
        assert_eq!(*driven.lock().unwrap(), [(17, true)]);
        lines.set(9, false);
        assert_eq!(*driven.lock().unwrap(), [(17, true), (17, false)]);
    }
}
