//! [`Interrupts`]: the interrupt controllers and timers of one machine, connected and shared.

mod access;
mod chips;
mod pending;
mod state;
#[cfg(test)]
mod tests;

pub use access::PORTS;
pub use pending::PendingInterrupts;
pub use state::{InterruptsError, InterruptsState};

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hindsight_regs::apic::DeliveryMode;

use super::ioapic::{Ioapic, PINS};
use super::lapic::{Lapic, LapicFeatures};
use super::message::InterruptMessage;
use super::pic::Pic;
use crate::clock::{Clock, Ticks};
use crate::inspect::InspectField;
use crate::pit::Pit;
use crate::rtc::{Rtc, RtcConfig};
use chips::{Chips, send};

/// The ISA line of the interval timer.
const TIMER_LINE: u32 = 0;
/// The I/O APIC pin to which the timer's line is connected.
const TIMER_PIN: usize = 2;
/// The ISA line that cascades the two 8259A, and that no device can drive.
const CASCADE_LINE: u32 = 2;
/// The ISA line of the real-time clock.
const RTC_LINE: u32 = 8;

/// Receives notifications of new events.
///
/// The methods are called with no lock held, on the thread that caused the event.
pub trait Wake: Send + Sync {
    /// [`Interrupts::pending`] of this vCPU has a new event.
    fn wake(&self, vcpu: usize);

    /// [`Interrupts::next_event`] has become earlier than it was.
    fn timer_changed(&self) {}
}

/// Configuration of [`Interrupts`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InterruptsConfig {
    /// What CPUID reports about the local APICs.
    pub lapic: LapicFeatures,
    /// The real-time clock.
    pub rtc: RtcConfig,
}

/// A chip of [`Interrupts`], for inspection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InterruptDevice {
    /// The local APIC of a vCPU.
    Lapic(usize),
    /// The I/O APIC.
    Ioapic,
    /// The 8259 pair.
    Pic,
    /// The interval timer.
    Pit,
    /// The real-time clock.
    Rtc,
}

