//! XBEGIN, XEND, XABORT and XTEST.

use super::Done;
use crate::core::{Core, Op};
use crate::fault::Fault;
use crate::flags::{LazyFlags, flag_if};
use crate::platform::AbortCause;
use crate::transaction::state::NOT_ALLOWED;
use hindsight_regs::rflags::Rflags;

/// XBEGIN. Its target is never truncated to 16 bits, whatever the operand size.
pub(crate) fn xbegin(c: &mut Core, o: &Op) -> Done {
    let fallback = super::branch::relative_target(c, o)?;
    c.begin_transaction(c.rip_of(o), c.rip_after(o), fallback)
}

/// XEND.
pub(crate) fn xend(c: &mut Core, o: &Op) -> Done {
    if !c.in_transaction() {
        return Err(Fault::GP);
    }
    c.end_transaction()?;
    c.regs.rip = c.rip_after(o);
    Ok(())
}

/// XABORT: outside a transaction it does nothing.
pub(crate) fn xabort(c: &mut Core, o: &Op) -> Done {
    if !c.in_transaction() {
        return Ok(());
    }
    Err(Fault::Abort(AbortCause::Explicit(o.imm.to_le_bytes()[0])))
}

/// XTEST: ZF is clear in a transaction.
pub(crate) fn xtest(c: &mut Core, _: &Op) -> Done {
    c.regs.flags = LazyFlags::explicit(flag_if(!c.in_transaction(), Rflags::ZF));
    Ok(())
}

/// Handles an instruction that aborts its transaction.
pub(crate) fn unfit(_: &mut Core, _: &Op) -> Done {
    Err(NOT_ALLOWED)
}

/// INT3 and INT1 in a transaction.
pub(crate) fn breakpoint(_: &mut Core, _: &Op) -> Done {
    Err(Fault::Abort(AbortCause::Debug))
}
