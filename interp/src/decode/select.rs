//! Chooses the operation for an instruction and fills in its operands.

#![expect(
    clippy::cast_possible_truncation,
    reason = "register numbers and sizes are small"
)]

use super::dead_flags::FlagUse;
use super::operands::fill_in;
use super::transaction::aborts;
use crate::code::{LINKABLE, LOW};
use crate::core::{Core, Handler, Op};
use crate::facts::{InstructionFacts, Operand};
use crate::ops::{bits, cr, general, inner, mov, system, transaction, x87, xsave};
use crate::portable;
use crate::registers::Reg;
use crate::thunk;
use hindsight_cpu::state::seg;
use iced_x86::{Instruction, Mnemonic as M};

/// The operation for an instruction.
pub(super) struct Selected {
    pub(super) op: Op,
    pub(super) flag_use: FlagUse,
    /// The facts of the instruction, if it is valid.
    pub(super) facts: Option<InstructionFacts>,
}

/// An instruction, and the data that determine its operation.
pub(super) struct Pick<'a> {
    pub(super) i: &'a Instruction,
    pub(super) facts: &'a InstructionFacts,
    /// Whether the fast handlers can be used.
    ///
    /// That is in 64-bit mode with 64-bit addresses, and in 32-bit code with an open segment.
    pub(super) fast: bool,
    /// Default operand size of the code in bytes: 2, 4 or 8.
    pub(super) code: u8,
    /// Whether it is a direct branch within the page.
    pub(super) link: bool,
    /// Whether taken branches are observed.
    pub(super) record: bool,
    pub(super) size: u8,
}

/// Instantiates a handler for a condition code.
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

/// Instantiates the handler `f::<T, C>` for the width `T` and a constant `C`.
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

/// Like `sized`, with a handler for bytes that are the lowest of their registers.
macro_rules! sized_low {
    ($size:expr, $wrap:ident, $($f:ident)::+ $(, $c:tt)?) => {
        match $size {
            LOW => $wrap!($($f)::+::<Low $(, $c)?>),
            size => sized!(size, $wrap, $($f)::+ $(, $c)?),
        }
    };
}

pub(super) use {by_condition, sized, sized_low};

/// Returns the operand size, and whether a byte is the lowest one of its register.
pub(super) fn width(o: &Op) -> u8 {
    match o.size {
        1 if !o.dst.is_high_byte() && !o.src.is_high_byte() => LOW,
        size => size,
    }
}

/// How the address of a memory operand is computed.
pub(super) enum AddressForm {
    /// Any form in 32-bit code; the other variants are for 64-bit addresses.
    Open,
    /// A base register, if any, and a displacement.
    Base,
    /// A base register, an index register, and a displacement.
    Index,
    /// Any form, with the base of FS or GS.
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

/// Returns the handler of an encoding whose feature CPUID does not report.
///
/// Returns `None` if it raises #UD.
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
    /// Creates the operation for an instruction.
    ///
    /// `too_long` says that it does not end within 15 bytes.
    pub(super) fn select(&mut self, i: &Instruction, rip: u64, too_long: bool) -> Selected {
        let mut op = Op::new(general!(system::ud));
        if i.is_invalid() {
            if too_long {
                op.set_handler(general!(system::too_long));
            }
            return Selected {
                op,
                flag_use: FlagUse::exposing(),
                facts: None,
            };
        }
        let facts = InstructionFacts::of(i, self.mode.code_size());
        fill_in(i, &facts, rip, &mut op);
        let flag_use = if let Some(handler) = self.in_place_of(i, &op) {
            op.set_handler(handler);
            FlagUse::exposing()
        } else {
            self.choose(i, &facts, rip, &mut op)
        };
        Selected {
            op,
            flag_use,
            facts: Some(facts),
        }
    }

    /// Returns the handler for an instruction that CPUID or a transaction excludes.
    fn in_place_of(&self, i: &Instruction, op: &Op) -> Option<Handler> {
        if !i.cpuid_features().iter().all(|f| self.features.has(*f)) {
            return Some(without_feature(i, op.size).unwrap_or(general!(system::ud)));
        }
        if !self.in_transaction() {
            return None;
        }
        if aborts(i) {
            return Some(general!(transaction::unfit));
        }
        matches!(i.mnemonic(), M::Int1 | M::Int3).then_some(general!(transaction::breakpoint))
    }

    /// Sets the handler of an instruction that may be executed.
    fn choose(
        &mut self,
        i: &Instruction,
        facts: &InstructionFacts,
        rip: u64,
        op: &mut Op,
    ) -> FlagUse {
        let lin = self.code_lin(rip);
        let target = self.code_lin(rip.wrapping_add(op.imm));
        let pick = Pick {
            i,
            facts,
            fast: self.is_fast(op),
            code: self.mode.code_size(),
            link: !self.is_code_limited() && (lin ^ target) >> 12 == 0,
            size: op.size,
            record: self.branches.records(),
        };
        if pick.link {
            op.prefix |= LINKABLE;
        }
        if let Some(handler) = pick.handler(op) {
            op.set_handler(handler);
            return FlagUse::new(facts, pick.without_flags(op));
        }
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
        FlagUse::exposing()
    }

    /// Whether the fast handlers can be used for a memory operand.
    fn is_fast(&self, op: &Op) -> bool {
        let usual = [seg::DS, seg::ES, seg::SS].contains(&op.segment());
        match self.mode.code_size() {
            8 => op.address_size == 8,
            4 => op.address_size == 4 && usual && self.mode.is_flat_32bit(),
            _ => false,
        }
    }

    /// Returns how an instruction that CPUID reports is executed.
    #[cfg(test)]
    pub(super) fn execution(&mut self, i: &Instruction) -> super::tests::Execution {
        use super::tests::Execution;
        if !i.cpuid_features().iter().all(|f| self.features.has(*f)) {
            return Execution::NotInCpuid;
        }
        let mut op = Op::new(general!(system::ud));
        let facts = InstructionFacts::of(i, self.mode.code_size());
        fill_in(i, &facts, 0, &mut op);
        let pick = Pick {
            i,
            facts: &facts,
            fast: self.is_fast(&op),
            code: self.mode.code_size(),
            link: false,
            size: op.size,
            record: false,
        };
        if let Some(handler) = pick.handler(&mut op) {
            assert!(
                facts.ends_block || matches!(handler, Handler::Inner(_)),
                "{i:?} ends its block"
            );
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
    fn operand(&self, n: usize) -> Operand {
        self.facts.operands.get(n).copied().unwrap_or(Operand::None)
    }

    pub(super) fn mem(&self, n: usize) -> bool {
        self.operand(n) == Operand::Memory
    }

    pub(super) fn reg(&self, n: usize) -> bool {
        matches!(self.operand(n), Operand::General(_) | Operand::Special(_))
    }

    /// Whether an operand is a register that is not a general register.
    pub(super) fn special(&self, n: usize) -> bool {
        matches!(self.operand(n), Operand::Special(_))
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
