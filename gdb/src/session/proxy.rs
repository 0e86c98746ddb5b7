//! Passes packets to `gdbstub` and returns its replies; replaces `gdbstub` after an error.

use std::cell::RefCell;
use std::convert::Infallible;
use std::rc::Rc;

use gdbstub::conn::Connection;
use gdbstub::stub::GdbStub;
use gdbstub::stub::MultiThreadStopReason;
use gdbstub::stub::state_machine::GdbStubStateMachine;

use crate::debugger::Debugger;
use crate::framing;
use crate::stub::RegisterNumber;
use crate::thread_id::{parse, thread_of};

/// The initial size of `gdbstub`'s packet buffer, in bytes. It grows with longer packets, and
/// `gdbstub` searches all of it with every packet.
const BUFFER_BYTES: usize = 1024;

/// Collects what `gdbstub` sends.
#[derive(Clone, Debug, Default)]
struct StubOutput(Rc<RefCell<Vec<u8>>>);

impl Connection for StubOutput {
    type Error = Infallible;

    fn write(&mut self, byte: u8) -> Result<(), Infallible> {
        self.0.borrow_mut().push(byte);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Infallible> {
        Ok(())
    }
}

type StubMachine = GdbStubStateMachine<'static, Debugger, StubOutput>;

/// A state machine of `gdbstub`, and the packets that a new one needs to replace it.
#[derive(Default)]
pub(super) struct StubProxy {
    machine: Option<StubMachine>,
    output: StubOutput,
    /// The last `Hg` packet.
    selected: Option<Vec<u8>>,
    /// The client's `qSupported` packet.
    supported: Option<Vec<u8>>,
}

impl StubProxy {
    /// The vCPU that the client has selected.
    pub(super) fn selected(&self) -> usize {
        let id = self.selected.as_deref().unwrap_or(b"Hg1");
        id.strip_prefix(b"Hg").and_then(parse).unwrap_or(0)
    }

    /// Stores a `Hg` packet that was accepted.
    pub(super) fn select(&mut self, packet: &[u8]) {
        self.selected = Some(packet.to_vec());
    }

    /// Stores the client's `qSupported` packet.
    pub(super) fn set_supported(&mut self, packet: &[u8]) {
        self.supported = Some(packet.to_vec());
    }

    /// Whether `gdbstub` waits for the machine to stop.
    pub(super) fn is_running(&self) -> bool {
        matches!(self.machine, Some(GdbStubStateMachine::Running(_)))
    }

    /// Passes a packet to `gdbstub`. Returns the bodies of its replies.
    ///
    /// `None` after an error from which `gdbstub` cannot continue.
    pub(super) fn feed(&mut self, debugger: &mut Debugger, body: &[u8]) -> Option<Vec<Vec<u8>>> {
        let mut machine = self.machine.take().or_else(|| self.fresh(debugger))?;
        for byte in framing::encode_packet(body) {
            let fed = match machine {
                GdbStubStateMachine::Idle(inner) => inner.incoming_data(debugger, byte),
                GdbStubStateMachine::Running(inner) => inner.incoming_data(debugger, byte),
                // The filter lets no Ctrl-C and no detach through.
                GdbStubStateMachine::CtrlCInterrupt(_) | GdbStubStateMachine::Disconnected(_) => {
                    return None;
                }
            };
            match fed {
                Ok(next) => machine = next,
                Err(error) => {
                    tracing::debug!(target: "gdb", "{}: {error}", body.escape_ascii());
                    self.output.0.borrow_mut().clear();
                    return None;
                }
            }
        }
        self.machine = Some(machine);
        Some(self.take_replies())
    }

    /// Returns the replies of `gdbstub` to a stop of a vCPU.
    ///
    /// They contain registers, which the client then need not request. `gdbstub` sends them only
    /// while its state is that the machine runs.
    pub(super) fn report_stop(
        &mut self,
        debugger: &mut Debugger,
        vcpu: usize,
        reason: MultiThreadStopReason<u64>,
        registers: &[(usize, Vec<u8>)],
    ) -> Option<Vec<Vec<u8>>> {
        if !self.is_running() {
            debugger.suppress_resume = true;
            self.feed(debugger, b"vCont;c");
            debugger.suppress_resume = false;
        }
        let Some(GdbStubStateMachine::Running(machine)) = self.machine.take() else {
            return None;
        };
        let mut registers = registers
            .iter()
            .map(|(number, value)| (RegisterNumber(*number), value.as_slice()));
        let reported = machine.report_stop_with_regs(debugger, reason, &mut registers);
        self.selected = Some(format!("Hgp1.{:x}", thread_of(vcpu)).into_bytes());
        self.machine = Some(reported.ok()?);
        Some(self.take_replies())
    }

    fn take_replies(&mut self) -> Vec<Vec<u8>> {
        let sent = std::mem::take(&mut *self.output.0.borrow_mut());
        framing::bodies(&sent)
    }

    /// Makes a state machine, and passes it the client's packets that have a lasting effect.
    fn fresh(&mut self, debugger: &mut Debugger) -> Option<StubMachine> {
        self.output.0.borrow_mut().clear();
        let stub = GdbStub::builder(self.output.clone())
            .packet_buffer_size(BUFFER_BYTES)
            .build()
            .ok()?;
        let mut machine = stub.run_state_machine(debugger).ok()?;
        let supported = self.supported.clone().into_iter();
        let selected = self.selected.clone();
        for body in supported.chain([b"Hg0".to_vec()]).chain(selected) {
            for byte in framing::encode_packet(&body) {
                machine = match machine {
                    GdbStubStateMachine::Idle(inner) => inner.incoming_data(debugger, byte).ok()?,
                    _ => return None,
                };
            }
        }
        self.output.0.borrow_mut().clear();
        Some(machine)
    }
}
