//! The cache of decoded blocks.
//!
//! Blocks are found by guest-physical address and mode; a jump cache in front of that goes by RIP.
//! Blocks are freed all at once, between dispatches; one whose code changed is marked dead, so that
//! every link to it fails at its entry. While something else runs the guest its writes are not
//! reported: [`CodeCache::distrust`] then marks all blocks dead, and each is compared with its bytes
//! in memory, and revived, when it is next looked up.

#![expect(
    unsafe_code,
    reason = "the branch to be linked is kept as a pointer; freeing blocks has a contract"
)]
#![expect(
    clippy::cast_possible_truncation,
    reason = "hash and page offsets are cut on purpose"
)]

use super::block::{Block, BlockPages};
use super::mix::Mix;
use super::op::{BlockEntry, BlockOp, Op};
use crate::memory::PAGE;
use iced_x86::Instruction;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ptr::NonNull;

/// Entries of the jump cache, a power of two.
const JUMPS: usize = 4096;
/// Operations after which the whole cache is dropped.
const CAPACITY: usize = 1 << 20;

/// The context of unused entries of the jump cache: generations begin with 1.
const NO_CONTEXT: u64 = 0;

/// A multiplicative hash for addresses.
#[derive(Debug, Default)]
pub(crate) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.write_u64(b.into());
        }
    }
    fn write_usize(&mut self, v: usize) {
        self.write_u64(v as u64);
    }
    fn write_u64(&mut self, v: u64) {
        self.0 = (self.0.rotate_left(5) ^ v)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(26);
    }
}

type AddressMap<V> = HashMap<u64, V, BuildHasherDefault<AddressHasher>>;

/// An entry of the jump cache.
#[derive(Debug)]
struct Jump<C> {
    rip: u64,
    context: u64,
    entry: BlockEntry<C>,
}

impl<C> Clone for Jump<C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for Jump<C> {}

/// What was decoded of a page.
#[derive(Debug)]
struct CodePage {
    blocks: Vec<u32>,
    /// One bit for each byte that was decoded.
    covered: [u64; 64],
}

impl CodePage {
    fn mark(&mut self, from: u64, len: u64) {
        for at in from..(from + len).min(PAGE) {
            self.covered[(at / 64) as usize] |= 1 << (at % 64);
        }
    }
}

/// All decoded blocks of one processor.
#[derive(Debug)]
pub(crate) struct CodeCache<C> {
    blocks: Vec<Block<C>>,
    by_id: AddressMap<u32>,
    pages: AddressMap<CodePage>,
    jumps: Box<[Jump<C>; JUMPS]>,
    /// What unused entries of the jump cache lead to.
    _dead: Block<C>,
    /// Full instructions, for operations that need them: see [`Op::insn`].
    pub(crate) insns: Vec<Instruction>,
    /// A direct branch whose target was not linked yet; the next block may become its link.
    pending_link: Option<NonNull<Op<C>>>,
    /// Blocks made or revived since the last [`CodeCache::distrust`].
    trusted: Vec<u32>,
    ops: usize,
    /// Blocks that died since [`CodeCache::take_killed`], while [`CodeCache::track_killed`] is in
    /// force.
    killed: Option<Vec<u32>>,
    /// Everything must be dropped before the next block is entered.
    stale: bool,
    /// Changes whenever code may have moved to another RIP.
    generation: u64,
    /// Generation, privilege and mode, in which jumps are made now.
    context: u64,
    epoch: u64,
    decoded: u64,
    lookups: u64,
    /// What retired in blocks that were dropped, and where blocks ended early.
    pub(crate) mix: Mix,
}

// SAFETY: the pointers in it lead to blocks that it owns; handlers and instructions are plain data.
unsafe impl<C> Send for CodeCache<C> {}

