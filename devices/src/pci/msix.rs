//! MSI-X: PCI Local Bus Specification 3.0, "MSI-X Capability and Table Structures".

use std::fmt;
use std::sync::Arc;

use super::ConfigSpace;

/// Capability ID.
const CAPABILITY: u8 = 0x11;
/// Message Control bit 15: MSI-X is enabled.
const ENABLE: u16 = 1 << 15;
/// Message Control bit 14: all vectors are masked.
const FUNCTION_MASK: u16 = 1 << 14;
/// Vector Control bit 0: the vector is masked.
const VECTOR_MASK: u32 = 1;
/// Bytes of a table entry.
const ENTRY_LEN: u64 = 16;
/// Offset of the pending bits in the BAR of the table.
const PENDING_OFFSET: u64 = 0x800;
/// Maximum number of vectors of a function, so that the table ends before the pending bits.
const VECTORS_MAX: usize = 64;
/// Upper bits of the addresses that local APICs answer; a message to any other address is dropped.
const APIC_ADDRESSES: u32 = 0xfee;

/// Sends a message-signalled interrupt: the low half of its address, and its data.
#[derive(Clone)]
pub struct MsiSender(Arc<dyn Fn(u32, u32) + Send + Sync>);

impl MsiSender {
    /// A handle that calls `send` for each message.
    pub fn new(send: impl Fn(u32, u32) + Send + Sync + 'static) -> Self {
        Self(Arc::new(send))
    }
}

impl fmt::Debug for MsiSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MsiSender")
    }
}

/// The MSI-X registers in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct MsixState {
    /// Address low, address high, data and vector control of each vector.
    pub table: Vec<[u32; 4]>,
    /// Pending bits.
    pub pending: u64,
}

/// The MSI-X capability of a function.
#[derive(Debug)]
pub struct Msix {
    state: MsixState,
    /// Offset of the capability.
    capability: usize,
    sender: MsiSender,
}

impl Msix {
    /// Bytes of the BAR with table and pending bits.
    pub const BAR_LEN: u32 = 0x1000;

    /// Adds the capability for `vectors` vectors, whose table is in BAR number `bar`.
    pub fn new(config: &mut ConfigSpace, bar: u8, vectors: usize, sender: MsiSender) -> Self {
        let vectors = vectors.clamp(1, VECTORS_MAX);
        let mut body = Vec::new();
        let [last, ..] = (vectors - 1).to_le_bytes();
        body.extend(u16::from(last).to_le_bytes());
        body.extend(u32::from(bar).to_le_bytes());
        let [low, high, ..] = PENDING_OFFSET.to_le_bytes();
        body.extend([low | bar, high, 0, 0]);
        let capability = config.add_capability(CAPABILITY, &body);
        config.allow(capability + 2, &(ENABLE | FUNCTION_MASK).to_le_bytes());
        Self {
            state: MsixState {
                table: vec![[0, 0, 0, VECTOR_MASK]; vectors],
                pending: 0,
            },
            capability,
            sender,
        }
    }

    fn control(&self, config: &ConfigSpace) -> u16 {
        let [_, _, low, high] = config.dword(self.capability).to_le_bytes();
        u16::from_le_bytes([low, high])
    }

    /// Whether the guest uses MSI-X instead of INTx.
    pub fn is_enabled(&self, config: &ConfigSpace) -> bool {
        self.control(config) & ENABLE != 0
    }

    /// Whether there is a vector of this number.
    pub fn has_vector(&self, vector: u16) -> bool {
        usize::from(vector) < self.state.table.len()
    }

    /// Raises a vector: sends its message, or makes it pending while it is masked.
    pub fn raise(&mut self, config: &ConfigSpace, vector: u16) {
        if self.has_vector(vector) {
            self.state.pending |= 1 << vector;
            self.send_pending(config);
        }
    }

    /// Sends the messages of pending vectors that are not masked. To be called after each write to
    /// the table and to the configuration space.
    pub fn send_pending(&mut self, config: &ConfigSpace) {
        let control = self.control(config);
        if control & ENABLE == 0 || control & FUNCTION_MASK != 0 || !config.is_bus_master() {
            return;
        }
        for (vector, [low, high, data, mask]) in self.state.table.iter().enumerate() {
            let bit = 1 << vector;
            if self.state.pending & bit != 0 && mask & VECTOR_MASK == 0 {
                self.state.pending &= !bit;
                if *high == 0 && low >> 20 == APIC_ADDRESSES {
                    (self.sender.0)(*low, *data);
                }
            }
        }
    }

