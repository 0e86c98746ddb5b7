//! Chooses the operation for an instruction and fills in its operands.

#![expect(
    clippy::cast_possible_truncation,
    reason = "register numbers and sizes are small"
)]

use super::operands::gpr;
use super::quiet::Effect;
use super::transaction::aborts;
use crate::code::{LINKABLE, LOW};
use crate::core::{Core, Handler, LastHandler, Op};
use crate::ops::{
    alu, bits, branch, by_size, cr, ending, far, fast, fused, general, inner, io, last, mov, msr,
    muldiv, shift, stack, string, system, transaction, x87, xsave,
};
use crate::portable;
use crate::registers::Reg;
use crate::thunk;
use crate::width::Low;
use hindsight_cpu::state::seg;
use hindsight_regs::rflags::Rflags;
use iced_x86::{Instruction, Mnemonic as M, OpKind};

/// An instruction with what its choice of operation depends on.
pub(super) struct Pick<'a> {
    pub(super) i: &'a Instruction,
    /// 64-bit mode with 64-bit addresses, or 32-bit code and an open segment: the fast forms serve.
    pub(super) fast: bool,
    /// Code size in bytes.
    code: u8,
    /// A direct branch within the page.
    link: bool,
    /// Taken branches are observed.
    record: bool,
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

/// The operand size, and whether a byte is always the lowest one of its register.
pub(super) fn width(o: &Op) -> u8 {
    match o.size {
        1 if !o.dst.is_high_byte() && !o.src.is_high_byte() => LOW,
        size => size,
    }
}

/// How the address of a memory operand is made.
enum At {
    /// In any way, in 32-bit code; the others are for 64-bit addresses.
    Open,
    /// A base register, if any, and a displacement.
    Base,
    /// An index register too.
    Index,
    /// With the base of FS or GS.
    Any,
}

