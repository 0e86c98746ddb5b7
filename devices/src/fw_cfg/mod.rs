//! QEMU's firmware configuration device, with its port interface and, for firmware, DMA.
//!
//! Follows QEMU's "QEMU Firmware Configuration (fw_cfg) Device". A guest selects an item by its key
//! and reads it byte by byte, or by DMA; named files get their keys from a directory. Numbers are
//! little endian, but those in the directory and of DMA are big endian.

mod dma;

use thiserror::Error;

use crate::bus::Device;
use crate::virtio::DmaMemory;
use dma::{DMA_SIGNATURE, DmaRequest};

/// First port, the selector; the data port is the next.
pub const FW_CFG_PORT: u16 = 0x510;
/// Number of ports of the selector and the data port.
pub const FW_CFG_PORTS: u16 = 2;
/// First port of the DMA address register; map it with first offset [`FW_CFG_DMA_OFFSET`].
pub const FW_CFG_DMA_PORT: u16 = 0x514;
/// Offset of the DMA address register, as the device receives it.
pub const FW_CFG_DMA_OFFSET: u16 = 4;
/// Number of ports of the DMA address register.
pub const FW_CFG_DMA_PORTS: u16 = 8;
/// The largest number of files in the directory.
pub const FILES_MAX: usize = 256;

const KEY_SIGNATURE: u16 = 0x00;
const KEY_ID: u16 = 0x01;
const KEY_RAM_SIZE: u16 = 0x03;
const KEY_NB_CPUS: u16 = 0x05;
const KEY_MAX_CPUS: u16 = 0x0f;
const KEY_FILE_DIRECTORY: u16 = 0x19;
const KEY_FIRST_FILE: u16 = 0x20;
/// Bit 14 of a key selected writing in old versions; it is ignored.
const KEY_WRITE: u16 = 1 << 14;
/// Interface revision: the port interface.
const ID: u32 = 1 << 0;
/// Interface revision: the port interface and DMA.
const ID_DMA: u32 = ID | 1 << 1;
/// Bytes of a name in the directory, with the terminating zero.
const NAME_SIZE: usize = 56;

/// A file that the device rejects.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum FwCfgError {
    /// The name is empty, too long, or not printable ASCII.
    #[error("fw_cfg file name {0:?} is not 1 to 55 printable ASCII characters")]
    BadName(String),
    /// A file of this name exists.
    #[error("fw_cfg file {0:?} already exists")]
    Duplicate(String),
    /// The directory has [`FILES_MAX`] files.
    #[error("fw_cfg holds at most {FILES_MAX} files")]
    TooManyFiles,
    /// The size does not fit into 32 bits.
    #[error("fw_cfg file {0:?} is too large")]
    TooLarge(String),
}

/// The item and the offset that the guest reads next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct FwCfgState {
    /// The selected key.
    pub key: u16,
    /// Offset of the next byte; at and past the end of the item, zeros are read.
    pub offset: u32,
    /// The upper half of the DMA address; a write of the lower half starts DMA.
    #[cfg_attr(feature = "serde", serde(default))]
    pub dma_address_high: u32,
}

/// The firmware configuration device with its items.
#[derive(Debug)]
pub struct FwCfg {
    cpus: [u8; 2],
    ram_size: [u8; 8],
    directory: Vec<u8>,
    /// Files in the order of their names; a file's index gives its key.
    files: Vec<(String, Vec<u8>)>,
    /// Guest memory, if there is DMA.
    memory: Option<DmaMemory>,
    state: FwCfgState,
}

impl FwCfg {
    /// A device without files, for a machine of `cpus` vCPUs and `ram_size` bytes of RAM.
    pub fn new(cpus: u16, ram_size: u64) -> Self {
        let mut device = Self {
            cpus: cpus.to_le_bytes(),
            ram_size: ram_size.to_le_bytes(),
            directory: Vec::new(),
            files: Vec::new(),
            memory: None,
            state: FwCfgState::default(),
        };
        device.build_directory();
        device
    }

    /// Adds DMA to and from `memory`.
    #[must_use]
    pub fn with_dma(mut self, memory: DmaMemory) -> Self {
        self.memory = Some(memory);
        self
    }

