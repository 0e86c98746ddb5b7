//! Two instructions in one operation. They count as two; neither can fault.
//!
//! CMP or TEST of registers and immediates with the conditional branch after it: the branch's distance is in
//! `o.disp`, the length of the first instruction in `o.asz`. MOV between registers with what then works on
//! the moved value: where it came from is in `o.base`.

use super::alu::{Add, Alu, And, Cmp, Or, Quiet, Sub, Test, Xor, eval};
use super::branch::{due, enter, fall_noted, jump};
use super::shift;
use crate::core::Core;
use crate::fault::ExitReason;
use crate::op::{Handler, LINKABLE, LOW, Next, Op, slot};
use crate::platform::BranchClass;
use crate::word::{Low, Word};
use iced_x86::{Instruction, Mnemonic as M, OpKind};

/// A comparison: its condition straight from the operands.
trait Compare: Alu {
    fn holds<T: Word, const CC: u8>(a: T, b: T, r: T) -> bool;
}

impl Compare for Cmp {
    #[inline(always)]
    fn holds<T: Word, const CC: u8>(a: T, b: T, r: T) -> bool {
        let (x, y) = (a.sext().cast_signed(), b.sext().cast_signed());
        let yes = match CC >> 1 {
            0 => Self::flags(a, b, r).condition::<0>(),
            1 => a.zext() < b.zext(),
            2 => a.zext() == b.zext(),
            3 => a.zext() <= b.zext(),
            4 => r.sext() >> 63 != 0,
            5 => Self::flags(a, b, r).condition::<10>(),
            6 => x < y,
            _ => x <= y,
        };
        yes ^ (CC & 1 != 0)
    }
}

impl Compare for Test {
    #[inline(always)]
    fn holds<T: Word, const CC: u8>(a: T, b: T, r: T) -> bool {
        let negative = r.sext() >> 63 != 0;
        let yes = match CC >> 1 {
            0 | 1 => false,
            2 | 3 => r.zext() == 0,
            4 | 6 => negative,
            5 => Self::flags(a, b, r).condition::<10>(),
            _ => negative || r.zext() == 0,
        };
        yes ^ (CC & 1 != 0)
    }
}

fn fused<O: Compare, T: Word, const IMM: bool, const CC: u8, const REC: bool>(
    c: &mut Core,
    o: &Op,
) -> Next {
    let a = c.get::<T>(o.d);
    let b = if IMM {
        T::from_u64(o.imm)
    } else {
        c.get::<T>(o.s)
    };
    let r = eval::<O, T>(c, a, b);
    c.cc = O::flags(a, b, r);
    if !O::holds::<T, CC>(a, b, r) {
        let from = c.rip64_of(o).wrapping_add(o.asz.into());
        return fall_noted::<REC>(c, o, from);
    }
    let rip = c.reg(slot::BLOCK_RIP).wrapping_add(o.disp);
    if REC {
        let from = c.rip64_of(o).wrapping_add(o.asz.into());
        if c.note_and_store(from, rip, BranchClass::Conditional) {
            return due(c, rip);
        }
    }
    let first = o.link.get();
    if !first.is_null() {
        return enter(c, first, rip);
    }
    if o.prefix & LINKABLE == 0 {
        return jump(c, rip);
    }
    c.link_from = o;
    c.rip = rip;
    c.exit(ExitReason::Lookup)
}

/// What may be fused: in [`Op::fuse`].
pub(crate) const CMP_REG: u8 = 1;
pub(crate) const CMP_IMM: u8 = 2;
pub(crate) const TEST_REG: u8 = 3;
pub(crate) const TEST_IMM: u8 = 4;
/// MOV between registers: with what comes after it.
pub(crate) const MOV_REG: u8 = 5;

/// The fused handler for a comparison and a condition.
pub(crate) fn handler<const REC: bool>(kind: u8, size: u8, cc: u8) -> Option<Handler> {
    Some(match kind {
        CMP_REG => by_width::<Cmp, false, REC>(size, cc),
        CMP_IMM => by_width::<Cmp, true, REC>(size, cc),
        TEST_REG => by_width::<Test, false, REC>(size, cc),
        TEST_IMM => by_width::<Test, true, REC>(size, cc),
        _ => return None,
    })
}

/// MOV, then a two-operand operation.
fn moved<O: Alu, T: Word, const IMM: bool>(c: &mut Core, o: &Op) -> Next {
    let a = c.get::<T>(o.base);
    let b = if IMM {
        T::from_u64(o.imm)
    } else {
        c.get::<T>(o.s)
    };
    let r = eval::<O, T>(c, a, b);
    if O::FLAGS {
        c.cc = O::flags(a, b, r);
    }
    c.put(o.d, r);
    o.go(c)
}

/// MOV, then a shift by a number that is not 0 after it was masked.
fn shifted<T: Word, const OP: u8, const FLAGS: bool>(c: &mut Core, o: &Op) -> Next {
    let a = c.get::<T>(o.base);
    let (r, cc) = shift::eval::<T, OP>(c.cc, a, shift::count::<T>(o.imm));
    if FLAGS {
        c.cc = cc;
    }
    c.put(o.d, r);
    o.go(c)
}

/// The operations for MOV and the instruction after it, with and without flags.
pub(crate) fn after_mov(i: &Instruction, op: &Op) -> Option<[Handler; 2]> {
    match op.size {
        4 => by_mnemonic::<u32>(i, op),
        8 => by_mnemonic::<u64>(i, op),
        _ => None,
    }
}

fn by_mnemonic<T: Word>(i: &Instruction, op: &Op) -> Option<[Handler; 2]> {
    let imm = i.op1_kind() != OpKind::Register;
    macro_rules! alu {
        ($o:ty) => {
            match imm {
                true => [moved::<$o, T, true>, moved::<Quiet<$o>, T, true>],
                false => [moved::<$o, T, false>, moved::<Quiet<$o>, T, false>],
            }
        };
    }
    macro_rules! shift {
        ($op:expr) => {
            [shifted::<T, { $op }, true>, shifted::<T, { $op }, false>]
        };
    }
    let shifts = imm && shift::count::<T>(op.imm) != 0;
    Some(match i.mnemonic() {
        M::Add => alu!(Add),
        M::Sub => alu!(Sub),
        M::And => alu!(And),
        M::Or => alu!(Or),
        M::Xor => alu!(Xor),
        M::Shl | M::Sal if shifts => shift!(shift::SHL),
        M::Shr if shifts => shift!(shift::SHR),
        M::Sar if shifts => shift!(shift::SAR),
        _ => return None,
    })
}

fn by_width<O: Compare, const IMM: bool, const REC: bool>(size: u8, cc: u8) -> Handler {
    match size {
        LOW => by_condition::<O, Low, IMM, REC>(cc),
        1 => by_condition::<O, u8, IMM, REC>(cc),
        2 => by_condition::<O, u16, IMM, REC>(cc),
        4 => by_condition::<O, u32, IMM, REC>(cc),
        _ => by_condition::<O, u64, IMM, REC>(cc),
    }
}

fn by_condition<O: Compare, T: Word, const IMM: bool, const REC: bool>(cc: u8) -> Handler {
    macro_rules! pick {
        ($($n:literal)*) => {
            match cc { $($n => fused::<O, T, IMM, $n, REC>,)* _ => fused::<O, T, IMM, 15, REC> }
        };
    }
    pick!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
}
