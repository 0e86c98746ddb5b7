//! DR6: which events set and clear its bits.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::catch::logged;
use hindsight_guest::exception::TrapFrame;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::dr::{BreakpointIndex, Condition, Dr6, Dr7, Length};
use hindsight_guest::regs::rflags::Rflags;
use hindsight_guest::{insn, trap};
use hindsight_payloads::access::ScratchPage;
use hindsight_payloads::debug::{self, BD, BP, BS, arm, at, conditions, event, events};
use hindsight_payloads::{check_events, clear_tf, set_tf, snippet};

payload!("d6");

static PAGE: ScratchPage = ScratchPage::new();

const B0: u64 = Dr6::B0.bits();
const B1: u64 = Dr6::B1.bits();
const B2: u64 = Dr6::B2.bits();

snippet! { store [store_insn store_next] "store_insn:", "mov byte ptr [rdi], 1", "store_next:", "ret" }
snippet! { two_stores [first_next second_next] "mov byte ptr [rdi], 1", "first_next:",
    "mov byte ptr [rsi], 1", "second_next:", "ret"
}
snippet! { step_store [step_store_next] set_tf!(), "nop", clear_tf!(), "mov byte ptr [rdi], 1",
    "step_store_next:", "ret"
}
snippet! { undefined [] "ud2" }
snippet! { int3 [] "int3", "ret" }
snippet! { int1 [] ".byte 0xf1", "ret" }
snippet! { read_dr0 [] "mov rax, dr0", "ret" }
snippet! { call_code [] "sub rsp, 8", "call rdi", "add rsp, 8", "ret" }

/// DR6 at each #DB, eight bits each, the newest lowest: BD, BS and BT above B3 to B0.
static HISTORY: AtomicU64 = AtomicU64::new(0);

/// Records DR6 without clearing it, and resumes with RF set.
fn record_dr6(frame: &mut TrapFrame) {
    let dr6 = conditions(insn::read_dr6());
    let short = dr6 >> 13 << 4 | dr6 & 15;
    HISTORY.store(
        HISTORY.load(Ordering::Relaxed) << 8 | short,
        Ordering::Relaxed,
    );
    frame.rflags |= Rflags::RF.bits();
}

/// Runs `f` with [`record_dr6`] as the handler and returns what it recorded.
fn history(f: impl FnOnce()) -> u64 {
    HISTORY.store(0, Ordering::Relaxed);
    insn::write_dr6(Dr6::RESET);
    trap::set_handler(1, record_dr6);
    f();
    trap::clear_handler(1);
    debug::disarm();
    HISTORY.load(Ordering::Relaxed)
}

case! {
    name: "only_debug_exceptions", cpl: [0, 3], rules: ["D6-01", "D6-08"], needs: ["exceptions"],
    needs_cpl0: ["int3-cpl0"],
    needs_cpl3: ["int3-cpl3", "iretq-cpl3"],
    about: "#UD and #BP do not change DR6",
    fn body(ctx) {
        for value in [Dr6::RESET, Dr6::RESET | BS | B2] {
            insn::write_dr6(value);
            debug::run(ctx, undefined, 0, 0);
            check_eq!(insn::read_dr6(), value, "DR6 after #UD");
            logged(BP, || { debug::run(ctx, int3, 0, 0); });
            check_eq!(insn::read_dr6(), value, "DR6 after #BP");
        }
    }
}

case! {
    name: "disabled_leaves_it", cpl: [0, 3], rules: ["D6-01", "DR-19"], needs: [],
    needs_cpl3: ["iretq-cpl3"],
    about: "a match of a disabled breakpoint does not change DR6",
    fn body(ctx) {
        insn::write_dr0(PAGE.address());
        insn::write_dr7(Dr7::RESET.with_breakpoint(BreakpointIndex(0), Condition::Write, Length::One).0 & !3);
        insn::write_dr6(Dr6::RESET);
        debug::run(ctx, store, PAGE.address(), 0);
        check_eq!(insn::read_dr6(), Dr6::RESET, "DR6");
    }
}

case! {
    name: "sticky", cpl: [0, 3], rules: ["D6-02"], needs: ["guestbp-data", "gd"], needs_cpl0: ["tf-cpl0"],
    needs_cpl3: ["tf-cpl3", "iretq-cpl3"],
    about: "BS of an earlier #DB stays when a data breakpoint follows",
    fn body(ctx) {
        arm(0, PAGE.address(), Condition::Write, Length::One);
        let found = history(|| { debug::run(ctx, step_store, PAGE.address(), 0); });
        // Four single steps with BS alone, then the store.
        check_eq!(found, 0x20_20_20_20_21, "BS four times, then BS and B0");
    }
}

