//! Instructions whose results hosts differ in, computed here instead, so that they are the same
//! everywhere: the estimates of SSE and the transcendental functions of the x87.
//!
//! - RCPPS, RCPSS, RSQRTPS, RSQRTSS: the exact value rounded to 12 fraction bits, to nearest even: a
//!   relative error below 2^-13, where the manual allows 1.5 * 2^-12.
//! - F2XM1, FYL2X, FYL2XP1, FPATAN, FPTAN, FSIN, FCOS, FSINCOS: the exact value rounded as the control
//!   word says. Arguments are reduced by the exact π.
//!
//! SDM Vol. 1, "Transcendental Instructions", "x87 FPU Floating-Point Exception Handling".

mod estimate;
mod extended;
mod stack;
mod transcendental;
use crate::core::Core;
use crate::op::{Handler, Op};
use crate::ops::{Done, general};
use iced_x86::{Instruction, Mnemonic as M};
pub(crate) use transcendental::Functions;

/// The operation of an instruction that is not left to the host.
pub(crate) fn handler(i: &Instruction) -> Option<Handler> {
    Some(match i.mnemonic() {
        M::Rcpps | M::Rcpss | M::Rsqrtps | M::Rsqrtss => general!(estimate),
        M::F2xm1
        | M::Fyl2x
        | M::Fyl2xp1
        | M::Fpatan
        | M::Fptan
        | M::Fsin
        | M::Fcos
        | M::Fsincos => general!(x87),
        _ => return None,
    })
}

fn estimate(c: &mut Core, o: &Op) -> Done {
    let i = c.cache.insns[o.insn as usize];
    estimate::run(c, o, &i)
}

fn x87(c: &mut Core, o: &Op) -> Done {
    let i = c.cache.insns[o.insn as usize];
    stack::run(c, o, &i)
}
