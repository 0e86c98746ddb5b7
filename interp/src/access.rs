//! Access to guest memory by linear address.

#![expect(unsafe_code, reason = "guest memory is reached through host pointers")]
#![expect(clippy::cast_possible_truncation, reason = "the host is 64-bit")]

use crate::core::{ACV, Core, Fault};
use crate::mmu::Want;
use crate::tlb::Set;
use crate::word::Word;
use hindsight_cpu::uarch::AccessKind as Kind;
use std::ptr::with_exposed_provenance_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// At most two pieces of an access: guest-physical address and length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pieces(pub(crate) [(u64, usize); 2]);

impl Core {
    /// Reads through the TLB only.
    #[inline(always)]
    pub(crate) fn fast_read<T: Word>(&self, lin: u64) -> Option<T> {
        let host = self.rd.find(lin, T::SIZE as u64, self.first)?;
        // SAFETY: TLB entries lead to mapped guest memory, and `find` checked that all bytes lie
        // in the page. Other processors may write at the same time, as real ones do.
        Some(unsafe { with_exposed_provenance_mut::<T>(host as usize).read_unaligned() })
    }

    /// Writes through the TLB only; false on a miss.
    #[inline(always)]
    pub(crate) fn fast_write<T: Word>(&self, lin: u64, v: T) -> bool {
        let Some(host) = self.wr.find(lin, T::SIZE as u64, self.first) else {
            return false;
        };
        // SAFETY: as in `fast_read`; only writable pages are in this TLB.
        unsafe { with_exposed_provenance_mut::<T>(host as usize).write_unaligned(v) };
        true
    }

    /// Host pointer for a read-modify-write through the TLB only.
    #[inline(always)]
    pub(crate) fn fast_modify<T: Word>(&self, lin: u64) -> Option<Place<T>> {
        let host = self.wr.find(lin, T::SIZE as u64, self.first)?;
        Some(Place(with_exposed_provenance_mut(host as usize)))
    }

    /// A read of the DS mechanism, through the TLB only.
    pub(crate) fn ds_fast_read(&self, lin: u64) -> Option<u64> {
        let host = self.rd.find(lin, 8, self.ds)?;
        // SAFETY: as in `fast_read`.
        Some(unsafe { with_exposed_provenance_mut::<u64>(host as usize).read_unaligned() })
    }

    /// Whether eight bytes can be written by the DS mechanism, as far as the TLB knows.
    pub(crate) fn ds_can_write(&self, lin: u64) -> bool {
        self.wr.find(lin, 8, self.ds).is_some()
    }

    /// A write of the DS mechanism, through the TLB only; false on a miss.
    #[inline(always)]
    pub(crate) fn ds_fast_write(&self, lin: u64, words: &[u64]) -> bool {
        let len = std::mem::size_of_val(words) as u64;
        let Some(host) = self.wr.find(lin, len, self.ds) else {
            return false;
        };
        let place = with_exposed_provenance_mut::<u64>(host as usize);
        for (i, &word) in words.iter().enumerate() {
            // SAFETY: as in `fast_write`, for all of the words.
            unsafe { place.wrapping_add(i).write_unaligned(word) };
        }
        true
    }

    pub(crate) fn read<T: Word>(&mut self, lin: u64) -> Result<T, Fault> {
        match self.fast_read(lin) {
            Some(v) => Ok(v),
            None => self.read_slow(lin, self.set),
        }
    }

    pub(crate) fn write<T: Word>(&mut self, lin: u64, v: T) -> Result<(), Fault> {
        if self.fast_write(lin, v) {
            Ok(())
        } else {
            self.write_slow(lin, v, self.set)
        }
    }

    /// A read by the processor itself, with supervisor rights. It meets no breakpoint of the guest (rule OP-04).
    pub(crate) fn read_sys<T: Word>(&mut self, lin: u64) -> Result<T, Fault> {
        let hits = self.hits;
        let result = self.read_slow(lin, Set::Supervisor);
        self.hits = hits;
        result
    }

