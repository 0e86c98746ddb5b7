//! Makes units of hot blocks, and suspends them when their blocks are invalidated.

#![expect(unsafe_code, reason = "operations are reached through stored pointers")]

use super::source::{SourceBlock, branch_format};
use super::{Compiled, EntryPoint, UNITS, UnitMode, enter, rights_of};
use crate::branch_buffer::BranchRecords;
use crate::code::BlockOp;
use crate::core::Core;
use crate::registers::Reg;
use hindsight_translate::{GuestBlock, NotTranslated, Translator, UnitId, UnitSource};

impl Core {
    /// Translates the block that is being entered, if possible; `first` begins it.
    #[cold]
    pub(crate) fn translate_hot(&mut self, first: BlockOp<'_, Self>) {
        let mode = self.unit_mode();
        if self.jit.failed
            || !self.mode.is_64bit()
            || self.in_transaction()
            || mode.records == BranchRecords::Unsupported
        {
            return;
        }
        if self.jit.translator.is_none() {
            match Translator::new(self.jit.capacity, enter::find_host) {
                Ok(translator) => self.jit.translator = Some(translator),
                Err(_) => {
                    self.jit.failed = true;
                    return;
                }
            }
            self.code.track_killed();
        }
        self.follow_killed();
        let rip = self.regs.get(Reg::BlockRip);
        let Ok(gpa) = self.translate_code(rip) else {
            return;
        };
        let blocks = self.unit_blocks(rip, gpa);
        // SAFETY: the blocks are in the cache, and this function frees none.
        let same = |b: &SourceBlock| unsafe { b.entry.live() }.first_op().id() == first.id();
        if blocks.first().is_some_and(|(_, b)| same(b)) {
            self.make_units(blocks, mode);
        }
    }

    /// Makes the units of a block.
    ///
    /// One begins with the block, and another one after each instruction that is not translated.
    fn make_units(&mut self, blocks: Vec<(GuestBlock, SourceBlock)>, mode: UnitMode) {
        let Some(rights) = rights_of(self.mmu.rights()) else {
            return;
        };
        let (guests, sources): (Vec<_>, Vec<_>) = blocks.into_iter().unzip();
        let mut source = UnitSource {
            blocks: guests,
            start: 0,
            rights,
            branch_format: branch_format(&self.branches, mode.records),
            access_format: mode.accesses,
        };
        if !self.number_runs(&mut source, &sources) {
            self.drop_translations();
            return;
        }
        let count = source.blocks.first().map_or(0, |b| b.insns.len());
        while source.start < count {
            let Some(translator) = &mut self.jit.translator else {
                return;
            };
            let stop = match translator.translate(&source) {
                Ok(unit) => {
                    let made = translator.unit(unit);
                    let (stop, contained) = (made.stop, made.blocks.len());
                    let blocks = &sources[..contained];
                    self.enter_unit_at((unit, mode), source.start, blocks);
                    stop
                }
                Err(NotTranslated::TooShort(stop)) => stop,
                Err(_) => {
                    self.drop_translations();
                    return;
                }
            };
            let Some(stop) = stop else {
                return;
            };
            let insns = &source.blocks[0].insns;
            source.start = (stop + 1..count)
                .find(|&n| !insns[n].joined)
                .unwrap_or(count);
        }
    }

    /// Allocates a run counter for each block; returns false if there are not enough.
    fn number_runs(&mut self, source: &mut UnitSource, blocks: &[SourceBlock]) -> bool {
        let jit = &mut self.jit;
        let Some(translator) = &mut jit.translator else {
            return false;
        };
        for (guest, block) in source.blocks.iter_mut().zip(blocks) {
            guest.run_counter = match jit.blocks.get(&block.index) {
                Some((slot, _)) => *slot,
                None => {
                    let Some(slot) = translator.run_counter() else {
                        return false;
                    };
                    jit.blocks.insert(block.index, (slot, Vec::new()));
                    slot
                }
            };
        }
        true
    }

    /// Makes a unit replace the handler of the operation at which it begins.
    fn enter_unit_at(
        &mut self,
        (unit, mode): (UnitId, UnitMode),
        start: usize,
        blocks: &[SourceBlock],
    ) {
        let jit = &mut self.jit;
        let Some(first) = blocks.first() else {
            return;
        };
        let op_index = first.ops[start];
        // SAFETY: the block is in the cache and has this operation (`Core::guest_block`).
        let op = unsafe { first.entry.live().first_op().at(op_index) };
        let id = op.id();
        let mut point = match jit.entries.get(&id) {
            Some(point) => *point,
            None => EntryPoint {
                units: [None; UNITS],
                made: 0,
                misses: 0,
                block: first.entry,
                op: op_index,
                replaced: op.replace_handler(enter::enter_unit),
            },
        };
        point.add(self.regs.get(Reg::BlockRip), mode, unit);
        jit.entries.insert(id, point);
        for block in blocks {
            if let Some((_, units)) = jit.blocks.get_mut(&block.index) {
                units.push(unit);
            }
        }
        debug_assert_eq!(jit.compiled.len(), unit.index());
        jit.compiled.push(Compiled {
            blocks: blocks.to_vec(),
            suspended: false,
        });
        jit.stats.units += 1;
    }

    /// Suspends the units that contain blocks killed since the last call.
    #[inline(always)]
    pub(super) fn follow_killed(&mut self) {
        if let Some(killed) = self.code.take_killed() {
            self.suspend_units(&killed);
        }
    }

    #[cold]
    fn suspend_units(&mut self, killed: &[u32]) {
        let jit = &mut self.jit;
        let Some(translator) = &mut jit.translator else {
            return;
        };
        for index in killed {
            let Some((_, units)) = jit.blocks.get(index) else {
                continue;
            };
            for unit in units {
                let compiled = &mut jit.compiled[unit.index()];
                if !compiled.suspended {
                    compiled.suspended = true;
                    translator.unlink(*unit);
                }
            }
        }
    }

    /// Resumes a suspended unit if all of its blocks are live again.
    ///
    /// Returns whether it did.
    pub(super) fn resume_unit(&mut self, unit: UnitId) -> bool {
        let compiled = &mut self.jit.compiled[unit.index()];
        let lives = compiled.blocks.iter().all(|b| self.code.is_live(b.index));
        compiled.suspended = !lives;
        lives
    }
}
