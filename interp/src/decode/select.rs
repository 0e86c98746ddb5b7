//! Chooses the operation for an instruction and fills in its operands.

#![expect(
    clippy::cast_possible_truncation,
    reason = "register numbers and sizes are small"
)]

use super::dead_flags::FlagUse;
use super::transaction::aborts;
use crate::code::{LINKABLE, LOW};
use crate::core::{Core, Handler, Op};
use crate::ops::{bits, cr, general, inner, mov, system, transaction, x87, xsave};
use crate::portable;
use crate::registers::Reg;
use crate::thunk;
use hindsight_cpu::state::seg;
use iced_x86::{Instruction, Mnemonic as M, OpKind};

/// An instruction with what its choice of operation depends on.
pub(super) struct Pick<'a> {
    pub(super) i: &'a Instruction,
    /// 64-bit mode with 64-bit addresses, or 32-bit code and an open segment: the fast forms serve.
    pub(super) fast: bool,
    /// Code size in bytes.
    pub(super) code: u8,
    /// A direct branch within the page.
    pub(super) link: bool,
    /// Taken branches are observed.
    pub(super) record: bool,
    pub(super) size: u8,
}

/// Picks a condition by its code.
macro_rules! by_condition {
    ($cc:expr, $wrap:ident, $($f:ident)::+ $(, $t:tt)*) => {
        match $cc {
            0 => $wrap!($($f)::+::<$($t,)* 0>), 1 => $wrap!($($f)::+::<$($t,)* 1>),
            2 => $wrap!($($f)::+::<$($t,)* 2>), 3 => $wrap!($($f)::+::<$($t,)* 3>),
            4 => $wrap!($($f)::+::<$($t,)* 4>), 5 => $wrap!($($f)::+::<$($t,)* 5>),
            6 => $wrap!($($f)::+::<$($t,)* 6>), 7 => $wrap!($($f)::+::<$($t,)* 7>),
            8 => $wrap!($($f)::+::<$($t,)* 8>), 9 => $wrap!($($f)::+::<$($t,)* 9>),
            10 => $wrap!($($f)::+::<$($t,)* 10>), 11 => $wrap!($($f)::+::<$($t,)* 11>),
            12 => $wrap!($($f)::+::<$($t,)* 12>), 13 => $wrap!($($f)::+::<$($t,)* 13>),
            14 => $wrap!($($f)::+::<$($t,)* 14>), _ => $wrap!($($f)::+::<$($t,)* 15>),
        }
    };
}

/// Picks a width for `f::<T, C>` with a constant after the width.
macro_rules! sized {
    ($size:expr, $wrap:ident, $($f:ident)::+ $(, $c:tt)?) => {
        match $size {
            1 => $wrap!($($f)::+::<u8 $(, $c)?>),
            2 => $wrap!($($f)::+::<u16 $(, $c)?>),
            4 => $wrap!($($f)::+::<u32 $(, $c)?>),
            _ => $wrap!($($f)::+::<u64 $(, $c)?>),
        }
    };
}

/// The same, with a form for low bytes.
macro_rules! sized_low {
    ($size:expr, $wrap:ident, $($f:ident)::+ $(, $c:tt)?) => {
        match $size {
            LOW => $wrap!($($f)::+::<Low $(, $c)?>),
            size => sized!(size, $wrap, $($f)::+ $(, $c)?),
        }
    };
}

pub(super) use {by_condition, sized, sized_low};

/// The operand size, and whether a byte is always the lowest one of its register.
pub(super) fn width(o: &Op) -> u8 {
    match o.size {
        1 if !o.dst.is_high_byte() && !o.src.is_high_byte() => LOW,
        size => size,
    }
}

/// How the address of a memory operand is computed.
pub(super) enum AddressForm {
    /// Any form, in 32-bit code. The other forms are for 64-bit addresses.
    Open,
    /// A base register, if any, and a displacement.
    Base,
    /// An index register too.
    Index,
    /// With the base of FS or GS.
    Any,
}

pub(super) fn address_form(o: &Op) -> AddressForm {
    match (o.address_size, o.segment(), o.index) {
        (4, ..) => AddressForm::Open,
        (_, seg::FS | seg::GS, _) => AddressForm::Any,
        (_, _, Reg::Zero) => AddressForm::Base,
        _ => AddressForm::Index,
    }
}

fn memory_kind(kind: OpKind) -> bool {
    kind == OpKind::Memory
}

