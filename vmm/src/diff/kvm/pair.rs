//! The machine in the interpreter and the one in KVM, which execute the same instructions.

use std::mem;

use hindsight_cpu::state::CpuState;
use iced_x86::{FlowControl, Instruction};

use super::compare::{self, CompareDepth};
use super::error::{KvmDiffError, NotComparable};
use super::follow_action::{FollowAction, StepEvents};
use super::follower::{Follower, KvmStepEnd};
use crate::deterministic::{DeterministicMachine, RunStop};
use crate::diff::difference::{Difference, MAX_LISTED};
use crate::diff::divergence::{
    DivergedMachine, Divergence, ExecutedInstruction, code_at_rip, linear_rip,
};
use crate::kvm::vcpu::GuestDebug;
use crate::state::{PAGE, Snapshot};
use crate::vcpu::crash;

/// How much was compared with KVM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvmDiffProgress {
    /// The instruction count that the comparison has reached.
    pub icount: u64,
    /// Instructions that KVM executed as well.
    pub executed: u64,
    /// Instructions whose results were copied to KVM.
    pub copied: u64,
}

/// A branch that KVM took: the linear addresses of the instruction and of its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvmBranch {
    /// The branch instruction.
    pub from: u64,
    /// The branch's target.
    pub to: u64,
}

/// Why [`EnginePair::run_to`] returned.
#[derive(Debug)]
pub(super) enum StrideEnd {
    /// The run reached the instruction count, and what was compared is the same.
    Reached,
    /// The run is over.
    RunEnded,
    /// Something differs after the last instruction.
    Different(FoundDifference),
}

/// What differs, and the instruction that made the difference if it is known.
#[derive(Debug)]
pub(super) struct FoundDifference {
    pub step: Option<Box<InterpStep>>,
    pub differences: Vec<Difference>,
}

/// One instruction that the interpreter executed.
#[derive(Debug)]
pub(super) struct InterpStep {
    before: CpuState,
    after: CpuState,
    code: Vec<u8>,
    instruction: Option<Instruction>,
    events: StepEvents,
}

impl InterpStep {
    /// The branch that the instruction took, if KVM's state after it is `kvm_state`.
    fn branch_taken(&self, kvm_state: &CpuState) -> Option<KvmBranch> {
        let instruction = self.instruction?;
        let next = self.before.rip.wrapping_add(instruction.len() as u64);
        let taken = match instruction.flow_control() {
            FlowControl::Next => false,
            FlowControl::ConditionalBranch => kvm_state.rip != next,
            _ => true,
        };
        taken.then(|| KvmBranch {
            from: linear_rip(&self.before),
            to: linear_rip(kvm_state),
        })
    }
}

/// The interpreter's machine and the one in KVM that follows it.
pub(super) struct EnginePair {
    leader: DeterministicMachine,
    follower: Follower,
    /// Snapshot of the leader at the last point where both machines were equal.
    base: Snapshot,
    compared: KvmDiffProgress,
    /// The branches that KVM took since the last [`Self::take_branches`].
    branches: Vec<KvmBranch>,
}

impl EnginePair {
    pub fn new(mut leader: DeterministicMachine) -> Result<Self, KvmDiffError> {
        if leader.retired().len() != 1 {
            return Err(NotComparable::SeveralVcpus.into());
        }
        let follower = Follower::new(&leader)?;
        let base = leader.save()?;
        let compared = KvmDiffProgress {
            icount: leader.icount(),
            ..KvmDiffProgress::default()
        };
        let mut pair = Self {
            leader,
            follower,
            base,
            compared,
            branches: Vec::new(),
        };
        pair.restore_base()?;
        Ok(pair)
    }

    pub const fn compared(&self) -> KvmDiffProgress {
        self.compared
    }

    /// Returns the branches that KVM took since the last call.
    pub fn take_branches(&mut self) -> Vec<KvmBranch> {
        mem::take(&mut self.branches)
    }

    fn interp_state(&mut self) -> CpuState {
        self.leader.state(0).unwrap_or_else(CpuState::reset)
    }

