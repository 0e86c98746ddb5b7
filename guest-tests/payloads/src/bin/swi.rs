//! Breakpoint instructions and software interrupts.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::catch::{logged, user_with_flags};
use hindsight_guest::exception::TrapFrame;
use hindsight_guest::msr;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::dr::{Dr6, Dr7};
use hindsight_guest::regs::rflags::Rflags;
use hindsight_guest::{insn, trap, vectors};
use hindsight_payloads::debug::{self, BD, BP, BS, DB, at, call, conditions};
use hindsight_payloads::{clear_tf, set_tf, snippet};

payload!("swi");

const IA32_DEBUGCTL: u32 = 0x1d9;
/// A vector whose gate may be called from CPL 3.
const CALLABLE: u8 = 0x80;

snippet! { int1 [int1_insn int1_next] "int1_insn:", ".byte 0xf1", "int1_next:", "ret" }
snippet! { int_1 [int_1_insn int_1_next] "int_1_insn:", "int 1", "int_1_next:", "ret" }
snippet! { int3 [int3_next] "int3", "int3_next:", "ret" }
snippet! { int_3 [int_3_next] ".byte 0xcd, 3", "int_3_next:", "ret" }
snippet! { int_20 [int_20_insn] "int_20_insn:", "int 0x20", "ret" }
snippet! { int_80 [int_80_next] "int 0x80", "int_80_next:", "ret" }
snippet! { into [into_insn] "into_insn:", ".byte 0xce", "ret" }
snippet! { step_int3 [step_int3_next step_int3_after] set_tf!(), "int3", "step_int3_next:", "nop",
    "step_int3_after:", clear_tf!(), "ret"
}
snippet! { step_int80 [step_int80_next step_int80_after] set_tf!(), "int 0x80", "step_int80_next:", "nop",
    "step_int80_after:", clear_tf!(), "ret"
}
snippet! { step_int1 [step_int1_next step_int1_after] set_tf!(), ".byte 0xf1", "step_int1_next:", "nop",
    "step_int1_after:", clear_tf!(), "ret"
}
snippet! { step_here [step_here_next] set_tf!(), "nop", "step_here_next:", clear_tf!(), "ret" }

fn ignore(_frame: &mut TrapFrame) {}

case! {
    name: "int_n_gate_dpl", cpl: [3], rules: ["SWI-02"], needs: ["intn-cpl3", "iretq-cpl3", "gd"],
    about: "INT n through a gate of DPL 0 raises #GP with the vector in the error code",
    fn body(ctx) {
        let fault = debug::run(ctx, int_20, 0, 0);
        check_eq!(fault.map(|e| (e.code(), e.rip)), Some(((13, 0x102), at(int_20_insn))), "#GP");
        trap::set_handler(CALLABLE, ignore);
        check!(debug::run(ctx, int_80, 0, 0).is_none(), "a gate of DPL 3 lets it through");
    }
}

case! {
    name: "int1", cpl: [0, 3], rules: ["SWI-03", "DB-10", "DR-30"], needs: ["gd", "guestbp-io"],
    needs_cpl3: ["iretq-cpl3"],
    about: "INT1 is a trap of vector 1 that sets no condition and does not look at the DPL of its gate",
    fn body(ctx) {
        insn::write_dr6(Dr6::RESET);
        let log = logged(DB, || { debug::run(ctx, int1, 0, 0); });
        check_eq!(log.count(), 1, "count of #DBs");
        check_eq!(debug::event(log, 0), (at(int1_next), 0), "RIP and conditions");
        check_eq!(log.events().first().map(|e| e.cpl()), Some(ctx.cpl), "level");
        check!(!debug::event_saved_rf(log, 0), "RF in the image");
    }
}

static RECORDED: AtomicU64 = AtomicU64::new(0);

/// Records the saved RIP, without an access to a debug register.
fn record_rip(frame: &mut TrapFrame) {
    RECORDED.store(frame.rip, Ordering::Relaxed);
}

case! {
    name: "int_1_is_ordinary", cpl: [0, 3], rules: ["SWI-04"], needs: ["gd", "guestbp-io"],
    needs_cpl3: ["iretq-cpl3"],
    about: "CD 01 looks at the DPL, and leaves DR6, GD and IA32_DEBUGCTL",
    fn body(ctx) {
        if ctx.cpl == 3 {
            let fault = debug::run(ctx, int_1, 0, 0);
            check_eq!(fault.map(|e| (e.code(), e.rip)), Some(((13, 0x0a), at(int_1_insn))), "#GP");
        }
        trap::set_handler(1, record_rip);
        let through = || vectors::with_gate(1, |gate| gate.with_dpl(3), || debug::run(ctx, int_1, 0, 0));
        insn::write_dr6(Dr6::RESET | BS | 5);
        through();
        check_eq!(insn::read_dr6(), Dr6::RESET | BS | 5, "DR6");
        msr::write(IA32_DEBUGCTL, 1);
        insn::write_dr7(Dr7::RESET.0 | Dr7::GD);
        through();
        let debugctl = msr::read(IA32_DEBUGCTL);
        msr::write(IA32_DEBUGCTL, 0);
        trap::clear_handler(1);
        check_eq!(RECORDED.load(Ordering::Relaxed), at(int_1_next), "saved RIP");
        check_eq!(debugctl, 1, "IA32_DEBUGCTL");
        let detect = catch(|| { insn::read_dr6(); });
        check_eq!(detect.map(|e| conditions(e.dr6)), Some(BD | BS), "GD is still set");
    }
}

