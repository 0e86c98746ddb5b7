//! ACPI fixed hardware: the PM1 event and control registers and the power management timer.
//!
//! Follows ACPI 6.5, "PM1 Event Grouping", "PM1 Control Grouping" and "Power Management Timer".
//! The machine is always in ACPI mode. It has no fixed buttons and no SCI source, so no event is
//! ever signalled; the timer's carry is visible in PM1_STS without an interrupt.

use bitfield_struct::bitfield;
use bitflags::bitflags;

use crate::bus::Device;
use crate::hooks::{MachineRequest, NanoClock, Requests};
use crate::inspect::{FieldList, Inspect, InspectField};
use crate::test_device::{copy_in, copy_out};

/// First port: PM1a_EVT_BLK, 4 ports.
pub const PM_PORT: u16 = 0x600;
/// First port of PM1a_CNT_BLK, 2 ports.
pub const PM_CONTROL_PORT: u16 = PM_PORT + 4;
/// First port of PM_TMR_BLK, 4 ports: the timer is 32 bits wide.
pub const PM_TIMER_PORT: u16 = PM_PORT + 8;
/// Number of ports of all three blocks.
pub const PM_PORTS: u16 = 12;
/// First port at which firmware expects the blocks in a PIIX4.
pub const PIIX4_PM_PORT: u16 = 0xb000;
/// Value of SLP_TYP for S5, soft off.
pub const SLEEP_TYPE_S5: u8 = 5;
/// Value of SLP_TYP for soft off in a PIIX4, which SeaBIOS and OVMF write without asking ACPI.
const SLEEP_TYPE_PIIX4_OFF: u8 = 0;
/// Rate of the power management timer in Hz.
pub const PM_TIMER_HZ: u32 = 3_579_545;

const STATUS: usize = 0;
const ENABLE: usize = 2;
const CONTROL: usize = 4;
const TIMER: usize = 8;

bitflags! {
    /// PM1_STS.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Pm1Status: u16 {
        /// TMR_STS: the timer's top bit has changed.
        const TIMER = 1 << 0;
    }
}

bitflags! {
    /// PM1_EN.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Pm1Enable: u16 {
        /// TMR_EN: timer.
        const TIMER = 1 << 0;
        /// GBL_EN: release of the global lock.
        const GLOBAL_LOCK = 1 << 5;
        /// PWRBTN_EN: power button.
        const POWER_BUTTON = 1 << 8;
        /// SLPBTN_EN: sleep button.
        const SLEEP_BUTTON = 1 << 9;
        /// RTC_EN: real-time clock.
        const RTC = 1 << 10;
    }
}

/// PM1_CNT.
#[bitfield(u16)]
struct Pm1Control {
    /// SCI_EN: power management events raise an SCI; always set.
    sci_enable: bool,
    /// BM_RLD: bus master requests leave C3.
    bus_master_reload: bool,
    /// GBL_RLS: reads as 0.
    global_lock_release: bool,
    #[bits(7)]
    __: u8,
    /// SLP_TYP: the sleeping state that SLP_EN enters.
    #[bits(3)]
    sleep_type: u8,
    /// SLP_EN: enters the sleeping state; reads as 0.
    sleep_enable: bool,
    #[bits(2)]
    __: u8,
}

impl Pm1Control {
    /// The bits that read back: BM_RLD and SLP_TYP.
    const STORED: u16 = Self::new()
        .with_bus_master_reload(true)
        .with_sleep_type(0b111)
        .into_bits();
}

/// The state of the registers as plain data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct AcpiPmState {
    /// PM1_EN.
    pub enable: u16,
    /// PM1_CNT without SCI_EN, which is always set.
    pub control: u16,
    /// The number of changes of the timer's top bit when TMR_STS was last cleared.
    pub timer_carries: u64,
}

/// The registers at [`PM_PORT`].
#[derive(Debug)]
pub struct AcpiPm {
    state: AcpiPmState,
    clock: NanoClock,
    requests: Requests,
}

impl AcpiPm {
    /// The registers after reset; the timer follows `clock`.
    pub fn new(clock: NanoClock, requests: Requests) -> Self {
        Self {
            state: AcpiPmState::default(),
            clock,
            requests,
        }
    }

    /// The registers, without the timer, which follows the clock.
    pub fn save(&self) -> AcpiPmState {
        self.state
    }

