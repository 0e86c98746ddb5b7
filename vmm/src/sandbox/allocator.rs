//! Makes the C library's allocator open its file before the sandbox is in force.
//!
//! When glibc first returns memory of a thread other than the main one to the host, it reads
//! `/proc/sys/vm/overcommit_memory`, and keeps the answer. In a confined thread that call would be
//! reported, or with `--sandbox strict` end the run.

use std::hint::black_box;
use std::thread;

/// Less than from where on an allocation is mapped by itself.
const BLOCK_BYTES: usize = 64 << 10;
/// Nearly all that one heap of glibc holds, which is more than it keeps for the next allocations. Of each
/// block, only the allocator's own header is ever touched.
const BLOCKS: usize = 60 << 4;

/// Returns memory from a thread of its own.
pub(super) fn settle() {
    let thread = thread::Builder::new().name("allocator".to_owned());
    let settled = thread.spawn(|| {
        let blocks: Vec<Vec<u8>> = (0..BLOCKS)
            .map(|_| Vec::with_capacity(BLOCK_BYTES))
            .collect();
        drop(black_box(blocks));
    });
    // Without the thread, the call is reported when it comes.
    let _ = settled.map(thread::JoinHandle::join);
}
