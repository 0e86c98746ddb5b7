//! Hardware task switches. SDM Vol. 3A, "Task Management".
//!
//! The new task's registers are loaded as far as the architecture allows before a fault of the
//! switch itself; faults of the segment loads are those of the new task.

#![expect(
    clippy::cast_possible_truncation,
    reason = "TSS fields are cut to their width"
)]

use crate::core::{CR0_PG, CR0_TS, CR4_PAE, Core, Fault, SS, TS};
use crate::debug::BT;
use crate::flags::{NT, RF};
use crate::seg::{Descriptor, code_of, gp, np};
use hindsight_cpu::debug::DebugRegisters;
use hindsight_cpu::state::{Segment, seg};

/// What switches tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Jump,
    /// CALL, or an event: the old task is linked.
    Nested,
    Return,
}

/// The registers in a TSS.
struct Image {
    cr3: u32,
    eip: u32,
    eflags: u32,
    gpr: [u32; 8],
    /// ES, CS, SS, DS, FS, GS.
    seg: [u16; 6],
    ldt: u16,
    trap: bool,
}

fn ts(selector: u16) -> Fault {
    Fault::Code(TS, code_of(selector))
}

impl Core {
    /// An event through a task gate.
    pub(crate) fn task_gate_event(
        &mut self,
        selector: u16,
        code: Option<u32>,
        rf: bool,
    ) -> Result<(), Fault> {
        if rf {
            self.fl |= RF;
        }
        self.switch(selector, Source::Nested)?;
        if let Some(code) = code {
            let size = if self.st.tr.access & 8 != 0 { 4 } else { 2 };
            self.push(size, code.into())?;
        }
        Ok(())
    }

    /// IRET with NT set.
    pub(crate) fn task_return(&mut self) -> Result<(), Fault> {
        let link: u16 = self.read_sys(self.st.tr.base & 0xffff_ffff)?;
        self.switch(link, Source::Return)
    }

    /// A far JMP or CALL to a TSS or task gate.
    pub(crate) fn task_jump(&mut self, selector: u16, call: bool) -> Result<(), Fault> {
        self.switch(selector, if call { Source::Nested } else { Source::Jump })
    }

    fn switch(&mut self, selector: u16, source: Source) -> Result<(), Fault> {
        let bad = if source == Source::Return {
            ts(selector)
        } else {
            gp(selector)
        };
        if selector & 4 != 0 {
            return Err(bad);
        }
        let Some(new) = self.descriptor(selector)? else {
            return Err(bad);
        };
        let wide = match (new.system(), source) {
            (Some(3 | 11), Source::Return) | (Some(1 | 9), Source::Jump | Source::Nested) => {
                new.access() & 8 != 0
            }
            _ => return Err(bad),
        };
        if !new.present() {
            return Err(np(selector));
        }
        if new.limit() < if wide { 0x67 } else { 0x2b } {
            return Err(ts(selector));
        }
        let image = self.read_image(new.base(), wide)?;
        self.save_image(source)?;
        if source != Source::Nested {
            self.set_busy(self.st.tr.selector, false)?;
        }
        let old = self.st.tr.selector;
        if source == Source::Nested {
            self.write_sys(new.base() & 0xffff_ffff, old)?;
        }
        if source != Source::Return {
            self.set_busy(selector, true)?;
        }
        self.enter_task(selector, new, &image, source, wide)
    }

    fn set_busy(&mut self, selector: u16, on: bool) -> Result<(), Fault> {
        let Some(d) = self.descriptor(selector)? else {
            return Ok(());
        };
        let byte = (d.raw >> 40) as u8;
        self.write_sys(d.at + 5, if on { byte | 2 } else { byte & !2 })
    }

    fn field(&mut self, base: u64, offset: u64, wide: bool) -> Result<u32, Fault> {
        let at = base.wrapping_add(offset) & 0xffff_ffff;
        Ok(if wide {
            self.read_sys::<u32>(at)?
        } else {
            self.read_sys::<u16>(at)?.into()
        })
    }

    fn read_image(&mut self, base: u64, wide: bool) -> Result<Image, Fault> {
        // In a 16-bit TSS the fields are half as wide, and FS, GS, CR3 and T are missing.
        let (first, step) = if wide { (0x20, 4) } else { (0x0e, 2) };
        let mut at = first;
        let mut words = [0_u32; 10];
        for word in &mut words {
            *word = self.field(base, at, wide)?;
            at += step;
        }
        let mut selectors = [0_u16; 6];
        for slot in &mut selectors[..if wide { 6 } else { 4 }] {
            *slot = self.field(base, at, wide)? as u16;
            at += step;
        }
        let ldt = self.field(base, at, wide)? as u16;
        let [eip, eflags, gpr @ ..] = words;
        Ok(Image {
            cr3: if wide {
                self.field(base, 0x1c, true)?
            } else {
                0
            },
            eip,
            eflags,
            gpr,
            seg: selectors,
            ldt,
            trap: wide && self.field(base, 0x64, true)? & 1 != 0,
        })
    }