    /// Sets saved registers, without the bits that do not exist; requests nothing.
    pub fn restore(&mut self, state: &AcpiPmState) {
        self.state = AcpiPmState {
            enable: state.enable & Pm1Enable::all().bits(),
            control: state.control & Pm1Control::STORED,
            timer_carries: state.timer_carries,
        };
    }

    /// Timer periods since reset.
    fn count(&self) -> u64 {
        let periods = u128::from(self.clock.now()) * u128::from(PM_TIMER_HZ) / 1_000_000_000;
        u64::try_from(periods).unwrap_or(u64::MAX)
    }

    fn carries(&self) -> u64 {
        self.count() >> 31
    }

    fn status(&self) -> Pm1Status {
        let mut status = Pm1Status::empty();
        status.set(Pm1Status::TIMER, self.carries() != self.state.timer_carries);
        status
    }

    fn control(&self) -> Pm1Control {
        Pm1Control::from(self.state.control).with_sci_enable(true)
    }

    /// All registers as the guest reads them.
    fn image(&self) -> [u8; 12] {
        let mut image = [0; 12];
        let control = u16::from(self.control());
        image[STATUS..ENABLE].copy_from_slice(&self.status().bits().to_le_bytes());
        image[ENABLE..CONTROL].copy_from_slice(&self.state.enable.to_le_bytes());
        image[CONTROL..6].copy_from_slice(&control.to_le_bytes());
        image[TIMER..].copy_from_slice(&self.count().to_le_bytes()[..4]);
        image
    }
}

impl Device for AcpiPm {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        copy_out(&self.image(), offset, data);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let mut image = self.image();
        // A one clears a status bit, so bytes that are not written must be zeros.
        image[STATUS..ENABLE].fill(0);
        copy_in(&mut image, offset, data);
        let word = |offset: usize| u16::from_le_bytes([image[offset], image[offset + 1]]);
        if Pm1Status::from_bits_truncate(word(STATUS)).contains(Pm1Status::TIMER) {
            self.state.timer_carries = self.carries();
        }
        self.state.enable = word(ENABLE) & Pm1Enable::all().bits();
        let control = Pm1Control::from(word(CONTROL));
        self.state.control = u16::from(control) & Pm1Control::STORED;
        let off = matches!(control.sleep_type(), SLEEP_TYPE_S5 | SLEEP_TYPE_PIIX4_OFF);
        if control.sleep_enable() && off {
            self.requests.send(MachineRequest::PowerOff);
        }
    }
}

