//! What stands behind the events that no architecture defines: a branch predictor and caches.
//!
//! Both are small, pure and deterministic: the same branches and accesses give the same answers on
//! every host. They know what a processor of this kind does in principle, not how a given one is
//! built: no prefetching, no speculation, no TLBs. An engine feeds them only while something asks
//! for what they know; before that they are cold, and hold no memory.

pub mod cache;
pub mod hierarchy;
pub mod predictor;
pub mod unit;

pub use cache::{Cache, CacheState, Evicted, Geometry, Outcome, Request};
pub use hierarchy::{Hierarchy, HierarchyState, Level, Served};
pub use predictor::{Predictor, PredictorState};
pub use unit::{Accesses, Touch, Unit, UnitState, Who};

use thiserror::Error;

/// A saved model in a state that it cannot have.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("saved {model} is impossible: {why}")]
pub struct ModelError {
    /// Which model.
    pub model: &'static str,
    /// What is wrong with it.
    pub why: &'static str,
}
