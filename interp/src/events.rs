//! Delivery of exceptions, interrupts and software interrupts.
//!
//! SDM Vol. 3A, "Interrupt and Exception Handling".

#![expect(
    clippy::cast_possible_truncation,
    reason = "stack images are cut to their width"
)]

use crate::branches::BranchSource;
use crate::core::Core;
use crate::descriptor::{Descriptor, gp, np, selector_error, ts};
use crate::fault::{Fault, SoftwareInterruptKind};
use crate::iret::NewStack;
use crate::platform::{BranchClass, Delivery, DeliveryFault, DeliveryKind};
use crate::registers::Reg;
use crate::seg::canonical;
use hindsight_cpu::state::{PendingException, Segment, seg};
use hindsight_regs::cr::Cr0;
use hindsight_regs::rflags::Rflags;
use hindsight_regs::vector::Vector;

/// Where an event comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventSource {
    /// A fault or trap of the processor.
    Exception,
    /// A maskable interrupt or NMI.
    External,
    /// INT n, INT3 or INTO, for which the DPL of the gate is checked.
    Software,
    /// INT1, for which the DPL of the gate is not checked.
    Int1,
}

/// An exception or interrupt to be delivered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestEvent {
    pub(crate) vector: Vector,
    pub(crate) source: EventSource,
    pub(crate) code: Option<u32>,
    /// The value of RF in the RFLAGS image that is pushed.
    pub(crate) rf: bool,
}

impl GuestEvent {
    /// An exception without an error code whose RFLAGS image has RF clear.
    pub(crate) fn exception(vector: Vector) -> Self {
        Self {
            vector,
            source: EventSource::Exception,
            code: None,
            rf: false,
        }
    }

    /// Whether an instruction such as INT n raised it.
    fn is_software(&self) -> bool {
        matches!(self.source, EventSource::Software | EventSource::Int1)
    }
}

/// The processor shuts down: a triple fault, or RSM from an impossible state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shutdown;

/// Classes of exceptions for double faults. SDM Vol. 3A, "Interrupt 8—Double Fault Exception".
#[derive(Clone, Copy, PartialEq, Eq)]
enum DoubleFaultClass {
    Benign,
    Contributory,
    PageFault,
    DoubleFault,
}

impl DoubleFaultClass {
    fn of(vector: Vector) -> Self {
        match vector {
            Vector::DE | Vector::TS | Vector::NP | Vector::SS | Vector::GP => Self::Contributory,
            Vector::PF => Self::PageFault,
            Vector::DF => Self::DoubleFault,
            _ => Self::Benign,
        }
    }
}

/// Returns the exception that a `fault` in the delivery of `event` becomes.
fn next_event(event: &GuestEvent, fault: Fault) -> Result<GuestEvent, Shutdown> {
    use DoubleFaultClass::{Contributory, DoubleFault, PageFault};
    let (vector, mut code) = fault.exception();
    let external = event.source != EventSource::Software;
    let has_ext = matches!(
        vector,
        Vector::TS | Vector::NP | Vector::SS | Vector::GP | Vector::AC
    );
    if external && has_ext {
        code = code.map(|c| c | 1);
    }
    // An interrupt or a software interrupt is benign, whatever its vector.
    let first = if event.source == EventSource::Exception {
        DoubleFaultClass::of(event.vector)
    } else {
        DoubleFaultClass::Benign
    };
    match (first, DoubleFaultClass::of(vector)) {
        (DoubleFault, Contributory | PageFault) => Err(Shutdown),
        (Contributory, Contributory) | (PageFault, Contributory | PageFault) => Ok(GuestEvent {
            code: Some(0),
            ..GuestEvent::exception(Vector::DF)
        }),
        _ => Ok(GuestEvent {
            code,
            rf: true,
            ..GuestEvent::exception(vector)
        }),
    }
}

