//! The report of a guest that cannot continue: the cause, the instruction, the registers.

use std::fmt;

use hindsight_cpu::register_dump::RegisterDump;
use hindsight_cpu::state::{Activity, CpuState, seg};
use iced_x86::{Decoder, DecoderOptions, Formatter, GasFormatter, Instruction};
use vm_memory::GuestMemoryMmap;

use crate::kvm::exit::InternalError;
use crate::memory::page_walk;

/// Why a guest cannot continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CrashCause {
    /// A triple fault, or RSM with a save area that holds an impossible state.
    TripleFault,
    /// KVM reported an internal error.
    Internal(InternalError),
    /// The interpreter does not implement the instruction with these bytes.
    Missing(Vec<u8>),
    /// The hardware refused to enter the guest: KVM's reason.
    FailEntry(u64),
    /// KVM could not resolve an access to this guest physical address.
    MemoryFault(u64),
    /// An exit reason that this monitor never enables.
    Unexpected(u32),
    /// All vCPUs are halted and no event can wake them: HLT with interrupts off, or no timer armed.
    Asleep,
}

/// A guest that cannot continue.
#[derive(Debug)]
pub struct Crash {
    cpu: usize,
    cause: CrashCause,
    state: Box<CpuState>,
    /// Bytes at RIP.
    code: Vec<u8>,
    /// The deliveries that led to a triple fault, one line each.
    chain: Vec<String>,
}

impl Crash {
    /// The report of vCPU `cpu` in `state`. Instruction bytes that KVM did not return are read
    /// through the guest's page tables.
    pub fn new(cpu: usize, cause: CrashCause, state: CpuState, memory: &GuestMemoryMmap) -> Self {
        let mut code = match &cause {
            CrashCause::Internal(error) => error.bytes.clone(),
            CrashCause::Missing(bytes) => bytes.clone(),
            _ => Vec::new(),
        };
        if code.is_empty() {
            let linear = state.seg[seg::CS].base.wrapping_add(state.rip);
            code = page_walk::read_linear(memory, &state, linear, 15);
        }
        Self {
            cpu,
            cause,
            state: Box::new(state),
            code,
            chain: Vec::new(),
        }
    }

    /// Adds the events that led to a triple fault, a line each.
    #[must_use]
    pub fn after(self, chain: Vec<String>) -> Self {
        Self { chain, ..self }
    }

    /// Why it cannot continue.
    pub const fn cause(&self) -> &CrashCause {
        &self.cause
    }

    /// The vCPU's state at that time.
    pub const fn state(&self) -> &CpuState {
        &self.state
    }

    /// Whether RIP, CS and the IDTR have their values after RESET.
    ///
    /// A vCPU cannot triple-fault in this state, so KVM has reset it.
    fn is_reset(&self) -> bool {
        let reset = CpuState::reset();
        let key = |state: &CpuState| (state.rip, state.seg[seg::CS].base, state.idtr);
        key(&self.state) == key(&reset)
    }

    /// One line: what happened, and at which instruction.
    pub fn summary(&self) -> String {
        let rip = self.state.rip;
        let at = location(rip, instruction(&self.state, &self.code));
        match &self.cause {
            CrashCause::TripleFault if self.state.smm.active => format!(
                "the processor shut down in system-management mode, by a triple fault or by RSM with \
                 a save area that holds no possible state, {at}"
            ),
            CrashCause::TripleFault if self.is_reset() => {
                "the guest triple-faulted, and this host's KVM \
                 has reset the processor, so that its state is lost; --engine interp keeps it"
                    .to_owned()
            }
            CrashCause::TripleFault => format!("the guest triple-faulted {at}"),
            CrashCause::Internal(error) => {
                format!("this host's KVM cannot continue the guest: {error} ({at})")
            }
            CrashCause::Missing(_) => {
                format!("the interpreter does not implement the instruction {at}")
            }
            CrashCause::FailEntry(reason) => {
                format!("the processor refused to enter the guest (reason {reason:#x}) {at}")
            }
            CrashCause::MemoryFault(address) => {
                format!("KVM cannot reach guest memory at {address:#x} ({at})")
            }
            CrashCause::Unexpected(reason) => {
                format!("KVM exited for reason {reason}, which this monitor never enables, {at}")
            }
            CrashCause::Asleep => format!("the guest halted and nothing can wake it {at}"),
        }
    }
}

