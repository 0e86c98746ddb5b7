//! PUSH, POP and their relatives.

use super::{Done, load_sized, read_sized, store_sized};
use crate::core::{Core, InnerOp, Next, Op};
use crate::fault::Fault;
use crate::flags::ARITHMETIC;
use crate::registers::Reg;
use hindsight_cpu::state::seg;
use hindsight_regs::cr::Cr4;
use hindsight_regs::rflags::Rflags;

impl Core {
    /// Pushes `size` bytes; a fault leaves everything unchanged.
    pub(crate) fn push(&mut self, size: u8, v: u64) -> Done {
        let sp = self.sp().wrapping_sub(size.into()) & self.mode.stack_mask();
        let lin = self.linear(seg::SS, sp, size.into(), true)?;
        store_sized(self, lin, size, v)?;
        self.set_sp(sp);
        Ok(())
    }

    /// Pushes values of `size` bytes in order; a fault may leave memory changed.
    pub(crate) fn push_all(&mut self, size: u8, values: &[u64]) -> Done {
        let rsp = self.regs.get(Reg::Rsp);
        let pushed = values.iter().try_for_each(|&v| self.push(size, v));
        if pushed.is_err() {
            self.regs.set(Reg::Rsp, rsp);
        }
        pushed
    }

    /// Reads `size` bytes at `offset` above the stack pointer.
    pub(crate) fn peek(&mut self, size: u8, offset: u64) -> Result<u64, Fault> {
        let sp = self.sp().wrapping_add(offset) & self.mode.stack_mask();
        let lin = self.linear(seg::SS, sp, size.into(), false)?;
        load_sized(self, lin, size)
    }

    /// Pops `size` bytes.
    pub(crate) fn pop(&mut self, size: u8) -> Result<u64, Fault> {
        let v = self.peek(size, 0)?;
        self.set_sp(self.sp().wrapping_add(size.into()));
        Ok(v)
    }
}

pub(crate) fn push_r64(c: &mut Core, o: InnerOp<'_>) -> Next {
    let sp = c.regs.get(Reg::Rsp).wrapping_sub(8);
    if c.fast_write(sp, c.regs.get(o.dst)) {
        c.regs.set(Reg::Rsp, sp);
        return o.go(c);
    }
    super::slowly(c, o, push)
}

pub(crate) fn pop_r64(c: &mut Core, o: InnerOp<'_>) -> Next {
    let sp = c.regs.get(Reg::Rsp);
    if let Some(v) = c.fast_read::<u64>(sp) {
        c.regs.set(Reg::Rsp, sp.wrapping_add(8));
        c.regs.set(o.dst, v);
        return o.go(c);
    }
    super::slowly(c, o, pop)
}

pub(crate) fn push(c: &mut Core, o: &Op) -> Done {
    let v = read_sized(c, o, o.dst, o.size)?;
    c.push(o.size, v)
}

pub(crate) fn push_imm(c: &mut Core, o: &Op) -> Done {
    c.push(o.size, o.imm)
}

/// PUSH of a segment register, number in `o.s`: 16 bits are written whatever the size.
pub(crate) fn push_seg(c: &mut Core, o: &Op) -> Done {
    let sp = c.sp().wrapping_sub(o.size.into()) & c.mode.stack_mask();
    let v = c.state.seg[usize::from(o.src.number()) % 6].selector;
    if o.size == 8 {
        return c.push(8, v.into());
    }
    let lin = c.linear(seg::SS, sp, 2, true)?;
    c.write(lin, v)?;
    c.set_sp(sp);
    Ok(())
}

/// POP to a register or memory. A memory address is computed from the incremented stack pointer.
pub(crate) fn pop(c: &mut Core, o: &Op) -> Done {
    let old = c.regs.get(Reg::Rsp);
    let v = c.pop(o.size)?;
    if !o.is_mem() {
        c.regs.write_sized(o.dst, o.size, v);
        return Ok(());
    }
    let done = super::dst(c, o, o.size.into()).and_then(|lin| store_sized(c, lin, o.size, v));
    if done.is_err() {
        c.regs.set(Reg::Rsp, old);
    }
    done
}

/// POP of a segment register, number in `o.d`.
pub(crate) fn pop_seg(c: &mut Core, o: &Op) -> Done {
    let lin = c.linear(seg::SS, c.sp(), 2, false)?;
    let v: u16 = c.read(lin)?;
    let sp = c.sp().wrapping_add(o.size.into());
    // Loading SS may change the stack size; the stack pointer moves by the old one.
    let mask = c.mode.stack_mask();
    let index = usize::from(o.dst.number());
    c.load_segment(index, v)?;
    c.set_sp_masked(sp, mask);
    if index == seg::SS {
        c.shadow_ss();
    }
    c.exit.requested = true;
    Ok(())
}

/// PUSHA and PUSHAD.
pub(crate) fn pusha(c: &mut Core, o: &Op) -> Done {
    let size = u64::from(o.size);
    let sp = c.sp();
    let at = |i: u64| sp.wrapping_sub(size * (i + 1));
    for i in 0..8 {
        let lin = c.linear(seg::SS, at(i) & c.mode.stack_mask(), size, true)?;
        c.probe_write(lin, o.size.into())?;
    }
    for (i, reg) in (0..8).zip((0..).map(Reg::general)) {
        let v = if reg == Reg::Rsp { sp } else { c.regs.get(reg) };
        let lin = c.linear(seg::SS, at(i) & c.mode.stack_mask(), size, true)?;
        store_sized(c, lin, o.size, v)?;
    }
    c.set_sp(at(7));
    Ok(())
}