    /// Adds a file. Keys of other files may change: add all files before the guest runs.
    ///
    /// # Errors
    /// The name is not valid or in use, there are too many files, or the file has 4 GiB or more.
    pub fn add_file(&mut self, name: &str, contents: Vec<u8>) -> Result<(), FwCfgError> {
        let printable = name
            .bytes()
            .all(|byte| byte.is_ascii_graphic() || byte == b' ');
        if name.is_empty() || name.len() >= NAME_SIZE || !printable {
            return Err(FwCfgError::BadName(name.to_owned()));
        }
        if u32::try_from(contents.len()).is_err() {
            return Err(FwCfgError::TooLarge(name.to_owned()));
        }
        if self.files.len() == FILES_MAX {
            return Err(FwCfgError::TooManyFiles);
        }
        match self
            .files
            .binary_search_by(|(other, _)| other.as_str().cmp(name))
        {
            Ok(_) => return Err(FwCfgError::Duplicate(name.to_owned())),
            Err(index) => self.files.insert(index, (name.to_owned(), contents)),
        }
        self.build_directory();
        Ok(())
    }

    /// The guest's selection and offset, without the items, which are configuration.
    pub fn save(&self) -> FwCfgState {
        self.state
    }

    /// Replaces the state by a saved one; each of its values is possible.
    pub fn restore(&mut self, state: &FwCfgState) {
        self.state = *state;
    }

    fn build_directory(&mut self) {
        let count = u32::try_from(self.files.len()).expect("at most 256 files");
        self.directory.clear();
        self.directory.extend(count.to_be_bytes());
        for ((name, contents), key) in self.files.iter().zip(KEY_FIRST_FILE..) {
            let size = u32::try_from(contents.len()).expect("checked when the file was added");
            self.directory.extend(size.to_be_bytes());
            self.directory.extend(key.to_be_bytes());
            self.directory.extend([0; 2]);
            let mut field = [0; NAME_SIZE];
            field[..name.len()].copy_from_slice(name.as_bytes());
            self.directory.extend(field);
        }
    }

    fn item(&self) -> &[u8] {
        match self.state.key & !KEY_WRITE {
            KEY_SIGNATURE => b"QEMU",
            KEY_ID if self.memory.is_some() => &const { ID_DMA.to_le_bytes() },
            KEY_ID => &const { ID.to_le_bytes() },
            KEY_RAM_SIZE => &self.ram_size,
            KEY_NB_CPUS | KEY_MAX_CPUS => &self.cpus,
            KEY_FILE_DIRECTORY => &self.directory,
            key => {
                let index = key.checked_sub(KEY_FIRST_FILE).map(usize::from);
                let file = index.and_then(|index| self.files.get(index));
                file.map_or(&[], |(_, contents)| contents)
            }
        }
    }

    fn select(&mut self, key: u16) {
        self.state.key = key;
        self.state.offset = 0;
    }

    /// The bytes of the item from the offset on.
    fn rest(&self) -> &[u8] {
        let offset = usize::try_from(self.state.offset).unwrap_or(usize::MAX);
        self.item().get(offset..).unwrap_or(&[])
    }

    fn skip(&mut self, len: u32) {
        self.state.offset = self.state.offset.saturating_add(len);
    }

    fn next_byte(&mut self) -> u8 {
        let byte = self.rest().first().copied().unwrap_or(0);
        self.skip(1);
        byte
    }

    /// Writes half of the DMA address; the lower half starts the request at the address.
    fn write_dma_address(&mut self, offset: u64, half: u32) {
        let Some(memory) = self.memory.clone() else {
            return;
        };
        if offset == u64::from(FW_CFG_DMA_OFFSET) {
            self.state.dma_address_high = half;
            return;
        }
        let address = u64::from(self.state.dma_address_high) << 32 | u64::from(half);
        self.state.dma_address_high = 0;
        let Some(request) = DmaRequest::read(&memory, address) else {
            tracing::debug!("fw_cfg: the DMA request at {address:#x} is not in memory");
            return;
        };
        let done = request.run(&memory, self);
        request.complete(&memory, done);
    }
}

impl Device for FwCfg {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        if let Some(at) = offset.checked_sub(FW_CFG_DMA_OFFSET.into()) {
            for (byte, at) in data.iter_mut().zip(at..) {
                let signature = usize::try_from(at)
                    .ok()
                    .and_then(|at| DMA_SIGNATURE.get(at));
                *byte = signature.copied().unwrap_or(0);
            }
            return;
        }
        for byte in data {
            *byte = self.next_byte();
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        match (offset, data) {
            // Only a word write selects; bytes written to the data port are ignored.
            (0, &[low, high]) => self.select(u16::from_le_bytes([low, high])),
            (4 | 8, &[a, b, c, d]) => {
                self.write_dma_address(offset, u32::from_be_bytes([a, b, c, d]));
            }
            _ => {}
        }
    }
}

