//! Emits the code of a unit.
//!
//! Each guest register is in the host register of the same name, with these exceptions: RSP is the
//! host's, the guest's RSP is in R15, and its R15 is in R9. The guest's R9, R10 and R11 are
//! spilled: they are in the context. R10 and R11 are scratch registers between instructions.
//!
//! The host's flags equal the guest's directly after an instruction that sets them. A TLB lookup
//! destroys them.

mod accesses;
mod alu;
mod atomic;
mod bits;
mod divide;
mod flags;
mod flow;
mod memory;
mod same;
mod vector;
mod x87;

use self::flags::sunk_steps;
use crate::analysis::{
    AccessCounts, BranchKind, GuestBlock, StepKind, UnitAnalysis, UnitSource, UnitStep,
};
use crate::asm::{Assembler, CALL, Host, JMP, Jump32, RCX, Rm, TEMP, jcc};
use crate::layout::{Context, jumps_offset, run_offset, tlb_offset};
use crate::paths::{PathBranch, PathCode};
use crate::unit::UnitAccess;
use crate::vector::VectorLevel;
use iced_x86::{Encoder, Register};
use std::mem::offset_of;

/// Addresses of the data and of the stubs that units call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addresses {
    /// Address of the data.
    pub(crate) data: u64,
    /// The stub that leaves translated code, with the number of the exit in R11.
    pub(crate) leave: u64,
    /// The stub that replaces the linear address in R10 by the host address.
    ///
    /// It takes the number of an exit in R11.
    pub(crate) find: u64,
    /// The stubs that load the guest's vector registers, for each level from SSE on.
    ///
    /// They take the number of an exit in R11.
    pub(crate) load_vectors: [u64; 3],
    pub(crate) load_x87: u64,
    /// The stub that loads the guest's flags.
    ///
    /// It takes the number of an exit in R11.
    pub(crate) load_flags: u64,
    /// Whether the host has BMI2.
    pub(crate) bmi2: bool,
}

/// Where and why a unit is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExitPoint {
    /// Before an instruction that the caller must execute.
    ///
    /// `uncounted` are the accesses that the unit counted for this instruction and those after it
    /// in its block. `path` is the number of the path up to here, if it has branches.
    Instruction {
        block: usize,
        index: usize,
        give_back: u32,
        path: Option<u32>,
        access: Option<UnitAccess>,
        uncounted: AccessCounts,
    },
    /// At an edge that is not linked.
    Edge { edge: usize },
    /// At an edge whose target has more instructions than the budget has left.
    EdgeBudget { edge: usize },
    /// At a direct jump whose target is not in the jump cache.
    Jump { rip: u64 },
    /// At a jump whose target has more instructions than the budget has left.
    ///
    /// The RIP is in the context.
    JumpBudget,
    /// After a branch was recorded for which the caller must process the records.
    ///
    /// If `rip` is `None`, the RIP is in the context.
    Branches { rip: Option<u64>, give_back: u32 },
}

/// An edge in the code of a unit. Offsets are from the start of the unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EdgeCode {
    pub(crate) target_rip: u64,
    /// Offset and length of the stores of the flag values.
    pub(crate) stores: (usize, usize),
    /// Offset after the immediate that is subtracted from the budget.
    pub(crate) charge: usize,
    /// Offset after the jump's displacement.
    pub(crate) jump: usize,
    /// Offset of the code that leaves the unit while the edge is not linked.
    pub(crate) unlinked: usize,
    /// Instructions that the unit charged but does not execute on this edge.
    pub(crate) rest: u32,
}

/// Why a unit must be emitted again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retry {
    /// The host flags after this step must be saved.
    Save(usize),
    /// The unit must end before this step.
    End(usize),
}

