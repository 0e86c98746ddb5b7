//! Loads and stores of guest memory, which processors and devices share.
//!
//! Every access to guest memory goes through this module. Plain loads and stores would be data
//! races. The standard library's atomics alone do not suffice either: guest accesses are unaligned,
//! and accesses of different sizes use the same address.
//!
//! - Loads and stores of 1, 2, 4 and 8 bytes are single MOV instructions (module `host_access`).
//!   Within a cache line they are atomic, like those of the guest on its own processor. The memory
//!   ordering is that of the host, which is the architecture's.
//! - Other processors may observe copies in parts, like those of a device.
//! - Locked operations are the standard library's atomics, at aligned addresses.
//!
//! Miri and ThreadSanitizer do not support inline assembly. For them (module `model`), loads and
//! stores are relaxed atomics, byte by byte where an access is not aligned.

#![expect(
    unsafe_code,
    reason = "the one place where guest memory is read and written"
)]

use crate::width::Width;
use std::marker::PhantomData;

#[cfg(not(any(miri, hindsight_sanitizer)))]
use host_access as access;
#[cfg(any(miri, hindsight_sanitizer))]
use model as access;

/// A value of width `T` in guest memory that may be read.
///
/// Invariant: its bytes lie in one page of guest memory that stays mapped during `'m`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestRef<'m, T> {
    host: u64,
    memory: PhantomData<(&'m u8, T)>,
}

impl<T: Width> GuestRef<'_, T> {
    /// # Safety
    /// `host` must be the exposed host address of `T::SIZE` bytes within one page of guest memory
    /// that stays mapped during the lifetime.
    #[inline(always)]
    pub(crate) unsafe fn new(host: u64) -> Self {
        Self {
            host,
            memory: PhantomData,
        }
    }

    #[inline(always)]
    pub(crate) fn load(self) -> T {
        // SAFETY: the type's invariant.
        unsafe { access::load(self.host) }
    }
}

/// A value of width `T` in guest memory that may be read and written.
///
/// Invariant: its bytes lie in one page of writable guest memory that stays mapped during `'m`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestMut<'m, T> {
    host: u64,
    memory: PhantomData<(&'m u8, T)>,
}

impl<T: Width> GuestMut<'_, T> {
    /// # Safety
    /// As for [`GuestRef::new`], and the page must be writable.
    #[inline(always)]
    pub(crate) unsafe fn new(host: u64) -> Self {
        Self {
            host,
            memory: PhantomData,
        }
    }

    #[inline(always)]
    pub(crate) fn load(self) -> T {
        // SAFETY: the type's invariant.
        unsafe { access::load(self.host) }
    }

    #[inline(always)]
    pub(crate) fn store(self, v: T) {
        // SAFETY: the type's invariant.
        unsafe { access::store(self.host, v) }
    }

    /// Replaces the value `v` by `f(v)` in one atomic step, and returns `v`. `None`, with nothing
    /// done, if the address is not aligned to the width. `f` may be called several times.
    pub(crate) fn modify_locked(self, mut f: impl FnMut(T) -> T) -> Option<T> {
        if !self.host.is_multiple_of(T::SIZE as u64) {
            return None;
        }
        let mut old = self.load();
        loop {
            // SAFETY: the type's invariant; the address is aligned.
            match unsafe { access::compare_exchange(self.host, old, f(old)) } {
                Ok(()) => return Some(old),
                Err(now) => old = now,
            }
        }
    }

    /// Stores `new` if the value is `old`, in one atomic step; false if it is another one.
    ///
    /// # Panics
    /// When the address is not aligned to the width.
    pub(crate) fn compare_exchange(self, old: T, new: T) -> bool {
        assert!(self.host.is_multiple_of(T::SIZE as u64));
        // SAFETY: the type's invariant; the address is aligned.
        unsafe { access::compare_exchange(self.host, old, new) }.is_ok()
    }
}

/// Bytes in guest memory that may be read.
///
/// Invariant: as for [`GuestRef`], for `len` bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestBytes<'m> {
    host: u64,
    len: usize,
    memory: PhantomData<&'m u8>,
}

