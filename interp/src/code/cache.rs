//! The cache of decoded blocks.
//!
//! The cache finds blocks by guest-physical address and mode. A jump cache in front of it finds
//! them by RIP. All blocks are freed at once, and only while no handler runs. A block whose code
//! has changed is marked dead, so that every link to it fails at its entry.
//!
//! While KVM runs the guest, the cache gets no reports of the guest's writes.
//! [`CodeCache::distrust`] then marks all blocks dead. The next lookup of each compares it with
//! memory, and revives it if its bytes are unchanged.

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
use crate::mmu::CONTEXTS;
use iced_x86::Instruction;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ptr::NonNull;

/// Entries of the jump cache, a power of two.
const JUMPS: usize = 4096;
/// Number of operations at which the cache is full and drops all blocks.
const CAPACITY: usize = 1 << 20;

/// The context of unused jump cache entries: valid generations begin with 1.
const NO_CONTEXT: u64 = 0;

/// The bit of a block key that 64-bit code and flat 32-bit code have.
const FLAT: u64 = 1 << 3;

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

/// The decoded parts of a page.
#[derive(Debug)]
struct CodePage {
    blocks: Vec<u32>,
    /// One bit for each byte of the page: whether it was decoded.
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
    /// The block to which unused entries of the jump cache point.
    _dead: Block<C>,
    /// Full instructions, for operations that need them: see [`Op::insn`].
    pub(crate) insns: Vec<Instruction>,
    /// A direct branch without a link, which may be linked to the next block.
    pending_link: Option<NonNull<Op<C>>>,
    /// Blocks that were made or revived since the last [`CodeCache::distrust`].
    trusted: Vec<u32>,
    ops: usize,
    /// Blocks that died since the last [`CodeCache::take_killed`].
    ///
    /// `None` until [`CodeCache::track_killed`].
    killed: Option<Vec<u32>>,
    /// Whether all blocks must be dropped before the next one is entered.
    stale: bool,
    /// A number that changes whenever code may have moved to another RIP.
    generation: u64,
    /// The newest generation of any process context.
    newest: u64,
    /// The number of calls of [`CodeCache::new_generation`].
    globals: u64,
    /// The generation of each process context; 0 if it needs a new one.
    contexts: [u64; CONTEXTS],
    /// Index of the current process context.
    process: usize,
    /// The context that jump cache entries must match: generation, privilege and mode.
    context: u64,
    epoch: u64,
    decoded: u64,
    lookups: u64,
    /// The instruction mix of freed blocks, and where blocks ended early.
    pub(crate) mix: Mix,
}

// SAFETY: its pointers refer to blocks that it owns; handlers and instructions are plain data.
unsafe impl<C> Send for CodeCache<C> {}

