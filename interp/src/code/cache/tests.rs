//! Tests of the cache with a context that counts executed operations.

use super::super::op::{DEAD, Handler, InnerOp, LastOp, LiveBlock, Next};
use super::*;

/// The context of handlers: the budget, and the number of executed operations.
#[derive(Default)]
struct Counter {
    executed: u32,
}

fn inner(c: &mut Counter, o: InnerOp<'_, Counter>) -> Next<Counter> {
    c.executed += 1;
    o.go(c)
}

fn last(c: &mut Counter, o: LastOp<'_, Counter>) -> Next<Counter> {
    c.executed += 1;
    match o.link() {
        Some(block) if block.count() != DEAD => block.go(c),
        _ => Next::EXIT,
    }
}

/// Inserts a block of `count` instructions of one byte at `gpa`.
fn insert(cache: &mut CodeCache<Counter>, gpa: u64, count: u8) -> BlockEntry<Counter> {
    let mut ops = Vec::new();
    for n in 0..count {
        let handler = if n + 1 == count {
            Handler::Last(last)
        } else {
            Handler::Inner(inner)
        };
        let mut op = Op::new(handler);
        op.remaining = count - n;
        ops.push(op);
    }
    ops[0].set_count(count.into());
    let mnemonics = vec![7; count.into()];
    let code = vec![0x90; count.into()];
    let second = (gpa % PAGE + u64::from(count) > PAGE).then_some((gpa | 0xfff) + 1);
    let pages = BlockPages {
        second,
        linear: None,
    };
    cache.insert(gpa, 0, &code, pages, (ops, mnemonics))
}

fn run(entry: BlockEntry<Counter>) -> u32 {
    let mut counter = Counter::default();
    live(entry).dispatch(&mut counter);
    counter.executed
}

fn live<'b>(entry: BlockEntry<Counter>) -> LiveBlock<'b, Counter> {
    // SAFETY: the tests do not free a block that they run.
    unsafe { entry.live() }
}

fn link(cache: &mut CodeCache<Counter>, from: BlockEntry<Counter>, to: BlockEntry<Counter>) {
    // SAFETY: the block is not freed, and has one operation, its branch.
    let branch = unsafe { BlockOp::new(cache.blocks[0].entry().live_ptr()) };
    assert!(cache.blocks[0].entry() == from && cache.blocks[0].ops().len() == 1);
    cache.set_pending_link(branch);
    cache.link_pending(to);
}

impl BlockEntry<Counter> {
    fn live_ptr(self) -> NonNull<Op<Counter>> {
        live(self).first_op().as_ptr()
    }
}

/// Reads memory for a lookup that must not compare the block with memory.
fn never_read(_: u64, _: &mut [u8]) -> bool {
    unreachable!("the block is not suspect");
}

#[test]
fn linked_blocks_run_one_after_the_other_until_one_is_killed() {
    let mut cache = CodeCache::new();
    let first = insert(&mut cache, 0x1000, 1);
    let second = insert(&mut cache, 0x2000, 3);
    assert_eq!(run(first), 1);
    link(&mut cache, first, second);
    assert_eq!(run(first), 4);
    cache.drop_page(0x2000);
    assert_eq!(run(first), 1);
    assert!(cache.find(0x2000, 0, never_read).is_none());
    assert!(cache.find(0x1000, 0, never_read).is_some());
}

#[test]
fn pending_link_is_cleared_when_blocks_are_freed() {
    let mut cache = CodeCache::new();
    let first = insert(&mut cache, 0x1000, 1);
    // SAFETY: the block is not freed.
    cache.set_pending_link(unsafe { BlockOp::new(first.live_ptr()) });
    cache.drop_all();
    // SAFETY: `first` is not used after this.
    unsafe { cache.tidy() };
    let second = insert(&mut cache, 0x2000, 1);
    cache.link_pending(second);
    assert_eq!((run(second), cache.epoch(), cache.decoded()), (1, 1, 2));
}

#[test]
fn jump_cache_hits_only_in_the_context_it_was_filled_in() {
    let mut cache = CodeCache::new();
    let entry = insert(&mut cache, 0x1000, 2);
    cache.set_context(8, false);
    cache.set_jump(0x40_1000, entry);
    assert!(cache.jump(0x40_1000) == Some(entry) && cache.jump(0x40_1001).is_none());
    for (key, user) in [(4, false), (8, true)] {
        cache.set_context(key, user);
        assert!(cache.jump(0x40_1000).is_none());
    }
    cache.set_context(8, false);
    assert!(cache.jump(0x40_1000) == Some(entry));
    cache.new_generation();
    cache.set_context(8, false);
    assert!(cache.jump(0x40_1000).is_none());
}

#[test]
fn covers_reports_the_decoded_bytes_of_both_pages() {
    let mut cache = CodeCache::new();
    insert(&mut cache, 0x1ffe, 4);
    assert_eq!(cache.covers(0x1ffd, 1), Some(false));
    assert_eq!(cache.covers(0x1ff8, 8), Some(true));
    assert_eq!(cache.covers(0x2001, 1), Some(true));
    assert_eq!(cache.covers(0x2002, 8), Some(false));
    assert_eq!(cache.covers(0x3000, 8), None);
}

#[test]
fn suspect_block_is_revived_if_its_bytes_are_unchanged() {
    let mut cache = CodeCache::new();
    let entry = insert(&mut cache, 0x1ffe, 4);
    cache.distrust();
    assert_eq!(live(entry).count(), DEAD);
    let found = cache.find(0x1ffe, 0, |_, bytes| {
        bytes.fill(0x90);
        true
    });
    assert!(found.is_some());
    assert_eq!(live(entry).count(), 4);
    assert!(cache.find(0x1ffe, 0, never_read).is_some());
    cache.distrust();
    let found = cache.find(0x1ffe, 0, |gpa, bytes| {
        bytes.fill(if gpa == 0x2000 { 0xcc } else { 0x90 });
        true
    });
    assert!(found.is_none());
    assert_eq!(live(entry).count(), DEAD);
    assert!(cache.find(0x1ffe, 0, never_read).is_none());
}

#[test]
fn kill_at_kills_blocks_that_contain_the_offset() {
    let mut cache = CodeCache::new();
    let near = insert(&mut cache, 0x1010, 4);
    let far = insert(&mut cache, 0x5020, 4);
    cache.kill_at(&[0x13, 0x24]);
    assert_eq!((live(near).count(), live(far).count()), (DEAD, 4));
}

#[test]
fn mix_counts_instructions_of_complete_and_early_ended_runs() {
    let mut cache = CodeCache::new();
    let entry = insert(&mut cache, 0x1000, 4);
    for _ in 0..3 {
        live(entry).count_run();
    }
    // The second of four instructions faulted, so three of that run did not retire.
    let id = cache.blocks[0].ops()[1].id();
    cache.mix.ended_early(id, false);
    let list = cache.mix().list();
    assert_eq!(list.iter().map(|entry| entry.1).sum::<u64>(), 9);
}
