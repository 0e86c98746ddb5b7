//! The chips and the wires between them.

use hindsight_regs::apic::DeliveryMode;

use super::{CASCADE_LINE, InterruptDevice, RTC_LINE, TIMER_LINE, TIMER_PIN};
use crate::clock::Ticks;
use crate::inspect::{Inspect, InspectField};
use crate::irq::ioapic::{Ioapic, RedirectionEntry};
use crate::irq::lapic::{Acknowledged, Lapic, LapicEffect, lvt};
use crate::irq::message::InterruptMessage;
use crate::irq::pic::Pic;
use crate::pit::Pit;
use crate::rtc::Rtc;

/// The chips. Everything that one does to another happens here, under the one lock.
#[derive(Debug)]
pub(super) struct Chips {
    pub(super) lapics: Vec<Lapic>,
    pub(super) ioapic: Ioapic,
    pub(super) pic: Pic,
    pub(super) pit: Pit,
    pub(super) rtc: Rtc,
    /// Levels that devices drive, by line.
    pub(super) lines: u32,
}

/// Sends a message. Returns whether any local APIC accepted it.
pub(super) fn send(
    lapics: &mut [Lapic],
    message: &InterruptMessage,
    sender: Option<usize>,
) -> bool {
    let InterruptMessage {
        destination,
        delivery,
        vector,
        level,
    } = *message;
    let is_addressed =
        |(index, lapic): (usize, &Lapic)| lapic.matches(destination, sender == Some(index));
    if delivery == DeliveryMode::LowestPriority {
        // Of several with the lowest priority, the one with the lowest index.
        let lowest = (0..lapics.len())
            .filter(|&i| is_addressed((i, &lapics[i])) && lapics[i].is_candidate())
            .min_by_key(|&i| lapics[i].ppr());
        return lowest.is_some_and(|i| lapics[i].receive(delivery, vector, level));
    }
    let mut accepted = false;
    for (index, lapic) in lapics.iter_mut().enumerate() {
        if is_addressed((index, lapic)) {
            accepted |= lapic.receive(delivery, vector, level);
        }
    }
    accepted
}

/// Whether a message of this mode wakes a processor that halted with interrupts off.
fn wakes_without_interrupts(mode: Option<DeliveryMode>) -> bool {
    matches!(
        mode,
        Some(DeliveryMode::Nmi | DeliveryMode::Smi | DeliveryMode::Init | DeliveryMode::StartUp)
    )
}

impl Chips {
    /// See [`super::Interrupts::can_wake_without_interrupts`].
    pub(super) fn can_wake_without_interrupts(&self) -> bool {
        let lapic = |lapic: &Lapic| {
            let state = lapic.state();
            let lint0 = state.lvt[lvt::LINT0];
            let pending = state.nmi || state.smi || state.init || state.sipi.is_some();
            pending || !lint0.is_masked() && wakes_without_interrupts(lint0.delivery_mode())
        };
        let pins = self.ioapic.save().entries;
        let pin = |entry: &RedirectionEntry| {
            !entry.masked() && wakes_without_interrupts(entry.delivery())
        };
        self.lapics.iter().any(lapic) || pins.iter().any(pin)
    }

    /// Applies what an access to a local APIC causes outside of it.
    pub(super) fn apply(&mut self, sender: usize, effect: LapicEffect) {
        let Self { lapics, ioapic, .. } = self;
        match effect {
            LapicEffect::None => {}
            LapicEffect::Send(message) => {
                send(lapics, &message, Some(sender));
            }
            LapicEffect::Eoi(vector) => ioapic.eoi(vector, &mut |m| send(lapics, m, None)),
        }
    }

    fn set_pin(&mut self, pin: usize, level: bool) {
        let Self { lapics, ioapic, .. } = self;
        ioapic.set_pin(pin, level, &mut |m| send(lapics, m, None));
    }

    /// Drives a line to the joint level of the device and the chip that share it.
    pub(super) fn update_line(&mut self, line: u32) {
        let chip_level = match line {
            TIMER_LINE => self.pit.irq(),
            RTC_LINE => self.rtc.irq(),
            _ => false,
        };
        let level = chip_level || self.lines & (1 << line) != 0;
        self.drive(line, level);
    }

    fn drive(&mut self, line: u32, level: bool) {
        if let Ok(pic_line @ 0..16) = u8::try_from(line) {
            self.pic.set_line(pic_line, level);
            self.update_pic_output();
        }
        match line {
            TIMER_LINE => self.set_pin(TIMER_PIN, level),
            CASCADE_LINE => {}
            _ => self.set_pin(line as usize, level),
        }
    }

    /// Passes the 8259 pair's output to every LINT0 and to pin 0 of the I/O APIC.
    pub(super) fn update_pic_output(&mut self) {
        self.set_pic_output(self.pic.output());
    }

    fn set_pic_output(&mut self, level: bool) {
        for lapic in &mut self.lapics {
            lapic.set_lint(0, level);
        }
        self.set_pin(0, level);
    }

    /// Advances the PIT and the RTC to a time.
    pub(super) fn advance_timers(&mut self, now: Ticks) {
        if self.pit.advance(now) && self.lines & 1 == 0 {
            // The line was low since it last rose, if only between two advances.
            self.drive(TIMER_LINE, false);
            self.drive(TIMER_LINE, true);
        }
        self.update_line(TIMER_LINE);
        self.rtc.advance(now);
        self.update_line(RTC_LINE);
    }

    /// Fires all timers that are due.
    pub(super) fn advance(&mut self, now: Ticks) {
        self.advance_timers(now);
        for lapic in &mut self.lapics {
            if lapic.due().is_some_and(|due| due <= now) {
                lapic.advance(now);
            }
        }
    }

    /// The earliest time at which a timer is due.
    pub(super) fn due(&self) -> Option<Ticks> {
        let lapics = self.lapics.iter().filter_map(Lapic::due);
        lapics.chain(self.pit.due()).chain(self.rtc.due()).min()
    }

    pub(super) fn acknowledge(&mut self, vcpu: usize) -> Option<u8> {
        match self.lapics.get_mut(vcpu)?.acknowledge()? {
            Acknowledged::Vector(vector) => Some(vector),
            Acknowledged::ExtInt => {
                let vector = self.pic.acknowledge();
                // The output drops between two interrupts.
                self.set_pic_output(false);
                self.update_pic_output();
                Some(vector)
            }
        }
    }

    /// Applies RESET; see [`super::Interrupts::reset`].
    pub(super) fn reset(&mut self, now: Ticks) {
        self.pit.reset();
        self.rtc.reset();
        self.ioapic.reset();
        for lapic in &mut self.lapics {
            lapic.reset();
        }
        self.advance(now);
        // The pair comes last: the levels that its lines have now are not edges.
        self.pic.reset();
        self.update_pic_output();
    }

    /// The fields of a chip as an access at `now` would read them; changes nothing.
    pub(super) fn inspect(&self, device: InterruptDevice, now: Ticks) -> Option<Vec<InspectField>> {
        Some(match device {
            InterruptDevice::Lapic(vcpu) => {
                let mut lapic = self.lapics.get(vcpu)?.clone();
                lapic.advance(now);
                lapic.inspect()
            }
            InterruptDevice::Ioapic => self.ioapic.inspect(),
            InterruptDevice::Pic => self.pic.inspect(),
            InterruptDevice::Pit => {
                let mut pit = self.pit.clone();
                pit.advance(now);
                pit.inspect()
            }
            InterruptDevice::Rtc => {
                let mut rtc = self.rtc.clone();
                rtc.advance(now);
                rtc.inspect()
            }
        })
    }
}
