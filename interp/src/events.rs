//! Delivery of exceptions, interrupts and software interrupts.
//! SDM Vol. 3A, "Interrupt and Exception Handling".

#![expect(
    clippy::cast_possible_truncation,
    reason = "stack images are cut to their width"
)]

use crate::core::Core;
use crate::fault::{Fault, SoftwareInterruptKind};
use crate::iret::NewStack;
use crate::platform::BranchClass;
use crate::seg::{Descriptor, canonical, code_of, gp};
use hindsight_cpu::state::{Segment, seg};
use hindsight_regs::cr::Cr0;
use hindsight_regs::rflags::Rflags;
use hindsight_regs::vector::Vector;

/// What is delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// A fault or trap of the processor.
    Exception,
    /// A maskable interrupt or NMI.
    External,
    /// INT n, INT3, INTO: the gate's DPL counts.
    Software,
    /// INT1: like software, but the DPL does not count.
    Icebp,
}

/// An event under delivery.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) vector: Vector,
    pub(crate) cause: Cause,
    pub(crate) code: Option<u32>,
    /// RF in the pushed image.
    pub(crate) rf: bool,
}

/// A triple fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shutdown;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Benign,
    Contributory,
    Page,
    Double,
}

fn class(vector: Vector) -> Class {
    match vector {
        Vector::DE | Vector::TS | Vector::NP | Vector::SS | Vector::GP => Class::Contributory,
        Vector::PF => Class::Page,
        Vector::DF => Class::Double,
        _ => Class::Benign,
    }
}

impl Core {
    /// Delivers a fault of the instruction at RIP.
    pub(crate) fn deliver_fault(&mut self, fault: Fault) -> Result<(), Shutdown> {
        let (vector, code) = fault.exception();
        if let Fault::Page(_, lin) = fault {
            self.st.cr2 = lin;
        }
        if let Fault::Debug(bits) = fault {
            self.debug_bits(bits);
        }
        let rf = !matches!(vector, Vector::DF);
        self.deliver(Event {
            vector,
            cause: Cause::Exception,
            code,
            rf,
        })
    }

    /// Delivers an event; faults on the way become what the tables of the manual say.
    pub(crate) fn deliver(&mut self, event: Event) -> Result<(), Shutdown> {
        if self.stop_before(&event) {
            return Ok(());
        }
        let mut event = event;
        if event.vector == Vector::DB
            && event.cause != Cause::Software
            && event.cause != Cause::External
        {
            self.enter_debug();
            self.tell_debug_exception();
        }
        loop {
            let from = match event.cause {
                Cause::Software | Cause::Icebp => self.soft_rip,
                Cause::Exception | Cause::External => self.rip,
            };
            let place = (from, self.cs_base(), self.cpl);
            let fault = match self.try_deliver(&event) {
                Ok(()) => {
                    self.note_delivery(&event, place);
                    return Ok(());
                }
                Err(fault) => fault,
            };
            if matches!(event.cause, Cause::Software | Cause::Icebp) {
                // The instruction itself faults: it is not retired.
                self.rip = self.soft_rip;
                self.budget += 1;
                self.cache.mix.ended(self.soft_op, false);
            }
            let (vector, mut code) = fault.exception();
            if let Fault::Page(_, lin) = fault {
                self.st.cr2 = lin;
            }
            let external = event.cause != Cause::Software;
            if external && matches!(vector, Vector::TS | Vector::NP | Vector::SS | Vector::GP) {
                code = code.map(|c| c | 1);
            }
            // An interrupt or a software interrupt counts as benign whatever its vector.
            let first = if event.cause == Cause::Exception {
                class(event.vector)
            } else {
                Class::Benign
            };
            let second = class(vector);
            let double = match (first, second) {
                (Class::Double, Class::Contributory | Class::Page) => return Err(Shutdown),
                (Class::Contributory, Class::Contributory) => true,
                (Class::Page, Class::Contributory | Class::Page) => true,
                _ => false,
            };
            event = if double {
                Event {
                    vector: Vector::DF,
                    cause: Cause::Exception,
                    code: Some(0),
                    rf: false,
                }
            } else {
                Event {
                    vector,
                    cause: Cause::Exception,
                    code,
                    rf: true,
                }
            };
        }
    }

