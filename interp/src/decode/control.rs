//! Chooses the operations for branches, stack, string, port and system instructions.

#![expect(
    clippy::cast_possible_truncation,
    reason = "register numbers and sizes are small"
)]

use super::select::{Pick, by_condition, sized};
use crate::core::{Handler, LastHandler, Op};
use crate::ops::{
    branch, cr, ending, far, general, inner, io, last, msr, stack, string, system, transaction,
};
use crate::registers::Reg;
use iced_x86::Mnemonic as M;

impl Pick<'_> {
    /// Stack, string and port instructions.
    pub(super) fn stack_or_string(&self, o: &mut Op) -> Option<Handler> {
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

    /// Branches, calls, returns, software interrupts and transactions.
    pub(super) fn flow(&self, o: &mut Op) -> Option<Handler> {
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
            M::Lds | M::Les | M::Lfs | M::Lgs | M::Lss => self.load_far(o),
            _ => return None,
        })
    }

    /// LDS, LES, LFS, LGS and LSS.
    fn load_far(&self, o: &mut Op) -> Handler {
        o.src = Reg::general(match self.i.mnemonic() {
            M::Les => 0,
            M::Lss => 2,
            M::Lds => 3,
            M::Lfs => 4,
            _ => 5,
        });
        general!(far::load_far)
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

    /// Instructions that read or change the state of the system.
    pub(super) fn system(&self, o: &mut Op) -> Option<Handler> {
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
            M::Rdrand | M::Rdseed => sized!(self.size, general, msr::random),
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
