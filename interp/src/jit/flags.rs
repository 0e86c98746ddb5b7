//! Computes the flags at an exit of a unit, with the interpreter's formulas.

use crate::flags::{ARITHMETIC, LazyFlags, flag_if};
use crate::ops::{alu, muldiv, shift};
use crate::width::Width;
use hindsight_regs::rflags::Rflags;
use hindsight_translate::{FlagKind, FlagState, FlagStep};

/// Returns the flags at an exit of code that was entered with the flags `before`.
pub(super) fn flags_of(state: &FlagState, before: LazyFlags) -> LazyFlags {
    let mut flags = match state.size {
        1 => set::<u8>(state, before),
        2 => set::<u16>(state, before),
        4 => set::<u32>(state, before),
        _ => set::<u64>(state, before),
    };
    if let Some(step) = state.step {
        flags = match step.size {
            1 => stepped::<u8>(step, flags),
            2 => stepped::<u16>(step, flags),
            4 => stepped::<u32>(step, flags),
            _ => stepped::<u64>(step, flags),
        };
    }
    match state.cf {
        Some(cf) => flags.with(Rflags::CF, cf),
        None => flags,
    }
}

fn stepped<T: Width>(step: FlagStep, flags: LazyFlags) -> LazyFlags {
    let r = T::from_u64(step.result);
    if step.decrement {
        alu::flags_of_step::<T, true>(flags, alu::step::<T, false>(r), r)
    } else {
        alu::flags_of_step::<T, false>(flags, alu::step::<T, true>(r), r)
    }
}

fn set<T: Width>(state: &FlagState, before: LazyFlags) -> LazyFlags {
    let (a, b) = (T::from_u64(state.a), T::from_u64(state.b));
    let carry = u64::from(state.carry);
    let plus = |x: T, y: T| T::from_u64(x.zext().wrapping_add(y.zext()));
    let minus = |x: T, y: T| T::from_u64(x.zext().wrapping_sub(y.zext()));
    let logic = |r| LazyFlags::result(r, Rflags::empty());
    let count = shift::count::<T>(state.b);
    match state.kind {
        FlagKind::Caller => before,
        FlagKind::Add => LazyFlags::add(a, b, plus(a, b)),
        FlagKind::Sub => LazyFlags::sub(a, b, minus(a, b)),
        FlagKind::Adc => LazyFlags::add(a, b, plus(plus(a, b), T::from_u64(carry))),
        FlagKind::Sbb => LazyFlags::sub(a, b, minus(minus(a, b), T::from_u64(carry))),
        FlagKind::Logic => logic(a),
        FlagKind::Test => logic(T::from_u64(a.zext() & b.zext())),
        FlagKind::AddResult => LazyFlags::add(minus(a, b), b, a),
        FlagKind::SubResult => LazyFlags::sub(plus(a, b), b, a),
        FlagKind::Neg => LazyFlags::sub(T::from_u64(0), a, T::from_u64(a.zext().wrapping_neg())),
        FlagKind::Shl => shift::eval::<T, { shift::SHL }>(before, a, count).1,
        FlagKind::Shr => shift::eval::<T, { shift::SHR }>(before, a, count).1,
        FlagKind::Sar => shift::eval::<T, { shift::SAR }>(before, a, count).1,
        FlagKind::Product => muldiv::overflow(a, state.carry),
        FlagKind::Tzcnt => counted(a.zext() & 1 != 0, a.zext() == 0),
        FlagKind::Lzcnt => counted(a.sext() >> 63 != 0, a.zext() == 0),
        FlagKind::Popcnt => LazyFlags::explicit(flag_if(a.zext() == 0, Rflags::ZF)),
        FlagKind::Scan if a.zext() == 0 => LazyFlags::explicit(Rflags::ZF | Rflags::PF),
        FlagKind::Scan => LazyFlags::result(1_u8, Rflags::empty()),
        FlagKind::Explicit => LazyFlags::explicit(stored(state.a)),
        FlagKind::ExplicitLogic => LazyFlags::explicit(stored(state.a) - Rflags::AF),
    }
}

/// Returns flags as LAHF and SETO AL leave them in AX.
pub(super) fn flags_in_ax(flags: LazyFlags) -> u16 {
    let flags = flags.rflags();
    let low = (flags - Rflags::OF).bits() & 0xff;
    u16::try_from(low << 8).unwrap_or(0) | u16::from(flags.contains(Rflags::OF))
}

/// Returns the flags of [`FlagKind::Explicit`] from AX.
fn stored(ax: u64) -> Rflags {
    let low = Rflags::from_bits_retain(ax >> 8 & 0xff) & ARITHMETIC;
    low | flag_if(ax & 1 != 0, Rflags::OF)
}

/// Returns the flags of TZCNT and LZCNT.
///
/// `zero` says that the count is 0, `nothing` that the source is.
fn counted(zero: bool, nothing: bool) -> LazyFlags {
    LazyFlags::explicit(flag_if(zero, Rflags::ZF) | flag_if(nothing, Rflags::CF))
}
