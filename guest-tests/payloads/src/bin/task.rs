//! Hardware task switches and debugging.

#![no_std]
#![no_main]

use hindsight_guest::blob;
use hindsight_guest::catch::catch;
use hindsight_guest::gdt::FIRST_TSS;
use hindsight_guest::insn;
use hindsight_guest::legacy::tables::{TASK, USER, gate};
use hindsight_guest::legacy::{
    self, Blob, BlobLabel, BlobStart, LegacyEvent, LegacyMachine, LegacyMode, LegacyPaging, STACK,
};
use hindsight_guest::legacy::{action, sel};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::dr::{BreakpointIndex, Condition, Dr6, Dr7, Length};
use hindsight_payloads::debug::{self, BS, arm, conditions, disarm};
use hindsight_payloads::snippet;

payload!("task");

const B0: u64 = Dr6::B0.bits();
const BT: u64 = Dr6::BT.bits();
/// EFLAGS.
const TF: u32 = 1 << 8;
const NT: u32 = 1 << 14;
const RF: u32 = 1 << 16;
/// The T bit of a TSS.
const T: u16 = 1;
/// A vector for a task gate.
const TASK_VECTOR: usize = 0x50;

// Tasks 1 and 2 are at selectors 58H and 60H. Task 0 jumps, calls or interrupts; the new task continues at `here`.
blob! {
    fn tasks[32](tasks_jump, tasks_call, tasks_call_next, tasks_int, tasks_int_next, tasks_fault, tasks_back, here, here_next, here_iret,
        here_again, tasks_end; tasks_stop);
    "ljmpl $0x58, $0"
    "tasks_call: lcalll $0x58, $0"
    "tasks_call_next: nop"
    "ud2"
    "tasks_int: int $0x50"
    "tasks_int_next: nop"
    "ud2"
    "tasks_fault: ud2"
    "here: nop"
    "here_next: nop"
    "ud2"
    "here_iret: iretl"
    "here_again: ljmpl $0x50, $0"
    "tasks_back: ljmpl $0x58, $0"
    "tasks_end: ud2"
}

/// Makes task `n` continue at `entry`, on a separate stack.
fn set_task(m: &mut LegacyMachine, n: usize, entry: u32, eflags: u32, trap: u16) {
    let data = u32::from(sel::DATA32);
    let tss = &mut m.tss[n];
    (tss.eip, tss.eflags, tss.trap) = (entry, eflags | 2, trap);
    (tss.cs, tss.ss, tss.ds, tss.es) = (sel::CODE32.into(), data, data, data);
    tss.esp = legacy::BASE + STACK - 0x400;
    (tss.ss0, tss.esp0) = (data, legacy::BASE + STACK - 0x800);
}

/// A machine whose task 1 continues at `entry`.
fn prepared(blob: &Blob, entry: BlobLabel, eflags: u32, trap: u16) -> &'static mut LegacyMachine {
    let m = legacy::machine(blob);
    m.actions[1] = action::RESUME;
    set_task(m, 1, blob.linear(entry), eflags, trap);
    m
}

/// Starts task 0 at `entry`.
fn run(m: &mut LegacyMachine, blob: &Blob, entry: BlobLabel, eflags: u32) {
    let mut start = BlobStart::at(LegacyMode::Protected32(0), entry);
    start.eflags = eflags;
    m.run(blob, &start);
    disarm();
}

/// Vector, EIP and conditions of event `n`.
fn event(m: &LegacyMachine, n: usize) -> ((u32, u32), u64) {
    m.events().get(n).map_or(((0, 0), 0), |e| {
        (e.vector_and_eip(), conditions(u64::from(e.dr6)))
    })
}

case! {
    name: "trap_bit", cpl: [0], rules: ["TSK-01", "DR-30"], needs: ["gd", "guestbp-io"],
    about: "a switch to a task with T set raises #DB with BT before its first instruction",
    fn body(_ctx) {
        let blob = tasks();
        let m = prepared(&blob, here, 0, T);
        run(m, &blob, tasks_jump, 0);
        check_eq!(m.events().len(), 2, "one #DB and the end");
        check_eq!(event(m, 0), ((1, blob.linear(here)), BT), "#DB");
        check_eq!(m.events().first().map(|e| e.eflags & (RF | TF)), Some(0), "RF and TF in the image");
        let m = prepared(&blob, here, 0, 0);
        run(m, &blob, tasks_jump, 0);
        check_eq!(m.events().len(), 1, "without T the end alone");
    }
}

