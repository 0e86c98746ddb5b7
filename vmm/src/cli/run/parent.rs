//! A run that does not outlive the process that started it.

use anyhow::{Context, bail};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

/// Makes the kernel kill this process when the thread that started it ends for any reason.
///
/// # Errors
///
/// When process `pid` is not the parent of this one: it did not start it, or has ended already.
pub(super) fn end_with_parent(pid: i32) -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("--end-with")?;
    if getppid().map(|parent| parent.as_raw_nonzero().get()) != Some(pid) {
        bail!("--end-with: process {pid} did not start this one, or has ended");
    }
    Ok(())
}
