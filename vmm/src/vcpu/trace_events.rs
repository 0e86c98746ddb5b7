//! Passes what a vCPU does to its tracer, for `hindsight trace`.

use hindsight_cpu::branch::Branch;
use hindsight_cpu::pmu::Ring;
use hindsight_cpu::uarch::{CacheAccess, InstructionAccesses, MemoryAccess};
use hindsight_interp::{Delivery, DeliveryKind, SystemEvent};
use hindsight_regs::vector::Vector;
use hindsight_trace::{DeviceAccess, Event, EventKinds, ProcessEvent};

use super::model::VcpuModel;

/// Up to eight bytes as a number.
fn number(data: &[u8]) -> u64 {
    let bytes = data.iter().take(8).rev();
    bytes.fold(0, |value, &byte| value << 8 | u64::from(byte))
}

impl VcpuModel {
    /// The kinds of events that the trace needs; none without a trace.
    pub(crate) fn traced_kinds(&self) -> EventKinds {
        let tracer = self.tracer.as_ref();
        tracer.map_or(EventKinds::empty(), |tracer| tracer.kinds())
    }

    /// Traces an event, if events of its kind are traced.
    pub(crate) fn trace(&mut self, kind: EventKinds, event: Event) {
        if let Some(tracer) = &mut self.tracer
            && tracer.kinds().contains(kind)
        {
            let ticks = self.board.time.clock.now();
            tracer.event(self.pmu_totals.instructions(), ticks, event);
        }
    }

    /// Adds an event of the guest's kernel to the trace.
    pub(crate) fn trace_process(&mut self, event: ProcessEvent) {
        if let Some(tracer) = &mut self.tracer {
            let ticks = self.board.time.clock.now();
            tracer.process(self.pmu_totals.instructions(), ticks, event);
        }
    }

    /// Traces branches. All but the first have their source in a segment with this base.
    pub(crate) fn trace_branches(&mut self, cs_base: u64, branches: &[Branch]) {
        if let Some(tracer) = &mut self.tracer
            && tracer.kinds().needs_branches()
        {
            let ticks = self.board.time.clock.now();
            let retired = self.pmu_totals.instructions();
            tracer.branches(cs_base, branches, retired, ticks);
        }
    }

    /// Counts branches, if they are counted for the run.
    pub(crate) fn count_branches(&mut self, cs_base: u64, branches: &[Branch]) {
        if let Some(counter) = &mut self.counter {
            counter.branches(cs_base, branches);
        }
    }

    /// Counts the accesses of an instruction, if they are counted for the run.
    pub(crate) fn count_accesses(&mut self, ring: Ring, accesses: &InstructionAccesses<'_>) {
        if let Some(counter) = &mut self.counter
            && counter.counts_accesses()
        {
            counter.accesses(ring, accesses);
        }
    }

    /// Counts an access of a block for `hindsight stat`.
    pub(crate) fn count_line_access(&mut self, ring: Ring, access: &MemoryAccess) {
        if let Some(counter) = &mut self.counter
            && counter.counts_accesses()
        {
            counter.line_access(ring, access);
        }
    }

    /// Counts the loads and stores of a block for `hindsight stat`.
    pub(crate) fn count_block_accesses(&mut self, ring: Ring, loads: u64, stores: u64) {
        if let Some(counter) = &mut self.counter
            && counter.counts_accesses()
        {
            counter.block_accesses(ring, loads, stores);
        }
    }

    /// Traces the loads and stores of an instruction.
    pub(crate) fn trace_accesses(&mut self, accesses: &InstructionAccesses<'_>) {
        if !self.traced_kinds().contains(EventKinds::ACCESSES) {
            return;
        }
        for access in accesses.accesses {
            let store = match access.kind {
                CacheAccess::Load => false,
                CacheAccess::Store => true,
                CacheAccess::Code => continue,
            };
            let event = Event::Access {
                address: access.linear,
                size: u16::try_from(access.len).unwrap_or(u16::MAX),
                store,
            };
            self.trace(EventKinds::ACCESSES, event);
        }
    }

    /// Traces the delivery of an exception or interrupt.
    pub(crate) fn trace_delivery(&mut self, delivery: &Delivery) {
        if delivery.outcome.is_err() {
            return;
        }
        let (kind, is_page_fault) = match delivery.kind {
            DeliveryKind::Exception => (EventKinds::EXCEPTIONS, delivery.vector == Vector::PF),
            DeliveryKind::Software => (EventKinds::EXCEPTIONS, false),
            DeliveryKind::External => (EventKinds::INTERRUPTS, false),
        };
        let event = Event::Delivery {
            vector: delivery.vector.0,
            error_code: delivery.code,
            address: is_page_fault.then_some(delivery.cr2),
        };
        self.trace(kind, event);
    }

    /// Traces an event that the interpreter reports.
    pub(crate) fn trace_system_event(&mut self, event: SystemEvent) {
        match event {
            SystemEvent::ControlRegister { number, value } => {
                self.trace(EventKinds::MODE, Event::ControlRegister { number, value });
            }
            SystemEvent::MsrRead { index, value } => self.trace_rdmsr(index, Some(value)),
            SystemEvent::MsrWritten { index, value } => self.trace_wrmsr(index, value, true),
        }
    }

    /// Traces RDMSR; `None` is #GP(0).
    pub(crate) fn trace_rdmsr(&mut self, index: u32, value: Option<u64>) {
        self.trace(EventKinds::MSR, Event::MsrRead { index, value });
    }

    /// Traces WRMSR.
    pub(crate) fn trace_wrmsr(&mut self, index: u32, value: u64, accepted: bool) {
        let event = Event::MsrWrite {
            index,
            value,
            accepted,
        };
        self.trace(EventKinds::MSR, event);
    }

    /// Traces an access to a port.
    pub(crate) fn trace_port(&mut self, port: u16, data: &[u8], write: bool) {
        self.trace_device(true, port.into(), data, write);
    }

    /// Traces an access to a guest-physical address that is not memory.
    pub(crate) fn trace_mmio(&mut self, address: u64, data: &[u8], write: bool) {
        self.trace_device(false, address, data, write);
    }

    fn trace_device(&mut self, port: bool, address: u64, data: &[u8], write: bool) {
        if let Some(counter) = &mut self.counter {
            counter.device_access();
            if let (true, true, Ok(port)) = (port, write, u16::try_from(address)) {
                counter.port_write(port, number(data));
            }
        }
        let access = DeviceAccess {
            port,
            write,
            address,
            size: u8::try_from(data.len()).unwrap_or(u8::MAX),
            value: number(data),
        };
        self.trace(EventKinds::IO, Event::Device(access));
    }
}
