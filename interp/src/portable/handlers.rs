//! Chooses the instructions that are computed in software.

use super::{estimate, stack};
use crate::core::{Core, Handler, Op};
use crate::ops::{Done, general};
use iced_x86::{Instruction, Mnemonic as M};

/// The handler of an instruction whose results differ between hosts; `None` for all others.
pub(crate) fn handler(i: &Instruction) -> Option<Handler> {
    Some(match i.mnemonic() {
        M::Rcpps | M::Rcpss | M::Rsqrtps | M::Rsqrtss => general!(run_estimate),
        M::F2xm1
        | M::Fyl2x
        | M::Fyl2xp1
        | M::Fpatan
        | M::Fptan
        | M::Fsin
        | M::Fcos
        | M::Fsincos => general!(run_x87),
        _ => return None,
    })
}

fn run_estimate(c: &mut Core, o: &Op) -> Done {
    let i = c.code.insns[o.insn as usize];
    estimate::run(c, o, &i)
}

fn run_x87(c: &mut Core, o: &Op) -> Done {
    let i = c.code.insns[o.insn as usize];
    stack::run(c, o, &i)
}
