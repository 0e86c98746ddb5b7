//! [`Interrupts`]: the interrupt controllers and timers of one machine, joined and shared.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::GpFault;
use super::ioapic::{Ioapic, IoapicState, PINS};
use super::lapic::{Acknowledged, Effect, Lapic, LapicFeatures, LapicState};
use super::message::{Delivery, Message};
use super::pic::{Pic, PicState};
use crate::clock::{Clock, Ticks};
use crate::pit::{Pit, PitState};
use crate::rtc::{Rtc, RtcConfig, RtcState};

/// The I/O ports that [`Interrupts::port_read`] and [`Interrupts::port_write`] answer.
pub const PORTS: [u16; 13] = [
    0x20, 0x21, 0x40, 0x41, 0x42, 0x43, 0x61, 0x70, 0x71, 0xa0, 0xa1, 0x4d0, 0x4d1,
];

/// The I/O APIC pin to which ISA line 0, the PIT, goes.
const TIMER_PIN: usize = 2;
/// The ISA line of the RTC.
const RTC_LINE: u32 = 8;

/// Told when there is something new. Called with no lock held, from whichever thread caused it.
pub trait Wake: Send + Sync {
    /// [`Interrupts::pending`] of this virtual processor has something new.
    fn wake(&self, vcpu: usize);

    /// [`Interrupts::next_event`] has become earlier than it was.
    fn timer_changed(&self) {}
}

/// What the fabric is built with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// What CPUID says about the local APICs.
    pub lapic: LapicFeatures,
    /// The real-time clock.
    pub rtc: RtcConfig,
}

/// What waits for a virtual processor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pending {
    /// A non-maskable interrupt.
    pub nmi: bool,
    /// A system-management interrupt.
    pub smi: bool,
    /// An INIT. It comes before a start-up IPI that waits with it.
    pub init: bool,
    /// A start-up IPI and its vector.
    pub sipi: Option<u8>,
    /// A maskable interrupt that the task priority lets through.
    pub interrupt: bool,
    /// A maskable interrupt that the task priority alone holds back. Nothing to take; but where the
    /// processor can lower CR8 unseen, it must be looked at now and then.
    pub held: bool,
}

impl Pending {
    /// Whether anything waits.
    pub fn any(self) -> bool {
        self != Self::default()
    }

    const NMI: u32 = 1 << 0;
    const SMI: u32 = 1 << 1;
    const INIT: u32 = 1 << 2;
    const INTERRUPT: u32 = 1 << 3;
    const SIPI: u32 = 1 << 4;
    const HELD: u32 = 1 << 5;

    fn from_word(word: u32) -> Self {
        Self {
            nmi: word & Self::NMI != 0,
            smi: word & Self::SMI != 0,
            init: word & Self::INIT != 0,
            interrupt: word & Self::INTERRUPT != 0,
            held: word & Self::HELD != 0,
            sipi: (word & Self::SIPI != 0).then_some(((word >> 8) & 0xff) as u8),
        }
    }

    fn word(lapic: &Lapic) -> u32 {
        let s = lapic.events();
        let bit = |set: bool, bit: u32| if set { bit } else { 0 };
        bit(s.nmi, Self::NMI)
            | bit(s.smi, Self::SMI)
            | bit(s.init, Self::INIT)
            | bit(lapic.has_interrupt(), Self::INTERRUPT)
            | bit(lapic.has_held_interrupt(), Self::HELD)
            | s.sipi
                .map_or(0, |vector| Self::SIPI | u32::from(vector) << 8)
    }
}

/// The state of the whole fabric, as plain data.
///
/// Counts in it are absolute: the clock must be set to the time of the save before it is restored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterruptsState {
    /// The local APICs, by virtual processor.
    pub lapics: Vec<LapicState>,
    /// The I/O APIC.
    pub ioapic: IoapicState,
    /// The 8259 pair.
    pub pic: PicState,
    /// The interval timer.
    pub pit: PitState,
    /// The real-time clock.
    pub rtc: RtcState,
    /// Levels that devices drive, by line.
    pub lines: u32,
}

