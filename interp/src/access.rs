//! Access to guest memory by linear address.

use crate::core::Core;
use crate::fault::Fault;
use crate::memory::{CodeChanges, GuestBytesMut, GuestMut, GuestRef, compare_exchange_pair};
use crate::mmu::{AccessKind, TlbSet};
use crate::registers::Reg;
use crate::width::Width;
use hindsight_cpu::uarch::CacheAccess;
use std::sync::{Arc, PoisonError};

/// The parts of an access within each page: guest-physical address and length.
///
/// The second one is empty if the access does not cross a page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pieces(pub(crate) [(u64, usize); 2]);

/// The fast path: pages that are in the TLB.
impl Core {
    /// Reads a value whose page is in the TLB.
    #[inline(always)]
    pub(crate) fn fast_read<T: Width>(&self, lin: u64) -> Option<T> {
        let found = self.mmu.reads.find(lin, self.mmu.fast());
        found.map(GuestRef::load)
    }

    /// Writes a value whose page is in the TLB; false if it is not.
    #[inline(always)]
    pub(crate) fn fast_write<T: Width>(&self, lin: u64, v: T) -> bool {
        match self.mmu.writes.find(lin, self.mmu.fast()) {
            Some(found) => {
                found.store(v);
                true
            }
            None => false,
        }
    }

    /// Returns a value to read and write, if its page is in the TLB.
    #[inline(always)]
    pub(crate) fn fast_modify<T: Width>(&self, lin: u64) -> Option<GuestMut<'_, T>> {
        self.mmu.writes.find(lin, self.mmu.fast())
    }

    /// Reads eight bytes of the DS save area whose page is in the TLB.
    pub(crate) fn ds_fast_read(&self, lin: u64) -> Option<u64> {
        let found = self.mmu.reads.find(lin, self.mmu.ds());
        found.map(GuestRef::load)
    }

    /// Whether eight bytes of the DS save area are in a page that is in the TLB for writes.
    pub(crate) fn ds_can_write(&self, lin: u64) -> bool {
        self.mmu.writes.find::<u64>(lin, self.mmu.ds()).is_some()
    }

    /// Writes words to the DS save area, if the TLB has their page; else returns false.
    #[inline(always)]
    pub(crate) fn ds_fast_write(&self, lin: u64, words: &[u64]) -> bool {
        let len = size_of_val(words);
        if len > 4096 {
            return false;
        }
        let Some(bytes) = self.mmu.writes.find_bytes(lin, len, self.mmu.ds()) else {
            return false;
        };
        bytes.write_words(words);
        true
    }
}

/// Reads and writes.
impl Core {
    /// Reads with the rights of explicit accesses.
    pub(crate) fn read<T: Width>(&mut self, lin: u64) -> Result<T, Fault> {
        match self.fast_read(lin) {
            Some(v) => Ok(v),
            None => self.read_slow(lin, self.mmu.rights()),
        }
    }

    /// Writes with the rights of explicit accesses.
    pub(crate) fn write<T: Width>(&mut self, lin: u64, v: T) -> Result<(), Fault> {
        if self.fast_write(lin, v) {
            Ok(())
        } else {
            self.write_slow(lin, v, self.mmu.rights())
        }
    }

    /// Reads as the processor itself does, with supervisor rights.
    ///
    /// The access triggers no breakpoint of the guest (rule OP-04).
    pub(crate) fn read_sys<T: Width>(&mut self, lin: u64) -> Result<T, Fault> {
        let hits = self.debug.hits();
        let result = self.read_slow(lin, TlbSet::Supervisor);
        self.debug.restore_hits(hits);
        result
    }

    /// Writes as the processor itself does, with supervisor rights.
    ///
    /// The access triggers no breakpoint of the guest (rule OP-04).
    pub(crate) fn write_sys<T: Width>(&mut self, lin: u64, v: T) -> Result<(), Fault> {
        let hits = self.debug.hits();
        let result = self.write_slow(lin, v, TlbSet::Supervisor);
        self.debug.restore_hits(hits);
        result
    }

    /// Returns the rights of accesses that the processor makes for code at `cpl`.
    fn rights_at(&self, cpl: u8) -> TlbSet {
        if cpl == 3 {
            self.mmu.rights()
        } else {
            TlbSet::Supervisor
        }
    }

