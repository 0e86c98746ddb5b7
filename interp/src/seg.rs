//! Segmentation: address checks, descriptors, and loads of segment registers.
//! SDM Vol. 3A, "Protected-Mode Memory Management" and "Protection".

#![expect(
    clippy::cast_possible_truncation,
    reason = "descriptor fields are cut on purpose"
)]

use crate::core::Core;
use crate::fault::Fault;
pub(crate) use hindsight_cpu::state::canonical;
use hindsight_cpu::state::{Segment, seg};
use hindsight_regs::vector::Vector;

/// The access byte: present, and the types.
pub(crate) const PRESENT: u16 = 1 << 7;
pub(crate) const S: u16 = 1 << 4;
pub(crate) const CODE: u16 = 1 << 3;
/// Code: conforming. Data: expand-down.
pub(crate) const CONFORMING: u16 = 1 << 2;
/// Code: readable. Data: writable.
pub(crate) const READ_WRITE: u16 = 1 << 1;

/// A descriptor as it stands in its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub(crate) raw: u64,
    /// Where it stands.
    pub(crate) at: u64,
}

impl Descriptor {
    pub(crate) fn access(self) -> u16 {
        (self.raw >> 40 & 0xf0ff) as u16
    }
    pub(crate) fn base(self) -> u64 {
        (self.raw >> 16 & 0xff_ffff) | (self.raw >> 32 & 0xff00_0000)
    }
    pub(crate) fn limit(self) -> u32 {
        let limit = (self.raw & 0xffff) as u32 | (self.raw >> 32 & 0xf_0000) as u32;
        if self.access() & 1 << 15 != 0 {
            limit << 12 | 0xfff
        } else {
            limit
        }
    }
    pub(crate) fn dpl(self) -> u8 {
        (self.raw >> 45 & 3) as u8
    }
    pub(crate) fn present(self) -> bool {
        self.access() & PRESENT != 0
    }
    /// Neither a system segment nor a gate.
    pub(crate) fn ordinary(self) -> bool {
        self.access() & S != 0
    }
    pub(crate) fn is_code(self) -> bool {
        self.ordinary() && self.access() & CODE != 0
    }
    pub(crate) fn conforming(self) -> bool {
        self.is_code() && self.access() & CONFORMING != 0
    }
    /// Data that can be written.
    pub(crate) fn writable(self) -> bool {
        self.access() & (S | CODE | READ_WRITE) == S | READ_WRITE
    }
    /// The type of a system descriptor, 0 to 15; None for code and data.
    pub(crate) fn system(self) -> Option<u8> {
        (!self.ordinary()).then_some((self.access() & 15) as u8)
    }
    pub(crate) fn long(self) -> bool {
        self.access() & 1 << 13 != 0
    }
    pub(crate) fn big(self) -> bool {
        self.access() & 1 << 14 != 0
    }
    /// Target of a gate: selector and 32-bit offset.
    pub(crate) fn gate(self) -> (u16, u64) {
        let offset = (self.raw & 0xffff) | (self.raw >> 32 & 0xffff_0000);
        ((self.raw >> 16) as u16, offset)
    }
    pub(crate) fn segment(self, selector: u16) -> Segment {
        Segment {
            selector,
            base: self.base(),
            limit: self.limit(),
            access: self.access(),
            unusable: false,
        }
    }
}

/// The error code that names a selector.
pub(crate) fn code_of(selector: u16) -> u32 {
    u32::from(selector & 0xfffc)
}

pub(crate) fn gp(selector: u16) -> Fault {
    Fault::WithCode(Vector::GP, code_of(selector))
}

pub(crate) fn np(selector: u16) -> Fault {
    Fault::WithCode(Vector::NP, code_of(selector))
}

/// A data segment of 4 GiB that can be written, at the beginning of a page. What lies within a page
/// lies within such a segment.
pub(crate) const fn is_open(s: Segment) -> bool {
    let kind = s.access & (CODE | CONFORMING | READ_WRITE);
    !s.unusable && s.limit == u32::MAX && kind == READ_WRITE && s.base & 0xfff == 0
}

