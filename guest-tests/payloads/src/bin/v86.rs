//! Virtual-8086 mode. SDM Vol. 3B, "8086 Emulation".

#![no_std]
#![no_main]

use hindsight_guest::blob;
use hindsight_guest::insn;
use hindsight_guest::legacy::{
    self, Blob, BlobLabel, BlobStart, LegacyMachine, LegacyMode, SEGMENT, STACK, action,
};
use hindsight_guest::prelude::*;

payload!("v86");

const IOPL: u32 = 3 << 12;
const VME: u32 = 1;
const IF: u32 = 1 << 9;
const VIF: u32 = 1 << 19;
const VIP: u32 = 1 << 20;

blob! {
    fn code[16](v_cli, v_sti, v_pushf, v_popf, v_int, v_iret, v_in, v_hlt, v_cr, v_dr, v_allowed, v_allowed_end, v_flags, v_flags_end, v_int3, v_int3_end,
        v_redirected, v_redirected_end, v_target, v_segments, v_segments_end, v_limit; v_stop);
    "cli"
    "ud2"
    "v_sti: sti"
    "ud2"
    "v_pushf: pushfw"
    "ud2"
    "v_popf: popfw"
    "ud2"
    "v_int: int $0x21"
    "ud2"
    "v_iret: iretw"
    "ud2"
    "v_in: inb $0x80, %al"
    "ud2"
    "v_hlt: hlt"
    "v_cr: movl %cr0, %eax"
    "v_dr: movl %dr7, %eax"
    // With IOPL 3 all of these are allowed, and so is a port that the map opens.
    "v_allowed: cli"
    "pushfw"
    "popw %ax"
    "sti"
    "pushfw"
    "popw %bx"
    "inb $0x80, %al"
    "v_allowed_end: ud2"
    // With CR4.VME: CLI and STI change VIF, PUSHF shows it as IF.
    "v_flags: sti"
    "pushfw"
    "popw %ax"
    "cli"
    "pushfw"
    "popw %bx"
    "v_flags_end: ud2"
    "v_int3: int3"
    "v_int3_end: ud2"
    "v_redirected: movw $0x1234, %ax"
    "int $0x21"
    "v_redirected_end: ud2"
    "v_target: movw %sp, %bp"
    "movw 4(%bp), %cx"
    "iretw"
    // Segments are 16 times their selectors.
    "v_segments: movw $0x1001, %ax"
    "movw %ax, %ds"
    "movw 0xf000, %bx"
    "movw $0xf010, %si"
    "movw %cs:(%si), %cx"
    "v_segments_end: ud2"
    "v_limit: movw $0xffff, %si"
    "movw (%si), %ax"
    "ud2"
}

fn machine() -> (Blob, &'static mut LegacyMachine) {
    let blob = code();
    (blob, legacy::machine(&blob))
}

fn start(entry: BlobLabel, eflags: u32, cr4: u32) -> BlobStart {
    let mut start = BlobStart::at(LegacyMode::Virtual8086, entry);
    (start.eflags, start.cr4) = (eflags, cr4);
    start
}

case! {
    name: "sensitive", cpl: [0], rules: ["DR-15"], needs: ["exceptions", "intn-cpl0"],
    about: "with IOPL 0 the instructions that depend on IOPL, and with any those of CPL 0, raise #GP(0)",
    fn body(_ctx) {
        for entry in [v_cli as BlobLabel, v_sti, v_pushf, v_popf, v_int, v_iret, v_in, v_hlt, v_cr, v_dr] {
            let (blob, m) = machine();
            m.run(&blob, &start(entry, 0, 0));
            check_eq!(m.last().vector_and_eip(), (13, blob.offset(entry)), "#GP at the instruction");
            check_eq!(m.last().error, 0, "error code");
            check_eq!(m.last().eflags >> 17 & 1, 1, "VM in the image");
        }
        for entry in [v_hlt as BlobLabel, v_cr, v_dr] {
            let (blob, m) = machine();
            m.run(&blob, &start(entry, IOPL, 0));
            check_eq!(m.last().vector_and_eip(), (13, blob.offset(entry)), "#GP with IOPL 3");
        }
    }
}

