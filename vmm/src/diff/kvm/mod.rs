//! The divergence finder between the engines: a deterministic run in the interpreter, and each of
//! its instructions in KVM as well.
//!
//! The interpreter leads. KVM has registers and memory of its own and executes the same
//! instructions one by one; what comes from devices, from the models and by interrupts it takes over
//! ([`plan`]). Registers are compared after each instruction, memory and the vector registers every
//! so many; where those differ, that stretch runs once more with a full look after each instruction.

mod compare;
mod follower;
mod plan;

use std::io;

use hindsight_cpu::state::{CpuState, seg};
use iced_x86::{FlowControl, Instruction};
use thiserror::Error;

use crate::deterministic::{DeterministicMachine, RunStop};
use crate::diff::{Divergence, Executed, Side};
use crate::kvm::KvmError;
use crate::kvm::vcpu::GuestDebug;
use crate::memory::RamError;
use crate::memory::page_walk;
use crate::probe::ProbeError;
use crate::state::{RestoreError, Snapshot};
use crate::vcpu::crash;
use compare::{Look, differences};
use follower::Follower;
use plan::{Events, Plan};

/// Why the engines could not be compared.
#[derive(Debug, Error)]
pub enum KvmDiffError {
    /// KVM refused.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// KVM refused the guest's state: it lacks a feature that the guest uses, as a rule.
    #[error("this KVM does not take the guest's state: CR0 {cr0:#x}, CR4 {cr4:#x}, EFER {efer:#x}")]
    State {
        /// CR0.
        cr0: u64,
        /// CR4.
        cr4: u64,
        /// IA32_EFER.
        efer: u64,
        /// What KVM answered.
        #[source]
        source: KvmError,
    },
    /// What this KVM does could not be measured.
    #[error(transparent)]
    Probe(#[from] ProbeError),
    /// No second machine.
    #[error(transparent)]
    Memory(#[from] RamError),
    /// The interpreter's machine could not be saved or set back.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// The machine is not one that can be compared.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// Memory cannot be read or written, or there is no timer: a flaw of the host.
    #[error("the machine in KVM cannot be reached")]
    Io(#[source] io::Error),
}

impl From<io::Error> for KvmDiffError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// What cannot be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Refused {
    /// Which instruction is next depends on more than one.
    #[error("comparing with KVM takes a guest of one processor")]
    Processors,
    /// More than the address space has.
    #[error("the guest's memory is too large to have twice")]
    Memory,
}

/// How much was compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compared {
    /// Where the comparison is: instructions since the start of the guest.
    pub place: u64,
    /// Instructions that KVM executed as well.
    pub native: u64,
    /// Instructions whose results it took over.
    pub taken: u64,
}

/// A branch that KVM took: the linear addresses of the instruction and of the next one executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvmBranch {
    /// The branch instruction.
    pub from: u64,
    /// Its target.
    pub to: u64,
}

/// What came of a comparison with KVM.
#[derive(Debug)]
pub enum KvmVerdict {
    /// No difference.
    Same {
        /// How much was compared.
        compared: Compared,
        /// The run ended there.
        ended: bool,
    },
    /// The first difference; the interpreter is side 0, KVM side 1.
    Different {
        /// How much was the same.
        compared: Compared,
        /// Where, and what.
        divergence: Box<Divergence>,
    },
}

/// Compares the run of `leader`, from where it is, with KVM, up to instruction `limit`, with a full look
/// every `stride` instructions. After each such stretch `progress` gets how far it is, and the branches
/// of the stretch.
///
/// # Errors
///
/// When there is no KVM or it refuses the machine, or memory cannot be reached.
pub fn compare_with_kvm(
    leader: DeterministicMachine,
    limit: u64,
    stride: u64,
    progress: &mut dyn FnMut(Compared, &[KvmBranch]),
) -> Result<KvmVerdict, KvmDiffError> {
    let mut pair = Pair::new(leader)?;
    loop {
        let before = pair.compared;
        let end = limit.min(pair.leader.icount().saturating_add(stride.max(1)));
        let stretch = pair.stretch(end, false)?;
        let ended = matches!(stretch, Stretch::Ended);
        let found = match stretch {
            Stretch::Different(found) => found,
            Stretch::Reached | Stretch::Ended => Found {
                step: None,
                differences: pair.look()?,
            },
        };
        if !found.differences.is_empty() {
            // Registers that differ may do so for what memory held before.
            return pair.find(before, end, found);
        }
        let compared = pair.compared;
        progress(compared, &pair.branches);
        pair.branches.clear();
        if ended || end == limit {
            return Ok(KvmVerdict::Same { compared, ended });
        }
    }
}

