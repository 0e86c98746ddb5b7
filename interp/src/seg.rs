//! Segmentation: address checks, descriptors, and loads of segment registers.
//! SDM Vol. 3A, "Protected-Mode Memory Management" and "Protection".

#![expect(
    clippy::cast_possible_truncation,
    reason = "descriptor fields are cut on purpose"
)]

use crate::core::Core;
use crate::descriptor::access::{CODE, CONFORMING, PRESENT, READ_WRITE};
use crate::descriptor::{Descriptor, gp, np};
use crate::fault::Fault;
use crate::registers::Reg;
pub(crate) use hindsight_cpu::state::canonical;
use hindsight_cpu::state::{Segment, seg};

impl Core {
    /// Checks an access of `size` bytes in a segment; returns its linear address.
    pub(crate) fn linear(&self, seg: usize, ea: u64, size: u64, write: bool) -> Result<u64, Fault> {
        if self.mode.is_64bit() {
            let lin = self.regs.get(Reg::segment_base(seg)).wrapping_add(ea);
            if canonical(lin) && canonical(lin.wrapping_add(size.saturating_sub(1))) {
                return Ok(lin);
            }
            return Err(if seg == seg::SS { Fault::SS } else { Fault::GP });
        }
        let last = ea.wrapping_add(size.saturating_sub(1));
        if self.mode.is_open(seg) && (ea..=0xffff_ffff).contains(&last) {
            return Ok(self.state.seg[seg].base.wrapping_add(ea) & 0xffff_ffff);
        }
        let s = &self.state.seg[seg];
        let bad = if seg == seg::SS { Fault::SS } else { Fault::GP };
        if self.mode.protected() {
            let kind = s.access & (CODE | READ_WRITE);
            let wrong = if write {
                kind != READ_WRITE
            } else {
                kind == CODE
            };
            if s.unusable || wrong {
                return Err(if s.unusable { bad } else { Fault::GP });
            }
        }
        let ok = if s.access & (CODE | CONFORMING) == CONFORMING {
            let top = if s.default_big() { 0xffff_ffff } else { 0xffff };
            ea > s.limit.into() && last <= top && last >= ea
        } else {
            last <= s.limit.into() && last >= ea
        };
        if ok {
            Ok(s.base.wrapping_add(ea) & 0xffff_ffff)
        } else {
            Err(bad)
        }
    }

    /// Returns a selector's descriptor.
    ///
    /// Returns `None` for a null selector, or one outside its table.
    pub(crate) fn descriptor(&mut self, selector: u16) -> Result<Option<Descriptor>, Fault> {
        let (base, limit) = if selector & 4 == 0 {
            if selector & 0xfffc == 0 {
                return Ok(None);
            }
            (self.state.gdtr.base, self.state.gdtr.limit.into())
        } else {
            if self.state.ldtr.unusable || self.state.ldtr.selector & 0xfffc == 0 {
                return Ok(None);
            }
            (self.state.ldtr.base, self.state.ldtr.limit)
        };
        let index = u32::from(selector & 0xfff8);
        if index + 7 > limit {
            return Ok(None);
        }
        let at = self.wrap(base.wrapping_add(index.into()));
        Ok(Some(Descriptor {
            raw: self.read_sys(at)?,
            address: at,
        }))
    }

    /// Truncates a linear address to the width of the mode.
    pub(crate) fn wrap(&self, lin: u64) -> u64 {
        if self.lma() { lin } else { lin & 0xffff_ffff }
    }

    /// Returns a selector's descriptor, or #GP with the selector if there is none.
    pub(crate) fn need_descriptor(&mut self, selector: u16) -> Result<Descriptor, Fault> {
        self.descriptor(selector)?.ok_or(gp(selector))
    }

