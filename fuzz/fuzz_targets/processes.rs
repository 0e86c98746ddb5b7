//! Memory with the tasks, files and modules of a Linux kernel, as a guest may have made them up.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| hindsight_fuzz::processes::check(bytes));
