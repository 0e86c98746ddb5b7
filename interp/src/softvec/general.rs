//! BMI1, BMI2 and CRC32, which work on general registers.
//!
//! Flags that the manual leaves undefined become 0.

use super::run::{Run, SoftHandler};
use hindsight_regs::rflags::Rflags;
use iced_x86::Mnemonic as M;

/// The polynomial of CRC-32C, bits reversed.
const CASTAGNOLI: u32 = 0x82f6_3b78;

impl Run<'_> {
    /// Returns the bits of an operand.
    fn width(&self) -> u32 {
        if self.i.op0_register().size() == 8 {
            64
        } else {
            32
        }
    }

    /// Sets the destination, and ZF, SF and CF.
    fn set_result(&mut self, v: u64, carry: bool) {
        let v = v & u64::MAX >> (64 - self.width());
        self.set_scalar(v);
        self.set_flags(v == 0, false, carry);
        let mut flags = Rflags::from_bits_retain(self.v.flags);
        flags.set(Rflags::SF, v >> (self.width() - 1) & 1 != 0);
        self.v.flags = flags.bits();
    }
}

/// BEXTR: bits from a start, of a length.
fn extract(r: &mut Run<'_>) {
    let (v, control) = (r.scalar(1), r.scalar(2));
    let (start, length) = (control & 0xff, control >> 8 & 0xff);
    let shifted = if start < 64 { v >> start } else { 0 };
    let mask = if length < 64 {
        (1 << length) - 1
    } else {
        u64::MAX
    };
    let result = shifted & mask;
    r.set_result(result, false);
    let mut flags = Rflags::from_bits_retain(r.v.flags);
    flags.remove(Rflags::SF);
    r.v.flags = flags.bits();
}

/// BZHI: clears the bits from an index on.
fn clear_high(r: &mut Run<'_>) {
    let (v, index) = (r.scalar(1), r.scalar(2) & 0xff);
    let beyond = index >= r.width().into();
    let low = if beyond { v } else { v & ((1 << index) - 1) };
    r.set_result(low, beyond);
}

fn multiply(r: &mut Run<'_>) {
    let width = r.width();
    let a = r.v.gpr[2] & u64::MAX >> (64 - width);
    let product = u128::from(a) * u128::from(r.scalar(2));
    let half = |v: u128| u64::try_from(v & u128::from(u64::MAX >> (64 - width))).unwrap_or(0);
    let low = r.i.op1_register().full_register().number();
    r.v.gpr[low & 15] = half(product);
    r.set_scalar(half(product >> width));
}

fn deposit(r: &mut Run<'_>) {
    let (v, mask) = (r.scalar(1), r.scalar(2));
    let places = (0..64).filter(|n| mask >> n & 1 != 0).enumerate();
    let result = places.fold(0, |all, (from, to)| all | (v >> from & 1) << to);
    r.set_scalar(result);
}

fn gather(r: &mut Run<'_>) {
    let (v, mask) = (r.scalar(1), r.scalar(2));
    let places = (0..64).filter(|n| mask >> n & 1 != 0).enumerate();
    let result = places.fold(0, |all, (to, from)| all | (v >> from & 1) << to);
    r.set_scalar(result);
}

fn rotate(r: &mut Run<'_>) {
    let (v, by) = (r.scalar(1), u32::from(r.imm()));
    let result = if r.width() == 64 {
        v.rotate_right(by)
    } else {
        u32::try_from(v).unwrap_or(0).rotate_right(by).into()
    };
    r.set_scalar(result);
}

/// SHLX, SHRX and SARX.
fn shift(r: &mut Run<'_>, f: fn(u64, u32) -> u64, arithmetic: bool) {
    let width = r.width();
    let by = u32::try_from(r.scalar(2) & u64::from(width - 1)).unwrap_or(0);
    let v = r.scalar(1);
    let unused = 64 - width;
    let result = if arithmetic {
        ((v << unused).cast_signed() >> unused >> by).cast_unsigned()
    } else {
        f(v, by)
    };
    r.set_scalar(result);
}

fn checksum(r: &mut Run<'_>) {
    let (old, v) = (r.scalar(0), r.scalar(1));
    let size = if r.is_memory(1) {
        r.memory_length()
    } else {
        r.i.op1_register().size()
    };
    let mut sum = u32::try_from(old & 0xffff_ffff).unwrap_or(0);
    for byte in &v.to_le_bytes()[..size.min(8)] {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            sum = sum >> 1 ^ if sum & 1 != 0 { CASTAGNOLI } else { 0 };
        }
    }
    r.set_scalar(sum.into());
}

/// The function that executes an instruction, if it is of this kind.
pub(super) fn work(m: M) -> Option<SoftHandler> {
    Some(match m {
        M::Andn => |r| {
            let v = !r.scalar(1) & r.scalar(2);
            r.set_result(v, false);
        },
        M::Blsi => |r| {
            let v = r.scalar(1);
            r.set_result(v & v.wrapping_neg(), v != 0);
        },
        M::Blsmsk => |r| {
            let v = r.scalar(1);
            r.set_result(v ^ v.wrapping_sub(1), v == 0);
        },
        M::Blsr => |r| {
            let v = r.scalar(1);
            r.set_result(v & v.wrapping_sub(1), v == 0);
        },
        M::Bextr => extract,
        M::Bzhi => clear_high,
        M::Mulx => multiply,
        M::Pdep => deposit,
        M::Pext => gather,
        M::Rorx => rotate,
        M::Shlx => |r| shift(r, |v, by| v << by, false),
        M::Shrx => |r| shift(r, |v, by| v >> by, false),
        M::Sarx => |r| shift(r, |v, _| v, true),
        M::Crc32 => checksum,
        _ => return None,
    })
}