    /// Writes with the rights of another privilege level, which is at most the CPL.
    pub(crate) fn write_as<T: Width>(&mut self, lin: u64, v: T, cpl: u8) -> Result<(), Fault> {
        self.write_slow(lin, v, self.rights_at(cpl))
    }

    #[cold]
    #[inline(never)]
    fn read_slow<T: Width>(&mut self, lin: u64, set: TlbSet) -> Result<T, Fault> {
        if self.mmu.promote_fast(lin, AccessKind::Read, set)
            && let Some(v) = self.fast_read(lin)
        {
            return Ok(v);
        }
        if self.misses_watchpoints(lin, T::SIZE as u64, false)
            && let Some(found) = self.mmu.reads.find_watched(lin, set)
        {
            return Ok(found.load());
        }
        let mut data = [0; 8];
        self.read_bytes_as(lin, &mut data[..T::SIZE], set)?;
        Ok(T::from_u64(u64::from_le_bytes(data)))
    }

    #[cold]
    #[inline(never)]
    fn write_slow<T: Width>(&mut self, lin: u64, v: T, set: TlbSet) -> Result<(), Fault> {
        if self.mmu.promote_fast(lin, AccessKind::Write, set) && self.fast_write(lin, v) {
            return Ok(());
        }
        if self.misses_watchpoints(lin, T::SIZE as u64, true)
            && let Some(found) = self.mmu.writes.find_watched(lin, set)
        {
            found.store(v);
            return Ok(());
        }
        self.write_bytes_as(lin, &v.zext().to_le_bytes()[..T::SIZE], set)
    }

    /// Reads up to a page of bytes.
    pub(crate) fn read_bytes(&mut self, lin: u64, data: &mut [u8]) -> Result<(), Fault> {
        if (1..=4096).contains(&data.len())
            && let Some(found) = self.mmu.reads.find_bytes(lin, data.len(), self.mmu.fast())
        {
            found.read(data);
            return Ok(());
        }
        self.read_bytes_as(lin, data, self.mmu.rights())
    }

    /// Writes up to a page of bytes; none is written if any would fault.
    pub(crate) fn write_bytes(&mut self, lin: u64, data: &[u8]) -> Result<(), Fault> {
        if let Some(found) = self.find_writable(lin, data.len()) {
            found.write(data);
            return Ok(());
        }
        self.write_bytes_as(lin, data, self.mmu.rights())
    }

