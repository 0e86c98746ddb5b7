//! General detect: DR7.GD protects the debug registers.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::exception::TrapFrame;
use hindsight_guest::msr::GP;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cr::Cr4;
use hindsight_guest::regs::dr::{BreakpointIndex, Condition, Dr6, Dr7, Length};
use hindsight_guest::{insn, trap, vectors};
use hindsight_payloads::access::ScratchPage;
use hindsight_payloads::debug::{self, BD, at, call, conditions, saved_rf};
use hindsight_payloads::snippet;

payload!("gd");

static PAGE: ScratchPage = ScratchPage::new();

const GD: u64 = Dr7::RESET.0 | Dr7::GD;

snippet! { read_dr4 [read_dr4_insn] "read_dr4_insn:", ".byte 0x0f, 0x21, 0xe0", "ret" }
snippet! { write_dr5 [write_dr5_insn] "mov eax, 0x400", "write_dr5_insn:", ".byte 0x0f, 0x23, 0xe8", "ret" }
snippet! { store [] "mov byte ptr [rdi], 1", "ret" }
// Sets GD; the next access is detected.
snippet! { set_then_read [set_then_read_nop set_then_read_insn] "mov dr7, rdi", "set_then_read_nop:", "nop",
    "set_then_read_insn:", "mov rax, dr2", "ret"
}

macro_rules! each_register {
    ($($read:ident $read_at:ident $write:ident $write_at:ident $name:literal;)+) => {
        $(
            snippet! { $read [$read_at]
                concat!(stringify!($read_at), ":"), concat!("mov rax, ", $name), "ret"
            }
            snippet! { $write [$write_at]
                "mov eax, 0x400", concat!(stringify!($write_at), ":"), concat!("mov ", $name, ", rax"), "ret"
            }
        )+
        /// Every MOV DR with its address.
        fn moves() -> [(debug::SnippetFn, u64); 12] {
            let mut all = [(store as debug::SnippetFn, 0); 12];
            let pairs = [$(
                ($read as debug::SnippetFn, at($read_at)), ($write as debug::SnippetFn, at($write_at))
            ),+];
            all.copy_from_slice(&pairs);
            all
        }
    };
}

each_register! {
    read_dr0 read_dr0_at write_dr0 write_dr0_at "dr0";
    read_dr1 read_dr1_at write_dr1 write_dr1_at "dr1";
    read_dr2 read_dr2_at write_dr2 write_dr2_at "dr2";
    read_dr3 read_dr3_at write_dr3 write_dr3_at "dr3";
    read_dr6 read_dr6_at write_dr6 write_dr6_at "dr6";
    read_dr7 read_dr7_at write_dr7 write_dr7_at "dr7";
}

case! {
    name: "every_register", cpl: [0], rules: ["GD-01", "GD-02", "GD-04", "DR-30"], needs: ["gd"],
    about: "each MOV to or from a debug register raises #DB with BD before it executes, and GD is cleared",
    fn body(ctx) {
        for (code, address) in moves() {
            insn::write_dr0(0x1111);
            insn::write_dr6(Dr6::RESET);
            insn::write_dr7(GD | 1 << 9);
            let fault = debug::run(ctx, code, 0, 0);
            check_eq!(fault.map(|e| (e.code(), e.rip)), Some(((1, 0), address)), "vector and saved RIP");
            check_eq!(fault.map(|e| conditions(e.dr6)), Some(BD), "DR6");
            let found = (insn::read_dr7(), insn::read_dr0());
            check_eq!(found, (Dr7::RESET.0 | 1 << 9, 0x1111), "DR7 with GD clear, DR0");
        }
    }
}

case! {
    name: "image_has_rf", cpl: [0], rules: ["GD-03", "RF-04"], needs: ["gd-rf"],
    about: "the #DB saves RFLAGS with RF set",
    fn body(ctx) {
        insn::write_dr7(GD);
        let fault = debug::run(ctx, read_dr3, 0, 0);
        check_eq!(fault.map(|e| saved_rf(&e)), Some(true), "RF");
    }
}

