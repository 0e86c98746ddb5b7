//! Bit tests and scans.

use super::{Done, read_rm};
use crate::core::{Core, Op, truncate};
use crate::flags::{LazyFlags, flag_if};
use crate::width::Width;
use hindsight_regs::rflags::Rflags;

pub(crate) const BT: u8 = 0;
pub(crate) const BTS: u8 = 1;
pub(crate) const BTR: u8 = 2;
pub(crate) const BTC: u8 = 3;

fn change<T: Width, const OP: u8>(a: T, mask: u64) -> T {
    T::from_u64(match OP {
        BTS => a.zext() | mask,
        BTR => a.zext() & !mask,
        BTC => a.zext() ^ mask,
        _ => a.zext(),
    })
}

/// BT, BTS, BTR, BTC with an immediate bit number.
pub(crate) fn imm<T: Width, const OP: u8>(c: &mut Core, o: &Op) -> Done {
    test::<T, OP>(c, o, o.imm, c.offset(o))
}

/// The same with a register bit number, which may lead beyond a memory operand.
pub(crate) fn reg<T: Width, const OP: u8>(c: &mut Core, o: &Op) -> Done {
    let n = c.regs.read::<T>(o.src);
    let words = n.sext().cast_signed() >> T::BITS.trailing_zeros();
    let bytes = words
        .wrapping_mul(T::SIZE.cast_signed() as i64)
        .cast_unsigned();
    let offset = truncate(c.offset(o).wrapping_add(bytes), o.address_size);
    test::<T, OP>(c, o, n.zext(), offset)
}

fn test<T: Width, const OP: u8>(c: &mut Core, o: &Op, n: u64, offset: u64) -> Done {
    let mask = 1_u64 << (n & u64::from(T::BITS - 1));
    let old: T = if !o.is_mem() {
        let a = c.regs.read::<T>(o.dst);
        if OP != BT {
            c.regs.write(o.dst, change::<T, OP>(a, mask));
        }
        a
    } else if OP == BT {
        let lin = c.linear(o.segment(), offset, T::SIZE as u64, false)?;
        c.read(lin)?
    } else {
        let lin = c.linear(o.segment(), offset, T::SIZE as u64, true)?;
        c.modify(lin, o.lock(), |a| change::<T, OP>(a, mask))?
    };
    c.regs.flags = c.regs.flags.with(Rflags::CF, old.zext() & mask != 0);
    Ok(())
}

/// BSF and BSR (`REVERSE`): a zero source leaves the destination.
pub(crate) fn scan<T: Width, const REVERSE: bool>(c: &mut Core, o: &Op) -> Done {
    let v = read_rm::<T>(c, o, o.src)?.zext();
    if v == 0 {
        c.regs.flags = LazyFlags::explicit(Rflags::ZF | Rflags::PF);
        return Ok(());
    }
    let n = if REVERSE {
        63 - v.leading_zeros()
    } else {
        v.trailing_zeros()
    };
    c.regs.write(o.dst, T::from_u64(n.into()));
    c.regs.flags = LazyFlags::result(1_u8, Rflags::empty());
    Ok(())
}

/// LZCNT, TZCNT.
pub(crate) fn count<T: Width, const LEADING: bool>(c: &mut Core, o: &Op) -> Done {
    let v = read_rm::<T>(c, o, o.src)?.zext();
    let n = match (v, LEADING) {
        (0, _) => T::BITS,
        (_, true) => v.leading_zeros() - (64 - T::BITS),
        _ => v.trailing_zeros(),
    };
    c.regs.write(o.dst, T::from_u64(n.into()));
    c.regs.flags = LazyFlags::explicit(flag_if(n == 0, Rflags::ZF) | flag_if(v == 0, Rflags::CF));
    Ok(())
}

/// POPCNT.
pub(crate) fn popcnt<T: Width>(c: &mut Core, o: &Op) -> Done {
    let v = read_rm::<T>(c, o, o.src)?.zext();
    c.regs.write(o.dst, T::from_u64(v.count_ones().into()));
    c.regs.flags = LazyFlags::explicit(flag_if(v == 0, Rflags::ZF));
    Ok(())
}

/// CRC32 of a source of width `T`.
pub(crate) fn crc32<T: Width>(c: &mut Core, o: &Op) -> Done {
    let v = read_rm::<T>(c, o, o.src)?.zext();
    let mut crc: u32 = c.regs.read(o.dst);
    for byte in &v.to_le_bytes()[..T::SIZE] {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 & 0_u32.wrapping_sub(crc & 1));
        }
    }
    c.regs.write(o.dst, crc);
    Ok(())
}
