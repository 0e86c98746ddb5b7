//! Operations that execute two instructions.
//!
//! They count as two instructions, of which neither can fault.
//!
//! - CMP or TEST of registers and immediates, fused with the conditional branch after it. `o.disp`
//!   is the distance of the branch, `o.address_size` the length of the first instruction.
//! - MOV between registers, fused with the next instruction, which works on the moved value.
//!   `o.base` is the source of the MOV.

use super::alu::{Add, Alu, And, Cmp, NoFlags, Or, Sub, Test, Xor, eval};
use super::branch::{enter, handle_due, jump, jump_linked, not_taken};
use super::shift;
use crate::code::{LINKABLE, LOW};
use crate::core::{Core, InnerHandler, InnerOp, Next, Op};
use crate::platform::BranchClass;
use crate::registers::Reg;
use crate::width::{Low, Width};
use iced_x86::{Instruction, Mnemonic as M, OpKind};

/// A comparison that evaluates a condition directly from its operands.
trait Compare: Alu {
    fn holds<T: Width, const CC: u8>(a: T, b: T, r: T) -> bool;
}

impl Compare for Cmp {
    #[inline(always)]
    fn holds<T: Width, const CC: u8>(a: T, b: T, r: T) -> bool {
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
    fn holds<T: Width, const CC: u8>(a: T, b: T, r: T) -> bool {
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

fn fused<O: Compare, T: Width, const IMM: bool, const CC: u8, const REC: bool>(
    c: &mut Core,
    o: InnerOp<'_>,
) -> Next {
    let a = c.regs.read::<T>(o.dst);
    let b = if IMM {
        T::from_u64(o.imm)
    } else {
        c.regs.read::<T>(o.src)
    };
    let r = eval::<O, T>(c, a, b);
    c.regs.flags = O::flags(a, b, r);
    if !O::holds::<T, CC>(a, b, r) {
        let from = c.rip64_of(&o).wrapping_add(o.address_size.into());
        return not_taken::<REC>(c, o, from);
    }
    let rip = c.regs.get(Reg::BlockRip).wrapping_add(o.disp);
    if REC {
        let from = c.rip64_of(&o).wrapping_add(o.address_size.into());
        if c.record_near(from, rip, BranchClass::Conditional) {
            return handle_due(c, *o, rip);
        }
    }
    if let Some(block) = o.link() {
        return enter(c, block, rip);
    }
    if o.prefix & LINKABLE == 0 {
        return jump(c, *o, rip);
    }
    jump_linked(c, *o, rip)
}

/// Values of [`Op::fuse`]: this one and the following are comparisons.
pub(crate) const CMP_REG: u8 = 1;
pub(crate) const CMP_IMM: u8 = 2;
pub(crate) const TEST_REG: u8 = 3;
pub(crate) const TEST_IMM: u8 = 4;
/// Value of [`Op::fuse`]: a MOV between registers.
pub(crate) const MOV_REG: u8 = 5;

/// Returns the fused handler for a comparison and a condition.
pub(crate) fn handler<const REC: bool>(kind: u8, size: u8, cc: u8) -> Option<InnerHandler> {
    Some(match kind {
        CMP_REG => by_width::<Cmp, false, REC>(size, cc),
        CMP_IMM => by_width::<Cmp, true, REC>(size, cc),
        TEST_REG => by_width::<Test, false, REC>(size, cc),
        TEST_IMM => by_width::<Test, true, REC>(size, cc),
        _ => return None,
    })
}

/// MOV, then a two-operand operation.
fn moved<O: Alu, T: Width, const IMM: bool>(c: &mut Core, o: InnerOp<'_>) -> Next {
    let a = c.regs.read::<T>(o.base);
    let b = if IMM {
        T::from_u64(o.imm)
    } else {
        c.regs.read::<T>(o.src)
    };
    let r = eval::<O, T>(c, a, b);
    if O::FLAGS {
        c.regs.flags = O::flags(a, b, r);
    }
    c.regs.write(o.dst, r);
    o.go(c)
}

/// MOV, then a shift by a number that is not 0 after it was masked.
fn shifted<T: Width, const OP: u8, const FLAGS: bool>(c: &mut Core, o: InnerOp<'_>) -> Next {
    let a = c.regs.read::<T>(o.base);
    let (r, cc) = shift::eval::<T, OP>(c.regs.flags, a, shift::count::<T>(o.imm));
    if FLAGS {
        c.regs.flags = cc;
    }
    c.regs.write(o.dst, r);
    o.go(c)
}

/// Returns the handlers for a fused MOV, with and without flags.
pub(crate) fn after_mov(i: &Instruction, op: &Op) -> Option<[InnerHandler; 2]> {
    match op.size {
        4 => by_mnemonic::<u32>(i, op),
        8 => by_mnemonic::<u64>(i, op),
        _ => None,
    }
}

fn by_mnemonic<T: Width>(i: &Instruction, op: &Op) -> Option<[InnerHandler; 2]> {
    let imm = i.op1_kind() != OpKind::Register;
    macro_rules! alu {
        ($o:ty) => {
            match imm {
                true => [moved::<$o, T, true>, moved::<NoFlags<$o>, T, true>],
                false => [moved::<$o, T, false>, moved::<NoFlags<$o>, T, false>],
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

fn by_width<O: Compare, const IMM: bool, const REC: bool>(size: u8, cc: u8) -> InnerHandler {
    match size {
        LOW => by_condition::<O, Low, IMM, REC>(cc),
        1 => by_condition::<O, u8, IMM, REC>(cc),
        2 => by_condition::<O, u16, IMM, REC>(cc),
        4 => by_condition::<O, u32, IMM, REC>(cc),
        _ => by_condition::<O, u64, IMM, REC>(cc),
    }
}

fn by_condition<O: Compare, T: Width, const IMM: bool, const REC: bool>(cc: u8) -> InnerHandler {
    macro_rules! pick {
        ($($n:literal)*) => {
            match cc { $($n => fused::<O, T, IMM, $n, REC>,)* _ => fused::<O, T, IMM, 15, REC> }
        };
    }
    pick!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
}
