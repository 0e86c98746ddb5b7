//! Emits branches, edges and the jumps between units.

use super::memory::STACK;
use super::same::redirect;
use super::{EdgeCode, Emitter, ExitPoint, Late, Retry, UnitEdge};
use crate::analysis::{BranchKind, Follow, RecordKind, UnitStep};
use crate::asm::{ADDR, Assembler, JMP, Jump32, Rm, TEMP, jcc};
use crate::layout::{Context, JUMP_BITS, JUMP_SHIFT, JUMPS, JumpEntry, PathRecord, jump_index};
use crate::paths::{PathBranch, PathCode};
use iced_x86::OpKind;
use std::mem::offset_of;

const BUDGET: usize = offset_of!(Context, budget);
const RIP: usize = offset_of!(Context, rip);
const SAVED_ENTRY: usize = offset_of!(Context, target);
const NEXT: usize = offset_of!(Context, record_next);
const DUE: usize = offset_of!(Context, record_due);
const END_STAMP: usize = offset_of!(Context, end_stamp);
/// Size of the record of a branch in bytes: two addresses, time stamp and attributes.
const BRANCH_BYTES: i32 = 24;
/// Size of the record of a path in bytes.
const PATH_BYTES: i32 = 16;
const _: () = assert!(
    size_of::<PathRecord>() == 16
        && offset_of!(PathRecord, budget) == 0
        && offset_of!(PathRecord, path) == 4
        && offset_of!(PathRecord, target) == 8
);

/// Condition "negative".
const SIGN: u8 = 8;
/// Condition "not equal".
pub(super) const NOT_EQUAL: u8 = 5;
/// Condition "above or equal".
const ABOVE_OR_EQUAL: u8 = 3;

