//! Branch trace messages (BTMs), which no guest can observe.

#![no_std]
#![no_main]

use hindsight_guest::insn;
use hindsight_guest::msr;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::dr::Dr6;
use hindsight_guest::regs::msr::IA32_DEBUGCTL;
use hindsight_payloads::branch::sequences as seq;
use hindsight_payloads::branch::{BTS, BTS_OFF_OS, BTS_OFF_USR, LBR, TR, run_sequence};
use hindsight_payloads::ds::DsPages;
use hindsight_payloads::{lbr, need_bts, sequence};

payload!("btm");

static PAGES: DsPages = DsPages::new();

case! {
    name: "execution_is_unaffected", cpl: [0, 3], rules: ["BTM-01", "BTM-05"], needs: [],
    about: "with TR alone code runs as without it, nothing is stored, and the bits read back",
    fn body(ctx) {
        need_bts!(ctx);
        for bits in [TR, TR | BTS_OFF_OS, TR | BTS_OFF_USR, TR | BTS_OFF_OS | BTS_OFF_USR] {
            let area = PAGES.arm(100);
            for sequence in [seq::one_of_each(), seq::conditionals(), seq::calls(), seq::faults(), seq::loop_33()] {
                require!(run_sequence(ctx.cpl, sequence, bits).is_some(), "no unhandled exception");
            }
            PAGES.check_stored(&area, &[]);
            msr::write(IA32_DEBUGCTL, bits);
            check_eq!(msr::read(IA32_DEBUGCTL), bits, "IA32_DEBUGCTL");
            msr::write(IA32_DEBUGCTL, 0);
        }
    }
}

case! {
    name: "redirected_to_the_buffer", cpl: [0, 3], rules: ["BTM-02", "BTM-04"], needs: [],
    about: "BTS with TR stores records, BTS without TR does not",
    fn body(ctx) {
        need_bts!(ctx);
        let area = PAGES.arm(100);
        require!(run_sequence(ctx.cpl, seq::one_of_each(), BTS).is_some(), "no unhandled exception");
        PAGES.check_stored(&area, &[]);
        require!(run_sequence(ctx.cpl, seq::one_of_each(), TR | BTS).is_some(), "no unhandled exception");
        PAGES.check_stored(&area, seq::one_of_each().all(ctx.cpl).items());
    }
}

sequence! {
    /// INT1 between two branches.
    debug_exception:
        "20: jmp 21f", "ud2",
        "21: .byte 0xf1",
        "22: jmp 23f", "ud2",
        "23: nop",
    =>
}

case! {
    name: "debug_exception_keeps_tr", cpl: [0, 3], rules: ["BTM-03", "DCTL-06"], needs: [],
    about: "#DB clears LBR and not TR",
    fn body(ctx) {
        need_bts!(ctx);
        let bits = if lbr::present() { TR | LBR } else { TR };
        let events = run_sequence(ctx.cpl, debug_exception(), bits);
        let events = require_some!(events, "no unhandled exception");
        insn::write_dr6(Dr6::RESET);
        let found = (events.debugs, events.debugctl);
        check_eq!(found, (1, TR), "count of #DBs, IA32_DEBUGCTL in the handler");
    }
}