/// A state that cannot be restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InterruptsError {
    /// The state is of a machine with another number of virtual processors.
    #[error("the state has {found} local APICs, the machine has {expected}")]
    LapicCount {
        /// Of the machine.
        expected: usize,
        /// In the state.
        found: usize,
    },
    /// A local APIC's state is impossible.
    #[error("the state of local APIC {0} is not valid")]
    Lapic(usize),
    /// The I/O APIC's state is impossible.
    #[error("the state of the I/O APIC is not valid")]
    Ioapic,
    /// The 8259 pair's state is impossible.
    #[error("the state of the 8259 pair is not valid")]
    Pic,
    /// The interval timer's state is impossible.
    #[error("the state of the interval timer is not valid")]
    Pit,
    /// The real-time clock's state is impossible.
    #[error("the state of the real-time clock is not valid")]
    Rtc,
    /// A line that does not exist is driven.
    #[error("the levels {0:#x} name lines that do not exist")]
    Lines(u32),
}

/// The chips. All that one does to another happens here, under the one lock.
#[derive(Debug)]
struct Chips {
    lapics: Vec<Lapic>,
    ioapic: Ioapic,
    pic: Pic,
    pit: Pit,
    rtc: Rtc,
    lines: u32,
}

/// Sends a message. Says whether any local APIC accepted it.
fn send(lapics: &mut [Lapic], message: &Message, sender: Option<usize>) -> bool {
    let Message {
        destination,
        delivery,
        vector,
        level,
    } = *message;
    let reached =
        |(index, lapic): (usize, &Lapic)| lapic.matches(destination, sender == Some(index));
    if delivery == Delivery::LowestPriority {
        let chosen = (0..lapics.len())
            .filter(|&i| reached((i, &lapics[i])) && lapics[i].is_candidate())
            .min_by_key(|&i| lapics[i].ppr());
        return chosen.is_some_and(|i| lapics[i].receive(delivery, vector, level));
    }
    let mut accepted = false;
    for (index, lapic) in lapics.iter_mut().enumerate() {
        if reached((index, lapic)) {
            accepted |= lapic.receive(delivery, vector, level);
        }
    }
    accepted
}

impl Chips {
    fn apply(&mut self, sender: usize, effect: Effect) {
        let Self { lapics, ioapic, .. } = self;
        match effect {
            Effect::None => {}
            Effect::Send(message) => {
                send(lapics, &message, Some(sender));
            }
            Effect::Eoi(vector) => ioapic.eoi(vector, &mut |m| send(lapics, m, None)),
        }
    }

    fn set_pin(&mut self, pin: usize, level: bool) {
        let Self { lapics, ioapic, .. } = self;
        ioapic.set_pin(pin, level, &mut |m| send(lapics, m, None));
    }

    /// Drives a line to what the device and the chip that share it ask for.
    fn update_line(&mut self, line: u32) {
        let own = match line {
            0 => self.pit.irq(),
            RTC_LINE => self.rtc.irq(),
            _ => false,
        };
        let level = own || self.lines & (1 << line) != 0;
        self.drive(line, level);
    }

    fn drive(&mut self, line: u32, level: bool) {
        if let Ok(pic_line @ 0..16) = u8::try_from(line) {
            self.pic.set_line(pic_line, level);
            self.update_pic_output();
        }
        match line {
            0 => self.set_pin(TIMER_PIN, level),
            // Line 2 is the cascade.
            2 => {}
            _ => self.set_pin(line as usize, level),
        }
    }

    /// The 8259 pair's output goes to every LINT0 and to pin 0 of the I/O APIC.
    fn update_pic_output(&mut self) {
        let level = self.pic.output();
        for lapic in &mut self.lapics {
            lapic.set_lint(0, level);
        }
        self.set_pin(0, level);
    }

    /// Brings the PIT and the RTC to a time.
    fn advance_timers(&mut self, now: Ticks) {
        if self.pit.advance(now) && self.lines & 1 == 0 {
            // It was low since it last rose, if only between two looks.
            self.drive(0, false);
            self.drive(0, true);
        }
        self.update_line(0);
        self.rtc.advance(now);
        self.update_line(RTC_LINE);
    }

    /// Fires all that is due.
    fn advance(&mut self, now: Ticks) {
        self.advance_timers(now);
        for lapic in &mut self.lapics {
            if lapic.due().is_some_and(|due| due <= now) {
                lapic.advance(now);
            }
        }
    }

    fn due(&self) -> Option<Ticks> {
        let lapics = self.lapics.iter().filter_map(Lapic::due);
        lapics.chain(self.pit.due()).chain(self.rtc.due()).min()
    }

    fn acknowledge(&mut self, vcpu: usize) -> Option<u8> {
        match self.lapics.get_mut(vcpu)?.acknowledge()? {
            Acknowledged::Vector(vector) => Some(vector),
            Acknowledged::ExtInt => {
                let vector = self.pic.acknowledge();
                // The output drops between two interrupts.
                for lapic in &mut self.lapics {
                    lapic.set_lint(0, false);
                }
                self.set_pin(0, false);
                self.update_pic_output();
                Some(vector)
            }
        }
    }
}

