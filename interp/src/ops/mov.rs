//! Data movement between registers and memory.

use super::{Done, load, read_rm, src, store, write_rm};
use crate::core::{Core, cut};
use crate::op::{Next, Op};
use crate::word::Word;

pub(crate) fn rr<T: Word>(c: &mut Core, o: &Op) -> Next {
    let v = c.get::<T>(o.s);
    c.put(o.d, v);
    o.go(c)
}

pub(crate) fn ri<T: Word>(c: &mut Core, o: &Op) -> Next {
    c.put(o.d, T::from_u64(o.imm));
    o.go(c)
}

pub(crate) fn rm<T: Word>(c: &mut Core, o: &Op) -> Done {
    let v: T = load(c, o)?;
    c.put(o.d, v);
    Ok(())
}

pub(crate) fn mr<T: Word>(c: &mut Core, o: &Op) -> Done {
    let v = c.get::<T>(o.s);
    store(c, o, v)
}

pub(crate) fn mi<T: Word>(c: &mut Core, o: &Op) -> Done {
    store(c, o, T::from_u64(o.imm))
}

/// MOVZX, MOVSX, MOVSXD from `S` to the operand size.
pub(crate) fn extend<S: Word, const SIGN: bool>(c: &mut Core, o: &Op) -> Done {
    let v = read_rm::<S>(c, o, o.s)?;
    c.put_sized(o.d, o.size, if SIGN { v.sext() } else { v.zext() });
    Ok(())
}

/// The same from a register to a 32- or 64-bit one.
pub(crate) fn extend_rr<S: Word, D: Word, const SIGN: bool>(c: &mut Core, o: &Op) -> Next {
    let v = c.get::<S>(o.s);
    c.put(o.d, D::from_u64(if SIGN { v.sext() } else { v.zext() }));
    o.go(c)
}

/// LEA with 64-bit operand and address.
pub(crate) fn lea64(c: &mut Core, o: &Op) -> Next {
    let v = c
        .reg(o.base)
        .wrapping_add(c.reg(o.index) << (o.scale & 3))
        .wrapping_add(o.disp);
    c.set_reg(o.d, v);
    o.go(c)
}

pub(crate) fn lea(c: &mut Core, o: &Op) -> Next {
    let v = c.offset(o);
    c.put_sized(o.d, o.size, v);
    o.go(c)
}

/// CBW, CWDE, CDQE.
pub(crate) fn widen_acc(c: &mut Core, o: &Op) -> Next {
    match o.size {
        2 => c.put(0, u16::from_u64(c.get::<u8>(0).sext())),
        4 => c.put(0, u32::from_u64(c.get::<u16>(0).sext())),
        _ => c.set_reg(0, c.get::<u32>(0).sext()),
    }
    o.go(c)
}

/// CWD, CDQ, CQO.
pub(crate) fn sign_acc(c: &mut Core, o: &Op) -> Next {
    let sign = |v: u64| if v >> 63 != 0 { u64::MAX } else { 0 };
    let v = match o.size {
        2 => sign(c.get::<u16>(0).sext()),
        4 => sign(c.get::<u32>(0).sext()),
        _ => sign(c.reg(0)),
    };
    c.put_sized(2, o.size, v);
    o.go(c)
}

/// CMOVcc: the source is read in any case, and a 32-bit destination zero-extended.
pub(crate) fn cmov<T: Word, const CC: u8>(c: &mut Core, o: &Op) -> Done {
    let v = read_rm::<T>(c, o, o.s)?;
    let v = if c.cc.condition::<CC>() {
        v
    } else {
        c.get(o.d)
    };
    c.put(o.d, v);
    Ok(())
}

pub(crate) fn setcc<const CC: u8>(c: &mut Core, o: &Op) -> Done {
    let v = u8::from(c.cc.condition::<CC>());
    write_rm(c, o, o.d, v)
}

/// XLAT.
pub(crate) fn xlat(c: &mut Core, o: &Op) -> Done {
    let offset = cut(c.reg(3).wrapping_add(c.reg(0) & 0xff), o.asz);
    let lin = c.linear(o.seg, offset, 1, false)?;
    let v: u8 = c.read(lin)?;
    c.put(0, v);
    Ok(())
}

/// NOP, PREFETCH, fences, CLFLUSH without effect.
pub(crate) fn nop(c: &mut Core, o: &Op) -> Next {
    o.go(c)
}

/// Fences order our own accesses against other processors, and against the host's counter that the guest's TSC
/// is read from.
pub(crate) fn fence(c: &mut Core, o: &Op) -> Next {
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    wait_for_earlier();
    o.go(c)
}

/// Waits for what the host's processor has begun: without it the next RDTSC may run ahead of earlier loads.
#[expect(unsafe_code, reason = "an instruction of the host")]
pub(super) fn wait_for_earlier() {
    // SAFETY: the instruction is part of SSE2, which every x86-64 processor has.
    unsafe { std::arch::x86_64::_mm_lfence() };
}

/// CLWB: checked like a read, which data breakpoints and devices do not see.
pub(crate) fn clean(c: &mut Core, o: &Op) -> Done {
    let lin = src(c, o, 1)?;
    c.probe_read(lin, 1).map(|_| ())
}

/// CLFLUSH, CLFLUSHOPT: checked in the same way, and told to the model of the caches.
pub(crate) fn flush(c: &mut Core, o: &Op) -> Done {
    let lin = src(c, o, 1)?;
    let gpa = c.probe_read(lin, 1)?;
    c.platform().flushed(Some(gpa));
    Ok(())
}
