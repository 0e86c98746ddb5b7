//! x
#![no_std]
#![no_main]
use hindsight_guest::prelude::*;
payload!("debugctl");