/// The interrupt controllers and timers of one machine.
///
/// Shared by all its threads. There is one lock, over all chips, held for one access; nothing else
/// is locked and [`Wake`] is not called while it is held. [`Interrupts::pending`],
/// [`Interrupts::cr8`], [`Interrupts::apic_base`] and [`Interrupts::next_event`] take no lock. Virtual processors and lines
/// that do not exist have no state and take no effect.
pub struct Interrupts {
    clock: Arc<Clock>,
    wake: Arc<dyn Wake>,
    chips: Mutex<Chips>,
    /// What waits for each virtual processor, see [`Pending::from_word`]. Written under the lock.
    pending: Vec<AtomicU32>,
    /// The task-priority registers. Written under the lock.
    tprs: Vec<AtomicU8>,
    /// IA32_APIC_BASE. Written under the lock.
    bases: Vec<AtomicU64>,
    /// The time of the next event, or `u64::MAX`. Written under the lock.
    next_event: AtomicU64,
}

impl std::fmt::Debug for Interrupts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Interrupts")
            .field("chips", &self.chips)
            .finish_non_exhaustive()
    }
}

impl Interrupts {
    /// The fabric of a machine with `n_vcpus` virtual processors, as after RESET. Processor 0, with
    /// APIC ID 0, is the bootstrap processor; APIC IDs are the processors' indices.
    pub fn new(n_vcpus: usize, clock: Arc<Clock>, config: Config, wake: Arc<dyn Wake>) -> Self {
        let ids = (0_u32..).take(n_vcpus);
        let chips = Chips {
            lapics: ids.map(|id| Lapic::new(id, config.lapic, &clock)).collect(),
            ioapic: Ioapic::new(),
            pic: Pic::new(),
            pit: Pit::new(&clock),
            rtc: Rtc::new(&config.rtc, &clock),
            lines: 0,
        };
        let this = Self {
            clock,
            wake,
            chips: Mutex::new(chips),
            pending: (0..n_vcpus).map(|_| AtomicU32::new(0)).collect(),
            tprs: (0..n_vcpus).map(|_| AtomicU8::new(0)).collect(),
            bases: (0..n_vcpus).map(|_| AtomicU64::new(0)).collect(),
            next_event: AtomicU64::new(u64::MAX),
        };
        this.reset();
        this
    }

    /// Runs `f` under the lock and publishes what came of it.
    fn with<R>(&self, f: impl FnOnce(&mut Chips, Ticks) -> R) -> R {
        let mut chips = self.chips.lock().unwrap_or_else(PoisonError::into_inner);
        let result = f(&mut chips, self.clock.now());
        self.publish(chips);
        result
    }

    /// As [`Interrupts::with`], for one local APIC.
    fn with_lapic<R>(&self, vcpu: usize, f: impl FnOnce(&mut Lapic, Ticks) -> R) -> Option<R> {
        self.with(|chips, now| Some(f(chips.lapics.get_mut(vcpu)?, now)))
    }

    fn publish(&self, chips: MutexGuard<'_, Chips>) {
        let mut woken = Vec::new();
        for (vcpu, lapic) in chips.lapics.iter().enumerate() {
            let new = Pending::word(lapic);
            let old = self.pending[vcpu].load(Ordering::Relaxed);
            if new != old {
                self.pending[vcpu].store(new, Ordering::Release);
                if new & !old != 0 {
                    woken.push(vcpu);
                }
            }
            self.tprs[vcpu].store(lapic.tpr(), Ordering::Relaxed);
            self.bases[vcpu].store(lapic.apic_base(), Ordering::Relaxed);
        }
        let due = chips.due().unwrap_or(u64::MAX);
        let earlier = due < self.next_event.swap(due, Ordering::AcqRel);
        drop(chips);
        for vcpu in woken {
            self.wake.wake(vcpu);
        }
        if earlier {
            self.wake.timer_changed();
        }
    }

    // ---- lines and messages ----

    /// Drives a line: 0 to 15 are the ISA lines, which go to the 8259 pair and to the I/O APIC (0
    /// to its pin 2); 16 to 23 go to the I/O APIC alone. Line 2 does not exist. `level` says
    /// whether the interrupt is asserted; devices that share a line join their levels first.
    pub fn set_irq(&self, line: u32, level: bool) {
        if line == 2 || line as usize >= PINS {
            return;
        }
        self.with(|chips, _| {
            let bit = 1 << line;
            chips.lines = if level {
                chips.lines | bit
            } else {
                chips.lines & !bit
            };
            chips.update_line(line);
        });
    }

