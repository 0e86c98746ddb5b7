//! The interface of a virtio device to its transport.

use thiserror::Error;

use super::block::BlockState;
use super::queues::{QueueError, VirtQueues};

/// Device types. VIRTIO 1.2, "Device Types".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VirtioKind {
    /// A network card.
    Network,
    /// A disk.
    Block,
    /// A console, or a multiport serial device.
    Console,
    /// A source of random numbers.
    Entropy,
    /// A SCSI host adapter.
    Scsi,
    /// Sockets between guest and host.
    Socket,
    /// A file system of the host.
    FileSystem,
}

impl VirtioKind {
    /// The device ID of virtio.
    pub const fn id(self) -> u16 {
        match self {
            Self::Network => 1,
            Self::Block => 2,
            Self::Console => 3,
            Self::Entropy => 4,
            Self::Scsi => 8,
            Self::Socket => 19,
            Self::FileSystem => 26,
        }
    }

    /// The PCI class code.
    pub(super) const fn class(self) -> u32 {
        match self {
            Self::Network => 0x02_0000,
            Self::Block => 0x01_0000,
            Self::Console => 0x07_8000,
            Self::Entropy => 0xff_0000,
            Self::Scsi => 0x01_0000,
            Self::Socket => 0x02_8000,
            Self::FileSystem => 0x01_8000,
        }
    }

    /// The name in the log.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Network => "virtio-net",
            Self::Block => "virtio-blk",
            Self::Console => "virtio-console",
            Self::Entropy => "virtio-rng",
            Self::Scsi => "virtio-scsi",
            Self::Socket => "virtio-vsock",
            Self::FileSystem => "virtio-fs",
        }
    }
}

/// The saved state of a device behind its transport.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum VirtioDeviceState {
    /// A device that has no state besides its queues.
    Stateless,
    /// A disk.
    Block(BlockState),
    /// The position in the sequence of random numbers.
    Entropy(u64),
    /// A SCSI host adapter: what its driver set in the configuration.
    Scsi {
        /// Bytes of the sense data of a response.
        sense_size: u32,
        /// Bytes of the command of a request.
        cdb_size: u32,
    },
    /// A socket device. Its connections are not saved.
    Socket {
        /// The driver was ready.
        running: bool,
    },
}

/// Why a virtio function's state cannot be restored.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum VirtioStateError {
    /// The state is of other functions.
    #[error("the state is of a machine with other PCI devices")]
    OtherDevices,
    /// A queue's size or addresses are impossible.
    #[error("the state of a virtio queue is invalid")]
    Queue,
    /// The changes of a disk are outside of it.
    #[error("the state of a virtio disk is invalid")]
    Disk,
    /// The driver of a SCSI host adapter cannot have set these sizes.
    #[error("the state of a virtio SCSI host adapter is invalid")]
    Sizes,
}

/// A virtio device behind its transport.
pub trait VirtioDevice: Send {
    /// The type of the device.
    fn kind(&self) -> VirtioKind;

    /// The feature bits of the device type. Those of the transport are added.
    fn features(&self) -> u64 {
        0
    }

    /// The largest size of each queue, a power of two.
    fn queue_sizes(&self) -> Vec<u16>;

    /// The device-specific configuration.
    fn config(&self) -> Vec<u8> {
        Vec::new()
    }

    /// The driver writes to the device-specific configuration.
    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    /// The driver accepted these features and is ready.
    fn activate(&mut self, _features: u64) {}

    /// Resets the device to its state before a driver found it.
    fn reset(&mut self) {}

    /// Serves the requests of queue `index`.
    ///
    /// # Errors
    /// The driver violated the specification: the device stops until it is reset.
    fn process(&mut self, queues: &mut VirtQueues<'_>, index: usize) -> Result<(), QueueError>;

    /// The state, to be saved.
    fn save(&self) -> VirtioDeviceState {
        VirtioDeviceState::Stateless
    }

    /// Restores a state.
    ///
    /// # Errors
    /// The state is of another device or invalid; nothing has changed.
    fn restore(&mut self, state: &VirtioDeviceState) -> Result<(), VirtioStateError> {
        match state {
            VirtioDeviceState::Stateless => Ok(()),
            _ => Err(VirtioStateError::OtherDevices),
        }
    }
}
