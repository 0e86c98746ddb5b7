//! Dispatches each exit to the model that serves it: one match, with one short arm per kind.

use hindsight_cpu::msr::{MsrEffect, RdmsrOutcome, WrmsrOutcome};

use super::crash::CrashCause;
use super::hex_bytes::HexBytes;
use super::model::VcpuModel;
use crate::kvm::exit::{KvmExit, PortData};
use crate::vcpu::recorder::RecordedKind;

/// What the run loop does after an exit was served.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum ExitAction {
    /// Resumes the guest.
    Run,
    /// Applies the effect of a WRMSR to KVM, then resumes the guest.
    Apply {
        /// MSR number that was written.
        index: u32,
        /// The effect to apply.
        effect: MsrEffect,
    },
    /// Sleeps until an event wakes the vCPU.
    Halt,
    /// Checks for work first: the vCPU was kicked, or an interrupt window opened.
    Poll,
    /// Completes a debug exception or a MOV DR that KVM intercepted.
    Debug {
        /// DR6 of the event.
        dr6: u64,
    },
    /// The guest cannot continue.
    Crash(CrashCause),
}

/// Serves one exit.
pub fn serve(exit: KvmExit<'_>, cpu: &mut VcpuModel) -> ExitAction {
    match exit {
        KvmExit::Io { port, size, data } => io(cpu, port, size, data),
        KvmExit::MmioRead { address, data } => cpu.mmio_read(address, data),
        KvmExit::MmioWrite { address, data } => cpu.mmio_write(address, data),
        KvmExit::Rdmsr { index, reply } => match rdmsr(cpu, index) {
            Some(value) => reply.value(value),
            None => reply.fault(),
        },
        KvmExit::Wrmsr {
            index,
            value,
            reply,
        } => match wrmsr(cpu, index, value) {
            Some(effect) => {
                reply.done();
                if !effect.is_none() {
                    return ExitAction::Apply { index, effect };
                }
            }
            None => reply.fault(),
        },
        KvmExit::Halt => return ExitAction::Halt,
        KvmExit::InterruptWindow | KvmExit::Kicked | KvmExit::TprLowered => {
            return ExitAction::Poll;
        }
        KvmExit::Shutdown => return ExitAction::Crash(CrashCause::TripleFault),
        KvmExit::InternalError(error) => return ExitAction::Crash(CrashCause::Internal(error)),
        KvmExit::FailEntry { reason } => return ExitAction::Crash(CrashCause::FailEntry(reason)),
        KvmExit::MemoryFault { address } => {
            return ExitAction::Crash(CrashCause::MemoryFault(address));
        }
        KvmExit::Unexpected { reason } => return ExitAction::Crash(CrashCause::Unexpected(reason)),
        KvmExit::Debug { dr6, .. } => return ExitAction::Debug { dr6 },
    }
    ExitAction::Run
}

fn io(cpu: &VcpuModel, port: u16, size: usize, data: PortData<'_>) {
    let board = &cpu.board;
    match data {
        PortData::In(data) => {
            for element in data.chunks_mut(size) {
                board.buses.ports.read(port, element);
                tracing::trace!(target: "io", "cpu {} in {port:#x} = {}", cpu.id, HexBytes(element));
            }
        }
        PortData::Out(data) => {
            for element in data.chunks(size) {
                tracing::trace!(target: "io", "cpu {} out {port:#x} = {}", cpu.id, HexBytes(element));
                board.buses.ports.write(port, element);
            }
        }
    }
}

/// RDMSR that exited. Returns the value, or `None` for #GP(0).
fn rdmsr(cpu: &mut VcpuModel, index: u32) -> Option<u64> {
    let value = match cpu.rdmsr(index) {
        RdmsrOutcome::Value(value) => Some(value),
        RdmsrOutcome::Apic => cpu.rdmsr_apic(index).ok(),
        // KVM answers these itself; it exits only if it refuses the access.
        RdmsrOutcome::Processor => None,
        RdmsrOutcome::Fault | RdmsrOutcome::Unclaimed => None,
    };
    let id = cpu.id;
    match value {
        Some(value) => tracing::trace!(target: "msr", "cpu {id} rdmsr {index:#x} = {value:#x}"),
        None => tracing::trace!(target: "msr", "cpu {id} rdmsr {index:#x} = #GP(0)"),
    }
    cpu.record(RecordedKind::Rdmsr {
        index,
        answer: value,
    });
    value
}

/// WRMSR that exited. Returns the effect to apply, or `None` for #GP(0).
fn wrmsr(cpu: &mut VcpuModel, index: u32, value: u64) -> Option<MsrEffect> {
    let effect = match cpu.wrmsr(index, value) {
        WrmsrOutcome::Done(effect) => Some(effect),
        WrmsrOutcome::Apic => cpu.wrmsr_apic(index, value).ok(),
        // KVM answers these itself; it exits only if it refuses the access.
        WrmsrOutcome::Processor => None,
        WrmsrOutcome::Fault | WrmsrOutcome::Unclaimed => None,
    };
    let refused = if effect.is_some() { "" } else { ": #GP(0)" };
    tracing::trace!(target: "msr", "cpu {} wrmsr {index:#x} = {value:#x}{refused}", cpu.id);
    cpu.record(RecordedKind::Wrmsr {
        index,
        value,
        accepted: effect.is_some(),
    });
    effect
}