    /// The debugger sees this exception first: it waits in the state.
    fn stop_before(&mut self, event: &Event) -> bool {
        if event.cause != Cause::Exception {
            return false;
        }
        let payload = match event.vector {
            Vector::PF => Some(self.st.cr2),
            Vector::DB => Some(self.st.dr6 & 0xf),
            _ => None,
        };
        self.stop_at_exception(event.vector.0, event.code, payload)
    }

    fn note_delivery(&mut self, event: &Event, place: (u64, u64, u8)) {
        self.stops.deliveries += 1;
        let software = matches!(event.cause, Cause::Software | Cause::Icebp);
        // Breakpoints that the frame met (rule OP-08).
        let hits = std::mem::take(&mut self.hits);
        if software && hits != 0 {
            self.trap |= hits;
            self.trap_pending = true;
        }
        if event.vector == Vector::DF || software {
            self.stop_after_delivery(event.vector.0, event.code);
        }
        self.st.events.mov_ss_shadow = false;
        self.st.events.sti_shadow = false;
        let class = match event.cause {
            Cause::Exception if event.vector == Vector::DB => BranchClass::Debug,
            Cause::Icebp => BranchClass::Debug,
            Cause::Exception => BranchClass::Exception,
            Cause::External => BranchClass::Interrupt,
            Cause::Software => BranchClass::SoftwareInterrupt,
        };
        self.note_far(place, self.rip, class);
    }

    fn try_deliver(&mut self, e: &Event) -> Result<(), Fault> {
        if !self.cr0(Cr0::PE) {
            return self.deliver_real(e.vector);
        }
        if self.lma() {
            self.deliver_long(e)
        } else {
            self.deliver_protected(e)
        }
    }

    fn image(&self, e: &Event) -> u64 {
        let flags = self.rflags();
        let image = if e.rf { flags | Rflags::RF } else { flags };
        image.bits()
    }

    /// Through the interrupt vector table.
    fn deliver_real(&mut self, vector: Vector) -> Result<(), Fault> {
        let at = u64::from(vector.0) * 4;
        if at + 3 > self.st.idtr.limit.into() {
            return Err(Fault::GP);
        }
        let base = self.st.idtr.base.wrapping_add(at) & 0xffff_ffff;
        let entry: u32 = self.read_sys(base)?;
        let old = self.regs[4];
        let (flags, cs, ip) = (self.rflags().bits(), self.cs().selector, self.rip);
        let pushed = self
            .push(2, flags & 0xffff)
            .and_then(|()| self.push(2, cs.into()))
            .and_then(|()| self.push(2, ip & 0xffff));
        if let Err(fault) = pushed {
            self.regs[4] = old;
            return Err(fault);
        }
        self.set_rflags(self.rflags() & !(Rflags::IF | Rflags::TF | Rflags::AC | Rflags::RF));
        self.load_segment_real(seg::CS, (entry >> 16) as u16);
        self.rip = (entry & 0xffff).into();
        Ok(())
    }

    /// Reads the gate; `wide` gates have 16 bytes.
    fn gate(&mut self, e: &Event, wide: bool) -> Result<(Descriptor, u64), Fault> {
        let size = if wide { 16 } else { 8 };
        let at = u64::from(e.vector.0) * size;
        let bad = Fault::WithCode(Vector::GP, u32::from(e.vector.0) * 8 + 2);
        if at + size - 1 > self.st.idtr.limit.into() {
            return Err(bad);
        }
        let at = self.wrap(self.st.idtr.base.wrapping_add(at));
        let gate = Descriptor {
            raw: self.read_sys(at)?,
            at,
        };
        let high = if wide {
            self.read_sys::<u32>(at + 8)?
        } else {
            0
        };
        let kind_ok = match gate.system() {
            Some(0xe | 0xf) => true,
            Some(5..=7) => !wide,
            _ => false,
        };
        if !kind_ok || (e.cause == Cause::Software && gate.dpl() < self.cpl) {
            return Err(bad);
        }
        if !gate.present() {
            return Err(Fault::WithCode(Vector::NP, u32::from(e.vector.0) * 8 + 2));
        }
        Ok((gate, u64::from(high) << 32))
    }