case! {
    name: "context", cpl: [0], rules: ["TSK-02"], needs: ["gd", "guestbp-io"],
    about: "the #DB comes in the new task: its task register, registers, flags, stack and page tables",
    fn body(_ctx) {
        let blob = tasks();
        let m = prepared(&blob, here, 0x40, T);
        m.tss[1].ecx = 0x1357;
        let esp = m.tss[1].esp;
        let mut start = BlobStart::at(LegacyMode::Protected32(0), tasks_jump);
        start.paging = LegacyPaging::Bits32;
        m.run(&blob, &start);
        let e = *require_some!(m.events().first(), "an event");
        check_eq!(event(m, 0), ((1, blob.linear(here)), BT), "#DB");
        check_eq!(e.tr, u32::from(sel::TSS1), "the task register");
        check_eq!((e.registers.ecx, e.esp), (0x1357, esp), "ECX and ESP");
        check_eq!(e.eflags & 0x40, 0x40, "EFLAGS");
    }
}

case! {
    name: "stays_set", cpl: [0], rules: ["TSK-03"], needs: ["gd", "guestbp-io"],
    about: "T stays set, and traps at every switch",
    fn body(_ctx) {
        let blob = tasks();
        let m = prepared(&blob, here_again, 0, T);
        // Task 1 jumps back to task 0, which then jumps to it again; it continues after its own jump.
        run(m, &blob, tasks_jump, 0);
        check_eq!(event(m, 0), ((1, blob.linear(here_again)), BT), "the first switch");
        check_eq!(m.tss[1].trap & T, T, "T");
        let m = prepared(&blob, here_iret, NT, T);
        m.tss[1].link = sel::TSS0.into();
        run(m, &blob, tasks_call, 0);
        // Task 0 continues after its CALL and ends.
        check_eq!(event(m, 0), ((1, blob.linear(here_iret)), BT), "the first switch");
        check_eq!(m.tss[1].trap & T, T, "T");
    }
}

blob! {
    fn twice[32](twice_start, twice_loop, twice_end; twice_stop);
    "lcalll $0x58, $0"
    "lcalll $0x58, $0"
    "twice_end: ud2"
    "twice_loop: iretl"
    "jmp twice_loop"
}

case! {
    name: "every_switch", cpl: [0], rules: ["TSK-03", "TSK-05"], needs: ["gd", "guestbp-io"],
    about: "a second CALL to the task traps again, where the task goes on",
    fn body(_ctx) {
        let blob = twice();
        let m = prepared(&blob, twice_loop, 0, T);
        run(m, &blob, twice_start, 0);
        check_eq!(m.events().len(), 3, "two #DBs and the end");
        check_eq!(event(m, 0), ((1, blob.linear(twice_loop)), BT), "the first");
        check_eq!(event(m, 1), ((1, blob.linear(twice_loop) + 1), BT), "the second");
        check_eq!(m.last().vector_and_eip(), (6, blob.linear(twice_end)), "vector and EIP at the end");
    }
}

case! {
    name: "local_enables", cpl: [0], rules: ["TSK-04"], needs: ["gd", "guestbp-io"],
    about: "a switch clears L0 to L3 and LE, and keeps the rest of DR7",
    fn body(_ctx) {
        const FAR: u64 = 0x7fff_0000;
        let blob = tasks();
        let m = prepared(&blob, here, 0, T);
        (0..4).for_each(|slot| insn::write_dr(slot, FAR));
        let fields = 0xdead_0000_u64 & 0xffff_0000;
        insn::write_dr7(Dr7::RESET.0 | fields | 0x3ff);
        let mut start = BlobStart::at(LegacyMode::Protected32(0), tasks_jump);
        start.eflags = 0;
        m.run(&blob, &start);
        let found = insn::read_dr7();
        disarm();
        check_eq!(found, Dr7::RESET.0 | fields | 0x2aa, "DR7");
        check_eq!(m.events().first().map(|e| u64::from(e.dr7)), Some(Dr7::RESET.0 | fields | 0x2aa), "DR7 in the handler");
    }
}

