//! I/O breakpoints.

#![no_std]
#![no_main]

use core::arch::asm;

use hindsight_guest::catch::logged;
use hindsight_guest::msr::GP;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ApicRegister, DEFAULT_BASE};
use hindsight_guest::regs::cr::Cr4;
use hindsight_guest::regs::dr::{Condition, Dr6, Length};
use hindsight_guest::{insn, port};
use hindsight_payloads::access::{self, ScratchPage};
use hindsight_payloads::debug::{self, DB, arm, at, event, events};
use hindsight_payloads::{check_events, check_steps, clear_tf, set_tf, snippet};

payload!("iob");

static PAGE: ScratchPage = ScratchPage::new();

/// The first of sixteen ports without a device.
const PORTS: u64 = 0x9a0;
/// COM1's scratch register, which reads back what was written.
const SCRATCH: u64 = 0x3ff;
const B0: u64 = Dr6::B0.bits();
const B1: u64 = Dr6::B1.bits();

macro_rules! port_moves {
    ($($input:ident $input_next:ident $output:ident $output_next:ident $register:literal;)+) => {
        $(
            snippet! { $input [$input_next]
                "mov edx, edi", concat!("in ", $register, ", dx"), concat!(stringify!($input_next), ":"), "ret"
            }
            snippet! { $output [$output_next]
                "mov edx, edi", "mov eax, esi", concat!("out dx, ", $register),
                concat!(stringify!($output_next), ":"), "ret"
            }
        )+
    };
}

port_moves! {
    in1 in1_next out1 out1_next "al";
    in2 in2_next out2 out2_next "ax";
    in4 in4_next out4 out4_next "eax";
}

snippet! { out_immediate [out_immediate_next] "out 0xe8, al", "out_immediate_next:", "ret" }
snippet! { ins_one [ins_one_next] "mov edx, edi", "mov rdi, rsi", "insb", "ins_one_next:", "ret" }
snippet! { outs_one [outs_one_next] "mov edx, edi", "outsb", "outs_one_next:", "ret" }
snippet! { rep_outs [rep_outs_insn rep_outs_next] "mov edx, edi", "mov ecx, 3", "rep_outs_insn:",
    "rep outsb", "rep_outs_next:", "ret"
}
snippet! { rep_ins [rep_ins_insn rep_ins_next] "mov edx, edi", "mov rdi, rsi", "mov ecx, 3",
    "rep_ins_insn:", "rep insb", "rep_ins_next:", "ret"
}
snippet! { step_out [step_out_next] "mov edx, edi", set_tf!(), "out dx, al", "step_out_next:", clear_tf!(),
    "ret"
}
snippet! { load_byte [] "mov al, [rdi]", "ret" }
snippet! { load_dword [] "mov eax, [rdi]", "ret" }

/// Runs `f` with CR4.DE set.
fn with_de(f: impl FnOnce()) {
    let cr4 = insn::read_cr4();
    insn::write_cr4(cr4 | Cr4::DE.bits());
    f();
    insn::write_cr4(cr4);
}

case! {
    name: "after_the_access", cpl: [0], rules: ["IOB-01", "IOB-09", "DR-30"], needs: ["guestbp-io"],
    about: "IN, OUT, INS and OUTS raise #DB after the access",
    fn body(ctx) {
        with_de(|| {
            arm(0, SCRATCH, Condition::Io, Length::One);
            check_events!(events(ctx, out1, SCRATCH, 0x5a), [(at(out1_next), B0)], "OUT");
            check_eq!(port::inb(0x3ff), 0x5a, "register of the device");
            arm(0, SCRATCH, Condition::Io, Length::One);
            check_events!(events(ctx, in1, SCRATCH, 0), [(at(in1_next), B0)], "IN");
            arm(0, SCRATCH, Condition::Io, Length::One);
            let log = events(ctx, ins_one, SCRATCH, PAGE.address());
            check_events!(log, [(at(ins_one_next), B0)], "INS");
            check_eq!(access::load(PAGE.address()), 0x5a, "byte that INS stored");
            arm(0, SCRATCH, Condition::Io, Length::One);
            let log = events(ctx, outs_one, SCRATCH, PAGE.address());
            check_events!(log, [(at(outs_one_next), B0)], "OUTS");
            arm(0, 0xe8, Condition::Io, Length::One);
            let log = events(ctx, out_immediate, 0, 0);
            check_events!(log, [(at(out_immediate_next), B0)], "OUT with an immediate port");
        });
    }
}

