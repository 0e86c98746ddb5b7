//! A payload of your own: start from here.

#![no_std]
#![no_main]

use hindsight_guest::insn;
use hindsight_guest::prelude::*;

payload!("my-payload");

case! {
    name: "ud2_raises_invalid_opcode", cpl: [0, 3], rules: [], needs: ["exceptions"],
    needs_cpl3: ["iretq-cpl3"],
    about: "UD2 raises exception 6 without an error code, at both levels",
    fn body(ctx) {
        let fault = ctx.run(insn::ud2);
        let fault = require_some!(fault, "UD2 must raise an exception");
        check_eq!(fault.code(), (6, 0), "vector and error code");
        check_eq!(fault.cpl(), ctx.cpl, "level of the interrupted code");
    }
}
