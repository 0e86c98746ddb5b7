//! Options that are one of a few words, in the file as on the command line.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::boot::{EntryMode, Protocol};
use crate::vcpu::engine::Engine;
use crate::vcpu::engine::policy::{EngineChoice, Preference};

/// `--protocol`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProtocolArg {
    /// Detected from the image.
    #[default]
    Auto,
    /// A flat binary, of which the image says nothing.
    Flat,
    /// ELF with the Xen PVH entry point.
    Pvh,
    /// ELF, entered at its entry point.
    Elf,
    /// Multiboot, version 1.
    Multiboot,
    /// Multiboot, version 2.
    Multiboot2,
    /// Linux's bzImage.
    Linux,
}

impl ProtocolArg {
    /// The protocol; `None` if it is detected.
    pub const fn protocol(self) -> Option<Protocol> {
        match self {
            Self::Auto => None,
            Self::Flat => Some(Protocol::Flat),
            Self::Pvh => Some(Protocol::Pvh),
            Self::Elf => Some(Protocol::Elf),
            Self::Multiboot => Some(Protocol::Multiboot),
            Self::Multiboot2 => Some(Protocol::Multiboot2),
            Self::Linux => Some(Protocol::Linux),
        }
    }
}

/// `--mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ModeArg {
    /// 16-bit real mode.
    Real,
    /// 32-bit protected mode without paging.
    Protected,
    /// 64-bit mode with identity-mapped pages.
    Long,
}

impl From<ModeArg> for EntryMode {
    fn from(mode: ModeArg) -> Self {
        match mode {
            ModeArg::Real => Self::Real,
            ModeArg::Protected => Self::Protected,
            ModeArg::Long => Self::Long,
        }
    }
}

/// `--models`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ModelsArg {
    /// Modelled when an armed event depends on them.
    #[default]
    On,
    /// Never modelled.
    Off,
}

/// `--sandbox`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SandboxArg {
    /// A call or file that the rules do not allow is refused and named.
    #[default]
    On,
    /// The process is not confined.
    Off,
    /// Such a call ends the process, and a kernel without a part of the sandbox is an error.
    Strict,
}

/// `--engine`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EngineArg {
    /// The best for this host; the machine may change engines.
    #[default]
    Auto,
    /// KVM only.
    Kvm,
    /// The interpreter only.
    Interp,
}

/// `--prefer`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PreferArg {
    /// The interpreter, unless this host's KVM was measured to be exact.
    #[default]
    Exactness,
    /// KVM with its deviations, each of which is reported.
    Speed,
}

impl From<PreferArg> for Preference {
    fn from(prefer: PreferArg) -> Self {
        match prefer {
            PreferArg::Exactness => Self::Exactness,
            PreferArg::Speed => Self::Speed,
        }
    }
}

impl From<EngineArg> for EngineChoice {
    fn from(engine: EngineArg) -> Self {
        match engine {
            EngineArg::Auto => Self::Auto,
            EngineArg::Kvm => Self::Only(Engine::Kvm),
            EngineArg::Interp => Self::Only(Engine::Interp),
        }
    }
}

impl EngineArg {
    /// The word on the command line.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Kvm => "kvm",
            Self::Interp => "interp",
        }
    }
}