impl Core {
    /// Delivers a fault of the instruction at RIP.
    pub(crate) fn deliver_fault(&mut self, fault: Fault) -> Result<(), Shutdown> {
        let (vector, code) = fault.exception();
        debug_assert_eq!(code.is_some(), vector.has_error_code());
        if let Fault::Page(_, lin) = fault {
            self.state.cr2 = lin;
        }
        if let Fault::Debug(bits) = fault {
            self.report_debug_conditions(bits);
        }
        self.deliver(GuestEvent {
            code,
            rf: vector != Vector::DF,
            ..GuestEvent::exception(vector)
        })
    }

    /// Delivers an event.
    ///
    /// A fault during the delivery becomes a further exception, a double fault or a shutdown.
    pub(crate) fn deliver(&mut self, mut event: GuestEvent) -> Result<(), Shutdown> {
        if self.stops_before(&event) {
            return Ok(());
        }
        let is_db = event.vector == Vector::DB;
        if is_db && matches!(event.source, EventSource::Exception | EventSource::Int1) {
            self.enter_debug_handler();
            self.report_debug_exception();
        }
        let mut nested = false;
        loop {
            let from = if event.is_software() {
                self.exit.software_rip
            } else {
                self.regs.rip
            };
            let report = self.begin_report(&event, from, nested);
            let from = self.branch_source(from);
            let fault = match self.try_deliver(&event) {
                Ok(()) => {
                    let handler = (self.cs().selector, self.regs.rip);
                    self.platform().delivery(&Delivery {
                        outcome: Ok(handler),
                        ..report
                    });
                    self.finish_delivery(&event, from);
                    return Ok(());
                }
                Err(fault) => fault,
            };
            let switched = std::mem::take(&mut self.exit.switched_task);
            if event.is_software() && !switched {
                // The software interrupt itself faults, so it does not retire.
                self.regs.rip = self.exit.software_rip;
                self.progress.give_back(1);
                self.code.mix.ended_early(self.exit.software_op, false);
            }
            let mut cr2 = None;
            if let Fault::Page(_, lin) = fault {
                self.state.cr2 = lin;
                cr2 = Some(lin);
            }
            let (vector, code) = fault.exception();
            let outcome = Err(DeliveryFault { vector, code, cr2 });
            self.platform().delivery(&Delivery { outcome, ..report });
            event = next_event(&event, fault)?;
            nested = true;
        }
    }

    /// Begins the report of a delivery of an event that was raised at RIP `from`.
    fn begin_report(&self, event: &GuestEvent, from: u64, nested: bool) -> Delivery {
        let entry_size = match (self.cr0(Cr0::PE), self.lma()) {
            (false, _) => 4,
            (true, false) => 8,
            (true, true) => 16,
        };
        let offset = u64::from(event.vector.0) * u64::from(entry_size);
        let handler = (self.cs().selector, from);
        Delivery {
            kind: match event.source {
                EventSource::Exception => DeliveryKind::Exception,
                EventSource::External => DeliveryKind::External,
                EventSource::Software | EventSource::Int1 => DeliveryKind::Software,
            },
            vector: event.vector,
            code: event.code,
            at: handler,
            cpl: self.mode.cpl(),
            cr2: self.state.cr2,
            entry: self.wrap(self.state.idtr.base.wrapping_add(offset)),
            entry_size,
            idt_limit: self.state.idtr.limit.into(),
            nested,
            outcome: Ok(handler),
        }
    }

    /// Whether the debugger stops before an exception is delivered.
    ///
    /// If so, the exception stays pending.
    fn stops_before(&mut self, event: &GuestEvent) -> bool {
        if event.source != EventSource::Exception
            || !self.debug.stops.record_exception(event.vector, event.code)
        {
            return false;
        }
        let payload = match event.vector {
            Vector::PF => Some(self.state.cr2),
            Vector::DB => Some(self.state.dr6 & 0xf),
            _ => None,
        };
        self.state.events.exception = Some(PendingException {
            vector: event.vector.0,
            error_code: event.code,
            payload,
        });
        true
    }