case! {
    name: "sources", cpl: [0], rules: ["TSK-05"], needs: ["gd", "guestbp-io"],
    about: "far JMP, far CALL, INT and a fault through a task gate, and IRET with NT set trap",
    fn body(_ctx) {
        let blob = tasks();
        for entry in [tasks_jump as BlobLabel, tasks_call, tasks_int, tasks_fault] {
            let m = prepared(&blob, here, 0, T);
            let task = gate(sel::TSS1, 0, TASK | USER);
            m.idt[TASK_VECTOR] = task;
            if core::ptr::fn_addr_eq(entry, tasks_fault as BlobLabel) {
                m.idt[6] = task;
            }
            m.actions[6] = action::END;
            run(m, &blob, entry, 0);
            check_eq!(event(m, 0), ((1, blob.linear(here)), BT), "#DB");
            if core::ptr::fn_addr_eq(entry, tasks_fault as BlobLabel) {
                check_eq!(m.tss[0].eflags & RF, RF, "RF in the old task's image");
            }
        }
        // IRET: task 1 is the running one's caller.
        let m = prepared(&blob, here, 0, T);
        m.tss[0].link = sel::TSS1.into();
        m.gdt[usize::from(sel::TSS1) / 8] |= 1 << 41; // busy, as a caller is
        run(m, &blob, here_iret, NT);
        check_eq!(event(m, 0), ((1, blob.linear(here)), BT), "IRET");
    }
}

case! {
    name: "fault_through_task_gate", cpl: [0], rules: ["RF-14"], needs: ["gd", "guestbp-io"],
    about: "a fault through a task gate saves RF set in the old task's image, INT n does not",
    fn body(_ctx) {
        let blob = tasks();
        for (entry, vector, expected) in [(tasks_fault as BlobLabel, 6, RF), (tasks_int, TASK_VECTOR, 0)] {
            let m = prepared(&blob, here, 0, T);
            m.idt[vector] = gate(sel::TSS1, 0, TASK | USER);
            m.actions[1] = action::END;
            run(m, &blob, entry, 0);
            check_eq!(m.tss[0].eflags & RF, expected, "RF in the old task's image");
            let next = if vector == 6 { tasks_fault as BlobLabel } else { tasks_int_next };
            check_eq!(m.tss[0].eip, blob.linear(next), "EIP in the old task's image");
        }
    }
}

case! {
    name: "narrow_task", cpl: [0], rules: ["TSK-07"], needs: ["gd", "guestbp-io"],
    about: "a 16-bit TSS never traps",
    fn body(_ctx) {
        let blob = narrow();
        let m = legacy::machine(&blob);
        m.tss16.ip = u16::try_from(blob.offset(narrow_here)).unwrap_or(0);
        m.tss16.flags = 2;
        m.tss16.sp = u16::try_from(STACK - 0x400).unwrap_or(0);
        (m.tss16.cs, m.tss16.ss, m.tss16.ds, m.tss16.es) = (sel::CODE16, sel::DATA16, sel::DATA16, sel::DATA16);
        run(m, &blob, narrow_start, 0);
        check_eq!(m.events().len(), 1, "the end alone");
        check_eq!(m.last().vector_and_eip(), (6, blob.linear(narrow_end)), "back in the first task");
        // SAFETY: memory of the blob's segment.
        let mark = unsafe { ((legacy::BASE + 0x8000) as usize as *const u8).read_volatile() };
        check_eq!(mark, 0x77, "what the 16-bit task stored");
    }
}

// The 16-bit task goes back by itself: IA-32e mode cannot be entered from it.
blob! {
    fn narrow[32](narrow_start, narrow_here, narrow_end; narrow_stop);
    "ljmpl $0x68, $0"
    "narrow_end: ud2"
    ".code16"
    "narrow_here: movb $0x77, 0x8000"
    ".byte 0xea"
    ".word 0, 0x50"
    ".code32"
}

snippet! { far_jump [] "sub rsp, 16", "mov dword ptr [rsp], 0", "mov [rsp + 4], di", "jmp fword ptr [rsp]" }

case! {
    name: "long_mode", cpl: [0], rules: ["TSK-08"], needs: ["exceptions", "intn-cpl0"],
    about: "in 64-bit mode a far JMP to a TSS raises #GP with its selector, whatever its T bit",
    fn body(_ctx) {
        let fault = catch(|| debug::call(far_jump, u64::from(FIRST_TSS), 0));
        check_eq!(fault.map(|e| e.code()), Some((13, u64::from(FIRST_TSS))), "#GP");
    }
}

