//! The request that the server's thread end, for work that takes long.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Set once, when the machine has ended: whatever the server's thread does then must stop soon.
#[derive(Clone, Debug, Default)]
pub(crate) struct CancelFlag(Arc<AtomicBool>);

impl CancelFlag {
    /// Requests the end.
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether the end was requested.
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