case! {
    name: "allowed", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "with IOPL 3 they work on IF, and IN asks the I/O map alone",
    fn body(_ctx) {
        let (blob, m) = machine();
        m.tss[0].io[0x80 / 8] = 0xfe;
        m.run(&blob, &start(v_allowed, IOPL, 0));
        check_eq!(m.last().vector_and_eip(), (6, blob.offset(v_allowed_end)), "vector and EIP at the end");
        let r = m.last().registers;
        check_eq!(r.ebx & IF, IF, "IF after STI");
        check_eq!((m.last().ss, m.last().esp & 0xffff), (SEGMENT.into(), STACK), "the stack");
        check_eq!(m.last().segments, [u32::from(SEGMENT); 4], "the segments in the frame");
    }
}

case! {
    name: "virtual_interrupt_flag", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0", "gd"],
    about: "with CR4.VME and IOPL 0, CLI and STI change VIF; STI with VIP raises #GP(0)",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG has no PUSHF and INT n of CR4.VME");
        }
        let (blob, m) = machine();
        m.run(&blob, &start(v_flags, 0, VME));
        check_eq!(m.last().vector_and_eip(), (6, blob.offset(v_flags_end)), "vector and EIP at the end");
        let r = m.last().registers;
        check_eq!((r.eax & IF, r.ebx & IF), (IF, 0), "IF in the images is VIF");
        check_eq!(m.last().eflags & VIF, 0, "VIF at the end");
        let (blob, m) = machine();
        m.run(&blob, &start(v_sti, VIP, VME));
        check_eq!(m.last().vector_and_eip(), (13, blob.offset(v_sti)), "VIP");
    }
}

case! {
    name: "interrupts", cpl: [0], rules: ["SWI-05"], needs: ["exceptions", "intn-cpl0", "gd"],
    about: "INT3 needs no IOPL; INT n with CR4.VME follows the redirection map to the guest's own vector",
    fn body(ctx) {
        let (blob, m) = machine();
        m.run(&blob, &start(v_int3, 0, VME));
        check_eq!(m.last().vector_and_eip(), (3, blob.offset(v_int3_end)), "#BP");
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG has no PUSHF and INT n of CR4.VME");
        }

        let (blob, m) = machine();
        m.tss[0].redirect[0x21 / 8] = !(1 << (0x21 % 8));
        let vector = u32::from(SEGMENT) << 16 | blob.offset(v_target);
        // SAFETY: the real-mode vector table is RAM that only the legacy modes use.
        unsafe {
            core::ptr::with_exposed_provenance_mut::<u32>(0x21 * 4).write_volatile(vector);
        }
        m.actions[3] = action::END;
        m.run(&blob, &start(v_redirected, VIF, VME));
        check_eq!(m.last().vector_and_eip(), (6, blob.offset(v_redirected_end)), "back from the handler");
        check_eq!(m.last().registers.ecx & (IF | IOPL), IF | IOPL, "the image shows VIF as IF, and IOPL 3");

        let (blob, m) = machine();
        m.run(&blob, &start(v_int, 0, VME));
        check_eq!(m.last().vector_and_eip(), (13, blob.offset(v_int)), "a set bit in the map: #GP");
        let (blob, m) = machine();
        m.run(&blob, &start(v_int, IOPL, 0));
        check_eq!(m.last().vector, 0x21, "with IOPL 3 through the gate");
    }
}

case! {
    name: "segments", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0", "gd"],
    about: "a segment is 16 times its selector and ends at FFFFH",
    fn body(_ctx) {
        let (blob, m) = machine();
        // SAFETY: memory of the blob.
        unsafe {
            let word = core::ptr::with_exposed_provenance_mut::<u16>(legacy::BASE as usize + 0xf010);
            word.write_volatile(0xbeef);
        }
        m.run(&blob, &start(v_segments, 0, 0));
        check_eq!(m.last().vector_and_eip(), (6, blob.offset(v_segments_end)), "vector and EIP at the end");
        let r = m.last().registers;
        check_eq!((r.ebx & 0xffff, r.ecx & 0xffff), (0xbeef, 0xbeef), "the same word");
        if insn::is_qemu_tcg() {
            return;
        }
        let (blob, m) = machine();
        m.run(&blob, &start(v_limit, 0, 0));
        check_eq!(m.last().code(), (13, 0), "a word at FFFFH");
    }
}