/// POPA and POPAD: the value of SP is skipped.
pub(crate) fn popa(c: &mut Core, o: &Op) -> Done {
    let size = u64::from(o.size);
    let mut values = [0; 8];
    for (i, v) in (0..8).zip(&mut values) {
        *v = c.peek(o.size, i * size)?;
    }
    for (reg, v) in (0..).map(Reg::general).zip(values.iter().rev()) {
        if reg != Reg::Rsp {
            c.regs.write_sized(reg, o.size, *v);
        }
    }
    c.set_sp(c.sp().wrapping_add(8 * size));
    Ok(())
}

/// ENTER: `o.imm` is the frame size, `o.disp` the nesting level.
pub(crate) fn enter(c: &mut Core, o: &Op) -> Done {
    let level = o.disp & 31;
    let size = u64::from(o.size);
    let old = (c.regs.get(Reg::Rsp), c.regs.get(Reg::Rbp));
    let done = enter_frame(c, o, level, size);
    if done.is_err() {
        c.regs.set(Reg::Rsp, old.0);
        c.regs.set(Reg::Rbp, old.1);
    }
    done
}

fn enter_frame(c: &mut Core, o: &Op, level: u64, size: u64) -> Done {
    c.push(o.size, c.regs.get(Reg::Rbp))?;
    let frame = c.regs.get(Reg::Rsp);
    let mut bp = c.regs.get(Reg::Rbp);
    for i in 1..=level {
        if i == level {
            c.push(o.size, frame)?;
        } else {
            bp = bp.wrapping_sub(size);
            let lin = c.linear(seg::SS, bp & c.mode.stack_mask(), size, false)?;
            let v = load_sized(c, lin, o.size)?;
            c.push(o.size, v)?;
        }
    }
    let sp = c.sp().wrapping_sub(o.imm) & c.mode.stack_mask();
    // The processor makes a write access to the new top of stack.
    let lin = c.linear(seg::SS, sp, size, true)?;
    c.probe_write(lin, o.size.into())?;
    c.set_sp(sp);
    c.regs.write_sized(Reg::Rbp, o.size, frame);
    Ok(())
}

pub(crate) fn leave(c: &mut Core, o: &Op) -> Done {
    let bp = c.regs.get(Reg::Rbp) & c.mode.stack_mask();
    let lin = c.linear(seg::SS, bp, o.size.into(), false)?;
    let v = load_sized(c, lin, o.size)?;
    c.set_sp(bp.wrapping_add(o.size.into()));
    c.regs.write_sized(Reg::Rbp, o.size, v);
    Ok(())
}

/// LEAVE in 64-bit mode.
pub(crate) fn leave64(c: &mut Core, o: InnerOp<'_>) -> Next {
    let bp = c.regs.get(Reg::Rbp);
    if let Some(v) = c.fast_read::<u64>(bp) {
        c.regs.set(Reg::Rsp, bp.wrapping_add(8));
        c.regs.set(Reg::Rbp, v);
        return o.go(c);
    }
    super::slowly(c, o, leave)
}

/// PUSHF: RF and VM read as 0.
pub(crate) fn pushf(c: &mut Core, o: &Op) -> Done {
    let mut image = c.regs.rflags() & !(Rflags::RF | Rflags::VM);
    if c.regs.v86() && c.regs.iopl() < 3 {
        if o.size != 2 || !c.cr4(Cr4::VME) {
            return Err(Fault::GP);
        }
        image.set(Rflags::IF, c.regs.flag(Rflags::VIF));
        image |= Rflags::IOPL;
    }
    c.push(o.size, image.bits())
}

/// POPF: CPL and IOPL determine which flags may change.
pub(crate) fn popf(c: &mut Core, o: &Op) -> Done {
    let v86 = c.regs.v86();
    let vme = v86 && c.regs.iopl() < 3;
    if vme && (o.size != 2 || !c.cr4(Cr4::VME)) {
        return Err(Fault::GP);
    }
    let mut image = Rflags::from_bits_truncate(c.peek(o.size, 0)?);
    let mut mask = ARITHMETIC | Rflags::TF | Rflags::DF | Rflags::NT;
    if o.size != 2 {
        mask |= Rflags::AC | Rflags::ID;
    }
    if c.mode.cpl() <= c.regs.iopl() && !vme {
        mask |= Rflags::IF;
    }
    if c.mode.cpl() == 0 && !v86 {
        mask |= Rflags::IOPL;
    }
    if vme {
        // IF of the image goes to VIF.
        let interrupts = image.contains(Rflags::IF);
        if image.contains(Rflags::TF) || (interrupts && c.regs.flag(Rflags::VIP)) {
            return Err(Fault::GP);
        }
        mask |= Rflags::VIF;
        image.set(Rflags::VIF, interrupts);
    }
    c.set_sp(c.sp().wrapping_add(o.size.into()));
    let old = c.regs.rflags();
    c.change_rflags((old & !mask) | (image & mask));
    Ok(())
}

impl Core {
    /// Writes RFLAGS in an instruction; leaves the block if more than arithmetic flags changed.
    pub(crate) fn change_rflags(&mut self, v: Rflags) {
        let old = self.regs.system_flags();
        self.regs.set_rflags(v);
        if old != self.regs.system_flags() {
            self.update_rights();
            self.exit.requested |= (old ^ self.regs.system_flags())
                .intersects(Rflags::TF | Rflags::IF | Rflags::RF | Rflags::VM);
        }
    }
}
