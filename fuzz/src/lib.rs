//! What the targets share: one run of a loader, and what must hold after it; machines to run and to
//! debug; parsers.

pub mod btf;
pub mod gdb;
pub mod guest;
pub mod kernel;
pub mod merge;
pub mod processes;
pub mod snapshot;
pub mod texts;
pub mod virtio;
pub mod vsock;

use hindsight_vmm::boot::{LoadRequest, load};
use hindsight_vmm::memory::layout::Layout;
use vm_memory::GuestMemoryMmap;

/// RAM of the guest: enough for the kernel of a small bzImage at 1 MiB.
const MEMORY: u64 = 4 << 20;
const ACPI: std::ops::Range<u64> = 0xe_0000..0xe_2000;

/// Loads the request, and panics if parts of a loaded image overlap or lie outside of RAM, or if the
/// entry is in none of them.
pub fn check(request: &LoadRequest<'_>) {
    let layout = Layout::new(MEMORY)
        .and_then(|layout| layout.with_acpi(ACPI, ACPI.start))
        .expect("the layout is valid");
    let memory = GuestMemoryMmap::from_ranges(&layout.ram()).expect("4 MiB can be mapped");
    let Ok(loaded) = load(&memory, &layout, request) else {
        return;
    };
    let mut end = 0;
    for part in &loaded.placed {
        assert!(part.range.start >= end, "overlap: {:x?}", loaded.placed);
        assert!(part.range.start < part.range.end, "empty: {part:x?}");
        end = part.range.end;
    }
    assert!(end <= layout.low_end(), "beyond RAM: {:x?}", loaded.placed);
    let entry = loaded.state.seg[1].base + loaded.state.rip;
    assert!(loaded.placed.iter().any(|part| part.range.contains(&entry)));
}