impl Inspect for AcpiPm {
    fn inspect(&self) -> Vec<InspectField> {
        let enable = Pm1Enable::from_bits_truncate(self.state.enable);
        let mut fields = FieldList::default();
        fields.flags("PM1_STS", self.status());
        fields.flags("PM1_EN", enable);
        fields.hex("PM1_CNT", u16::from(self.control()));
        fields.push("SLP_TYP", self.control().sleep_type());
        fields.push("timer", self.count() & u64::from(u32::MAX));
        fields.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hooks::test::collector;
    use crate::inspect::test::field;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    const SECOND: u64 = 1_000_000_000;
    const SCI_ENABLE: u16 = Pm1Control::new().with_sci_enable(true).into_bits();
    const SLEEP_ENABLE: u16 = Pm1Control::new().with_sleep_enable(true).into_bits();

    fn pm_at(nanoseconds: u64) -> (AcpiPm, Arc<AtomicU64>, impl Fn() -> Vec<MachineRequest>) {
        let (requests, sent) = collector();
        let now = Arc::new(AtomicU64::new(nanoseconds));
        let clock = Arc::clone(&now);
        let clock = NanoClock::new(move || clock.load(Ordering::Relaxed));
        (AcpiPm::new(clock, requests), now, sent)
    }

    fn word(pm: &mut AcpiPm, offset: u64) -> u16 {
        let mut data = [0; 2];
        pm.read(offset, &mut data);
        u16::from_le_bytes(data)
    }

    fn timer(pm: &mut AcpiPm) -> u32 {
        let mut data = [0; 4];
        pm.read(8, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn timer_counts_its_rate_and_wraps_at_32_bits() {
        let (mut pm, now, _) = pm_at(0);
        assert_eq!(timer(&mut pm), 0);
        now.store(SECOND, Ordering::Relaxed);
        assert_eq!(timer(&mut pm), PM_TIMER_HZ);
        now.store(1200 * SECOND, Ordering::Relaxed);
        assert_eq!(timer(&mut pm), 486_704, "4_295_454_000 - 2^32");
        now.store(u64::MAX, Ordering::Relaxed);
        timer(&mut pm);
    }

    #[test]
    fn timer_status_is_set_by_a_carry_until_cleared() {
        let (mut pm, now, _) = pm_at(0);
        assert_eq!(word(&mut pm, 0), 0);
        now.store(600 * SECOND, Ordering::Relaxed);
        assert_eq!(word(&mut pm, 0), Pm1Status::TIMER.bits());
        pm.write(2, &[0, 0]);
        assert_eq!(
            word(&mut pm, 0),
            Pm1Status::TIMER.bits(),
            "a write of the enables clears nothing"
        );
        pm.write(0, &[1, 0]);
        assert_eq!(word(&mut pm, 0), 0);
    }

    #[test]
    fn sleep_enable_with_the_type_of_s5_powers_off() {
        let (mut pm, _, sent) = pm_at(0);
        let value = u16::from(SLEEP_TYPE_S5) << 10;
        pm.write(4, &value.to_le_bytes());
        assert!(sent().is_empty());
        assert_eq!(word(&mut pm, 4), value | SCI_ENABLE);
        pm.write(4, &(value | SLEEP_ENABLE).to_le_bytes());
        assert_eq!(sent(), [MachineRequest::PowerOff]);
        assert_eq!(word(&mut pm, 4), value | SCI_ENABLE);
    }

    #[test]
    fn byte_write_of_sleep_enable_powers_off_only_with_a_type_of_soft_off() {
        let (mut pm, _, sent) = pm_at(0);
        for sleep_type in [1, 2, 3, 4, 6, 7] {
            pm.write(5, &[0x20 | sleep_type << 2]);
        }
        assert!(sent().is_empty());
        pm.write(5, &[0x20 | 5 << 2]);
        assert_eq!(sent(), [MachineRequest::PowerOff]);
    }

    #[test]
    fn sleep_enable_alone_powers_off_as_firmware_expects_of_piix4() {
        let (mut pm, _, sent) = pm_at(0);
        pm.write(4, &0x2000_u16.to_le_bytes());
        assert_eq!(sent(), [MachineRequest::PowerOff]);
    }

    #[test]
    fn enable_register_reads_back_without_reserved_bits() {
        let (mut pm, ..) = pm_at(0);
        pm.write(2, &[0xff, 0xff]);
        assert_eq!(word(&mut pm, 2), Pm1Enable::all().bits());
    }

    #[test]
    fn restored_state_equals_the_saved_one_without_bits_that_do_not_exist() {
        let (mut pm, ..) = pm_at(1000 * SECOND);
        pm.write(0, &[1, 0, 0x21, 0]);
        pm.write(5, &[5 << 2]);
        let saved = pm.save();
        assert_eq!(
            saved,
            AcpiPmState {
                enable: 0x21,
                control: 0x1400,
                timer_carries: 1
            }
        );
        let (mut other, _, sent) = pm_at(1000 * SECOND);
        other.restore(&saved);
        assert_eq!(other.save(), saved);
        other.restore(&AcpiPmState {
            enable: 0xffff,
            control: 0xffff,
            timer_carries: 0,
        });
        assert_eq!(other.save().control, Pm1Control::STORED);
        assert!(sent().is_empty());
    }

    #[test]
    fn register_bits_match_the_specification() {
        assert_eq!(Pm1Enable::all().bits(), 0x0721);
        assert_eq!(Pm1Control::STORED, 0x1c02);
        assert_eq!((SCI_ENABLE, SLEEP_ENABLE), (1, 1 << 13));
    }

    #[test]
    fn inspection_decodes_the_registers() {
        let (mut pm, ..) = pm_at(1000 * SECOND);
        pm.write(2, &[0x21, 0, 0, 5 << 2]);
        assert_eq!(field(&pm, "PM1_STS"), "TIMER");
        assert_eq!(field(&pm, "PM1_EN"), "TIMER GLOBAL_LOCK");
        assert_eq!(field(&pm, "SLP_TYP"), "5");
    }
}
