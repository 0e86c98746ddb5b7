//! Makes the code of a unit.
//!
//! The host's registers hold the guest's, but for RSP, which is the host's: the guest's RSP is in
//! R15, its R15 in R9, and its R9, R10 and R11 are in memory. R10 and R11 are free between
//! instructions. The host's flags are the guest's right after an instruction has set them; looking an
//! address up destroys them.

mod alu;
mod atomic;
mod divide;
mod flags;
mod flow;
mod memory;
mod same;
mod vector;

use crate::analysis::{BranchKind, GuestBlock, StepKind, UnitAnalysis, UnitSource, UnitStep};
use crate::asm::{Assembler, CALL, Host, JMP, Jump32, Rm, TEMP};
use crate::layout::{Context, jumps_offset, run_offset, tlb_offset};
use crate::vector::VectorLevel;
use iced_x86::{Encoder, Register};
use std::mem::offset_of;

/// Fixed addresses that code refers to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addresses {
    /// The data.
    pub(crate) data: u64,
    /// Where code is left, with the number of the exit in R11.
    pub(crate) leave: u64,
    /// What finds the host address for the linear address in R10, with the number of an exit in R11.
    pub(crate) find: u64,
    /// What loads the guest's vector registers up to a level, from the first one, with the number of
    /// an exit in R11.
    pub(crate) load_vectors: [u64; 3],
    /// The host has BMI2.
    pub(crate) bmi2: bool,
}

/// How a unit is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExitPoint {
    /// Before an instruction, which the caller executes: block and index. For an access, how many
    /// bytes it has, and whether it writes.
    Instruction {
        block: usize,
        index: usize,
        give_back: u32,
        access: Option<(u8, bool)>,
    },
    /// By an edge that leads to no unit yet.
    Edge { edge: usize },
    /// By an edge whose unit charges more than is left.
    EdgeBudget { edge: usize },
    /// By a jump to a constant RIP that the jump cache does not have.
    Jump { rip: u64 },
    /// By a jump whose target charges more than is left. The RIP is in the context.
    JumpBudget,
    /// After a recorded branch, because branches must be handled. Without a RIP it is in the context.
    Branches { rip: Option<u64>, give_back: u32 },
}

/// A jump from one unit to another one of the same page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EdgeCode {
    pub(crate) target_rip: u64,
    /// Offset of the stores of the flags, and their length.
    pub(crate) stores: (usize, usize),
    /// Offset behind the immediate that is taken off the budget.
    pub(crate) charge: usize,
    /// Offset behind the distance of the jump.
    pub(crate) jump: usize,
    /// Offset of the code that leaves the unit.
    pub(crate) unlinked: usize,
    /// Instructions that the unit charged but did not execute.
    pub(crate) rest: u32,
}

/// Why a unit must be emitted again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retry {
    /// The flags that a step sets must be saved.
    Save(usize),
    /// The unit must end before a step.
    End(usize),
}

/// Code that is needed rarely; it is placed behind the unit's.
#[derive(Debug)]
enum Late {
    /// The TLB does not have an address.
    Find {
        from: Jump32,
        back: usize,
        exit: u32,
        tags: u64,
    },
    /// The guest's vector registers are not loaded.
    LoadVectors { from: Jump32, exit: u32 },
    /// An exit; before it, the flags are stored that edges before this step store.
    Leave {
        from: Jump32,
        exit: u32,
        stores: Option<usize>,
    },
    /// Where an edge leads that is not linked.
    Unlinked {
        from: Jump32,
        exit: u32,
        edge: usize,
    },
    /// An edge.
    Edge { from: Jump32, edge: UnitEdge },
    /// The target of a jump charges too much: gives that back. Without an offset of the jump cache's
    /// entry, it is in R11.
    JumpBudget {
        from: Jump32,
        exit: u32,
        entry: Option<u64>,
    },
    /// The branch buffer is full behind an indirect branch.
    BranchesIndirect { from: Jump32, exit: u32 },
}

/// A way out of a unit whose target is known.
#[derive(Clone, Copy, Debug)]
struct UnitEdge {
    target_rip: u64,
    rest: u32,
    /// The branch that is taken: its RIP and its kind.
    branch: Option<(u64, BranchKind)>,
    /// Steps before it count.
    before: usize,
}

/// A unit's code.
#[derive(Debug)]
pub(crate) struct UnitCode {
    pub(crate) code: Vec<u8>,
    /// Offset at which units enter that have loaded the vector registers that this one needs.
    pub(crate) loaded: usize,
    /// Offset at which the caller enters, which has loaded them, too, and has counted the run of the
    /// first block itself.
    pub(crate) entry: usize,
    pub(crate) exits: Vec<ExitPoint>,
    pub(crate) edges: Vec<EdgeCode>,
    pub(crate) sees_flags: bool,
    pub(crate) vectors: VectorLevel,
}

/// Numbers from which a unit's exits and edges count.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FirstNumbers {
    pub(crate) exit: u32,
    pub(crate) edge: usize,
}

