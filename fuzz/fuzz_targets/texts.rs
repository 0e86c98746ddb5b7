//! Input logs, profiles and configurations: what is accepted can be written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, &str)| hindsight_fuzz::texts::check(input.0, input.1));
