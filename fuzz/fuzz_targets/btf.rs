//! Type information of a kernel: reading it ends, whatever a guest has in it.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| hindsight_fuzz::btf::check(bytes));
