//! Makes the batch of a seed.

use crate::system::batch::SystemBatch;
use crate::system::class::SystemClass;
use crate::system::{cases32, cases64};

/// The batch of a seed with its first `count` slots.
pub(super) fn build(class: SystemClass, seed: u64, count: usize) -> SystemBatch {
    if class.is_64_bit() {
        cases64::build(class, seed, count)
    } else {
        cases32::build(class, seed, count)
    }
}
