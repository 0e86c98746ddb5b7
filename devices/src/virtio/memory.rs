//! Guest memory as devices access it: each write is reported, so that processors drop decoded code.

use std::fmt;
use std::sync::Arc;

use vm_memory::GuestMemoryMmap;
use vm_memory::bitmap::{Bitmap, BitmapSlice, WithBitmapSlice};

/// Guest memory for devices. A mapping's writes go to its [`WriteReporter`].
pub type DmaMemory = GuestMemoryMmap<WriteReporter>;

/// Receives the guest-physical address and the length of what devices wrote.
pub type WriteReport = dyn Fn(u64, u64) + Send + Sync;

/// Reports the writes of devices to one region of memory, after each write.
#[derive(Clone)]
pub struct WriteReporter {
    /// Guest-physical address of the slice's first byte.
    base: u64,
    report: Arc<WriteReport>,
}

impl WriteReporter {
    /// Reports writes to the region at `base`, as guest-physical address and length.
    pub fn new(base: u64, report: Arc<WriteReport>) -> Self {
        Self { base, report }
    }
}

impl fmt::Debug for WriteReporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WriteReporter({:#x})", self.base)
    }
}

impl WithBitmapSlice<'_> for WriteReporter {
    type S = Self;
}

impl BitmapSlice for WriteReporter {}

impl Bitmap for WriteReporter {
    fn mark_dirty(&self, offset: usize, len: usize) {
        (self.report)(self.base.wrapping_add(offset as u64), len as u64);
    }

    fn dirty_at(&self, _: usize) -> bool {
        false
    }

    fn slice_at(&self, offset: usize) -> Self {
        Self {
            base: self.base.wrapping_add(offset as u64),
            report: self.report.clone(),
        }
    }
}
