//! Data movement between registers and memory.

use super::{Done, load, read_rm, src, store, write_rm};
use crate::core::{Core, InnerOp, Next, Op, truncate};
use crate::registers::Reg;
use crate::width::Width;

pub(crate) fn rr<T: Width>(c: &mut Core, o: InnerOp<'_>) -> Next {
    let v = c.regs.read::<T>(o.src);
    c.regs.write(o.dst, v);
    o.go(c)
}

pub(crate) fn ri<T: Width>(c: &mut Core, o: InnerOp<'_>) -> Next {
    c.regs.write(o.dst, T::from_u64(o.imm));
    o.go(c)
}

pub(crate) fn rm<T: Width>(c: &mut Core, o: &Op) -> Done {
    let v: T = load(c, o)?;
    c.regs.write(o.dst, v);
    Ok(())
}

pub(crate) fn mr<T: Width>(c: &mut Core, o: &Op) -> Done {
    let v = c.regs.read::<T>(o.src);
    store(c, o, v)
}

pub(crate) fn mi<T: Width>(c: &mut Core, o: &Op) -> Done {
    store(c, o, T::from_u64(o.imm))
}

/// MOVZX, MOVSX, MOVSXD from `S` to the operand size.
pub(crate) fn extend<S: Width, const SIGN: bool>(c: &mut Core, o: &Op) -> Done {
    let v = read_rm::<S>(c, o, o.src)?;
    c.regs
        .write_sized(o.dst, o.size, if SIGN { v.sext() } else { v.zext() });
    Ok(())
}

/// The same from a register to a 32- or 64-bit one.
pub(crate) fn extend_rr<S: Width, D: Width, const SIGN: bool>(
    c: &mut Core,
    o: InnerOp<'_>,
) -> Next {
    let v = c.regs.read::<S>(o.src);
    c.regs
        .write(o.dst, D::from_u64(if SIGN { v.sext() } else { v.zext() }));
    o.go(c)
}

/// LEA with 64-bit operand and address.
pub(crate) fn lea64(c: &mut Core, o: InnerOp<'_>) -> Next {
    let v = c
        .regs
        .get(o.base)
        .wrapping_add(c.regs.get(o.index) << (o.scale & 3))
        .wrapping_add(o.disp);
    c.regs.set(o.dst, v);
    o.go(c)
}

pub(crate) fn lea(c: &mut Core, o: InnerOp<'_>) -> Next {
    let v = c.offset(&o);
    c.regs.write_sized(o.dst, o.size, v);
    o.go(c)
}

/// CBW, CWDE, CDQE.
pub(crate) fn widen_acc(c: &mut Core, o: InnerOp<'_>) -> Next {
    match o.size {
        2 => c
            .regs
            .write(Reg::Rax, u16::from_u64(c.regs.read::<u8>(Reg::Rax).sext())),
        4 => c
            .regs
            .write(Reg::Rax, u32::from_u64(c.regs.read::<u16>(Reg::Rax).sext())),
        _ => c.regs.set(Reg::Rax, c.regs.read::<u32>(Reg::Rax).sext()),
    }
    o.go(c)
}

/// CWD, CDQ, CQO.
pub(crate) fn sign_acc(c: &mut Core, o: InnerOp<'_>) -> Next {
    let sign = |v: u64| if v >> 63 != 0 { u64::MAX } else { 0 };
    let v = match o.size {
        2 => sign(c.regs.read::<u16>(Reg::Rax).sext()),
        4 => sign(c.regs.read::<u32>(Reg::Rax).sext()),
        _ => sign(c.regs.get(Reg::Rax)),
    };
    c.regs.write_sized(Reg::Rdx, o.size, v);
    o.go(c)
}

/// CMOVcc: always reads the source, and zero-extends a 32-bit destination.
pub(crate) fn cmov<T: Width, const CC: u8>(c: &mut Core, o: &Op) -> Done {
    let v = read_rm::<T>(c, o, o.src)?;
    let v = if c.regs.flags.condition::<CC>() {
        v
    } else {
        c.regs.read(o.dst)
    };
    c.regs.write(o.dst, v);
    Ok(())
}

pub(crate) fn setcc<const CC: u8>(c: &mut Core, o: &Op) -> Done {
    let v = u8::from(c.regs.flags.condition::<CC>());
    write_rm(c, o, o.dst, v)
}

/// XLAT.
pub(crate) fn xlat(c: &mut Core, o: &Op) -> Done {
    let offset = truncate(
        c.regs
            .get(Reg::Rbx)
            .wrapping_add(c.regs.get(Reg::Rax) & 0xff),
        o.address_size,
    );
    let lin = c.linear(o.segment(), offset, 1, false)?;
    let v: u8 = c.read(lin)?;
    c.regs.write(Reg::Rax, v);
    Ok(())
}

/// NOP, PREFETCH, and fences and flushes that have no effect here.
pub(crate) fn nop(c: &mut Core, o: InnerOp<'_>) -> Next {
    o.go(c)
}

/// Executes a fence on the host.
///
/// It orders this processor's accesses for other processors, and before reads of the host's counter
/// from which the guest's TSC is computed.
pub(crate) fn fence(c: &mut Core, o: InnerOp<'_>) -> Next {
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    wait_for_earlier();
    o.go(c)
}

/// Waits until the host has executed all earlier instructions.
///
/// Without this, the next RDTSC may execute before earlier loads.
#[expect(unsafe_code, reason = "an instruction of the host")]
pub(super) fn wait_for_earlier() {
    // SAFETY: the instruction is part of SSE2, which every x86-64 processor has.
    unsafe { std::arch::x86_64::_mm_lfence() };
}

/// CLWB: checked like a read, but it triggers no data breakpoint or device.
pub(crate) fn clean(c: &mut Core, o: &Op) -> Done {
    let lin = src(c, o, 1)?;
    c.probe_read(lin, 1).map(|_| ())
}

/// CLFLUSH and CLFLUSHOPT: checked like CLWB; only the cache models are flushed.
pub(crate) fn flush(c: &mut Core, o: &Op) -> Done {
    let lin = src(c, o, 1)?;
    let gpa = c.probe_read(lin, 1)?;
    c.platform().caches_flushed(Some(gpa));
    c.jit.forget_lines();
    Ok(())
}