    /// Returns bytes to write, if their page is in the TLB for writes.
    fn find_writable(&self, lin: u64, len: usize) -> Option<GuestBytesMut<'_>> {
        if !(1..=4096).contains(&len) {
            return None;
        }
        self.mmu.writes.find_bytes(lin, len, self.mmu.fast())
    }

    fn read_bytes_as(&mut self, lin: u64, data: &mut [u8], set: TlbSet) -> Result<(), Fault> {
        let pieces = self.pieces(lin, data.len(), AccessKind::Read, set)?;
        let mut done = 0;
        for (gpa, len) in pieces.0 {
            if self.in_transaction() {
                self.load_in_transaction(gpa, &mut data[done..done + len])?;
            } else {
                self.read_phys(gpa, &mut data[done..done + len]);
            }
            self.record_touch(lin.wrapping_add(done as u64), gpa, len, CacheAccess::Load);
            done += len;
        }
        debug_assert_eq!(done, data.len());
        if self.debug.watching() {
            self.check_watchpoints(lin, data.len() as u64, false);
        }
        Ok(())
    }

    fn write_bytes_as(&mut self, lin: u64, data: &[u8], set: TlbSet) -> Result<(), Fault> {
        let pieces = self.pieces(lin, data.len(), AccessKind::Write, set)?;
        let mut done = 0;
        for (gpa, len) in pieces.0 {
            if self.in_transaction() {
                self.store_in_transaction(gpa, &data[done..done + len])?;
            } else {
                self.write_phys(gpa, &data[done..done + len]);
            }
            self.record_touch(lin.wrapping_add(done as u64), gpa, len, CacheAccess::Store);
            done += len;
        }
        debug_assert_eq!(done, data.len());
        if self.debug.watching() {
            self.check_watchpoints(lin, data.len() as u64, true);
        }
        Ok(())
    }

    /// Raises the fault that a read of these bytes would raise; has no other effect.
    ///
    /// Returns the guest-physical address of the first byte.
    pub(crate) fn probe_read(&mut self, lin: u64, len: usize) -> Result<u64, Fault> {
        let pieces = self.pieces(lin, len, AccessKind::Read, self.mmu.rights())?;
        Ok(pieces.0[0].0)
    }

    /// Raises the fault that a write of these bytes would raise; has no other effect.
    pub(crate) fn probe_write(&mut self, lin: u64, len: usize) -> Result<(), Fault> {
        if self.find_writable(lin, len).is_some() {
            return Ok(());
        }
        self.pieces(lin, len, AccessKind::Write, self.mmu.rights())
            .map(|_| ())
    }

    /// Like [`Core::probe_write`], with the rights of another privilege level.
    pub(crate) fn probe_write_as(&mut self, lin: u64, len: usize, cpl: u8) -> Result<(), Fault> {
        self.pieces(lin, len, AccessKind::Write, self.rights_at(cpl))
            .map(|_| ())
    }

    /// Raises #AC if alignment is checked and `lin` is not a multiple of `alignment`.
    ///
    /// For operands whose size is not a power of two; [`Core::pieces`] checks the others up to 8
    /// bytes.
    pub(crate) fn check_alignment(&self, lin: u64, alignment: usize) -> Result<(), Fault> {
        let checked = self.mmu.rights() == TlbSet::UserAligned;
        if checked && !lin.is_multiple_of(alignment as u64) {
            return Err(Fault::AC);
        }
        Ok(())
    }

    /// Translates an access of up to one page.
    pub(crate) fn pieces(
        &mut self,
        lin: u64,
        len: usize,
        access: AccessKind,
        set: TlbSet,
    ) -> Result<Pieces, Fault> {
        let checks_conflicts = set == TlbSet::UserAligned && len.is_power_of_two() && len <= 8;
        if checks_conflicts && lin & (len as u64 - 1) != 0 {
            return Err(Fault::AC);
        }
        let first = len.min(Self::page_rest(lin));
        let page = self.translate(lin, access, set)?;
        if first == len {
            self.enter_page(lin, page, access, set);
            return Ok(Pieces([(page.gpa, len), (0, 0)]));
        }
        let lin = lin.wrapping_add(first as u64) & self.mode.ip_mask();
        let next = self.translate(lin, access, set)?;
        Ok(Pieces([(page.gpa, first), (next.gpa, len - first)]))
    }
}

/// Guest-physical memory and devices.
impl Core {
    /// Reads guest-physical bytes within one page, from memory or the platform.
    pub(crate) fn read_phys(&mut self, gpa: u64, data: &mut [u8]) {
        if !self.checks_conflicts {
            return self.get_phys(gpa, data);
        }
        let memory = Arc::clone(self.memory.shared_memory());
        let ram = memory.page(gpa).is_some();
        let _held = ram.then(|| memory.shared.hold(gpa, data.len(), false));
        self.get_phys(gpa, data);
    }

    /// Writes guest-physical bytes within one page, to memory or the platform.
    pub(crate) fn write_phys(&mut self, gpa: u64, data: &[u8]) {
        if !self.checks_conflicts {
            return self.put_phys(gpa, data);
        }
        let memory = Arc::clone(self.memory.shared_memory());
        let ram = memory.page(gpa).is_some_and(|page| page.writable);
        let _held = ram.then(|| memory.shared.hold(gpa, data.len(), true));
        self.put_phys(gpa, data);
    }

    /// Like [`Core::read_phys`], without a check for conflicts with transactions.
    pub(crate) fn get_phys(&mut self, gpa: u64, data: &mut [u8]) {
        if data.is_empty() {
            return;
        }
        if let Some(page) = self.memory.page(gpa) {
            page.bytes(gpa, data.len()).read(data);
            return;
        }
        for (at, chunk) in mmio_chunks(gpa, data.len()) {
            let bytes = &mut data[chunk];
            self.platform().mmio_read(at, bytes);
        }
        self.exit.requested = true;
    }

