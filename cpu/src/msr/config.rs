//! The configuration of a processor, on which the rows of the MSR table depend.

use crate::cpuid::CpuidTable;
use crate::facility::Facilities;
use crate::model::CpuModel;

/// The constants of a machine on which its MSRs depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
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
    /// Whether the guest starts in firmware, which sets the MTRRs itself.
    #[cfg_attr(feature = "serde", serde(default))]
    pub firmware: bool,
    /// The processor model.
    #[cfg_attr(feature = "serde", serde(default))]
    pub model: CpuModel,
}

impl MsrConfig {
    /// The configuration of the default model with physical addresses of 46 bits, without controls of
    /// speculation, and without a branch predictor and caches.
    ///
    /// `tsc_hz` is the frequency of the TSC in Hz, not 0.
    pub const fn new(facilities: Facilities, tsc_hz: u64) -> Self {
        debug_assert!(tsc_hz != 0, "the TSC runs");
        Self {
            facilities,
            tsc_hz,
            physical_bits: 46,
            speculation: 0,
            uarch: false,
            firmware: false,
            model: CpuModel::SkylakeServer,
        }
    }

    /// Sets the model, the width of physical addresses and the controls of speculation, as CPUID shows
    /// them.
    #[must_use]
    pub fn with_cpuid(self, cpuid: &CpuidTable) -> Self {
        Self {
            physical_bits: cpuid.physical_bits(),
            speculation: cpuid.speculation(),
            model: cpuid.model(),
            ..self
        }
    }

    /// Sets whether a branch predictor and caches are modelled.
    #[must_use]
    pub const fn with_uarch(self, uarch: bool) -> Self {
        Self { uarch, ..self }
    }

    /// Sets whether the guest starts in firmware: the MTRRs are as RESET leaves them, not as firmware does.
    #[must_use]
    pub const fn with_firmware(self, firmware: bool) -> Self {
        Self { firmware, ..self }
    }
}