impl GuestBytes<'_> {
    /// # Safety
    /// As for [`GuestRef::new`], for `len` bytes.
    pub(crate) unsafe fn new(host: u64, len: usize) -> Self {
        Self {
            host,
            len,
            memory: PhantomData,
        }
    }

    /// The host address of the first byte.
    pub(crate) fn host(self) -> u64 {
        self.host
    }

    /// Copies the bytes to `data`, which must have their length.
    pub(crate) fn read(self, data: &mut [u8]) {
        assert_eq!(data.len(), self.len);
        // SAFETY: the type's invariant, for as many bytes as `data` has.
        unsafe { access::read(self.host, data) }
    }
}

/// Bytes in guest memory that may be read and written.
///
/// Invariant: as for [`GuestMut`], for `len` bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestBytesMut<'m> {
    host: u64,
    len: usize,
    memory: PhantomData<&'m u8>,
}

impl GuestBytesMut<'_> {
    /// # Safety
    /// As for [`GuestMut::new`], for `len` bytes.
    pub(crate) unsafe fn new(host: u64, len: usize) -> Self {
        Self {
            host,
            len,
            memory: PhantomData,
        }
    }

    /// The host address of the first byte.
    pub(crate) fn host(self) -> u64 {
        self.host
    }

    /// Copies `data`, which must have their length, to the bytes.
    #[inline(always)]
    pub(crate) fn write(self, data: &[u8]) {
        assert_eq!(data.len(), self.len);
        // SAFETY: the type's invariant, for as many bytes as `data` has.
        unsafe { access::write(self.host, data) }
    }

    /// Stores words, which must have their length in all, one after the other.
    #[inline(always)]
    pub(crate) fn write_words(self, words: &[u64]) {
        assert_eq!(size_of_val(words), self.len);
        for (at, &word) in (self.host..).step_by(8).zip(words) {
            // SAFETY: the type's invariant, for no more bytes than it has.
            unsafe { access::store(at, word) }
        }
    }

    /// Copies `from`, which must have their length, to the bytes, in the order of addresses.
    pub(crate) fn copy_from(self, from: GuestBytes<'_>) {
        assert_eq!(from.len, self.len);
        // SAFETY: the invariants of both types, for as many bytes.
        unsafe { access::copy(from.host, self.host, self.len) }
    }

    /// Stores `v` as often as the bytes have room for.
    pub(crate) fn fill<T: Width>(self, v: T) {
        // SAFETY: the type's invariant, for no more bytes than it has.
        unsafe { access::fill(self.host, v, self.len / T::SIZE) }
    }
}

/// Loads eight bytes of guest memory at an offset from a host address.
///
/// # Safety
/// As for [`GuestRef::new`], for the address with the offset.
#[inline(always)]
pub(crate) unsafe fn load_u64<const OFFSET: usize>(host: u64) -> u64 {
    // SAFETY: by the contract of this function.
    unsafe { access::load_u64::<OFFSET>(host) }
}

/// Stores eight bytes of guest memory at an offset from a host address.
///
/// # Safety
/// As for [`GuestMut::new`], for the address with the offset.
#[inline(always)]
pub(crate) unsafe fn store_u64<const OFFSET: usize>(host: u64, v: u64) {
    // SAFETY: by the contract of this function.
    unsafe { access::store_u64::<OFFSET>(host, v) }
}

/// Stores a BTS record, whose third word is 0, at the host address `base + index`, modulo 2^64.
///
/// # Safety
/// As for [`GuestMut::new`], for 24 bytes.
#[inline(always)]
pub(crate) unsafe fn store_record(base: u64, index: u64, from: u64, to: u64) {
    // SAFETY: by the contract of this function.
    unsafe { access::store_record(base, index, from, to) }
}

/// Atomically replaces 16 bytes by `new` if they equal `expected`.
///
/// Returns the old bytes. Returns `None` and does nothing if the host cannot do this, or the
/// address is not aligned.
pub(crate) fn compare_exchange_pair(
    bytes: GuestBytesMut<'_>,
    expected: u128,
    new: u128,
) -> Option<u128> {
    if bytes.len != 16
        || !bytes.host.is_multiple_of(16)
        || !std::arch::is_x86_feature_detected!("cmpxchg16b")
    {
        return None;
    }
    #[cfg(not(any(miri, hindsight_sanitizer)))]
    // SAFETY: the host has the instruction; the address is aligned and that of 16 bytes of writable
    // guest memory.
    return Some(unsafe { host_access::compare_exchange_pair(bytes.host, expected, new) });
    #[cfg(any(miri, hindsight_sanitizer))]
    None
}

