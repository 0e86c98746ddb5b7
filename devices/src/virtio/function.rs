//! The PCI function of a virtio device. VIRTIO 1.2, "Virtio Over PCI Bus".
//!
//! BAR 0 holds the four structures, a page each; BAR 1 the MSI-X table.

use std::fmt;

use virtio_queue::{Queue, QueueState, QueueT};

use super::common::{
    CommonRegisters, DeviceStatus, NO_VECTOR, feature_half, field, read_address, with_feature_half,
    write_address,
};
use super::device::{VirtioDevice, VirtioDeviceState, VirtioStateError};
use super::memory::DmaMemory;
use super::queues::{QueueError, VirtQueues};
use crate::pci::{BarLayout, ConfigSpace, MsiSender, Msix, MsixState, PciIdentity};

const VENDOR: u16 = 0x1af4;
/// PCI device IDs start here, plus the ID of the virtio device.
const DEVICE_BASE: u16 = 0x1040;
/// Revision of devices without a legacy interface.
const REVISION: u8 = 1;

const VENDOR_CAPABILITY: u8 = 9;
const STRUCTURES_BAR: usize = 0;
const MSIX_BAR: usize = 1;
/// Bytes of BAR 0.
const STRUCTURES_LEN: u32 = 0x4000;
const ISR_OFFSET: u64 = 0x1000;
const DEVICE_OFFSET: u64 = 0x2000;
const NOTIFY_OFFSET: u64 = 0x3000;
/// Bytes between the notification registers of two queues.
const NOTIFY_STRIDE: u64 = 4;
/// Bytes of BAR space of one function.
pub const BAR_SPACE: u32 = 0x8000;

/// Feature bits of the transport: indirect descriptors, event indices, VERSION_1.
const INDIRECT_DESC: u64 = 1 << 28;
const EVENT_IDX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;

const ISR_QUEUE: u8 = 1 << 0;
const ISR_CONFIG: u8 = 1 << 1;

/// Offset of the window of the PCI configuration access capability, in the capability.
const ACCESS_DATA: usize = 16;

/// The saved state of one queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct VirtQueueState {
    /// Elements, as the driver chose.
    pub size: u16,
    /// The driver enabled the queue.
    pub ready: bool,
    /// Position in the available ring.
    pub next_avail: u16,
    /// Position in the used ring.
    pub next_used: u16,
    /// Addresses of the descriptor table, the available and the used ring.
    pub addresses: [u64; 3],
    /// The driver uses event indices.
    pub event_idx: bool,
    /// MSI-X vector.
    pub vector: u16,
}

/// The saved state of a virtio function.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct VirtioFunctionState {
    /// The configuration space.
    pub config: Vec<u8>,
    /// The MSI-X registers.
    pub msix: MsixState,
    /// The common registers.
    pub common: CommonRegisters,
    /// The queues.
    pub queues: Vec<VirtQueueState>,
    /// The queues whose requests wait for the device, in the order in which it serves them.
    #[cfg_attr(feature = "serde", serde(default))]
    pub backlog: Vec<u16>,
    /// The device behind the transport.
    pub device: VirtioDeviceState,
}

/// The PCI function of a virtio device.
pub struct VirtioFunction {
    slot: u8,
    config: ConfigSpace,
    msix: Msix,
    /// Offset of the PCI configuration access capability.
    access: usize,
    common: CommonRegisters,
    queues: Vec<Queue>,
    vectors: Vec<u16>,
    /// The queues that had more requests than the device serves at a time, the first to serve first.
    backlog: Vec<u16>,
    device: Box<dyn VirtioDevice>,
    memory: DmaMemory,
}

impl fmt::Debug for VirtioFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VirtioFunction")
            .field("slot", &self.slot)
            .field("kind", &self.device.kind())
            .field("common", &self.common)
            .finish_non_exhaustive()
    }
}

/// The body of a capability that locates a structure in BAR 0.
fn structure(kind: u8, offset: u64, len: u64, extra: &[u8]) -> Vec<u8> {
    let size = 16 + extra.len();
    let mut body = vec![
        size.to_le_bytes()[0],
        kind,
        STRUCTURES_BAR.to_le_bytes()[0],
        0,
        0,
        0,
    ];
    body.extend(&offset.to_le_bytes()[..4]);
    body.extend(&len.to_le_bytes()[..4]);
    body.extend(extra);
    body
}

/// Whether `backlog` has numbers of `count` queues, each once.
fn are_queues(backlog: &[u16], count: usize) -> bool {
    backlog.len() <= count
        && backlog.iter().all(|&queue| usize::from(queue) < count)
        && (1..backlog.len()).all(|at| !backlog[..at].contains(&backlog[at]))
}

