//! The allocator of the C library, which reads a file when it first shrinks a thread's heap.

use std::hint::black_box;
use std::thread;

/// Bytes of a block: too few for a mapping of its own.
const BLOCK: usize = 64 << 10;
/// Blocks that are freed: together more than the allocator keeps in a heap.
const BLOCKS: usize = 16;

/// Makes the allocator read its file now, because a confined thread cannot open it.
///
/// glibc reads `/proc/sys/vm/overcommit_memory` once in a process, when it first shrinks the heap
/// of a thread other than the main one. Call this before the process frees large blocks: they make
/// the allocator keep more in a heap.
pub fn settle_allocator() {
    let blocks = || {
        let blocks: Vec<Vec<u8>> = (0..BLOCKS).map(|_| vec![1; BLOCK]).collect();
        drop(black_box(blocks));
    };
    // Without the thread, the call is refused later, and the allocator shrinks no heap.
    let thread = thread::Builder::new().name("allocator".to_owned());
    if let Ok(thread) = thread.spawn(blocks) {
        let _ = thread.join();
    }
}