    /// Returns bits 63:32 of the base from a 16-byte system descriptor in IA-32e mode.
    pub(crate) fn descriptor_high(&mut self, d: Descriptor, selector: u16) -> Result<u64, Fault> {
        let table = if selector & 4 == 0 {
            u32::from(self.state.gdtr.limit)
        } else {
            self.state.ldtr.limit
        };
        if u32::from(selector & 0xfff8) + 15 > table {
            return Err(gp(selector));
        }
        let high: u64 = self.read_sys(d.address + 8)?;
        if high >> 40 & 0x1f != 0 {
            return Err(gp(selector));
        }
        Ok(high << 32)
    }

    /// Sets the accessed bit of a descriptor in its table.
    pub(crate) fn mark_accessed(&mut self, d: &mut Descriptor) -> Result<(), Fault> {
        if d.raw & 1 << 40 == 0 {
            d.raw |= 1 << 40;
            let byte = (d.raw >> 40) as u8;
            self.write_sys(d.address + 5, byte)?;
        }
        Ok(())
    }

    /// Loads a segment register other than CS, as MOV, POP and LDS do.
    pub(crate) fn load_segment(&mut self, index: usize, selector: u16) -> Result<(), Fault> {
        if !self.mode.protected() {
            self.load_segment_real(index, selector);
            return Ok(());
        }
        if selector & 0xfffc == 0 {
            return self.load_null(index, selector);
        }
        let mut d = self.need_descriptor(selector)?;
        let rpl = (selector & 3) as u8;
        if index == seg::SS {
            if rpl != self.mode.cpl() || !d.is_writable() || d.dpl() != self.mode.cpl() {
                return Err(gp(selector));
            }
            if !d.present() {
                return Err(crate::descriptor::ss(selector));
            }
        } else {
            let readable = d.is_readable();
            let private = !d.is_conforming() && (rpl > d.dpl() || self.mode.cpl() > d.dpl());
            if !readable || private {
                return Err(gp(selector));
            }
            if !d.present() {
                return Err(np(selector));
            }
        }
        self.mark_accessed(&mut d)?;
        self.put_segment(index, d.segment(selector));
        Ok(())
    }

    fn load_null(&mut self, index: usize, selector: u16) -> Result<(), Fault> {
        if index == seg::SS {
            let rpl = (selector & 3) as u8;
            if !self.mode.is_64bit() || self.mode.cpl() == 3 || rpl != self.mode.cpl() {
                return Err(Fault::GP);
            }
        }
        let dpl = u16::from(self.mode.cpl()) << 5;
        let base = if index >= seg::FS {
            0
        } else {
            self.state.seg[index].base
        };
        self.put_segment(
            index,
            Segment {
                selector,
                base,
                limit: 0,
                access: dpl,
                unusable: true,
            },
        );
        Ok(())
    }

    /// Loads a segment register as in real-address and virtual-8086 mode: the base is 16 times the
    /// selector. Virtual-8086 mode also sets limit and access rights; real-address mode keeps them,
    /// but sets the rights of a segment that is not present.
    pub(crate) fn load_segment_real(&mut self, index: usize, selector: u16) {
        let mut s = self.state.seg[index];
        s.selector = selector;
        s.base = u64::from(selector) << 4;
        s.unusable = false;
        if self.regs.v86() {
            s.limit = 0xffff;
            s.access = 0xf3;
        } else if s.access & PRESENT == 0 {
            s.access = 0x93;
        }
        self.put_segment(index, s);
    }

    /// Sets a segment register, and updates the state that depends on it.
    pub(crate) fn put_segment(&mut self, index: usize, s: Segment) {
        let old = self.state.seg[index];
        self.state.seg[index] = s;
        if index == seg::CS && (old.base, old.limit) != (s.base, s.limit) {
            self.code.new_generation();
        }
        self.update_mode();
    }