    /// The code segment of a gate; answers it and the privilege level of the handler.
    fn handler_cs(&mut self, selector: u16) -> Result<(Descriptor, u8), Fault> {
        if selector & 0xfffc == 0 {
            return Err(Fault::GP);
        }
        let d = self.need_descriptor(selector)?;
        if !d.is_code() || d.dpl() > self.cpl {
            return Err(gp(selector));
        }
        if self.lma() && (!d.long() || d.big()) {
            return Err(gp(selector));
        }
        if !d.present() {
            return Err(crate::seg::np(selector));
        }
        let cpl = if d.conforming() { self.cpl } else { d.dpl() };
        Ok((d, cpl))
    }

    fn deliver_long(&mut self, e: &Event) -> Result<(), Fault> {
        let (gate, high) = self.gate(e, true)?;
        let (selector, offset) = gate.gate();
        let rip = offset | high;
        let ist = gate.raw >> 32 & 7;
        let (mut cs, cpl) = self.handler_cs(selector)?;
        let inner = cpl < self.cpl;
        let mut sp = if ist != 0 {
            self.tss_pointer(0x24 + (ist - 1) * 8, 8)?
        } else if inner {
            self.tss_pointer(4 + u64::from(cpl) * 8, 8)?
        } else {
            self.regs[4]
        };
        if !canonical(rip) {
            return Err(Fault::GP);
        }
        sp &= !15;
        let mut frame = vec![
            self.st.seg[seg::SS].selector.into(),
            self.regs[4],
            self.image(e),
            self.cs().selector.into(),
            self.rip,
        ];
        frame.extend(e.code.map(u64::from));
        let top = sp;
        sp = top.wrapping_sub(frame.len() as u64 * 8);
        if !canonical(sp) || !canonical(top.wrapping_sub(1)) {
            return Err(Fault::SS);
        }
        let places = (1..).map(|n: u64| top.wrapping_sub(n * 8));
        // A fault names the first one in the order of the pushes, and nothing is written.
        for at in places.clone().take(frame.len()) {
            self.probe_write_as(at, 8, cpl)?;
        }
        for (at, v) in places.zip(frame) {
            self.write_as(at, v, cpl)?;
        }
        self.mark_accessed(&mut cs)?;
        self.cpl = cpl;
        self.clear_for_handler(gate, Rflags::TF | Rflags::NT | Rflags::RF | Rflags::VM);
        if inner {
            self.null_ss(cpl);
        }
        self.set_cs(cs.segment(selector), cpl, rip);
        self.regs[4] = sp;
        Ok(())
    }

    fn clear_for_handler(&mut self, gate: Descriptor, mut mask: Rflags) {
        if gate.access() & 1 == 0 {
            mask |= Rflags::IF;
        }
        self.set_rflags(self.rflags() & !mask);
        self.update_mode();
    }

    /// A stack pointer or selector in the current TSS.
    pub(crate) fn tss_pointer(&mut self, offset: u64, size: u64) -> Result<u64, Fault> {
        let tr = self.st.tr;
        if offset + size - 1 > tr.limit.into() {
            return Err(Fault::WithCode(Vector::TS, code_of(tr.selector)));
        }
        let at = self.wrap(tr.base.wrapping_add(offset));
        let v = match size {
            2 => self.read_sys::<u16>(at)?.into(),
            4 => self.read_sys::<u32>(at)?.into(),
            _ => self.read_sys::<u64>(at)?,
        };
        if size == 8 && !canonical(v) {
            return Err(Fault::SS);
        }
        Ok(v)
    }

    /// SS:ESP for an inner privilege level from the TSS, SS checked. Whatever else can fault comes before
    /// [`Core::take_ss`].
    pub(crate) fn inner_stack(&mut self, cpl: u8) -> Result<(NewStack, u64), Fault> {
        let level = u64::from(cpl);
        let (sp, selector) = if self.st.tr.access & 8 != 0 {
            (
                self.tss_pointer(4 + level * 8, 4)?,
                self.tss_pointer(8 + level * 8, 2)?,
            )
        } else {
            (
                self.tss_pointer(2 + level * 4, 2)?,
                self.tss_pointer(4 + level * 4, 2)?,
            )
        };
        let selector = selector as u16;
        let bad = Fault::WithCode(Vector::TS, code_of(selector));
        let Some(d) = self.descriptor(selector)? else {
            return Err(bad);
        };
        if selector & 3 != cpl.into() || d.dpl() != cpl || !d.writable() {
            return Err(bad);
        }
        if !d.present() {
            return Err(Fault::WithCode(Vector::SS, code_of(selector)));
        }
        Ok((NewStack::Described(d, selector), sp))
    }

