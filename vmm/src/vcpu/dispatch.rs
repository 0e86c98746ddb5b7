//! From an exit to the model that answers it: one match, one short arm per kind.

use hindsight_cpu::msr::Effect;

use super::crash::CrashCause;
use super::hex_bytes::HexBytes;
use super::model::{Gp, VcpuModel};
use crate::kvm::exit::{KvmExit, PortData};
use crate::vcpu::recorder::RecordedKind;

/// What the run loop does after an exit was served.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum ExitAction {
    /// Runs on.
    Run,
    /// Brings KVM in line with a model, then runs on.
    Apply {
        /// MSR number that was written.
        index: u32,
        /// What must follow.
        effect: Effect,
    },
    /// Sleeps until an interrupt.
    Halt,
    /// Looks for work first: kicked, or a window opened.
    Poll,
    /// Does what KVM left to us of a debug exception or MOV DR.
    Debug {
        /// DR6 of the event.
        dr6: u64,
    },
    /// The guest cannot go on.
    Crash(CrashCause),
}

/// Serves one exit.
pub fn serve(exit: KvmExit<'_>, cpu: &mut VcpuModel) -> ExitAction {
    match exit {
        KvmExit::Io { port, size, data } => io(cpu, port, size, data),
        KvmExit::MmioRead { address, data } => cpu.mmio_read(address, data),
        KvmExit::MmioWrite { address, data } => cpu.mmio_write(address, data),
        KvmExit::Rdmsr { index, reply } => {
            let answer = cpu.rdmsr(index);
            tracing::trace!(target: "msr", "cpu {} rdmsr {index:#x} = {}", cpu.id, Shown(answer));
            cpu.record(RecordedKind::Rdmsr {
                index,
                answer: answer.ok().flatten(),
            });
            match answer {
                Ok(Some(value)) => reply.value(value),
                // KVM itself refused an access to one of its own.
                Ok(None) | Err(Gp) => reply.fault(),
            }
        }
        KvmExit::Wrmsr {
            index,
            value,
            reply,
        } => {
            let answer = cpu.wrmsr(index, value);
            let refused = if matches!(answer, Ok(Some(_))) {
                ""
            } else {
                ": #GP(0)"
            };
            tracing::trace!(target: "msr", "cpu {} wrmsr {index:#x} = {value:#x}{refused}", cpu.id);
            cpu.record(RecordedKind::Wrmsr {
                index,
                value,
                accepted: matches!(answer, Ok(Some(_))),
            });
            match answer {
                Ok(Some(effect)) => {
                    reply.done();
                    if effect != Effect::None {
                        return ExitAction::Apply { index, effect };
                    }
                }
                Ok(None) | Err(Gp) => reply.fault(),
            }
        }
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

struct Shown(Result<Option<u64>, Gp>);

impl std::fmt::Display for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Ok(Some(value)) => write!(f, "{value:#x}"),
            Ok(None) | Err(Gp) => f.write_str("#GP(0)"),
        }
    }
}
