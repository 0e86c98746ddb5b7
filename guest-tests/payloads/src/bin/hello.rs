//! The smallest payload: for measuring start-up. With an empty command line it goes from the entry
//! point to the exit port in about fifty instructions, and says nothing.

#![no_std]
#![no_main]

use hindsight_guest::info::StartInfo;
use hindsight_guest::prelude::*;
use hindsight_guest::{exit, run};

entry!(start);

fn start(info: StartInfo) -> ! {
    if info.has_command_line() {
        run::run("hello", info);
    }
    exit::exit(0);
}

case! {
    name: "hello", cpl: [0], rules: [], needs: [],
    about: "the image boots, prints and exits",
    fn body(_ctx) {}
}