/// How a stretch of the run went.
#[derive(Debug)]
enum Stretch {
    /// To its end, without a difference in what was looked at.
    Reached,
    /// The run is over.
    Ended,
    /// Something differs after the last step.
    Different(Found),
}

/// A difference, and the step that made it if it is known.
#[derive(Debug)]
struct Found {
    step: Option<Box<Step>>,
    differences: Different,
}

/// One step of the interpreter.
#[derive(Debug)]
struct Step {
    before: CpuState,
    after: CpuState,
    code: Vec<u8>,
    instruction: Option<Instruction>,
}

/// What differs: the name, the interpreter's value, KVM's.
type Different = Vec<(String, String, String)>;

/// Both machines.
struct Pair {
    leader: DeterministicMachine,
    follower: Follower,
    /// The last place at which all was the same.
    base: Snapshot,
    compared: Compared,
    /// What KVM's steps took, since somebody last asked.
    branches: Vec<KvmBranch>,
}

impl Pair {
    fn new(mut leader: DeterministicMachine) -> Result<Self, KvmDiffError> {
        if leader.retired().len() != 1 {
            return Err(Refused::Processors.into());
        }
        let follower = Follower::new(&leader)?;
        let base = leader.save()?;
        let place = leader.icount();
        let mut pair = Self {
            leader,
            follower,
            base,
            compared: Compared {
                place,
                ..Compared::default()
            },
            branches: Vec::new(),
        };
        pair.start_over()?;
        Ok(pair)
    }

    fn state(&mut self) -> CpuState {
        self.leader.state(0).unwrap_or_else(CpuState::reset)
    }

    /// Sets both machines to the base.
    fn start_over(&mut self) -> Result<(), KvmDiffError> {
        self.leader.restore(&self.base)?;
        self.follower.take_all(&self.base.memory)?;
        let state = self.state();
        self.follower.load(&state)
    }

    /// Runs both until the interpreter is at `end`; `closely`: with a full look after each step.
    fn stretch(&mut self, end: u64, closely: bool) -> Result<Stretch, KvmDiffError> {
        while self.leader.icount() < end {
            let before = self.state();
            let events = self.leader.delivered();
            let place = self.leader.icount();
            // It may change its own bytes.
            let linear = before.seg[seg::CS].base.wrapping_add(before.rip);
            let memory = &self.leader.board().ram.map;
            let code = page_walk::read_linear(memory, &before, linear, 15);
            let instruction = crash::decode(&before, &code);
            let stop = self.leader.run_to(place + 1);
            if stop != RunStop::Reached {
                // The last instruction ended the run: both stay before it.
                self.leader.restore(&self.base)?;
                self.leader.run_to(place);
                return Ok(Stretch::Ended);
            }
            let after = self.state();
            let now = self.leader.delivered();
            let events = Events {
                interrupts: now.0 != events.0,
                exceptions: now.1 != events.1,
            };
            let step = Step {
                before,
                after,
                code,
                instruction,
            };
            let mut differences = self.step(&step, events, place)?;
            if closely && differences.is_empty() {
                differences = self.look()?;
            }
            if !differences.is_empty() {
                let step = Some(Box::new(step));
                return Ok(Stretch::Different(Found { step, differences }));
            }
            self.compared.place = self.leader.icount();
        }
        Ok(Stretch::Reached)
    }

