//! Positions in a deterministic run, as instruction counts.

use super::core::Debugger;
use super::error::DebugError;

impl Debugger {
    /// The number of instructions retired in this run.
    pub(crate) fn icount(&mut self) -> Result<u64, DebugError> {
        self.require_paused(0)?;
        Ok(self.target.reverse()?.icount()?)
    }

    /// Goes to the point after `icount` instructions. Returns `false` if the run ends earlier.
    pub(crate) fn go_to(&mut self, icount: u64) -> Result<bool, DebugError> {
        self.require_paused(0)?;
        let reached = self.target.reverse()?.go_to(icount);
        self.states.fill(None);
        Ok(reached?)
    }
}