    /// A write by the processor itself, with supervisor rights. It meets no breakpoint of the guest (rule OP-04).
    pub(crate) fn write_sys<T: Word>(&mut self, lin: u64, v: T) -> Result<(), Fault> {
        let hits = self.hits;
        let result = self.write_slow(lin, v, Set::Supervisor);
        self.hits = hits;
        result
    }

    /// A write with the rights of another privilege level.
    pub(crate) fn write_as<T: Word>(&mut self, lin: u64, v: T, cpl: u8) -> Result<(), Fault> {
        self.write_slow(lin, v, if cpl == 3 { Set::User } else { Set::Supervisor })
    }

    #[cold]
    #[inline(never)]
    fn read_slow<T: Word>(&mut self, lin: u64, set: Set) -> Result<T, Fault> {
        if self.passes_watches(lin, T::SIZE as u64)
            && let Some(host) = self.rd.find_watched(lin, T::SIZE as u64, set)
        {
            // SAFETY: as in `fast_read`.
            return Ok(unsafe { with_exposed_provenance_mut::<T>(host as usize).read_unaligned() });
        }
        let mut data = [0; 8];
        self.read_bytes_as(lin, &mut data[..T::SIZE], set)?;
        Ok(T::from_u64(u64::from_le_bytes(data)))
    }

    #[cold]
    #[inline(never)]
    fn write_slow<T: Word>(&mut self, lin: u64, v: T, set: Set) -> Result<(), Fault> {
        if self.passes_watches(lin, T::SIZE as u64)
            && let Some(host) = self.wr.find_watched(lin, T::SIZE as u64, set)
        {
            // SAFETY: as in `fast_write`.
            unsafe { with_exposed_provenance_mut::<T>(host as usize).write_unaligned(v) };
            return Ok(());
        }
        self.write_bytes_as(lin, &v.zext().to_le_bytes()[..T::SIZE], set)
    }

    /// Reads up to a page of bytes.
    pub(crate) fn read_bytes(&mut self, lin: u64, data: &mut [u8]) -> Result<(), Fault> {
        self.read_bytes_as(lin, data, self.set)
    }

    /// Writes up to a page of bytes; none is written if any would fault.
    pub(crate) fn write_bytes(&mut self, lin: u64, data: &[u8]) -> Result<(), Fault> {
        self.write_bytes_as(lin, data, self.set)
    }

    fn read_bytes_as(&mut self, lin: u64, data: &mut [u8], set: Set) -> Result<(), Fault> {
        let pieces = self.pieces(lin, data.len(), Want::Read, set)?;
        let mut done = 0;
        for (gpa, len) in pieces.0 {
            if self.in_region() {
                self.load_in_region(gpa, &mut data[done..done + len])?;
            } else {
                self.read_phys(gpa, &mut data[done..done + len]);
            }
            self.note_touch(lin.wrapping_add(done as u64), gpa, len, Kind::Load);
            done += len;
        }
        if self.watching {
            self.note_access(lin, data.len() as u64, false);
        }
        Ok(())
    }

    fn write_bytes_as(&mut self, lin: u64, data: &[u8], set: Set) -> Result<(), Fault> {
        let pieces = self.pieces(lin, data.len(), Want::Write, set)?;
        let mut done = 0;
        for (gpa, len) in pieces.0 {
            if self.in_region() {
                self.store_in_region(gpa, &data[done..done + len])?;
            } else {
                self.write_phys(gpa, &data[done..done + len]);
            }
            self.note_touch(lin.wrapping_add(done as u64), gpa, len, Kind::Store);
            done += len;
        }
        if self.watching {
            self.note_access(lin, data.len() as u64, true);
        }
        Ok(())
    }

    /// Raises what a read of these bytes would raise, and nothing else.
    /// Answers where the first one is, guest-physical.
    pub(crate) fn probe_read(&mut self, lin: u64, len: usize) -> Result<u64, Fault> {
        let pieces = self.pieces(lin, len, Want::Read, self.set)?;
        Ok(pieces.0[0].0)
    }

    /// Raises what a write of these bytes would raise, and nothing else.
    pub(crate) fn probe_write(&mut self, lin: u64, len: usize) -> Result<(), Fault> {
        self.pieces(lin, len, Want::Write, self.set).map(|_| ())
    }