case! {
    name: "any_debug_exception_clears_it", cpl: [0, 3], rules: ["GD-04"], needs: ["gd", "guestbp-data"],
    needs_cpl3: ["iretq-cpl3"],
    about: "the #DB of a data breakpoint clears GD",
    fn body(ctx) {
        insn::write_dr0(PAGE.address());
        insn::write_dr7(Dr7(GD).with_breakpoint(BreakpointIndex(0), Condition::Write, Length::One).0);
        let fault = debug::run(ctx, store, PAGE.address(), 0);
        check_eq!(fault.map(|e| conditions(e.dr6)), Some(1), "DR6");
        check_eq!(insn::read_dr7() & Dr7::GD, 0, "GD");
    }
}

static DETECTED: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
static COUNT: AtomicU64 = AtomicU64::new(0);

/// At the first #DB sets GD and reads a debug register, which raises the second #DB; then sets GD again.
fn protect_again(frame: &mut TrapFrame) {
    let n = COUNT.fetch_add(1, Ordering::Relaxed);
    if let Some(rip) = usize::try_from(n).ok().and_then(|n| DETECTED.get(n)) {
        rip.store(frame.rip, Ordering::Relaxed);
    }
    if n == 0 {
        call(set_then_read, GD, 0);
        insn::write_dr7(GD);
    }
}

case! {
    name: "inside_the_handler", cpl: [0], rules: ["GD-05", "GD-07"], needs: ["gd"],
    about: "GD that a handler sets takes effect in the handler and after its return",
    fn body(ctx) {
        COUNT.store(0, Ordering::Relaxed);
        trap::set_handler(1, protect_again);
        // #DB uses the current stack, because the second #DB is raised while the first is handled.
        vectors::with_gate(1, |gate| gate.with_ist(0), || {
            insn::write_dr7(GD);
            debug::run(ctx, read_dr1, 0, 0);
        });
        let found = DETECTED.each_ref().map(|rip| rip.load(Ordering::Relaxed));
        check_eq!(found, [at(read_dr1_at), at(set_then_read_insn)], "RIPs of the first two #DBs");
        // The third #DB is that of the first MOV again, because the handler returned with GD set.
        check_eq!(COUNT.load(Ordering::Relaxed), 3, "count of #DBs");
    }
}

case! {
    name: "setting_completes", cpl: [0], rules: ["GD-07"], needs: ["gd"],
    about: "the MOV that sets GD completes; the next access raises #DB",
    fn body(ctx) {
        let fault = debug::run(ctx, set_then_read, GD, 0);
        check_eq!(fault.map(|e| (e.vector, e.rip)), Some((1, at(set_then_read_insn))), "vector and saved RIP");
    }
}

case! {
    name: "user_level", cpl: [3], rules: ["GD-06", "DR-14"], needs: ["gd", "guestbp-io", "iretq-cpl3"],
    about: "at CPL 3 the access raises #GP(0) and GD stays set",
    fn body(ctx) {
        insn::write_dr7(GD);
        for (code, address) in moves() {
            let fault = debug::run(ctx, code, 0, 0);
            check_eq!(fault.map(|e| (e.code(), e.rip)), Some((GP, address)), "vector, error code and saved RIP");
        }
        let fault = catch(|| { insn::read_dr0(); });
        check_eq!(fault.map(|e| conditions(e.dr6)), Some(BD), "GD still set");
    }
}

case! {
    name: "aliases", cpl: [0], rules: ["GD-08"], needs: ["gd", "guestbp-io"],
    about: "accesses to DR4 and DR5 are detected like those to DR6 and DR7; with CR4.DE they raise #UD",
    fn body(ctx) {
        let cr4 = insn::read_cr4();
        let accesses: [(debug::SnippetFn, u64); 2] =
            [(read_dr4, at(read_dr4_insn)), (write_dr5, at(write_dr5_insn))];
        for (code, address) in accesses {
            insn::write_cr4(cr4 & !Cr4::DE.bits());
            insn::write_dr6(Dr6::RESET);
            insn::write_dr7(GD);
            let fault = debug::run(ctx, code, 0, 0);
            check_eq!(fault.map(|e| (e.rip, conditions(e.dr6))), Some((address, BD)), "RIP and conditions with DE clear");
            insn::write_cr4(cr4 | Cr4::DE.bits());
            insn::write_dr7(GD);
            let fault = debug::run(ctx, code, 0, 0);
            check_eq!(fault.map(|e| e.code()), Some((6, 0)), "vector and error code with DE set");
            check!(catch(|| { insn::read_dr0(); }).is_some(), "GD still set");
        }
        insn::write_cr4(cr4);
    }
}