    /// Has KVM do a step that the interpreter did. Gives what differs in the registers.
    fn step(&mut self, step: &Step, events: Events, place: u64) -> Result<Different, KvmDiffError> {
        let Step {
            before,
            after,
            instruction,
            ..
        } = step;
        let abilities = self.follower.abilities;
        let plan = plan::plan(abilities, before, after, instruction.as_ref(), events);
        let stop = match plan {
            Plan::Registers | Plan::Memory => {
                // What is taken over hides what differed before.
                let found = differences(before, self.follower.state()?, Look::All);
                if !found.is_empty() {
                    return Ok(found);
                }
                if plan == Plan::Memory {
                    return self.take_over(place);
                }
                self.compared.taken += 1;
                self.follower.load(after)?;
                return Ok(Vec::new());
            }
            Plan::Step => GuestDebug::STEP,
            Plan::Until(rip) => {
                GuestDebug::execute_breakpoint(after.seg[seg::CS].base.wrapping_add(rip))
            }
        };
        match self.follower.execute(&stop, before.rip, after.rip)? {
            follower::Executed::Outside => {
                let found = compare::vectors(&before.xsave, &self.follower.vectors()?);
                if !found.is_empty() {
                    return Ok(found);
                }
                return self.take_over(place);
            }
            follower::Executed::Failed(how) => {
                let ours = "the instruction was executed".to_owned();
                return Ok(vec![("end".to_owned(), ours, how)]);
            }
            follower::Executed::Done => {}
        }
        self.compared.native += 1;
        let undefined = instruction.as_ref().map_or(0, compare::undefined_flags);
        let theirs = self.follower.glance();
        let found = differences(after, theirs, Look::Glance { undefined });
        if found.is_empty() && theirs.rflags & undefined != after.rflags & undefined {
            let flags = theirs.rflags & !undefined | after.rflags & undefined;
            self.follower.set_flags(flags)?;
        }
        let next = before
            .rip
            .wrapping_add(instruction.map_or(0, |i| i.len() as u64));
        let theirs = self.follower.glance();
        let taken = instruction.is_some_and(|instruction| match instruction.flow_control() {
            FlowControl::Next => false,
            FlowControl::ConditionalBranch => theirs.rip != next,
            _ => true,
        });
        if taken {
            let from = before.seg[seg::CS].base.wrapping_add(before.rip);
            let to = theirs.seg[seg::CS].base.wrapping_add(theirs.rip);
            self.branches.push(KvmBranch { from, to });
        }
        Ok(found)
    }

    /// Has KVM take over what the step from `place` did, memory too. What differed before the step must
    /// not be lost with that, so the interpreter goes back for a full look there.
    fn take_over(&mut self, place: u64) -> Result<Different, KvmDiffError> {
        self.compared.taken += 1;
        self.leader.restore(&self.base)?;
        self.leader.run_to(place);
        let before = self.leader.save()?;
        let found = self.memory_differences(&before)?;
        if !found.is_empty() {
            return Ok(found);
        }
        self.leader.run_to(place + 1);
        self.base = self.leader.save()?;
        let changed = self.base.memory.differing(&before.memory);
        self.follower.take(&self.base.memory, changed)?;
        let state = self.state();
        self.follower.load(&state)?;
        Ok(Vec::new())
    }

    /// Compares all registers, and the pages that were written since the base. Where all is the same, the
    /// present is the new base.
    fn look(&mut self) -> Result<Different, KvmDiffError> {
        let ours = self.state();
        let mut found = differences(&ours, self.follower.state()?, Look::All);
        let now = self.leader.save()?;
        found.extend(self.memory_differences(&now)?);
        if found.is_empty() {
            self.base = now;
        }
        Ok(found)
    }

    fn memory_differences(&self, now: &Snapshot) -> Result<Different, KvmDiffError> {
        let mut found = Vec::new();
        for gpa in now.memory.differing(&self.base.memory) {
            let ours = now.memory.get(gpa).unwrap_or(&[0; crate::state::PAGE]);
            compare::page(gpa, ours, &self.follower.page(gpa)?, &mut found);
        }
        Ok(found)
    }

    /// The first difference between the base and `end`, where `found` was seen.
    fn find(
        mut self,
        before: Compared,
        end: u64,
        found: Found,
    ) -> Result<KvmVerdict, KvmDiffError> {
        let seen = self.leader.icount();
        let first = self.base.icount();
        self.compared = Compared {
            place: first,
            ..before
        };
        self.start_over()?;
        let found = match self.stretch(end, true)? {
            Stretch::Different(again) => again,
            // It does not happen again in the same way: tell what was seen.
            Stretch::Reached | Stretch::Ended => found,
        };
        let place = match &found.step {
            Some(_) => self.leader.icount(),
            None => seen,
        };
        let ours = self.state();
        let theirs = self.follower.state()?.clone();
        let branches = self.leader.last_branches(0);
        let instruction = found.step.map(|step| Executed {
            cpu: 0,
            text: crash::instruction(&step.before, &step.code)
                .unwrap_or_else(|| "no instruction".to_owned()),
            before: step.before,
        });
        let side = |state, branches| Side {
            ended: false,
            state,
            branches,
        };
        let divergence = Divergence {
            place,
            instruction,
            more: found.differences.len() > crate::diff::runs::LISTED,
            differences: found
                .differences
                .into_iter()
                .take(super::runs::LISTED)
                .collect(),
            sides: [side(ours, branches), side(theirs, Vec::new())],
            memory_ignored: false,
        };
        Ok(KvmVerdict::Different {
            compared: self.compared,
            divergence: Box::new(divergence),
        })
    }
}

#[cfg(test)]
mod tests {
    use hindsight_cpu::cpuid::CpuModel;

