//! Builds a machine from a configuration.

use std::ffi::OsString;
use std::io;

use anyhow::{Context, bail};
use clap::{Args, FromArgMatches};
use hindsight_devices::virtio::VirtioDevice;

use super::devices::{DeviceLinks, OpenedDevices};
use super::files::BootFiles;
use super::{devices, input};
use crate::boot::{LoadRequest, open_firmware_vars};
use crate::cli::config::{ConfigArgs, DebugOptions, DisplayTarget, ModelsArg, RunConfig};
use crate::deterministic::input::InputFeed;
use crate::deterministic::{CheckpointLimits, DeterministicMachine};
use crate::exactness::MeasureMode;
use crate::machine::start::{self, StartDecision};
use crate::machine::{MachineConfig, PreparedMachine};
use crate::platform::Sinks;
use crate::vcpu::engine::Engine;
use crate::vcpu::engine::policy::EngineChoice;
use crate::vcpu::translation::TranslationPolicy;

/// Builds a machine that starts in `engine` and has `devices` on its PCI bus.
///
/// Loads the image of `request` into its memory.
///
/// # Errors
///
/// When the machine is impossible, or the image cannot be booted.
pub fn prepare(
    config: &RunConfig,
    engine: Engine,
    request: &LoadRequest<'_>,
    devices: Vec<Box<dyn VirtioDevice>>,
) -> anyhow::Result<PreparedMachine> {
    let options = &config.machine;
    let machine = MachineConfig {
        memory: options.memory.0.0,
        huge_pages: options.hugepages,
        cpus: options.cpus,
        cpu: config.cpu(),
        engine,
    };
    let prepared = PreparedMachine::with_devices(&machine, request, devices)?;
    let prepared = prepared
        .with_uarch(options.models == ModelsArg::On)
        .with_translation(TranslationPolicy {
            after: options.translate.0,
            memory: options.translate_memory.0.0,
        });
    let prepared = if config.run.no_reboot {
        prepared.without_reboot()
    } else {
        prepared
    };
    Ok(match config.deterministic_seed() {
        Some(seed) => prepared.deterministic(seed),
        None => prepared,
    })
}

/// Like [`prepare`], with the image in `files` and the devices of `config`.
///
/// Also returns the hosts' ends of the devices.
pub(super) fn prepare_files(
    config: &RunConfig,
    engine: Engine,
    files: &BootFiles<'_>,
) -> anyhow::Result<(PreparedMachine, DeviceLinks)> {
    let OpenedDevices { devices, links } = devices::open(config)?;
    let mut request = files.load_request();
    request.text_screen = config.console.display.0 != DisplayTarget::None;
    let mut prepared = prepare(config, engine, &request, devices)
        .with_context(|| files.image_path().display().to_string())?;
    if let Some(path) = config.boot.firmware_vars.as_deref() {
        let name = || format!("--firmware-vars {}", path.display());
        let flash = open_firmware_vars(path, !config.determinism.deterministic);
        prepared = prepared
            .with_firmware_vars(flash.with_context(name)?)
            .with_context(name)?;
    }
    Ok((prepared, links))
}

/// Builds a deterministic machine that the caller runs. Its consoles drop all output.
///
/// # Errors
///
/// When the options conflict, or the machine cannot be built.
pub fn deterministic_machine(config: &RunConfig) -> anyhow::Result<DeterministicMachine> {
    config.check()?;
    let sinks = Sinks {
        serial: Box::new(io::sink()),
        debugcon: Box::new(io::sink()),
        btm: None,
    };
    let files = BootFiles::read(&config.boot, None)?;
    let feed = input::read_log(config)?.map(InputFeed::replay);
    build_deterministic(config, &files, sinks, feed.unwrap_or_default())
}

/// A machine of [`owned_machine`].
#[derive(Debug)]
pub struct OwnedMachine {
    /// The machine at its first instruction.
    pub machine: DeterministicMachine,
    /// The image that it boots, with the symbols.
    pub image: Vec<u8>,
    /// What limits the checkpoints for going back.
    pub checkpoints: CheckpointLimits,
}

/// Builds a deterministic machine that a program runs, from `options` of the command line.
///
/// Its consoles write to `sinks`, and it takes input from its owner.
///
/// # Errors
///
/// When the options are wrong or conflict, or the machine cannot be built.
pub fn owned_machine(options: &[OsString], sinks: Sinks) -> anyhow::Result<OwnedMachine> {
    let command = ConfigArgs::augment_args(clap::Command::new("hindsight").no_binary_name(true));
    let command = command.disable_help_flag(true);
    let mut config =
        ConfigArgs::from_arg_matches(&command.try_get_matches_from(options)?)?.load()?;
    config.determinism.deterministic = true;
    let limit = config.debugging.checkpoint_memory.take();
    if config.debugging != DebugOptions::default() || config.determinism.record_input.is_some() {
        bail!("a program that runs the machine takes no options for debuggers and recorded input");
    }
    if !config.devices.share.is_empty() {
        bail!("a machine that goes back cannot have --share");
    }
    config.check()?;
    let files = BootFiles::read(&config.boot, None)?;
    let feed = InputFeed::owned(input::read_log(&config)?);
    let machine = build_deterministic(&config, &files, sinks, feed)?;
    let (_, image) = files.image();
    let mut checkpoints = CheckpointLimits::default();
    if let Some(limit) = limit {
        checkpoints.bytes = limit.0.0;
    }
    Ok(OwnedMachine {
        machine,
        image: image.to_vec(),
        checkpoints,
    })
}

fn build_deterministic(
    config: &RunConfig,
    files: &BootFiles<'_>,
    sinks: Sinks,
    feed: InputFeed,
) -> anyhow::Result<DeterministicMachine> {
    let (prepared, _) = prepare_files(config, Engine::Interp, files)?;
    let mut machine = prepared.build(None, sinks)?;
    machine.set_feed(feed);
    Ok(machine.into_deterministic()?)
}

/// The engine choice that follows from the options.
fn engine_choice(config: &RunConfig) -> EngineChoice {
    // Only the interpreter records branches, and only it has the processor of some profiles.
    let needs_interpreter = config.debugging.record.is_some() || config.cpu().needs_interpreter();
    match config.machine.engine.into() {
        _ if config.determinism.deterministic => EngineChoice::Only(Engine::Interp),
        EngineChoice::Auto if needs_interpreter => EngineChoice::Only(Engine::Interp),
        choice => choice,
    }
}

/// Decides in which engine the machine starts.
///
/// # Errors
///
/// When the user requires KVM and it cannot be used.
pub fn decide(config: &RunConfig, measure: Option<MeasureMode>) -> anyhow::Result<StartDecision> {
    let choice = engine_choice(config);
    if let Some(mode) = measure
        && choice == EngineChoice::Auto
    {
        return Ok(start::decide_for_measurement(mode)?);
    }
    if config.run.switch_every.is_none() {
        return Ok(start::decide(choice, config.machine.prefer.into())?);
    }
    if choice == EngineChoice::Only(Engine::Interp) {
        bail!(
            "--switch-every needs KVM, and --engine interp, --record or the --cpu profile needs the \
             interpreter: drop one of them"
        );
    }
    Ok(start::decide_both()?)
}
