//! Hardware task switches in 32-bit protected mode. SDM Vol. 3A, "Task Switching".

#![no_std]
#![no_main]

use hindsight_guest::blob;
use hindsight_guest::insn;
use hindsight_guest::legacy::tables::{self, TASK, TSS32, gate};
use hindsight_guest::legacy::{
    self, BASE, BlobLabel, BlobStart, LegacyMachine, LegacyMode, STACK, action, sel,
};
use hindsight_guest::prelude::*;

payload!("tasks");

const NT: u32 = 1 << 14;
const TF: u32 = 1 << 8;
const BUSY: u64 = 2 << 40;

blob! {
    fn tasks[32](jump_task, jump_back, call_task, call_back, soft_task, soft_back, fault_task,
        jump_task16, jump_back16, jump_self, return_task, other, other_next, other_nested, other_after, other_error, other_end, small; tasks_stop);
    "ljmp $0x58, $0"
    "jump_back: ud2"
    "call_task: movl $7, %ebx"
    "lcall $0x58, $0"
    "call_back: ud2"
    "soft_task: int $0x40"
    "soft_back: ud2"
    "fault_task: movw %ax, %ds"
    "ud2"
    "jump_task16: ljmp $0x68, $0"
    "jump_back16: ud2"
    "jump_self: ljmp $0x50, $0"
    "ud2"
    "return_task: iretl"
    "ud2"
    "other: nop"
    "other_next: ud2"
    "other_nested: movl $99, %ebx"
    "iretl"
    "other_after: ud2"
    "other_error: popl %ecx"
    "other_end: ud2"
    "small: ud2"
}

/// A machine whose task 1 starts at `entry` with known registers.
fn with_task(entry: BlobLabel) -> &'static mut LegacyMachine {
    let blob = tasks();
    let m = legacy::machine(&blob);
    let t = &mut m.tss[1];
    t.eip = blob.linear(entry);
    t.cs = sel::CODE32.into();
    (t.ss, t.ds, t.es) = (sel::DATA32.into(), sel::DATA32.into(), sel::DATA32.into());
    (t.fs, t.gs) = (0, 0);
    t.esp = BASE + STACK - 0x1000;
    (t.eax, t.ecx, t.edx, t.ebx) = (0x1111, 0x2222, 0x3333, 0x4444);
    (t.esi, t.edi, t.ebp) = (0x5555, 0x6666, 0x7777);
    m
}

fn start(entry: BlobLabel) -> BlobStart {
    BlobStart::at(LegacyMode::Protected32(0), entry)
}

fn busy(m: &LegacyMachine, selector: u16) -> bool {
    m.gdt[usize::from(selector / 8)] & BUSY != 0
}

case! {
    name: "jump", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "a jump to a TSS saves the old task, loads the new one, moves the busy flag and sets CR0.TS",
    fn body(_ctx) {
        let blob = tasks();
        let m = with_task(other);
        m.tss[1].eflags = 0xcd7 & !TF | 2;
        let mut at = start(jump_task);
        at.registers.esi = 0xabcd;
        m.run(&blob, &at);
        let last = m.last();
        check_eq!(last.vector_and_eip(), (6, blob.linear(other_next)), "vector and EIP at the end");
        let r = last.registers;
        check_eq!([r.eax, r.ecx, r.edx, r.ebx], [0x1111, 0x2222, 0x3333, 0x4444], "EAX to EBX");
        check_eq!([r.esi, r.edi, r.ebp], [0x5555, 0x6666, 0x7777], "ESI, EDI, EBP");
        check_eq!(last.esp, BASE + STACK - 0x1000, "ESP");
        check_eq!(last.eflags & 0xcd5, 0xcd5 & !TF, "the arithmetic flags");
        check_eq!(last.tr, sel::TSS1.into(), "TR");
        check_eq!(last.cr0 & 8, 8, "CR0.TS");
        check_eq!((m.tss[0].eip, m.tss[0].esi), (blob.linear(jump_back), 0xabcd), "saved EIP and ESI");
        check_eq!(m.tss[0].cs & 0xffff, sel::CODE32.into(), "saved CS");
        check_eq!((busy(m, sel::TSS0), busy(m, sel::TSS1)), (false, true), "busy");
    }
}

case! {
    name: "call_and_return", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "a call to a TSS nests, and IRET with NT goes back",
    fn body(_ctx) {
        let blob = tasks();
        let m = with_task(other_nested);
        m.run(&blob, &start(call_task));
        check_eq!(m.last().vector_and_eip(), (6, blob.linear(call_back)), "vector and EIP at the end");
        check_eq!(m.last().registers.ebx, 7, "EBX of the first task");
        check_eq!(m.last().tr, sel::TSS0.into(), "TR");
        check_eq!(m.last().eflags & NT, 0, "NT");
        check_eq!(m.tss[1].link & 0xffff, sel::TSS0.into(), "the link");
        check_eq!((m.tss[1].eip, m.tss[1].ebx), (blob.linear(other_after), 99), "what the other task left");
        check_eq!(m.tss[1].eflags & NT, 0, "NT was cleared before it was saved");
        check_eq!((busy(m, sel::TSS0), busy(m, sel::TSS1)), (true, false), "busy");
    }
}

case! {
    name: "interrupt", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "INT n through a task gate switches, nested",
    fn body(_ctx) {
        let blob = tasks();
        let m = with_task(other_nested);
        m.idt[0x40] = gate(sel::TSS1, 0, TASK);
        m.run(&blob, &start(soft_task));
        check_eq!(m.last().vector_and_eip(), (6, blob.linear(soft_back)), "vector and EIP at the end");
        check_eq!(m.tss[1].ebx, 99, "the other task ran");
        check_eq!(m.tss[0].eip, blob.linear(soft_back), "saved EIP");
    }
}

