//! Hardware task switches. SDM Vol. 3A, "Task Management".
//!
//! All accesses to both TSSs and their descriptors are checked before anything is written. After
//! that, faults belong to the new task, before its first instruction: their frames hold its EIP and
//! ESP.

#![expect(
    clippy::cast_possible_truncation,
    reason = "TSS fields are cut to their width"
)]

use crate::core::Core;
use crate::descriptor::{Descriptor, gp, np, ts};
use crate::fault::Fault;
use hindsight_cpu::debug::DebugRegisters;
use hindsight_cpu::state::{Segment, seg};
use hindsight_regs::cr::{Cr0, Cr4};
use hindsight_regs::dr::Dr6;
use hindsight_regs::rflags::Rflags;
use hindsight_regs::vector::Vector;

/// The cause of a task switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SwitchKind {
    Jump,
    /// CALL or an event: the new TSS is linked to the old task.
    Nested,
    Return,
}

/// The registers that a TSS holds.
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

impl Core {
    /// Delivers an event through a task gate.
    pub(crate) fn task_gate_event(
        &mut self,
        selector: u16,
        code: Option<u32>,
        rf: bool,
    ) -> Result<(), Fault> {
        if rf {
            self.regs.set_flag(Rflags::RF, true);
        }
        self.switch(selector, SwitchKind::Nested)?;
        if let Some(code) = code {
            let size = if self.is_tss_wide() { 4 } else { 2 };
            let pushed = self.push(size, code.into());
            self.exit.switched_task = pushed.is_err();
            pushed?;
        }
        Ok(())
    }

    /// Executes IRET with NT set.
    pub(crate) fn task_return(&mut self) -> Result<(), Fault> {
        if self.state.tr.limit < 1 {
            return Err(ts(self.state.tr.selector));
        }
        let link: u16 = self.read_sys(self.state.tr.base & 0xffff_ffff)?;
        self.switch(link, SwitchKind::Return)
    }

    /// Executes a far JMP or CALL to a TSS or task gate.
    pub(crate) fn task_jump(&mut self, selector: u16, call: bool) -> Result<(), Fault> {
        self.switch(
            selector,
            if call {
                SwitchKind::Nested
            } else {
                SwitchKind::Jump
            },
        )
    }