    /// As [`Core::probe_write`] with other rights.
    pub(crate) fn probe_write_as(&mut self, lin: u64, len: usize, cpl: u8) -> Result<(), Fault> {
        let set = if cpl == 3 { Set::User } else { Set::Supervisor };
        self.pieces(lin, len, Want::Write, set).map(|_| ())
    }

    /// Translates an access of up to one page.
    pub(crate) fn pieces(
        &mut self,
        lin: u64,
        len: usize,
        want: Want,
        set: Set,
    ) -> Result<Pieces, Fault> {
        if set == Set::Never && len.is_power_of_two() && len <= 8 && lin & (len as u64 - 1) != 0 {
            return Err(Fault::Code(ACV, 0));
        }
        let first = len.min(Self::page_rest(lin));
        let page = self.translate(lin, want, set)?;
        if first == len {
            self.enter(lin, page, want, set);
            return Ok(Pieces([(page.gpa, len), (0, 0)]));
        }
        let lin = lin.wrapping_add(first as u64) & self.ip_mask;
        let next = self.translate(lin, want, set)?;
        Ok(Pieces([(page.gpa, first), (next.gpa, len - first)]))
    }

    /// Reads guest-physical bytes within one page, from RAM or the platform.
    pub(crate) fn read_phys(&mut self, gpa: u64, data: &mut [u8]) {
        if !self.careful {
            return self.get_phys(gpa, data);
        }
        let memory = Arc::clone(&self.memory);
        let ram = memory.page(gpa).is_some();
        let _held = ram.then(|| memory.shared.hold(gpa, data.len(), false));
        self.get_phys(gpa, data);
    }

    /// Writes guest-physical bytes within one page, to RAM or the platform.
    pub(crate) fn write_phys(&mut self, gpa: u64, data: &[u8]) {
        if !self.careful {
            return self.put_phys(gpa, data);
        }
        let memory = Arc::clone(&self.memory);
        let ram = memory.page(gpa).is_some_and(|page| page.writable);
        let _held = ram.then(|| memory.shared.hold(gpa, data.len(), true));
        self.put_phys(gpa, data);
    }

    /// As [`Core::read_phys`], whatever transactions are open.
    pub(crate) fn get_phys(&mut self, gpa: u64, data: &mut [u8]) {
        if data.is_empty() {
            return;
        }
        let Some(page) = self.memory.page(gpa) else {
            for (at, chunk) in mmio_chunks(gpa, data.len()) {
                let bytes = &mut data[chunk];
                self.platform().mmio_read(at, bytes);
            }
            self.leave = true;
            return;
        };
        let host = page.host.as_ptr().wrapping_add((gpa & 0xfff) as usize);
        // SAFETY: `host` and the bytes after it lie in one mapped page of guest memory.
        unsafe {
            match data.len() {
                8 => data.copy_from_slice(&host.cast::<[u8; 8]>().read_unaligned()),
                4 => data.copy_from_slice(&host.cast::<[u8; 4]>().read_unaligned()),
                2 => data.copy_from_slice(&host.cast::<[u8; 2]>().read_unaligned()),
                n => std::ptr::copy_nonoverlapping(host, data.as_mut_ptr(), n),
            }
        }
    }

    /// As [`Core::write_phys`], whatever transactions are open.
    pub(crate) fn put_phys(&mut self, gpa: u64, data: &[u8]) {
        if data.is_empty() {
            return;
        }
        let Some(page) = self.memory.page(gpa).filter(|p| p.writable) else {
            for (at, chunk) in mmio_chunks(gpa, data.len()) {
                self.platform().mmio_write(at, &data[chunk]);
            }
            self.leave = true;
            return;
        };
        let host = page.host.as_ptr().wrapping_add((gpa & 0xfff) as usize);
        page.set_dirty();
        let code = page.code();
        // SAFETY: `host` and the bytes after it lie in one mapped, writable page.
        unsafe {
            match *data {
                [a, b, c, d, e, f, g, h] => {
                    host.cast::<[u8; 8]>()
                        .write_unaligned([a, b, c, d, e, f, g, h]);
                }
                [a, b, c, d] => host.cast::<[u8; 4]>().write_unaligned([a, b, c, d]),
                [a, b] => host.cast::<[u8; 2]>().write_unaligned([a, b]),
                _ => std::ptr::copy_nonoverlapping(data.as_ptr(), host, data.len()),
            }
        }
        if code != 0 {
            self.code_written(gpa, data.len(), code & !self.who);
        }
    }

