//! ACPI fixed hardware: the PM1 event and control registers and the power management timer.
//!
//! Follows ACPI 6.5, "PM1 Event Grouping", "PM1 Control Grouping" and "Power Management Timer".
//! The machine is always in ACPI mode. It has no fixed buttons and no SCI source, so no event is
//! ever signalled; the timer's carry shows in PM1_STS without an interrupt.

use serde::{Deserialize, Serialize};

use crate::bus::Device;
use crate::hooks::{MachineRequest, NanoClock, Requests};
use crate::test_device::{copy_in, copy_out};

/// First port: PM1a_EVT_BLK, 4 ports.
pub const PM_PORT: u16 = 0x600;
/// PM1a_CNT_BLK, 2 ports.
pub const PM_CONTROL_PORT: u16 = PM_PORT + 4;
/// PM_TMR_BLK, 4 ports, 32 bits wide.
pub const PM_TIMER_PORT: u16 = PM_PORT + 8;
/// Ports of all three blocks.
pub const PM_PORTS: u16 = 12;
/// The SLP_TYP value that means S5, soft off.
pub const SLEEP_TYPE_S5: u8 = 5;
/// Rate of the power management timer, in Hz.
pub const PM_TIMER_HZ: u32 = 3_579_545;

const STATUS: usize = 0;
const ENABLE: usize = 2;
const CONTROL: usize = 4;
const TIMER: usize = 8;

const TIMER_STATUS: u16 = 1 << 0;
/// Timer, global lock, power button, sleep button and RTC events.
const ENABLE_MASK: u16 = 0x0721;
const SCI_ENABLE: u16 = 1 << 0;
/// Bus master reload and SLP_TYP read back; GBL_RLS and SLP_EN read as zero.
const CONTROL_MASK: u16 = 0x1c02;
const SLEEP_ENABLE: u16 = 1 << 13;

/// The registers as plain data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcpiPmState {
    /// PM1_EN.
    pub enable: u16,
    /// PM1_CNT without SCI_EN, which is always set.
    pub control: u16,
    /// How often the timer's top bit had changed when TMR_STS was last cleared.
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
    /// The registers after reset; the timer counts `clock`.
    pub fn new(clock: NanoClock, requests: Requests) -> Self {
        Self {
            state: AcpiPmState::default(),
            clock,
            requests,
        }
    }

    /// The registers; the timer follows the clock.
    pub fn save(&self) -> AcpiPmState {
        self.state
    }

    /// Takes saved registers over, without the bits that do not exist; requests nothing.
    pub fn restore(&mut self, state: &AcpiPmState) {
        self.state = AcpiPmState {
            enable: state.enable & ENABLE_MASK,
            control: state.control & CONTROL_MASK,
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

    /// All registers as the guest reads them.
    fn image(&self) -> [u8; 12] {
        let mut image = [0; 12];
        let carried = self.carries() != self.state.timer_carries;
        let status = if carried { TIMER_STATUS } else { 0 };
        let count = self.count().to_le_bytes();
        image[STATUS..ENABLE].copy_from_slice(&status.to_le_bytes());
        image[ENABLE..CONTROL].copy_from_slice(&self.state.enable.to_le_bytes());
        image[CONTROL..6].copy_from_slice(&(self.state.control | SCI_ENABLE).to_le_bytes());
        image[TIMER..].copy_from_slice(&count[..4]);
        image
    }
}

impl Device for AcpiPm {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        copy_out(&self.image(), offset, data);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let mut image = self.image();
        // Status bits are cleared by ones: what is not written must look like zeros.
        image[STATUS..ENABLE].fill(0);
        copy_in(&mut image, offset, data);
        let word = |at: usize| u16::from_le_bytes([image[at], image[at + 1]]);
        if word(STATUS) & TIMER_STATUS != 0 {
            self.state.timer_carries = self.carries();
        }
        self.state.enable = word(ENABLE) & ENABLE_MASK;
        let control = word(CONTROL);
        self.state.control = control & CONTROL_MASK;
        if control & SLEEP_ENABLE != 0 && (control >> 10) & 0b111 == SLEEP_TYPE_S5.into() {
            self.requests.send(MachineRequest::PowerOff);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hooks::test::recorder;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    const SECOND: u64 = 1_000_000_000;

    fn at(nanoseconds: u64) -> (AcpiPm, Arc<AtomicU64>, impl Fn() -> Vec<MachineRequest>) {
        let (requests, seen) = recorder();
        let now = Arc::new(AtomicU64::new(nanoseconds));
        let clock = Arc::clone(&now);
        let clock = NanoClock::new(move || clock.load(Ordering::Relaxed));
        (AcpiPm::new(clock, requests), now, seen)
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
        let (mut pm, now, _) = at(0);
        assert_eq!(timer(&mut pm), 0);
        now.store(SECOND, Ordering::Relaxed);
        assert_eq!(timer(&mut pm), PM_TIMER_HZ);
        now.store(1200 * SECOND, Ordering::Relaxed);
        assert_eq!(timer(&mut pm), 486_704, "4_295_454_000 - 2^32");
        now.store(u64::MAX, Ordering::Relaxed);
        timer(&mut pm);
    }

    #[test]
    fn timer_status_shows_a_carry_until_cleared() {
        let (mut pm, now, _) = at(0);
        assert_eq!(word(&mut pm, 0), 0);
        now.store(600 * SECOND, Ordering::Relaxed);
        assert_eq!(word(&mut pm, 0), TIMER_STATUS);
        pm.write(2, &[0, 0]);
        assert_eq!(
            word(&mut pm, 0),
            TIMER_STATUS,
            "a write of the enables clears nothing"
        );
        pm.write(0, &[1, 0]);
        assert_eq!(word(&mut pm, 0), 0);
    }

    #[test]
    fn sleep_enable_with_the_type_of_s5_powers_off() {
        let (mut pm, _, seen) = at(0);
        let value = u16::from(SLEEP_TYPE_S5) << 10;
        pm.write(4, &value.to_le_bytes());
        assert!(seen().is_empty());
        assert_eq!(word(&mut pm, 4), value | SCI_ENABLE);
        pm.write(4, &(value | SLEEP_ENABLE).to_le_bytes());
        assert_eq!(seen(), [MachineRequest::PowerOff]);
        assert_eq!(word(&mut pm, 4), value | SCI_ENABLE);
    }

    #[test]
    fn sleep_enable_by_a_byte_write_powers_off_and_other_types_do_not() {
        let (mut pm, _, seen) = at(0);
        pm.write(5, &[0x20 | 3 << 2]);
        assert!(seen().is_empty());
        pm.write(5, &[0x20 | 5 << 2]);
        assert_eq!(seen(), [MachineRequest::PowerOff]);
    }

    #[test]
    fn enable_bits_read_back_without_reserved_ones() {
        let (mut pm, ..) = at(0);
        pm.write(2, &[0xff, 0xff]);
        assert_eq!(word(&mut pm, 2), ENABLE_MASK);
    }

    #[test]
    fn restore_of_a_saved_state_is_the_identity() {
        let (mut pm, ..) = at(1000 * SECOND);
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
        let (mut other, _, seen) = at(1000 * SECOND);
        other.restore(&saved);
        assert_eq!(other.save(), saved);
        other.restore(&AcpiPmState {
            enable: 0xffff,
            control: 0xffff,
            timer_carries: 0,
        });
        assert_eq!(other.save().control, CONTROL_MASK);
        assert!(seen().is_empty());
    }
}
