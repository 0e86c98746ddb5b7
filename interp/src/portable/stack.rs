//! The transcendental instructions on the register stack: operands, special values, exceptions.

use super::extended::{DE, Exact, Extended, IE, Kind, OE, Rounded, UE, ZE};
use crate::core::{Core, Op};
use crate::fault::Fault;
use crate::ops::Done;
use crate::thunk;
use hindsight_regs::cr::Cr0;
use iced_x86::{Instruction, Mnemonic as M};

const SF: u16 = 1 << 6;
const C1: u16 = 1 << 9;
const C2: u16 = 1 << 10;

/// A result with the flags that it raises.
type Answer = Rounded;

fn plain(value: Extended) -> Answer {
    flagged(value, 0)
}

fn flagged(value: Extended, flags: u16) -> Answer {
    Rounded {
        value,
        flags,
        up: false,
    }
}

fn invalid() -> Answer {
    flagged(Extended::INDEFINITE, IE)
}

/// What the instruction does with the stack.
enum StackEffect {
    /// ST(0) becomes the value.
    Replace(Answer),
    /// ST(1) becomes the value, and the stack is popped.
    Pop(Answer),
    /// ST(0) becomes the first, then the second is pushed.
    Push(Answer, Extended),
    /// The operand is out of range: C2 is set.
    OutOfRange,
}

pub(super) fn run(c: &mut Core, o: &Op, i: &Instruction) -> Done {
    if c.cr0(Cr0::EM | Cr0::TS) {
        return Err(Fault::NM);
    }
    c.check_x87_pending()?;
    let rip = c.rip_of(o);
    c.vec.set_fip(rip);
    let two = matches!(i.mnemonic(), M::Fyl2x | M::Fyl2xp1 | M::Fpatan);
    let pushes = matches!(i.mnemonic(), M::Fptan | M::Fsincos);
    let under = c.vec.empty(0) || (two && c.vec.empty(1));
    let over = pushes && !c.vec.empty(7);
    let effect = if under || over {
        let flags = IE | SF;
        let bad = Rounded {
            value: Extended::INDEFINITE,
            flags,
            up: over && !under,
        };
        match (two, pushes) {
            (true, _) => StackEffect::Pop(bad),
            (_, true) => StackEffect::Push(bad, Extended::INDEFINITE),
            _ => StackEffect::Replace(bad),
        }
    } else {
        compute(c, i.mnemonic()).ok_or(Fault::Unimplemented)?
    };
    let ignored = c.vec.take_x87_errors();
    apply(c, &effect);
    if c.vec.x87_pending() {
        c.vec.record_exception(thunk::last_opcode(i), 0);
    }
    c.vec.add_x87_errors(ignored);
    Ok(())
}

fn st(c: &Core, n: usize) -> Extended {
    Extended::from_bytes(c.vec.st(n))
}

/// None only if there is no memory for constants.
fn compute(c: &mut Core, m: M) -> Option<StackEffect> {
    let (x, y) = (st(c, 0), st(c, 1));
    let fcw = c.vec.fcw();
    let f = c.functions.get_or_insert_default();
    let round = |e: Option<Exact>| e.map(|e| e.round(fcw));
    let one = |special: fn(Extended) -> Option<Answer>| nan_of_one(x).or_else(|| special(x));
    Some(match m {
        M::F2xm1 => StackEffect::Replace(match one(special_exp) {
            Some(answer) => answer,
            None => round(f.exp2_less_1(x))?,
        }),
        M::Fyl2x => StackEffect::Pop(match nan_of_two(x, y).or_else(|| special_log(x, y)) {
            Some(answer) => answer,
            None => round(f.y_log2(y, x))?,
        }),
        M::Fyl2xp1 => StackEffect::Pop(match nan_of_two(x, y).or_else(|| special_log1(x, y)) {
            Some(answer) => answer,
            None => round(f.y_log2_plus_1(y, x))?,
        }),
        M::Fpatan => StackEffect::Pop(match nan_of_two(x, y) {
            Some(answer) => answer,
            None => match special_atan(x, y) {
                Some(Angle::Zero) => plain(Extended::zero(y.negative())),
                Some(Angle::Quarters(n)) => round(f.pi(n, y.negative()))?,
                None => round(f.atan2(y, x))?,
            },
        }),
        M::Fsin => match one(special_sin) {
            Some(answer) => StackEffect::Replace(answer),
            None if too_large(x) => StackEffect::OutOfRange,
            None => StackEffect::Replace(round(f.sin(x))?),
        },
        M::Fcos => match one(special_cos) {
            Some(answer) => StackEffect::Replace(answer),
            None if too_large(x) => StackEffect::OutOfRange,
            None => StackEffect::Replace(round(f.cos(x))?),
        },
        M::Fptan => match one(special_sin) {
            Some(answer) if answer.flags & IE != 0 || x.kind() == Kind::QuietNan => {
                StackEffect::Push(answer, answer.value)
            }
            Some(answer) => StackEffect::Push(answer, Extended::ONE),
            None if too_large(x) => StackEffect::OutOfRange,
            None => StackEffect::Push(round(f.tan(x))?, Extended::ONE),
        },
        _ => match (one(special_sin), one(special_cos)) {
            (Some(sin), Some(cos)) => StackEffect::Push(sin, cos.value),
            _ if too_large(x) => StackEffect::OutOfRange,
            _ => {
                let (mut sin, cos) = (round(f.sin(x))?, round(f.cos(x))?);
                sin.flags |= cos.flags;
                sin.up = cos.up;
                StackEffect::Push(sin, cos.value)
            }
        },
    })
    .map(|effect| {
        with_denormals(
            effect,
            x,
            (y, matches!(m, M::Fyl2x | M::Fyl2xp1 | M::Fpatan)),
        )
    })
}

