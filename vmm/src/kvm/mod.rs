//! KVM: the only module with ioctls.

pub mod ioctls;
