//! Chooses a thunk, runs it and commits its results.

use super::codegen::{Class, Thunk};
use super::{host, memory};
use crate::core::{Core, Op};
use crate::fault::Fault;
use crate::flags::LazyFlags;
use crate::ops::Done;
use crate::registers::Reg;
use hindsight_regs::cr::{Cr0, Cr4};
use hindsight_regs::rflags::Rflags;
use hindsight_regs::vector::Vector;
use iced_x86::{
    CodeSize, Encoder, EncodingKind, FlowControl, Instruction, Mnemonic as M, Register,
    RoundingControl,
};

/// Whether an instruction can be executed on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Support {
    /// A thunk executes it.
    Yes,
    /// The interpreter accesses its elements one by one.
    ///
    /// Its addresses are in a vector register, or its memory operand is implied.
    Elements,
    /// It cannot be executed on the host.
    No,
}

pub(crate) fn support(i: &Instruction) -> Support {
    if i.is_privileged() || i.flow_control() != FlowControl::Next || i.is_stack_instruction() {
        return Support::No;
    }
    match i.mnemonic() {
        M::Maskmovdqu | M::Vmaskmovdqu | M::Maskmovq => Support::Elements,
        _ if i.is_vsib() => Support::Elements,
        _ => Support::Yes,
    }
}

/// Runs the instruction of an operation on the host.
pub(crate) fn run(c: &mut Core, o: &Op) -> Done {
    let insn = c.code.insns[o.insn as usize];
    if matches!(insn.mnemonic(), M::Vzeroupper | M::Vzeroall) {
        check_state(c, insn.encoding(), true, false)?;
        let count = if c.mode.is_64bit() { 16 } else { 8 };
        c.vec.zero_upper(insn.mnemonic() == M::Vzeroall, count);
        return Ok(());
    }
    let known = c.thunks.take(o.insn, c.code.epoch());
    let Some(thunk) = known.or_else(|| c.thunks.find_or_build(&insn)) else {
        return Err(Fault::Unimplemented);
    };
    let done = run_thunk(c, o, &insn, &thunk);
    c.thunks.put_back(o.insn, thunk);
    done
}

fn run_thunk(c: &mut Core, o: &Op, insn: &Instruction, thunk: &Thunk) -> Done {
    check(c, insn, thunk)?;
    let operand = memory::prepare(c, o, insn, thunk)?;
    // Hide pending errors from the host, which would raise #MF: IGNNE# makes the guest's processor
    // ignore them.
    let ignored = c.vec.take_x87_errors();
    let stores = execute(c, o, insn, thunk);
    c.vec.add_x87_errors(ignored);
    let stores = stores?;
    if let (Some(operand), true) = (operand, stores) {
        // This write cannot fault, because `prepare` has probed it. If it could, the results would
        // have to be discarded.
        memory::finish(c, &operand)?;
    }
    commit(c, o, thunk);
    Ok(())
}

/// Whether a thunk can be made.
#[cfg(test)]
pub(crate) fn can_run(c: &mut Core, insn: &Instruction) -> bool {
    c.thunks.find_or_build(insn).is_some()
}

/// Checks whether the control registers allow the instruction.
fn check(c: &mut Core, i: &Instruction, t: &Thunk) -> Done {
    if t.class == Class::X87 && !t.mmx {
        if c.cr0(Cr0::EM | Cr0::TS) {
            return Err(Fault::NM);
        }
        return c.check_x87_pending();
    }
    if t.class == Class::Integer {
        let vex = i.encoding() != EncodingKind::Legacy;
        return if vex && !c.mode.protected() {
            Err(Fault::UD)
        } else {
            Ok(())
        };
    }
    check_state(c, i.encoding(), t.vector, t.mmx)
}

/// Checks whether the control registers allow vector or MMX registers to be used.
pub(crate) fn check_state(c: &mut Core, encoding: EncodingKind, vector: bool, mmx: bool) -> Done {
    let legacy = encoding == EncodingKind::Legacy;
    if (!legacy && !c.mode.protected()) || (mmx && c.cr0(Cr0::EM)) {
        return Err(Fault::UD);
    }
    if vector {
        let need = if encoding == EncodingKind::EVEX {
            0xe6
        } else {
            6
        };
        let off = if legacy {
            c.cr0(Cr0::EM) || !c.cr4(Cr4::OSFXSR)
        } else {
            !c.cr4(Cr4::OSXSAVE) || c.state.xcr0 & need != need
        };
        if off {
            return Err(Fault::UD);
        }
    }
    if c.cr0(Cr0::TS) {
        return Err(Fault::NM);
    }
    if mmx { c.check_x87_pending() } else { Ok(()) }
}

