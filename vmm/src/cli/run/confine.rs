//! `--sandbox`: confines the process before it runs the guest.

use anyhow::Context;
use hindsight_gdb::ListenAddress;

use crate::cli::config::{OptionWord, RunConfig, SandboxArg};
use crate::console::Backend;
use crate::sandbox::{
    FileAccess, SandboxError, SandboxNeeds, Strictness, ThreadKind, confine_files, enter, prepare,
};

/// The confinement of a run.
pub(in crate::cli) struct Confinement(SandboxArg);

impl Confinement {
    /// Limits the process. The threads that are started from now on enter their rules.
    ///
    /// # Errors
    ///
    /// With `--sandbox strict`, when the kernel lacks a part of the sandbox.
    pub(in crate::cli) fn prepare(config: &RunConfig) -> anyhow::Result<Self> {
        let this = Self(config.run.sandbox);
        let needs = SandboxNeeds {
            shares: !config.devices.share.is_empty(),
            sockets: config.devices.vsock.is_some(),
        };
        let prepared = match this.0 {
            SandboxArg::Off => return Ok(this),
            SandboxArg::On => prepare(Strictness::Refuse, needs),
            SandboxArg::Strict => prepare(Strictness::Kill, needs),
        };
        this.accept(prepared)?;
        Ok(this)
    }

    /// Confines this thread, and those that it starts, to the files and sockets that are open.
    ///
    /// # Errors
    ///
    /// As [`Confinement::prepare`].
    pub(in crate::cli) fn confine_files(&self, config: &RunConfig) -> anyhow::Result<()> {
        if self.0 == SandboxArg::Off {
            return Ok(());
        }
        let consoles = [&config.console.serial.0, &config.console.debugcon.0];
        let consoles = consoles.into_iter().filter_map(|backend| match backend {
            Backend::Unix(path) => Some(path.clone()),
            _ => None,
        });
        let gdb = config.debugging.gdb.as_ref();
        let gdb = gdb.and_then(|OptionWord(address)| match address {
            ListenAddress::Unix(path) => Some(path.clone()),
            _ => None,
        });
        let vsock = config.devices.vsock.as_ref();
        let vsock = vsock.map(|OptionWord(spec)| spec.socket.clone());
        let shares = config.devices.share.iter();
        let shares = shares.map(|OptionWord(share)| (share.folder.clone(), share.writable));
        self.accept(confine_files(&FileAccess {
            sockets: consoles.chain(gdb).chain(vsock).collect(),
            folders: shares.collect(),
        }))
    }

    /// Puts the main thread under its rules.
    pub(in crate::cli) fn enter() {
        enter(ThreadKind::Main);
    }

    /// Accepts a kernel without a part of the sandbox, with a warning, unless the user does not.
    fn accept(&self, result: Result<(), SandboxError>) -> anyhow::Result<()> {
        match result {
            Err(error) if self.0 == SandboxArg::Strict => Err(error).context("--sandbox strict"),
            Err(error) => {
                tracing::warn!("--sandbox: {error}");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }
}
