//! The thunks that were generated for a processor.

use super::codegen::{Bank, Thunk};
use iced_x86::Register;
use std::collections::HashMap;
use std::sync::Arc;

/// Bytes of the redirected instruction, and the register that stands for RSP.
pub(super) type Key = (Vec<u8>, Option<Register>);

/// Generated thunks of one processor.
#[derive(Debug, Default)]
pub(crate) struct Thunks {
    pub(super) bank: Bank,
    pub(super) known: HashMap<Key, Option<Arc<Thunk>>>,
    pub(super) by_insn: HashMap<u32, Option<Arc<Thunk>>>,
    pub(super) epoch: u64,
}