    /// Sets both machines to the base.
    fn restore_base(&mut self) -> Result<(), KvmDiffError> {
        self.leader.restore(&self.base)?;
        self.follower.copy_memory(&self.base.memory)?;
        let state = self.interp_state();
        self.follower.load(&state)
    }

    /// Executes in both engines until instruction `end`, or until a register differs.
    ///
    /// `compare_memory`: everything is compared after each instruction.
    pub fn run_to(&mut self, end: u64, compare_memory: bool) -> Result<StrideEnd, KvmDiffError> {
        while self.leader.icount() < end {
            let icount = self.leader.icount();
            let Some(step) = self.step_interp(icount)? else {
                return Ok(StrideEnd::RunEnded);
            };
            let mut differences = self.follow(&step, icount)?;
            if compare_memory && differences.is_empty() {
                differences = self.compare_all()?;
            }
            if !differences.is_empty() {
                let step = Some(Box::new(step));
                return Ok(StrideEnd::Different(FoundDifference { step, differences }));
            }
            self.compared.icount = self.leader.icount();
        }
        Ok(StrideEnd::Reached)
    }

    /// Executes the instruction at `icount` in the interpreter. `None`: it ended the run; the
    /// machine is still before it.
    fn step_interp(&mut self, icount: u64) -> Result<Option<InterpStep>, KvmDiffError> {
        let before = self.interp_state();
        let delivered_before = self.leader.delivered();
        // The instruction may change its own bytes.
        let code = code_at_rip(&self.leader.board().ram.map, &before);
        if self.leader.run_to(icount + 1) != RunStop::Reached {
            self.leader.restore(&self.base)?;
            self.leader.run_to(icount);
            return Ok(None);
        }
        let delivered = self.leader.delivered();
        Ok(Some(InterpStep {
            after: self.interp_state(),
            instruction: crash::decode(&before, &code),
            before,
            code,
            events: StepEvents {
                interrupts: delivered.0 != delivered_before.0,
                exceptions: delivered.1 != delivered_before.1,
            },
        }))
    }

    /// Executes in KVM the instruction that the interpreter has executed at `icount`, or copies its
    /// results. Returns the registers that differ.
    fn follow(&mut self, step: &InterpStep, icount: u64) -> Result<Vec<Difference>, KvmDiffError> {
        let InterpStep {
            before,
            after,
            instruction,
            events,
            ..
        } = step;
        let kvm = self.follower.abilities;
        let stop = match FollowAction::of(kvm, before, after, instruction.as_ref(), *events) {
            action @ (FollowAction::CopyRegisters | FollowAction::CopyMemory) => {
                // The copy would hide what differed before.
                let kvm_state = self.follower.state()?;
                let found = compare::registers(before, kvm_state, CompareDepth::All);
                if !found.is_empty() {
                    return Ok(found);
                }
                if action == FollowAction::CopyMemory {
                    return self.copy_step(icount);
                }
                self.compared.copied += 1;
                self.follower.load(after)?;
                return Ok(Vec::new());
            }
            FollowAction::Step => GuestDebug::STEP,
            FollowAction::RunToBreakpoint => GuestDebug::execute_breakpoint(linear_rip(after)),
        };
        match self.follower.execute(&stop, before.rip, after.rip)? {
            KvmStepEnd::NeedsHost => {
                let found = compare::vector_registers(&before.xsave, &self.follower.vectors()?);
                if !found.is_empty() {
                    return Ok(found);
                }
                self.copy_step(icount)
            }
            KvmStepEnd::Failed(reason) => {
                let executed = "the instruction was executed".to_owned();
                Ok(vec![Difference {
                    name: "end".to_owned(),
                    values: [executed, reason],
                }])
            }
            KvmStepEnd::Executed => {
                self.compared.executed += 1;
                self.compare_step(step)
            }
        }
    }