case! {
    name: "value_of_in", cpl: [0], rules: ["IOB-01", "IOB-09"], needs: ["guestbp-io"],
    about: "the register that IN loads has its new value in the handler",
    fn body(ctx) {
        with_de(|| {
            port::outb(0x3ff, 0xc3);
            arm(0, SCRATCH, Condition::Io, Length::One);
            let log = events(ctx, in1, SCRATCH, 0);
            check_eq!(log.events().first().map(|e| e.frame.rax & 0xff), Some(0xc3), "AL");
        });
    }
}

case! {
    name: "wide_addresses", cpl: [0], rules: ["IOB-02"], needs: ["guestbp-io"],
    about: "a breakpoint address with a bit above 15 matches no port",
    fn body(ctx) {
        with_de(|| for bit in [16, 31, 32, 63] {
            arm(0, PORTS | 1 << bit, Condition::Io, Length::One);
            check_events!(events(ctx, in1, PORTS, 0), [], "no #DB");
        });
    }
}

case! {
    name: "ranges", cpl: [0], rules: ["IOB-03", "IOB-10"], needs: ["guestbp-io"],
    about: "a breakpoint of any length matches accesses of 1, 2 and 4 bytes that overlap its range",
    fn body(ctx) {
        let inputs = [(1, in1 as debug::SnippetFn), (2, in2), (4, in4)];
        let outputs = [(1, out1 as debug::SnippetFn), (2, out2), (4, out4)];
        let lengths =
            [(Length::One, 1), (Length::Two, 2), (Length::Four, 4), (Length::Eight, 8)];
        with_de(|| for (length, bytes) in lengths {
            for (size, code) in inputs.into_iter().chain(outputs) {
                for port in PORTS..PORTS + 16 - size {
                    arm(3, PORTS + 5, Condition::Io, length);
                    let from = (PORTS + 5) & !(bytes - 1);
                    let overlaps = port < from + bytes && from < port + size;
                    let found = event(events(ctx, code, port, 0), 0).1;
                    check_eq!(found, if overlaps { Dr6::B3.bits() } else { 0 }, "conditions");
                }
            }
        });
    }
}

case! {
    name: "repeated", cpl: [0], rules: ["IOB-04", "RF-06"], needs: ["guestbp-io"],
    about: "REP OUTS and REP INS raise #DB after each iteration",
    fn body(ctx) {
        let snippets: [(debug::SnippetFn, debug::SnippetLabel, debug::SnippetLabel); 2] =
            [(rep_outs, rep_outs_insn, rep_outs_next), (rep_ins, rep_ins_insn, rep_ins_next)];
        with_de(|| for (code, insn, next) in snippets {
            arm(0, PORTS, Condition::Io, Length::One);
            let log = events(ctx, code, PORTS, PAGE.address());
            check_events!(log, [(at(insn), B0), (at(insn), B0), (at(next), B0)], "three #DBs");
            let counts = [0, 1, 2].map(|n: usize| log.events().get(n).map_or(99, |e| e.frame.rcx));
            check_eq!(counts, [2, 1, 0], "RCX at the #DBs");
            let rf = [0, 1, 2].map(|n| debug::event_saved_rf(log, n));
            check_eq!(rf, [true, true, false], "RF in the saved flags");
        });
    }
}

case! {
    name: "buffers", cpl: [0], rules: ["IOB-05"], needs: ["guestbp-io", "guestbp-data"],
    about: "a breakpoint on the buffer of REP INS or OUTS raises #DB after the iteration that accesses it",
    fn body(ctx) {
        let snippets: [(debug::SnippetFn, debug::SnippetLabel, Condition); 2] = [
            (rep_outs, rep_outs_insn, Condition::ReadWrite),
            (rep_ins, rep_ins_insn, Condition::Write),
        ];
        for (code, insn, condition) in snippets {
            arm(1, PAGE.address() + 1, condition, Length::One);
            let log = events(ctx, code, PORTS, PAGE.address());
            check_events!(log, [(at(insn), B1)], "one #DB");
            check_eq!(log.events().first().map(|e| e.frame.rcx), Some(1), "RCX");
        }
    }
}