/// Exceptions that precede the computation: invalid, denormal and divide by zero.
const BEFORE: u32 = 0b111;
const UNDERFLOW: u32 = 1 << 4;
const FLUSH_TO_ZERO: u32 = 1 << 15;

/// Runs the thunk. Its results stay in the context until [`commit`].
///
/// Returns false if an unmasked x87 exception keeps the instruction from storing.
fn execute(c: &mut Core, o: &Op, i: &Instruction, t: &Thunk) -> Result<bool, Fault> {
    for &reg in &t.gpr_read {
        c.vec.gpr[usize::from(reg & 15)] = c.regs.get(Reg::general(reg));
    }
    c.vec.flags = c.regs.flags.rflags().bits();
    if t.vector {
        execute_vector(c, i, t)?;
        return Ok(true);
    }
    if t.class == Class::X87 {
        return Ok(execute_x87(c, o, i, t));
    }
    t.call(&mut c.vec);
    Ok(true)
}

/// Runs a vector instruction; raises #XM for exceptions that the guest unmasked.
fn execute_vector(c: &mut Core, i: &Instruction, t: &Thunk) -> Done {
    let guest = c.vec.mxcsr;
    let open = !(guest >> 7) & 0x3f;
    c.vec.backup(&t.vec_write, t.mmx);
    let mut run = (guest | 0x1f80) & !0x3f;
    if open & UNDERFLOW != 0 {
        match tiny_results(i) {
            // With underflow unmasked, a tiny result raises the exception even if it is exact. The
            // host runs with underflow masked, where an exact tiny result sets the flag only if it
            // is flushed to zero.
            Tiny::Raise => run |= FLUSH_TO_ZERO,
            Tiny::Keep => run &= !FLUSH_TO_ZERO,
            Tiny::FlushIfEnabled => {}
        }
    }
    let mut raised = run_masked(c, t, run);
    if raised & open & UNDERFLOW != 0 && raised & open & BEFORE == 0 {
        // The last run flushed to zero, which the guest did not request: discard its results.
        c.vec.restore(&t.vec_write, t.mmx);
        raised = UNDERFLOW | run_masked(c, t, run & !FLUSH_TO_ZERO);
    }
    let halves = i.mnemonic() == M::Vcvtps2ph && !suppresses_exceptions(i);
    if open & UNDERFLOW != 0 && halves && tiny_halves(c, i) {
        raised |= UNDERFLOW;
    }
    if raised & open & BEFORE != 0 {
        raised &= BEFORE;
    }
    c.vec.mxcsr = guest | raised;
    if raised & open != 0 {
        c.vec.restore(&t.vec_write, t.mmx);
        let xm = c.cr4(Cr4::OSXMMEXCPT);
        return Err(if xm {
            Fault::NoCode(Vector::XM)
        } else {
            Fault::UD
        });
    }
    Ok(())
}

/// What an instruction does with a tiny result while underflow is unmasked.
enum Tiny {
    /// It raises underflow.
    Raise,
    /// It keeps the result: MXCSR.FTZ has no effect while underflow is unmasked.
    Keep,
    /// It flushes the result if MXCSR.FTZ is set, as if underflow were masked.
    FlushIfEnabled,
}

/// Whether the instruction suppresses all floating-point exceptions ({sae}).
///
/// Embedded rounding implies {sae}.
fn suppresses_exceptions(i: &Instruction) -> bool {
    i.suppress_all_exceptions() || i.rounding_control() != RoundingControl::None
}

/// How an instruction treats tiny results while underflow is unmasked.
///
/// SDM Vol. 2, "SIMD Floating-Point Exceptions" of each instruction: estimates and reductions do
/// not list underflow.
fn tiny_results(i: &Instruction) -> Tiny {
    match i.mnemonic() {
        _ if suppresses_exceptions(i) => Tiny::FlushIfEnabled,
        M::Vrcp14pd | M::Vrcp14ps | M::Vrcp14sd | M::Vrcp14ss => Tiny::FlushIfEnabled,
        M::Vreducepd | M::Vreduceps | M::Vreducesd | M::Vreducess => Tiny::Keep,
        _ => Tiny::Raise,
    }
}

