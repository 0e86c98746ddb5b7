//! The cache of decoded blocks.
//!
//! Blocks are found by guest-physical address and mode; a jump cache in front of that goes by RIP.
//! Blocks are only freed all at once, between blocks; one whose code changed is marked dead, so
//! that every link into it fails at its entry. While something else runs the guest its writes are
//! not seen: [`Cache::distrust`] then marks all blocks dead, and each is compared with its bytes in
//! memory, and revived, when it is next looked up.

#![expect(
    unsafe_code,
    reason = "blocks are entered through raw pointers to their operations"
)]
#![expect(
    clippy::cast_possible_truncation,
    reason = "hash and page offsets are cut on purpose"
)]

use crate::memory::PAGE;
use crate::mix::Mix;
use crate::op::{DEAD, Next, Op};
use iced_x86::Instruction;
use std::collections::{HashMap, hash_map};
use std::hash::{BuildHasherDefault, Hasher};

/// Entries of the jump cache, a power of two.
const JUMPS: usize = 4096;
/// Operations after which the whole cache is given up.
const CAPACITY: usize = 1 << 20;

/// A multiplicative hash for addresses.
#[derive(Default)]
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
    fn write_u64(&mut self, v: u64) {
        self.0 = (self.0.rotate_left(5) ^ v)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(26);
    }
}

type Map<V> = HashMap<u64, V, BuildHasherDefault<AddressHasher>>;

#[derive(Clone, Copy, Debug)]
struct Jump {
    rip: u64,
    ctx: u64,
    op: Next,
}

/// What a finished block needs to be found again.
#[derive(Debug)]
pub(crate) struct Block {
    ops: Box<[Op]>,
    /// Address and mode: see [`Cache::id`].
    id: u64,
    /// The second page, if the last instruction reaches into it.
    pub(crate) second: Option<u64>,
    /// Bytes of code.
    pub(crate) len: u16,
    /// The bytes it was made from.
    code: Box<[u8]>,
    /// Numbers of its instructions' mnemonics: there may be fewer operations.
    mnemonics: Box<[u16]>,
    /// What [`Op::count`] of its first operation is while it lives.
    count: u32,
    /// Dead, and to be compared with memory before it runs again.
    suspect: bool,
}

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
pub(crate) struct Cache {
    blocks: Vec<Block>,
    by_id: Map<u32>,
    pages: Map<CodePage>,
    jumps: Box<[Jump; JUMPS]>,
    pub(crate) insns: Vec<Instruction>,
    /// Blocks made or revived since the last [`Cache::distrust`].
    trusted: Vec<u32>,
    ops: usize,
    /// Everything must be dropped before the next block is entered.
    stale: bool,
    /// Counts how often everything was dropped.
    pub(crate) epoch: u64,
    /// Blocks decoded, for statistics.
    pub(crate) decoded: u64,
    /// Blocks looked up here instead of through a link or a jump, for statistics.
    pub(crate) lookups: u64,
    /// What retired in blocks that were dropped, and where blocks ended early.
    pub(crate) mix: Mix,
}

impl Cache {
    pub(crate) fn new() -> Self {
        let none = Jump {
            rip: 0,
            ctx: 0,
            op: std::ptr::null(),
        };
        Self {
            blocks: Vec::new(),
            by_id: Map::default(),
            pages: Map::default(),
            jumps: Box::new([none; JUMPS]),
            insns: Vec::new(),
            trusted: Vec::new(),
            ops: 0,
            stale: false,
            epoch: 0,
            decoded: 0,
            lookups: 0,
            mix: Mix::default(),
        }
    }

    fn id(gpa: u64, key: u8) -> u64 {
        gpa | u64::from(key) << 56
    }

    #[inline(always)]
    fn jump_index(rip: u64) -> usize {
        (rip ^ (rip >> 12)) as usize & (JUMPS - 1)
    }

    /// The block at a RIP, if the jump cache knows it in this context.
    #[inline(always)]
    pub(crate) fn jump(&self, rip: u64, ctx: u64) -> Option<Next> {
        let e = &self.jumps[Self::jump_index(rip)];
        (e.rip == rip && e.ctx == ctx).then_some(e.op)
    }

    pub(crate) fn set_jump(&mut self, rip: u64, ctx: u64, op: Next) {
        self.jumps[Self::jump_index(rip)] = Jump { rip, ctx, op };
    }

    /// The block at a guest-physical address.
    pub(crate) fn find(&self, gpa: u64, key: u8) -> Option<&Block> {
        self.by_id
            .get(&Self::id(gpa, key))
            .map(|&i| &self.blocks[i as usize])
    }

    /// Keeps a new block; answers its first operation.
    pub(crate) fn insert(
        &mut self,
        gpa: u64,
        key: u8,
        code: &[u8],
        second: Option<u64>,
        (ops, mnemonics): (Vec<Op>, Vec<u16>),
    ) -> Next {
        self.decoded += 1;
        let index = self.blocks.len() as u32;
        let id = Self::id(gpa, key);
        self.ops += ops.len();
        let len = code.len() as u16;
        let block = Block {
            count: ops.first().map_or(0, |op| op.count.get()),
            ops: ops.into_boxed_slice(),
            id,
            second,
            len,
            code: code.into(),
            mnemonics: mnemonics.into(),
            suspect: false,
        };
        let first = block.first();
        self.blocks.push(block);
        self.trusted.push(index);
        self.by_id.insert(id, index);
        let offset = gpa % PAGE;
        self.page(gpa, index).mark(offset, len.into());
        if let Some(other) = second {
            self.page(other, index)
                .mark(0, (offset + u64::from(len)).saturating_sub(PAGE));
        }
        first
    }

