//! The configuration of a machine.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use hindsight_export::image_hash;
use hindsight_trace::TracedImage;
use hindsight_vmm::cli::owned_machine;
use hindsight_vmm::platform::Sinks;

use crate::console::GuestOutput;
use crate::symbols::MachineSymbols;
use crate::{Error, Machine};

/// The configuration of a [`Machine`].
///
/// Its methods are the options of `hindsight run`, which are checked by
/// [`MachineBuilder::build`]. [`MachineBuilder::option`] gives those without a method.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct MachineBuilder {
    options: Vec<OsString>,
    image: Option<PathBuf>,
    symbols: Vec<PathBuf>,
}

impl MachineBuilder {
    /// A machine that boots the image at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            image: Some(path.into()),
            ..Self::default()
        }
    }

    /// A machine of the TOML file at `path`, as `hindsight run --config` reads it.
    pub fn from_config(path: impl AsRef<Path>) -> Self {
        Self::default().option("config", path.as_ref())
    }

    /// Adds an option of `hindsight run` with a value, such as `("disk", "root.qcow2,snapshot")`.
    pub fn option(mut self, name: &str, value: impl Into<OsString>) -> Self {
        let mut option = OsString::from(format!("--{name}="));
        option.push(value.into());
        self.options.push(option);
        self
    }

    /// Sets the boot protocol: auto, pvh, elf, multiboot, linux or flat.
    pub fn protocol(self, protocol: &str) -> Self {
        self.option("protocol", protocol)
    }

    /// Sets the initial RAM disk.
    pub fn initrd(self, path: impl AsRef<Path>) -> Self {
        self.option("initrd", path.as_ref())
    }

    /// Sets the kernel's command line.
    pub fn cmdline(self, text: &str) -> Self {
        self.option("cmdline", text)
    }

    /// Sets the size of guest memory, such as `64M`.
    pub fn memory(self, size: &str) -> Self {
        self.option("memory", size)
    }

    /// Sets the number of virtual processors.
    pub fn cpus(self, cpus: usize) -> Self {
        self.option("cpus", cpus.to_string())
    }

    /// Sets the processor model: portable-v1, or portable-v2, the default, with facilities added
    /// and removed.
    pub fn cpu(self, profile: &str) -> Self {
        self.option("cpu", profile)
    }

    /// Adds a disk that the guest reads. What it writes there is not in the file.
    pub fn disk(self, path: impl AsRef<Path>) -> Self {
        let mut disk = path.as_ref().as_os_str().to_owned();
        disk.push(",snapshot");
        self.option("disk", disk)
    }

    /// Sets the seed of the guest's random numbers.
    pub fn seed(self, seed: u64) -> Self {
        self.option("seed", seed.to_string())
    }

    /// Adds the symbols of the ELF file at `path`. Those of the image and of a Linux kernel that the
    /// guest runs are known without this.
    pub fn symbols(mut self, path: impl Into<PathBuf>) -> Self {
        self.symbols.push(path.into());
        self
    }

    /// Builds the machine at its first instruction.
    ///
    /// # Errors
    ///
    /// When an option is wrong, a file cannot be read, or the image cannot be booted.
    pub fn build(self) -> Result<Machine, Error> {
        let console = GuestOutput::default();
        let sinks = Sinks {
            serial: Box::new(console.clone()),
            debugcon: Box::new(console.clone()),
            btm: None,
        };
        let mut options = self.options;
        let path = self.image.unwrap_or_default();
        if !path.as_os_str().is_empty() {
            options.extend(["--".into(), path.clone().into()]);
        }
        let built = owned_machine(&options, sinks);
        let built = built.map_err(|error| Error::Build(format!("{error:#}").trim().to_owned()))?;
        let mut symbols = MachineSymbols::new(&built.image);
        for path in self.symbols {
            let file = std::fs::read(&path).map_err(|source| Error::File { path, source })?;
            symbols.add(&file);
        }
        let image = TracedImage {
            path: path.display().to_string(),
            size: built.image.len() as u64,
            hash: image_hash(&built.image),
        };
        Machine::new(built.machine, built.checkpoints, symbols, console, image)
    }
}