/// What an encoding does where CPUID does not show its instruction; none: #UD.
fn without_feature(i: &Instruction, size: u8) -> Option<Handler> {
    Some(match i.mnemonic() {
        // The prefix is ignored.
        M::Tzcnt => sized!(size, general, bits::scan, false),
        M::Lzcnt => sized!(size, general, bits::scan, true),
        M::Wbnoinvd => general!(cr::wbinvd),
        // Encodings of the space that is reserved for hints.
        M::Bndcl | M::Bndcn | M::Bndcu | M::Bndldx | M::Bndmk | M::Bndmov | M::Bndstx => {
            inner!(mov::nop)
        }
        M::Cldemote | M::Rdsspd | M::Rdsspq => inner!(mov::nop),
        _ => return None,
    })
}

impl Core {
    /// Makes the operation for an instruction; `too_long` if it does not end within 15 bytes.
    pub(super) fn select(&mut self, i: &Instruction, rip: u64, too_long: bool) -> (Op, FlagUse) {
        let mut op = Op::new(general!(system::ud));
        if i.is_invalid() {
            if too_long {
                op.set_handler(general!(system::too_long));
            }
            return (op, FlagUse::Reads);
        }
        self.operands(i, rip, &mut op);
        let lin = self.code_lin(rip);
        let target = self.code_lin(rip.wrapping_add(op.imm));
        let pick = Pick {
            i,
            fast: self.is_fast(&op),
            code: self.mode.code_size(),
            link: !self.is_code_limited() && (lin ^ target) >> 12 == 0,
            size: op.size,
            record: self.branches.records(),
        };
        if !i.cpuid_features().iter().all(|f| self.features.has(*f)) {
            if let Some(handler) = without_feature(i, op.size) {
                op.set_handler(handler);
            }
            return (op, FlagUse::Reads);
        }
        if self.in_transaction() && aborts(i) {
            op.set_handler(general!(transaction::unfit));
            return (op, FlagUse::Reads);
        }
        if self.in_transaction() && matches!(i.mnemonic(), M::Int1 | M::Int3) {
            op.set_handler(general!(transaction::breakpoint));
            return (op, FlagUse::Reads);
        }
        if pick.link {
            op.prefix |= LINKABLE;
        }
        if let Some(handler) = pick.handler(&mut op) {
            op.set_handler(handler);
            let flag_use = pick.flag_use(&mut op);
            return (op, flag_use);
        } else {
            let own = if self.portable {
                portable::handler(i)
            } else {
                None
            };
            op.insn = self.code.insns.len() as u32;
            self.code.insns.push(*i);
            op.set_handler(match thunk::support(i) {
                _ if own.is_some() => own.unwrap_or(general!(system::unimplemented)),
                thunk::Support::Yes => general!(thunk::run),
                thunk::Support::Elements => general!(thunk::run_elements),
                thunk::Support::No => general!(system::unimplemented),
            });
        }
        (op, FlagUse::Reads)
    }

    /// Whether the fast forms serve for a memory operand.
    fn is_fast(&self, op: &Op) -> bool {
        let usual = [seg::DS, seg::ES, seg::SS].contains(&op.segment());
        match self.mode.code_size() {
            8 => op.address_size == 8,
            4 => op.address_size == 4 && usual && self.mode.is_flat_32bit(),
            _ => false,
        }
    }

    /// How an instruction that CPUID shows is executed.
    #[cfg(test)]
    pub(super) fn execution(&mut self, i: &Instruction) -> super::tests::Execution {
        use super::tests::Execution;
        if !i.cpuid_features().iter().all(|f| self.features.has(*f)) {
            return Execution::NotInCpuid;
        }
        let mut op = Op::new(general!(system::ud));
        self.operands(i, 0, &mut op);
        let pick = Pick {
            i,
            fast: self.is_fast(&op),
            code: self.mode.code_size(),
            link: false,
            size: op.size,
            record: false,
        };
        if pick.handler(&mut op).is_some() {
            return Execution::Handler;
        }
        match thunk::support(i) {
            thunk::Support::Yes if thunk::can_run(self, i) => Execution::Thunk,
            thunk::Support::Elements => Execution::Handler,
            _ => Execution::Missing,
        }
    }
}

impl Pick<'_> {
    pub(super) fn mem(&self, n: u32) -> bool {
        self.i.op_count() > n && memory_kind(self.i.op_kind(n))
    }

    pub(super) fn reg(&self, n: u32) -> bool {
        self.i.op_count() > n && self.i.op_kind(n) == OpKind::Register
    }

    fn handler(&self, o: &mut Op) -> Option<Handler> {
        self.integer(o)
            .or_else(|| self.stack_or_string(o))
            .or_else(|| self.flow(o))
            .or_else(|| self.system(o))
            .or_else(|| x87::handler(self.i))
            .or_else(|| xsave::handler(self.i))
    }
}