    /// Drives every LINT1 pin, the machine's NMI line.
    pub fn set_nmi_line(&self, level: bool) {
        self.with(|chips, _| {
            for lapic in &mut chips.lapics {
                lapic.set_lint(1, level);
            }
        });
    }

    /// Sends a message-signalled interrupt: the low half of its address, and its data.
    pub fn send_msi(&self, address: u32, data: u32) {
        if let Some(message) = Message::from_msi(address, data) {
            self.with(|chips, _| send(&mut chips.lapics, &message, None));
        }
    }

    /// Raises an NMI, whatever the APIC is set to.
    pub fn inject_nmi(&self, vcpu: usize) {
        self.with_lapic(vcpu, |lapic, _| lapic.inject_nmi());
    }

    /// Raises an SMI on one processor.
    pub fn inject_smi(&self, vcpu: usize) {
        self.with_lapic(vcpu, |lapic, _| lapic.inject_smi());
    }

    /// Sends INIT to a virtual processor.
    pub fn inject_init(&self, vcpu: usize) {
        self.with_lapic(vcpu, |lapic, _| lapic.receive(Delivery::Init, 0, false));
    }

    /// Requests a performance-monitoring interrupt through the LVT.
    pub fn request_pmi(&self, vcpu: usize) {
        self.with_lapic(vcpu, |lapic, _| lapic.request_pmi());
    }

    // ---- the local APICs' registers ----

    /// Reads at an offset of the page to which IA32_APIC_BASE points. What is not an aligned
    /// access of 32 bits gives all ones, as does a page that is not enabled.
    pub fn lapic_read(&self, vcpu: usize, offset: u64, data: &mut [u8]) {
        let value = if data.len() == 4 {
            self.with_lapic(vcpu, |lapic, now| lapic.mmio_read(offset, now))
        } else {
            None
        };
        for (i, byte) in data.iter_mut().enumerate() {
            let bytes = value.unwrap_or(u32::MAX).to_le_bytes();
            *byte = bytes.get(i).copied().unwrap_or(0xff);
        }
    }

    /// Writes at an offset of that page. What is not an aligned access of 32 bits is ignored.
    pub fn lapic_write(&self, vcpu: usize, offset: u64, data: &[u8]) {
        let Ok(bytes) = <[u8; 4]>::try_from(data) else {
            return;
        };
        self.with(|chips, now| {
            if let Some(lapic) = chips.lapics.get_mut(vcpu) {
                let effect = lapic.mmio_write(offset, u32::from_le_bytes(bytes), now);
                chips.apply(vcpu, effect);
            }
        });
    }

    /// Reads an MSR of 800H to 8FFH.
    ///
    /// # Errors
    /// Not in x2APIC mode; no such register; a write-only one.
    pub fn x2apic_read(&self, vcpu: usize, msr: u32) -> Result<u64, GpFault> {
        self.with_lapic(vcpu, |lapic, now| lapic.msr_read(msr, now))
            .unwrap_or(Err(GpFault))
    }

    /// Writes an MSR of 800H to 8FFH.
    ///
    /// # Errors
    /// Not in x2APIC mode; no such register; a read-only one; reserved bits.
    pub fn x2apic_write(&self, vcpu: usize, msr: u32, value: u64) -> Result<(), GpFault> {
        self.with(|chips, now| {
            let effect = chips
                .lapics
                .get_mut(vcpu)
                .ok_or(GpFault)?
                .msr_write(msr, value, now)?;
            chips.apply(vcpu, effect);
            Ok(())
        })
    }

    /// IA32_APIC_BASE.
    pub fn apic_base(&self, vcpu: usize) -> u64 {
        self.with_lapic(vcpu, |lapic, _| lapic.apic_base())
            .unwrap_or(0)
    }

    /// Writes IA32_APIC_BASE.
    ///
    /// # Errors
    /// Reserved bits, and illegal transitions between modes.
    pub fn set_apic_base(&self, vcpu: usize, value: u64) -> Result<(), GpFault> {
        self.with_lapic(vcpu, |lapic, _| lapic.set_apic_base(value))
            .unwrap_or(Err(GpFault))
    }

