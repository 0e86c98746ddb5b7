//! The host's side of virtio devices: what stands behind the models in `hindsight_devices::virtio`.

pub mod disk;
pub mod net;
pub mod share;
