//! Exceptions: vectors, error codes, saved addresses.

#![no_std]
#![no_main]

use hindsight_guest::insn;
use hindsight_guest::prelude::*;

payload!("exceptions");

case! {
    name: "ud2", cpl: [0, 3], rules: [], needs: ["exceptions"], needs_cpl3: ["iretq-cpl3"],
    about: "UD2 raises #UD",
    fn body(ctx) {
        let fault = ctx.run(insn::ud2);
        check_eq!(fault.map(|e| e.code()), Some((6, 0)), "vector and error code");
        check_eq!(fault.map(|e| e.cpl()), Some(ctx.cpl), "level");
    }
}