    use super::*;
    use crate::boot::LoadRequest;
    use crate::harness::BUILTIN_PAYLOADS;
    use crate::machine::{Config, Prepared};
    use crate::platform::Sinks;
    use crate::vcpu::engine::policy::Engine;

    fn leader(cpus: usize) -> DeterministicMachine {
        let payload = BUILTIN_PAYLOADS
            .iter()
            .find(|(name, _)| *name == "workload");
        let plan = LoadRequest {
            image: payload.unwrap().1,
            ..LoadRequest::default()
        };
        let config = Config {
            memory: 16 << 20,
            huge_pages: false,
            cpus,
            cpu: CpuModel::PortableV1.into(),
            engine: Engine::Interp,
        };
        let sinks = Sinks {
            serial: Box::new(io::sink()),
            debugcon: Box::new(io::sink()),
            btm: None,
        };
        let prepared = Prepared::new(&config, &plan).unwrap().deterministic(0);
        prepared
            .build(None, sinks)
            .unwrap()
            .into_deterministic()
            .unwrap()
    }

    /// `None`: there is no KVM here, and that was said.
    fn pair() -> Option<Pair> {
        match Pair::new(leader(1)) {
            Ok(pair) => Some(pair),
            Err(KvmDiffError::Kvm(KvmError::Missing | KvmError::NotPermitted)) => None,
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn engines_agree_about_a_payload() {
        let Some(pair) = pair() else { return };
        let mut told = 0;
        let mut branches = Vec::new();
        let verdict = compare_with_kvm(pair.leader, 3000, 100, &mut |_, taken| {
            told += 1;
            branches.extend(taken.iter().map(|branch| (branch.from, branch.to)));
        });
        let verdict = verdict.unwrap();
        let KvmVerdict::Same { compared, ended } = verdict else {
            panic!("{verdict:?}");
        };
        assert_eq!((compared.place, ended), (3000, false));
        assert!(compared.native > 1000, "{compared:?}");
        assert_eq!(told, 30);
        let mut alone = leader(1);
        assert_eq!(alone.run_to(3000), RunStop::Reached);
        let last = alone.last_branches(0);
        let last: Vec<_> = last.iter().map(|branch| (branch.from, branch.to)).collect();
        assert!(!last.is_empty());
        assert!(branches.ends_with(&last), "{last:x?} {branches:x?}");
    }

    #[test]
    fn register_that_differs_is_found_at_once() {
        let Some(mut pair) = pair() else { return };
        assert!(matches!(pair.stretch(10, false), Ok(Stretch::Reached)));
        let state = pair.state();
        let mut other = state.clone();
        other.gpr[15] ^= 1 << 40;
        pair.follower.load(&other).unwrap();
        let Ok(Stretch::Different(found)) = pair.stretch(2000, false) else {
            panic!("nothing was found");
        };
        assert!(found.step.is_some());
        assert_eq!(found.differences.len(), 1, "{:?}", found.differences);
        assert_eq!(found.differences[0].0, "gpr.r15");
    }

    #[test]
    fn vector_register_that_differs_is_found_before_it_is_taken_over() {
        let Some(mut pair) = pair() else { return };
        let mut other = pair.state();
        // XMM0, and XSTATE_BV, which says that it is in use.
        other.xsave.0[160] ^= 1;
        other.xsave.0[512] |= 3;
        pair.follower.load(&other).unwrap();
        let Ok(Stretch::Different(found)) = pair.stretch(100_000, false) else {
            panic!("nothing was found");
        };
        assert!(found.step.is_some());
        assert_eq!(found.differences.len(), 1, "{:?}", found.differences);
        assert_eq!(pair.compared.taken, 0);
    }

    #[test]
    fn memory_that_differs_is_found_at_a_full_look() {
        let Some(mut pair) = pair() else { return };
        assert!(matches!(pair.stretch(2000, false), Ok(Stretch::Reached)));
        assert_eq!(pair.look().unwrap(), []);
        assert!(matches!(pair.stretch(4000, false), Ok(Stretch::Reached)));
        let now = pair.leader.save().unwrap().memory;
        let written = now.differing(&pair.base.memory);
        let mut page = *now.get(written[0]).unwrap();
        page[8] ^= 2;
        let mut pages = crate::state::Pages::default();
        pages.set(written[0], &page);
        pair.follower.take(&pages, [written[0]]).unwrap();
        let found = pair.look().unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].0, format!("memory {:#x}", written[0] + 8));
    }

    #[test]
    fn more_than_one_processor_is_refused() {
        let refused = Pair::new(leader(2)).err().unwrap();
        assert!(matches!(
            refused,
            KvmDiffError::Refused(Refused::Processors)
        ));
    }
}
