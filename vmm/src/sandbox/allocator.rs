//! Prepares the C library's allocator, which opens a file of /proc during the run.

use std::hint::black_box;
use std::thread;

/// Bytes of a block: below glibc's threshold for a mapping of its own.
const BLOCK: usize = 64 << 10;
/// Number of blocks. Freeing all of them makes the allocator shrink the thread's heap.
const BLOCKS: usize = 16;

/// Makes the allocator open its file of /proc now: a confined thread cannot open it.
///
/// glibc reads `/proc/sys/vm/overcommit_memory` once in a process, when it first shrinks the heap
/// of a thread other than the main one. Call this before the process frees a large block: that
/// raises glibc's threshold for shrinking a heap, and then this function has no effect.
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