    fn finish_delivery(&mut self, event: &GuestEvent, from: BranchSource) {
        self.debug.stops.count_delivery();
        // Breakpoints that writing the frame has met (rule OP-08).
        let hits = self.debug.take_hits();
        if event.is_software() && hits != 0 {
            self.debug.raise_trap(hits);
        }
        if event.vector == Vector::DF || event.is_software() {
            self.debug
                .stops
                .record_delivered_exception(event.vector, event.code);
        }
        self.state.events.mov_ss_shadow = false;
        self.state.events.sti_shadow = false;
        let class = match event.source {
            EventSource::Exception if event.vector == Vector::DB => BranchClass::Debug,
            EventSource::Int1 => BranchClass::Debug,
            EventSource::Exception => BranchClass::Exception,
            EventSource::External => BranchClass::Interrupt,
            EventSource::Software => BranchClass::SoftwareInterrupt,
        };
        self.record_far(from, self.regs.rip, class);
    }

    fn try_deliver(&mut self, e: &GuestEvent) -> Result<(), Fault> {
        if !self.cr0(Cr0::PE) {
            return self.deliver_real(e.vector);
        }
        if self.lma() {
            self.deliver_long(e)
        } else {
            self.deliver_protected(e)
        }
    }

    /// Returns the RFLAGS image to push.
    fn flags_image(&self, e: &GuestEvent) -> u64 {
        let flags = self.regs.rflags();
        let image = if e.rf { flags | Rflags::RF } else { flags };
        image.bits()
    }

    /// Delivers through the interrupt vector table of real-address mode.
    fn deliver_real(&mut self, vector: Vector) -> Result<(), Fault> {
        let at = u64::from(vector.0) * 4;
        if at + 3 > self.state.idtr.limit.into() {
            return Err(Fault::GP);
        }
        let base = self.state.idtr.base.wrapping_add(at) & 0xffff_ffff;
        let entry: u32 = self.read_sys(base)?;
        let (flags, cs, ip) = (self.regs.rflags(), self.cs().selector, self.regs.rip);
        self.push_all(2, &[flags.bits() & 0xffff, cs.into(), ip & 0xffff])?;
        let cleared = Rflags::IF | Rflags::TF | Rflags::AC | Rflags::RF;
        self.regs.set_rflags(flags & !cleared);
        self.load_segment_real(seg::CS, (entry >> 16) as u16);
        self.regs.rip = (entry & 0xffff).into();
        Ok(())
    }

    /// Reads the gate; `wide` gates have 16 bytes.
    fn gate(&mut self, e: &GuestEvent, wide: bool) -> Result<(Descriptor, u64), Fault> {
        let size = if wide { 16 } else { 8 };
        let at = u64::from(e.vector.0) * size;
        let bad = Fault::WithCode(Vector::GP, u32::from(e.vector.0) * 8 + 2);
        if at + size - 1 > self.state.idtr.limit.into() {
            return Err(bad);
        }
        let at = self.wrap(self.state.idtr.base.wrapping_add(at));
        let gate = Descriptor {
            raw: self.read_sys(at)?,
            address: at,
        };
        let high = if wide {
            self.read_sys::<u32>(at + 8)?
        } else {
            0
        };
        let kind_ok = match gate.system_type() {
            Some(0xe | 0xf) => true,
            Some(5..=7) => !wide,
            _ => false,
        };
        if !kind_ok || (e.source == EventSource::Software && gate.dpl() < self.mode.cpl()) {
            return Err(bad);
        }
        if !gate.present() {
            return Err(Fault::WithCode(Vector::NP, u32::from(e.vector.0) * 8 + 2));
        }
        Ok((gate, u64::from(high) << 32))
    }