/// A locked compare-and-exchange by the standard library's atomics.
#[cfg(not(miri))]
mod locked {
    use crate::width::Width;
    use std::ptr::with_exposed_provenance_mut;
    use std::sync::atomic::Ordering::SeqCst;
    use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

    /// # Safety
    /// As for [`super::GuestMut::new`], and the address must be aligned to the width.
    pub(super) unsafe fn compare_exchange<T: Width>(host: u64, old: T, new: T) -> Result<(), T> {
        let (old, new) = (old.zext(), new.zext());
        macro_rules! exchange {
            ($atomic:ty, $int:ty) => {{
                let address = with_exposed_provenance_mut(host as usize);
                // SAFETY: by the contract of this function; all accesses are atomic.
                let cell = unsafe { <$atomic>::from_ptr(address) };
                cell.compare_exchange(old as $int, new as $int, SeqCst, SeqCst)
                    .map_or_else(|now| Err(u64::from(now)), |_| Ok(()))
            }};
        }
        #[expect(clippy::cast_possible_truncation, reason = "values of this width")]
        let result = match T::SIZE {
            1 => exchange!(AtomicU8, u8),
            2 => exchange!(AtomicU16, u16),
            4 => exchange!(AtomicU32, u32),
            _ => exchange!(AtomicU64, u64),
        };
        result.map_err(T::from_u64)
    }
}

/// Accesses by inline assembly.
///
/// Its unsafe functions have the same safety contracts as the constructors of the types.
#[cfg(not(any(miri, hindsight_sanitizer)))]
mod host_access {
    pub(super) use super::locked::compare_exchange;
    use crate::width::Width;
    use std::arch::asm;

    /// Copies of at least this many bytes use REP MOVSB.
    const REP_MIN: usize = 256;

    #[inline(always)]
    pub(super) unsafe fn load<T: Width>(host: u64) -> T {
        let v: u64;
        // SAFETY: the bytes may be read, by the contract; the instruction has no other effect.
        unsafe {
            match T::SIZE {
                1 => asm!("movzx {v:e}, byte ptr [{host}]", v = lateout(reg) v,
                    host = in(reg) host, options(nostack, preserves_flags, readonly)),
                2 => asm!("movzx {v:e}, word ptr [{host}]", v = lateout(reg) v,
                    host = in(reg) host, options(nostack, preserves_flags, readonly)),
                4 => asm!("mov {v:e}, dword ptr [{host}]", v = lateout(reg) v,
                    host = in(reg) host, options(nostack, preserves_flags, readonly)),
                _ => asm!("mov {v}, qword ptr [{host}]", v = lateout(reg) v,
                    host = in(reg) host, options(nostack, preserves_flags, readonly)),
            }
            // What the compiler cannot see: the upper bytes are zero.
            std::hint::assert_unchecked(v <= u64::MAX >> (64 - T::BITS));
        }
        T::from_u64(v)
    }

    #[inline(always)]
    pub(super) unsafe fn store<T: Width>(host: u64, v: T) {
        let v = v.zext();
        // SAFETY: the bytes may be written, by the contract; the instruction has no other effect.
        unsafe {
            match T::SIZE {
                1 => asm!("mov byte ptr [{host}], {v:l}", v = in(reg) v,
                    host = in(reg) host, options(nostack, preserves_flags)),
                2 => asm!("mov word ptr [{host}], {v:x}", v = in(reg) v,
                    host = in(reg) host, options(nostack, preserves_flags)),
                4 => asm!("mov dword ptr [{host}], {v:e}", v = in(reg) v,
                    host = in(reg) host, options(nostack, preserves_flags)),
                _ => asm!("mov qword ptr [{host}], {v}", v = in(reg) v,
                    host = in(reg) host, options(nostack, preserves_flags)),
            }
        }
    }

    #[inline(always)]
    pub(super) unsafe fn load_u64<const OFFSET: usize>(host: u64) -> u64 {
        let v;
        // SAFETY: the bytes may be read, by the contract; the instruction has no other effect.
        unsafe {
            asm!("mov {v}, qword ptr [{host} + {offset}]", v = lateout(reg) v, host = in(reg) host,
                offset = const OFFSET, options(nostack, preserves_flags, readonly));
        }
        v
    }

    #[inline(always)]
    pub(super) unsafe fn store_u64<const OFFSET: usize>(host: u64, v: u64) {
        // SAFETY: the bytes may be written, by the contract; the instruction has no other effect.
        unsafe {
            asm!("mov qword ptr [{host} + {offset}], {v}", v = in(reg) v, host = in(reg) host,
                offset = const OFFSET, options(nostack, preserves_flags));
        }
    }

