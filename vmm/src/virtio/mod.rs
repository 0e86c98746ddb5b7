//! The host's side of virtio devices: the back ends of the models in `hindsight_devices::virtio`.

pub mod disk;
pub mod net;
pub mod share;
pub mod vsock;