    /// Checks the code segment of a gate.
    ///
    /// Returns it, and the privilege level of the handler.
    fn handler_cs(&mut self, selector: u16) -> Result<(Descriptor, u8), Fault> {
        if selector & 0xfffc == 0 {
            return Err(Fault::GP);
        }
        let d = self.need_descriptor(selector)?;
        if !d.is_code() || d.dpl() > self.mode.cpl() {
            return Err(gp(selector));
        }
        if self.lma() && (!d.is_long() || d.is_big()) {
            return Err(gp(selector));
        }
        if !d.present() {
            return Err(np(selector));
        }
        let cpl = if d.is_conforming() {
            self.mode.cpl()
        } else {
            d.dpl()
        };
        Ok((d, cpl))
    }

    fn deliver_long(&mut self, e: &GuestEvent) -> Result<(), Fault> {
        let (gate, high) = self.gate(e, true)?;
        let (selector, offset) = gate.gate_target();
        let rip = offset | high;
        let ist = gate.raw >> 32 & 7;
        let (mut cs, cpl) = self.handler_cs(selector)?;
        let inner = cpl < self.mode.cpl();
        let mut sp = if ist != 0 {
            self.tss_pointer(0x24 + (ist - 1) * 8, 8)?
        } else if inner {
            self.tss_pointer(4 + u64::from(cpl) * 8, 8)?
        } else {
            self.regs.get(Reg::Rsp)
        };
        if !canonical(rip) {
            return Err(Fault::GP);
        }
        sp &= !15;
        let mut frame = vec![
            self.state.seg[seg::SS].selector.into(),
            self.regs.get(Reg::Rsp),
            self.flags_image(e),
            self.cs().selector.into(),
            self.regs.rip,
        ];
        frame.extend(e.code.map(u64::from));
        let top = sp;
        sp = top.wrapping_sub(frame.len() as u64 * 8);
        if !canonical(sp) || !canonical(top.wrapping_sub(1)) {
            return Err(Fault::SS);
        }
        let places = (1..).map(|n: u64| top.wrapping_sub(n * 8));
        // A fault reports the first one in the order of the pushes, and nothing is written.
        for at in places.clone().take(frame.len()) {
            self.probe_write_as(at, 8, cpl)?;
        }
        for (at, v) in places.zip(frame) {
            self.write_as(at, v, cpl)?;
        }
        self.mark_accessed(&mut cs)?;
        self.mode.set_cpl(cpl);
        self.clear_for_handler(gate, Rflags::TF | Rflags::NT | Rflags::RF | Rflags::VM);
        if inner {
            self.null_ss(cpl);
        }
        self.set_cs(cs.segment(selector), cpl, rip);
        self.regs.set(Reg::Rsp, sp);
        Ok(())
    }

    fn clear_for_handler(&mut self, gate: Descriptor, mut mask: Rflags) {
        if gate.access() & 1 == 0 {
            mask |= Rflags::IF;
        }
        self.regs.set_rflags(self.regs.rflags() & !mask);
        self.update_mode();
    }