case! {
    name: "int_3_is_int3", cpl: [0, 3], rules: ["SWI-05", "DB-10", "DR-30"], needs: [],
    needs_cpl0: ["intn-cpl0", "int3-cpl0"],
    needs_cpl3: ["intn-cpl3", "int3-cpl3", "iretq-cpl3"],
    about: "CD 03 and CC reach the same gate, with the address after them",
    fn body(ctx) {
        for (code, next) in [(int_3 as debug::SnippetFn, int_3_next as debug::SnippetLabel), (int3, int3_next)] {
            let log = logged(BP, || { debug::run(ctx, code, 0, 0); });
            check_eq!(log.events().first().map(|e| (e.code(), e.rip)), Some(((3, 0), at(next))), "#BP");
        }
    }
}

case! {
    name: "into_is_undefined", cpl: [0, 3], rules: ["SWI-06"], needs: ["exceptions"],
    needs_cpl3: ["iretq-cpl3"],
    about: "INTO raises #UD in 64-bit mode",
    fn body(ctx) {
        let fault = debug::run(ctx, into, 0, 0);
        check_eq!(fault.map(|e| (e.code(), e.rip)), Some(((6, 0), at(into_insn))), "#UD");
    }
}

case! {
    name: "clear_tf", cpl: [0, 3], rules: ["SWI-07", "TF-16"], needs: ["gd"],
    needs_cpl0: ["int3-cpl0", "intn-cpl0", "tf-cpl0"],
    needs_cpl3: ["int3-cpl3", "intn-cpl3", "tf-cpl3", "iretq-cpl3"],
    about: "no step at the entry of INT3 or INT n; after their IRET the next one follows the instruction after them",
    fn body(ctx) {
        trap::set_handler(3, ignore);
        trap::set_handler(CALLABLE, ignore);
        for (code, after) in [(step_int3 as debug::SnippetFn, step_int3_after as debug::SnippetLabel), (step_int80, step_int80_after)] {
            let log = debug::events(ctx, code, 0, 0);
            check_eq!(debug::event(log, 0), (at(after), BS), "the first step");
            check_eq!(log.count(), 1 + debug::CLEAR_TF_STEPS, "count of steps");
        }
    }
}

case! {
    name: "int1_clears_tf", cpl: [0, 3], rules: ["SWI-07"], needs: ["gd", "guestbp-io"],
    needs_cpl3: ["iretq-cpl3"],
    about: "INT1 under TF is one #DB without BS, and the next step follows the instruction after it",
    fn body(ctx) {
        let log = debug::events(ctx, step_int1, 0, 0);
        check_eq!(debug::event(log, 0), (at(step_int1_next), 0), "INT1");
        check_eq!(debug::event(log, 1), (at(step_int1_after), BS), "the step");
        check_eq!(log.count(), 2 + debug::CLEAR_TF_STEPS, "count of #DBs");
    }
}

case! {
    name: "stepping_a_handler", cpl: [0, 3], rules: ["SWI-08"], needs: ["gd"],
    needs_cpl0: ["int3-cpl0", "tf-cpl0"],
    needs_cpl3: ["int3-cpl3", "tf-cpl3", "iretq-cpl3"],
    about: "a handler that sets TF itself is stepped from there",
    fn body(ctx) {
        fn step_myself(_frame: &mut TrapFrame) {
            call(step_here, 0, 0);
        }
        trap::set_handler(3, step_myself);
        let log = debug::events(ctx, int3, 0, 0);
        check_eq!(debug::event(log, 0), (at(step_here_next), BS), "the first step");
        check_eq!(log.events().first().map(|e| e.cpl()), Some(0), "its level");
        check_eq!(log.count(), 1 + debug::CLEAR_TF_STEPS, "count of steps");
    }
}

case! {
    name: "int1_side_effects", cpl: [0, 3], rules: ["SWI-09", "OP-06"], needs: ["guestbp-io"],
    needs_cpl3: ["iretq-cpl3"],
    about: "INT1 clears GD, LBR and BTF as other #DBs do",
    fn body(ctx) {
        msr::write(IA32_DEBUGCTL, 3);
        insn::write_dr7(Dr7::RESET.0 | Dr7::GD);
        let fault = debug::run(ctx, int1, 0, 0);
        check_eq!(fault.map(|e| (e.vector, conditions(e.dr6))), Some((1, 0)), "#DB without a condition");
        check_eq!(insn::read_dr6() & Dr6::RTM.bits(), Dr6::RTM.bits(), "DR6[16]");
        check_eq!(insn::read_dr7() & Dr7::GD, 0, "GD");
        check_eq!(msr::read(IA32_DEBUGCTL), 0, "IA32_DEBUGCTL");
    }
}

case! {
    name: "gate_types", cpl: [0, 3], rules: ["SWI-10", "DB-11"], needs: ["gd"], needs_cpl0: ["int3-cpl0"],
    needs_cpl3: ["int3-cpl3", "iretq-cpl3"],
    about: "an interrupt gate clears IF, a trap gate leaves it",
    fn body(ctx) {
        fn record_flags(_frame: &mut TrapFrame) {
            RECORDED.store(insn::rflags(), Ordering::Relaxed);
        }
        trap::set_handler(3, record_flags);
        for trap_gate in [false, true] {
            let change = |gate: vectors::Gate| if trap_gate { gate.as_trap() } else { gate };
            vectors::with_gate(3, change, || if ctx.cpl == 3 {
                user_with_flags((Rflags::FIXED | Rflags::IF).bits(), || call(int3, 0, 0));
            } else {
                insn::sti();
                call(int3, 0, 0);
                insn::cli();
            });
            let found = RECORDED.load(Ordering::Relaxed) & Rflags::IF.bits() != 0;
            check_eq!(found, trap_gate, "IF in the handler");
        }
    }
}
