//! PUSH, POP and their relatives.

use super::{Done, is_mem, load_sized, read_sized, store_sized};
use crate::core::Core;
use crate::fault::Fault;
use crate::flags::ARITHMETIC;
use crate::op::{Next, Op};
use hindsight_cpu::state::seg;
use hindsight_regs::cr::Cr4;
use hindsight_regs::rflags::Rflags;

const SS: u8 = 2;

impl Core {
    /// Pushes `size` bytes; nothing changes on a fault.
    pub(crate) fn push(&mut self, size: u8, v: u64) -> Done {
        let sp = self.sp().wrapping_sub(size.into()) & self.stack_mask;
        let lin = self.linear(SS, sp, size.into(), true)?;
        store_sized(self, lin, size, v)?;
        self.set_sp(sp);
        Ok(())
    }

    /// Reads `size` bytes at `offset` above the stack pointer.
    pub(crate) fn peek(&mut self, size: u8, offset: u64) -> Result<u64, Fault> {
        let sp = self.sp().wrapping_add(offset) & self.stack_mask;
        let lin = self.linear(SS, sp, size.into(), false)?;
        load_sized(self, lin, size)
    }

    /// Pops `size` bytes.
    pub(crate) fn pop(&mut self, size: u8) -> Result<u64, Fault> {
        let v = self.peek(size, 0)?;
        self.set_sp(self.sp().wrapping_add(size.into()));
        Ok(v)
    }
}

pub(crate) fn push_r64(c: &mut Core, o: &Op) -> Next {
    let sp = c.regs[4].wrapping_sub(8);
    if c.fast_write(sp, c.reg(o.d)) {
        c.regs[4] = sp;
        return o.go(c);
    }
    super::slowly(c, o, push)
}

pub(crate) fn pop_r64(c: &mut Core, o: &Op) -> Next {
    let sp = c.regs[4];
    if let Some(v) = c.fast_read::<u64>(sp) {
        c.regs[4] = sp.wrapping_add(8);
        c.set_reg(o.d, v);
        return o.go(c);
    }
    super::slowly(c, o, pop)
}

pub(crate) fn push(c: &mut Core, o: &Op) -> Done {
    let v = read_sized(c, o, o.d, o.size)?;
    c.push(o.size, v)
}

pub(crate) fn push_imm(c: &mut Core, o: &Op) -> Done {
    c.push(o.size, o.imm)
}

/// PUSH of a segment register, number in `o.s`: 16 bits are written whatever the size.
pub(crate) fn push_seg(c: &mut Core, o: &Op) -> Done {
    let sp = c.sp().wrapping_sub(o.size.into()) & c.stack_mask;
    let v = c.st.seg[usize::from(o.s) % 6].selector;
    if o.size == 8 {
        return c.push(8, v.into());
    }
    let lin = c.linear(SS, sp, 2, true)?;
    c.write(lin, v)?;
    c.set_sp(sp);
    Ok(())
}

/// POP to a register or memory; a memory address sees the stack pointer already raised.
pub(crate) fn pop(c: &mut Core, o: &Op) -> Done {
    let old = c.regs[4];
    let v = c.pop(o.size)?;
    if !is_mem(o) {
        c.put_sized(o.d, o.size, v);
        return Ok(());
    }
    let done = super::dst(c, o, o.size.into()).and_then(|lin| store_sized(c, lin, o.size, v));
    if done.is_err() {
        c.regs[4] = old;
    }
    done
}

/// POP of a segment register, number in `o.d`.
pub(crate) fn pop_seg(c: &mut Core, o: &Op) -> Done {
    let lin = c.linear(SS, c.sp(), 2, false)?;
    let v: u16 = c.read(lin)?;
    let sp = c.sp().wrapping_add(o.size.into());
    // The size of the stack may change with SS; the pointer moves as the old one says.
    let mask = c.stack_mask;
    c.load_segment(usize::from(o.d), v)?;
    let new = c.stack_mask;
    c.stack_mask = mask;
    c.set_sp(sp);
    c.stack_mask = new;
    if usize::from(o.d) == seg::SS {
        c.shadow_ss();
    }
    c.leave = true;
    Ok(())
}

/// PUSHA and PUSHAD.
pub(crate) fn pusha(c: &mut Core, o: &Op) -> Done {
    let size = u64::from(o.size);
    let sp = c.sp();
    let at = |i: u64| sp.wrapping_sub(size * (i + 1));
    for i in 0..8 {
        let lin = c.linear(SS, at(i) & c.stack_mask, size, true)?;
        c.probe_write(lin, o.size.into())?;
    }
    for (i, reg) in (0..8).zip(0_u8..) {
        let v = if reg == 4 { sp } else { c.reg(reg) };
        let lin = c.linear(SS, at(i) & c.stack_mask, size, true)?;
        store_sized(c, lin, o.size, v)?;
    }
    c.set_sp(at(7));
    Ok(())
}