impl<C> CodeCache<C> {
    /// An empty cache.
    pub(crate) fn new() -> Self {
        let dead = Block::dead();
        let none = Jump {
            rip: 0,
            context: NO_CONTEXT,
            entry: dead.entry(),
        };
        Self {
            blocks: Vec::new(),
            by_id: AddressMap::default(),
            pages: AddressMap::default(),
            jumps: Box::new([none; JUMPS]),
            _dead: dead,
            insns: Vec::new(),
            pending_link: None,
            trusted: Vec::new(),
            ops: 0,
            killed: None,
            stale: false,
            generation: 1,
            context: NO_CONTEXT,
            epoch: 0,
            decoded: 0,
            lookups: 0,
            mix: Mix::default(),
        }
    }

    /// How often everything was dropped.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Blocks decoded, for statistics.
    pub(crate) fn decoded(&self) -> u64 {
        self.decoded
    }

    /// Blocks looked up by address, because neither a link nor the jump cache led to them, for
    /// statistics.
    pub(crate) fn lookups(&self) -> u64 {
        self.lookups
    }

    /// Counts a lookup.
    pub(crate) fn count_lookup(&mut self) {
        self.lookups += 1;
    }

    fn id(gpa: u64, key: u8) -> u64 {
        debug_assert!(gpa >> 56 == 0);
        gpa | u64::from(key) << 56
    }

    #[inline(always)]
    fn jump_index(rip: u64) -> usize {
        (rip ^ (rip >> 12)) as usize & (JUMPS - 1)
    }

    /// Makes all entries of the jump cache fail; [`CodeCache::set_context`] must follow.
    pub(crate) fn new_generation(&mut self) {
        self.generation += 1;
    }

    /// Sets the context of jumps: the block key of the current mode, whose bits 6 and 7 are free, and
    /// whether the CPL is 3.
    pub(crate) fn set_context(&mut self, key: u8, user: bool) {
        debug_assert!(key & 0xc0 == 0);
        self.context = self.generation << 8 | u64::from(user) << 7 | u64::from(key);
        debug_assert!(self.context != NO_CONTEXT);
    }

    /// The block at a RIP, if the jump cache has it in the current context.
    #[inline(always)]
    pub(crate) fn jump(&self, rip: u64) -> Option<BlockEntry<C>> {
        let jump = &self.jumps[Self::jump_index(rip)];
        (jump.rip == rip && jump.context == self.context).then_some(jump.entry)
    }

    /// Enters a block into the jump cache, for the current context.
    pub(crate) fn set_jump(&mut self, rip: u64, entry: BlockEntry<C>) {
        self.jumps[Self::jump_index(rip)] = Jump {
            rip,
            context: self.context,
            entry,
        };
    }

    /// Remembers a direct branch that leads to the next block and has no link yet.
    #[inline(always)]
    pub(crate) fn set_pending_link(&mut self, branch: BlockOp<'_, C>) {
        self.pending_link = Some(branch.as_ptr());
    }

    /// Forgets that branch: the next block is not the one that it leads to.
    pub(crate) fn clear_pending_link(&mut self) {
        self.pending_link = None;
    }

    /// Links that branch, if there is one, to a block of this cache.
    pub(crate) fn link_pending(&mut self, entry: BlockEntry<C>) {
        if let Some(branch) = self.pending_link.take() {
            // SAFETY: it was an operation of this cache's blocks when it was set, and `tidy`, which
            // frees them, clears it.
            unsafe { BlockOp::new(branch) }.set_link(entry);
        }
    }

    /// The block at a guest-physical address. A suspect one is compared with memory first: `read`
    /// reads memory, and returns false if it cannot.
    pub(crate) fn find(
        &mut self,
        gpa: u64,
        key: u8,
        read: impl Fn(u64, &mut [u8]) -> bool,
    ) -> Option<&Block<C>> {
        let index = *self.by_id.get(&Self::id(gpa, key))?;
        if self.blocks[index as usize].suspect && !self.recheck(index, gpa, key, read) {
            return None;
        }
        Some(&self.blocks[index as usize])
    }

