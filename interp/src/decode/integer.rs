//! Chooses the operations for integer instructions that do not branch.

#![expect(
    clippy::cast_possible_truncation,
    reason = "register numbers and sizes are small"
)]

use super::operands::gpr;
use super::select::{AddressForm, Pick, address_form, by_condition, sized, sized_low, width};
use crate::code::LOW;
use crate::core::{Handler, Op};
use crate::ops::{alu, bits, by_size, cr, fast, fused, general, inner, mov, muldiv, shift, system};
use crate::width::Low;
use hindsight_regs::rflags::Rflags;
use iced_x86::{Mnemonic as M, OpKind};

impl Pick<'_> {
    pub(super) fn integer(&self, o: &mut Op) -> Option<Handler> {
        self.arithmetic(o)
            .or_else(|| self.movement(o))
            .or_else(|| self.unary_arithmetic())
            .or_else(|| self.shift_or_bit(o))
            .or_else(|| self.multiplication())
            .or_else(|| self.exchange(o))
            .or_else(|| self.flag_or_hint())
            .or_else(|| self.conditional())
    }

    /// The two-operand operations of [`alu`].
    fn arithmetic(&self, o: &mut Op) -> Option<Handler> {
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
            _ => return None,
        })
    }

    /// MOV and its extending forms, and LEA.
    fn movement(&self, o: &mut Op) -> Option<Handler> {
        let size = self.size;
        Some(match self.i.mnemonic() {
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
            M::Cbw | M::Cwde | M::Cdqe => inner!(mov::widen_acc),
            M::Cwd | M::Cdq | M::Cqo => inner!(mov::sign_acc),
            M::Xlatb => general!(mov::xlat),
            M::Movnti => sized!(size, general, mov::mr),
            _ => return None,
        })
    }

    /// INC, DEC, NEG and NOT.
    fn unary_arithmetic(&self) -> Option<Handler> {
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
        Some(match self.i.mnemonic() {
            M::Inc => self.unary(stepped!(false), all!(general, alu::inc_m)),
            M::Dec => self.unary(stepped!(true), all!(general, alu::dec_m)),
            M::Neg => self.unary(all!(inner, alu::neg_r), all!(general, alu::neg_m)),
            M::Not => self.unary(all!(inner, alu::not_r), all!(general, alu::not_m)),
            _ => return None,
        })
    }

    /// Shifts, rotations, bit tests and bit counts.
    fn shift_or_bit(&self, o: &mut Op) -> Option<Handler> {
        let size = self.size;
        Some(match self.i.mnemonic() {
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
            _ => return None,
        })
    }

    /// Multiplication, division and decimal adjustment.
    fn multiplication(&self) -> Option<Handler> {
        let size = self.size;
        Some(match self.i.mnemonic() {
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
            _ => return None,
        })
    }

    /// Exchanges, MOVBE, BSWAP and additions with one carry flag.
    fn exchange(&self, o: &mut Op) -> Option<Handler> {
        let size = self.size;
        Some(match self.i.mnemonic() {
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
            _ => return None,
        })
    }

    /// Changes of single flags, hints, fences and cache-line flushes.
    fn flag_or_hint(&self) -> Option<Handler> {
        Some(match self.i.mnemonic() {
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
            _ => return None,
        })
    }

    /// CMOVcc and SETcc.
    fn conditional(&self) -> Option<Handler> {
        let cc = (self.i.condition_code() as u8).checked_sub(1)?;
        if self.is_cmov() {
            return Some(match self.size {
                2 => by_condition!(cc, general, mov::cmov, u16),
                4 => by_condition!(cc, general, mov::cmov, u32),
                _ => by_condition!(cc, general, mov::cmov, u64),
            });
        }
        if self.is_setcc() {
            return Some(by_condition!(cc, general, mov::setcc));
        }
        None
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

    pub(super) fn alu<O: alu::Alu>(&self, o: &mut Op) -> Handler {
        use alu::{mi, mr, ri, rm, rr};
        use fast::{Anywhere, Based, Indexed, Open, alu_mi, alu_mr, alu_rm};
        macro_rules! placed {
            ($f:ident) => {
                match address_form(o) {
                    AddressForm::Open => by_size!(width(o), inner, $f, Open, O),
                    AddressForm::Base => by_size!(width(o), inner, $f, Based, O),
                    AddressForm::Index => by_size!(width(o), inner, $f, Indexed, O),
                    AddressForm::Any => by_size!(width(o), inner, $f, Anywhere, O),
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
                match address_form(o) {
                    AddressForm::Open => sized_low!(width(o), inner, $($f)::+, Open),
                    AddressForm::Base => sized_low!(width(o), inner, $($f)::+, Based),
                    AddressForm::Index => sized_low!(width(o), inner, $($f)::+, Indexed),
                    AddressForm::Any => sized_low!(width(o), inner, $($f)::+, Anywhere),
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
                match address_form(o) {
                    AddressForm::Open => inner!(fast::extend_rm::<Open, $s, $d, SIGN>),
                    AddressForm::Base => inner!(fast::extend_rm::<Based, $s, $d, SIGN>),
                    AddressForm::Index => inner!(fast::extend_rm::<Indexed, $s, $d, SIGN>),
                    AddressForm::Any => inner!(fast::extend_rm::<Anywhere, $s, $d, SIGN>),
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
}