    fn deliver_protected(&mut self, e: &Event) -> Result<(), Fault> {
        let (gate, _) = self.gate(e, false)?;
        let (selector, mut rip) = gate.gate();
        if gate.system() == Some(5) {
            return self.task_gate_event(selector, e.code, e.rf);
        }
        let wide = gate.access() & 8 != 0;
        let size: u8 = if wide { 4 } else { 2 };
        if !wide {
            rip &= 0xffff;
        }
        let v86 = self.v86();
        let (mut cs, cpl) = self.handler_cs(selector)?;
        if v86 && cpl != 0 {
            return Err(gp(selector));
        }
        let image = self.image(e);
        let mut frame: Vec<u64> = Vec::with_capacity(10);
        let old = (self.st.seg[seg::SS], self.regs[4]);
        let mut target = None;
        if cpl < self.cpl {
            let (ss, sp) = self.inner_stack(cpl)?;
            if v86 {
                for i in [seg::GS, seg::FS, seg::DS, seg::ES] {
                    frame.push(self.st.seg[i].selector.into());
                }
            }
            frame.push(old.0.selector.into());
            frame.push(old.1);
            target = Some((ss, sp));
        }
        frame.extend([image, self.cs().selector.into(), self.rip]);
        frame.extend(e.code.map(u64::from));
        self.check_rip(rip, &cs.segment(selector))?;
        let (ss, sp) = target.map_or((old.0, self.sp()), |(ss, sp)| (ss.segment(), sp));
        let sp = self.write_frame(&ss, sp, size, &frame, cpl)?;
        let new_ss = match target {
            Some((ss, _)) => Some(self.take_ss(ss)?),
            None => None,
        };
        self.mark_accessed(&mut cs)?;
        self.cpl = cpl;
        self.clear_for_handler(gate, Rflags::TF | Rflags::NT | Rflags::RF | Rflags::VM);
        if let Some(ss) = new_ss {
            if v86 {
                for i in [seg::GS, seg::FS, seg::DS, seg::ES] {
                    self.put_segment(
                        i,
                        Segment {
                            unusable: true,
                            ..Segment::default()
                        },
                    );
                }
            }
            self.put_segment(seg::SS, ss);
        }
        self.set_cs(cs.segment(selector), cpl, rip);
        self.set_sp(sp);
        Ok(())
    }

    /// Writes values downwards from `sp` in a stack segment; answers the new stack pointer.
    pub(crate) fn write_frame(
        &mut self,
        ss: &Segment,
        sp: u64,
        size: u8,
        frame: &[u64],
        cpl: u8,
    ) -> Result<u64, Fault> {
        let mask = if ss.default_big() {
            0xffff_ffff
        } else {
            0xffff
        };
        let mut at = sp & mask;
        let bad = Fault::WithCode(
            Vector::SS,
            if cpl < self.cpl {
                code_of(ss.selector)
            } else {
                0
            },
        );
        let down = ss.access & 4 != 0;
        let mut places = Vec::with_capacity(frame.len());
        for &v in frame {
            at = at.wrapping_sub(size.into()) & mask;
            let last = at + u64::from(size) - 1;
            let limit = u64::from(ss.limit);
            let ok = if down {
                at > limit && last <= mask
            } else {
                last <= limit
            };
            if !ok {
                return Err(bad);
            }
            let lin = ss.base.wrapping_add(at) & 0xffff_ffff;
            self.probe_write_as(lin, size.into(), cpl)?;
            places.push((lin, v));
        }
        for (lin, v) in places {
            if size == 4 {
                self.write_as(lin, v as u32, cpl)?;
            } else {
                self.write_as(lin, v as u16, cpl)?;
            }
        }
        Ok(at)
    }

    /// Vectors of software interrupts that are exceptions by name.
    pub(crate) fn soft_event(vector: Vector, kind: SoftwareInterruptKind) -> Event {
        let cause = match kind {
            SoftwareInterruptKind::Int1 => Cause::Icebp,
            _ => Cause::Software,
        };
        debug_assert!(
            kind != SoftwareInterruptKind::Trap || matches!(vector, Vector::BP | Vector::OF)
        );
        Event {
            vector,
            cause,
            code: None,
            rf: false,
        }
    }
}