    /// Reads a stack pointer or selector from the current TSS.
    pub(crate) fn tss_pointer(&mut self, offset: u64, size: u64) -> Result<u64, Fault> {
        let tr = self.state.tr;
        if offset + size - 1 > tr.limit.into() {
            return Err(ts(tr.selector));
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

    /// Reads SS:ESP of an inner privilege level from the TSS, and checks SS.
    ///
    /// All other checks that can fault must come before [`Core::take_ss`].
    pub(crate) fn inner_stack(&mut self, cpl: u8) -> Result<(NewStack, u64), Fault> {
        let level = u64::from(cpl);
        let (sp, selector) = if self.state.tr.access & 8 != 0 {
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
        let bad = ts(selector);
        let Some(d) = self.descriptor(selector)? else {
            return Err(bad);
        };
        if selector & 3 != cpl.into() || d.dpl() != cpl || !d.is_writable() {
            return Err(bad);
        }
        if !d.present() {
            return Err(crate::descriptor::ss(selector));
        }
        Ok((NewStack::Described(d, selector), sp))
    }

    fn deliver_protected(&mut self, e: &GuestEvent) -> Result<(), Fault> {
        let (gate, _) = self.gate(e, false)?;
        let (selector, mut rip) = gate.gate_target();
        if gate.system_type() == Some(5) {
            return self.task_gate_event(selector, e.code, e.rf);
        }
        let wide = gate.access() & 8 != 0;
        let size: u8 = if wide { 4 } else { 2 };
        if !wide {
            rip &= 0xffff;
        }
        let v86 = self.regs.v86();
        let (mut cs, cpl) = self.handler_cs(selector)?;
        if v86 && cpl != 0 {
            return Err(gp(selector));
        }
        let image = self.flags_image(e);
        let mut frame: Vec<u64> = Vec::with_capacity(10);
        let old = (self.state.seg[seg::SS], self.regs.get(Reg::Rsp));
        let mut target = None;
        if cpl < self.mode.cpl() {
            let (ss, sp) = self.inner_stack(cpl)?;
            if v86 {
                for i in [seg::GS, seg::FS, seg::DS, seg::ES] {
                    frame.push(self.state.seg[i].selector.into());
                }
            }
            frame.push(old.0.selector.into());
            frame.push(old.1);
            target = Some((ss, sp));
        }
        frame.extend([image, self.cs().selector.into(), self.regs.rip]);
        frame.extend(e.code.map(u64::from));
        self.check_rip(rip, &cs.segment(selector))?;
        let (ss, sp) = target.map_or((old.0, self.sp()), |(ss, sp)| (ss.segment(), sp));
        let sp = self.write_frame(&ss, sp, size, &frame, cpl)?;
        let new_ss = match target {
            Some((ss, _)) => Some(self.take_ss(ss)?),
            None => None,
        };
        self.mark_accessed(&mut cs)?;
        self.mode.set_cpl(cpl);
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

    /// Writes values downwards from `sp` in a stack segment. Returns the new stack pointer.
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
            if cpl < self.mode.cpl() {
                selector_error(ss.selector)
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

    /// Returns the event of a software interrupt.
    pub(crate) fn software_event(vector: Vector, kind: SoftwareInterruptKind) -> GuestEvent {
        debug_assert!(
            kind != SoftwareInterruptKind::Trap || matches!(vector, Vector::BP | Vector::OF)
        );
        let source = match kind {
            SoftwareInterruptKind::Int1 => EventSource::Int1,
            SoftwareInterruptKind::IntN | SoftwareInterruptKind::Trap => EventSource::Software,
        };
        GuestEvent {
            source,
            ..GuestEvent::exception(vector)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_fault_becomes_a_double_fault_or_a_shutdown() {
        let page = Fault::Page(2, 0x1000);
        let np = Fault::WithCode(Vector::NP, 0x10);
        for (first, fault, expected) in [
            (Vector::UD, page, Ok((Vector::PF, Some(2)))),
            (Vector::GP, page, Ok((Vector::PF, Some(2)))),
            (Vector::GP, np, Ok((Vector::DF, Some(0)))),
            (Vector::PF, page, Ok((Vector::DF, Some(0)))),
            (Vector::PF, Fault::UD, Ok((Vector::UD, None))),
            (Vector::DF, page, Err(Shutdown)),
        ] {
            let next = next_event(&GuestEvent::exception(first), fault);
            assert_eq!(
                next.map(|e| (e.vector, e.code)),
                expected,
                "{first} {fault:?}"
            );
        }
    }

    #[test]
    fn external_event_sets_ext_in_the_error_code_of_its_fault() {
        let np = Fault::WithCode(Vector::NP, 0x10);
        for (source, fault, expected) in [
            (EventSource::External, np, 0x11),
            (EventSource::Software, np, 0x10),
            (EventSource::External, Fault::AC, 1),
            (EventSource::Software, Fault::AC, 0),
        ] {
            let event = GuestEvent {
                source,
                ..GuestEvent::exception(Vector(0x40))
            };
            let next = next_event(&event, fault);
            assert_eq!(next.map(|e| e.code), Ok(Some(expected)), "{fault:?}");
        }
    }
}