    /// Adds a new block and returns its entry.
    pub(crate) fn insert(
        &mut self,
        gpa: u64,
        key: u8,
        code: &[u8],
        pages: BlockPages,
        decoded: (Vec<Op<C>>, Vec<u16>),
    ) -> BlockEntry<C> {
        let second_page = pages.second;
        debug_assert!(!code.is_empty());
        debug_assert_eq!(
            second_page.is_some(),
            gpa % PAGE + code.len() as u64 > PAGE,
            "a block has a second page if it reaches into one"
        );
        self.decoded += 1;
        let index = self.blocks.len() as u32;
        let id = Self::id(gpa, key);
        let block = Block::new(id, code.into(), pages, decoded);
        self.ops += block.ops().len();
        let len = u64::from(block.len);
        let entry = block.entry();
        self.blocks.push(block);
        self.trusted.push(index);
        self.by_id.insert(id, index);
        let offset = gpa % PAGE;
        self.page(gpa, index).mark(offset, len);
        if let Some(second) = second_page {
            self.page(second, index)
                .mark(0, (offset + len).saturating_sub(PAGE));
        }
        entry
    }

    /// Marks all blocks to be compared with memory before they run again: see
    /// [`CodeCache::find`]. Takes time in proportion to the blocks used since the last call.
    pub(crate) fn distrust(&mut self) {
        for index in self.trusted.drain(..) {
            let block = &mut self.blocks[index as usize];
            block.kill();
            block.suspect = true;
            if let Some(killed) = &mut self.killed {
                killed.push(index);
            }
        }
    }

    /// Revives the suspect block at a guest-physical address if its code is still that in memory,
    /// and forgets it otherwise. Returns whether it was revived.
    #[cold]
    fn recheck(
        &mut self,
        index: u32,
        gpa: u64,
        key: u8,
        read: impl Fn(u64, &mut [u8]) -> bool,
    ) -> bool {
        let block = &mut self.blocks[index as usize];
        if is_in_memory(block, gpa, read) {
            block.revive();
            self.trusted.push(index);
            return true;
        }
        self.by_id.remove(&Self::id(gpa, key));
        false
    }

    fn page(&mut self, gpa: u64, block: u32) -> &mut CodePage {
        let page = self
            .pages
            .entry(gpa & !(PAGE - 1))
            .or_insert_with(|| CodePage {
                blocks: Vec::new(),
                covered: [0; 64],
            });
        page.blocks.push(block);
        page
    }

    /// Whether any of these bytes, which lie in one page, was decoded; `None` if nothing of the page
    /// was.
    pub(crate) fn covers(&self, gpa: u64, len: usize) -> Option<bool> {
        let page = self.pages.get(&(gpa & !(PAGE - 1)))?;
        let from = gpa % PAGE;
        let covered = (from..from + len as u64)
            .any(|a| page.covered[(a / 64) as usize & 63] >> (a % 64) & 1 != 0);
        Some(covered)
    }

    /// Kills all blocks of a page.
    pub(crate) fn drop_page(&mut self, gpa: u64) {
        let Some(page) = self.pages.remove(&(gpa & !(PAGE - 1))) else {
            return;
        };
        for index in page.blocks {
            let block = &self.blocks[index as usize];
            block.kill();
            if let Some(killed) = &mut self.killed {
                killed.push(index);
            }
            if self.by_id.get(&block.id) == Some(&index) {
                self.by_id.remove(&block.id);
            }
        }
    }

    /// Kills all blocks that contain, or start at, one of these offsets in a page.
    pub(crate) fn kill_at(&mut self, offsets: &[u64]) {
        let mut sorted = offsets.to_vec();
        sorted.sort_unstable();
        // The first offset at or after the start of a block, wrapped at the end of the page.
        let next = |start: u64| {
            let next = sorted.partition_point(|&offset| offset < start);
            sorted.get(next).or(sorted.first()).copied()
        };
        for (index, block) in (0_u32..).zip(&self.blocks) {
            let start = block.id % PAGE;
            let contained = next(start)
                .is_some_and(|offset| offset.wrapping_sub(start) % PAGE < block.len.into());
            if !contained {
                continue;
            }
            block.kill();
            if let Some(killed) = &mut self.killed {
                killed.push(index);
            }
            if self.by_id.get(&block.id) == Some(&index) {
                self.by_id.remove(&block.id);
            }
        }
    }

