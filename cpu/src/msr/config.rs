//! The configuration of a processor, on which the rows of the MSR table depend.

use crate::facility::Facilities;

/// The constants of a machine on which its MSRs depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct MsrConfig {
    /// The facilities of the processor.
    pub facilities: Facilities,
    /// Frequency of the TSC in Hz, not 0.
    pub tsc_hz: u64,
    /// Whether a branch predictor and caches are modelled, see [`crate::uarch`].
    pub uarch: bool,
}

impl MsrConfig {
    /// The configuration of a processor without a branch predictor and caches.
    ///
    /// `tsc_hz` is the frequency of the TSC in Hz, not 0.
    pub const fn new(facilities: Facilities, tsc_hz: u64) -> Self {
        debug_assert!(tsc_hz != 0, "the TSC runs");
        Self {
            facilities,
            tsc_hz,
            uarch: false,
        }
    }

    /// Sets whether a branch predictor and caches are modelled.
    #[must_use]
    pub const fn with_uarch(self, uarch: bool) -> Self {
        Self { uarch, ..self }
    }
}