impl VirtioFunction {
    /// The function of `device` in a slot, with its BARs at `bars`.
    ///
    /// # Panics
    /// When the device has a queue whose size is not a power of two: a bug of the device.
    pub fn new(
        slot: u8,
        bars: u32,
        device: Box<dyn VirtioDevice>,
        memory: DmaMemory,
        sender: MsiSender,
    ) -> Self {
        let kind = device.kind();
        let mut config = ConfigSpace::new(PciIdentity {
            vendor: VENDOR,
            device: DEVICE_BASE + kind.id(),
            class: kind.class(),
            revision: REVISION,
            subsystem_vendor: VENDOR,
            subsystem: DEVICE_BASE + kind.id(),
        });
        let bar = |address, size| BarLayout { address, size };
        config.add_bar(STRUCTURES_BAR, bar(bars, STRUCTURES_LEN));
        config.add_bar(MSIX_BAR, bar(bars + STRUCTURES_LEN, Msix::BAR_LEN));
        config.add_interrupt_pin();
        let sizes = device.queue_sizes();
        let notify_len = sizes.len() as u64 * NOTIFY_STRIDE;
        let device_len = device.config().len() as u64;
        let common = structure(1, 0, field::END, &[]);
        config.add_capability(VENDOR_CAPABILITY, &common);
        let stride = NOTIFY_STRIDE.to_le_bytes();
        let notify = structure(2, NOTIFY_OFFSET, notify_len, &stride[..4]);
        config.add_capability(VENDOR_CAPABILITY, &notify);
        config.add_capability(VENDOR_CAPABILITY, &structure(3, ISR_OFFSET, 1, &[]));
        if device_len != 0 {
            let device = structure(4, DEVICE_OFFSET, device_len, &[]);
            config.add_capability(VENDOR_CAPABILITY, &device);
        }
        let access = config.add_capability(VENDOR_CAPABILITY, &structure(5, 0, 0, &[0; 4]));
        // BAR, offset and length of the access, and its data.
        config.allow(access + 4, &[0xff]);
        config.allow(access + 8, &[0xff; 12]);
        let msix = Msix::new(
            &mut config,
            MSIX_BAR.to_le_bytes()[0],
            sizes.len() + 1,
            sender,
        );
        let queues = sizes.iter().map(|&size| Queue::new(size));
        let queues: Result<Vec<_>, _> = queues.collect();
        let mut this = Self {
            slot,
            config,
            msix,
            access,
            common: CommonRegisters::default(),
            queues: queues.expect("sizes of queues are powers of two"),
            vectors: vec![NO_VECTOR; sizes.len()],
            backlog: Vec::new(),
            device,
            memory,
        };
        this.reset();
        this
    }

    /// Name and slot for messages.
    fn name(&self) -> String {
        format!("{} 00:{:02x}.0", self.device.kind().name(), self.slot)
    }

    /// The slot on bus 0.
    pub fn slot(&self) -> u8 {
        self.slot
    }

    fn features(&self) -> u64 {
        self.device.features() | INDIRECT_DESC | EVENT_IDX | VERSION_1
    }

    fn reset(&mut self) {
        self.common = CommonRegisters {
            config_vector: NO_VECTOR,
            generation: self.common.generation,
            ..CommonRegisters::default()
        };
        for queue in &mut self.queues {
            queue.reset();
            queue.set_size(queue.max_size());
        }
        self.vectors.fill(NO_VECTOR);
        self.backlog.clear();
        self.device.reset();
    }

    /// Applies a reset of the bus: the registers of `first`, and a device without a driver.
    pub fn bus_reset(&mut self, first: &VirtioFunctionState) {
        self.config.restore(&first.config);
        self.msix.restore(&first.msix);
        self.reset();
    }

    /// Whether the function asserts INTA#.
    pub fn intx_level(&self) -> bool {
        self.common.isr != 0 && !self.msix.is_enabled(&self.config) && !self.config.intx_disabled()
    }

    /// Reads configuration registers.
    pub fn config_read(&mut self, offset: usize, data: &mut [u8]) {
        self.config.set_interrupt_status(self.common.isr != 0);
        if let Some((bar, at, len)) = self.access_window(offset) {
            let mut window = [0; 4];
            self.bar_read(bar, at, &mut window[..len]);
            self.config.set(self.access + ACCESS_DATA, &window);
        }
        self.config.read(offset, data);
    }