/// Out-of-line code, which is emitted after the unit's instructions.
#[derive(Debug)]
enum Late {
    /// Handles a TLB miss.
    Find {
        from: Jump32,
        back: usize,
        exit: u32,
        tags: u64,
    },
    /// Loads the guest's x87 state.
    LoadX87 {
        from: Jump32,
        exit: u32,
        back: usize,
    },
    /// Loads the guest's vector registers.
    LoadVectors { from: Jump32, exit: u32 },
    /// Leaves the unit, after the sunk stores of the first `stores` steps, if any.
    Leave {
        from: Jump32,
        exit: u32,
        stores: Option<usize>,
    },
    /// Leaves the unit at an edge that is not linked.
    Unlinked {
        from: Jump32,
        exit: u32,
        edge: usize,
    },
    /// Contains an edge.
    Edge { from: Jump32, edge: UnitEdge },
    /// Leaves the unit because the budget does not cover the target of a jump.
    ///
    /// The instructions that were charged for the target are added back. `entry` is the offset of
    /// the jump cache entry; if it is `None`, the offset is in R11.
    JumpBudget {
        from: Jump32,
        exit: u32,
        entry: Option<u64>,
    },
    /// Leaves the unit after an indirect branch, because the caller must process the records.
    BranchesIndirect { from: Jump32, exit: u32 },
}

/// An exit of a unit, or a branch within it, whose target is known.
#[derive(Clone, Copy, Debug)]
struct UnitEdge {
    target_rip: u64,
    rest: u32,
    /// RIP and kind of the branch to record, if any.
    branch: Option<(u64, BranchKind)>,
    /// Number of branches between the unit's entry and this one.
    branches: usize,
    /// Number of steps before the edge, whose sunk stores it makes.
    before: usize,
}

/// The code of a unit. Offsets are from its start.
#[derive(Debug)]
pub(crate) struct UnitCode {
    pub(crate) code: Vec<u8>,
    /// Entry for units that have loaded the vector registers that this one needs.
    pub(crate) loaded: usize,
    /// Entry for the caller.
    ///
    /// The caller has loaded the vector registers, and has counted the run of the first block.
    pub(crate) entry: usize,
    pub(crate) exits: Vec<ExitPoint>,
    pub(crate) edges: Vec<EdgeCode>,
    /// The branches between the blocks of the unit, if they are recorded, and its paths.
    pub(crate) branches: Vec<PathBranch>,
    pub(crate) paths: Vec<PathCode>,
    pub(crate) sees_flags: bool,
    pub(crate) vectors: VectorLevel,
}

/// Numbers of the first exit, path and edge of a unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FirstNumbers {
    pub(crate) exit: u32,
    pub(crate) path: u32,
    pub(crate) edge: usize,
}

/// Emits the code of a unit.
pub(crate) struct Emitter<'a> {
    asm: Assembler,
    source: &'a UnitSource,
    analysis: &'a UnitAnalysis,
    addresses: Addresses,
    /// Steps after which the host flags are saved for a later step.
    saves: &'a [usize],
    /// For each step, whether its flag values are stored at edges, not after it.
    sunk: Vec<bool>,
    first: FirstNumbers,
    exits: Vec<ExitPoint>,
    edges: Vec<EdgeCode>,
    /// The branches between the blocks so far, if they are recorded.
    branches: Vec<PathBranch>,
    paths: Vec<PathCode>,
    /// Number of the path of the exits after the last of these branches, if there are any.
    exit_path: Option<u32>,
    late: Vec<Late>,
    encoder: Encoder,
    /// Flags whose value in the host equals the guest's.
    valid: u32,
    /// The step after which the host flags were last saved, and which flags are valid.
    saved: Option<(usize, u32)>,
    /// The guest's x87 state is known to be loaded.
    x87_loaded: bool,
    /// Index of the current step.
    at: usize,
}

impl<'a> Emitter<'a> {
    pub(crate) fn new(
        source: &'a UnitSource,
        analysis: &'a UnitAnalysis,
        addresses: Addresses,
        base: u64,
        first: FirstNumbers,
        saves: &'a [usize],
    ) -> Self {
        Self {
            asm: Assembler::at(base),
            source,
            analysis,
            addresses,
            saves,
            sunk: sunk_steps(analysis),
            first,
            exits: Vec::new(),
            edges: Vec::new(),
            branches: Vec::new(),
            paths: Vec::new(),
            exit_path: None,
            late: Vec::new(),
            encoder: Encoder::new(64),
            valid: 0,
            saved: None,
            x87_loaded: false,
            at: 0,
        }
    }

