//! RAM that the interpreter allocates itself.

#![expect(unsafe_code, reason = "pages are allocated by hand")]

use super::PAGE;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// Zeroed pages, freed when dropped. Nothing refers to them but by address.
#[derive(Debug)]
pub(super) struct PageAllocation {
    /// None for no bytes.
    host: Option<NonNull<u8>>,
    layout: Layout,
}

// SAFETY: the memory is the value's own.
unsafe impl Send for PageAllocation {}
// SAFETY: as for Send; a shared reference gives out an address only.
unsafe impl Sync for PageAllocation {}

impl PageAllocation {
    /// `len` bytes, a multiple of the page size; `None` if the host has not as many.
    pub(super) fn new(len: u64) -> Option<Self> {
        debug_assert!(len.is_multiple_of(PAGE));
        let page = usize::try_from(PAGE).ok()?;
        let layout = Layout::from_size_align(usize::try_from(len).ok()?, page).ok()?;
        let host = if layout.size() == 0 {
            None
        } else {
            // SAFETY: the layout has bytes.
            Some(NonNull::new(unsafe { alloc_zeroed(layout) })?)
        };
        Some(Self { host, layout })
    }

    /// The address of the first byte, page-aligned.
    pub(super) fn host(&self) -> *mut u8 {
        self.host.map_or(
            std::ptr::without_provenance_mut(self.layout.align()),
            |host| host.as_ptr(),
        )
    }
}

impl Drop for PageAllocation {
    fn drop(&mut self) {
        if let Some(host) = self.host {
            // SAFETY: allocated by `new` with this layout.
            unsafe { dealloc(host.as_ptr(), self.layout) };
        }
    }
}