    #[inline(always)]
    pub(super) unsafe fn store_record(base: u64, index: u64, from: u64, to: u64) {
        // SAFETY: the bytes may be written, by the contract; the instructions have no other effect.
        unsafe {
            asm!(
                "mov qword ptr [{base} + {index}], {from}",
                "mov qword ptr [{base} + {index} + 8], {to}",
                "mov qword ptr [{base} + {index} + 16], 0",
                base = in(reg) base,
                index = in(reg) index,
                from = in(reg) from,
                to = in(reg) to,
                options(nostack, preserves_flags),
            );
        }
    }

    /// CMPXCHG16B. The address must be aligned, and the host must have the instruction.
    #[expect(clippy::cast_possible_truncation, reason = "halves of 16 bytes")]
    pub(super) unsafe fn compare_exchange_pair(host: u64, expected: u128, new: u128) -> u128 {
        let (mut low, mut high) = (expected as u64, (expected >> 64) as u64);
        // SAFETY: by the contract. RBX, which the compiler keeps for itself, is restored.
        unsafe {
            asm!(
                "xchg rbx, rsi",
                "lock cmpxchg16b [rdi]",
                "mov rbx, rsi",
                inout("rsi") new as u64 => _,
                in("rdi") host,
                inout("rax") low,
                inout("rdx") high,
                in("rcx") (new >> 64) as u64,
                options(nostack),
            );
        }
        u128::from(low) | u128::from(high) << 64
    }

    pub(super) unsafe fn read(host: u64, data: &mut [u8]) {
        if data.len() >= REP_MIN {
            // SAFETY: `data` is ours, and the guest's bytes may be read.
            return unsafe {
                copy(
                    host,
                    data.as_mut_ptr().expose_provenance() as u64,
                    data.len(),
                )
            };
        }
        let mut at = host;
        let (words, tail) = data.as_chunks_mut::<8>();
        for word in words {
            // SAFETY: within the bytes.
            *word = unsafe { load::<u64>(at) }.to_le_bytes();
            at += 8;
        }
        let (halves, tail) = tail.as_chunks_mut::<4>();
        for half in halves {
            // SAFETY: within the bytes.
            *half = unsafe { load::<u32>(at) }.to_le_bytes();
            at += 4;
        }
        let (pairs, tail) = tail.as_chunks_mut::<2>();
        for pair in pairs {
            // SAFETY: within the bytes.
            *pair = unsafe { load::<u16>(at) }.to_le_bytes();
            at += 2;
        }
        for byte in tail {
            // SAFETY: within the bytes.
            *byte = unsafe { load(at) };
            at += 1;
        }
    }

    pub(super) unsafe fn write(host: u64, data: &[u8]) {
        if data.len() >= REP_MIN {
            // SAFETY: `data` is ours, and the guest's bytes may be written.
            return unsafe { copy(data.as_ptr().expose_provenance() as u64, host, data.len()) };
        }
        let mut at = host;
        let (words, tail) = data.as_chunks::<8>();
        for &word in words {
            // SAFETY: within the bytes.
            unsafe { store(at, u64::from_le_bytes(word)) };
            at += 8;
        }
        let (halves, tail) = tail.as_chunks::<4>();
        for &half in halves {
            // SAFETY: within the bytes.
            unsafe { store(at, u32::from_le_bytes(half)) };
            at += 4;
        }
        let (pairs, tail) = tail.as_chunks::<2>();
        for &pair in pairs {
            // SAFETY: within the bytes.
            unsafe { store(at, u16::from_le_bytes(pair)) };
            at += 2;
        }
        for &byte in tail {
            // SAFETY: within the bytes.
            unsafe { store(at, byte) };
            at += 1;
        }
    }

    /// Copies in the order of addresses, so that overlapping bytes are repeated.
    pub(super) unsafe fn copy(from: u64, to: u64, len: usize) {
        // SAFETY: the bytes may be read and written, by the contract; DF is clear in Rust code.
        unsafe {
            asm!("rep movsb", inout("rsi") from => _, inout("rdi") to => _,
                inout("rcx") len => _, options(nostack, preserves_flags));
        }
    }

