//! The server of gdb's protocol: its packet filter, the parsers behind it and the monitor commands, with
//! a toy machine for each input. A client sends the input in two pieces and disconnects; then the next
//! client must get a reply, unless the first one has ended the machine.
#![no_main]

use hindsight_fuzz::gdb::Debuggee;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let debuggee = Debuggee::start();
    debuggee.talk(input);
    debuggee.check();
});
