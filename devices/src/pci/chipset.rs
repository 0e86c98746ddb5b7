//! The chipset that PC firmware expects: Intel 440FX host bridge and, in slot 1, PIIX.
//!
//! Intel 82441FX and 82371AB (PIIX4) data sheets. Firmware finds by them how to unlock the BIOS area,
//! where the power management registers are, and that interrupts can be routed. Deviations: the BIOS
//! area is RAM whatever the PAM registers say, there is no SMRAM, interrupts of PCI go to the I/O
//! APIC only, and the power management registers cannot be moved; they answer at 0xb000 too, where
//! OVMF powers off without reading their base.

use super::{ConfigSpace, PciIdentity};
use crate::acpi_pm::PM_PORT;

/// The slot of the first device: the chipset occupies those before it.
pub(super) const FIRST_DEVICE_SLOT: u8 = 2;

const INTEL: u16 = 0x8086;
/// PAM0 to PAM6 of the host bridge, a byte each.
const PAM: usize = 0x59;
const PAM_COUNT: usize = 7;
/// SMRAM control of the host bridge.
const SMRAM: usize = 0x72;
/// SMRAM control after reset: compatible SMRAM at 0xa0000, closed.
const SMRAM_RESET: u8 = 0x02;
/// The open, close and enable bits of SMRAM control. Without SMRAM, the lock bit cannot be set.
const SMRAM_WRITABLE: u8 = 0x68;

/// Command register of the ISA bridge.
const COMMAND: usize = 0x04;
/// I/O space, memory space and bus master: the bridge forwards ports, where OVMF finds COM1.
const DECODES_ISA: u8 = 0x07;
/// Header type, bit 7: the slot has several functions.
const HEADER_TYPE: usize = 0x0e;
const MULTI_FUNCTION: u8 = 1 << 7;
/// PIRQ routing of the ISA bridge, a byte for each of four lines.
const PIRQ: usize = 0x60;
/// A line that is not routed.
const PIRQ_OFF: u8 = 1 << 7;

/// Base address of the power management registers, with bit 0 set for ports.
const PM_BASE: usize = 0x40;
/// The byte of DEVACTB with APMC_EN: SMIs are set up, so that firmware does not set them up.
const DEVACTB_APMC: usize = 0x5b;
const APMC_ENABLE: u8 = 1 << 1;
/// PMREGMISC, bit 0: the power management registers answer.
const PM_REGISTERS: usize = 0x80;
const PM_ENABLED: u8 = 1 << 0;
/// The function of slot 1 with the power management registers.
const POWER_FUNCTION: u8 = 3;

const fn identity(device: u16, class: u32, revision: u8) -> PciIdentity {
    PciIdentity {
        vendor: INTEL,
        device,
        class,
        revision,
        subsystem_vendor: 0x1af4,
        subsystem: 0x1100,
    }
}

/// The 82441FX.
pub(super) fn host_bridge() -> ConfigSpace {
    let mut space = ConfigSpace::new(identity(0x1237, 0x06_0000, 2));
    space.allow(PAM, &[0xff; PAM_COUNT]);
    space.set(SMRAM, &[SMRAM_RESET]);
    space.allow(SMRAM, &[SMRAM_WRITABLE]);
    space
}

/// The functions of slot 1.
#[derive(Clone, Debug)]
pub(super) struct Chipset {
    isa: ConfigSpace,
    power: ConfigSpace,
}

impl Chipset {
    /// The functions after reset.
    pub(super) fn new() -> Self {
        let mut isa = ConfigSpace::new(identity(0x7000, 0x06_0100, 0));
        isa.set(COMMAND, &[DECODES_ISA]);
        isa.allow(COMMAND, &[DECODES_ISA]);
        isa.set(HEADER_TYPE, &[MULTI_FUNCTION]);
        isa.set(PIRQ, &[PIRQ_OFF; 4]);
        isa.allow(PIRQ, &[0xff; 4]);
        let mut power = ConfigSpace::new(identity(0x7113, 0x06_8000, 3));
        power.set(PM_BASE, &(u32::from(PM_PORT) | 1).to_le_bytes());
        power.set(DEVACTB_APMC, &[APMC_ENABLE]);
        power.set(PM_REGISTERS, &[PM_ENABLED]);
        Self { isa, power }
    }

    /// A function of slot 1.
    pub(super) fn function(&mut self, function: u8) -> Option<&mut ConfigSpace> {
        match function {
            0 => Some(&mut self.isa),
            POWER_FUNCTION => Some(&mut self.power),
            _ => None,
        }
    }

    /// The configuration spaces.
    pub(super) fn save(&self) -> Vec<Vec<u8>> {
        vec![self.isa.save(), self.power.save()]
    }

    /// Restores what guests can change.
    pub(super) fn restore(&mut self, saved: &[Vec<u8>]) {
        for (space, saved) in [&mut self.isa, &mut self.power].into_iter().zip(saved) {
            space.restore(saved);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_those_of_the_data_sheets() {
        let mut chipset = Chipset::new();
        assert_eq!(host_bridge().dword(0), 0x1237_8086);
        assert_eq!(chipset.function(0).unwrap().dword(0), 0x7000_8086);
        assert_eq!(chipset.function(0).unwrap().dword(0x0c), 0x0080_0000);
        assert_eq!(chipset.function(3).unwrap().dword(0), 0x7113_8086);
        assert!(chipset.function(1).is_none());
        let isa = chipset.function(0).unwrap();
        assert_eq!(isa.dword(4), 7, "forwards ports");
        isa.write(4, &[6]);
        assert_eq!(isa.dword(4), 6, "the bit of ports can be tested");
    }

    #[test]
    fn pam_and_smram_read_back_and_the_lock_bit_stays_clear() {
        const LOCK: u32 = 1 << 20;
        let mut space = host_bridge();
        space.write(0x58, &[0, 0x30, 0x33, 0x33]);
        assert_eq!(space.dword(0x58), 0x3333_3000);
        space.write(SMRAM, &[0xff]);
        assert_eq!(space.dword(0x70), 0x006a_0000);
        assert_eq!(space.dword(0x70) & LOCK, 0);
    }

    #[test]
    fn power_management_registers_stay_at_their_ports() {
        let mut chipset = Chipset::new();
        let power = chipset.function(3).unwrap();
        power.write(PM_BASE, &0xb001_u32.to_le_bytes());
        power.write(PM_REGISTERS, &[0]);
        assert_eq!((power.dword(PM_BASE), power.dword(0x80)), (0x601, 1));
        assert_eq!(power.dword(0x58), 1 << 25);
    }

    #[test]
    fn restored_functions_have_the_saved_routing() {
        let mut chipset = Chipset::new();
        chipset.function(0).unwrap().write(PIRQ, &[10, 11]);
        let saved = chipset.save();
        let mut other = Chipset::new();
        assert_ne!(other.save(), saved);
        other.restore(&saved);
        assert_eq!(other.save(), saved);
    }
}
