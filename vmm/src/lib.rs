//! stub

pub mod doctor;
pub mod kvm;