    /// Writes configuration registers.
    pub fn config_write(&mut self, offset: usize, data: &[u8]) {
        self.config.write(offset, data);
        if let Some((bar, at, len)) = self.access_window(offset) {
            let window = self.config.dword(self.access + ACCESS_DATA).to_le_bytes();
            self.bar_write(bar, at, &window[..len]);
        }
        self.msix.send_pending(&self.config);
    }

    /// The BAR, offset and length that an access at `offset` reaches through the access capability.
    fn access_window(&self, offset: usize) -> Option<(usize, u64, usize)> {
        if offset != self.access + ACCESS_DATA {
            return None;
        }
        let [_, _, _, _, bar, ..] = {
            let mut bytes = [0; 8];
            self.config.read(self.access, &mut bytes);
            bytes
        };
        let at = self.config.dword(self.access + 8);
        let len = self.config.dword(self.access + 12);
        let len = usize::try_from(len)
            .ok()
            .filter(|len| [1, 2, 4].contains(len))?;
        let within = at.checked_add(4)? <= STRUCTURES_LEN;
        (usize::from(bar) == STRUCTURES_BAR && within).then_some((STRUCTURES_BAR, at.into(), len))
    }

    /// The BAR that decodes all of `len` bytes at `address`, and the offset in it.
    pub fn decode(&self, address: u64, len: usize) -> Option<(usize, u64)> {
        self.config.decode(address, len)
    }

    /// Reads `offset` in a BAR.
    pub fn bar_read(&mut self, bar: usize, offset: u64, data: &mut [u8]) {
        data.fill(0);
        match offset {
            _ if bar == MSIX_BAR => self.msix.read(offset, data),
            0..field::END => self.read_common(offset, data),
            ISR_OFFSET => {
                data[0] = std::mem::take(&mut self.common.isr);
            }
            DEVICE_OFFSET..NOTIFY_OFFSET => {
                let config = self.device.config();
                let from = usize::try_from(offset - DEVICE_OFFSET).unwrap_or(usize::MAX);
                for (to, from) in data.iter_mut().zip(config.iter().skip(from)) {
                    *to = *from;
                }
            }
            _ => {}
        }
    }

    /// Writes `offset` in a BAR.
    pub fn bar_write(&mut self, bar: usize, offset: u64, data: &[u8]) {
        match offset {
            _ if bar == MSIX_BAR => {
                self.msix.write(offset, data);
                self.msix.send_pending(&self.config);
            }
            0..field::END => self.write_common(offset, data),
            DEVICE_OFFSET..NOTIFY_OFFSET => {
                let at = usize::try_from(offset - DEVICE_OFFSET).unwrap_or(usize::MAX);
                self.device.write_config(at, data);
            }
            NOTIFY_OFFSET.. => {
                let queue = (offset - NOTIFY_OFFSET) / NOTIFY_STRIDE;
                self.serve(usize::try_from(queue).unwrap_or(usize::MAX));
            }
            _ => {}
        }
    }

    /// Serves all queues, after the host's side has supplied data or can accept more.
    pub fn serve_all(&mut self) {
        for index in 0..self.queues.len() {
            self.serve(index);
        }
    }

    /// Whether requests wait for [`VirtioFunction::serve_backlog`].
    pub fn has_backlog(&self) -> bool {
        !self.backlog.is_empty() && self.is_serving()
    }

    /// Serves the queue whose requests have waited longest, of those beyond what is served at a time.
    pub fn serve_backlog(&mut self) {
        if self.has_backlog() {
            self.serve(self.backlog[0].into());
        }
    }

    /// Reports a change of the device-specific configuration to the driver.
    pub fn config_changed(&mut self) {
        self.common.generation = self.common.generation.wrapping_add(1);
        if self.common.status.contains(DeviceStatus::DRIVER_OK) {
            self.common.isr |= ISR_CONFIG;
            self.msix.raise(&self.config, self.common.config_vector);
        }
    }

    /// Whether the driver is ready, the device has not stopped, and it may access memory.
    fn is_serving(&self) -> bool {
        let status = self.common.status;
        status.contains(DeviceStatus::DRIVER_OK)
            && !status.contains(DeviceStatus::NEEDS_RESET)
            && self.config.is_bus_master()
    }