/// The interrupt controllers and timers of one machine.
///
/// It is shared by all threads of the machine. One lock over all chips is held for the duration of
/// one access; no other lock is taken and [`Wake`] is not called while it is held.
/// [`Interrupts::pending`], [`Interrupts::cr8`], [`Interrupts::apic_base`] and
/// [`Interrupts::next_event`] take no lock. Accesses to vCPUs and lines that do not exist have no
/// effect.
pub struct Interrupts {
    clock: Arc<Clock>,
    wake: Arc<dyn Wake>,
    chips: Mutex<Chips>,
    /// Pending events by vCPU, see [`PendingInterrupts::from_word`]. Written under the lock.
    pending: Vec<AtomicU32>,
    /// The task-priority registers by vCPU. Written under the lock.
    tprs: Vec<AtomicU8>,
    /// IA32_APIC_BASE by vCPU. Written under the lock.
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
    /// The controllers of a machine with `n_vcpus` vCPUs, as after RESET.
    ///
    /// APIC IDs are the vCPUs' indices; vCPU 0 is the bootstrap processor.
    pub fn new(
        n_vcpus: usize,
        clock: Arc<Clock>,
        config: InterruptsConfig,
        wake: Arc<dyn Wake>,
    ) -> Self {
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

    fn lock(&self) -> MutexGuard<'_, Chips> {
        self.chips.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `f` under the lock and publishes the new events.
    fn with<R>(&self, f: impl FnOnce(&mut Chips, Ticks) -> R) -> R {
        let mut chips = self.lock();
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
            let new = PendingInterrupts::word(lapic);
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

    /// Drives an interrupt line.
    ///
    /// Lines 0 to 15 are the ISA lines, which are connected to the 8259 pair and to the I/O APIC
    /// (line 0 to its pin 2); lines 16 to 23 are connected to the I/O APIC alone. Line 2 does not
    /// exist. `level` is true for an asserted interrupt; devices that share a line must join their
    /// levels before.
    pub fn set_irq(&self, line: u32, level: bool) {
        if line == CASCADE_LINE || line as usize >= PINS {
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
        if let Some(message) = InterruptMessage::from_msi(address, data) {
            self.with(|chips, _| send(&mut chips.lapics, &message, None));
        }
    }

    /// Raises an NMI on one vCPU, whatever its APIC's registers contain.
    pub fn inject_nmi(&self, vcpu: usize) {
        self.with_lapic(vcpu, |lapic, _| lapic.inject_nmi());
    }

    /// Raises an SMI on one vCPU.
    pub fn inject_smi(&self, vcpu: usize) {
        self.with_lapic(vcpu, |lapic, _| lapic.inject_smi());
    }

    /// Sends INIT to one vCPU.
    pub fn inject_init(&self, vcpu: usize) {
        self.with_lapic(vcpu, |lapic, _| lapic.receive(DeliveryMode::Init, 0, false));
    }

    /// Requests a performance-monitoring interrupt through the LVT.
    pub fn request_pmi(&self, vcpu: usize) {
        self.with_lapic(vcpu, |lapic, _| lapic.request_pmi());
    }

    /// The events that are pending for a vCPU: one load.
    #[inline]
    pub fn pending(&self, vcpu: usize) -> PendingInterrupts {
        match self
            .pending
            .get(vcpu)
            .map_or(0, |word| word.load(Ordering::Acquire))
        {
            0 => PendingInterrupts::default(),
            word => PendingInterrupts::from_word(word),
        }
    }

    /// Gives the vCPU its interrupt: the vector, now in service.
    ///
    /// `None` if no interrupt is pending (any more).
    pub fn acknowledge(&self, vcpu: usize) -> Option<u8> {
        self.with(|chips, _| chips.acknowledge(vcpu))
    }

    /// Gives the vCPU an NMI. Returns whether one was pending.
    pub fn take_nmi(&self, vcpu: usize) -> bool {
        self.with_lapic(vcpu, |lapic, _| lapic.take_nmi())
            .unwrap_or(false)
    }

    /// Merges the NMIs that arrived while the vCPU blocked NMIs into one.
    pub fn merge_nmis(&self, vcpu: usize) {
        self.with_lapic(vcpu, |lapic, _| lapic.merge_nmis());
    }

    /// Gives the vCPU an SMI. Returns whether one was pending.
    pub fn take_smi(&self, vcpu: usize) -> bool {
        self.with_lapic(vcpu, |lapic, _| lapic.take_smi())
            .unwrap_or(false)
    }

    /// Gives the vCPU an INIT. Returns whether one was pending.
    ///
    /// Its APIC is reset; an application processor then waits for a start-up IPI.
    pub fn take_init(&self, vcpu: usize) -> bool {
        self.with_lapic(vcpu, |lapic, _| lapic.take_init())
            .unwrap_or(false)
    }

    /// Gives the vCPU a start-up IPI; the vCPU then no longer waits for one.
    pub fn take_sipi(&self, vcpu: usize) -> Option<u8> {
        self.with_lapic(vcpu, |lapic, _| lapic.take_sipi())
            .flatten()
    }

    /// Sets whether a vCPU waits for a start-up IPI; if not, start-up IPIs are dropped.
    ///
    /// After RESET all vCPUs but the bootstrap processor wait.
    pub fn set_wait_for_sipi(&self, vcpu: usize, waits: bool) {
        self.with_lapic(vcpu, |lapic, _| lapic.set_wait_for_sipi(waits));
    }

    /// Applies INIT to the local APIC of a vCPU that the VMM itself initializes.
    pub fn init_apic(&self, vcpu: usize) {
        self.with_lapic(vcpu, |lapic, _| lapic.init());
    }

    /// Whether anything can wake a virtual processor that halted with interrupts off.
    ///
    /// That is a pending NMI, SMI, INIT or start-up IPI, or a pin that delivers one of them. No device
    /// drives LINT1.
    pub fn can_wake_without_interrupts(&self) -> bool {
        self.with(|chips, _| chips.can_wake_without_interrupts())
    }

    /// The time at which [`Interrupts::advance`] is next due. Takes no lock.
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

    /// Applies RESET of the machine.
    ///
    /// Lines that devices drive keep their levels; the real-time clock keeps its time.
    pub fn reset(&self) {
        self.with(Chips::reset);
    }

    /// Puts the bootstrap processor's APIC into virtual-wire mode.
    ///
    /// Firmware does so for systems that know only the 8259 pair: the APIC is enabled, LINT0 is
    /// ExtINT, LINT1 is NMI. MultiProcessor Specification, "Virtual Wire Mode".
    pub fn set_virtual_wire(&self) {
        self.with_lapic(0, |lapic, _| lapic.set_virtual_wire());
    }

    /// The state as plain data.
    pub fn save(&self) -> InterruptsState {
        self.with(|chips, _| chips.save())
    }

    /// Replaces the state by a saved one. The clock must show the time of the save.
    ///
    /// # Errors
    /// A chip cannot be in its state; nothing was changed.
    pub fn restore(&self, state: &InterruptsState) -> Result<(), InterruptsError> {
        self.with(|chips, now| chips.restore(state, now))
    }

    /// The registers of a chip for a person, as a guest's access would read them now.
    ///
    /// Changes nothing. `None` if the device does not exist.
    pub fn inspect(&self, device: InterruptDevice) -> Option<Vec<InspectField>> {
        let now = self.clock.now();
        self.lock().inspect(device, now)
    }
}