    /// IA32_TSC_DEADLINE.
    pub fn tsc_deadline(&self, vcpu: usize) -> u64 {
        self.with_lapic(vcpu, |lapic, now| lapic.tsc_deadline(now))
            .unwrap_or(0)
    }

    /// Writes IA32_TSC_DEADLINE. `tsc_offset` is the processor's TSC less the clock's ticks.
    pub fn set_tsc_deadline(&self, vcpu: usize, value: u64, tsc_offset: u64) {
        self.with_lapic(vcpu, |lapic, now| {
            lapic.set_tsc_deadline(value, tsc_offset, now)
        });
    }

    /// A virtual processor's TSC less the clock's ticks has changed; an armed deadline may pass by
    /// it.
    pub fn tsc_offset_changed(&self, vcpu: usize, tsc_offset: u64) {
        self.with_lapic(vcpu, |lapic, now| lapic.set_tsc_offset(tsc_offset, now));
    }

    /// CR8: bits 7:4 of the task priority.
    pub fn cr8(&self, vcpu: usize) -> u64 {
        self.tprs
            .get(vcpu)
            .map_or(0, |tpr| u64::from(tpr.load(Ordering::Relaxed) >> 4))
    }

    /// Writes CR8, of which bits 63:4 are for the caller to check. Cheap if nothing changes.
    pub fn set_cr8(&self, vcpu: usize, value: u64) {
        let tpr = ((value & 0xf) as u8) << 4;
        if self
            .tprs
            .get(vcpu)
            .is_some_and(|old| old.load(Ordering::Relaxed) != tpr)
        {
            self.with_lapic(vcpu, |lapic, _| lapic.set_tpr(tpr));
        }
    }

    // ---- the other chips' registers ----

    /// Reads at an offset of the I/O APIC's page.
    pub fn ioapic_read(&self, offset: u64, data: &mut [u8]) {
        self.with(|chips, _| chips.ioapic.read(offset, data));
    }

    /// Writes at an offset of the I/O APIC's page.
    pub fn ioapic_write(&self, offset: u64, data: &[u8]) {
        self.with(|chips, _| {
            let Chips { lapics, ioapic, .. } = chips;
            ioapic.write(offset, data, &mut |m| send(lapics, m, None));
        });
    }

    /// Reads one of [`PORTS`]; `None` for any other.
    pub fn port_read(&self, port: u16) -> Option<u8> {
        self.port(port, |chips| match port {
            0x40..=0x61 => chips.pit.read(port),
            0x70 | 0x71 => chips.rtc.read(port),
            _ => chips.pic.read(port),
        })
    }

    /// Writes one of [`PORTS`]; says whether it is one.
    pub fn port_write(&self, port: u16, value: u8) -> bool {
        self.port(port, |chips| match port {
            0x40..=0x61 => chips.pit.write(port, value),
            0x70 | 0x71 => chips.rtc.write(port, value),
            _ => chips.pic.write(port, value),
        })
        .is_some()
    }

    fn port<R>(&self, port: u16, f: impl FnOnce(&mut Chips) -> R) -> Option<R> {
        PORTS.contains(&port).then(|| {
            self.with(|chips, now| {
                chips.advance_timers(now);
                let result = f(chips);
                chips.update_line(0);
                chips.update_line(RTC_LINE);
                chips.update_pic_output();
                result
            })
        })
    }

    // ---- what the processors take ----

    /// What waits for a virtual processor: one load.
    #[inline]
    pub fn pending(&self, vcpu: usize) -> Pending {
        match self
            .pending
            .get(vcpu)
            .map_or(0, |word| word.load(Ordering::Acquire))
        {
            0 => Pending::default(),
            word => Pending::from_word(word),
        }
    }

    /// The processor takes its interrupt: the vector, now in service. `None` if there is none (any
    /// more).
    pub fn acknowledge(&self, vcpu: usize) -> Option<u8> {
        self.with(|chips, _| chips.acknowledge(vcpu))
    }

    /// The processor takes an NMI. Says whether there was one; so do the others.
    pub fn take_nmi(&self, vcpu: usize) -> bool {
        self.with_lapic(vcpu, |lapic, _| lapic.take_nmi())
            .unwrap_or(false)
    }

    /// The processor takes an SMI.
    pub fn take_smi(&self, vcpu: usize) -> bool {
        self.with_lapic(vcpu, |lapic, _| lapic.take_smi())
            .unwrap_or(false)
    }

    /// The processor takes an INIT. Its APIC is reset; an application processor then waits for a
    /// start-up IPI.
    pub fn take_init(&self, vcpu: usize) -> bool {
        self.with_lapic(vcpu, |lapic, _| lapic.take_init())
            .unwrap_or(false)
    }

