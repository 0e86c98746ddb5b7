//! Where two machines diverge, and how that is printed.

use std::fmt;

use hindsight_cpu::branch::Branch;
use hindsight_cpu::register_dump::RegisterDump;
use hindsight_cpu::state::{CpuState, seg};
use vm_memory::GuestMemoryMmap;

use super::difference::Difference;
use crate::memory::page_walk;
use crate::vcpu::crash;

/// The longest instruction, in bytes. SDM Vol. 2A, "Instruction Prefixes".
const MAX_INSTRUCTION_LEN: usize = 15;

/// Where two runs diverge.
#[derive(Debug)]
pub struct Divergence {
    /// The first instruction count at which they differ; 0: from the start.
    pub icount: u64,
    /// The instruction that made the difference, unless it was there from the start.
    pub instruction: Option<ExecutedInstruction>,
    /// The values that differ.
    pub differences: Vec<Difference>,
    /// More values differ than [`Self::differences`] lists.
    pub truncated: bool,
    /// Both machines at that instruction count.
    pub machines: [DivergedMachine; 2],
    /// Memory differed from the start, and was not compared.
    pub memory_ignored: bool,
}

impl Divergence {
    /// Makes machine a of machine b, and b of a.
    pub fn swap(&mut self) {
        self.machines.swap(0, 1);
        for difference in &mut self.differences {
            difference.values.swap(0, 1);
        }
    }
}

/// The last instruction before which both machines were the same.
#[derive(Debug)]
pub struct ExecutedInstruction {
    /// The vCPU that executed it.
    pub cpu: usize,
    /// The vCPU's state before it.
    pub before: CpuState,
    /// The instruction, disassembled, with its bytes.
    pub text: String,
}

impl ExecutedInstruction {
    /// Disassembles the instruction that begins with `code`.
    pub(super) fn new(cpu: usize, before: CpuState, code: &[u8]) -> Self {
        let text = crash::instruction(&before, code);
        Self {
            cpu,
            before,
            text: text.unwrap_or_else(|| "no instruction".to_owned()),
        }
    }
}

/// The linear address of the instruction at RIP.
pub(super) const fn linear_rip(state: &CpuState) -> u64 {
    state.seg[seg::CS].base.wrapping_add(state.rip)
}

/// The bytes at RIP, as many as an instruction can have.
pub(super) fn code_at_rip(memory: &GuestMemoryMmap, state: &CpuState) -> Vec<u8> {
    page_walk::read_linear(memory, state, linear_rip(state), MAX_INSTRUCTION_LEN)
}

/// One of two machines where they diverge.
#[derive(Debug)]
pub struct DivergedMachine {
    /// The run ended there.
    pub ended: bool,
    /// The vCPU that executed the instruction.
    pub state: CpuState,
    /// The last branches of that vCPU, the oldest first.
    pub branches: Vec<Branch>,
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.instruction {
            None => writeln!(f, "the machines differ before the first instruction")?,
            Some(ExecutedInstruction { cpu, before, text }) => {
                let (icount, rip) = (self.icount, before.rip);
                writeln!(
                    f,
                    "the runs diverge at instruction {icount}: cpu {cpu} at {rip:#x}: {text}"
                )?;
            }
        }
        if self.memory_ignored {
            writeln!(f, "(memory differs from the start and is not compared)")?;
        }
        for Difference { name, values } in &self.differences {
            writeln!(f, "  {name}: a {}, b {}", values[0], values[1])?;
        }
        if self.truncated {
            writeln!(f, "  and more")?;
        }
        for (name, machine) in ["a", "b"].into_iter().zip(&self.machines) {
            let ended = if machine.ended {
                ", where the run ended"
            } else {
                ""
            };
            writeln!(f, "{name} after it{ended}:")?;
            write!(f, "{}", RegisterDump(&machine.state))?;
            writeln!(f, "{name}'s last branches, the oldest first:")?;
            for Branch {
                from, to, class, ..
            } in &machine.branches
            {
                writeln!(f, "  {from:#x} -> {to:#x} {class:?}")?;
            }
        }
        Ok(())
    }
}