    /// A store went to a page that holds decoded code.
    fn code_written(&mut self, gpa: u64, len: usize, others: u64) {
        match self.cache.covers(gpa, len) {
            Some(true) => {
                self.drop_code(gpa);
                self.leave = true;
            }
            Some(false) => {}
            None => self.memory.unmark_code(gpa, self.who),
        }
        if others != 0 {
            self.memory.code_written(gpa, len);
        }
    }

    /// Gives up the code of a page.
    fn drop_code(&mut self, gpa: u64) {
        self.cache.drop_page(gpa);
        self.memory.unmark_code(gpa, self.who);
    }

    /// Follows what others did to code pages.
    pub(crate) fn catch_up(&mut self) {
        let epoch = self.memory.code_epoch();
        if epoch != self.seen_epoch {
            self.seen_epoch = epoch;
            self.wr.flush();
        }
        let len = self.memory.log_len();
        if len != self.seen_log {
            match self.memory.log_since(self.seen_log) {
                Some(changes) => {
                    for (gpa, len) in changes {
                        if self.cache.covers(gpa, len) == Some(true) {
                            self.drop_code(gpa);
                        }
                    }
                }
                None => self.cache.drop_all(),
            }
            self.seen_log = len;
        }
    }

    /// Reads, computes, writes; the write happens even if the value stays. Answers the old value.
    /// With `lock` the whole is atomic.
    pub(crate) fn modify<T: Word>(
        &mut self,
        lin: u64,
        lock: bool,
        mut f: impl FnMut(T) -> T,
    ) -> Result<T, Fault> {
        let (rights, size) = (self.locked, T::SIZE as u64);
        let near = self.wr.find(lin, size, rights).is_some()
            || self.watching
                && !self.careful
                && self.wr.find_watched(lin, size, self.set).is_some();
        if !near {
            if self.careful {
                return self.modify_carefully(lin, lock, f);
            }
            self.probe_write(lin, T::SIZE)?;
        }
        if !lock {
            let old: T = self.read_for_write(lin)?;
            self.write(lin, f(old))?;
            return Ok(old);
        }
        let aligned = lin & (T::SIZE as u64 - 1) == 0;
        if let (true, Some(host)) = (aligned, self.wr.find(lin, T::SIZE as u64, rights)) {
            self.note_locked(lin, T::SIZE);
            let ptr = with_exposed_provenance_mut::<u8>(host as usize);
            // SAFETY: a writable page of guest memory, and the address is aligned to the size.
            return Ok(unsafe { atomic_modify(ptr, f) });
        }
        self.counters.lock();
        let memory = Arc::clone(&self.memory);
        let _guard = memory
            .split_lock
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let old: T = self.read_for_write(lin)?;
        self.write(lin, f(old))?;
        Ok(old)
    }

    /// The read half of a read-modify-write: a data breakpoint sees only the write.
    fn read_for_write<T: Word>(&mut self, lin: u64) -> Result<T, Fault> {
        match self.fast_read(lin) {
            Some(v) => Ok(v),
            None => self.read_slow(lin, self.set),
        }
    }
}

/// A place in guest memory that may be read and written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<T>(*mut T);

impl<T: Word> Place<T> {
    #[inline(always)]
    pub(crate) fn get(self) -> T {
        // SAFETY: made by `fast_modify` from a TLB hit, and used before anything can flush it.
        unsafe { self.0.read_unaligned() }
    }

    #[inline(always)]
    pub(crate) fn set(self, v: T) {
        // SAFETY: as above, and the page is writable.
        unsafe { self.0.write_unaligned(v) }
    }
}

