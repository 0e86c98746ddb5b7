//! The common configuration structure. VIRTIO 1.2, "Common configuration structure layout".

use bitflags::bitflags;
use virtio_queue::{Queue, QueueT};

/// The vector number of a queue or configuration without a vector: VIRTIO_MSI_NO_VECTOR.
pub(super) const NO_VECTOR: u16 = 0xffff;

/// Offsets of the fields.
pub(super) mod field {
    pub const DEVICE_FEATURE_SELECT: u64 = 0x00;
    pub const DEVICE_FEATURE: u64 = 0x04;
    pub const DRIVER_FEATURE_SELECT: u64 = 0x08;
    pub const DRIVER_FEATURE: u64 = 0x0c;
    pub const CONFIG_VECTOR: u64 = 0x10;
    pub const NUM_QUEUES: u64 = 0x12;
    pub const DEVICE_STATUS: u64 = 0x14;
    pub const CONFIG_GENERATION: u64 = 0x15;
    pub const QUEUE_SELECT: u64 = 0x16;
    pub const QUEUE_SIZE: u64 = 0x18;
    pub const QUEUE_VECTOR: u64 = 0x1a;
    pub const QUEUE_ENABLE: u64 = 0x1c;
    pub const QUEUE_NOTIFY_OFF: u64 = 0x1e;
    pub const QUEUE_ADDRESSES: u64 = 0x20;
    pub const END: u64 = 0x38;
}

bitflags! {
    /// The device status field.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub struct DeviceStatus: u8 {
        /// The guest has found the device.
        const ACKNOWLEDGE = 1 << 0;
        /// The guest has a driver for it.
        const DRIVER = 1 << 1;
        /// The driver is ready.
        const DRIVER_OK = 1 << 2;
        /// The driver has accepted features, and the device has confirmed them.
        const FEATURES_OK = 1 << 3;
        /// The device stopped because of an error of the driver.
        const NEEDS_RESET = 1 << 6;
        /// The driver gave up.
        const FAILED = 1 << 7;
    }
}

/// The registers that the driver writes, except those of queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct CommonRegisters {
    /// Which half of the device's features is shown.
    pub device_feature_select: u32,
    /// Which half of the driver's features is written.
    pub driver_feature_select: u32,
    /// The features that the driver accepts.
    pub driver_features: u64,
    /// MSI-X vector of configuration changes.
    pub config_vector: u16,
    /// The device status.
    pub status: DeviceStatus,
    /// The configuration generation: it changes whenever the device-specific configuration does.
    pub generation: u8,
    /// The queue that the queue registers refer to.
    pub queue_select: u16,
    /// The reasons of an INTx interrupt: bit 0 a queue, bit 1 the configuration.
    pub isr: u8,
}

/// The half of the 64 feature bits that `select` names; 0 for any other selector.
pub(super) fn feature_half(features: u64, select: u32) -> u32 {
    match select {
        0 => (features & 0xffff_ffff) as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}

/// Replaces half of 64 feature bits.
pub(super) fn with_feature_half(features: u64, select: u32, half: u32) -> u64 {
    match select {
        0 => features & !0xffff_ffff | u64::from(half),
        1 => features & 0xffff_ffff | u64::from(half) << 32,
        _ => features,
    }
}

/// Reads half of one of the three ring addresses; `offset` counts from the first.
pub(super) fn read_address(queue: &Queue, offset: u64) -> u32 {
    let address = match offset / 8 {
        0 => queue.desc_table(),
        1 => queue.avail_ring(),
        _ => queue.used_ring(),
    };
    feature_half(address, u32::from(!offset.is_multiple_of(8)))
}

/// Writes half of one of the three ring addresses; a misaligned address is dropped.
pub(super) fn write_address(queue: &mut Queue, offset: u64, value: u32) {
    let (low, high) = if offset.is_multiple_of(8) {
        (Some(value), None)
    } else {
        (None, Some(value))
    };
    match offset / 8 {
        0 => queue.set_desc_table_address(low, high),
        1 => queue.set_avail_ring_address(low, high),
        _ => queue.set_used_ring_address(low, high),
    }
}
