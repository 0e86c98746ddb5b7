//! Collects the blocks of a unit, each the likely successor of the previous one.

use crate::branch_buffer::{BranchBuffer, BranchRecords};
use crate::code::{Block, BlockEntry};
use crate::core::Core;
use crate::facts::{self, InstructionFacts};
use crate::memory::PAGE;
use crate::platform::BranchClass;
use hindsight_translate::{
    BranchFormat, BranchKind, FlagEffects, Follow, GuestBlock, GuestInstruction, RecordKind, is_x87,
};
use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic as M,
    OpAccess,
};

/// Maximum number of blocks in a unit.
const BLOCKS: usize = 8;
/// Maximum number of instructions in a unit, unless its first block has more.
const INSTRUCTIONS: usize = 64;

/// A block of a unit.
#[derive(Clone, Debug)]
pub(super) struct SourceBlock {
    /// Its index in the code cache.
    pub(super) index: u32,
    pub(super) entry: BlockEntry<Core>,
    /// For each instruction, the index of the operation that executes it.
    pub(super) ops: Vec<usize>,
    /// For each instruction, its offset in the block in bytes.
    pub(super) offsets: Vec<u16>,
}

/// Returns the format of records in the branch buffer at the current privilege level.
fn stamped_format(branches: &BranchBuffer, records: RecordKind) -> BranchFormat {
    let mut words = [0; 8];
    for (kind, class) in [
        (BranchKind::Conditional, BranchClass::Conditional),
        (BranchKind::DirectJump, BranchClass::DirectJump),
        (BranchKind::IndirectJump, BranchClass::IndirectJump),
        (BranchKind::DirectCall, BranchClass::DirectCall),
        (BranchKind::CallNext, BranchClass::CallNext),
        (BranchKind::IndirectCall, BranchClass::IndirectCall),
        (BranchKind::Return, BranchClass::Return),
        (BranchKind::NotTaken, BranchClass::NotTaken),
    ] {
        words[kind as usize] = branches.last_word(class);
    }
    BranchFormat {
        words,
        not_taken: branches.observe().not_taken,
        records,
    }
}

/// Returns how translated code records branches at the current privilege level.
pub(super) fn branch_format(
    branches: &BranchBuffer,
    records: BranchRecords,
) -> Option<BranchFormat> {
    match records {
        BranchRecords::None | BranchRecords::Unsupported => None,
        BranchRecords::Stamped | BranchRecords::StampedAll => {
            Some(stamped_format(branches, RecordKind::Branches))
        }
        BranchRecords::Paths | BranchRecords::PathsAll => {
            Some(stamped_format(branches, RecordKind::Paths))
        }
        BranchRecords::Bts => Some(BranchFormat {
            words: [0; 8],
            not_taken: false,
            records: RecordKind::Bts,
        }),
    }
}

/// Whether an instruction loads from memory, and whether it stores to memory.
fn accesses_of(info: &mut InstructionInfoFactory, i: &Instruction) -> (bool, bool) {
    let mut accesses = (false, false);
    for used in info.info(i).used_memory() {
        let (loads, stores) = match used.access() {
            OpAccess::None | OpAccess::NoMemAccess => (false, false),
            OpAccess::Read | OpAccess::CondRead => (true, false),
            OpAccess::Write | OpAccess::CondWrite => (false, true),
            OpAccess::ReadWrite | OpAccess::ReadCondWrite => (true, true),
        };
        accesses = (accesses.0 || loads, accesses.1 || stores);
    }
    accesses
}

/// Whether translated code can count an instruction that accesses memory.
///
/// It cannot if the instruction is locked, or if which bytes it accesses depends on more than its
/// address.
fn can_count(i: &Instruction) -> bool {
    let locks = i.has_lock_prefix() || matches!(i.mnemonic(), M::Xchg | M::Xadd | M::Cmpxchg);
    !locks && !i.has_op_mask() && !is_x87(i)
}

/// Whether the host can execute an instruction when it is translated.
fn host_has(i: &Instruction) -> bool {
    match i.mnemonic() {
        M::Tzcnt => std::arch::is_x86_feature_detected!("bmi1"),
        M::Lzcnt => std::arch::is_x86_feature_detected!("lzcnt"),
        M::Popcnt => std::arch::is_x86_feature_detected!("popcnt"),
        M::Movbe => std::arch::is_x86_feature_detected!("movbe"),
        M::Crc32 => std::arch::is_x86_feature_detected!("sse4.2"),
        M::Andn | M::Bextr | M::Blsi | M::Blsmsk | M::Blsr => {
            std::arch::is_x86_feature_detected!("bmi1")
        }
        M::Bzhi | M::Pdep | M::Pext | M::Mulx => std::arch::is_x86_feature_detected!("bmi2"),
        M::Rorx | M::Shlx | M::Shrx | M::Sarx => std::arch::is_x86_feature_detected!("bmi2"),
        _ => true,
    }
}

