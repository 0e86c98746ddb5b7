//! One register, and which of the optional ones exist.

use super::location::RegisterLocation;
use super::msrs::msr_registers;

/// The features of the target description.
pub(super) mod feature {
    pub(crate) const CORE: &str = "org.gnu.gdb.i386.core";
    pub(crate) const SSE: &str = "org.gnu.gdb.i386.sse";
    pub(crate) const SEGMENTS: &str = "org.gnu.gdb.i386.segments";
    pub(crate) const AVX: &str = "org.gnu.gdb.i386.avx";
    pub(crate) const AVX512: &str = "org.gnu.gdb.i386.avx512";
    pub(crate) const PKEYS: &str = "org.gnu.gdb.i386.pkeys";
    pub(crate) const LINUX: &str = "org.gnu.gdb.i386.linux";
    pub(crate) const SYSTEM: &str = "org.hindsight.system";
    pub(crate) const MSRS: &str = "org.hindsight.msr";
}

/// One register.
#[derive(Clone, Debug)]
pub struct RegisterInfo {
    /// The register's name.
    pub name: String,
    /// The register's width in bits, as the client sees it.
    pub bits: u32,
    /// The register's type in the target description.
    pub(super) kind: &'static str,
    /// The place of the register's value.
    pub location: RegisterLocation,
    /// The feature of the target description that it belongs to.
    pub(super) feature: &'static str,
}

/// Prefixes of the names of performance-monitoring registers.
const PMU_PREFIXES: [&str; 4] = ["perf", "pmc", "fixed", "pebs"];

impl RegisterInfo {
    /// The register's width in bytes.
    pub const fn bytes(&self) -> usize {
        (self.bits / 8) as usize
    }

    /// The register's group: system, msr, lbr or pmu. `None` for groups that clients define.
    ///
    /// lldb shows these groups; gdb's code for x86 ignores the groups of target descriptions.
    pub fn group(&self) -> Option<&'static str> {
        match self.feature {
            feature::SYSTEM => Some("system"),
            feature::MSRS if self.name.starts_with("lbr") || self.name.starts_with("ler") => {
                Some("lbr")
            }
            feature::MSRS if PMU_PREFIXES.iter().any(|p| self.name.starts_with(p)) => Some("pmu"),
            feature::MSRS => Some("msr"),
            _ => None,
        }
    }
}

/// Which optional registers the machine's vCPUs have.
#[derive(Clone, Debug, Default)]
pub struct AvailableRegisters {
    /// The bits of XCR0 that are supported.
    pub xcr0: u64,
    /// The indices of those of [`msr_registers`] that exist.
    pub msrs: Vec<u32>,
}

impl AvailableRegisters {
    /// Every optional register that this crate has.
    pub fn all() -> Self {
        Self {
            xcr0: 0x2e7,
            msrs: msr_registers().iter().map(|row| row.index).collect(),
        }
    }
}