    /// Emits the unit.
    pub(crate) fn unit(mut self) -> Result<UnitCode, Retry> {
        self.need_vectors();
        let loaded = self.asm.pos();
        self.count_run(0);
        let entry = self.asm.pos();
        self.count_accesses(0);
        let mut block = 0;
        for at in 0..self.analysis.steps.len() {
            let step = self.analysis.steps[at];
            if step.block != block {
                block = step.block;
                self.count_run(block);
                self.count_accesses(block);
            }
            self.at = at;
            if self.source.checks_line(step.block, step.index) {
                self.check_line(&step);
            }
            self.step(&step)?;
        }
        self.at = self.analysis.steps.len();
        self.end();
        while let Some(late) = self.late.pop() {
            self.late(late, entry);
        }
        Ok(UnitCode {
            code: self.asm.code,
            loaded,
            entry,
            exits: self.exits,
            edges: self.edges,
            branches: self.branches,
            paths: self.paths,
            sees_flags: self.analysis.sees_flags,
            vectors: self.analysis.vectors,
        })
    }

    fn step(&mut self, step: &UnitStep) -> Result<(), Retry> {
        match step.kind {
            StepKind::Skip => return Ok(()),
            StepKind::Same => self.same(step)?,
            StepKind::Lea => self.lea(step)?,
            StepKind::Alu(n) => self.arithmetic(step, n)?,
            StepKind::Test => self.test(step)?,
            StepKind::Unseen => self.unseen(step)?,
            StepKind::Step { .. }
            | StepKind::Neg
            | StepKind::Shift(..)
            | StepKind::Product
            | StepKind::Count => self.producer(step)?,
            StepKind::Divide { signed } => self.divide(step, signed)?,
            StepKind::Scan { reverse } => self.scan(step, reverse)?,
            StepKind::Bit => self.bit(step)?,
            StepKind::Atomic => self.atomic(step)?,
            StepKind::Vector => self.vector(step)?,
            StepKind::X87 => self.x87(step)?,
            StepKind::Push => self.push(step)?,
            StepKind::Pop => self.pop(step)?,
            StepKind::Leave => self.leave_frame(),
            StepKind::Jcc(condition) => {
                self.need(step.flags.read)?;
                self.branch(step, |asm, taken| {
                    asm.jump(&jcc(condition ^ u8::from(!taken)))
                });
            }
            StepKind::Loop => {
                self.asm.lea(RCX, RCX, -1);
                self.branch(step, |asm, taken| asm.jump_if_zero(!taken));
            }
            StepKind::JumpIfZero => self.branch(step, Assembler::jump_if_zero),
            StepKind::Jump => self.jump(step),
            StepKind::JumpIndirect => self.jump_indirect(step)?,
            StepKind::Call => self.call(step)?,
            StepKind::CallIndirect => self.call_indirect(step)?,
            StepKind::Return => self.return_near(step)?,
        }
        if step.flags.changed != 0 {
            // Flags that the step may keep stay valid if they were valid before.
            self.valid = (self.valid | step.flags.written) & !step.flags.undefined;
            self.save_flags();
        }
        Ok(())
    }

    /// Emits the end of the unit, unless its last instruction is a branch.
    fn end(&mut self) {
        if let Some((block, index)) = self.analysis.stop {
            let point = self.instruction(block, index, None);
            let exit = self.exit(point);
            self.leave(exit);
            return;
        }
        let Some(last) = self.analysis.steps.last() else {
            return;
        };
        if last.kind.is_conditional()
            || matches!(
                last.kind,
                StepKind::Jump
                    | StepKind::JumpIndirect
                    | StepKind::Call
                    | StepKind::CallIndirect
                    | StepKind::Return
            )
        {
            return;
        }
        self.edge(UnitEdge {
            target_rip: self.source.blocks[last.block].end(),
            rest: 0,
            branch: None,
            branches: self.branches.len(),
            before: self.analysis.steps.len(),
        });
    }

