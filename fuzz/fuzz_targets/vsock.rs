//! The queues and the packets of a socket device, and what the host does meanwhile.
#![no_main]

use hindsight_fuzz::vsock::{Step, check};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|steps: Vec<Step>| check(&steps));