/// POPA and POPAD: the slot of SP is skipped.
pub(crate) fn popa(c: &mut Core, o: &Op) -> Done {
    let size = u64::from(o.size);
    let mut values = [0; 8];
    for (i, v) in (0..8).zip(&mut values) {
        *v = c.peek(o.size, i * size)?;
    }
    for (reg, v) in (0_u8..8).zip(values.iter().rev()) {
        if reg != 4 {
            c.put_sized(reg, o.size, *v);
        }
    }
    c.set_sp(c.sp().wrapping_add(8 * size));
    Ok(())
}

/// ENTER: `o.imm` is the frame size, `o.disp` the nesting level.
pub(crate) fn enter(c: &mut Core, o: &Op) -> Done {
    let level = o.disp & 31;
    let size = u64::from(o.size);
    let old = (c.regs[4], c.regs[5]);
    let done = enter_frame(c, o, level, size);
    if done.is_err() {
        (c.regs[4], c.regs[5]) = old;
    }
    done
}

fn enter_frame(c: &mut Core, o: &Op, level: u64, size: u64) -> Done {
    c.push(o.size, c.reg(5))?;
    let frame = c.regs[4];
    let mut bp = c.regs[5];
    for i in 1..=level {
        if i == level {
            c.push(o.size, frame)?;
        } else {
            bp = bp.wrapping_sub(size);
            let lin = c.linear(SS, bp & c.stack_mask, size, false)?;
            let v = load_sized(c, lin, o.size)?;
            c.push(o.size, v)?;
        }
    }
    let sp = c.sp().wrapping_sub(o.imm) & c.stack_mask;
    // The new top of stack must be writable.
    let lin = c.linear(SS, sp, 1, true)?;
    c.probe_write(lin, 1)?;
    c.set_sp(sp);
    c.put_sized(5, o.size, frame);
    Ok(())
}

pub(crate) fn leave(c: &mut Core, o: &Op) -> Done {
    let bp = c.reg(5) & c.stack_mask;
    let lin = c.linear(SS, bp, o.size.into(), false)?;
    let v = load_sized(c, lin, o.size)?;
    c.set_sp(bp.wrapping_add(o.size.into()));
    c.put_sized(5, o.size, v);
    Ok(())
}

/// LEAVE in 64-bit mode.
pub(crate) fn leave64(c: &mut Core, o: &Op) -> Next {
    let bp = c.regs[5];
    if let Some(v) = c.fast_read::<u64>(bp) {
        c.regs[4] = bp.wrapping_add(8);
        c.regs[5] = v;
        return o.go(c);
    }
    c.left = o.left;
    let done = leave(c, o);
    super::finish(c, o, done)
}

/// PUSHF: RF and VM read as 0.
pub(crate) fn pushf(c: &mut Core, o: &Op) -> Done {
    let mut image = c.rflags() & !(Rflags::RF | Rflags::VM);
    if c.v86() && c.iopl() < 3 {
        if o.size != 2 || !c.cr4(Cr4::VME) {
            return Err(Fault::GP);
        }
        image.set(Rflags::IF, c.flag(Rflags::VIF));
        image |= Rflags::IOPL;
    }
    c.push(o.size, image.bits())
}

/// POPF: what may change depends on CPL and IOPL.
pub(crate) fn popf(c: &mut Core, o: &Op) -> Done {
    let v86 = c.v86();
    let vme = v86 && c.iopl() < 3;
    if vme && (o.size != 2 || !c.cr4(Cr4::VME)) {
        return Err(Fault::GP);
    }
    let mut image = Rflags::from_bits_truncate(c.peek(o.size, 0)?);
    let mut mask = ARITHMETIC | Rflags::TF | Rflags::DF | Rflags::NT;
    if o.size != 2 {
        mask |= Rflags::AC | Rflags::ID;
    }
    if c.cpl <= c.iopl() && !vme {
        mask |= Rflags::IF;
    }
    if c.cpl == 0 && !v86 {
        mask |= Rflags::IOPL;
    }
    if vme {
        // IF of the image goes to VIF.
        let interrupts = image.contains(Rflags::IF);
        if image.contains(Rflags::TF) || (interrupts && c.flag(Rflags::VIP)) {
            return Err(Fault::GP);
        }
        mask |= Rflags::VIF;
        image.set(Rflags::VIF, interrupts);
    }
    c.set_sp(c.sp().wrapping_add(o.size.into()));
    let old = c.rflags();
    c.change_rflags((old & !mask) | (image & mask));
    Ok(())
}

impl Core {
    /// Writes RFLAGS in an instruction; leaves the block if more than arithmetic flags changed.
    pub(crate) fn change_rflags(&mut self, v: Rflags) {
        let old = self.fl;
        self.set_rflags(v);
        if old != self.fl {
            self.update_set();
            self.leave |=
                (old ^ self.fl).intersects(Rflags::TF | Rflags::IF | Rflags::RF | Rflags::VM);
        }
    }
}