    /// Compares general, segment and control registers after an instruction that both executed.
    fn compare_step(&mut self, step: &InterpStep) -> Result<Vec<Difference>, KvmDiffError> {
        let undefined = step.instruction.as_ref();
        let undefined = undefined.map_or(0, compare::undefined_flags);
        let interp_flags = step.after.rflags & undefined;
        let kvm_state = self.follower.regs_at_exit();
        let depth = CompareDepth::Registers { undefined };
        let found = compare::registers(&step.after, kvm_state, depth);
        self.branches.extend(step.branch_taken(kvm_state));
        if found.is_empty() && kvm_state.rflags & undefined != interp_flags {
            let rflags = kvm_state.rflags & !undefined | interp_flags;
            self.follower.set_rflags(rflags)?;
        }
        Ok(found)
    }

    /// Copies registers and memory after the instruction at `icount` to KVM.
    ///
    /// The copy would hide what differed in memory before, so the interpreter returns to the
    /// instruction, and memory is compared there.
    fn copy_step(&mut self, icount: u64) -> Result<Vec<Difference>, KvmDiffError> {
        self.compared.copied += 1;
        self.leader.restore(&self.base)?;
        self.leader.run_to(icount);
        let before = self.leader.save()?;
        let found = self.compare_memory(&before)?;
        if !found.is_empty() {
            return Ok(found);
        }
        self.leader.run_to(icount + 1);
        self.base = self.leader.save()?;
        let changed = self.base.memory.differing(&before.memory);
        self.follower.copy_pages(&self.base.memory, changed)?;
        let state = self.interp_state();
        self.follower.load(&state)?;
        Ok(Vec::new())
    }

    /// Compares all registers, and the pages that were written since the base.
    ///
    /// If all are the same, the current state becomes the base.
    pub fn compare_all(&mut self) -> Result<Vec<Difference>, KvmDiffError> {
        let state = self.interp_state();
        let mut found = compare::registers(&state, self.follower.state()?, CompareDepth::All);
        let current = self.leader.save()?;
        found.extend(self.compare_memory(&current)?);
        if found.is_empty() {
            self.base = current;
        }
        Ok(found)
    }

    /// Compares the pages that the interpreter wrote between the base and `current`.
    fn compare_memory(&self, current: &Snapshot) -> Result<Vec<Difference>, KvmDiffError> {
        let mut found = Vec::new();
        for gpa in current.memory.differing(&self.base.memory) {
            let interp_page = current.memory.get(gpa).unwrap_or(&[0; PAGE]);
            found.extend(compare::page(gpa, interp_page, &self.follower.page(gpa)?));
        }
        Ok(found)
    }

    /// Finds the first difference between the base and `end`, where `found` is known to differ.
    ///
    /// Registers may differ because memory differed long before. `at_start` is how much had been
    /// compared at the base.
    pub fn find_first(
        mut self,
        at_start: KvmDiffProgress,
        end: u64,
        found: FoundDifference,
    ) -> Result<(KvmDiffProgress, Divergence), KvmDiffError> {
        let found_at = self.leader.icount();
        self.compared = KvmDiffProgress {
            icount: self.base.icount(),
            ..at_start
        };
        self.restore_base()?;
        let found = match self.run_to(end, true)? {
            StrideEnd::Different(first) => first,
            // KVM did not repeat the difference: report the one that was found first.
            StrideEnd::Reached | StrideEnd::RunEnded => found,
        };
        let icount = match &found.step {
            Some(_) => self.leader.icount(),
            None => found_at,
        };
        let diverged = |state, branches| DivergedMachine {
            ended: false,
            state,
            branches,
        };
        let interp = diverged(self.interp_state(), self.leader.last_branches(0));
        let kvm = diverged(self.follower.state()?.clone(), Vec::new());
        let instruction = found.step;
        let mut differences = found.differences;
        let truncated = differences.len() > MAX_LISTED;
        differences.truncate(MAX_LISTED);
        let divergence = Divergence {
            icount,
            instruction: instruction
                .map(|step| ExecutedInstruction::new(0, step.before, &step.code)),
            truncated,
            differences,
            machines: [interp, kvm],
            memory_ignored: false,
        };
        Ok((self.compared, divergence))
    }
}

#[cfg(test)]
mod tests;
