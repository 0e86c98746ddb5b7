//! IRET in all modes, and the parts that it shares with far returns.
//!
//! SDM Vol. 2, "IRET/IRETD/IRETQ"; Vol. 3A, "Stack Switching".

#![expect(
    clippy::cast_possible_truncation,
    reason = "stack images are cut to their width"
)]

use crate::core::Core;
use crate::descriptor::{Descriptor, gp, np};
use crate::fault::Fault;
use crate::flags::ARITHMETIC;
use crate::registers::Reg;
use hindsight_cpu::state::{Segment, seg};
use hindsight_regs::cr::{Cr0, Cr4};
use hindsight_regs::rflags::Rflags;

/// The stack segment of another privilege level, before its accessed bit is set.
#[derive(Clone, Copy)]
pub(crate) enum NewStack {
    /// A null selector, in 64-bit mode.
    Null(Segment),
    /// A descriptor and its selector.
    Described(Descriptor, u16),
}

impl NewStack {
    pub(crate) fn segment(self) -> Segment {
        match self {
            Self::Null(segment) => segment,
            Self::Described(d, selector) => d.segment(selector),
        }
    }
}

impl Core {
    /// Executes IRET with an operand size of `size` bytes, and sets RIP.
    ///
    /// If it switches tasks, the old task continues at `after`.
    pub(crate) fn iret(&mut self, size: u8, after: u64) -> Result<(), Fault> {
        // NMIs are unblocked even if IRET faults: SDM Vol. 3A, "Handling Multiple NMIs".
        self.unblock_nmis();
        if !self.cr0(Cr0::PE) {
            self.iret_real(size)
        } else if self.regs.v86() {
            self.iret_v86(size)
        } else if self.regs.flag(Rflags::NT) {
            if self.lma() {
                Err(Fault::GP)
            } else {
                self.regs.rip = after;
                self.task_return()
            }
        } else {
            self.iret_protected(size)
        }
    }

    fn iret_real(&mut self, size: u8) -> Result<(), Fault> {
        let s = u64::from(size);
        let (ip, cs) = (self.peek(size, 0)?, self.peek(size, s)?);
        let flags = Rflags::from_bits_truncate(self.peek(size, 2 * s)?);
        if ip > self.cs().limit.into() {
            return Err(Fault::GP);
        }
        self.set_sp(self.sp().wrapping_add(3 * s));
        self.load_segment_real(seg::CS, cs as u16);
        self.regs.rip = ip;
        let mut mask =
            ARITHMETIC | Rflags::TF | Rflags::IF | Rflags::DF | Rflags::IOPL | Rflags::NT;
        if size == 4 {
            mask |= Rflags::RF | Rflags::AC | Rflags::ID;
        }
        self.regs
            .set_rflags((self.regs.rflags() & !mask) | (flags & mask));
        self.update_mode();
        Ok(())
    }

    fn iret_v86(&mut self, size: u8) -> Result<(), Fault> {
        let vme = self.regs.iopl() < 3;
        if vme && (size != 2 || !self.cr4(Cr4::VME)) {
            return Err(Fault::GP);
        }
        let s = u64::from(size);
        let (ip, cs) = (self.peek(size, 0)?, self.peek(size, s)?);
        let flags = Rflags::from_bits_truncate(self.peek(size, 2 * s)?);
        if ip > 0xffff {
            return Err(Fault::GP);
        }
        let mut mask = ARITHMETIC | Rflags::TF | Rflags::DF | Rflags::NT;
        let mut flags = flags;
        if vme {
            let interrupts = flags.contains(Rflags::IF);
            if flags.contains(Rflags::TF) || (interrupts && self.regs.flag(Rflags::VIP)) {
                return Err(Fault::GP);
            }
            flags.set(Rflags::VIF, interrupts);
            mask |= Rflags::VIF;
        } else {
            mask |= Rflags::IF;
            if size == 4 {
                mask |= Rflags::RF | Rflags::AC | Rflags::ID;
            }
        }
        self.set_sp(self.sp().wrapping_add(3 * s));
        self.load_segment_real(seg::CS, cs as u16);
        self.regs.rip = ip;
        self.regs
            .set_rflags((self.regs.rflags() & !mask) | (flags & mask));
        self.update_mode();
        Ok(())
    }

    fn iret_protected(&mut self, size: u8) -> Result<(), Fault> {
        let s = u64::from(size);
        let (rip, cs_sel) = (self.peek(size, 0)?, self.peek(size, s)? as u16);
        let flags = Rflags::from_bits_truncate(self.peek(size, 2 * s)?);
        if size == 4 && flags.contains(Rflags::VM) && self.mode.cpl() == 0 && !self.lma() {
            return self.iret_to_v86(rip, cs_sel, flags);
        }
        let rpl = (cs_sel & 3) as u8;
        let mut cs = self.return_cs(cs_sel)?;
        let outer = rpl > self.mode.cpl();
        // 64-bit code always pops SS:RSP.
        let stack = if outer || self.mode.is_64bit() {
            let (sp, ss_sel) = (self.peek(size, 3 * s)?, self.peek(size, 4 * s)? as u16);
            Some((sp, self.return_ss(ss_sel, rpl, cs.is_long())?))
        } else {
            None
        };
        self.check_rip(rip, &cs.segment(cs_sel))?;
        let stack = match stack {
            Some((sp, ss)) => Some((sp, self.take_ss(ss)?)),
            None => None,
        };
        self.mark_accessed(&mut cs)?;
        let mask = self.iret_mask(size);
        self.regs
            .set_rflags((self.regs.rflags() & !mask) | (flags & mask));
        // The new code segment and SS determine how much of RSP is written: with a 16-bit stack
        // pointer, the upper bits of RSP stay.
        match stack {
            Some((sp, ss)) => {
                self.mode.set_cpl(rpl);
                self.put_segment(seg::SS, ss);
                self.set_cs(cs.segment(cs_sel), rpl, rip);
                self.set_sp(sp);
            }
            None => {
                self.set_cs(cs.segment(cs_sel), rpl, rip);
                self.set_sp(self.sp().wrapping_add(3 * s));
            }
        }
        if outer {
            self.drop_private_segments();
        }
        Ok(())
    }