    /// Like [`Core::write_phys`], without a check for conflicts with transactions.
    pub(crate) fn put_phys(&mut self, gpa: u64, data: &[u8]) {
        if data.is_empty() {
            return;
        }
        let page = self.memory.page(gpa);
        if let Some((page, bytes)) =
            page.and_then(|page| Some((page, page.bytes_mut(gpa, data.len())?)))
        {
            page.set_dirty();
            let marks = page.code_marks();
            bytes.write(data);
            if marks != 0 {
                self.wrote_code_page(gpa, data.len(), marks);
            }
            return;
        }
        for (at, chunk) in mmio_chunks(gpa, data.len()) {
            self.platform().mmio_write(at, &data[chunk]);
        }
        self.exit.requested = true;
    }

    /// Handles a store of this processor to a page with these code marks.
    pub(crate) fn wrote_code_page(&mut self, gpa: u64, len: usize, marks: u64) {
        match self.code.covers(gpa, len) {
            Some(true) => {
                self.drop_code(gpa);
                self.exit.requested = true;
            }
            Some(false) => {}
            None => self.memory.unmark_code(gpa),
        }
        if self.memory.is_others_code(marks) {
            self.memory.code_written(gpa, len);
        }
    }

    /// Drops the decoded code of a page.
    fn drop_code(&mut self, gpa: u64) {
        self.code.drop_page(gpa);
        self.memory.unmark_code(gpa);
    }

    /// Makes code that other processors wrote visible to the next instruction.
    ///
    /// For serializing instructions that do not leave the block otherwise. SDM Vol. 3A,
    /// "Serializing Instructions".
    pub(crate) fn serialize(&mut self) {
        self.exit.requested |= self.memory.has_code_changes();
    }

    /// Applies changes that other processors and devices made to code pages.
    pub(crate) fn follow_code_changes(&mut self) {
        let Some(changes) = self.memory.take_code_changes() else {
            return;
        };
        let CodeChanges {
            new_code_pages,
            written,
        } = changes;
        if new_code_pages {
            self.mmu.writes.flush();
        }
        match written {
            Some(ranges) => {
                for (gpa, len) in ranges {
                    if self.code.covers(gpa, len) == Some(true) {
                        self.drop_code(gpa);
                    }
                }
            }
            None => self.code.drop_all(),
        }
    }
}

/// Read-modify-write accesses.
impl Core {
    /// Replaces a value `v` by `f(v)`, and returns `v`; with `lock`, atomically.
    ///
    /// `f(v)` is written even if it equals `v`.
    pub(crate) fn modify<T: Width>(
        &mut self,
        lin: u64,
        lock: bool,
        mut f: impl FnMut(T) -> T,
    ) -> Result<T, Fault> {
        if !self.can_modify::<T>(lin) {
            if self.checks_conflicts {
                return self.modify_checked(lin, lock, f);
            }
            self.probe_write(lin, T::SIZE)?;
        }
        if !lock {
            let old: T = self.read(lin)?;
            self.write(lin, f(old))?;
            return Ok(old);
        }
        let locked = self.mmu.locked();
        let found = self.mmu.writes.find::<T>(lin, locked);
        if let Some(old) = found.and_then(|found| found.modify_locked(&mut f)) {
            self.record_locked(lin, T::SIZE);
            return Ok(old);
        }
        self.counters.record_lock();
        let memory = Arc::clone(self.memory.shared_memory());
        let _guard = memory
            .split_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let old: T = self.read(lin)?;
        self.write(lin, f(old))?;
        Ok(old)
    }

    /// Whether the page of a value is in the TLB for writes.
    fn can_modify<T: Width>(&self, lin: u64) -> bool {
        let writes = &self.mmu.writes;
        writes.find::<T>(lin, self.mmu.locked()).is_some()
            || self.debug.watching()
                && !self.checks_conflicts
                && writes.find_watched::<T>(lin, self.mmu.rights()).is_some()
    }

