//! XBEGIN, XEND, XABORT and XTEST.

use super::Done;
use crate::core::{Core, Fault, GP0};
use crate::flags::{Flags, ZF};
use crate::op::Op;
use crate::transaction::UNFIT;
use hindsight_cpu::transaction::AbortCause as Cause;

/// XBEGIN. Its target is not cut to 16 bits, whatever the operand size.
pub(crate) fn xbegin(c: &mut Core, o: &Op) -> Done {
    let fallback = super::branch::relative(c, o)?;
    c.begin_region(c.rip_of(o), c.rip_after(o), fallback)
}

/// XEND.
pub(crate) fn xend(c: &mut Core, o: &Op) -> Done {
    if !c.in_region() {
        return Err(GP0);
    }
    c.end_region()?;
    c.rip = c.rip_after(o);
    Ok(())
}

/// XABORT: outside a transaction it does nothing.
pub(crate) fn xabort(c: &mut Core, o: &Op) -> Done {
    if !c.in_region() {
        return Ok(());
    }
    Err(Fault::Transaction(Cause::Explicit(o.imm.to_le_bytes()[0])))
}

/// XTEST: ZF is clear in a transaction.
pub(crate) fn xtest(c: &mut Core, _: &Op) -> Done {
    c.cc = Flags::explicit(if c.in_region() { 0 } else { ZF });
    Ok(())
}

/// An instruction that aborts the transaction it is in.
pub(crate) fn unfit(_: &mut Core, _: &Op) -> Done {
    Err(UNFIT)
}

/// INT3 and INT1 in a transaction.
pub(crate) fn breakpoint(_: &mut Core, _: &Op) -> Done {
    Err(Fault::Transaction(Cause::Debug))
}
