//! Processor models: one data file each, in `resources/cpus`.
//!
//! A file says what a processor of the model is: its signature, its CPUID features, its facilities,
//! the formats of its LBR stack and PEBS records, its counters and events, and the MSRs that it
//! lacks. The files are part of the program; [`CpuModel::definition`] returns what they say.

mod definition;
mod features;
mod file;
#[cfg(test)]
mod tests;

use core::fmt;
use std::sync::OnceLock;

pub use definition::{LbrModel, ModelDefinition, OffcoreModel, PebsModel, PerfmonModel};
pub use features::{FeatureSet, FeatureWord};
pub use file::ModelError;

/// A processor model that a guest can be given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum CpuModel {
    /// First-generation Xeon Scalable, family 6 model 55H stepping 4.
    #[default]
    SkylakeServer,
    /// What the interpreter executes with the same results on every host.
    ///
    /// It is x86-64 with SSE2, without XSAVE, with integer and system extensions. It is frozen: a
    /// change is another model.
    PortableV1,
    /// The host's features, with our facilities in place of the host's.
    Host,
    /// `SkylakeServer` with AVX-512, which the interpreter executes with the same results on every
    /// host.
    ///
    /// It is frozen: a change is another model.
    PortableV2,
    /// Sixth-generation Core, family 6 model 5EH.
    Skylake,
    /// Fifth-generation Core, family 6 model 3DH.
    Broadwell,
    /// Fourth-generation Core, family 6 model 3CH.
    Haswell,
    /// Third-generation Core, family 6 model 3AH.
    IvyBridge,
    /// Second-generation Core, family 6 model 2AH.
    SandyBridge,
    /// Xeon 5600, family 6 model 2CH.
    Westmere,
    /// Xeon 5500, family 6 model 1AH.
    Nehalem,
    /// Second-generation Xeon Scalable, family 6 model 55H stepping 7.
    CascadeLake,
    /// Core 2 as in the Xeon 5400, family 6 model 17H.
    Core2,
    /// Third-generation Xeon Scalable, family 6 model 6AH.
    IcelakeServer,
    /// Fourth-generation Xeon Scalable, family 6 model 8FH.
    SapphireRapids,
}

/// A model, its name on the command line, and its file.
type ModelRow = (CpuModel, &'static str, &'static str);

/// All models, in the order of lists. The host's facilities are those of the default model.
const MODELS: &[ModelRow] = {
    const SKYLAKE_SERVER: &str = include_str!("../../models/skylake-server.toml");
    &[
        (CpuModel::SkylakeServer, "skylake-server", SKYLAKE_SERVER),
        (
            CpuModel::SapphireRapids,
            "sapphirerapids",
            include_str!("../../models/sapphirerapids.toml"),
        ),
        (
            CpuModel::IcelakeServer,
            "icelake-server",
            include_str!("../../models/icelake-server.toml"),
        ),
        (
            CpuModel::CascadeLake,
            "cascadelake",
            include_str!("../../models/cascadelake.toml"),
        ),
        (
            CpuModel::Skylake,
            "skylake",
            include_str!("../../models/skylake.toml"),
        ),
        (
            CpuModel::Broadwell,
            "broadwell",
            include_str!("../../models/broadwell.toml"),
        ),
        (
            CpuModel::Haswell,
            "haswell",
            include_str!("../../models/haswell.toml"),
        ),
        (
            CpuModel::IvyBridge,
            "ivybridge",
            include_str!("../../models/ivybridge.toml"),
        ),
        (
            CpuModel::SandyBridge,
            "sandybridge",
            include_str!("../../models/sandybridge.toml"),
        ),
        (
            CpuModel::Westmere,
            "westmere",
            include_str!("../../models/westmere.toml"),
        ),
        (
            CpuModel::Nehalem,
            "nehalem",
            include_str!("../../models/nehalem.toml"),
        ),
        (
            CpuModel::Core2,
            "core2",
            include_str!("../../models/core2.toml"),
        ),
        (
            CpuModel::PortableV2,
            "portable-v2",
            include_str!("../../models/portable-v2.toml"),
        ),
        (
            CpuModel::PortableV1,
            "portable-v1",
            include_str!("../../models/portable-v1.toml"),
        ),
        (CpuModel::Host, "host", SKYLAKE_SERVER),
    ]
};

/// The contents of the files that were needed so far, in the order of [`MODELS`].
static DEFINITIONS: [OnceLock<ModelDefinition>; MODELS.len()] =
    [const { OnceLock::new() }; MODELS.len()];

impl CpuModel {
    /// All models, the default one first.
    pub fn all() -> impl Iterator<Item = Self> {
        MODELS.iter().map(|row| row.0)
    }

    /// The model of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        MODELS.iter().find(|row| row.1 == name).map(|row| row.0)
    }

    /// The name that the command line uses.
    pub fn name(self) -> &'static str {
        MODELS[self.row()].1
    }

    /// What the model's file says; for the host, what the default model's says.
    pub fn definition(self) -> &'static ModelDefinition {
        let row = self.row();
        DEFINITIONS[row].get_or_init(|| {
            let definition = ModelDefinition::from_toml(MODELS[row].2);
            definition.expect("a test parses every file")
        })
    }

    fn row(self) -> usize {
        let found = MODELS.iter().position(|row| row.0 == self);
        found.expect("every model has a row")
    }

    /// Whether the model and its results are the same on every host.
    pub const fn is_portable(self) -> bool {
        matches!(self, Self::PortableV1 | Self::PortableV2)
    }
}

impl fmt::Display for CpuModel {
    /// The name that the command line uses.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