case! {
    name: "fault", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "an exception through a task gate pushes its error code onto the new task's stack",
    fn body(_ctx) {
        let blob = tasks();
        let m = with_task(other_error);
        m.idt[13] = gate(sel::TSS1, 0, TASK);
        let mut at = start(fault_task);
        at.registers.eax = 0x1f8;
        m.run(&blob, &at);
        check_eq!(m.last().vector_and_eip(), (6, blob.linear(other_end)), "vector and EIP at the end");
        check_eq!(m.last().registers.ecx, 0x1f8, "the error code");
        check_eq!(m.tss[0].eip, blob.linear(fault_task), "saved EIP");
        check_eq!(m.last().eflags & NT, NT, "NT");
    }
}

case! {
    name: "sixteen_bit_task", cpl: [0], rules: ["TSK-07"], needs: ["exceptions", "guestbp-io"],
    about: "a 16-bit TSS loads 16-bit registers",
    fn body(_ctx) {
        let blob = tasks();
        let m = legacy::machine(&blob);
        let t = &mut m.tss16;
        t.ip = u16::try_from(blob.offset(small)).unwrap_or(0);
        (t.cs, t.ss, t.ds, t.es) = (sel::CODE16, sel::DATA16, sel::DATA16, sel::DATA16);
        (t.sp, t.flags) = (0x8000, 2);
        (t.ax, t.bx, t.si) = (0x1234, 0x5678, 0x9abc);
        m.run(&blob, &start(jump_task16));
        check_eq!(m.last().vector_and_eip(), (6, blob.offset(small)), "vector and EIP at the end");
        let r = m.last().registers;
        check_eq!([r.eax, r.ebx, r.esi].map(|v| v & 0xffff), [0x1234, 0x5678, 0x9abc], "registers");
        check_eq!(m.last().tr, sel::TSS16.into(), "TR");
        check_eq!(m.tss[0].eip, blob.linear(jump_back16), "saved EIP");
    }
}

case! {
    name: "refused", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0", "gd"],
    about: "busy, absent and short TSSs, and a return to a task that is not busy, raise #GP, #NP and #TS",
    fn body(_ctx) {
        let blob = tasks();
        let tss1 = usize::from(sel::TSS1 / 8);
        let m = legacy::machine(&blob);
        m.run(&blob, &start(jump_self));
        check_eq!(m.last().code(), (13, sel::TSS0.into()), "a busy task");
        check_eq!(m.last().eip, blob.linear(jump_self), "saved EIP");

        let m = with_task(other);
        m.gdt[tss1] &= !(0x80 << 40);
        m.run(&blob, &start(jump_task));
        check_eq!(m.last().code(), (11, sel::TSS1.into()), "an absent TSS");

        let m = with_task(other);
        m.gdt[tss1] = tables::segment(0x5000, 0x66, TSS32);
        m.run(&blob, &start(jump_task));
        check_eq!(m.last().code(), (10, sel::TSS1.into()), "a short TSS");

        if insn::is_qemu_tcg() {
            return;
        }
        let m = with_task(other);
        m.tss[0].link = sel::TSS1.into();
        let mut at = start(return_task);
        at.eflags = NT;
        m.run(&blob, &at);
        check_eq!(m.last().code(), (10, sel::TSS1.into()), "a link to a task that is not busy");
    }
}

case! {
    name: "trace_flags", cpl: [0], rules: ["TF-14", "TSK-01"], needs: ["exceptions", "gd", "guestbp-io"],
    about: "TF of the new task traps after its first instruction, T before it",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG has no trap flag of tasks");
        }
        let blob = tasks();
        let m = with_task(other);
        m.actions[1] = action::RESUME;
        m.tss[1].eflags = TF | 2;
        m.run(&blob, &start(jump_task));
        check_eq!(m.events().len(), 2, "one step and the end");
        check_eq!(m.events()[0].vector_and_eip(), (1, blob.linear(other_next)), "after the first instruction");
        check_eq!(m.events()[0].dr6 & 0xe00f, 0x4000, "BS");

        let m = with_task(other);
        m.actions[1] = action::RESUME;
        m.tss[1].trap = 1;
        m.run(&blob, &start(jump_task));
        check_eq!(m.events().len(), 2, "one trap and the end");
        check_eq!(m.events()[0].vector_and_eip(), (1, blob.linear(other)), "before the first instruction");
        check_eq!(m.events()[0].dr6 & 0xe00f, 0x8000, "BT");
    }
}

case! {
    name: "local_breakpoints", cpl: [0], rules: ["TSK-04"], needs: ["exceptions", "intn-cpl0", "gd"],
    about: "a switch clears the local enable bits of DR7 and keeps the rest",
    fn body(_ctx) {
        let blob = tasks();
        let m = with_task(other);
        // Breakpoints on addresses that nothing executes.
        (0..4).for_each(|n| insn::write_dr(n, 0x3fff_0000));
        insn::write_dr7(0x7ff);
        m.run(&blob, &start(jump_task));
        let found = insn::read_dr7();
        insn::write_dr7(0x400);
        // QEMU TCG keeps LE.
        let le = if insn::is_qemu_tcg() { 0x100 } else { 0 };
        check_eq!(found & !le, 0x6aa, "DR7");
    }
}
