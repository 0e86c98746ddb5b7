//! The queues and registers of one of the virtio devices, and what the host does meanwhile.
#![no_main]

use hindsight_fuzz::virtio::{Step, check};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, Vec<Step>)| check(input.0, &input.1));