impl Core {
    /// The linear address of `size` bytes at an offset in a segment, checked.
    pub(crate) fn linear(&self, seg: u8, ea: u64, size: u64, write: bool) -> Result<u64, Fault> {
        let seg = usize::from(seg) % 6;
        if self.code == 8 {
            let lin = self.regs[crate::op::slot::SEG_BASE as usize + seg].wrapping_add(ea);
            if canonical(lin) && canonical(lin.wrapping_add(size.saturating_sub(1))) {
                return Ok(lin);
            }
            return Err(if seg == seg::SS { Fault::SS } else { Fault::GP });
        }
        let last = ea.wrapping_add(size.saturating_sub(1));
        if self.open >> seg & 1 != 0 && (ea..=0xffff_ffff).contains(&last) {
            return Ok(self.st.seg[seg].base.wrapping_add(ea) & 0xffff_ffff);
        }
        let s = &self.st.seg[seg];
        let bad = if seg == seg::SS { Fault::SS } else { Fault::GP };
        if self.prot {
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

    /// The descriptor that a selector names; None outside its table or for the null selector.
    pub(crate) fn descriptor(&mut self, selector: u16) -> Result<Option<Descriptor>, Fault> {
        let (base, limit) = if selector & 4 == 0 {
            if selector & 0xfffc == 0 {
                return Ok(None);
            }
            (self.st.gdtr.base, self.st.gdtr.limit.into())
        } else {
            if self.st.ldtr.unusable || self.st.ldtr.selector & 0xfffc == 0 {
                return Ok(None);
            }
            (self.st.ldtr.base, self.st.ldtr.limit)
        };
        let index = u32::from(selector & 0xfff8);
        if index + 7 > limit {
            return Ok(None);
        }
        let at = self.wrap(base.wrapping_add(index.into()));
        Ok(Some(Descriptor {
            raw: self.read_sys(at)?,
            at,
        }))
    }

    /// A linear address as wide as the mode has them.
    pub(crate) fn wrap(&self, lin: u64) -> u64 {
        if self.lma() { lin } else { lin & 0xffff_ffff }
    }

    /// The same, or #GP that names the selector.
    pub(crate) fn need_descriptor(&mut self, selector: u16) -> Result<Descriptor, Fault> {
        self.descriptor(selector)?.ok_or(gp(selector))
    }

    /// The upper half of a 16-byte system descriptor in IA-32e mode: bits 63:32 of the base.
    pub(crate) fn descriptor_high(&mut self, d: Descriptor, selector: u16) -> Result<u64, Fault> {
        let table = if selector & 4 == 0 {
            u32::from(self.st.gdtr.limit)
        } else {
            self.st.ldtr.limit
        };
        if u32::from(selector & 0xfff8) + 15 > table {
            return Err(gp(selector));
        }
        let high: u64 = self.read_sys(d.at + 8)?;
        if high >> 40 & 0x1f != 0 {
            return Err(gp(selector));
        }
        Ok(high << 32)
    }

    /// Sets the accessed bit in the table.
    pub(crate) fn mark_accessed(&mut self, d: &mut Descriptor) -> Result<(), Fault> {
        if d.raw & 1 << 40 == 0 {
            d.raw |= 1 << 40;
            let byte = (d.raw >> 40) as u8;
            self.write_sys(d.at + 5, byte)?;
        }
        Ok(())
    }

    /// Loads a segment register other than CS, as MOV, POP and LDS do.
    pub(crate) fn load_segment(&mut self, index: usize, selector: u16) -> Result<(), Fault> {
        if !self.prot {
            self.load_segment_real(index, selector);
            return Ok(());
        }
        if selector & 0xfffc == 0 {
            return self.load_null(index, selector);
        }
        let mut d = self.need_descriptor(selector)?;
        let rpl = (selector & 3) as u8;
        if index == seg::SS {
            if rpl != self.cpl || !d.writable() || d.dpl() != self.cpl {
                return Err(gp(selector));
            }
            if !d.present() {
                return Err(Fault::WithCode(Vector::SS, code_of(selector)));
            }
        } else {
            let readable = d.ordinary() && d.access() & (CODE | READ_WRITE) != CODE;
            let private = !d.conforming() && (rpl > d.dpl() || self.cpl > d.dpl());
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
            if self.code != 8 || self.cpl == 3 || rpl != self.cpl {
                return Err(Fault::GP);
            }
        }
        let dpl = u16::from(self.cpl) << 5;
        let base = if index >= seg::FS {
            0
        } else {
            self.st.seg[index].base
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

    /// In real-address and virtual-8086 mode: the base follows, limit and rights stay or are set.
    pub(crate) fn load_segment_real(&mut self, index: usize, selector: u16) {
        let mut s = self.st.seg[index];
        s.selector = selector;
        s.base = u64::from(selector) << 4;
        s.unusable = false;
        if self.v86() {
            s.limit = 0xffff;
            s.access = 0xf3;
        } else if s.access & PRESENT == 0 {
            s.access = 0x93;
        }
        self.put_segment(index, s);
    }

    /// Sets a segment register and what depends on it.
    pub(crate) fn put_segment(&mut self, index: usize, s: Segment) {
        let old = self.st.seg[index];
        self.st.seg[index] = s;
        if index == seg::CS && (old.base, old.limit) != (s.base, s.limit) {
            self.generation += 1;
        }
        self.update_mode();
    }

    /// Loads LDTR.
    pub(crate) fn load_ldtr(&mut self, selector: u16) -> Result<(), Fault> {
        if selector & 0xfffc == 0 {
            self.st.ldtr = Segment {
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
        if d.system() != Some(2) {
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
        self.st.ldtr = s;
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
        let fits = d.system() == Some(9) || (d.system() == Some(1) && !self.lma());
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
        self.write_sys(d.at + 5, byte)?;
        let mut s = d.segment(selector);
        s.base |= high;
        self.st.tr = s;
        Ok(())
    }

    /// The shadow after a load of SS by MOV or POP; the second of two in a row gives none.
    pub(crate) fn shadow_ss(&mut self) {
        self.st.events.mov_ss_shadow = true;
        self.leave = true;
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
        self.cpl = cpl;
        self.rip = rip;
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
        self.cpl = cpl;
        self.put_segment(seg::CS, cs);
    }

    /// A null SS with the given privilege level, as interrupts in 64-bit mode make it.
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

    /// The selector, as LAR, LSL, VERR and VERW look at it: None where they clear ZF.
    pub(crate) fn inspect(&mut self, selector: u16) -> Result<Option<Descriptor>, Fault> {
        let Some(d) = self.descriptor(selector)? else {
            return Ok(None);
        };
        let rpl = (selector & 3) as u8;
        let private = !d.conforming() && (self.cpl > d.dpl() || rpl > d.dpl());
        Ok((!private).then_some(d))
    }
}