/// The contents of `etc/e820`: base, length and type of each range of the memory map.
pub fn e820_file(ranges: impl IntoIterator<Item = (u64, u64, u32)>) -> Vec<u8> {
    let mut file = Vec::new();
    for (base, len, range_type) in ranges {
        file.extend(base.to_le_bytes());
        file.extend(len.to_le_bytes());
        file.extend(range_type.to_le_bytes());
    }
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(device: &mut FwCfg, key: u16, len: usize) -> Vec<u8> {
        device.write(0, &key.to_le_bytes());
        let mut byte = [0];
        let mut next = || {
            device.read(1, &mut byte);
            byte[0]
        };
        (0..len).map(|_| next()).collect()
    }

    #[test]
    fn fixed_items_read_as_defined_and_zeros_follow() {
        let mut device = FwCfg::new(4, 0x1_2345_6000);
        assert_eq!(read(&mut device, 0x00, 5), b"QEMU\0");
        assert_eq!(read(&mut device, 0x01, 4), [1, 0, 0, 0]);
        assert_eq!(read(&mut device, 0x03, 8), 0x1_2345_6000_u64.to_le_bytes());
        assert_eq!(read(&mut device, 0x05, 2), [4, 0]);
        assert_eq!(read(&mut device, 0x0f, 2), [4, 0]);
        assert_eq!(read(&mut device, 0x4000, 4), b"QEMU");
        assert_eq!(read(&mut device, 0x02, 2), [0, 0]);
        assert_eq!(read(&mut device, 0x8003, 2), [0, 0]);
        assert_eq!(read(&mut device, 0xffff, 2), [0, 0]);
    }

    #[test]
    fn directory_lists_files_in_the_order_of_names() {
        let mut device = FwCfg::new(1, 0);
        device.add_file("opt/z", b"last".to_vec()).unwrap();
        device
            .add_file("etc/e820", e820_file([(0, 0xa_0000, 1)]))
            .unwrap();
        let directory = read(&mut device, 0x19, 4 + 2 * 64);
        assert_eq!(directory[..4], [0, 0, 0, 2]);
        assert_eq!(directory[4..12], [0, 0, 0, 20, 0, 0x20, 0, 0]);
        assert_eq!(directory[12..21], *b"etc/e820\0");
        assert_eq!(directory[68..76], [0, 0, 0, 4, 0, 0x21, 0, 0]);
        assert_eq!(read(&mut device, 0x21, 5), b"last\0");
        let e820 = read(&mut device, 0x20, 20);
        assert_eq!(
            e820,
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xa, 0, 0, 0, 0, 0, 1, 0, 0, 0]
        );
    }

    #[test]
    fn add_file_rejects_invalid_files() {
        let mut device = FwCfg::new(1, 0);
        for name in ["", "tab\t", "é", &"x".repeat(56)] {
            let error = FwCfgError::BadName(name.to_owned());
            assert_eq!(device.add_file(name, vec![]), Err(error), "{name:?}");
        }
        device.add_file(&"x".repeat(55), vec![]).unwrap();
        let taken = device.add_file(&"x".repeat(55), vec![]);
        assert!(matches!(taken, Err(FwCfgError::Duplicate(_))));
        for index in 1..FILES_MAX {
            device.add_file(&index.to_string(), vec![]).unwrap();
        }
        assert_eq!(
            device.add_file("one more", vec![]),
            Err(FwCfgError::TooManyFiles)
        );
    }

    #[test]
    fn byte_write_does_not_select() {
        let mut device = FwCfg::new(1, 0);
        read(&mut device, 0, 2);
        device.write(0, &[5]);
        device.write(1, &[5]);
        let mut byte = [0];
        device.read(1, &mut byte);
        assert_eq!(byte, *b"M");
    }

    #[test]
    fn restored_device_continues_at_the_saved_offset() {
        let mut device = FwCfg::new(1, 0);
        read(&mut device, 0, 2);
        let saved = device.save();
        let mut other = FwCfg::new(1, 0);
        assert_ne!(other.save(), saved);
        other.restore(&saved);
        let mut bytes = [0; 2];
        other.read(1, &mut bytes);
        assert_eq!(bytes, *b"MU");
        other.restore(&FwCfgState {
            key: 0,
            offset: u32::MAX,
            ..FwCfgState::default()
        });
        other.read(1, &mut bytes);
        assert_eq!(bytes, [0, 0]);
    }
}
