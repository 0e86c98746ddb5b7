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
    /// Width of physical addresses in bits: CPUID.80000008H:EAX bits 7:0, 36 to 52.
    pub physical_bits: u32,
    /// The controls of speculation: CPUID.7.0:EDX.
    pub speculation: u32,
    /// Whether a branch predictor and caches are modelled, see [`crate::uarch`].
    pub uarch: bool,
}