/// The denormal-operand flag, for results that are computed from a denormal operand.
fn with_denormals(effect: StackEffect, x: Extended, y: (Extended, bool)) -> StackEffect {
    let denormal = x.kind() == Kind::Denormal || (y.1 && y.0.kind() == Kind::Denormal);
    let add = |mut a: Answer| {
        if denormal && a.flags & IE == 0 && a.value.kind() != Kind::QuietNan {
            a.flags |= DE;
        }
        a
    };
    match effect {
        StackEffect::Replace(a) => StackEffect::Replace(add(a)),
        StackEffect::Pop(a) => StackEffect::Pop(add(a)),
        StackEffect::Push(a, b) => StackEffect::Push(add(a), b),
        StackEffect::OutOfRange => StackEffect::OutOfRange,
    }
}

/// The answer for a NaN or an encoding that is not supported.
fn nan_of_one(x: Extended) -> Option<Answer> {
    match x.kind() {
        Kind::Unsupported => Some(invalid()),
        Kind::SignallingNan => Some(flagged(x.quieted(), IE)),
        Kind::QuietNan => Some(plain(x)),
        _ => None,
    }
}

/// The same for two operands: the NaN with the larger significand wins. SDM Vol. 1, "Rules for
/// Handling NaNs".
fn nan_of_two(x: Extended, y: Extended) -> Option<Answer> {
    let kinds = [x.kind(), y.kind()];
    if kinds.contains(&Kind::Unsupported) {
        return Some(invalid());
    }
    let nan = |k: Kind| matches!(k, Kind::QuietNan | Kind::SignallingNan);
    let flags = if kinds.contains(&Kind::SignallingNan) {
        IE
    } else {
        0
    };
    let winner = match kinds.map(nan) {
        [false, false] => return None,
        [true, false] => x,
        [false, true] => y,
        [true, true] => match (kinds, x.significand.cmp(&y.significand)) {
            // A quiet NaN wins over a signalling one.
            ([Kind::SignallingNan, Kind::QuietNan], _) => y,
            ([Kind::QuietNan, Kind::SignallingNan], _) => x,
            (_, std::cmp::Ordering::Less) => y,
            (_, std::cmp::Ordering::Greater) => x,
            // The positive one.
            _ if x.negative() => y,
            _ => x,
        },
    };
    Some(flagged(winner.quieted(), flags))
}

/// At least 2^63.
fn too_large(x: Extended) -> bool {
    x.head & 0x7fff >= 16383 + 63
}

/// Outside -1 to 1 the result of F2XM1 is undefined: here the operand stays.
fn special_exp(x: Extended) -> Option<Answer> {
    let beyond =
        x.head & 0x7fff > 0x3fff || (x.head & 0x7fff == 0x3fff && x.significand != 1 << 63);
    match x.kind() {
        Kind::Infinity if x.negative() => Some(plain(Extended {
            head: 0xbfff,
            significand: 1 << 63,
        })),
        Kind::Zero => Some(plain(x)),
        _ if beyond => Some(plain(x)),
        _ => None,
    }
}

fn special_sin(x: Extended) -> Option<Answer> {
    match x.kind() {
        Kind::Infinity => Some(invalid()),
        Kind::Zero => Some(plain(x)),
        _ => None,
    }
}

