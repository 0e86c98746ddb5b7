//! Holds the platform that is lent to the processor for a run.

#![expect(
    unsafe_code,
    reason = "the lifetime of the platform's reference is erased while it is lent"
)]

use crate::platform::Platform;
use std::ptr::NonNull;

/// The platform, while it is lent.
///
/// Invariant: the pointer comes from the unique reference that the innermost [`PlatformSlot::lend`]
/// holds, and only the slot uses it.
pub(crate) struct PlatformSlot(Option<NonNull<dyn Platform>>);

// SAFETY: outside of `lend` the slot is empty; during `lend`, the running thread borrows it.
unsafe impl Send for PlatformSlot {}

/// Empties or restores a slot when a loan ends, also by a panic.
struct Loan<'a, T> {
    owner: &'a mut T,
    slot: fn(&mut T) -> &mut PlatformSlot,
    before: Option<NonNull<dyn Platform>>,
}

impl<T> Drop for Loan<'_, T> {
    fn drop(&mut self) {
        (self.slot)(self.owner).0 = self.before;
    }
}

impl PlatformSlot {
    pub(crate) fn new() -> Self {
        Self(None)
    }

    /// Calls `f` while the slot of `owner` holds the platform.
    pub(crate) fn lend<T, R>(
        owner: &mut T,
        slot: fn(&mut T) -> &mut Self,
        platform: &mut dyn Platform,
        f: impl FnOnce(&mut T) -> R,
    ) -> R {
        // SAFETY: only the lifetime changes. `platform` is borrowed until this function returns;
        // the slot gives out references only for as long as it is borrowed itself, and `Loan`
        // takes the pointer away before this function returns or unwinds.
        let erased: NonNull<dyn Platform + 'static> =
            unsafe { std::mem::transmute(NonNull::from(platform)) };
        let before = slot(owner).0.replace(erased);
        let loan = Loan {
            owner,
            slot,
            before,
        };
        f(&mut *loan.owner)
    }

    /// The platform.
    ///
    /// # Panics
    /// When none is lent.
    pub(crate) fn get(&mut self) -> &mut dyn Platform {
        let Some(mut platform) = self.0 else {
            unreachable!("guest code runs only while a platform is lent");
        };
        // SAFETY: the type's invariant: the reference that it was made from is not used during
        // `lend`, and this one lives no longer than the borrow of the slot.
        unsafe { platform.as_mut() }
    }
}

impl std::fmt::Debug for PlatformSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("PlatformSlot")
            .field(&self.0.is_some())
            .finish()
    }
}
