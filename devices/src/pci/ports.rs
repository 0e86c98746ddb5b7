//! The ports of PCI configuration mechanism #1, and the reset control register.
//!
//! Follows the PCI Local Bus Specification 3.0, "Configuration Mechanism #1", and, for port 0xcf9,
//! the Intel ICH data sheets, "RST_CNT - Reset Control Register". A function that does not exist reads
//! as all ones.

use super::root::SharedRoot;
use crate::bus::{Device, lock};
use crate::hooks::{MachineRequest, Requests};

/// First port: CONFIG_ADDRESS, with the reset control register as its second byte.
pub const PCI_PORT: u16 = 0xcf8;
/// Number of ports up to the end of CONFIG_DATA.
pub const PCI_PORTS: u16 = 8;
/// Port of the reset control register, for the FADT.
pub const RESET_PORT: u16 = 0xcf9;
/// Value that resets the machine when written to [`RESET_PORT`].
pub const RESET_VALUE: u8 = SYSTEM_RESET | RESET_CPU;

const ADDRESS_OFFSET: u64 = 0;
const RESET_OFFSET: u64 = 1;
/// First offset of CONFIG_DATA.
const DATA_OFFSET: u64 = 4;
/// Bit 31 of CONFIG_ADDRESS: CONFIG_DATA accesses the configuration space.
const ENABLE: u32 = 1 << 31;
/// Bits 30:24 and 1:0 of CONFIG_ADDRESS are read-only zeros.
const ADDRESS_MASK: u32 = 0x80ff_fffc;
const SYSTEM_RESET: u8 = 1 << 1;
const RESET_CPU: u8 = 1 << 2;
const FULL_RESET: u8 = 1 << 3;

/// The registers of the configuration ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PciState {
    /// CONFIG_ADDRESS.
    pub address: u32,
    /// The reset control register.
    pub reset_control: u8,
}

/// The configuration ports.
#[derive(Debug)]
pub struct PciConfig {
    state: PciState,
    requests: Requests,
    /// The bus behind them; `None` if it is empty.
    root: Option<SharedRoot>,
}

impl PciConfig {
    /// The ports of an empty bus, after reset.
    pub fn new(requests: Requests) -> Self {
        Self {
            state: PciState::default(),
            requests,
            root: None,
        }
    }

    /// The ports of `root`, after reset.
    pub fn with_root(requests: Requests, root: SharedRoot) -> Self {
        Self {
            root: Some(root),
            ..Self::new(requests)
        }
    }

    /// The bus, and the device, function and register that an access to CONFIG_DATA reaches.
    fn target(&self, offset: u64) -> Option<(&SharedRoot, u8, usize)> {
        let address = self.state.address;
        let byte = offset.checked_sub(DATA_OFFSET)?;
        let [_, device_function, bus, _] = address.to_le_bytes();
        if address & ENABLE == 0 || bus != 0 {
            return None;
        }
        let register = usize::try_from(u64::from(address & 0xfc) + byte).ok()?;
        Some((self.root.as_ref()?, device_function, register))
    }

    /// The registers.
    pub fn save(&self) -> PciState {
        self.state
    }

    /// Sets saved registers, without the bits that do not exist; requests nothing.
    pub fn restore(&mut self, state: &PciState) {
        self.state.address = state.address & ADDRESS_MASK;
        self.state.reset_control = state.reset_control & (SYSTEM_RESET | RESET_CPU | FULL_RESET);
    }

    fn write_reset_control(&mut self, value: u8) {
        let rises = value & !self.state.reset_control;
        self.state.reset_control = value & (SYSTEM_RESET | RESET_CPU | FULL_RESET);
        if rises & RESET_CPU != 0 {
            self.requests.send(MachineRequest::Reset);
        }
    }
}

impl Device for PciConfig {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        match (offset, data.len()) {
            (ADDRESS_OFFSET, 4) => data.copy_from_slice(&self.state.address.to_le_bytes()),
            (RESET_OFFSET, 1) => data.fill(self.state.reset_control),
            _ => match self.target(offset) {
                Some((root, function, register)) => {
                    lock(root).config_read(function, register, data);
                }
                None => data.fill(0xff),
            },
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        match (offset, data) {
            (ADDRESS_OFFSET, &[a, b, c, d]) => {
                self.state.address = u32::from_le_bytes([a, b, c, d]) & ADDRESS_MASK;
            }
            (RESET_OFFSET, &[value]) => self.write_reset_control(value),
            _ => {
                if let Some((root, function, register)) = self.target(offset) {
                    lock(root).config_write(function, register, data);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hooks::test::collector;

    #[test]
    fn config_address_reads_back_only_as_a_double_word() {
        let mut pci = PciConfig::new(collector().0);
        pci.write(0, &0x8000_0001_u32.to_le_bytes());
        let mut data = [0; 4];
        pci.read(0, &mut data);
        assert_eq!(u32::from_le_bytes(data), 0x8000_0000);
        pci.write(3, &[1]);
        pci.read(0, &mut data);
        assert_eq!(u32::from_le_bytes(data), 0x8000_0000);
        let mut byte = [0];
        pci.read(0, &mut byte);
        assert_eq!(byte, [0xff], "no configuration mechanism #2");
    }

    #[test]
    fn config_data_reads_ones_in_each_size() {
        let mut pci = PciConfig::new(collector().0);
        let (mut dword, mut word) = ([0; 4], [0; 2]);
        pci.write(4, &dword);
        pci.read(4, &mut dword);
        pci.read(6, &mut word);
        assert_eq!((dword, word), ([0xff; 4], [0xff; 2]));
    }

    #[test]
    fn reset_control_requests_reset_when_the_cpu_bit_rises() {
        let (requests, sent) = collector();
        let mut pci = PciConfig::new(requests);
        pci.write(1, &[SYSTEM_RESET]);
        assert!(sent().is_empty());
        pci.write(1, &[RESET_VALUE]);
        assert_eq!(sent(), [MachineRequest::Reset]);
        pci.write(1, &[RESET_VALUE]);
        assert!(sent().is_empty());
        assert_eq!(
            pci.save(),
            PciState {
                address: 0,
                reset_control: RESET_VALUE
            }
        );
    }

    #[test]
    fn restore_clears_bits_that_do_not_exist() {
        let (requests, sent) = collector();
        let mut pci = PciConfig::new(requests);
        pci.restore(&PciState {
            address: u32::MAX,
            reset_control: 0xff,
        });
        assert_eq!(
            pci.save(),
            PciState {
                address: ADDRESS_MASK,
                reset_control: 0x0e
            }
        );
        assert!(sent().is_empty());
    }
}
