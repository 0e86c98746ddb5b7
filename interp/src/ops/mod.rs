//! The handlers of operations.
//!
//! The general handler of an operation works in every mode and on any memory. Common operations
//! also have fast handlers, for 64-bit mode and memory that the TLB maps; otherwise these call the
//! general one.

pub(crate) mod alu;
pub(crate) mod bits;
pub(crate) mod branch;
pub(crate) mod cr;
pub(crate) mod far;
pub(crate) mod fast;
pub(crate) mod fused;
pub(crate) mod io;
mod lbr_state;
pub(crate) mod mov;
pub(crate) mod msr;
pub(crate) mod muldiv;
pub(crate) mod shift;
pub(crate) mod stack;
pub(crate) mod string;
pub(crate) mod system;
pub(crate) mod transaction;
pub(crate) mod x87;
pub(crate) mod xsave;
use crate::core::{Core, InnerOp, Next, Op};
use crate::fault::Fault;
use crate::registers::Reg;
use crate::width::Width;

/// Result of a general operation.
pub(crate) type Done = Result<(), Fault>;

/// Makes a [`Handler`](crate::core::Handler) from an operation within a block.
macro_rules! general {
    ($f:expr) => {
        $crate::code::Handler::Inner(|c, o| {
            c.progress.begin_operation(o.remaining);
            let done = $f(c, &o);
            $crate::ops::finish(c, o, done)
        })
    };
}
/// Makes a handler from a general operation that ends its block and sets RIP.
macro_rules! ending {
    ($f:expr) => {
        $crate::code::Handler::Last(|c, o| {
            c.progress.begin_operation(o.remaining);
            match $f(c, &o) {
                Ok(()) => c.leave_at_boundary(),
                Err(fault) => c.fault_at(&o, fault),
            }
        })
    };
}
/// Makes a handler from a function for operations within a block.
macro_rules! inner {
    ($f:expr) => {
        $crate::code::Handler::Inner($f)
    };
}
/// Makes a handler from a function for the last operation of a block.
macro_rules! last {
    ($f:expr) => {
        $crate::code::Handler::Last($f)
    };
}
/// Instantiates a handler for an operand size.
macro_rules! by_size {
    ($size:expr, $wrap:ident, $f:ident $(, $g:ty)*) => {
        match $size {
            $crate::code::LOW => $wrap!($f::<$($g,)* $crate::width::Low>),
            1 => $wrap!($f::<$($g,)* u8>),
            2 => $wrap!($f::<$($g,)* u16>),
            4 => $wrap!($f::<$($g,)* u32>),
            _ => $wrap!($f::<$($g,)* u64>),
        }
    };
}
pub(crate) use {by_size, ending, general, inner, last};

/// Continues after a general operation.
#[inline(always)]
pub(crate) fn finish(c: &mut Core, o: InnerOp<'_>, done: Done) -> Next {
    match done {
        Ok(()) if !c.exit.requested => o.go(c),
        Ok(()) => c.leave_after(&o),
        Err(fault) => c.fault_at(&o, fault),
    }
}

/// Calls the general form of an operation whose fast form cannot complete.
///
/// It is a separate function, so that the fast form needs no stack frame.
#[cold]
#[inline(never)]
pub(crate) fn slowly(c: &mut Core, o: InnerOp<'_>, f: impl Fn(&mut Core, &Op) -> Done) -> Next {
    c.progress.begin_operation(o.remaining);
    let done = f(c, &o);
    finish(c, o, done)
}

/// Checks a read of the memory operand, `size` bytes; returns its linear address.
pub(crate) fn src(c: &Core, o: &Op, size: usize) -> Result<u64, Fault> {
    c.linear(o.segment(), c.offset(o), size as u64, false)
}

/// Checks a write of the memory operand, `size` bytes; returns its linear address.
pub(crate) fn dst(c: &Core, o: &Op, size: usize) -> Result<u64, Fault> {
    c.linear(o.segment(), c.offset(o), size as u64, true)
}

pub(crate) fn load<T: Width>(c: &mut Core, o: &Op) -> Result<T, Fault> {
    let lin = src(c, o, T::SIZE)?;
    c.read(lin)
}

pub(crate) fn store<T: Width>(c: &mut Core, o: &Op, v: T) -> Done {
    let lin = dst(c, o, T::SIZE)?;
    c.write(lin, v)
}

/// Reads, computes and writes the memory operand. Returns the old value.
pub(crate) fn modify<T: Width>(c: &mut Core, o: &Op, f: impl FnMut(T) -> T) -> Result<T, Fault> {
    let lin = dst(c, o, T::SIZE)?;
    c.modify(lin, o.lock(), f)
}

/// Reads an operand that is a register or memory, as [`Op::is_mem`] says.
pub(crate) fn read_rm<T: Width>(c: &mut Core, o: &Op, reg: Reg) -> Result<T, Fault> {
    if o.is_mem() {
        load(c, o)
    } else {
        Ok(c.regs.read(reg))
    }
}

pub(crate) fn write_rm<T: Width>(c: &mut Core, o: &Op, reg: Reg, v: T) -> Done {
    if o.is_mem() {
        store(c, o, v)
    } else {
        c.regs.write(reg, v);
        Ok(())
    }
}

/// Reads a register-or-memory operand of `size` bytes.
pub(crate) fn read_sized(c: &mut Core, o: &Op, reg: Reg, size: u8) -> Result<u64, Fault> {
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