    fn serve(&mut self, index: usize) {
        if !self.is_serving() || index >= self.queues.len() {
            return;
        }
        self.backlog.retain(|&queue| usize::from(queue) != index);
        let mut queues = VirtQueues::new(&self.memory, &mut self.queues);
        let served = self.device.process(&mut queues, index);
        let (last, left) = (queues.last(), queues.backlog());
        let interrupts = queues.take_interrupts();
        match interrupts {
            Ok(due) => self.raise_queues(due),
            Err(error) => return self.fail(last, &error),
        }
        if let Err(error) = served {
            return self.fail(last, &error);
        }
        for queue in (0..).take(self.queues.len()) {
            if left & 1 << queue != 0 && !self.backlog.contains(&queue) {
                self.backlog.push(queue);
            }
        }
    }

    fn raise_queues(&mut self, due: u64) {
        if due == 0 {
            return;
        }
        if !self.msix.is_enabled(&self.config) {
            self.common.isr |= ISR_QUEUE;
            return;
        }
        let vectors = self.vectors.iter().enumerate();
        for (_, &vector) in vectors.filter(|(index, _)| due & 1 << index != 0) {
            self.msix.raise(&self.config, vector);
        }
    }

    /// Stops the device until the driver resets it.
    fn fail(&mut self, queue: usize, error: &QueueError) {
        tracing::warn!(
            "{}: queue {queue}: {error}; the device needs a reset",
            self.name()
        );
        self.common.status |= DeviceStatus::NEEDS_RESET;
        self.config_changed();
    }

    fn selected(&self) -> Option<&Queue> {
        self.queues.get(usize::from(self.common.queue_select))
    }

    fn read_common(&self, offset: u64, data: &mut [u8]) {
        let common = &self.common;
        let index = usize::from(common.queue_select);
        let queue = self.selected();
        let value = match offset {
            field::DEVICE_FEATURE_SELECT => common.device_feature_select,
            field::DEVICE_FEATURE => feature_half(self.features(), common.device_feature_select),
            field::DRIVER_FEATURE_SELECT => common.driver_feature_select,
            field::DRIVER_FEATURE => {
                feature_half(common.driver_features, common.driver_feature_select)
            }
            field::CONFIG_VECTOR => common.config_vector.into(),
            field::NUM_QUEUES => u32::try_from(self.queues.len()).unwrap_or(0),
            field::DEVICE_STATUS => common.status.bits().into(),
            field::CONFIG_GENERATION => common.generation.into(),
            field::QUEUE_SELECT => common.queue_select.into(),
            field::QUEUE_SIZE => queue.map_or(0, |queue| queue.size().into()),
            field::QUEUE_VECTOR => {
                let vector = self.vectors.get(index).copied();
                vector.unwrap_or(NO_VECTOR).into()
            }
            field::QUEUE_ENABLE => queue.is_some_and(QueueT::ready).into(),
            field::QUEUE_NOTIFY_OFF => common.queue_select.into(),
            field::QUEUE_ADDRESSES..field::END if offset.is_multiple_of(4) => {
                let low = queue.map_or(0, |queue| read_address(queue, offset - 0x20));
                if data.len() == 8 {
                    let high = queue.map_or(0, |queue| read_address(queue, offset - 0x1c));
                    data[4..].copy_from_slice(&high.to_le_bytes());
                }
                low
            }
            _ => 0,
        };
        for (to, from) in data.iter_mut().zip(value.to_le_bytes()) {
            *to = from;
        }
    }

    fn write_common(&mut self, offset: u64, data: &[u8]) {
        if data.len() == 8 {
            let (low, high) = data.split_at(4);
            self.write_common(offset, low);
            return self.write_common(offset + 4, high);
        }
        let mut bytes = [0; 4];
        for (to, from) in bytes.iter_mut().zip(data) {
            *to = *from;
        }
        let value = u32::from_le_bytes(bytes);
        let short = (value & 0xffff) as u16;
        match offset {
            field::DEVICE_FEATURE_SELECT => self.common.device_feature_select = value,
            field::DRIVER_FEATURE_SELECT => self.common.driver_feature_select = value,
            field::DRIVER_FEATURE => {
                let accepted = self.common.status.contains(DeviceStatus::FEATURES_OK);
                let select = self.common.driver_feature_select;
                if !accepted {
                    let old = self.common.driver_features;
                    self.common.driver_features = with_feature_half(old, select, value);
                }
            }
            field::CONFIG_VECTOR => self.common.config_vector = self.checked_vector(short),
            field::DEVICE_STATUS => self.write_status(DeviceStatus::from_bits_truncate(bytes[0])),
            field::QUEUE_SELECT => self.common.queue_select = short,
            field::QUEUE_SIZE..field::END => self.write_queue(offset, value),
            _ => {}
        }
    }

