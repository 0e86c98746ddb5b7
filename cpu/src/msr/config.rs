//! The configuration of a processor, on which the rows of the MSR table depend.

use crate::facility::Facilities;

/// The constants of a machine on which its MSRs depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct MsrConfig {
    /// The facilities of the processor.
    pub facilities: Facilities,
    /// Frequency of the TSC in Hz, not 0.
    pub tsc_hz: u64,
    /// Whether a branch predictor and caches are modelled, see [`crate::uarch`].
    pub uarch: bool,
}