    /// Reads the table or the pending bits, in double or quad words.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        for (chunk, offset) in data.chunks_mut(4).zip((offset..).step_by(4)) {
            let word = self.read_word(offset);
            if offset.is_multiple_of(4) && chunk.len() == 4 {
                chunk.copy_from_slice(&word.to_le_bytes());
            } else {
                chunk.fill(0xff);
            }
        }
    }

    fn read_word(&self, offset: u64) -> u32 {
        match self.entry_word(offset) {
            Some((entry, word)) => self.state.table[entry][word],
            None if offset == PENDING_OFFSET => (self.state.pending & 0xffff_ffff) as u32,
            None if offset == PENDING_OFFSET + 4 => (self.state.pending >> 32) as u32,
            None => 0,
        }
    }

    /// Writes the table, in double or quad words; other writes have no effect.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        for (chunk, offset) in data.chunks(4).zip((offset..).step_by(4)) {
            if let (Some((entry, word)), Ok(bytes)) = (self.entry_word(offset), chunk.try_into())
                && offset.is_multiple_of(4)
            {
                let mask = match word {
                    0 => !3,
                    3 => VECTOR_MASK,
                    _ => u32::MAX,
                };
                self.state.table[entry][word] = u32::from_le_bytes(bytes) & mask;
            }
        }
    }

    fn entry_word(&self, offset: u64) -> Option<(usize, usize)> {
        let entry = usize::try_from(offset / ENTRY_LEN).ok()?;
        let word = usize::try_from(offset % ENTRY_LEN / 4).ok()?;
        (entry < self.state.table.len()).then_some((entry, word))
    }

    /// Masks all vectors and drops what is pending, as a reset does.
    pub fn reset(&mut self) {
        self.state.table.fill([0, 0, 0, VECTOR_MASK]);
        self.state.pending = 0;
    }

    /// The registers in memory.
    pub fn save(&self) -> MsixState {
        self.state.clone()
    }

    /// Restores the registers in memory; sends nothing. Vectors that do not exist are dropped.
    pub fn restore(&mut self, state: &MsixState) {
        for (own, saved) in self.state.table.iter_mut().zip(&state.table) {
            let [low, high, data, control] = *saved;
            *own = [low & !3, high, data, control & VECTOR_MASK];
        }
        let vectors = self.state.table.len();
        let all = u64::MAX >> (VECTORS_MAX - vectors);
        self.state.pending = state.pending & all;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pci::PciIdentity;
    use std::sync::Mutex;

    type Sent = Arc<Mutex<Vec<(u32, u32)>>>;

    fn function() -> (ConfigSpace, Msix, Sent) {
        let mut config = ConfigSpace::new(PciIdentity {
            vendor: 1,
            device: 2,
            class: 3,
            revision: 0,
            subsystem_vendor: 0,
            subsystem: 0,
        });
        let sent = Sent::default();
        let log = sent.clone();
        let sender = MsiSender::new(move |address, data| log.lock().unwrap().push((address, data)));
        let msix = Msix::new(&mut config, 1, 2, sender);
        config.write(4, &[4, 0]);
        (config, msix, sent)
    }

    fn write_entry(msix: &mut Msix, vector: u64, entry: [u32; 4]) {
        for (word, value) in entry.iter().enumerate() {
            msix.write(vector * 16 + 4 * word as u64, &value.to_le_bytes());
        }
    }

    #[test]
    fn capability_names_table_and_pending_bits() {
        let (config, _, _) = function();
        assert_eq!(config.dword(0x40), 0x0001_0011, "two vectors");
        assert_eq!(config.dword(0x44), 0x0000_0001, "table at 0 in BAR 1");
        assert_eq!(config.dword(0x48), 0x0000_0801, "pending bits in BAR 1");
    }

    #[test]
    fn masked_vector_is_sent_when_it_is_unmasked() {
        let (mut config, mut msix, sent) = function();
        config.write(0x42, &0x8000_u16.to_le_bytes());
        write_entry(&mut msix, 1, [0xfee0_1000, 0, 0x31, 1]);
        msix.raise(&config, 1);
        let mut pending = [0; 8];
        msix.read(0x800, &mut pending);
        assert_eq!((pending[0], sent.lock().unwrap().len()), (2, 0));
        msix.write(16 + 12, &0_u32.to_le_bytes());
        msix.send_pending(&config);
        assert_eq!(*sent.lock().unwrap(), [(0xfee0_1000, 0x31)]);
        assert_eq!(msix.save().pending, 0);
    }

    #[test]
    fn function_mask_and_bus_master_hold_messages_back() {
        let (mut config, mut msix, sent) = function();
        write_entry(&mut msix, 0, [0xfee0_0000, 0, 0x40, 0]);
        config.write(0x42, &0xc000_u16.to_le_bytes());
        msix.raise(&config, 0);
        config.write(0x42, &0x8000_u16.to_le_bytes());
        config.write(4, &[0, 0]);
        msix.send_pending(&config);
        assert!(sent.lock().unwrap().is_empty());
        config.write(4, &[4, 0]);
        msix.send_pending(&config);
        assert_eq!(sent.lock().unwrap().len(), 1);
    }

    #[test]
    fn message_to_another_address_is_dropped() {
        let (mut config, mut msix, sent) = function();
        config.write(0x42, &0x8000_u16.to_le_bytes());
        write_entry(&mut msix, 0, [0x1000, 0, 1, 0]);
        write_entry(&mut msix, 1, [0xfee0_0000, 1, 1, 0]);
        msix.raise(&config, 0);
        msix.raise(&config, 1);
        msix.raise(&config, 2);
        assert!(sent.lock().unwrap().is_empty());
    }

    #[test]
    fn restored_registers_have_no_other_bits() {
        let (_, mut msix, _) = function();
        msix.restore(&MsixState {
            table: vec![[u32::MAX; 4]; 70],
            pending: u64::MAX,
        });
        let saved = msix.save();
        assert_eq!(saved.table, [[!3, u32::MAX, u32::MAX, 1]; 2]);
        assert_eq!(saved.pending, 3);
    }
}
