//! What firmware finds besides the devices of every machine: its configuration and its debug port.

use hindsight_devices::Device;
use hindsight_devices::acpi::{self, AcpiConfig, PciTables};
use hindsight_devices::fw_cfg::{self, FwCfg, FwCfgError};
use hindsight_devices::pci::FIRMWARE_WINDOW_BASE;
use hindsight_devices::serial::COM1_PORT;
use hindsight_devices::smbios::{self, SmbiosConfig};

use super::devices::Wiring;

/// The port to which SeaBIOS and OVMF write their debug messages.
pub(super) const FIRMWARE_LOG_PORT: u16 = 0x402;
/// What the port reads as, by which firmware detects it.
const LOG_PORT_ID: u8 = 0xe9;
/// Most bytes of a line; longer ones are broken.
const LINE_MAX: usize = 256;

/// The configuration device: of every machine the memory map, and for firmware what it needs.
pub(super) fn firmware_config(wiring: &Wiring<'_>) -> FwCfg {
    let layout = wiring.layout;
    let mut fw_cfg = FwCfg::new(wiring.cpus, layout.memory());
    let firmware = layout.firmware().is_some();
    let map = if firmware {
        layout.firmware_map()
    } else {
        layout.memory_map()
    };
    let e820 = fw_cfg::e820_file(map.iter().map(|e| (e.base, e.size, e.kind as u32)));
    let mut files = vec![("etc/e820", e820)];
    if firmware {
        if let Some(memory) = wiring.pci.memory() {
            fw_cfg = fw_cfg.with_dma(memory.clone());
        }
        files.extend(firmware_files(wiring));
        // SeaBIOS takes the option ROM of the PCI function with these IDs from this file.
        let rom = wiring.screen.as_ref();
        let rom = rom.and_then(|screen| screen.vga_bios.clone());
        files.extend(rom.map(|rom| ("pci1234,1111.rom", rom)));
    }
    add_files(&mut fw_cfg, files).expect("good names, each once, of a few KiB");
    fw_cfg
}

fn add_files(fw_cfg: &mut FwCfg, files: Vec<(&str, Vec<u8>)>) -> Result<(), FwCfgError> {
    files
        .into_iter()
        .try_for_each(|(name, contents)| fw_cfg.add_file(name, contents))
}

/// The files for firmware: ACPI, SMBIOS, and where its console is.
fn firmware_files(wiring: &Wiring<'_>) -> Vec<(&'static str, Vec<u8>)> {
    let window = wiring.layout.low_end().max(FIRMWARE_WINDOW_BASE);
    let config = AcpiConfig {
        apic_ids: (0..u32::from(wiring.cpus)).collect(),
        io_apic_id: u8::try_from(wiring.cpus).unwrap_or(u8::MAX),
        pci: PciTables::Firmware {
            window: u32::try_from(window).unwrap_or(u32::MAX),
        },
        screen: wiring.screen.is_some(),
    };
    let acpi = acpi::loader_files(&config).expect("1 to 64 processors");
    let (anchor, tables) = smbios::build(&SmbiosConfig {
        cpus: wiring.cpus,
        memory: wiring
            .layout
            .firmware_map()
            .iter()
            .map(|e| (e.base, e.size))
            .collect(),
    });
    let mut files = Vec::from(acpi.files);
    files.extend([
        (smbios::ANCHOR_FILE, anchor),
        (smbios::TABLES_FILE, tables),
        // SeaBIOS serves the screen and the keyboard of INT 10h and 16h there.
        (
            "etc/sercon-port",
            u64::from(COM1_PORT).to_le_bytes().to_vec(),
        ),
    ]);
    files
}

/// The debug port of firmware, whose lines are logged.
#[derive(Debug, Default)]
pub(super) struct FirmwareLog {
    line: Vec<u8>,
}

impl FirmwareLog {
    /// Adds a byte. Returns the line that it ends.
    fn add(&mut self, byte: u8) -> Option<String> {
        match byte {
            b'\n' => {}
            b'\r' => return None,
            _ => {
                self.line.push(byte);
                if self.line.len() < LINE_MAX {
                    return None;
                }
            }
        }
        let line = String::from_utf8_lossy(&self.line);
        let line = line.replace(|c: char| c.is_control(), "?");
        self.line.clear();
        Some(line)
    }
}

impl Device for FirmwareLog {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(LOG_PORT_ID);
    }

    fn write(&mut self, _offset: u64, data: &[u8]) {
        for &byte in data {
            if let Some(line) = self.add(byte) {
                tracing::debug!(target: "hindsight::firmware", "{line}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn firmware_log_has_a_line_at_each_line_feed_and_breaks_long_ones() {
        let mut log = FirmwareLog::default();
        let mut lines = Vec::new();
        for &byte in b"SeaBIOS\r\n\x1b[2J\n" {
            lines.extend(log.add(byte));
        }
        assert_eq!(lines, ["SeaBIOS", "?[2J"]);
        let long = (0..LINE_MAX).filter_map(|_| log.add(b'x')).count();
        assert_eq!(long, 1);
        assert_eq!(log.add(b'\n').as_deref(), Some(""));
    }

    #[test]
    fn firmware_log_port_is_detected() {
        let mut byte = [0];
        FirmwareLog::default().read(0, &mut byte);
        assert_eq!(byte, [0xe9]);
    }
}
