//! Hardware task switches.

use crate::core::{Core, Fault};

impl Core {
    /// An event through a task gate.
    pub(crate) fn task_gate_event(
        &mut self,
        _selector: u16,
        _code: Option<u32>,
        _rf: bool,
    ) -> Result<(), Fault> {
        Err(Fault::Missing)
    }

    /// IRET with NT set.
    pub(crate) fn task_return(&mut self) -> Result<(), Fault> {
        Err(Fault::Missing)
    }

    /// A far JMP or CALL to a TSS or task gate.
    pub(crate) fn task_jump(&mut self, _selector: u16, _call: bool) -> Result<(), Fault> {
        Err(Fault::Missing)
    }
}
