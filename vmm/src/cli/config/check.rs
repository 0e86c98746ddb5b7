//! Options that exclude or need each other, whether they come from the file or the command line.

use thiserror::Error;

use super::choices::{EngineArg, ProtocolArg};
use super::option_word::OptionWord;
use super::options::RunConfig;
use super::values::DisplayTarget;
use crate::virtio::net::NetSpec;

/// Why options do not go together.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ConflictError {
    /// There is nothing to boot.
    #[error(
        "no guest image: give <IMAGE> or --firmware, or `image` in the [boot] table of the --config \
         file; \
         usage: hindsight run [OPTIONS] <IMAGE>"
    )]
    NoImage,
    /// An option has no meaning without another one.
    #[error("{0} has no effect without {1}: add {1} or drop {0}")]
    Needs(&'static str, &'static str),
    /// Two options contradict each other.
    #[error("{0} and {1} exclude each other: drop one of them")]
    Excludes(&'static str, &'static str),
    /// KVM cannot run deterministically.
    #[error(
        "--deterministic needs the interpreter, since KVM cannot count instructions; \
         use --engine interp or auto"
    )]
    DeterministicKvm,
    /// Files that the guest changes are others in the next run.
    #[error("--deterministic takes no --share with `,rw`: the next run has other files then")]
    DeterministicShare,
    /// A disk that the guest writes is another one in the next run.
    #[error(
        "--deterministic needs --disk with `,ro` or `,snapshot`: the next run has the same disk then"
    )]
    DeterministicDisk,
    /// Other processors depend on the host's.
    #[error(
        "--deterministic needs --cpu portable-v2 or portable-v1: other processors depend on the host's"
    )]
    DeterministicCpu,
}

impl RunConfig {
    /// Checks what no option can check by itself.
    ///
    /// # Errors
    ///
    /// The first conflict.
    pub fn check(&self) -> Result<(), ConflictError> {
        use ConflictError::{DeterministicCpu, DeterministicKvm, Excludes, Needs, NoImage};
        let Self {
            boot,
            machine,
            determinism,
            debugging,
            run,
            ..
        } = self;
        let deterministic = determinism.deterministic;
        let (live, no_gdb) = (!deterministic, debugging.gdb.is_none());
        let (records, replays) = (
            determinism.record_input.is_some(),
            determinism.replay_input.is_some(),
        );
        let limited = debugging.checkpoint_memory.is_some();
        let cpu = machine.cpu.map(|cpu| cpu.0.model());
        let foreign_cpu = cpu.is_some_and(|model| !model.is_portable());
        let switches = run.switch_every.is_some();
        let rows = [
            (boot.image.is_none() && boot.firmware.is_none(), NoImage),
            (
                live && determinism.seed.is_some(),
                Needs("--seed", "--deterministic"),
            ),
            (live && records, Needs("--record-input", "--deterministic")),
            (live && replays, Needs("--replay-input", "--deterministic")),
            (
                records && replays,
                Excludes("--record-input", "--replay-input"),
            ),
            (no_gdb && debugging.gdb_wait, Needs("--gdb-wait", "--gdb")),
            (
                no_gdb && debugging.gdb_allow_remote,
                Needs("--gdb-allow-remote", "--gdb"),
            ),
            (
                no_gdb && debugging.trace_out.is_some(),
                Needs("--trace-out", "--gdb"),
            ),
            (no_gdb && limited, Needs("--checkpoint-memory", "--gdb")),
            (
                live && limited,
                Needs("--checkpoint-memory", "--deterministic"),
            ),
            (
                deterministic && switches,
                Excludes("--switch-every", "--deterministic"),
            ),
            (
                deterministic && machine.engine == EngineArg::Kvm,
                DeterministicKvm,
            ),
            (deterministic && foreign_cpu, DeterministicCpu),
        ];
        let conflict = rows.into_iter().find(|&(conflicts, _)| conflicts);
        if let Some((_, error)) = conflict {
            return Err(error);
        }
        self.check_firmware()?;
        self.check_devices()
    }

    /// Checks that nothing is to be loaded besides firmware, and nothing of it without it.
    fn check_firmware(&self) -> Result<(), ConflictError> {
        let boot = &self.boot;
        let no_firmware = boot.firmware.is_none();
        let no_screen = self.console.display.0 == DisplayTarget::None;
        let needs = [
            (
                no_firmware && boot.firmware_vars.is_some(),
                "--firmware-vars",
                "--firmware",
            ),
            (
                no_firmware && boot.vga_bios.is_some(),
                "--vga-bios",
                "--firmware",
            ),
            (
                no_screen && boot.vga_bios.is_some(),
                "--vga-bios",
                "--display",
            ),
        ];
        if let Some((_, option, needed)) = needs.into_iter().find(|need| need.0) {
            return Err(ConflictError::Needs(option, needed));
        }
        if no_firmware {
            return Ok(());
        }
        let rows = [
            (boot.image.is_some(), "<IMAGE>"),
            (boot.protocol != ProtocolArg::Auto, "--protocol"),
            (boot.initrd.is_some(), "--initrd"),
            (!boot.cmdline.is_empty(), "--cmdline"),
            (!boot.module.is_empty(), "--module"),
            (boot.load_address.is_some(), "--load-address"),
            (boot.entry.is_some(), "--entry"),
            (boot.mode.is_some(), "--mode"),
            (self.machine.hugepages, "--hugepages"),
        ];
        let conflict = rows.into_iter().find(|&(given, _)| given);
        conflict.map_or(Ok(()), |(_, option)| {
            Err(ConflictError::Excludes("--firmware", option))
        })
    }

    /// Checks that a deterministic run has devices that are the same in the next run.
    fn check_devices(&self) -> Result<(), ConflictError> {
        use ConflictError::{DeterministicDisk, DeterministicShare, Excludes};
        let devices = &self.devices;
        if !self.determinism.deterministic {
            return Ok(());
        }
        let goes_back = self.debugging.gdb.is_some();
        let has_network = matches!(devices.net, Some(OptionWord(NetSpec::User(_))));
        let rows = [
            (
                devices.disk.iter().any(|disk| !disk.0.leaves_image()),
                DeterministicDisk,
            ),
            (
                devices.share.iter().any(|share| share.0.writable),
                DeterministicShare,
            ),
            (
                goes_back && !devices.share.is_empty(),
                Excludes("--share", "--gdb in a deterministic run"),
            ),
            (has_network, Excludes("--net user", "--deterministic")),
            (
                devices.vsock.is_some(),
                Excludes("--vsock", "--deterministic"),
            ),
        ];
        let conflict = rows.into_iter().find(|&(conflicts, _)| conflicts);
        conflict.map_or(Ok(()), |(_, error)| Err(error))
    }
}
