//! Resets a machine with firmware in place, as its guest requests.
//!
//! RAM keeps its contents, except for the copy of the firmware below 1 MiB; the real-time clock keeps its
//! time. Deviation: the TSC continues from the machine's clock instead of 0.

use std::sync::mpsc;

use hindsight_cpu::state::seg;

use super::board::Board;
use super::debug::inspect::PausedVcpu;
use super::run_control::RunError;
use crate::state::RestoreError;

/// Resets the devices, the interrupt controllers and the firmware's copy in RAM. No vCPU may run.
///
/// # Errors
///
/// Guest memory cannot be written, or a device refuses its own first state.
pub fn devices(board: &Board) -> Result<(), RunError> {
    tracing::info!("the guest resets the machine");
    board.buses.reset()?;
    let copied = board.ram.restore_firmware_copy();
    copied.map_err(|error| RestoreError::Memory(std::io::Error::other(error)).into())
}

/// Resets a vCPU, after [`devices`].
///
/// # Errors
///
/// When KVM refuses the state.
pub fn vcpu(vcpu: &mut dyn PausedVcpu) -> Result<(), RunError> {
    let model = vcpu.model();
    let Some(first) = model.at_reset.take() else {
        return Ok(());
    };
    let (cpu, irq) = (model.id, &model.board.buses.irq);
    irq.set_cr8(cpu, first.cpu.cr8);
    let restored = model.restore(&first.msrs);
    let offset = model.msrs.tsc().offset();
    model.board.buses.irq.tsc_offset_changed(cpu, offset);
    let base = first.cpu.seg[seg::CS].base;
    if let Some(history) = &mut model.history {
        history.restart(base);
    }
    if let Some(tracer) = &mut model.tracer {
        tracer.restart(base);
    }
    model.wake();
    let set = vcpu.set_state(&first.cpu);
    vcpu.model().at_reset = Some(first);
    restored.map_err(|source| RestoreError::Msrs { cpu, source })?;
    set?;
    Ok(vcpu.was_reset()?)
}

/// Resets a machine whose vCPUs have threads of their own, and lets them run again.
///
/// # Errors
///
/// As [`devices`] and [`vcpu`].
pub fn machine(board: &Board) -> Result<(), RunError> {
    let control = &board.run.vcpus;
    if !control.wait_for_reset() {
        return Ok(());
    }
    devices(board)?;
    let (sender, results) = mpsc::channel();
    for id in 0..control.cpus() {
        let sender = sender.clone();
        let request = move |paused: &mut dyn PausedVcpu| {
            // The receiver is gone only if another vCPU failed.
            let _ = sender.send(vcpu(paused));
        };
        if !control.request(id, Box::new(request)) {
            return Ok(());
        }
    }
    drop(sender);
    // A machine that stops meanwhile drops its requests.
    results.into_iter().collect::<Result<Vec<_>, _>>()?;
    control.end_reset();
    Ok(())
}
