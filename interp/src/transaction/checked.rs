//! Read-modify-write accesses while a processor of the machine has a transaction open.

use crate::core::Core;
use crate::fault::Fault;
use crate::mmu::AccessKind;
use crate::width::Width;
use hindsight_cpu::uarch::CacheAccess;
use std::sync::{Arc, PoisonError};

/// The most bytes of such an access.
const BYTES_MAX: usize = 16;

/// Replaces the bytes of memory by new ones.
type Change<'a> = &'a mut dyn FnMut(&mut [u8]);

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
            self.change_held(pieces, bytes, f);
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
    fn change_held(&mut self, pieces: [(u64, usize); 2], bytes: &mut [u8], f: Change<'_>) {
        let memory = Arc::clone(self.memory.shared_memory());
        let (gpa, len) = pieces[0];
        let plain = memory.page(gpa).is_some_and(|page| page.writable);
        if plain && len == bytes.len() {
            let _held = memory.shared.hold(gpa, len, true);
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