impl Core {
    /// Returns a block with its instructions decoded at a RIP, and their operations.
    fn guest_block(&self, block: &Block<Self>, rip: u64, gpa: u64) -> (GuestBlock, Vec<usize>) {
        let counts = self.counters.counts_accesses();
        let mut info = InstructionInfoFactory::new();
        let mut insns = Vec::new();
        let mut ops = Vec::new();
        let mut op = 0;
        for i in Decoder::with_ip(64, &block.code, rip, DecoderOptions::NONE) {
            let offset = usize::try_from(i.ip().wrapping_sub(rip)).unwrap_or(usize::MAX);
            let all = block.ops();
            let next = all.get(op + 1);
            // Skip the operation after the last instruction, which only continues with the next
            // block.
            if !insns.is_empty() && next.is_some_and(|o| usize::from(o.offset) == offset) {
                op += 1;
            }
            let joined = all.get(op).is_none_or(|o| usize::from(o.offset) != offset);
            let invalid = i.is_invalid();
            let flags = if invalid {
                FlagEffects::default()
            } else {
                flag_use(&InstructionFacts::of(&i, 8))
            };
            let in_cpuid = i.cpuid_features().iter().all(|f| self.features.has(*f));
            let (loads, stores) = if invalid {
                (false, false)
            } else {
                accesses_of(&mut info, &i)
            };
            let uncounted = counts && (loads || stores) && !can_count(&i);
            insns.push(GuestInstruction {
                insn: i,
                flags,
                foreign: invalid
                    || !in_cpuid
                    || !host_has(&i)
                    || uncounted
                    || self.thunks.policy.applies(&i)
                    || self.portable && is_x87(&i),
                joined,
                aligned: !invalid && facts::needs_alignment(&i, i.memory_size().size()),
                loads,
                stores,
            });
            ops.push(op);
        }
        let block = GuestBlock {
            rip,
            gpa,
            insns,
            follow: Follow::Fall,
            run_counter: 0,
        };
        (block, ops)
    }

    /// Returns how often a block was entered, in both tiers.
    fn runs_of(&self, index: u32, block: &Block<Self>) -> u64 {
        let here = block.ops().first().map_or(0, crate::core::Op::runs);
        here + self.jit.runs(index)
    }

    /// Returns the blocks of a unit at `rip`, whose guest-physical address is `gpa`.
    pub(super) fn unit_blocks(&mut self, rip: u64, gpa: u64) -> Vec<(GuestBlock, SourceBlock)> {
        let key = self.block_key();
        let mut found: Vec<(GuestBlock, SourceBlock)> = Vec::new();
        let mut next = rip;
        let mut instructions = 0;
        while found.len() < BLOCKS && found.iter().all(|(b, _)| b.rip != next) {
            let at = (gpa & !(PAGE - 1)) | (next & (PAGE - 1));
            let Some((index, block)) = self.code.live_block(at, key) else {
                break;
            };
            if block.second_page.is_some() || block.linear_page.is_some() {
                break;
            }
            let runs = self.runs_of(index, block);
            let (guest, ops) = self.guest_block(block, next, at);
            instructions += guest.insns.len();
            if !found.is_empty() && instructions > INSTRUCTIONS {
                break;
            }
            let entry = block.entry();
            let offset = |i: &GuestInstruction| {
                u16::try_from(i.insn.ip().wrapping_sub(next)).unwrap_or(u16::MAX)
            };
            let offsets = guest.insns.iter().map(offset).collect();
            let source = SourceBlock {
                index,
                entry,
                ops,
                offsets,
            };
            found.push((guest, source));
            let Some((follow, to)) = self.likely_successor(&found, runs, gpa, key) else {
                break;
            };
            if let Some((last, _)) = found.last_mut() {
                last.follow = follow;
            }
            next = to;
        }
        found
    }

    /// Returns the successor of the last block that runs most often.
    ///
    /// It must be in the same page, and must run at least half as often as the last block.
    fn likely_successor(
        &self,
        found: &[(GuestBlock, SourceBlock)],
        runs: u64,
        gpa: u64,
        key: u8,
    ) -> Option<(Follow, u64)> {
        let (block, _) = found.last()?;
        let last = &block.insns.last()?.insn;
        let fall = (Follow::Fall, last.next_ip());
        let taken = || (Follow::Taken, last.near_branch_target());
        let candidates = match last.flow_control() {
            FlowControl::Next => vec![fall],
            FlowControl::UnconditionalBranch => vec![taken()],
            FlowControl::ConditionalBranch => vec![fall, taken()],
            _ => return None,
        };
        let page = block.rip >> 12;
        candidates
            .into_iter()
            .filter(|(_, to)| to >> 12 == page)
            .filter_map(|(follow, to)| {
                let at = (gpa & !(PAGE - 1)) | (to & (PAGE - 1));
                let (index, successor) = self.code.live_block(at, key)?;
                let often = self.runs_of(index, successor);
                (often >= runs / 2).then_some((often, follow, to))
            })
            .max_by_key(|(often, follow, _)| (*often, *follow == Follow::Fall))
            .map(|(_, follow, to)| (follow, to))
    }
}

fn flag_use(facts: &InstructionFacts) -> FlagEffects {
    let bits = |flags: hindsight_regs::rflags::Rflags| u32::try_from(flags.bits()).unwrap_or(0);
    FlagEffects {
        read: bits(facts.flags.read),
        written: bits(facts.flags.written),
        changed: bits(facts.flags.changed),
        undefined: bits(facts.flags.undefined),
    }
}
