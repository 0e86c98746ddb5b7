//! What the operations do. A general form of each works in every mode and reaches any memory; the
//! fast forms of the common ones work in 64-bit mode on memory that the TLB knows, and fall back.

pub(crate) mod alu;
pub(crate) mod bits;
pub(crate) mod branch;
pub(crate) mod cr;
pub(crate) mod far;
pub(crate) mod fast;
pub(crate) mod fused;
pub(crate) mod io;
pub(crate) mod mov;
pub(crate) mod msr;
pub(crate) mod muldiv;
pub(crate) mod shift;
pub(crate) mod stack;
pub(crate) mod string;
pub(crate) mod system;
pub(crate) mod transaction;
pub(crate) mod xsave;
use crate::core::Core;
use crate::fault::{ExitReason, Fault};
use crate::op::{Next, Op};
use crate::word::Word;

/// Result of a general operation.
pub(crate) type Done = Result<(), Fault>;

/// Makes a [`crate::op::Handler`] of a general operation that goes on to the next one.
macro_rules! general {
    ($f:expr) => {{
        let handler: $crate::op::Handler = |c, o| {
            c.left = o.left;
            let done = $f(c, o);
            $crate::ops::finish(c, o, done)
        };
        handler
    }};
}
/// Makes a handler of a general operation that ends a block and set [`Core::rip`].
macro_rules! ending {
    ($f:expr) => {{
        let handler: $crate::op::Handler = |c, o| {
            c.left = o.left;
            match $f(c, o) {
                Ok(()) => $crate::ops::poll(c),
                Err(fault) => c.fault_at(o, fault),
            }
        };
        handler
    }};
}
/// Picks a width by operand size.
macro_rules! by_size {
    ($size:expr, $wrap:ident, $f:ident $(, $g:ty)*) => {
        match $size {
            $crate::op::LOW => $wrap!($f::<$($g,)* $crate::word::Low>),
            1 => $wrap!($f::<$($g,)* u8>),
            2 => $wrap!($f::<$($g,)* u16>),
            4 => $wrap!($f::<$($g,)* u32>),
            _ => $wrap!($f::<$($g,)* u64>),
        }
    };
}
/// For [`by_size`]: the function is a handler already.
macro_rules! plain {
    ($f:expr) => {{
        let handler: $crate::op::Handler = $f;
        handler
    }};
}
pub(crate) use {by_size, ending, general, plain};

#[inline(always)]
pub(crate) fn finish(c: &mut Core, o: &Op, done: Done) -> Next {
    match done {
        Ok(()) if !c.leave => o.go(c),
        Ok(()) => c.leave_after(o),
        Err(fault) => c.fault_at(o, fault),
    }
}

/// The general form of an operation whose fast one cannot go on. A function of its own, so that the
/// fast form needs no stack frame.
#[cold]
#[inline(never)]
pub(crate) fn slowly(c: &mut Core, o: &Op, f: impl Fn(&mut Core, &Op) -> Done) -> Next {
    c.left = o.left;
    let done = f(c, o);
    finish(c, o, done)
}

/// Leaves the block; [`Core::rip`] is set and the instruction retired.
pub(crate) fn poll(c: &mut Core) -> Next {
    c.leave = false;
    c.left = 0;
    c.exit(ExitReason::Poll)
}

/// Linear address of the memory operand, checked for a read of `size` bytes.
pub(crate) fn src(c: &Core, o: &Op, size: usize) -> Result<u64, Fault> {
    c.linear(o.seg, c.offset(o), size as u64, false)
}

/// Linear address of the memory operand, checked for a write of `size` bytes.
pub(crate) fn dst(c: &Core, o: &Op, size: usize) -> Result<u64, Fault> {
    c.linear(o.seg, c.offset(o), size as u64, true)
}

pub(crate) fn load<T: Word>(c: &mut Core, o: &Op) -> Result<T, Fault> {
    let lin = src(c, o, T::SIZE)?;
    c.read(lin)
}

pub(crate) fn store<T: Word>(c: &mut Core, o: &Op, v: T) -> Done {
    let lin = dst(c, o, T::SIZE)?;
    c.write(lin, v)
}

/// Reads, computes and writes the memory operand; answers the old value.
pub(crate) fn modify<T: Word>(c: &mut Core, o: &Op, f: impl FnMut(T) -> T) -> Result<T, Fault> {
    let lin = dst(c, o, T::SIZE)?;
    c.modify(lin, o.lock(), f)
}

/// An operand that is a register or memory, as [`Op::base`] tells: see [`is_mem`].
pub(crate) fn read_rm<T: Word>(c: &mut Core, o: &Op, reg: u8) -> Result<T, Fault> {
    if is_mem(o) {
        load(c, o)
    } else {
        Ok(c.get(reg))
    }
}

pub(crate) fn write_rm<T: Word>(c: &mut Core, o: &Op, reg: u8, v: T) -> Done {
    if is_mem(o) {
        store(c, o, v)
    } else {
        c.put(reg, v);
        Ok(())
    }
}

/// The instruction has a memory operand.
pub(crate) fn is_mem(o: &Op) -> bool {
    o.prefix & crate::op::MEM != 0
}

/// Reads a register-or-memory operand of `size` bytes.
pub(crate) fn read_sized(c: &mut Core, o: &Op, reg: u8, size: u8) -> Result<u64, Fault> {
    Ok(match size {
        1 => read_rm::<u8>(c, o, reg)?.zext(),
        2 => read_rm::<u16>(c, o, reg)?.zext(),
        4 => read_rm::<u32>(c, o, reg)?.zext(),
        _ => read_rm::<u64>(c, o, reg)?,
    })
}

/// Reads memory of `size` bytes.
pub(crate) fn load_sized(c: &mut Core, lin: u64, size: u8) -> Result<u64, Fault> {
    Ok(match size {
        1 => c.read::<u8>(lin)?.zext(),
        2 => c.read::<u16>(lin)?.zext(),
        4 => c.read::<u32>(lin)?.zext(),
        _ => c.read::<u64>(lin)?,
    })
}

/// Writes memory of `size` bytes.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the value is cut to the size"
)]
pub(crate) fn store_sized(c: &mut Core, lin: u64, size: u8, v: u64) -> Done {
    match size {
        1 => c.write(lin, v as u8),
        2 => c.write(lin, v as u16),
        4 => c.write(lin, v as u32),
        _ => c.write(lin, v),
    }
}