    fn switch(&mut self, selector: u16, kind: SwitchKind) -> Result<(), Fault> {
        let bad = if kind == SwitchKind::Return {
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
        let wide = match (new.system_type(), kind) {
            (Some(3 | 11), SwitchKind::Return)
            | (Some(1 | 9), SwitchKind::Jump | SwitchKind::Nested) => new.access() & 8 != 0,
            _ => return Err(bad),
        };
        if !new.present() {
            return Err(np(selector));
        }
        if new.limit() < if wide { 0x67 } else { 0x2b } {
            return Err(ts(selector));
        }
        let old = self.state.tr.selector;
        let last = if self.is_tss_wide() { 0x5f } else { 0x29 };
        if self.state.tr.limit < last {
            return Err(ts(old));
        }
        let image = self.read_image(new.base(), wide)?;
        self.probe_switch(new, kind)?;
        self.save_image(kind)?;
        if kind != SwitchKind::Nested {
            self.set_busy(old, false)?;
        }
        if kind == SwitchKind::Nested {
            self.write_sys(new.base() & 0xffff_ffff, old)?;
        }
        if kind != SwitchKind::Return {
            self.set_busy(selector, true)?;
        }
        self.exit.switched_task = true;
        self.enter_task(selector, new, &image, kind, wide)?;
        self.exit.switched_task = false;
        Ok(())
    }

    /// Whether the TSS of the current task is a 32-bit one.
    fn is_tss_wide(&self) -> bool {
        self.state.tr.access & 8 != 0
    }

    /// Raises the page faults that the writes of the switch would raise.
    fn probe_switch(&mut self, new: Descriptor, kind: SwitchKind) -> Result<(), Fault> {
        let (first, len) = if self.is_tss_wide() {
            (0x20, 0x40)
        } else {
            (0x0e, 0x1c)
        };
        let old = self.state.tr;
        self.probe_write_as(old.base.wrapping_add(first) & 0xffff_ffff, len, 0)?;
        if kind == SwitchKind::Nested {
            self.probe_write_as(new.base() & 0xffff_ffff, 2, 0)?;
        } else if let Some(d) = self.descriptor(old.selector)? {
            self.probe_write_as(d.address + 5, 1, 0)?;
        }
        if kind != SwitchKind::Return {
            self.probe_write_as(new.address + 5, 1, 0)?;
        }
        Ok(())
    }

    fn set_busy(&mut self, selector: u16, on: bool) -> Result<(), Fault> {
        let Some(d) = self.descriptor(selector)? else {
            return Ok(());
        };
        let byte = (d.raw >> 40) as u8;
        self.write_sys(d.address + 5, if on { byte | 2 } else { byte & !2 })
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

    fn save_image(&mut self, kind: SwitchKind) -> Result<(), Fault> {
        let tr = self.state.tr;
        let wide = self.is_tss_wide();
        let mut flags = self.regs.rflags();
        if kind == SwitchKind::Return {
            flags &= !Rflags::NT;
        }
        let mut values = vec![self.regs.rip, flags.bits()];
        values.extend_from_slice(&self.regs.general()[..8]);
        let selectors = &self.state.seg[..if wide { 6 } else { 4 }];
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
        kind: SwitchKind,
        wide: bool,
    ) -> Result<(), Fault> {
        self.state.cr0 |= Cr0::TS.bits();
        let mut tr = new.segment(selector);
        tr.access |= 2;
        self.state.tr = tr;
        let mut flags = Rflags::from_bits_truncate(image.eflags.into());
        if kind == SwitchKind::Nested {
            flags |= Rflags::NT;
        }
        self.regs.set_rflags(flags);
        self.debug.suppress_step = true;
        for (reg, v) in self.regs.general_mut().iter_mut().zip(image.gpr) {
            *reg = v.into();
        }
        self.regs.rip = image.eip.into();
        if wide && self.cr0(Cr0::PG) {
            if self.cr4(Cr4::PAE) {
                self.load_pdptrs(image.cr3.into())?;
            }
            self.state.cr3 = image.cr3.into();
            self.load_context(false);
        }
        self.change_debug_registers(DebugRegisters::switch_task);
        self.update_debug();
        self.load_task_segments(image)?;
        if image.trap {
            self.debug.raise_trap(Dr6::BT.bits());
        }
        Ok(())
    }

    fn load_task_segments(&mut self, image: &Image) -> Result<(), Fault> {
        // Until they are loaded, all segments are unusable.
        self.state.ldtr = Segment {
            selector: image.ldt,
            unusable: true,
            ..Segment::default()
        };
        for (i, &selector) in image.seg.iter().enumerate() {
            self.state.seg[i] = Segment {
                selector,
                unusable: true,
                ..Segment::default()
            };
        }
        self.load_ldtr(image.ldt).map_err(|fault| match fault {
            Fault::Page(..) => fault,
            _ => ts(image.ldt),
        })?;
        if self.regs.v86() {
            self.mode.set_cpl(3);
            for (i, &selector) in image.seg.iter().enumerate() {
                self.load_segment_real(i, selector);
            }
            return Ok(());
        }
        let selector = image.seg[seg::CS];
        let cpl = (selector & 3) as u8;
        self.mode.set_cpl(cpl);
        let Some(mut cs) = self.descriptor(selector)? else {
            return Err(ts(selector));
        };
        let dpl_ok = if cs.is_conforming() {
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
        self.mode.set_protected();
        let rename = |fault: Fault, selector: u16| match fault {
            Fault::WithCode(Vector::SS, code) => Fault::WithCode(Vector::SS, code),
            Fault::WithCode(Vector::NP, code) => Fault::WithCode(Vector::NP, code),
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
        let rip = self.regs.rip;
        self.set_cs(cs.segment(selector), cpl, rip);
        self.check_rip(rip, &cs.segment(selector))
    }
}