    /// Has [`CodeCache::take_killed`] report blocks that die from now on.
    pub(crate) fn track_killed(&mut self) {
        self.killed.get_or_insert_default();
    }

    /// The blocks that died since the last call.
    #[inline(always)]
    pub(crate) fn take_killed(&mut self) -> Option<Vec<u32>> {
        match &mut self.killed {
            Some(killed) if !killed.is_empty() => Some(std::mem::take(killed)),
            _ => None,
        }
    }

    /// The context in which jumps are made now.
    pub(crate) fn context(&self) -> u64 {
        self.context
    }

    /// A live block at a guest-physical address, and its index.
    pub(crate) fn live_block(&self, gpa: u64, key: u8) -> Option<(u32, &Block<C>)> {
        let index = *self.by_id.get(&Self::id(gpa, key))?;
        let block = &self.blocks[index as usize];
        block.is_live().then_some((index, block))
    }

    /// Adds to the count of how often a block was entered.
    pub(crate) fn add_runs(&self, index: u32, runs: u64) {
        let first = self
            .blocks
            .get(index as usize)
            .and_then(|b| b.ops().first());
        if let Some(first) = first {
            first.add_runs(runs);
        }
    }

    /// Whether [`CodeCache::tidy`] would free all blocks.
    pub(crate) fn is_to_be_dropped(&self) -> bool {
        self.stale || self.ops > CAPACITY
    }

    /// Whether the block with an index may run.
    pub(crate) fn is_live(&self, index: u32) -> bool {
        self.blocks.get(index as usize).is_some_and(Block::is_live)
    }

    /// Kills all blocks; they are freed at the next [`CodeCache::tidy`].
    pub(crate) fn drop_all(&mut self) {
        self.blocks.iter().for_each(Block::kill);
        self.stale = true;
    }

    /// The instruction mix so far.
    pub(crate) fn mix(&self) -> Mix {
        let mut mix = self.mix.clone();
        for block in &self.blocks {
            mix.add_block(block.ops(), block.mnemonics());
        }
        mix
    }

    /// Frees all blocks if the cache is full, or if [`CodeCache::drop_all`] was called.
    ///
    /// # Safety
    /// No [`BlockEntry`], [`super::LiveBlock`] or [`BlockOp`] of this cache that exists now may be
    /// used afterwards. In particular, no handler runs.
    pub(crate) unsafe fn tidy(&mut self) {
        if self.is_to_be_dropped() {
            *self = Self {
                generation: self.generation,
                context: self.context,
                epoch: self.epoch + 1,
                decoded: self.decoded,
                lookups: self.lookups,
                mix: self.mix(),
                killed: self.killed.as_ref().map(|_| Vec::new()),
                ..Self::new()
            };
        }
        debug_assert!(self.ops <= CAPACITY);
    }
}

/// Whether the bytes that a block at `gpa` was decoded from are still in memory.
fn is_in_memory<C>(block: &Block<C>, gpa: u64, read: impl Fn(u64, &mut [u8]) -> bool) -> bool {
    let mut now = [0; 0x200];
    let Some(now) = now.get_mut(..block.code.len()) else {
        return false;
    };
    let split = ((PAGE - gpa % PAGE) as usize).min(now.len());
    let (head, tail) = now.split_at_mut(split);
    let readable = read(gpa, head)
        && (tail.is_empty() || block.second_page.is_some_and(|second| read(second, tail)));
    readable && *now == *block.code
}

#[cfg(test)]
mod tests;
