//! Disks: image files of the host as the contents of virtio disks.

mod image;
mod spec;

pub use image::{DiskError, open, open_disc};
pub use spec::{DiskFormat, DiskSpec};