    /// The processor takes a start-up IPI, and waits for one no more.
    pub fn take_sipi(&self, vcpu: usize) -> Option<u8> {
        self.with_lapic(vcpu, |lapic, _| lapic.take_sipi())
            .flatten()
    }

    /// Says whether a virtual processor waits for a start-up IPI; to others none is delivered.
    /// After RESET all but the bootstrap processor do.
    pub fn set_wait_for_sipi(&self, vcpu: usize, waits: bool) {
        self.with_lapic(vcpu, |lapic, _| lapic.set_wait_for_sipi(waits));
    }

    /// INIT of a virtual processor that the monitor itself performs.
    pub fn init_apic(&self, vcpu: usize) {
        self.with_lapic(vcpu, |lapic, _| lapic.init());
    }

    // ---- time ----

    /// When [`Interrupts::advance`] is next due. Takes no lock.
    pub fn next_event(&self) -> Option<Ticks> {
        Some(self.next_event.load(Ordering::Acquire)).filter(|&due| due != u64::MAX)
    }

    /// Fires all timers that are due at `now`. One load if none is.
    #[inline]
    pub fn advance(&self, now: Ticks) {
        if now >= self.next_event.load(Ordering::Acquire) {
            self.with(|chips, _| chips.advance(now));
        }
    }

    // ---- the whole ----

    /// RESET of the machine. Lines that devices drive keep their levels; the RTC keeps its time.
    pub fn reset(&self) {
        self.with(|chips, now| {
            chips.pit.reset();
            chips.rtc.reset();
            chips.ioapic.reset();
            for lapic in &mut chips.lapics {
                lapic.reset();
            }
            chips.advance(now);
            // Last: the levels that its lines have now are not edges.
            chips.pic.reset();
            chips.update_pic_output();
        });
    }

    /// Puts the bootstrap processor's APIC into virtual-wire mode, as firmware does for systems
    /// that know only the 8259 pair: enabled, LINT0 as ExtINT, LINT1 as NMI. MultiProcessor
    /// Specification, "Virtual Wire Mode".
    pub fn set_virtual_wire(&self) {
        self.with_lapic(0, |lapic, _| lapic.set_virtual_wire());
    }

    /// The state, to be saved.
    pub fn save(&self) -> InterruptsState {
        self.with(|chips, _| InterruptsState {
            lapics: chips.lapics.iter().map(Lapic::save).collect(),
            ioapic: chips.ioapic.save(),
            pic: chips.pic.save(),
            pit: chips.pit.save(),
            rtc: chips.rtc.save(),
            lines: chips.lines,
        })
    }

    /// Takes over a state. The clock must show the time of the save.
    ///
    /// # Errors
    /// The state is impossible; nothing was changed.
    pub fn restore(&self, state: &InterruptsState) -> Result<(), InterruptsError> {
        self.with(|chips, now| {
            check(chips, state)?;
            for (lapic, state) in chips.lapics.iter_mut().zip(&state.lapics) {
                lapic.restore(state, now);
            }
            chips.ioapic.restore(&state.ioapic);
            chips.pic.restore(&state.pic);
            chips.pit.restore(&state.pit);
            chips.rtc.restore(&state.rtc);
            chips.lines = state.lines;
            Ok(())
        })
    }
}

fn check(chips: &Chips, state: &InterruptsState) -> Result<(), InterruptsError> {
    let (expected, found) = (chips.lapics.len(), state.lapics.len());
    if expected != found {
        return Err(InterruptsError::LapicCount { expected, found });
    }
    let pairs = chips.lapics.iter().zip(&state.lapics);
    if let Some(index) = pairs
        .into_iter()
        .position(|(lapic, state)| !lapic.accepts_state(state))
    {
        return Err(InterruptsError::Lapic(index));
    }
    if !Ioapic::accepts_state(&state.ioapic) {
        return Err(InterruptsError::Ioapic);
    }
    if !Pic::accepts_state(&state.pic) {
        return Err(InterruptsError::Pic);
    }
    if !Pit::accepts_state(&state.pit) {
        return Err(InterruptsError::Pit);
    }
    if !Rtc::accepts_state(&state.rtc) {
        return Err(InterruptsError::Rtc);
    }
    if state.lines >> PINS != 0 || state.lines & (1 << 2) != 0 {
        return Err(InterruptsError::Lines(state.lines));
    }
    Ok(())
}