    pub(super) unsafe fn fill<T: Width>(host: u64, v: T, count: usize) {
        let v = v.zext();
        // SAFETY: the bytes may be written, by the contract; DF is clear in Rust code.
        unsafe {
            match T::SIZE {
                1 => asm!("rep stosb", inout("rdi") host => _, inout("rcx") count => _,
                    in("rax") v, options(nostack, preserves_flags)),
                2 => asm!("rep stosw", inout("rdi") host => _, inout("rcx") count => _,
                    in("rax") v, options(nostack, preserves_flags)),
                4 => asm!("rep stosd", inout("rdi") host => _, inout("rcx") count => _,
                    in("rax") v, options(nostack, preserves_flags)),
                _ => asm!("rep stosq", inout("rdi") host => _, inout("rcx") count => _,
                    in("rax") v, options(nostack, preserves_flags)),
            }
        }
    }
}

/// Accesses by relaxed atomics, for tools that check the rules of the language.
#[cfg(any(miri, hindsight_sanitizer))]
mod model {
    use crate::width::Width;
    use std::ptr::with_exposed_provenance_mut;
    use std::sync::atomic::AtomicU8;
    use std::sync::atomic::Ordering::Relaxed;

    unsafe fn byte<'a>(host: u64) -> &'a AtomicU8 {
        // SAFETY: by the contract; a byte is aligned, and all accesses are atomic.
        unsafe { AtomicU8::from_ptr(with_exposed_provenance_mut(host as usize)) }
    }

    pub(super) unsafe fn load<T: Width>(host: u64) -> T {
        let mut bytes = [0; 8];
        // SAFETY: as many bytes as the contract allows.
        unsafe { read(host, &mut bytes[..T::SIZE]) };
        T::from_u64(u64::from_le_bytes(bytes))
    }

    pub(super) unsafe fn store<T: Width>(host: u64, v: T) {
        // SAFETY: as many bytes as the contract allows.
        unsafe { write(host, &v.zext().to_le_bytes()[..T::SIZE]) };
    }

    pub(super) unsafe fn load_u64<const OFFSET: usize>(host: u64) -> u64 {
        // SAFETY: by the contract.
        unsafe { load(host + OFFSET as u64) }
    }

    pub(super) unsafe fn store_u64<const OFFSET: usize>(host: u64, v: u64) {
        // SAFETY: by the contract.
        unsafe { store(host + OFFSET as u64, v) };
    }

    pub(super) unsafe fn store_record(base: u64, index: u64, from: u64, to: u64) {
        for (at, v) in (base.wrapping_add(index)..).step_by(8).zip([from, to, 0]) {
            // SAFETY: within the bytes of the contract.
            unsafe { store(at, v) };
        }
    }

    pub(super) unsafe fn read(host: u64, data: &mut [u8]) {
        for (at, to) in (host..).zip(data) {
            // SAFETY: within the bytes of the contract.
            *to = unsafe { byte(at) }.load(Relaxed);
        }
    }

    pub(super) unsafe fn write(host: u64, data: &[u8]) {
        for (at, &from) in (host..).zip(data) {
            // SAFETY: within the bytes of the contract.
            unsafe { byte(at) }.store(from, Relaxed);
        }
    }

    pub(super) unsafe fn copy(from: u64, to: u64, len: usize) {
        for n in 0..len as u64 {
            // SAFETY: within the bytes of the contract.
            unsafe { byte(to + n).store(byte(from + n).load(Relaxed), Relaxed) };
        }
    }

    pub(super) unsafe fn fill<T: Width>(host: u64, v: T, count: usize) {
        for n in 0..count {
            // SAFETY: within the bytes of the contract.
            unsafe { store(host + (n * T::SIZE) as u64, v) };
        }
    }

    #[cfg(not(miri))]
    pub(super) use super::locked::compare_exchange;

