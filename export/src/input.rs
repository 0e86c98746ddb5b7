//! The input of the formats' writers.

use hindsight_trace::{ProcessRecord, Record};

use crate::symbols::FunctionTable;

/// The records of a trace; `None` where some are missing, because a block is damaged.
pub(crate) type RecordStream<'a> = &'a mut dyn Iterator<Item = Option<Record>>;

/// Information about the guest that the trace does not contain.
#[derive(Debug, Default)]
pub struct Guest {
    /// The guest's functions.
    pub functions: FunctionTable,
    /// The ELF image, for its debug information; empty if there is none.
    pub image: Vec<u8>,
    /// The log of what the guest's kernel ran, in the order of the clock.
    pub processes: Vec<ProcessRecord>,
}
