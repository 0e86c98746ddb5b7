//! Snapshots with changed numbers: each is refused, or makes a machine that runs without a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|changes: Vec<(u16, u64)>| hindsight_fuzz::snapshot::check(&changes));