case! {
    name: "trap_then_step", cpl: [0], rules: ["TSK-09", "TF-14"], needs: ["gd", "guestbp-io"],
    about: "with TF and T of the new task BT comes first, then a step after its first instruction",
    fn body(_ctx) {
        let blob = tasks();
        let m = prepared(&blob, here, TF, T);
        run(m, &blob, tasks_jump, 0);
        check_eq!(event(m, 0), ((1, blob.linear(here)), BT), "the task switch");
        check_eq!(event(m, 1), ((1, blob.linear(here_next)), BS), "the step");
        let m = prepared(&blob, here, TF, 0);
        run(m, &blob, tasks_jump, 0);
        check_eq!(event(m, 0), ((1, blob.linear(here_next)), BS), "without T the step alone");
    }
}

case! {
    name: "no_step_after_switch", cpl: [0], rules: ["TF-22", "TF-14"], needs: ["gd", "guestbp-io"],
    about: "a JMP that switches tasks under TF is not followed by a step",
    fn body(_ctx) {
        let blob = tasks();
        let m = prepared(&blob, here, 0, 0);
        run(m, &blob, tasks_jump, TF);
        check_eq!(m.events().len(), 1, "the end alone");
        check_eq!(m.tss[0].eflags & TF, TF, "TF in the old task's image");
        let m = prepared(&blob, here, 0, T);
        run(m, &blob, tasks_jump, TF);
        check_eq!(event(m, 0), ((1, blob.linear(here)), BT), "BT alone");
        check_eq!(m.events().len(), 2, "and the end");
    }
}

case! {
    name: "resume_flag", cpl: [0], rules: ["RF-03", "DB-05"], needs: ["gd", "guestbp-io"],
    about: "RF of a 32-bit TSS protects the first instruction of the task",
    fn body(_ctx) {
        let blob = tasks();
        for (flags, expected) in [(0, 2), (RF, 1)] {
            let m = prepared(&blob, here, flags, 0);
            m.actions[1] = action::RESUME_RF;
            // Ln would be cleared by the switch: this is Gn.
            arm(0, u64::from(blob.linear(here)), Condition::Execute, Length::One);
            run(m, &blob, tasks_jump, 0);
            check_eq!(m.events().len(), expected, "events");
            if expected == 2 {
                check_eq!(event(m, 0), ((1, blob.linear(here)), B0), "the breakpoint");
            }
        }
    }
}

blob! {
    fn indirect[32](indirect_start, indirect_here, indirect_end; indirect_stop);
    "ljmpl *0x18000"
    "indirect_here: nop"
    "indirect_end: ud2"
}

case! {
    name: "before_other_traps", cpl: [0], rules: ["TSK-10"], needs: ["gd", "guestbp-io", "guestbp-data"],
    about: "BT is reported by the first #DB, also when the JMP met a data breakpoint",
    fn body(_ctx) {
        let blob = indirect();
        let m = prepared(&blob, indirect_here, 0, T);
        // SAFETY: memory of the blob's segment.
        unsafe { ((legacy::BASE + 0x8000) as usize as *mut [u32; 2]).write_volatile([0, sel::TSS1.into()]) };
        insn::write_dr0(u64::from(legacy::BASE + 0x8000));
        insn::write_dr7(Dr7::RESET.with_breakpoint(BreakpointIndex(0), Condition::ReadWrite, Length::Four).0);
        run(m, &blob, indirect_start, 0);
        let (place, found) = event(m, 0);
        check_eq!((place, found & BT), ((1, blob.linear(indirect_here)), BT), "the first #DB");
    }
}

case! {
    name: "sticky", cpl: [0], rules: ["D6-02"], needs: ["gd", "guestbp-io"],
    about: "BT stays in DR6 when a step follows and nobody clears it",
    fn body(_ctx) {
        let blob = tasks();
        insn::write_dr6(Dr6::RESET | BT);
        let m = prepared(&blob, here, TF, 0);
        m.actions[1] = action::RESUME_NO_TF;
        run(m, &blob, tasks_jump, 0);
        check_eq!(event(m, 0), ((1, blob.linear(here_next)), BS | BT), "BS, and BT of before");
        check_eq!(m.events().first().map(LegacyEvent::code), Some((1, 0)), "no error code");
    }
}