    fn save_image(&mut self, source: Source) -> Result<(), Fault> {
        let tr = self.st.tr;
        let wide = tr.access & 8 != 0;
        let mut flags = self.rflags();
        if source == Source::Return {
            flags &= !NT;
        }
        let mut values = vec![self.rip, flags];
        values.extend_from_slice(&self.regs[..8]);
        let selectors = &self.st.seg[..if wide { 6 } else { 4 }];
        values.extend(selectors.iter().map(|s| u64::from(s.selector)));
        let (mut at, step) = if wide { (0x20, 4) } else { (0x0e, 2) };
        for v in values {
            let lin = tr.base.wrapping_add(at) & 0xffff_ffff;
            if wide {
                self.write_sys(lin, v as u32)?;
            } else {
                self.write_sys(lin, v as u16)?;
            }
            at += step;
        }
        Ok(())
    }

    fn enter_task(
        &mut self,
        selector: u16,
        new: Descriptor,
        image: &Image,
        source: Source,
        wide: bool,
    ) -> Result<(), Fault> {
        self.st.cr0 |= CR0_TS;
        let mut tr = new.segment(selector);
        tr.access |= 2;
        self.st.tr = tr;
        if wide && self.cr0(CR0_PG) {
            if self.cr4(CR4_PAE) {
                self.load_pdptrs(image.cr3.into())?;
            }
            self.st.cr3 = image.cr3.into();
            self.flush_local_tlb();
        }
        let mut flags = u64::from(image.eflags);
        if source == Source::Nested {
            flags |= NT;
        }
        self.set_rflags(flags);
        self.no_step = true;
        for (reg, v) in self.regs.iter_mut().zip(image.gpr) {
            *reg = v.into();
        }
        self.rip = image.eip.into();
        self.change_debug(DebugRegisters::switch_task);
        self.update_debug();
        self.load_task_segments(image)?;
        if image.trap {
            self.trap |= BT;
            self.trap_pending = true;
        }
        Ok(())
    }

    fn load_task_segments(&mut self, image: &Image) -> Result<(), Fault> {
        // Until they are loaded, all segments are unusable.
        self.st.ldtr = Segment {
            selector: image.ldt,
            unusable: true,
            ..Segment::default()
        };
        for (i, &selector) in image.seg.iter().enumerate() {
            self.st.seg[i] = Segment {
                selector,
                unusable: true,
                ..Segment::default()
            };
        }
        self.load_ldtr(image.ldt).map_err(|_| ts(image.ldt))?;
        if self.v86() {
            self.cpl = 3;
            for (i, &selector) in image.seg.iter().enumerate() {
                self.load_segment_real(i, selector);
            }
            return Ok(());
        }
        let selector = image.seg[seg::CS];
        let cpl = (selector & 3) as u8;
        self.cpl = cpl;
        let Some(mut cs) = self.descriptor(selector)? else {
            return Err(ts(selector));
        };
        let dpl_ok = if cs.conforming() {
            cs.dpl() <= cpl
        } else {
            cs.dpl() == cpl
        };
        if !cs.is_code() || !dpl_ok {
            return Err(ts(selector));
        }
        if !cs.present() {
            return Err(np(selector));
        }
        self.prot = true;
        let rename = |fault: Fault, selector: u16| match fault {
            Fault::Code(SS, code) => Fault::Code(SS, code),
            Fault::Code(crate::core::NP, code) => Fault::Code(crate::core::NP, code),
            Fault::Page(..) => fault,
            _ => ts(selector),
        };
        let ss = image.seg[seg::SS];
        self.load_segment(seg::SS, ss).map_err(|f| rename(f, ss))?;
        for i in [seg::ES, seg::DS, seg::FS, seg::GS] {
            let selector = image.seg[i];
            self.load_segment(i, selector)
                .map_err(|f| rename(f, selector))?;
        }
        self.mark_accessed(&mut cs)?;
        let rip = self.rip;
        self.set_cs(cs.segment(selector), cpl, rip);
        self.check_rip(rip, &cs.segment(selector))
    }
}