fn place(o: &Op) -> At {
    match (o.address_size, o.segment(), o.index) {
        (4, ..) => At::Open,
        (_, seg::FS | seg::GS, _) => At::Any,
        (_, _, Reg::Zero) => At::Base,
        _ => At::Index,
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
    pub(super) fn select(&mut self, i: &Instruction, rip: u64, too_long: bool) -> (Op, Effect) {
        let mut op = Op::new(general!(system::ud));
        if i.is_invalid() {
            if too_long {
                op.set_handler(general!(system::too_long));
            }
            return (op, Effect::Seen);
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
            return (op, Effect::Seen);
        }
        if self.in_transaction() && aborts(i) {
            op.set_handler(general!(transaction::unfit));
            return (op, Effect::Seen);
        }
        if self.in_transaction() && matches!(i.mnemonic(), M::Int1 | M::Int3) {
            op.set_handler(general!(transaction::breakpoint));
            return (op, Effect::Seen);
        }
        if pick.link {
            op.prefix |= LINKABLE;
        }
        if let Some(handler) = pick.handler(&mut op) {
            op.set_handler(handler);
            let effect = pick.effect(&mut op);
            return (op, effect);
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
        (op, Effect::Seen)
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
    pub(super) fn way(&mut self, i: &Instruction) -> super::tests::Way {
        use super::tests::Way;
        if !i.cpuid_features().iter().all(|f| self.features.has(*f)) {
            return Way::NotShown;
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
            return Way::Own;
        }
        match thunk::support(i) {
            thunk::Support::Yes if thunk::can_run(self, i) => Way::Thunk,
            thunk::Support::Elements => Way::Own,
            _ => Way::Missing,
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
            .or_else(|| self.flow(o))
            .or_else(|| self.system(o))
            .or_else(|| x87::handler(self.i))
            .or_else(|| xsave::handler(self.i))
    }

    pub(super) fn alu<O: alu::Alu>(&self, o: &mut Op) -> Handler {
        use alu::{mi, mr, ri, rm, rr};
        use fast::{Anywhere, Based, Indexed, Open, alu_mi, alu_mr, alu_rm};
        macro_rules! placed {
            ($f:ident) => {
                match place(o) {
                    At::Open => by_size!(width(o), inner, $f, Open, O),
                    At::Base => by_size!(width(o), inner, $f, Based, O),
                    At::Index => by_size!(width(o), inner, $f, Indexed, O),
                    At::Any => by_size!(width(o), inner, $f, Anywhere, O),
                }
            };
        }
        let fast = self.fast && !o.lock();
        match (self.mem(0), self.mem(1), self.reg(1)) {
            (true, _, true) if fast => placed!(alu_mr),
            (true, _, true) => by_size!(self.size, general, mr, O),
            (true, ..) if fast => placed!(alu_mi),
            (true, ..) => by_size!(self.size, general, mi, O),
            (_, true, _) if fast => placed!(alu_rm),
            (_, true, _) => by_size!(self.size, general, rm, O),
            (_, _, true) => by_size!(width(o), inner, rr, O),
            _ => by_size!(width(o), inner, ri, O),
        }
    }

    fn fusable(&self, reg: u8, imm: u8) -> u8 {
        match (self.code, self.mem(0) || self.mem(1), self.reg(1)) {
            (8, false, true) => reg,
            (8, false, false) => imm,
            _ => 0,
        }
    }

    fn shift<const OP: u8>(&self) -> Handler {
        let by_cl = self.reg(1);
        match (self.mem(0), by_cl) {
            (true, true) => sized!(self.size, general, shift::m_cl, OP),
            (true, false) => sized!(self.size, general, shift::m_imm, OP),
            (false, true) => sized!(self.size, inner, shift::r_cl, OP),
            (false, false) => sized!(self.size, inner, shift::r_imm, OP),
        }
    }

    fn bit<const OP: u8>(&self) -> Handler {
        if self.reg(1) {
            sized!(self.size, general, bits::reg, OP)
        } else {
            sized!(self.size, general, bits::imm, OP)
        }
    }

    fn mov(&self, o: &mut Op) -> Handler {
        let (a, b) = (self.i.op0_register(), self.i.op1_register());
        if self.reg(0) && !gpr(a) {
            return match () {
                () if a.is_segment_register() => general!(system::mov_to_seg),
                () if a.is_cr() => general!(cr::write),
                () if a.is_dr() => general!(cr::write_dr),
                () => general!(system::ud),
            };
        }
        if self.reg(1) && !gpr(b) {
            return match () {
                () if b.is_segment_register() => general!(system::mov_from_seg),
                () if b.is_cr() => general!(cr::read),
                () if b.is_dr() => general!(cr::read_dr),
                () => general!(system::ud),
            };
        }
        use fast::{Anywhere, Based, Indexed, Open};
        macro_rules! placed {
            ($($f:ident)::+) => {
                match place(o) {
                    At::Open => sized_low!(width(o), inner, $($f)::+, Open),
                    At::Base => sized_low!(width(o), inner, $($f)::+, Based),
                    At::Index => sized_low!(width(o), inner, $($f)::+, Indexed),
                    At::Any => sized_low!(width(o), inner, $($f)::+, Anywhere),
                }
            };
        }
        match (self.mem(0), self.mem(1), self.reg(1)) {
            (true, _, true) if self.fast => placed!(fast::mov_mr),
            (true, _, true) => sized!(self.size, general, mov::mr),
            (true, ..) if self.fast => placed!(fast::mov_mi),
            (true, ..) => sized!(self.size, general, mov::mi),
            (_, true, _) if self.fast => placed!(fast::mov_rm),
            (_, true, _) => sized!(self.size, general, mov::rm),
            (_, _, true) => {
                o.fuse = fused::MOV_REG;
                sized_low!(width(o), inner, mov::rr)
            }
            _ => sized_low!(width(o), inner, mov::ri),
        }
    }

    fn extend<const SIGN: bool>(&self, o: &Op) -> Handler {
        use fast::{Anywhere, Based, Indexed, Open};
        macro_rules! placed {
            ($s:ty, $d:ty) => {
                match place(o) {
                    At::Open => inner!(fast::extend_rm::<Open, $s, $d, SIGN>),
                    At::Base => inner!(fast::extend_rm::<Based, $s, $d, SIGN>),
                    At::Index => inner!(fast::extend_rm::<Indexed, $s, $d, SIGN>),
                    At::Any => inner!(fast::extend_rm::<Anywhere, $s, $d, SIGN>),
                }
            };
        }
        let mem = self.mem(1);
        let from = if mem {
            self.i.memory_size().size()
        } else {
            self.i.op1_register().size()
        } as u8;
        let low = !o.src.is_high_byte();
        match (mem, from, self.size) {
            (true, 1, 4) if self.fast => placed!(u8, u32),
            (true, 1, 8) if self.fast => placed!(u8, u64),
            (true, 2, 4) if self.fast => placed!(u16, u32),
            (true, 2, 8) if self.fast => placed!(u16, u64),
            (true, 4, 8) if self.fast => placed!(u32, u64),
            (false, 1, 4) if low => inner!(mov::extend_rr::<Low, u32, SIGN>),
            (false, 1, 8) if low => inner!(mov::extend_rr::<Low, u64, SIGN>),
            (false, 1, 4) => inner!(mov::extend_rr::<u8, u32, SIGN>),
            (false, 1, 8) => inner!(mov::extend_rr::<u8, u64, SIGN>),
            (false, 2, 4) => inner!(mov::extend_rr::<u16, u32, SIGN>),
            (false, 2, 8) => inner!(mov::extend_rr::<u16, u64, SIGN>),
            (false, 4, 8) => inner!(mov::extend_rr::<u32, u64, SIGN>),
            (_, 1, _) => general!(mov::extend::<u8, SIGN>),
            (_, 2, _) => general!(mov::extend::<u16, SIGN>),
            _ => general!(mov::extend::<u32, SIGN>),
        }
    }

    fn unary(&self, r: [Handler; 4], m: [Handler; 4]) -> Handler {
        let n = self.size.trailing_zeros().min(3) as usize;
        if self.mem(0) { m[n] } else { r[n] }
    }

    #[expect(clippy::too_many_lines, reason = "one flat table")]
    fn integer(&self, o: &mut Op) -> Option<Handler> {
        macro_rules! all {
            ($wrap:ident, $f:path) => {{
                use $f as f;
                [
                    $wrap!(f::<u8>),
                    $wrap!(f::<u16>),
                    $wrap!(f::<u32>),
                    $wrap!(f::<u64>),
                ]
            }};
        }
        macro_rules! stepped {
            ($dec:literal) => {
                [
                    inner!(alu::step_r::<u8, $dec, true>),
                    inner!(alu::step_r::<u16, $dec, true>),
                    inner!(alu::step_r::<u32, $dec, true>),
                    inner!(alu::step_r::<u64, $dec, true>),
                ]
            };
        }
        let size = self.size;
        let cc = self.i.condition_code() as u8;
        Some(match self.i.mnemonic() {
            M::Add => self.alu::<alu::Add>(o),
            M::Or => self.alu::<alu::Or>(o),
            M::Adc => self.alu::<alu::Adc>(o),
            M::Sbb => self.alu::<alu::Sbb>(o),
            M::And => self.alu::<alu::And>(o),
            M::Sub => self.alu::<alu::Sub>(o),
            M::Xor => self.alu::<alu::Xor>(o),
            M::Cmp => {
                o.fuse = self.fusable(fused::CMP_REG, fused::CMP_IMM);
                self.alu::<alu::Cmp>(o)
            }
            M::Test => {
                o.fuse = self.fusable(fused::TEST_REG, fused::TEST_IMM);
                self.alu::<alu::Test>(o)
            }
            M::Mov => self.mov(o),
            M::Movzx => self.extend::<false>(o),
            M::Movsx | M::Movsxd
                if self.i.op0_register().size() == self.i.op1_register().size() && self.reg(1) =>
            {
                sized!(size, inner, mov::rr)
            }
            M::Movsxd if size < 8 && self.mem(1) => sized!(size, general, mov::rm),
            M::Movsx | M::Movsxd => self.extend::<true>(o),
            M::Lea if self.fast && size == 8 => inner!(mov::lea64),
            M::Lea => inner!(mov::lea),
            M::Inc => self.unary(stepped!(false), all!(general, alu::inc_m)),
            M::Dec => self.unary(stepped!(true), all!(general, alu::dec_m)),
            M::Neg => self.unary(all!(inner, alu::neg_r), all!(general, alu::neg_m)),
            M::Not => self.unary(all!(inner, alu::not_r), all!(general, alu::not_m)),
            M::Shl | M::Sal => self.shift::<{ shift::SHL }>(),
            M::Shr => self.shift::<{ shift::SHR }>(),
            M::Sar => self.shift::<{ shift::SAR }>(),
            M::Rol => self.shift::<{ shift::ROL }>(),
            M::Ror => self.shift::<{ shift::ROR }>(),
            M::Rcl => self.shift::<{ shift::RCL }>(),
            M::Rcr => self.shift::<{ shift::RCR }>(),
            M::Shld | M::Shrd => {
                if self.i.op2_kind() == OpKind::Register {
                    o.imm = u64::MAX;
                }
                if self.i.mnemonic() == M::Shld {
                    sized!(size, general, shift::double, false)
                } else {
                    sized!(size, general, shift::double, true)
                }
            }
            M::Bt => self.bit::<{ bits::BT }>(),
            M::Bts => self.bit::<{ bits::BTS }>(),
            M::Btr => self.bit::<{ bits::BTR }>(),
            M::Btc => self.bit::<{ bits::BTC }>(),
            M::Bsf => sized!(size, general, bits::scan, false),
            M::Bsr => sized!(size, general, bits::scan, true),
            M::Tzcnt => sized!(size, general, bits::count, false),
            M::Lzcnt => sized!(size, general, bits::count, true),
            M::Popcnt => sized!(size, general, bits::popcnt),
            M::Crc32 => {
                let from = if self.mem(1) {
                    self.i.memory_size().size()
                } else {
                    self.i.op1_register().size()
                };
                sized!(from, general, bits::crc32)
            }
            M::Mul => sized!(size, general, muldiv::mul),
            M::Imul => match self.i.op_count() {
                1 => sized!(size, general, muldiv::imul1),
                2 => sized!(size, general, muldiv::imul2),
                _ => sized!(size, general, muldiv::imul3),
            },
            M::Div => sized!(size, general, muldiv::div),
            M::Idiv => sized!(size, general, muldiv::idiv),
            M::Aaa => general!(muldiv::aaa),
            M::Aas => general!(muldiv::aas),
            M::Aad => general!(muldiv::aad),
            M::Aam => general!(muldiv::aam),
            M::Daa => general!(muldiv::daa),
            M::Das => general!(muldiv::das),
            M::Lahf => general!(muldiv::lahf),
            M::Sahf => general!(muldiv::sahf),
            M::Xadd => sized!(size, general, alu::xadd),
            M::Cmpxchg => sized!(size, general, alu::cmpxchg),
            M::Cmpxchg8b => general!(alu::cmpxchg_pair::<u32>),
            M::Cmpxchg16b => general!(alu::cmpxchg_pair::<u64>),
            M::Xchg => {
                if self.mem(1) {
                    // XCHG reg, mem is shown with its operands in either order.
                    o.src = o.dst;
                }
                sized!(size, general, alu::xchg)
            }
            M::Movbe if self.mem(1) => sized!(size, general, alu::movbe_load),
            M::Movbe => sized!(size, general, alu::movbe_store),
            M::Bswap => sized!(size, inner, alu::bswap),
            M::Adcx if size == 8 => general!(alu::adx::<u64, { Rflags::CF.bits() }>),
            M::Adcx => general!(alu::adx::<u32, { Rflags::CF.bits() }>),
            M::Adox if size == 8 => general!(alu::adx::<u64, { Rflags::OF.bits() }>),
            M::Adox => general!(alu::adx::<u32, { Rflags::OF.bits() }>),
            M::Cbw | M::Cwde | M::Cdqe => inner!(mov::widen_acc),
            M::Cwd | M::Cdq | M::Cqo => inner!(mov::sign_acc),
            M::Xlatb => general!(mov::xlat),
            M::Prefetchit0
            | M::Prefetchit1
            | M::Nop
            | M::Pause
            | M::Endbr32
            | M::Endbr64
            | M::Reservednop => inner!(mov::nop),
            M::Prefetch
            | M::Prefetchw
            | M::Prefetchwt1
            | M::Prefetchnta
            | M::Prefetcht0
            | M::Prefetcht1
            | M::Prefetcht2 => inner!(mov::nop),
            M::Mfence | M::Lfence | M::Sfence => inner!(mov::fence),
            M::Clflush | M::Clflushopt => general!(mov::flush),
            M::Clwb => general!(mov::clean),
            M::Cld => inner!(system::cld),
            M::Std => inner!(system::std),
            M::Clc => inner!(system::carry::<0>),
            M::Stc => inner!(system::carry::<1>),
            M::Cmc => inner!(system::carry::<2>),
            M::Salc => inner!(system::salc),
            M::Movnti => sized!(size, general, mov::mr),
            _ if cc != 0 && self.is_cmov() => match size {
                2 => by_condition!(cc - 1, general, mov::cmov, u16),
                4 => by_condition!(cc - 1, general, mov::cmov, u32),
                _ => by_condition!(cc - 1, general, mov::cmov, u64),
            },
            _ if cc != 0 && self.is_setcc() => by_condition!(cc - 1, general, mov::setcc),
            _ => return self.stack_or_string(o),
        })
    }

    fn is_cmov(&self) -> bool {
        self.i.op_count() == 2
            && self.reg(0)
            && gpr(self.i.op0_register())
            && !self.i.is_jcc_short_or_near()
    }

    fn is_setcc(&self) -> bool {
        self.i.op_count() == 1 && !self.i.is_jcc_short_or_near() && !self.i.is_loopcc()
    }

    fn stack_or_string(&self, o: &mut Op) -> Option<Handler> {
        let size = o.size;
        let quad = self.code == 8 && size == 8;
        Some(match self.i.mnemonic() {
            M::Push if self.reg(0) && self.i.op0_register().is_segment_register() => {
                o.src = o.dst;
                general!(stack::push_seg)
            }
            M::Push if self.reg(0) && quad => inner!(stack::push_r64),
            M::Push if self.reg(0) || self.mem(0) => general!(stack::push),
            M::Push => general!(stack::push_imm),
            M::Pop if self.reg(0) && self.i.op0_register().is_segment_register() => {
                general!(stack::pop_seg)
            }
            M::Pop if self.reg(0) && quad => inner!(stack::pop_r64),
            M::Pop => general!(stack::pop),
            M::Pusha | M::Pushad => general!(stack::pusha),
            M::Popa | M::Popad => general!(stack::popa),
            M::Pushf | M::Pushfd | M::Pushfq => general!(stack::pushf),
            M::Popf | M::Popfd | M::Popfq => general!(stack::popf),
            M::Enter => general!(stack::enter),
            M::Leave if quad => inner!(stack::leave64),
            M::Leave => general!(stack::leave),
            M::Movsb | M::Movsw | M::Movsq => sized!(size, general, string::movs),
            M::Movsd if self.i.is_string_instruction() => general!(string::movs::<u32>),
            M::Stosb | M::Stosw | M::Stosd | M::Stosq => sized!(size, general, string::stos),
            M::Lodsb | M::Lodsw | M::Lodsd | M::Lodsq => sized!(size, general, string::lods),
            M::Scasb | M::Scasw | M::Scasd | M::Scasq => sized!(size, general, string::scas),
            M::Cmpsb | M::Cmpsw | M::Cmpsq => sized!(size, general, string::cmps),
            M::Cmpsd if self.i.is_string_instruction() => general!(string::cmps::<u32>),
            M::Insb | M::Insw | M::Insd => general!(string::ins),
            M::Outsb | M::Outsw | M::Outsd => general!(string::outs),
            M::In => {
                if !self.reg(1) {
                    o.src = Reg::Zero;
                }
                general!(io::input)
            }
            M::Out => {
                o.size = self.i.op1_register().size() as u8;
                o.src = if self.reg(0) { Reg::Rdx } else { Reg::Zero };
                general!(io::output)
            }
            _ => return None,
        })
    }

    fn flow(&self, o: &mut Op) -> Option<Handler> {
        let wide = self.code == 8 && self.size == 8;
        let cc = self.i.condition_code() as u8;
        Some(match self.i.mnemonic() {
            _ if self.i.is_jcc_short_or_near() => match (wide, self.link, self.record) {
                (true, true, false) => jcc::<true, false>(cc - 1),
                (true, false, false) => jcc::<false, false>(cc - 1),
                (true, true, true) => jcc::<true, true>(cc - 1),
                (true, false, true) => jcc::<false, true>(cc - 1),
                _ => by_condition!(cc - 1, inner, branch::jcc),
            },
            M::Jmp if self.i.is_jmp_short_or_near() => self.linked(
                wide,
                [branch::jmp64::<false, false>, branch::jmp64::<true, false>],
                [branch::jmp64::<false, true>, branch::jmp64::<true, true>],
                branch::jmp,
            ),
            M::Jmp if self.i.is_jmp_far() => ending!(far::jmp_imm),
            M::Jmp if self.i.is_jmp_far_indirect() => ending!(far::jmp_mem),
            M::Jmp if wide && self.fast && self.record => last!(branch::jmp_rm64::<true>),
            M::Jmp if wide && self.fast => last!(branch::jmp_rm64::<false>),
            M::Jmp => last!(branch::jmp_rm),
            M::Call if self.i.is_call_near() => self.linked(
                wide,
                [
                    branch::call64::<false, false>,
                    branch::call64::<true, false>,
                ],
                [branch::call64::<false, true>, branch::call64::<true, true>],
                branch::call,
            ),
            M::Call if self.i.is_call_far() => ending!(far::call_imm),
            M::Call if self.i.is_call_far_indirect() => ending!(far::call_mem),
            M::Call if wide && self.fast && self.record => last!(branch::call_rm64::<true>),
            M::Call if wide && self.fast => last!(branch::call_rm64::<false>),
            M::Call => last!(branch::call_rm),
            M::Ret if wide && self.record => last!(branch::ret64::<true>),
            M::Ret if wide => last!(branch::ret64::<false>),
            M::Ret => last!(branch::ret),
            M::Retf => ending!(far::retf),
            M::Iret | M::Iretd | M::Iretq => ending!(far::iret),
            M::Rsm => ending!(crate::smm::rsm),
            M::Jcxz | M::Jecxz | M::Jrcxz => inner!(branch::jcxz),
            M::Loop => inner!(branch::loopcc::<0>),
            M::Loope => inner!(branch::loopcc::<1>),
            M::Loopne => inner!(branch::loopcc::<2>),
            M::Syscall => ending!(far::syscall),
            M::Sysret | M::Sysretq => ending!(far::sysret),
            M::Sysenter => ending!(far::sysenter),
            M::Sysexit | M::Sysexitq => ending!(far::sysexit),
            M::Xbegin => ending!(transaction::xbegin),
            M::Xend => ending!(transaction::xend),
            M::Xabort => general!(transaction::xabort),
            M::Xtest => general!(transaction::xtest),
            M::Int => last!(system::int_n),
            M::Int3 => last!(system::int3),
            M::Int1 => last!(system::int1),
            M::Into => inner!(system::into),
            M::Ud0 | M::Ud1 | M::Ud2 => general!(system::ud),
            M::Lds | M::Les | M::Lfs | M::Lgs | M::Lss => {
                o.src = Reg::general(match self.i.mnemonic() {
                    M::Les => 0,
                    M::Lss => 2,
                    M::Lds => 3,
                    M::Lfs => 4,
                    _ => 5,
                });
                general!(far::load_far)
            }
            _ => return None,
        })
    }

    /// A direct branch: in 64-bit mode the form for links and recording.
    fn linked(
        &self,
        wide: bool,
        off: [LastHandler; 2],
        on: [LastHandler; 2],
        other: LastHandler,
    ) -> Handler {
        last!(match (wide, self.record) {
            (true, false) => off[usize::from(self.link)],
            (true, true) => on[usize::from(self.link)],
            _ => other,
        })
    }

    fn system(&self, o: &mut Op) -> Option<Handler> {
        let random_size = self.size;
        Some(match self.i.mnemonic() {
            M::Hlt => general!(system::hlt),
            M::Cli => general!(system::cli),
            M::Sti => general!(system::sti),
            M::Clac => general!(system::smap_ac::<false>),
            M::Stac => general!(system::smap_ac::<true>),
            M::Clts => general!(cr::clts),
            M::Lmsw => general!(cr::lmsw),
            M::Smsw => general!(cr::smsw),
            M::Sldt => general!(cr::sldt),
            M::Str => general!(cr::str),
            M::Lldt => general!(cr::lldt),
            M::Ltr => general!(cr::ltr),
            M::Lgdt => general!(cr::lgdt),
            M::Lidt => general!(cr::lidt),
            M::Sgdt => general!(cr::sgdt),
            M::Sidt => general!(cr::sidt),
            M::Invlpg => general!(cr::invlpg),
            M::Invpcid => general!(cr::invpcid),
            M::Wbinvd | M::Invd | M::Wbnoinvd => general!(cr::wbinvd),
            M::Rdmsr => general!(msr::rdmsr),
            M::Wrmsr => general!(msr::wrmsr),
            M::Rdpmc => general!(msr::rdpmc),
            M::Rdtsc => general!(msr::rdtsc::<false>),
            M::Rdtscp => general!(msr::rdtsc::<true>),
            M::Rdpid => general!(msr::rdpid),
            M::Cpuid => general!(msr::cpuid),
            M::Rdrand | M::Rdseed => sized!(random_size, general, msr::random),
            M::Rdfsbase | M::Rdgsbase | M::Wrfsbase | M::Wrgsbase => {
                let fs = matches!(self.i.mnemonic(), M::Rdfsbase | M::Wrfsbase);
                o.src = Reg::general(if fs { 4 } else { 5 });
                if matches!(self.i.mnemonic(), M::Rdfsbase | M::Rdgsbase) {
                    general!(msr::read_base)
                } else {
                    general!(msr::write_base)
                }
            }
            M::Swapgs => general!(msr::swapgs),
            M::Verr => general!(system::verify::<false>),
            M::Verw => general!(system::verify::<true>),
            M::Lar => general!(system::lar),
            M::Lsl => general!(system::lsl),
            M::Arpl => general!(system::arpl),
            M::Bound => general!(system::bound),
            M::Wait => general!(system::wait),
            M::Monitor | M::Mwait => general!(system::monitor),
            M::Xgetbv => general!(system::xgetbv),
            M::Xsetbv => general!(system::xsetbv),
            M::Rdpkru => general!(system::pkru::<false>),
            M::Wrpkru => general!(system::pkru::<true>),
            _ => return None,
        })
    }
}

fn jcc<const LINK: bool, const REC: bool>(cc: u8) -> Handler {
    macro_rules! pick {
        ($($n:literal)*) => {
            match cc {
                $($n => inner!(branch::jcc64::<$n, LINK, REC>),)*
                _ => inner!(branch::jcc64::<15, LINK, REC>),
            }
        };
    }
    pick!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
}
