//! Microarchitecture: models of a branch predictor and of caches.
//!
//! They supply the events that no architecture defines. Both are pure and deterministic: the same
//! branches and accesses give the same results on every host. They model the principle of such a
//! processor, not a given one: no prefetching, no speculation, no TLBs. An engine feeds them only
//! while a counter, the LBR stack or resource control depends on them; before, they allocate
//! nothing.

pub mod cache;
pub mod core_uarch;
pub mod hierarchy;
pub mod predictor;

pub use cache::{
    CacheAccess, CacheGeometry, CacheModel, CacheOutcome, CacheState, EvictedLine, LineRequest,
};
pub use core_uarch::{
    AccessEvents, CoreUarch, CoreUarchState, InstructionAccesses, MemoryAccess, Requester,
};
pub use hierarchy::{CacheLevel, CoreCaches, CoreCachesState, ServedLine};
pub use predictor::{Predictor, PredictorState};

use thiserror::Error;

/// A saved model is in an invalid state.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("saved {model} is invalid: {flaw}")]
#[non_exhaustive]
pub struct UarchStateError {
    /// The model.
    pub model: &'static str,
    /// The invalid part.
    pub flaw: &'static str,
}