    /// CMPXCHG16B on an aligned address: stores `new` if the pair equals `expected`.
    ///
    /// Returns the old pair. The caller holds the lock of split accesses.
    pub(crate) fn modify_pair(
        &mut self,
        lin: u64,
        expected: (u64, u64),
        new: (u64, u64),
    ) -> Result<(u64, u64), Fault> {
        debug_assert!(lin.is_multiple_of(16));
        let locked = self.mmu.locked();
        if self.mmu.writes.find_bytes(lin, 16, locked).is_none() {
            if self.checks_conflicts {
                return self.modify_pair_checked(lin, expected, new);
            }
            self.probe_write(lin, 16)?;
        }
        let join = |(low, high): (u64, u64)| u128::from(low) | u128::from(high) << 64;
        let found = self.mmu.writes.find_bytes(lin, 16, locked);
        if let Some(old) =
            found.and_then(|bytes| compare_exchange_pair(bytes, join(expected), join(new)))
        {
            self.record_locked(lin, 16);
            return Ok(split_pair(old));
        }
        let old = (self.read(lin)?, self.read(lin + 8)?);
        let store = if old == expected { new } else { old };
        self.write(lin, store.0)?;
        self.write(lin + 8, store.1)?;
        Ok(old)
    }
}

/// Returns the low and the high half of 16 bytes.
#[expect(clippy::cast_possible_truncation, reason = "halves")]
pub(crate) fn split_pair(pair: u128) -> (u64, u64) {
    (pair as u64, (pair >> 64) as u64)
}

/// Whole ranges, for repeated string instructions.
impl Core {
    /// Copies bytes that lie within one page each; false if one of them is not in the TLB.
    pub(crate) fn copy(&mut self, from: u64, to: u64, len: usize) -> Result<bool, Fault> {
        let set = self.mmu.fast();
        if self.mmu.reads.find_bytes(from, len, set).is_none() {
            self.pieces(from, 1, AccessKind::Read, self.mmu.rights())?;
            if self.mmu.reads.find_bytes(from, len, set).is_none() {
                return Ok(false);
            }
        }
        if !self.enter_writable(to, len)? {
            return Ok(false);
        }
        let source = self.mmu.reads.find_bytes(from, len, set);
        let target = self.mmu.writes.find_bytes(to, len, set);
        let (Some(source), Some(target)) = (source, target) else {
            return Ok(false);
        };
        target.copy_from(source);
        Ok(true)
    }

    /// Stores the accumulator `count` times within one page; false if that is not in the TLB.
    pub(crate) fn fill<T: Width>(&mut self, to: u64, count: usize) -> Result<bool, Fault> {
        let len = count * T::SIZE;
        if !self.enter_writable(to, len)? {
            return Ok(false);
        }
        let v = self.regs.read::<T>(Reg::Rax);
        let target = self.mmu.writes.find_bytes(to, len, self.mmu.fast());
        if let Some(target) = target {
            target.fill(v);
        }
        Ok(target.is_some())
    }

    /// Enters a page into the TLB for writes; false if it has side effects.
    fn enter_writable(&mut self, to: u64, len: usize) -> Result<bool, Fault> {
        let set = self.mmu.fast();
        if self.mmu.writes.find_bytes(to, len, set).is_some() {
            return Ok(true);
        }
        self.probe_write(to, 1)?;
        Ok(self.mmu.writes.find_bytes(to, len, set).is_some())
    }
}

/// Splits an access to a device into naturally aligned parts of at most 8 bytes.
fn mmio_chunks(gpa: u64, len: usize) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done >= len {
            return None;
        }
        let at = gpa + done as u64;
        let rest = len - done;
        let mut size = if at == 0 {
            8
        } else {
            1 << at.trailing_zeros().min(3)
        };
        // An access of one of these sizes stays whole: the device sees what the processor did.
        if done == 0 && matches!(len, 1 | 2 | 4 | 8) {
            size = len;
        }
        while size > rest {
            size /= 2;
        }
        let range = done..done + size;
        done += size;
        Some((at, range))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_access_is_split_at_natural_alignment_unless_it_is_one_operand() {
        let chunks = |gpa, len| {
            let ranges = mmio_chunks(gpa, len);
            ranges
                .map(|(at, part)| (at, part.len()))
                .collect::<Vec<_>>()
        };
        assert_eq!(chunks(0x1001, 4), [(0x1001, 4)]);
        assert_eq!(chunks(0x1001, 7), [(0x1001, 1), (0x1002, 2), (0x1004, 4)]);
        assert_eq!(chunks(0x1000, 16), [(0x1000, 8), (0x1008, 8)]);
        assert_eq!(chunks(0, 3), [(0, 2), (2, 1)]);
    }
}
