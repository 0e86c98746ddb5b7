//! Guests in every mode, on two kinds of processor, with MSRs, APICs, ports and tables in their reach:
//! the machine neither panics nor hangs.
#![no_main]

use hindsight_fuzz::guest::Guest;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|guest: Guest| guest.run());