    /// Accesses of different sizes must not race for Miri, so that a lock stands for the bus.
    #[cfg(miri)]
    pub(super) unsafe fn compare_exchange<T: Width>(host: u64, old: T, new: T) -> Result<(), T> {
        static BUS: std::sync::Mutex<()> = std::sync::Mutex::new(());
        let _held = BUS.lock();
        // SAFETY: by the contract.
        let now: T = unsafe { load(host) };
        if now != old {
            return Err(now);
        }
        // SAFETY: by the contract.
        unsafe { store(host, new) };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sixteen-byte aligned bytes, as guest memory.
    #[repr(align(16))]
    struct Bytes([u8; 1024]);

    impl Bytes {
        fn new() -> Self {
            let mut bytes = [0; 1024];
            for (n, byte) in bytes.iter_mut().enumerate() {
                *byte = (n % 251).to_le_bytes()[0];
            }
            Self(bytes)
        }

        fn host(&mut self) -> u64 {
            self.0.as_mut_ptr().expose_provenance() as u64
        }
    }

    fn cell<'a, T: Width>(bytes: &'a mut Bytes, at: u64) -> GuestMut<'a, T> {
        // SAFETY: within the bytes, which are borrowed as long.
        unsafe { GuestMut::new(bytes.host() + at) }
    }

    fn range(bytes: &mut Bytes, at: u64, len: usize) -> GuestBytesMut<'_> {
        assert!(at as usize + len <= 1024);
        // SAFETY: within the bytes, which are borrowed as long.
        unsafe { GuestBytesMut::new(bytes.host() + at, len) }
    }

    #[test]
    fn loads_and_stores_of_all_widths_are_unaligned_and_touch_only_their_bytes() {
        macro_rules! check {
            ($t:ty) => {
                for at in 0..9 {
                    let mut bytes = Bytes::new();
                    let size = size_of::<$t>();
                    let from = at as usize;
                    let expected =
                        <$t>::from_le_bytes(bytes.0[from..from + size].try_into().unwrap());
                    assert_eq!(cell::<$t>(&mut bytes, at).load(), expected);
                    cell::<$t>(&mut bytes, at).store(!expected);
                    let mut all = Bytes::new().0;
                    all[from..from + size].copy_from_slice(&(!expected).to_le_bytes());
                    assert!(bytes.0 == all);
                }
            };
        }
        check!(u8);
        check!(u16);
        check!(u32);
        check!(u64);
    }

    #[test]
    fn copies_of_all_lengths_move_exactly_their_bytes() {
        for len in (0..40).chain([255, 256, 300]) {
            let mut bytes = Bytes::new();
            let mut data = vec![0; len];
            let host = bytes.host() + 3;
            // SAFETY: within the bytes.
            let from: GuestBytes<'_> = unsafe { GuestBytes::new(host, len) };
            from.read(&mut data);
            assert_eq!(data, bytes.0[3..3 + len]);
            data.fill(0xee);
            range(&mut bytes, 5, len).write(&data);
            let mut all = Bytes::new().0;
            all[5..5 + len].fill(0xee);
            assert!(bytes.0 == all, "{len}");
        }
    }

    #[test]
    fn overlapping_copy_repeats_bytes_and_fill_repeats_a_value() {
        let mut bytes = Bytes::new();
        let host = bytes.host();
        // SAFETY: within the bytes.
        let from: GuestBytes<'_> = unsafe { GuestBytes::new(host, 600) };
        range(&mut bytes, 1, 600).copy_from(from);
        assert!(bytes.0[..601].iter().all(|&byte| byte == 0));
        range(&mut bytes, 7, 13).fill(0x1234_5678_u32);
        assert_eq!(bytes.0[7..11], [0x78, 0x56, 0x34, 0x12]);
        assert_eq!(bytes.0[15..20], [0x78, 0x56, 0x34, 0x12, 0]);
    }

    #[test]
    fn locked_modification_needs_alignment() {
        let mut bytes = Bytes::new();
        let old = cell::<u32>(&mut bytes, 8).modify_locked(|v| v + 1);
        assert_eq!(old, Some(0x0b0a_0908));
        assert_eq!(cell::<u32>(&mut bytes, 8).load(), 0x0b0a_0909);
        assert_eq!(cell::<u32>(&mut bytes, 9).modify_locked(|v| v), None);
        assert!(!cell::<u64>(&mut bytes, 0).compare_exchange(0, 1));
    }

    #[test]
    fn pair_is_exchanged_if_it_is_the_expected_one() {
        let mut bytes = Bytes::new();
        let old = u128::from_le_bytes(bytes.0[16..32].try_into().unwrap());
        if let Some(found) = compare_exchange_pair(range(&mut bytes, 16, 16), old, 5) {
            assert_eq!(found, old);
            let again = compare_exchange_pair(range(&mut bytes, 16, 16), old, 6);
            assert_eq!(again, Some(5));
        }
        assert_eq!(compare_exchange_pair(range(&mut bytes, 8, 16), 0, 0), None);
    }
}