    /// Returns `vector`, or [`NO_VECTOR`] if the device does not have it.
    ///
    /// The driver reads the field back to see whether the device accepted the vector.
    fn checked_vector(&self, vector: u16) -> u16 {
        if self.msix.has_vector(vector) {
            vector
        } else {
            NO_VECTOR
        }
    }

    fn write_queue(&mut self, offset: u64, value: u32) {
        let index = usize::from(self.common.queue_select);
        let short = (value & 0xffff) as u16;
        let vector = self.checked_vector(short);
        let Some(queue) = self.queues.get_mut(index) else {
            return;
        };
        match offset {
            field::QUEUE_VECTOR => self.vectors[index] = vector,
            // The driver must not change a queue that it has enabled.
            _ if queue.ready() => {}
            field::QUEUE_SIZE => queue.set_size(short),
            field::QUEUE_ENABLE if short == 1 => {
                queue.set_ready(true);
                if !queue.is_valid(&self.memory) {
                    queue.set_ready(false);
                    self.fail(index, &QueueError::Ring);
                }
            }
            field::QUEUE_ADDRESSES..field::END if offset.is_multiple_of(4) => {
                write_address(queue, offset - field::QUEUE_ADDRESSES, value);
            }
            _ => {}
        }
    }

    fn write_status(&mut self, status: DeviceStatus) {
        if status.is_empty() {
            return self.reset();
        }
        let old = self.common.status;
        let mut new = status | old & DeviceStatus::NEEDS_RESET;
        if new.contains(DeviceStatus::FEATURES_OK) && !old.contains(DeviceStatus::FEATURES_OK) {
            let features = self.common.driver_features;
            if features & VERSION_1 == 0 || features & !self.features() != 0 {
                new -= DeviceStatus::FEATURES_OK;
            }
        }
        self.common.status = new;
        let ready = DeviceStatus::DRIVER_OK;
        if new.contains(ready) && !old.contains(ready) {
            let features = self.common.driver_features;
            for queue in &mut self.queues {
                queue.set_event_idx(features & EVENT_IDX != 0);
            }
            self.device.activate(features);
        }
    }

    /// The state, to be saved.
    pub fn save(&self) -> VirtioFunctionState {
        let queues = self.queues.iter().zip(&self.vectors);
        VirtioFunctionState {
            config: self.config.save(),
            msix: self.msix.save(),
            common: self.common,
            queues: queues
                .map(|(queue, &vector)| VirtQueueState {
                    size: queue.size(),
                    ready: queue.ready(),
                    next_avail: queue.next_avail(),
                    next_used: queue.next_used(),
                    addresses: [queue.desc_table(), queue.avail_ring(), queue.used_ring()],
                    event_idx: queue.event_idx_enabled(),
                    vector,
                })
                .collect(),
            backlog: self.backlog.clone(),
            device: self.device.save(),
        }
    }

    /// Restores a state; drives no interrupt.
    ///
    /// # Errors
    /// The state is of another function or invalid; nothing has changed.
    pub fn restore(&mut self, state: &VirtioFunctionState) -> Result<(), VirtioStateError> {
        if state.queues.len() != self.queues.len() {
            return Err(VirtioStateError::OtherDevices);
        }
        let mut queues = Vec::new();
        for (own, saved) in self.queues.iter().zip(&state.queues) {
            let queue = Queue::try_from(QueueState {
                max_size: own.max_size(),
                next_avail: saved.next_avail,
                next_used: saved.next_used,
                event_idx_enabled: saved.event_idx,
                size: saved.size,
                ready: saved.ready,
                desc_table: saved.addresses[0],
                avail_ring: saved.addresses[1],
                used_ring: saved.addresses[2],
            });
            let queue = queue.map_err(|_| VirtioStateError::Queue)?;
            if queue.ready() && !queue.is_valid(&self.memory) {
                return Err(VirtioStateError::Queue);
            }
            queues.push(queue);
        }
        if !are_queues(&state.backlog, queues.len()) {
            return Err(VirtioStateError::Queue);
        }
        self.device.restore(&state.device)?;
        self.queues = queues;
        self.backlog.clone_from(&state.backlog);
        for (index, saved) in state.queues.iter().enumerate() {
            self.vectors[index] = self.checked_vector(saved.vector);
        }
        self.config.restore(&state.config);
        self.msix.restore(&state.msix);
        self.common = CommonRegisters {
            config_vector: self.checked_vector(state.common.config_vector),
            isr: state.common.isr & (ISR_QUEUE | ISR_CONFIG),
            ..state.common
        };
        Ok(())
    }
}