    /// Loads LDTR.
    pub(crate) fn load_ldtr(&mut self, selector: u16) -> Result<(), Fault> {
        if selector & 0xfffc == 0 {
            self.state.ldtr = Segment {
                selector,
                access: 0x82,
                unusable: true,
                ..Segment::default()
            };
            return Ok(());
        }
        if selector & 4 != 0 {
            return Err(gp(selector));
        }
        let d = self.need_descriptor(selector)?;
        if d.system_type() != Some(2) {
            return Err(gp(selector));
        }
        if !d.present() {
            return Err(np(selector));
        }
        let high = if self.lma() {
            self.descriptor_high(d, selector)?
        } else {
            0
        };
        let mut s = d.segment(selector);
        s.base |= high;
        if !canonical(s.base) {
            return Err(gp(selector));
        }
        self.state.ldtr = s;
        Ok(())
    }

    /// Loads the task register and marks the TSS busy.
    pub(crate) fn load_tr(&mut self, selector: u16) -> Result<(), Fault> {
        if selector & 0xfffc == 0 {
            return Err(Fault::GP);
        }
        if selector & 4 != 0 {
            return Err(gp(selector));
        }
        let mut d = self.need_descriptor(selector)?;
        let fits = d.system_type() == Some(9) || (d.system_type() == Some(1) && !self.lma());
        if !fits {
            return Err(gp(selector));
        }
        if !d.present() {
            return Err(np(selector));
        }
        let high = if self.lma() {
            self.descriptor_high(d, selector)?
        } else {
            0
        };
        if !canonical(d.base() | high) {
            return Err(gp(selector));
        }
        d.raw |= 1 << 41;
        let byte = (d.raw >> 40) as u8;
        self.write_sys(d.address + 5, byte)?;
        let mut s = d.segment(selector);
        s.base |= high;
        self.state.tr = s;
        Ok(())
    }

    /// Starts the shadow after a load of SS by MOV or POP.
    ///
    /// The second of two consecutive loads starts none.
    pub(crate) fn shadow_ss(&mut self) {
        self.state.events.mov_ss_shadow = true;
        self.exit.requested = true;
    }

    /// Checks that a new CS:RIP can be executed; the error is #GP(0).
    pub(crate) fn check_rip(&self, rip: u64, cs: &Segment) -> Result<(), Fault> {
        let ok = if self.lma() && cs.long() {
            canonical(rip)
        } else {
            rip <= cs.limit.into()
        };
        if ok { Ok(()) } else { Err(Fault::GP) }
    }

    /// Sets CS, CPL and RIP, after all checks. SS must already fit the new CPL.
    pub(crate) fn set_cs(&mut self, mut cs: Segment, cpl: u8, rip: u64) {
        cs.selector = (cs.selector & !3) | u16::from(cpl);
        self.mode.set_cpl(cpl);
        self.regs.rip = rip;
        self.put_segment(seg::CS, cs);
    }

    /// Sets CS and CPL outside a checked load (SYSCALL, real mode).
    pub(crate) fn set_flat_cs(&mut self, selector: u16, access: u16, cpl: u8) {
        let cs = Segment {
            selector,
            base: 0,
            limit: u32::MAX,
            access,
            unusable: false,
        };
        self.mode.set_cpl(cpl);
        self.put_segment(seg::CS, cs);
    }

    /// Loads a null SS with a privilege level, as interrupts in 64-bit mode do.
    pub(crate) fn null_ss(&mut self, cpl: u8) {
        let access = u16::from(cpl) << 5;
        let selector = u16::from(cpl);
        let s = Segment {
            selector,
            base: 0,
            limit: 0,
            access,
            unusable: true,
        };
        self.put_segment(seg::SS, s);
    }

    /// Returns a selector's descriptor for LAR, LSL, VERR and VERW.
    ///
    /// Returns `None` where they clear ZF.
    pub(crate) fn inspect(&mut self, selector: u16) -> Result<Option<Descriptor>, Fault> {
        let Some(d) = self.descriptor(selector)? else {
            return Ok(None);
        };
        let rpl = (selector & 3) as u8;
        let private = !d.is_conforming() && (self.mode.cpl() > d.dpl() || rpl > d.dpl());
        Ok((!private).then_some(d))
    }
}