fn special_cos(x: Extended) -> Option<Answer> {
    match x.kind() {
        Kind::Infinity => Some(invalid()),
        Kind::Zero => Some(plain(Extended::ONE)),
        _ => None,
    }
}

/// FYL2X. SDM Vol. 2, "FYL2X—Compute y * log2x", the table of results.
fn special_log(x: Extended, y: Extended) -> Option<Answer> {
    let below_one = x.head & 0x7fff < 0x3fff;
    let one = x == Extended::ONE;
    let (kx, ky) = (x.kind(), y.kind());
    if kx != Kind::Zero && x.negative() {
        return Some(invalid());
    }
    // The sign of log2(x) times that of y.
    let negative = y.negative() != below_one;
    Some(match (kx, ky) {
        (Kind::Zero, Kind::Zero) | (Kind::Infinity, Kind::Zero) => invalid(),
        (Kind::Zero, Kind::Infinity) | (Kind::Infinity, _) => plain(Extended::infinity(negative)),
        (Kind::Zero, _) => flagged(Extended::infinity(negative), ZE),
        (_, Kind::Infinity) if one => invalid(),
        (_, Kind::Infinity) => plain(Extended::infinity(negative)),
        (_, Kind::Zero) => plain(Extended::zero(negative)),
        _ if one => plain(Extended::zero(y.negative())),
        _ => return None,
    })
}

/// FYL2XP1; beyond the range that the manual gives it is FYL2X of x + 1.
fn special_log1(x: Extended, y: Extended) -> Option<Answer> {
    let negative = y.negative() != x.negative();
    let minus_one = x.negative() && x.head & 0x7fff == 0x3fff && x.significand == 1 << 63;
    let below = x.negative() && x.head & 0x7fff >= 0x3fff && !minus_one;
    Some(match (x.kind(), y.kind()) {
        _ if below => invalid(),
        (_, Kind::Zero) if minus_one => invalid(),
        (_, Kind::Infinity) if minus_one => plain(Extended::infinity(negative)),
        _ if minus_one => flagged(Extended::infinity(negative), ZE),
        (Kind::Zero, Kind::Infinity) | (Kind::Infinity, Kind::Zero) => invalid(),
        (Kind::Zero, _) | (_, Kind::Zero) => plain(Extended::zero(negative)),
        (Kind::Infinity, _) | (_, Kind::Infinity) => plain(Extended::infinity(negative)),
        _ => return None,
    })
}

enum Angle {
    Zero,
    Quarters(u64),
}

/// FPATAN. SDM Vol. 2, "FPATAN—Partial Arctangent", the table of results; the sign is that of y.
fn special_atan(x: Extended, y: Extended) -> Option<Angle> {
    let left = x.negative();
    Some(match (x.kind(), y.kind()) {
        (Kind::Infinity, Kind::Infinity) => Angle::Quarters(if left { 3 } else { 1 }),
        (_, Kind::Infinity) => Angle::Quarters(2),
        (_, Kind::Zero) | (Kind::Infinity, _) if left => Angle::Quarters(4),
        (_, Kind::Zero) | (Kind::Infinity, _) => Angle::Zero,
        (Kind::Zero, _) => Angle::Quarters(2),
        _ => return None,
    })
}

/// Changes the stack and the status word; of an unmasked exception of the operands only the flags.
fn apply(c: &mut Core, effect: &StackEffect) {
    let v = &mut c.vec;
    let fsw = v.fsw() & !(C1 | C2);
    let (StackEffect::Replace(answer) | StackEffect::Pop(answer) | StackEffect::Push(answer, _)) =
        effect
    else {
        v.set_fsw(fsw | C2);
        return;
    };
    let unmasked = answer.flags & !v.fcw();
    if unmasked & (IE | DE | ZE) != 0 {
        // Precision, overflow and underflow come from a result, and there is none.
        let up = if answer.flags & SF != 0 && answer.up {
            C1
        } else {
            0
        };
        v.set_fsw(fsw | (answer.flags & (IE | DE | ZE | SF)) | up);
        return;
    }
    debug_assert!(unmasked & !(OE | UE | super::extended::PE | SF) == 0);
    v.set_fsw(fsw | answer.flags | if answer.up { C1 } else { 0 });
    match effect {
        StackEffect::Pop(_) => {
            v.put_st(1, answer.value.to_bytes());
            v.pop_st();
        }
        StackEffect::Push(_, second) => {
            v.put_st(0, answer.value.to_bytes());
            v.push_st(second.to_bytes());
        }
        _ => v.put_st(0, answer.value.to_bytes()),
    }
}