/// Whether VCVTPS2PH has a denormal result, which it never flushes to zero.
fn tiny_halves(c: &Core, i: &Instruction) -> bool {
    let len = i.op1_register().size() / 2;
    let made = match i.op0_register() {
        Register::None => &c.vec.buffer[..len],
        to => &c.vec.zmm[to.number() & 31][..len],
    };
    let enabled = match i.op_mask() {
        Register::None | Register::K0 => u64::MAX,
        mask => c.vec.k[mask.number() & 7],
    };
    let tiny = |half: &[u8]| half[1] & 0x7c == 0 && (half[0] != 0 || half[1] & 3 != 0);
    let mut halves = made.chunks_exact(2).enumerate();
    halves.any(|(n, half)| enabled >> n & 1 != 0 && tiny(half))
}

/// Runs a vector instruction with this MXCSR; returns the exceptions it flagged.
fn run_masked(c: &mut Core, t: &Thunk, mxcsr: u32) -> u32 {
    let pointers = c.vec.x87_pointers();
    c.vec.run_mxcsr = mxcsr;
    t.call(&mut c.vec);
    if t.class == Class::X87 {
        c.vec.set_x87_pointers(&pointers);
    }
    c.vec.run_mxcsr & 0x3f
}

fn execute_x87(c: &mut Core, o: &Op, i: &Instruction, t: &Thunk) -> bool {
    const PRECISION: u16 = 1 << 5;
    /// The condition flags C0, C2 and C3 of the x87 status word.
    const CONDITIONS: u16 = 0x4500;
    let pointers = c.vec.x87_pointers();
    let before = c.vec.fsw();
    t.call(&mut c.vec);
    c.vec.set_x87_pointers(&pointers);
    if t.mmx {
        return true;
    }
    if c.portable && !sets_conditions(i.mnemonic()) {
        // C0, C2 and C3 are undefined here and differ between hosts: keep the old values.
        let fsw = c.vec.fsw();
        c.vec.set_fsw((fsw & !CONDITIONS) | (before & CONDITIONS));
    }
    let unmasked = c.vec.x87_unmasked();
    if unmasked != 0 {
        let operand = if t.memory.is_some() { c.offset(o) } else { 0 };
        c.vec.record_exception(last_opcode(i), operand);
    }
    unmasked & !PRECISION == 0
}

/// Whether the instruction returns its result in C0, C2 and C3.
fn sets_conditions(m: M) -> bool {
    matches!(
        m,
        M::Fcom
            | M::Fcomp
            | M::Fcompp
            | M::Fucom
            | M::Fucomp
            | M::Fucompp
            | M::Ficom
            | M::Ficomp
            | M::Ftst
            | M::Fxam
            | M::Fprem
            | M::Fprem1
    )
}

/// Returns the low 11 bits of an x87 instruction's opcode, as FOP holds them.
pub(crate) fn last_opcode(i: &Instruction) -> u16 {
    let mut encoder = Encoder::new(if i.code_size() == CodeSize::Code64 {
        64
    } else {
        32
    });
    if encoder.encode(i, i.ip()).is_err() {
        return 0;
    }
    let bytes = encoder.take_buffer();
    let at = bytes.iter().position(|b| (0xd8..=0xdf).contains(b));
    match at.and_then(|at| bytes.get(at..at + 2)) {
        Some(&[opcode, modrm]) => u16::from(opcode & 7) << 8 | u16::from(modrm),
        _ => 0,
    }
}

fn commit(c: &mut Core, o: &Op, t: &Thunk) {
    if t.clears_upper && !host::has_zmm() {
        // The host wrote YMM registers: the bits above them become zero too.
        for &reg in &t.vec_write {
            c.vec.zmm[usize::from(reg & 31)][32..].fill(0);
        }
    }
    for &(reg, size) in &t.gpr_write {
        let v = c.vec.gpr[usize::from(reg & 15)];
        c.regs.write_sized(Reg::general(reg), size, v);
    }
    if t.flags {
        c.regs.flags = LazyFlags::explicit(Rflags::from_bits_retain(c.vec.flags));
    }
    if t.class == Class::X87 && !t.mmx {
        let rip = c.rip_of(o);
        c.vec.set_fip(rip);
    }
}
