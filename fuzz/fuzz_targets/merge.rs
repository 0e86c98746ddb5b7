//! Reports of shards: malformed ones are refused, and the order of files does not matter.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| hindsight_fuzz::merge::check(text));