case! {
    name: "refused_access", cpl: [3], rules: ["IOB-06"], needs: ["guestbp-io", "iretq-cpl3"],
    about: "an access that IOPL and the I/O permission bitmap deny raises #GP(0) and no #DB",
    fn body(ctx) {
        with_de(|| {
            arm(0, PORTS, Condition::Io, Length::One);
            let mut fault = None;
            let log = logged(DB, || fault = debug::run(ctx, in1, PORTS, 0));
            check_eq!(fault.map(|e| e.code()), Some(GP), "vector and error code");
            check_events!(log, [], "no #DB");
            check_eq!(insn::read_dr6(), Dr6::RESET, "DR6");
            debug::disarm();
        });
    }
}

case! {
    name: "user_level", cpl: [3], rules: ["IOB-01", "DR-27"], needs: ["guestbp-io", "iretq-cpl3"],
    about: "with IOPL 3 an access at CPL 3 raises #DB",
    fn body(_ctx) {
        with_de(|| {
            arm(0, PORTS, Condition::Io, Length::Two);
            let log = logged(DB, || {
                hindsight_guest::catch::user_with_flags(0x3002, || debug::call(out1, PORTS + 1, 0));
            });
            debug::disarm();
            check_events!(log, [(at(out1_next), B0)], "one #DB");
            check_eq!(log.events().first().map(|e| e.cpl()), Some(3), "CPL of the interrupted code");
        });
    }
}

case! {
    name: "memory_is_not_ports", cpl: [0], rules: ["IOB-07"], needs: ["guestbp-io", "guestbp-data"],
    about: "R/W = 10B matches no memory access, and R/W = 01B and 11B match no port",
    fn body(ctx) {
        with_de(|| {
            // Memory whose address is also a port number, and a device register.
            arm(0, PORTS, Condition::Io, Length::Eight);
            check_events!(events(ctx, load_byte, PORTS, 0), [], "memory");
            let register = DEFAULT_BASE + u64::from(ApicRegister::TPR.0);
            arm(0, register, Condition::Io, Length::Four);
            check_events!(events(ctx, load_dword, register, 0), [], "device memory");
            for condition in [Condition::Write, Condition::ReadWrite] {
                arm(0, PORTS, condition, Length::Eight);
                check_events!(events(ctx, out1, PORTS, 0), [], "OUT");
                arm(0, PORTS, condition, Length::Eight);
                check_events!(events(ctx, in1, PORTS, 0), [], "IN");
            }
        });
    }
}

case! {
    name: "with_step", cpl: [0], rules: ["IOB-09", "DB-13", "TF-18"], needs: ["guestbp-io"],
    about: "a single step over an OUT that hits a breakpoint raises one #DB with BS and Bn",
    fn body(ctx) {
        with_de(|| {
            arm(0, SCRATCH, Condition::Io, Length::One);
            let log = events(ctx, step_out, SCRATCH, 0);
            check_steps!(log, [(at(step_out_next), debug::BS | B0)], "one #DB");
        });
    }
}

case! {
    name: "many_ports", cpl: [0], rules: ["IOB-09"], needs: ["guestbp-io"],
    about: "breakpoints on ports of different devices raise #DB",
    fn body(_ctx) {
        with_de(|| for number in [0x21_u16, 0x43, 0x61, 0x64, 0x71, 0x92, 0x3fd, 0x608, 0xcf8] {
            arm(2, u64::from(number), Condition::Io, Length::One);
            // SAFETY: the instruction touches no memory, and the case needs no state of these devices.
            let log = logged(DB, || unsafe { asm!("in al, dx", in("dx") number, out("al") _, options(nostack)) });
            debug::disarm();
            check_eq!(event(log, 0).1, Dr6::B2.bits(), "conditions");
        });
    }
}
