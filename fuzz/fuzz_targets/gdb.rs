//! The gdb stub: its packet filter, the parsers behind it and the monitor commands, with a machine that
//! is there. Any bytes, in any pieces, from a client that goes away in the middle; after each the next
//! client must be served.
#![no_main]

use std::sync::Mutex;

use hindsight_fuzz::gdb::Debuggee;
use libfuzzer_sys::fuzz_target;

static DEBUGGEE: Mutex<Option<Debuggee>> = Mutex::new(None);

fuzz_target!(|input: &[u8]| {
    let mut place = DEBUGGEE.lock().expect("no panic came before");
    let debuggee = place.get_or_insert_with(Debuggee::start);
    debuggee.talk(input);
    if !debuggee.serves() {
        // A client may end the machine.
        *place = None;
    }
});