/// The location of a vCPU in words.
fn location(rip: u64, instruction: Option<String>) -> String {
    match instruction {
        Some(text) => format!("at {rip:#x}: {text}"),
        None => format!("at {rip:#x}"),
    }
}

/// The instruction at RIP as AT&T text, with its bytes.
pub(crate) fn instruction(state: &CpuState, code: &[u8]) -> Option<String> {
    let mut text = String::new();
    let instruction = decode(state, code)?;
    GasFormatter::new().format(&instruction, &mut text);
    let bytes: Vec<_> = code
        .iter()
        .take(instruction.len())
        .map(|b| format!("{b:02x}"))
        .collect();
    Some(format!("{text} [{}]", bytes.join(" ")))
}

/// The state of a vCPU when the machine was stopped from outside.
#[derive(Debug)]
pub struct FinalState {
    cpu: usize,
    state: Box<CpuState>,
    code: Vec<u8>,
}

impl FinalState {
    /// The state of vCPU `cpu`.
    pub fn new(cpu: usize, state: CpuState, memory: &GuestMemoryMmap) -> Self {
        let linear = state.seg[seg::CS].base.wrapping_add(state.rip);
        let code = page_walk::read_linear(memory, &state, linear, 15);
        Self {
            cpu,
            state: Box::new(state),
            code,
        }
    }

    /// The architectural state.
    pub const fn state(&self) -> &CpuState {
        &self.state
    }
}

impl fmt::Display for FinalState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (cpu, state) = (self.cpu, &self.state);
        let activity = match state.activity {
            Activity::WaitForSipi => return write!(f, "cpu {cpu}: waits for a start-up IPI"),
            Activity::Halted => "halted before",
            _ => "ran",
        };
        let at = location(state.rip, instruction(state, &self.code));
        writeln!(f, "cpu {cpu}: {activity} {at}")?;
        RegisterDump(state).fmt(f)
    }
}

/// The instruction at RIP.
pub(crate) fn decode(state: &CpuState, code: &[u8]) -> Option<Instruction> {
    let cs = state.seg[seg::CS];
    let long = state.is_long_mode() && cs.long();
    let bits = match (long, cs.default_big()) {
        (true, _) => 64,
        (false, true) => 32,
        (false, false) => 16,
    };
    let mut decoder = Decoder::with_ip(bits, code, state.rip, DecoderOptions::NONE);
    let instruction = decoder.decode();
    (!instruction.is_invalid()).then_some(instruction)
}

impl fmt::Display for Crash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "cpu {}: {}", self.cpu, self.summary())?;
        if matches!(self.cause, CrashCause::TripleFault) {
            for line in &self.chain {
                writeln!(f, "  {line}")?;
            }
        }
        RegisterDump(&self.state).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use hindsight_regs::cr::Efer;

    use super::*;
    use crate::kvm::exit::InternalError;

    #[test]
    fn internal_error_names_the_instruction() {
        let error = InternalError {
            suberror: 1,
            bytes: vec![0x0f, 0x01, 0xf9, 0x90],
        };
        let mut state = CpuState::reset();
        state.efer = Efer::LMA.bits();
        state.seg[seg::CS].access |= 1 << 13;
        let memory =
            crate::memory::allocate(&[(vm_memory::GuestAddress(0), 0x10_0000)], false).unwrap();
        let crash = Crash::new(0, CrashCause::Internal(error), state, &memory);
        let text = crash.to_string();
        assert!(text.contains("rdtscp [0f 01 f9]"), "{text}");
    }

    #[test]
    fn triple_fault_after_which_kvm_reset_the_vcpu_names_no_address() {
        let memory =
            crate::memory::allocate(&[(vm_memory::GuestAddress(0), 0x10_0000)], false).unwrap();
        let mut state = CpuState::reset();
        let crash = Crash::new(0, CrashCause::TripleFault, state.clone(), &memory);
        assert!(crash.summary().contains("its state is lost"));
        state.idtr.limit = 0;
        let crash = Crash::new(0, CrashCause::TripleFault, state, &memory);
        assert!(crash.summary().contains("at 0xfff0"));
    }
}