/// Makes the code of a unit.
pub(crate) struct Emitter<'a> {
    asm: Assembler,
    source: &'a UnitSource,
    analysis: &'a UnitAnalysis,
    addresses: Addresses,
    /// Steps whose flags are saved for later.
    saves: &'a [usize],
    first: FirstNumbers,
    exits: Vec<ExitPoint>,
    edges: Vec<EdgeCode>,
    late: Vec<Late>,
    encoder: Encoder,
    /// Flags of the host that are the guest's.
    valid: u32,
    /// The step whose flags were saved last, and which flags.
    saved: Option<(usize, u32)>,
    /// The step that is emitted.
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
            first,
            exits: Vec::new(),
            edges: Vec::new(),
            late: Vec::new(),
            encoder: Encoder::new(64),
            valid: 0,
            saved: None,
            at: 0,
        }
    }

    /// The code of the unit.
    pub(crate) fn unit(mut self) -> Result<UnitCode, Retry> {
        self.need_vectors();
        let loaded = self.asm.pos();
        self.count_run(0);
        let entry = self.asm.pos();
        let mut block = 0;
        for at in 0..self.analysis.steps.len() {
            let step = self.analysis.steps[at];
            if step.block != block {
                block = step.block;
                self.count_run(block);
            }
            self.at = at;
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
            | StepKind::Bit
            | StepKind::Count => self.producer(step)?,
            StepKind::Divide { signed } => self.divide(step, signed)?,
            StepKind::Scan { reverse } => self.scan(step, reverse)?,
            StepKind::Atomic => self.atomic(step)?,
            StepKind::Vector => self.vector(step)?,
            StepKind::Push => self.push(step)?,
            StepKind::Pop => self.pop(step)?,
            StepKind::Leave => self.leave_frame(),
            StepKind::Jcc(condition) => self.jcc(step, condition)?,
            StepKind::Jump => self.jump(step),
            StepKind::JumpIndirect => self.jump_indirect(step)?,
            StepKind::Call => self.call(step)?,
            StepKind::CallIndirect => self.call_indirect(step)?,
            StepKind::Return => self.return_near(step)?,
        }
        if step.flags.changed != 0 {
            // Flags that it keeps under a condition are valid if they were.
            self.valid = (self.valid | step.flags.written) & !step.flags.undefined;
            self.save_flags();
        }
        Ok(())
    }

    /// What follows the last instruction, where that does not branch.
    fn end(&mut self) {
        if let Some((block, index)) = self.analysis.stop {
            let exit = self.exit(self.instruction(block, index, None));
            self.leave(exit);
            return;
        }
        let Some(last) = self.analysis.steps.last() else {
            return;
        };
        if matches!(
            last.kind,
            StepKind::Jcc(_)
                | StepKind::Jump
                | StepKind::JumpIndirect
                | StepKind::Call
                | StepKind::CallIndirect
                | StepKind::Return
        ) {
            return;
        }
        self.edge(UnitEdge {
            target_rip: self.source.blocks[last.block].end(),
            rest: 0,
            branch: None,
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

    /// Leaves the unit by an exit.
    fn leave(&mut self, exit: u32) {
        self.asm.constant(TEMP, exit.into());
        self.asm.jump_to(JMP, self.addresses.leave);
    }

    /// Counts that a block of the unit is entered.
    fn count_run(&mut self, block: usize) {
        let slot = self.source.blocks[block].run_counter;
        let counter = Rm::Fixed(self.addresses.data + run_offset(slot) as u64);
        self.asm.encode(&[0xff], 8, 0, counter, 0);
        self.valid = 0;
    }

    /// Numbers an exit.
    fn exit(&mut self, point: ExitPoint) -> u32 {
        self.exits.push(point);
        self.first.exit + u32::try_from(self.exits.len() - 1).unwrap_or(u32::MAX)
    }

    /// The exit before an instruction.
    fn instruction(&self, block: usize, index: usize, access: Option<(u8, bool)>) -> ExitPoint {
        ExitPoint::Instruction {
            block,
            index,
            give_back: self.rest(block),
            access,
        }
    }

    /// Instructions that the unit charged for blocks after one.
    fn rest(&self, block: usize) -> u32 {
        let blocks = &self.source.blocks[..self.analysis.blocks];
        let after = blocks.get(block + 1..).unwrap_or_default();
        after.iter().map(GuestBlock::count).sum()
    }

    /// A field of the context, by its offset.
    fn context(&self, offset: usize) -> Rm {
        Rm::Fixed(self.addresses.data + offset as u64)
    }

    fn tlb(&self) -> u64 {
        self.addresses.data + tlb_offset(self.source.rights) as u64
    }

    fn jumps(&self) -> u64 {
        self.addresses.data + jumps_offset(self.source.rights) as u64
    }

    /// Where a general register of the guest is.
    fn home(&self, register: Register) -> Rm {
        match register.full_register().number() {
            4 => Rm::Reg(Host(15)),
            15 => Rm::Reg(Host(9)),
            n @ 9..=11 => self.context(offset_of!(Context, spilled) + (n - 9) * 8),
            n => Rm::Reg(Host(u8::try_from(n).unwrap_or(0))),
        }
    }

    /// The unit must end before the step that is emitted.
    fn cannot<T>(&self) -> Result<T, Retry> {
        Err(Retry::End(self.at))
    }
}

/// The host's register as the encoder names it.
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