impl Emitter<'_> {
    /// Whether the unit contains a block after the one of a step.
    fn goes_on(&self, step: &UnitStep) -> bool {
        step.block + 1 < self.analysis.blocks
    }

    /// Emits a conditional branch.
    ///
    /// `jump` emits the host's jump, if the branch is taken or if it is not.
    pub(super) fn branch(
        &mut self,
        step: &UnitStep,
        jump: impl FnOnce(&mut Assembler, bool) -> Jump32,
    ) {
        let taken = UnitEdge {
            target_rip: step.insn.near_branch_target(),
            rest: self.rest(step.block),
            branch: Some((step.insn.ip(), BranchKind::Conditional)),
            branches: self.branches.len(),
            before: self.at,
        };
        let format = self.source.branch_format;
        let recorded = format.is_some_and(|f| f.not_taken);
        let fall = UnitEdge {
            target_rip: step.insn.next_ip(),
            branch: recorded.then(|| (step.insn.ip(), BranchKind::NotTaken)),
            ..taken
        };
        let follow = self.source.blocks[step.block].follow;
        if self.goes_on(step) && follow == Follow::Taken {
            let from = jump(&mut self.asm, false);
            self.late.push(Late::Edge { from, edge: fall });
            self.pass_branch(&taken);
            return;
        }
        let from = jump(&mut self.asm, true);
        self.late.push(Late::Edge { from, edge: taken });
        if self.goes_on(step) {
            self.pass_branch(&fall);
        } else {
            self.edge(fall);
        }
    }

    pub(super) fn jump(&mut self, step: &UnitStep) {
        let edge = UnitEdge {
            target_rip: step.insn.near_branch_target(),
            rest: self.rest(step.block),
            branch: Some((step.insn.ip(), BranchKind::DirectJump)),
            branches: self.branches.len(),
            before: self.at,
        };
        if self.goes_on(step) {
            self.pass_branch(&edge);
        } else {
            self.edge(edge);
        }
    }

    /// Emits a push of the return address.
    fn push_return(&mut self, step: &UnitStep) {
        self.asm.lea(ADDR, STACK, -8);
        self.find(8, true);
        let next = step.insn.next_ip();
        match i32::try_from(next.cast_signed()) {
            Ok(value) => self.asm.store_imm(8, Rm::At(ADDR, 0), value),
            Err(_) => {
                self.asm.constant(TEMP, next);
                self.asm.store(8, Rm::At(ADDR, 0), TEMP);
            }
        }
        self.asm.lea(STACK, STACK, -8);
    }

    pub(super) fn call(&mut self, step: &UnitStep) -> Result<(), Retry> {
        self.push_return(step);
        let target_rip = step.insn.near_branch_target();
        let kind = if target_rip == step.insn.next_ip() {
            BranchKind::CallNext
        } else {
            BranchKind::DirectCall
        };
        let edge = UnitEdge {
            target_rip,
            rest: self.rest(step.block),
            branch: Some((step.insn.ip(), kind)),
            branches: self.branches.len(),
            before: self.at,
        };
        if self.goes_on(step) {
            self.pass_branch(&edge);
        } else {
            self.edge(edge);
        }
        Ok(())
    }

    /// Loads the target of an indirect branch into R10.
    fn indirect_target(&mut self, step: &UnitStep) -> Result<(), Retry> {
        let mut i = step.insn;
        if i.op0_kind() == OpKind::Register {
            let from = self.home(i.op0_register());
            self.asm.load(8, ADDR, from);
        } else {
            self.operand(&step.insn, false)?;
            redirect(&mut i);
            self.asm.load(8, ADDR, Rm::At(ADDR, 0));
        }
        Ok(())
    }

    /// Looks up the RIP in R10 in the jump cache.
    ///
    /// The offset of its entry is then in R11. If the cache does not contain it, the unit is left
    /// before the instruction.
    fn find_jump(&mut self, step: &UnitStep) {
        // The index of `jump_index`.
        self.asm.load(4, TEMP, Rm::Reg(ADDR));
        // SHR R11D
        self.asm.bytes(&[0x41, 0xc1, 0xeb, JUMP_BITS]);
        self.asm.alu(6, 4, Rm::Reg(TEMP), ADDR);
        let mask = i32::try_from(JUMPS - 1).unwrap_or(0);
        self.asm.alu_imm(4, 4, Rm::Reg(TEMP), mask);
        // SHL R11D, 5
        self.asm.bytes(&[0x41, 0xc1, 0xe3, JUMP_SHIFT]);
        self.asm.alu(7, 8, Rm::Offset(TEMP, self.jumps()), ADDR);
        self.leave_if(step, NOT_EQUAL);
        self.valid = 0;
    }

    /// Leaves the unit before the instruction if a condition holds.
    pub(super) fn leave_if(&mut self, step: &UnitStep, condition: u8) {
        let from = self.asm.jump(&jcc(condition));
        let point = self.instruction(step.block, step.index, None);
        let exit = self.exit(point);
        self.late.push(Late::Leave {
            from,
            exit,
            stores: None,
        });
    }

    /// Records an indirect branch, and jumps to the unit of a jump cache entry.
    ///
    /// The offset of the entry is in R11, the branch's target in R10.
    fn enter_found(&mut self, step: &UnitStep, kind: BranchKind) {
        if self.source.branch_format.is_some() {
            let saved = self.context(SAVED_ENTRY);
            self.asm.store(8, saved, TEMP);
            self.record_indirect(step.insn.ip(), kind);
            let point = ExitPoint::Branches {
                rip: None,
                give_back: self.rest(step.block),
            };
            let exit = self.exit(point);
            let from = self.asm.jump(&jcc(ABOVE_OR_EQUAL));
            self.late.push(Late::BranchesIndirect { from, exit });
            self.asm.load(8, TEMP, saved);
        }
        let entry = |field: usize| Rm::Offset(TEMP, self.jumps() + field as u64);
        let (charge, code) = (
            entry(offset_of!(JumpEntry, charge)),
            entry(offset_of!(JumpEntry, entry)),
        );
        self.asm.load(8, ADDR, charge);
        let budget = self.context(BUDGET);
        self.asm.alu(5, 8, budget, ADDR);
        let from = self.asm.jump(&jcc(SIGN));
        let exit = self.exit(ExitPoint::JumpBudget);
        self.late.push(Late::JumpBudget {
            from,
            exit,
            entry: None,
        });
        self.asm.encode(&[0xff], 4, 4, code, 0);
    }

    pub(super) fn jump_indirect(&mut self, step: &UnitStep) -> Result<(), Retry> {
        self.indirect_target(step)?;
        self.find_jump(step);
        self.enter_found(step, BranchKind::IndirectJump);
        Ok(())
    }

    pub(super) fn call_indirect(&mut self, step: &UnitStep) -> Result<(), Retry> {
        self.indirect_target(step)?;
        self.find_jump(step);
        let (saved, rip) = (self.context(SAVED_ENTRY), self.context(RIP));
        self.asm.store(8, saved, TEMP);
        self.asm.store(8, rip, ADDR);
        self.push_return(step);
        self.asm.load(8, TEMP, saved);
        self.asm.load(8, ADDR, rip);
        self.enter_found(step, BranchKind::IndirectCall);
        Ok(())
    }

    pub(super) fn return_near(&mut self, step: &UnitStep) -> Result<(), Retry> {
        let extra = match step.insn.op_count() {
            0 => 0,
            _ => i32::from(step.insn.immediate16()),
        };
        self.asm.load(8, ADDR, Rm::Reg(STACK));
        self.find(8, false);
        self.asm.load(8, ADDR, Rm::At(ADDR, 0));
        self.find_jump(step);
        self.asm.lea(STACK, STACK, 8 + extra);
        self.enter_found(step, BranchKind::Return);
        Ok(())
    }

    /// Records a branch between two blocks of the unit, if branches are recorded.
    fn pass_branch(&mut self, edge: &UnitEdge) {
        let Some((from, kind)) = edge.branch else {
            return;
        };
        match self.source.branch_format {
            Some(format) if format.records == RecordKind::Paths => {
                self.branches.push(PathBranch {
                    from,
                    to: edge.target_rip,
                    word: format.words[kind as usize],
                    rest: edge.rest,
                });
                self.exit_path = None;
            }
            Some(_) => self.record_edge(edge),
            None => {}
        }
    }

    /// Returns the number of the path up to the current step; `None` if it has no branches.
    pub(super) fn path_so_far(&mut self) -> Option<u32> {
        if self.exit_path.is_none() {
            let (&last, before) = self.branches.split_last()?;
            self.exit_path = Some(self.path(PathCode {
                before: before.len(),
                last,
                indirect: false,
            }));
        }
        self.exit_path
    }

    /// Adds a path and returns its number.
    fn path(&mut self, path: PathCode) -> u32 {
        self.paths.push(path);
        self.first.path + u32::try_from(self.paths.len() - 1).unwrap_or(u32::MAX)
    }

    /// Emits the record of the branches up to an edge, if they are recorded.
    fn record_edge(&mut self, edge: &UnitEdge) {
        let Some(format) = self.source.branch_format else {
            return;
        };
        if format.records == RecordKind::Paths {
            let Some(path) = self.path_of(edge) else {
                return;
            };
            self.load_next();
            self.record_path(path);
        } else {
            let Some((from, kind)) = edge.branch else {
                return;
            };
            self.load_next();
            self.store_constant(8, edge.target_rip);
            self.record_alone(from, kind, edge.rest);
        }
        let point = ExitPoint::Branches {
            rip: Some(edge.target_rip),
            give_back: edge.rest,
        };
        let exit = self.exit(point);
        let from = self.asm.jump(&jcc(ABOVE_OR_EQUAL));
        self.late.push(Late::Leave {
            from,
            exit,
            stores: Some(edge.before),
        });
    }

    /// Returns the number of the path that ends with an edge; `None` if it has no branches.
    fn path_of(&mut self, edge: &UnitEdge) -> Option<u32> {
        let words = self.source.branch_format?.words;
        let path = match edge.branch {
            Some((from, kind)) => PathCode {
                before: edge.branches,
                last: PathBranch {
                    from,
                    to: edge.target_rip,
                    word: words[kind as usize],
                    rest: edge.rest,
                },
                indirect: false,
            },
            None => {
                let before = edge.branches.checked_sub(1)?;
                PathCode {
                    before,
                    last: *self.branches.get(before)?,
                    indirect: false,
                }
            }
        };
        Some(self.path(path))
    }

    /// Emits the record of an indirect branch, whose target is in R10.
    fn record_indirect(&mut self, from: u64, kind: BranchKind) {
        let Some(format) = self.source.branch_format else {
            return;
        };
        self.load_next();
        self.asm.store(8, Rm::At(TEMP, 8), ADDR);
        if format.records == RecordKind::Paths {
            let path = PathCode {
                before: self.branches.len(),
                last: PathBranch {
                    from,
                    to: 0,
                    word: format.words[kind as usize],
                    rest: 0,
                },
                indirect: true,
            };
            let path = self.path(path);
            self.record_path(path);
        } else {
            self.record_alone(from, kind, 0);
        }
    }

    /// Loads the address of the next record into R11.
    fn load_next(&mut self) {
        let next = self.context(NEXT);
        self.asm.load(8, TEMP, next);
    }

    /// Completes the record of a path at R11, but for its target.
    ///
    /// Then compares the next record with the limit: "above or equal" means that the caller must
    /// process the records.
    fn record_path(&mut self, path: u32) {
        let budget = self.context(BUDGET);
        self.asm.load(4, ADDR, budget);
        self.asm.store(4, Rm::At(TEMP, 0), ADDR);
        self.asm.store_imm(4, Rm::At(TEMP, 4), path.cast_signed());
        self.next_record(PATH_BYTES);
    }

    /// Completes the record of a branch at R11, but for its target, like [`Emitter::record_path`].
    fn record_alone(&mut self, from: u64, kind: BranchKind, rest: u32) {
        self.store_constant(0, from);
        match self.source.branch_format {
            Some(format) if format.records == RecordKind::Branches => {
                self.stamp(format.words[kind as usize], rest);
            }
            _ => self.asm.store_imm(8, Rm::At(TEMP, 16), 0),
        }
        self.next_record(BRANCH_BYTES);
    }

    /// Stores the time stamp and the last word of the record at R11.
    fn stamp(&mut self, word: u32, rest: u32) {
        let (stamp, budget) = (self.context(END_STAMP), self.context(BUDGET));
        self.asm.load(4, ADDR, stamp);
        self.asm.alu_from(5, 4, ADDR, budget);
        if rest != 0 {
            let rest = i32::try_from(rest).unwrap_or(0);
            self.asm.alu_imm(5, 4, Rm::Reg(ADDR), rest);
        }
        self.asm.store(4, Rm::At(TEMP, 16), ADDR);
        self.asm.store_imm(4, Rm::At(TEMP, 20), word.cast_signed());
    }

    /// Adds the size of a record to the address in R11, and compares it with the limit.
    fn next_record(&mut self, bytes: i32) {
        let (next, due) = (self.context(NEXT), self.context(DUE));
        self.asm.alu_imm(0, 8, Rm::Reg(TEMP), bytes);
        self.asm.store(8, next, TEMP);
        self.asm.alu_from(7, 8, TEMP, due);
        self.valid = 0;
    }

    /// Stores a constant at a displacement from R11; may clobber R10.
    fn store_constant(&mut self, distance: i8, value: u64) {
        match i32::try_from(value.cast_signed()) {
            Ok(small) => self.asm.store_imm(8, Rm::At(TEMP, distance), small),
            Err(_) => {
                self.asm.constant(ADDR, value);
                self.asm.store(8, Rm::At(TEMP, distance), ADDR);
            }
        }
    }

    /// Emits an edge: a jump to another unit, or an exit.
    pub(super) fn edge(&mut self, edge: UnitEdge) {
        self.record_edge(&edge);
        let page = self.source.blocks[0].rip >> 12;
        if edge.target_rip >> 12 == page {
            self.link(&edge);
        } else {
            self.sunk_stores(edge.before);
            self.jump_constant(&edge);
        }
        self.valid = 0;
    }

    /// Emits an edge within the page, which can be linked to a unit.
    fn link(&mut self, edge: &UnitEdge) {
        let start = self.asm.pos();
        self.sunk_stores(edge.before);
        let stores = (start, self.asm.pos() - start);
        let budget = self.context(BUDGET);
        self.asm.encode(&[0x81], 8, 5, budget, 4);
        let rest = i32::try_from(edge.rest).unwrap_or(0);
        self.asm.bytes(&(-rest).to_le_bytes());
        let charge = self.asm.pos();
        let local = self.edges.len();
        let number = self.first.edge + local;
        let from = self.asm.jump(&jcc(SIGN));
        let exit = self.exit(ExitPoint::EdgeBudget { edge: number });
        self.late.push(Late::Leave {
            from,
            exit,
            stores: Some(edge.before),
        });
        let from = self.asm.jump(JMP);
        let exit = self.exit(ExitPoint::Edge { edge: number });
        self.late.push(Late::Unlinked {
            from,
            exit,
            edge: local,
        });
        self.edges.push(EdgeCode {
            target_rip: edge.target_rip,
            stores,
            charge,
            jump: from.0,
            unlinked: 0,
            rest: edge.rest,
        });
    }

    /// Emits a jump to a constant RIP in another page, through the jump cache.
    fn jump_constant(&mut self, edge: &UnitEdge) {
        let budget = self.context(BUDGET);
        if edge.rest != 0 {
            let rest = i32::try_from(edge.rest).unwrap_or(0);
            self.asm.alu_imm(0, 8, budget, rest);
        }
        let rip = edge.target_rip;
        let offset = (jump_index(rip) << JUMP_SHIFT) as u64;
        let entry = |field: usize| Rm::Fixed(self.jumps() + offset + field as u64);
        let (tag, charge, code) = (
            entry(offset_of!(JumpEntry, tag)),
            entry(offset_of!(JumpEntry, charge)),
            entry(offset_of!(JumpEntry, entry)),
        );
        self.asm.constant(ADDR, rip);
        self.asm.alu(7, 8, tag, ADDR);
        let from = self.asm.jump(&jcc(NOT_EQUAL));
        let exit = self.exit(ExitPoint::Jump { rip });
        self.late.push(Late::Leave {
            from,
            exit,
            stores: None,
        });
        self.asm.load(8, ADDR, charge);
        self.asm.alu(5, 8, budget, ADDR);
        let from = self.asm.jump(&jcc(SIGN));
        let exit = self.exit(ExitPoint::JumpBudget);
        self.late.push(Late::JumpBudget {
            from,
            exit,
            entry: Some(offset),
        });
        self.asm.encode(&[0xff], 4, 4, code, 0);
    }

    /// Adds R10, which the jump subtracted, back to the budget, and leaves the unit.
    pub(super) fn jump_budget(&mut self, exit: u32, entry: Option<u64>) {
        let budget = self.context(BUDGET);
        self.asm.alu(0, 8, budget, ADDR);
        if let Some(offset) = entry {
            self.asm.constant(TEMP, offset);
        }
        self.leave_to_entry(exit);
    }

    /// Leaves the unit; the next RIP is the tag of the jump cache entry at offset R11.
    fn leave_to_entry(&mut self, exit: u32) {
        self.asm.load(8, ADDR, Rm::Offset(TEMP, self.jumps()));
        let rip = self.context(RIP);
        self.asm.store(8, rip, ADDR);
        self.leave(exit);
    }

    /// Leaves the unit after an indirect branch, because the caller must process the records.
    pub(super) fn branches_indirect(&mut self, exit: u32) {
        let saved = self.context(SAVED_ENTRY);
        self.asm.load(8, TEMP, saved);
        self.leave_to_entry(exit);
    }
}