/// # Safety
/// `ptr` must be valid for reads and writes of a `T`, and aligned to its size.
unsafe fn atomic_modify<T: Word>(ptr: *mut u8, mut f: impl FnMut(T) -> T) -> T {
    macro_rules! swap {
        ($atomic:ty, $int:ty) => {{
            // SAFETY: by the contract of this function.
            let cell = unsafe { <$atomic>::from_ptr(ptr.cast()) };
            let mut old = cell.load(Ordering::SeqCst);
            loop {
                let new = f(T::from_u64(old.into())).zext() as $int;
                match cell.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst) {
                    Ok(_) => return T::from_u64(old.into()),
                    Err(now) => old = now,
                }
            }
        }};
    }
    match T::SIZE {
        1 => swap!(AtomicU8, u8),
        2 => swap!(AtomicU16, u16),
        4 => swap!(AtomicU32, u32),
        _ => swap!(AtomicU64, u64),
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
        // A single access of an odd alignment stays whole: the device sees what the CPU did.
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

impl Core {
    /// CMPXCHG16B on an aligned address: answers the old pair.
    pub(crate) fn modify_pair(
        &mut self,
        lin: u64,
        expected: (u64, u64),
        new: (u64, u64),
    ) -> Result<(u64, u64), Fault> {
        let rights = self.locked;
        if self.wr.find(lin, 16, rights).is_none() {
            if self.careful {
                return self.modify_pair_carefully(lin, expected, new);
            }
            self.probe_write(lin, 16)?;
        }
        if let Some(host) = self.wr.find(lin, 16, rights)
            && std::arch::is_x86_feature_detected!("cmpxchg16b")
        {
            self.note_locked(lin, 16);
            let (mut lo, mut hi) = expected;
            // SAFETY: the host has the instruction; the address is that of 16 bytes in a writable
            // page of guest memory, aligned to 16 as `lin` is. RBX is given back; the registers
            // are named because the compiler may choose RBX itself for one it picks.
            unsafe {
                std::arch::asm!(
                    "xchg rbx, rsi",
                    "lock cmpxchg16b [rdi]",
                    "mov rbx, rsi",
                    inout("rsi") new.0 => _,
                    in("rdi") host,
                    inout("rax") lo,
                    inout("rdx") hi,
                    in("rcx") new.1,
                );
            }
            return Ok((lo, hi));
        }
        let old = (self.read(lin)?, self.read(lin + 8)?);
        let store = if old == expected { new } else { old };
        self.write(lin, store.0)?;
        self.write(lin + 8, store.1)?;
        Ok(old)
    }
}

impl Core {
    /// Copies bytes that lie within one page at each end; false if either is not plain memory.
    pub(crate) fn copy(&mut self, from: u64, to: u64, len: u64) -> Result<bool, Fault> {
        let source = match self.rd.find(from, len, self.first) {
            Some(host) => host,
            None => {
                self.pieces(from, 1, Want::Read, self.set)?;
                let Some(host) = self.rd.find(from, len, self.first) else {
                    return Ok(false);
                };
                host
            }
        };
        let Some(target) = self.writable(to, len)? else {
            return Ok(false);
        };
        // SAFETY: both are TLB hits for all `len` bytes; guest pages may overlap, so `copy`.
        unsafe {
            std::ptr::copy(
                with_exposed_provenance_mut::<u8>(source as usize).cast_const(),
                with_exposed_provenance_mut::<u8>(target as usize),
                len as usize,
            );
        }
        Ok(true)
    }

    fn writable(&mut self, to: u64, len: u64) -> Result<Option<u64>, Fault> {
        if let Some(host) = self.wr.find(to, len, self.first) {
            return Ok(Some(host));
        }
        self.probe_write(to, 1)?;
        Ok(self.wr.find(to, len, self.first))
    }

    /// Stores the accumulator `n` times within one page; false if that is not plain memory.
    pub(crate) fn fill<T: Word>(&mut self, to: u64, n: u64) -> Result<bool, Fault> {
        let Some(host) = self.writable(to, n * T::SIZE as u64)? else {
            return Ok(false);
        };
        let v = self.get::<T>(0);
        let place = with_exposed_provenance_mut::<T>(host as usize);
        for i in 0..n as usize {
            // SAFETY: a TLB hit for all of the bytes.
            unsafe { place.wrapping_add(i).write_unaligned(v) };
        }
        Ok(true)
    }
}