    fn late(&mut self, late: Late, entry: usize) {
        match late {
            Late::Find {
                from,
                back,
                exit,
                tags,
            } => {
                self.asm.here(from);
                self.asm
                    .alu_from(0, 8, crate::asm::ADDR, Rm::Scaled(TEMP, tags));
                self.asm.constant(TEMP, exit.into());
                self.asm.jump_to(CALL, self.addresses.find);
                let jump = self.asm.jump(JMP);
                self.asm.lead(jump, back);
            }
            Late::LoadX87 { from, exit, back } => self.load_x87(from, exit, back),
            Late::LoadVectors { from, exit } => self.load_vectors(from, exit, entry),
            Late::Leave { from, exit, stores } => {
                self.asm.here(from);
                if let Some(before) = stores {
                    self.sunk_stores(before);
                }
                self.leave(exit);
            }
            Late::Unlinked { from, exit, edge } => {
                self.edges[edge].unlinked = self.asm.pos();
                self.asm.here(from);
                self.leave(exit);
            }
            Late::Edge { from, edge } => {
                self.asm.here(from);
                self.edge(edge);
            }
            Late::JumpBudget { from, exit, entry } => {
                self.asm.here(from);
                self.jump_budget(exit, entry);
            }
            Late::BranchesIndirect { from, exit } => {
                self.asm.here(from);
                self.branches_indirect(exit);
            }
        }
    }

    /// Emits a jump that leaves the unit by an exit.
    fn leave(&mut self, exit: u32) {
        self.asm.constant(TEMP, exit.into());
        self.asm.jump_to(JMP, self.addresses.leave);
    }

    /// Emits an increment of a block's run counter.
    fn count_run(&mut self, block: usize) {
        let slot = self.source.blocks[block].run_counter;
        let counter = Rm::Fixed(self.addresses.data + run_offset(slot) as u64);
        self.asm.encode(&[0xff], 8, 0, counter, 0);
        self.valid = 0;
    }

    /// Adds an exit and returns its number.
    fn exit(&mut self, point: ExitPoint) -> u32 {
        self.exits.push(point);
        self.first.exit + u32::try_from(self.exits.len() - 1).unwrap_or(u32::MAX)
    }

    /// Returns the exit before an instruction.
    fn instruction(&mut self, block: usize, index: usize, access: Option<UnitAccess>) -> ExitPoint {
        let uncounted = match self.source.access_format {
            Some(_) => self.source.blocks[block].accesses_from(index),
            None => AccessCounts::default(),
        };
        ExitPoint::Instruction {
            block,
            index,
            give_back: self.rest(block),
            path: self.path_so_far(),
            access,
            uncounted,
        }
    }

    /// Instructions that the unit charged for the blocks after `block`.
    fn rest(&self, block: usize) -> u32 {
        let blocks = &self.source.blocks[..self.analysis.blocks];
        let after = blocks.get(block + 1..).unwrap_or_default();
        after.iter().map(GuestBlock::count).sum()
    }

    /// Returns the field of the context at an offset.
    fn context(&self, offset: usize) -> Rm {
        Rm::Fixed(self.addresses.data + offset as u64)
    }

    fn tlb(&self) -> u64 {
        self.addresses.data + tlb_offset(self.source.rights) as u64
    }

    fn jumps(&self) -> u64 {
        self.addresses.data + jumps_offset(self.source.rights) as u64
    }

    /// Returns the location of a guest's general register.
    fn home(&self, register: Register) -> Rm {
        match register.full_register().number() {
            4 => Rm::Reg(Host(15)),
            15 => Rm::Reg(Host(9)),
            n @ 9..=11 => self.context(offset_of!(Context, spilled) + (n - 9) * 8),
            n => Rm::Reg(Host(u8::try_from(n).unwrap_or(0))),
        }
    }

    /// Fails because the current step cannot be emitted: the unit must end before it.
    fn cannot<T>(&self) -> Result<T, Retry> {
        Err(Retry::End(self.at))
    }
}

/// Returns the encoder's name of a host register.
pub(crate) fn named(host: Host, size: usize) -> Register {
    let n = u32::from(host.0);
    match size {
        8 => Register::RAX + n,
        4 => Register::EAX + n,
        2 => Register::AX + n,
        _ if n < 4 => Register::AL + n,
        _ => Register::SPL + (n - 4),
    }
}