    /// Returns the flags that IRET may change.
    fn iret_mask(&self, size: u8) -> Rflags {
        let mut mask = ARITHMETIC | Rflags::TF | Rflags::DF | Rflags::NT;
        if size != 2 {
            mask |= Rflags::RF | Rflags::AC | Rflags::ID;
        }
        if self.mode.cpl() <= self.regs.iopl() {
            mask |= Rflags::IF;
        }
        if self.mode.cpl() == 0 {
            mask |= Rflags::IOPL;
            if size != 2 {
                mask |= Rflags::VIF | Rflags::VIP;
            }
        }
        mask
    }

    /// Reads and checks the code segment of a return.
    pub(crate) fn return_cs(&mut self, selector: u16) -> Result<Descriptor, Fault> {
        if selector & 0xfffc == 0 {
            return Err(Fault::GP);
        }
        let d = self.need_descriptor(selector)?;
        let rpl = (selector & 3) as u8;
        let dpl_ok = if d.is_conforming() {
            d.dpl() <= rpl
        } else {
            d.dpl() == rpl
        };
        if !d.is_code()
            || rpl < self.mode.cpl()
            || !dpl_ok
            || (self.lma() && d.is_long() && d.is_big())
        {
            return Err(gp(selector));
        }
        if !d.present() {
            return Err(np(selector));
        }
        Ok(d)
    }

    /// Reads and checks the stack segment of a return to `rpl`.
    ///
    /// The caller must make all checks that can fault before it calls [`Core::take_ss`].
    pub(crate) fn return_ss(
        &mut self,
        selector: u16,
        rpl: u8,
        long: bool,
    ) -> Result<NewStack, Fault> {
        if selector & 0xfffc == 0 {
            if !(self.lma() && long) || rpl == 3 {
                return Err(Fault::GP);
            }
            let access = u16::from(rpl) << 5;
            return Ok(NewStack::Null(Segment {
                selector,
                base: 0,
                limit: 0,
                access,
                unusable: true,
            }));
        }
        let d = self.need_descriptor(selector)?;
        if selector & 3 != rpl.into() || !d.is_writable() || d.dpl() != rpl {
            return Err(gp(selector));
        }
        if !d.present() {
            return Err(crate::descriptor::ss(selector));
        }
        Ok(NewStack::Described(d, selector))
    }

    /// Sets the accessed bit of another level's stack segment, and returns it.
    pub(crate) fn take_ss(&mut self, stack: NewStack) -> Result<Segment, Fault> {
        match stack {
            NewStack::Null(segment) => Ok(segment),
            NewStack::Described(mut d, selector) => {
                self.mark_accessed(&mut d)?;
                Ok(d.segment(selector))
            }
        }
    }

    /// Makes data segments null that the outer level of a return must not access.
    pub(crate) fn drop_private_segments(&mut self) {
        for i in [seg::ES, seg::DS, seg::FS, seg::GS] {
            let s = self.state.seg[i];
            let data = s.access & 8 == 0 || s.access & 4 == 0;
            if s.unusable || (data && s.dpl() < self.mode.cpl()) {
                // The manual changes only the selector, and 64-bit code uses the bases of FS and GS
                // further.
                let base = if i >= seg::FS { s.base } else { 0 };
                let access = u16::from(self.mode.cpl()) << 5;
                let null = Segment {
                    selector: 0,
                    base,
                    limit: 0,
                    access,
                    unusable: true,
                };
                self.put_segment(i, null);
            }
        }
    }

    fn iret_to_v86(&mut self, rip: u64, cs: u16, flags: Rflags) -> Result<(), Fault> {
        let mut v = [0_u64; 6];
        for (i, slot) in (3_u64..).zip(&mut v) {
            *slot = self.peek(4, 4 * i)?;
        }
        if rip > 0xffff {
            return Err(Fault::GP);
        }
        let mask = ARITHMETIC
            | Rflags::TF
            | Rflags::DF
            | Rflags::NT
            | Rflags::RF
            | Rflags::AC
            | Rflags::ID
            | Rflags::IF
            | Rflags::IOPL
            | Rflags::VIF
            | Rflags::VIP
            | Rflags::VM;
        self.regs
            .set_rflags((self.regs.rflags() & !mask) | (flags & mask));
        self.mode.set_cpl(3);
        let [sp, ss, es, ds, fs, gs] = v;
        for (i, sel) in [
            (seg::CS, u64::from(cs)),
            (seg::SS, ss),
            (seg::ES, es),
            (seg::DS, ds),
            (seg::FS, fs),
            (seg::GS, gs),
        ] {
            self.load_segment_real(i, sel as u16);
        }
        self.regs.rip = rip;
        self.update_mode();
        self.regs.set(Reg::Rsp, sp & 0xffff_ffff);
        Ok(())
    }
}