    /// Memory may have changed unseen: no block runs before [`Cache::recheck`] has looked at it.
    /// Takes time in proportion to the blocks used since the last call.
    pub(crate) fn distrust(&mut self) {
        for index in self.trusted.drain(..) {
            let block = &mut self.blocks[index as usize];
            block.kill();
            block.suspect = true;
        }
    }

    /// Looks at the block at a guest-physical address if it is not trusted. `read` gives the bytes
    /// that are there now; `false` if it cannot.
    pub(crate) fn recheck(&mut self, gpa: u64, key: u8, read: impl Fn(u64, &mut [u8]) -> bool) {
        let hash_map::Entry::Occupied(entry) = self.by_id.entry(Self::id(gpa, key)) else {
            return;
        };
        let index = *entry.get();
        let block = &mut self.blocks[index as usize];
        if !block.suspect {
            return;
        }
        let mut now = [0; 0x200];
        let Some(now) = now.get_mut(..block.code.len()) else {
            entry.remove();
            return;
        };
        let split = ((PAGE - gpa % PAGE) as usize).min(now.len());
        let (head, tail) = now.split_at_mut(split);
        let readable = read(gpa, head)
            && (tail.is_empty() || block.second.is_some_and(|second| read(second, tail)));
        if readable && *now == *block.code {
            block.revive();
            self.trusted.push(index);
        } else {
            entry.remove();
        }
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

    /// Whether any of these bytes was decoded; None if nothing of the page was.
    pub(crate) fn covers(&self, gpa: u64, len: usize) -> Option<bool> {
        let page = self.pages.get(&(gpa & !(PAGE - 1)))?;
        let from = gpa % PAGE;
        let hit = (from..from + len as u64)
            .any(|a| page.covered[(a / 64) as usize & 63] >> (a % 64) & 1 != 0);
        Some(hit)
    }

    /// Kills all blocks of a page.
    pub(crate) fn drop_page(&mut self, gpa: u64) {
        let Some(page) = self.pages.remove(&(gpa & !(PAGE - 1))) else {
            return;
        };
        for index in page.blocks {
            let block = &self.blocks[index as usize];
            block.kill();
            if self.by_id.get(&block.id) == Some(&index) {
                self.by_id.remove(&block.id);
            }
        }
    }

    /// Kills all blocks that hold, or start at, one of these offsets in a page.
    pub(crate) fn kill_at(&mut self, offsets: &[u64]) {
        for (index, block) in (0_u32..).zip(&self.blocks) {
            let start = block.id % PAGE;
            let held = offsets
                .iter()
                .any(|offset| offset.wrapping_sub(start) % PAGE < block.len.into());
            if !held {
                continue;
            }
            if let Some(op) = block.ops.first() {
                op.count.set(DEAD);
            }
            if self.by_id.get(&block.id) == Some(&index) {
                self.by_id.remove(&block.id);
            }
        }
    }

    /// Gives up everything at the next [`Cache::tidy`].
    pub(crate) fn drop_all(&mut self) {
        self.blocks.iter().for_each(Block::kill);
        self.stale = true;
    }

    /// What retired so far.
    pub(crate) fn mix(&self) -> Mix {
        let mut mix = self.mix.clone();
        for block in &self.blocks {
            mix.fold(&block.ops, &block.mnemonics);
        }
        mix
    }

    /// Frees what must go. Only between blocks: pointers to operations become invalid.
    pub(crate) fn tidy(&mut self) {
        if self.stale || self.ops > CAPACITY {
            *self = Self {
                epoch: self.epoch + 1,
                decoded: self.decoded,
                lookups: self.lookups,
                mix: self.mix(),
                ..Self::new()
            };
        }
    }
}

impl Block {
    /// The operation to start with.
    pub(crate) fn first(&self) -> Next {
        self.ops.as_ptr()
    }

    /// No link leads into it any more.
    fn kill(&self) {
        if let Some(op) = self.ops.first() {
            op.count.set(DEAD);
        }
    }

    fn revive(&mut self) {
        self.suspect = false;
        if let Some(op) = self.ops.first() {
            op.count.set(self.count);
        }
    }
}

/// Instructions in the block that starts with `first`, or [`DEAD`].
#[inline(always)]
pub(crate) fn count(first: Next) -> u32 {
    // SAFETY: links and the jump cache only hold first operations of blocks, and blocks are freed
    // only by `tidy`, which also drops all links and the jump cache.
    unsafe { (*first).count.get() }
}

/// Counts that a block runs.
#[inline(always)]
pub(crate) fn entered(first: Next) {
    // SAFETY: as in `count`: it is entered now.
    let runs = unsafe { &(*first).runs };
    runs.set(runs.get().wrapping_add(1));
}
