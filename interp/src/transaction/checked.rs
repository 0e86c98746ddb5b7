//! Read-modify-write accesses while a processor of the machine has a transaction open.

use crate::core::Core;
use crate::fault::Fault;
use crate::memory::{Memory, Page, compare_exchange_pair};
use crate::mmu::AccessKind;
use crate::width::Width;
use hindsight_cpu::uarch::CacheAccess;
use std::sync::{Arc, PoisonError};

/// Maximum size of such an access in bytes.
const BYTES_MAX: usize = 16;

/// Replaces the bytes of memory by new ones.
type Change<'a> = &'a mut dyn FnMut(&mut [u8]);

/// Replaces a value by another one if it is still `old`; `None` where it cannot be written.
fn replace<T: Width>(page: Page<'_>, gpa: u64, old: u128, new: u128) -> Option<bool> {
    let half = |v: u128| T::from_u64(u64::try_from(v & u128::from(u64::MAX)).unwrap_or(0));
    let target = page.value_mut::<T>(gpa)?;
    Some(target.compare_exchange(half(old), half(new)))
}

impl Core {
    /// Like [`Core::modify`], with a check for conflicts.
    #[cold]
    pub(crate) fn modify_checked<T: Width>(
        &mut self,
        lin: u64,
        lock: bool,
        mut f: impl FnMut(T) -> T,
    ) -> Result<T, Fault> {
        let mut old = T::from_u64(0);
        self.change(lin, T::SIZE, lock, &mut |bytes| {
            let mut value = [0; 8];
            value[..T::SIZE].copy_from_slice(bytes);
            old = T::from_u64(u64::from_le_bytes(value));
            bytes.copy_from_slice(&f(old).zext().to_le_bytes()[..T::SIZE]);
        })?;
        Ok(old)
    }

    /// Like [`Core::modify_pair`], with a check for conflicts.
    #[cold]
    pub(crate) fn modify_pair_checked(
        &mut self,
        lin: u64,
        expected: (u64, u64),
        new: (u64, u64),
    ) -> Result<(u64, u64), Fault> {
        let mut old = 0;
        let whole = |(low, high): (u64, u64)| u128::from(low) | u128::from(high) << 64;
        self.change(lin, BYTES_MAX, true, &mut |bytes| {
            let mut value = [0; BYTES_MAX];
            value.copy_from_slice(bytes);
            old = u128::from_le_bytes(value);
            if old == whole(expected) {
                bytes.copy_from_slice(&whole(new).to_le_bytes());
            }
        })?;
        let [low, high] = [0, 64].map(|shift| {
            let half = old >> shift & u128::from(u64::MAX);
            u64::try_from(half).unwrap_or(0)
        });
        Ok((low, high))
    }

    fn change(&mut self, lin: u64, len: usize, lock: bool, f: Change<'_>) -> Result<(), Fault> {
        let pieces = self
            .pieces(lin, len, AccessKind::Write, self.mmu.rights())?
            .0;
        if lock {
            self.counters.record_lock();
        }
        let mut buffer = [0; BYTES_MAX];
        let bytes = &mut buffer[..len];
        if self.in_transaction() {
            self.each(pieces, bytes, Self::load_in_transaction)?;
            f(bytes);
            self.each(pieces, bytes, |core, gpa, data| {
                core.store_in_transaction(gpa, data)
            })?;
        } else {
            self.change_held(pieces, bytes, lock, f);
        }
        for (at, gpa, len) in [
            (0, pieces[0].0, pieces[0].1),
            (pieces[0].1, pieces[1].0, pieces[1].1),
        ] {
            for kind in [CacheAccess::Load, CacheAccess::Store] {
                self.record_touch(lin.wrapping_add(at as u64), gpa, len, kind);
            }
        }
        if self.debug.watching() {
            self.check_watchpoints(lin, len as u64, true);
        }
        Ok(())
    }

    /// Changes bytes outside of a transaction.
    ///
    /// The change is atomic, unless the bytes lie in two pages or belong to a device.
    fn change_held(
        &mut self,
        pieces: [(u64, usize); 2],
        bytes: &mut [u8],
        lock: bool,
        f: Change<'_>,
    ) {
        let memory = Arc::clone(self.memory.shared_memory());
        let (gpa, len) = pieces[0];
        let plain = memory.page(gpa).is_some_and(|page| page.writable);
        if plain && len == bytes.len() {
            let _held = memory.shared.hold(gpa, len, true);
            if lock && self.exchange(&memory, gpa, bytes, f) {
                return;
            }
            self.get_phys(gpa, bytes);
            f(bytes);
            self.put_phys(gpa, bytes);
            return;
        }
        let split = memory.split_lock.lock();
        let _split = split.unwrap_or_else(PoisonError::into_inner);
        let (low, high) = bytes.split_at_mut(len);
        self.read_phys(gpa, low);
        self.read_phys(pieces[1].0, high);
        f(bytes);
        let (low, high) = bytes.split_at(len);
        self.write_phys(gpa, low);
        self.write_phys(pieces[1].0, high);
    }

    /// Changes aligned bytes of a page of RAM atomically.
    ///
    /// Returns false, and does nothing, if they are not aligned.
    ///
    /// A processor may change them by its own locked accesses meanwhile, if it does not check for
    /// conflicts yet because the last transaction has just ended.
    fn exchange(&mut self, memory: &Memory, gpa: u64, bytes: &mut [u8], f: Change<'_>) -> bool {
        let len = bytes.len();
        let Some(page) = memory.page(gpa).filter(|page| page.writable) else {
            return false;
        };
        if !len.is_power_of_two() || !gpa.is_multiple_of(len as u64) {
            return false;
        }
        page.set_dirty();
        let marks = page.code_marks();
        loop {
            page.bytes(gpa, len).read(bytes);
            let mut old = [0; BYTES_MAX];
            old[..len].copy_from_slice(bytes);
            f(bytes);
            let mut new = [0; BYTES_MAX];
            new[..len].copy_from_slice(bytes);
            let (old, new) = (u128::from_le_bytes(old), u128::from_le_bytes(new));
            let replaced = match len {
                1 => replace::<u8>(page, gpa, old, new),
                2 => replace::<u16>(page, gpa, old, new),
                4 => replace::<u32>(page, gpa, old, new),
                8 => replace::<u64>(page, gpa, old, new),
                _ => page
                    .bytes_mut(gpa, len)
                    .and_then(|bytes| compare_exchange_pair(bytes, old, new))
                    .map(|found| found == old),
            };
            match replaced {
                Some(true) => break,
                Some(false) => {}
                None => return false,
            }
        }
        if marks != 0 {
            self.wrote_code_page(gpa, len, marks);
        }
        true
    }

    /// Calls `f` with the address of each piece and its part of `bytes`.
    fn each(
        &mut self,
        pieces: [(u64, usize); 2],
        bytes: &mut [u8],
        mut f: impl FnMut(&mut Self, u64, &mut [u8]) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let (low, high) = bytes.split_at_mut(pieces[0].1);
        f(self, pieces[0].0, low)?;
        f(self, pieces[1].0, high)
    }
}