case! {
    name: "sticky_bd", cpl: [0], rules: ["D6-02"], needs: ["guestbp-data", "gd"],
    about: "BD of an earlier #DB stays when a data breakpoint follows",
    fn body(ctx) {
        arm(0, PAGE.address(), Condition::Write, Length::One);
        let found = history(|| {
            insn::write_dr7(insn::read_dr7() | Dr7::GD);
            debug::run(ctx, read_dr0, 0, 0);
            debug::run(ctx, store, PAGE.address(), 0);
        });
        check_eq!(found, 0x10_11, "BD, then BD and B0");
    }
}

case! {
    name: "replaced", cpl: [0, 3], rules: ["D6-03", "D6-04", "OP-45"], needs: ["guestbp-data", "guestbp-io"],
    needs_cpl3: ["iretq-cpl3"],
    about: "B3 to B0 are those of the last #DB only; INT1 does not change them",
    fn body(ctx) {
        arm(0, PAGE.address(), Condition::Write, Length::One);
        debug::arm_also(1, PAGE.address() + 8, Condition::Write, Length::One);
        let found = history(|| {
            debug::run(ctx, two_stores, PAGE.address(), PAGE.address() + 8);
            debug::run(ctx, int1, 0, 0);
        });
        check_eq!(found, 0x01_02_02, "B0, B1, B1");
    }
}

case! {
    name: "enabled_only", cpl: [0, 3], rules: ["D6-05", "D6-06", "OP-45"],
    needs: ["guestbp-data", "guestbp-disabled"],
    needs_cpl3: ["iretq-cpl3"],
    about: "Bn is set for breakpoints that match and are enabled; for disabled ones it stays clear",
    fn body(ctx) {
        arm(0, PAGE.address(), Condition::Write, Length::One);
        debug::arm_also(2, PAGE.address(), Condition::Write, Length::One);
        insn::write_dr7(insn::read_dr7() & !(3 << 4));
        let found = event(events(ctx, store, PAGE.address(), 0), 0);
        check_eq!((found.0, found.1 & B0), (at(store_next), B0), "RIP, B0");
        if !insn::is_qemu_tcg() {
            check_eq!(found.1, B0, "no other condition");
        }
    }
}

case! {
    name: "rtm_bit", cpl: [0, 3], rules: ["D6-07"], needs: ["guestbp-data", "gd"],
    needs_cpl3: ["iretq-cpl3"],
    about: "DR6[16] is 1 after a #DB, even if 0 was written before",
    fn body(ctx) {
        arm(0, PAGE.address(), Condition::Write, Length::One);
        insn::write_dr6(0);
        debug::run(ctx, store, PAGE.address(), 0);
        check_eq!(insn::read_dr6() & Dr6::RTM.bits(), Dr6::RTM.bits(), "bit 16");
    }
}

case! {
    name: "data_or_fetch", cpl: [0, 3], rules: ["D6-09"], needs: ["guestbp-data"],
    needs_cpl0: ["guestbp-exec-cpl0"],
    needs_cpl3: ["guestbp-exec-cpl3", "iretq-cpl3"],
    about: "at one address, a fetch hits only the instruction breakpoint and a write only the data breakpoint",
    fn body(ctx) {
        let code = PAGE.address() + 0x100;
        debug::call(store, code, 0);
        // SAFETY: the page is this payload's, and no other code uses it now.
        unsafe { (code as *mut u16).write_volatile(0xc390) };
        arm(0, code, Condition::Execute, Length::One);
        debug::arm_also(1, code, Condition::ReadWrite, Length::One);
        check_events!(events(ctx, call_code, code, 0), [(code, B0)], "the fetch");
        arm(0, code, Condition::Execute, Length::One);
        debug::arm_also(1, code, Condition::ReadWrite, Length::One);
        check_events!(events(ctx, store, code, 0), [(at(store_next), B1)], "the write");
    }
}

case! {
    name: "fresh_after_reset", cpl: [0, 3], rules: ["D6-10"], needs: ["guestbp-data", "gd"],
    needs_cpl3: ["iretq-cpl3"],
    about: "after the handler writes FFFF0FF0H, the next #DB sets only its own condition",
    fn body(ctx) {
        insn::write_dr6(Dr6::RESET | BS | BD | B2);
        insn::write_dr6(Dr6::RESET);
        arm(0, PAGE.address(), Condition::Write, Length::One);
        let log = events(ctx, store, PAGE.address(), 0);
        check_eq!(log.events().first().map(|e| e.dr6), Some(Dr6::RESET | B0), "DR6");
    }
}