impl<C> CodeCache<C> {
    /// Creates an empty cache.
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
            newest: 1,
            globals: 1,
            contexts: [0; CONTEXTS],
            process: 0,
            context: NO_CONTEXT,
            epoch: 0,
            decoded: 0,
            lookups: 0,
            mix: Mix::default(),
        }
    }

    /// Returns how often all blocks were dropped.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the number of blocks that were decoded, for statistics.
    pub(crate) fn decoded(&self) -> u64 {
        self.decoded
    }

    /// Returns the number of lookups by address, for statistics.
    ///
    /// These are lookups of blocks to which neither a link nor the jump cache led.
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

    /// Processes use the same addresses, so the index depends on the process context, too.
    #[inline(always)]
    fn jump_index(&self, rip: u64) -> usize {
        /// Entries between those of an address in two contexts.
        const STRIDE: usize = 1031;
        ((rip ^ (rip >> 12)) as usize ^ (self.process * STRIDE)) & (JUMPS - 1)
    }

    /// Invalidates all entries of the jump cache, for all process contexts.
    ///
    /// Call [`CodeCache::set_context`] next.
    pub(crate) fn new_generation(&mut self) {
        self.globals += 1;
        self.contexts = [0; CONTEXTS];
        self.select_context(self.process, false);
    }

    /// Makes a process context current. The entries made for it are valid again if `keep`.
    ///
    /// Call [`CodeCache::set_context`] next.
    pub(crate) fn select_context(&mut self, process: usize, keep: bool) {
        self.contexts[self.process] = self.generation;
        self.process = process;
        self.generation = self.contexts[process];
        if self.generation == 0 || !keep {
            self.newest += 1;
            self.generation = self.newest;
            self.contexts[process] = self.generation;
        }
    }

    /// Returns a number that changes whenever code in global pages may have moved.
    pub(crate) fn globals(&self) -> u64 {
        self.globals
    }

    /// Whether entries with a [`CodeCache::context`] can become valid again.
    pub(crate) fn has_context(&self, context: u64) -> bool {
        self.generation == context >> 8 || self.contexts.contains(&(context >> 8))
    }

    /// Invalidates the entries of blocks in the page that contains `lin`, or that reach into it.
    ///
    /// Of code whose linear addresses differ from RIP, all entries are invalidated.
    pub(crate) fn forget_jumps(&mut self, lin: u64) {
        for jump in self.jumps.iter_mut() {
            let flat = jump.context & FLAT != 0;
            if !flat || (lin >> 12).wrapping_sub(jump.rip >> 12) <= 1 {
                jump.context = NO_CONTEXT;
            }
        }
    }

    /// Sets the context that jump cache entries must match.
    ///
    /// `key` is the block key of the current mode, whose bits 6 and 7 are free; `user` says that
    /// the CPL is 3.
    pub(crate) fn set_context(&mut self, key: u8, user: bool) {
        debug_assert!(key & 0xc0 == 0);
        self.context = self.generation << 8 | u64::from(user) << 7 | u64::from(key);
        debug_assert!(self.context != NO_CONTEXT);
    }

    /// Returns the block at a RIP if the jump cache has it in the current context.
    #[inline(always)]
    pub(crate) fn jump(&self, rip: u64) -> Option<BlockEntry<C>> {
        let jump = &self.jumps[self.jump_index(rip)];
        (jump.rip == rip && jump.context == self.context).then_some(jump.entry)
    }

    /// Enters a block into the jump cache, for the current context.
    pub(crate) fn set_jump(&mut self, rip: u64, entry: BlockEntry<C>) {
        self.jumps[self.jump_index(rip)] = Jump {
            rip,
            context: self.context,
            entry,
        };
    }

    /// Records a direct branch without a link, whose target is entered next.
    #[inline(always)]
    pub(crate) fn set_pending_link(&mut self, branch: BlockOp<'_, C>) {
        self.pending_link = Some(branch.as_ptr());
    }

    /// Clears the pending link: the next block is not the target of that branch.
    pub(crate) fn clear_pending_link(&mut self) {
        self.pending_link = None;
    }

    /// Links the pending branch, if there is one, to a block of this cache.
    pub(crate) fn link_pending(&mut self, entry: BlockEntry<C>) {
        if let Some(branch) = self.pending_link.take() {
            // SAFETY: the branch was an operation of this cache when it was set, and `tidy`, which
            // frees operations, clears it.
            unsafe { BlockOp::new(branch) }.set_link(entry);
        }
    }

    /// Returns the block at a guest-physical address.
    ///
    /// A suspect block is compared with memory first. `read` reads memory, and returns false if it
    /// cannot.
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

    /// Marks all blocks suspect: [`CodeCache::find`] will compare them with memory.
    ///
    /// Takes time in proportion to the number of blocks made or revived since the last call.
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

    /// Revives a suspect block if its code is unchanged, and else removes it.
    ///
    /// Returns whether the block was revived.
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

    /// Whether any of these bytes was decoded; `None` if nothing in their page was.
    ///
    /// The bytes must lie in one page.
    pub(crate) fn covers(&self, gpa: u64, len: usize) -> Option<bool> {
        let page = self.pages.get(&(gpa & !(PAGE - 1)))?;
        let from = gpa % PAGE;
        let covered = (from..from + len as u64)
            .any(|a| page.covered[(a / 64) as usize & 63] >> (a % 64) & 1 != 0);
        Some(covered)
    }

    /// Marks all blocks of a page dead and removes them.
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

    /// Marks all blocks dead that contain one of these offsets in a page.
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

    /// Makes [`CodeCache::take_killed`] report the blocks that die from now on.
    pub(crate) fn track_killed(&mut self) {
        self.killed.get_or_insert_default();
    }

    /// Returns the blocks that died since the last call, if any.
    #[inline(always)]
    pub(crate) fn take_killed(&mut self) -> Option<Vec<u32>> {
        match &mut self.killed {
            Some(killed) if !killed.is_empty() => Some(std::mem::take(killed)),
            _ => None,
        }
    }

    /// Returns the context that jump cache entries must match.
    pub(crate) fn context(&self) -> u64 {
        self.context
    }

    /// Returns the live block at a guest-physical address, and its index.
    pub(crate) fn live_block(&self, gpa: u64, key: u8) -> Option<(u32, &Block<C>)> {
        let index = *self.by_id.get(&Self::id(gpa, key))?;
        let block = &self.blocks[index as usize];
        block.is_live().then_some((index, block))
    }

    /// Adds runs to the count of a block.
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

    /// Marks all blocks dead. The next [`CodeCache::tidy`] frees them.
    pub(crate) fn drop_all(&mut self) {
        self.blocks.iter().for_each(Block::kill);
        self.stale = true;
    }

    /// Returns the instruction mix so far.
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
                newest: self.newest,
                globals: self.globals,
                contexts: self.contexts,
                process: self.process,
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

/// Whether memory at `gpa` still holds the bytes from which a block was decoded.
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
