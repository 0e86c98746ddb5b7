//! ENTER with nesting levels, far pointers, far branches through memory, and IRET of all sizes.
//!
//! SDM Vol. 1, "Procedure Calls for Block-Structured Languages"; Vol. 2, the pages of the instructions.

#![no_std]
#![no_main]

use core::arch::asm;
use core::ptr;

use hindsight_guest::blob;
use hindsight_guest::catch::catch;
use hindsight_guest::gdt::KERNEL_DATA;
use hindsight_guest::legacy::tables::{self, segment};
use hindsight_guest::legacy::{
    self, BASE, Blob, BlobLabel, BlobStart, DATA, LegacyMachine, LegacyMode, STACK, sel,
};
use hindsight_guest::msr;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::msr::IA32_FS_BASE;

payload!("far");

/// Index of the first free descriptor, which these cases use.
const FREE: usize = (sel::FREE / 8) as usize;

blob! {
    fn code[32](
        nested, nested_end, short_nested, short_nested_end, load_ds, load_es, load_fs, load_gs, load_ss,
        loaded, load_short, jump, call, called, back, call_short, called_short, return_outer,
        return_short, iret_same, iret_short, iret_outer, iret_outer_short, target, target_end; code_stop
    );
    "enter $16, $3"
    "movl %esp, %edi"
    "movl %ebp, %esi"
    "movl (%ebp), %eax"
    "movl -4(%ebp), %ebx"
    "movl -8(%ebp), %ecx"
    "movl -12(%ebp), %edx"
    "leave"
    "nested_end: ud2"
    // 16-bit code, which pushes words.
    ".code16"
    "short_nested: enter $8, $0x22" // the level counts modulo 32
    "movw %sp, %di"
    "movw %bp, %si"
    "movw (%bp), %ax"
    "movw -2(%bp), %bx"
    "movw -4(%bp), %cx"
    "leave"
    "short_nested_end: ud2"
    ".code32"
    "load_ds: ldsl (%esi), %ebx"
    "jmp loaded"
    "load_es: lesl (%esi), %ebx"
    "jmp loaded"
    "load_fs: lfsl (%esi), %ebx"
    "jmp loaded"
    "load_gs: lgsl (%esi), %ebx"
    "jmp loaded"
    "load_ss: lssl (%esi), %ebx"
    "jmp loaded"
    "load_short: .byte 0x66, 0xc4, 0x1e" // LES BX, [ESI]
    "loaded: movw %ss, %cx"
    "ud2"
    "jump: ljmpl *(%esi)"
    "call: lcalll *(%esi)"
    "back: ud2"
    "called: movl (%esp), %eax"
    "movl 4(%esp), %edx"
    "lretl"
    "call_short: .byte 0x66, 0xff, 0x1e" // CALL m16:16
    "ud2"
    "called_short: movl (%esp), %eax"
    "movl %esp, %edi"
    "ud2"
    "return_outer: lretl $4"
    "return_short: .byte 0x66, 0xcb"
    "iret_same: iretl"
    "iret_short: .byte 0x66, 0xcf"
    "iret_outer: iretl"
    "iret_outer_short: .byte 0x66, 0xcf"
    "target: movl %esp, %edi"
    "target_end: ud2"
}

fn machine() -> (Blob, &'static mut LegacyMachine) {
    let blob = code();
    (blob, legacy::machine(&blob))
}

/// Writes doublewords from a linear address on.
fn put32(at: u32, words: &[u32]) {
    for (n, word) in (0..).zip(words) {
        // SAFETY: callers pass addresses in the blob's segment or the data page, which the case owns.
        unsafe {
            ptr::with_exposed_provenance_mut::<u32>((at + n * 4) as usize).write_unaligned(*word)
        };
    }
}

/// Writes words from a linear address on.
fn put16(at: u32, words: &[u16]) {
    for (n, word) in (0..).zip(words) {
        // SAFETY: as above.
        unsafe {
            ptr::with_exposed_provenance_mut::<u16>((at + n * 2) as usize).write_unaligned(*word)
        };
    }
}

/// A selector of the last event; PUSH leaves its upper half undefined.
fn selector(m: &LegacyMachine, index: usize) -> u32 {
    m.last().segments[index] & 0xffff
}

case! {
    name: "enter_nested", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "ENTER of level 3 copies the frame pointers of levels 1 and 2 and pushes its own; LEAVE reverses it",
    fn body(_ctx) {
        let (blob, m) = machine();
        let frame = DATA + 0x40;
        put32(frame - 8, &[0x2222, 0x1111]);
        let mut start = BlobStart::at(LegacyMode::Protected32(0), nested);
        start.registers.ebp = frame;
        m.run(&blob, &start);
        let last = m.last();
        check_eq!(last.vector_and_eip(), (6, blob.linear(nested_end)), "vector and EIP at the end");
        let top = BASE + STACK - 4;
        check_eq!(last.registers.esi, top, "EBP, the address of the old EBP");
        check_eq!(last.registers.edi, top - 12 - 16, "ESP");
        let r = last.registers;
        let found = [r.eax, r.ebx, r.ecx, r.edx];
        check_eq!(found, [frame, 0x1111, 0x2222, top], "old EBP, two levels, new EBP");
        check_eq!((last.registers.ebp, last.esp), (frame, BASE + STACK), "EBP and ESP after LEAVE");
    }
}

case! {
    name: "enter_nested_words", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "ENTER in 16-bit code pushes words, and its level counts modulo 32",
    fn body(_ctx) {
        let (blob, m) = machine();
        put16(BASE + 0xe03e, &[0x1111]);
        let mut start = BlobStart::at(LegacyMode::Protected16(0), short_nested);
        start.registers.ebp = 0xe040;
        m.run(&blob, &start);
        let last = m.last();
        check_eq!(last.vector_and_eip(), (6, blob.offset(short_nested_end)), "vector and EIP at the end");
        let top = STACK - 2;
        check_eq!(last.registers.esi & 0xffff, top, "BP");
        check_eq!(last.registers.edi & 0xffff, top - 4 - 8, "SP");
        let r = last.registers;
        let found = [r.eax, r.ebx, r.ecx].map(|word| word & 0xffff);
        check_eq!(found, [0xe040, 0x1111, top], "old BP, one level, new BP");
    }
}

case! {
    name: "enter_64", cpl: [0, 3], rules: [], needs: ["exceptions"], needs_cpl0: ["intn-cpl0"],
    needs_cpl3: ["iretq-cpl3"],
    about: "ENTER of level 2 in 64-bit code copies one frame pointer of 8 bytes",
    fn body(ctx) {
        let frames = [0_u64, 0x1111_2222_3333, 0];
        let at = &raw const frames[2] as u64;
        let (mut copied, mut own, mut old, mut size) = (0_u64, 0_u64, 0_u64, 0_u64);
        let fault = ctx.run(|| {
            // SAFETY: RBP and RSP are restored, and the frame pointer is only read.
            unsafe {
                asm!(
                    "mov {saved}, rbp", "mov rbp, {at}", "mov {size}, rsp",
                    "enter 32, 2",
                    "mov {old}, [rbp]", "mov {copied}, [rbp - 8]", "mov {own}, [rbp - 16]", "sub {own}, rbp",
                    "sub {size}, rsp",
                    "leave", "mov rbp, {saved}",
                    saved = out(reg) _, at = in(reg) at, old = out(reg) old, copied = out(reg) copied,
                    own = out(reg) own, size = out(reg) size,
                );
            }
        });
        check!(fault.is_none(), "no exception");
        check_eq!((old, copied), (at, frames[1]), "old RBP and one level");
        check_eq!(own, 0, "new RBP less RBP");
        check_eq!(size, 8 * 3 + 32, "bytes of the frame");
    }
}

case! {
    name: "far_pointers", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "LDS, LES, LFS, LGS and LSS load offset and segment; a selector that faults changes neither",
    fn body(_ctx) {
        // An event records GS, FS, ES and DS in this order.
        for (entry, index) in [(load_gs as BlobLabel, 0), (load_fs, 1), (load_es, 2), (load_ds, 3)] {
            let (blob, m) = machine();
            m.gdt[FREE] = segment(0, 0xffff_ffff, tables::DATA | tables::BIG);
            put32(DATA, &[0x1234_5678, sel::FREE.into()]);
            let mut start = BlobStart::at(LegacyMode::Protected32(0), entry);
            start.registers.esi = DATA;
            m.run(&blob, &start);
            check_eq!(m.last().registers.ebx, 0x1234_5678, "offset");
            check_eq!(selector(m, index), sel::FREE.into(), "selector");
            // A null selector is loaded; one of execute-only code is not.
            let (blob, m) = machine();
            put32(DATA, &[1, 0]);
            m.run(&blob, &start);
            check_eq!((m.last().registers.ebx, selector(m, index)), (1, 0), "offset and null selector");
            let (blob, m) = machine();
            m.gdt[FREE] = segment(0, 0xffff_ffff, tables::CODE & !2 | tables::BIG);
            put32(DATA, &[1, sel::FREE.into()]);
            m.run(&blob, &start);
            check_eq!(m.last().vector_and_eip(), (13, blob.linear(entry)), "vector and EIP, execute-only code");
            check_eq!(m.last().code(), (13, sel::FREE.into()), "vector and error code");
            check_eq!(m.last().registers.ebx, 0, "offset, not loaded");
        }
        let (blob, m) = machine();
        m.gdt[FREE] = segment(0, 0xffff_ffff, tables::DATA | tables::BIG);
        put32(DATA, &[0x55, sel::FREE.into()]);
        let mut start = BlobStart::at(LegacyMode::Protected32(0), load_ss);
        start.registers.esi = DATA;
        m.run(&blob, &start);
        check_eq!((m.last().registers.ebx, m.last().registers.ecx & 0xffff), (0x55, sel::FREE.into()), "LSS");
        for (selector, expected) in [(0, (13, 0)), (sel::USER_DATA32, (13, (sel::USER_DATA32 & !3).into()))] {
            let (blob, m) = machine();
            put32(DATA, &[0x55, selector.into()]);
            m.run(&blob, &start);
            check_eq!(m.last().code(), expected, "LSS of a selector that SS cannot have");
        }
        let (blob, m) = machine();
        put16(DATA, &[0x5678, sel::DATA32]);
        let mut start = BlobStart::at(LegacyMode::Protected32(0), load_short);
        start.registers.esi = DATA;
        start.registers.ebx = 0xaaaa_0000;
        m.run(&blob, &start);
        check_eq!(m.last().registers.ebx, 0xaaaa_5678, "offset of 16 bits");
        check_eq!(selector(m, 2), sel::DATA32.into(), "selector after a 16-bit load");
    }
}

case! {
    name: "far_through_memory", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "far JMP and CALL read 48 or 32 bits from memory; CALL pushes CS and EIP, with which RET returns",
    fn body(_ctx) {
        let (blob, m) = machine();
        put32(DATA, &[blob.linear(target), sel::CODE32.into()]);
        let mut start = BlobStart::at(LegacyMode::Protected32(0), jump);
        start.registers.esi = DATA;
        m.run(&blob, &start);
        check_eq!(m.last().vector_and_eip(), (6, blob.linear(target_end)), "JMP");
        let (blob, m) = machine();
        put32(DATA, &[blob.linear(called), sel::CODE32.into()]);
        start.entry = call;
        m.run(&blob, &start);
        check_eq!(m.last().vector_and_eip(), (6, blob.linear(back)), "after CALL and RET");
        let r = m.last().registers;
        check_eq!((r.eax, r.edx & 0xffff), (blob.linear(back), sel::CODE32.into()), "EIP and CS that CALL pushed");
        check_eq!(m.last().esp, BASE + STACK, "ESP");
        // A pointer with a 16-bit offset, to a segment with the blob's base.
        let (blob, m) = machine();
        m.gdt[FREE] = segment(BASE, 0xffff, tables::CODE | tables::BIG);
        let to = u16::try_from(blob.offset(called_short)).unwrap_or(0);
        put16(DATA, &[to, sel::FREE]);
        start.entry = call_short;
        m.run(&blob, &start);
        let r = m.last().registers;
        let next = blob.linear(call_short) + 3;
        check_eq!(r.eax, next & 0xffff | u32::from(sel::CODE32) << 16, "two words that CALL pushed");
        check_eq!(r.edi, BASE + STACK - 4, "ESP");
    }
}

/// Runs `entry`, which returns by a frame of doublewords on the stack, and returns the machine.
fn return_by(
    entry: BlobLabel,
    frame: impl Fn(&Blob) -> [u32; 6],
) -> (Blob, &'static mut LegacyMachine) {
    let (blob, m) = machine();
    let mut start = BlobStart::at(LegacyMode::Protected32(0), entry);
    start.sp = BASE + 0xe000;
    put32(start.sp, &frame(&blob));
    m.run(&blob, &start);
    (blob, m)
}

const USER_STACK: u32 = BASE + 0xd000;

case! {
    name: "return_to_outer_level", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "RET and IRET to CPL 3 load SS:ESP and null the segments that CPL 3 cannot use",
    fn body(_ctx) {
        let (code, data) = (u32::from(sel::USER_CODE32), u32::from(sel::USER_DATA32));
        let (blob, m) = return_by(return_outer, |b| [b.linear(target), code, 0x99, USER_STACK, data, 0]);
        check_eq!(m.last().vector_and_eip(), (6, blob.linear(target_end)), "RET");
        check_eq!((m.last().cs, m.last().ss), (code, data), "CS and SS");
        check_eq!(m.last().registers.edi, USER_STACK + 4, "ESP, without the parameter on the outer stack");
        check_eq!([0, 1, 2, 3].map(|n| selector(m, n)), [0; 4], "data segments, which were of CPL 0");
        let (blob, m) = return_by(iret_outer, |b| [b.linear(target), code, 0x3002, USER_STACK, data, 0]);
        check_eq!(m.last().vector_and_eip(), (6, blob.linear(target_end)), "IRET");
        check_eq!((m.last().cs, m.last().ss), (code, data), "CS and SS");
        check_eq!(m.last().registers.edi, USER_STACK, "ESP");
        check_eq!(m.last().eflags & 0x3000, 0x3000, "IOPL");
        check_eq!([0, 1, 2, 3].map(|n| selector(m, n)), [0; 4], "data segments, which were of CPL 0");
        // SS of another level than CS, and a null SS.
        let (_, m) = return_by(iret_outer, |b| [b.linear(target), code, 2, USER_STACK, sel::DATA32.into(), 0]);
        check_eq!(m.last().code(), (13, sel::DATA32.into()), "SS of CPL 0");
        let (_, m) = return_by(iret_outer, |b| [b.linear(target), code, 2, USER_STACK, 0, 0]);
        check_eq!(m.last().code(), (13, 0), "null SS");
    }
}

/// Like [`return_by`], with descriptors of CPL 3 at [`FREE`].
///
/// They are code that ends below the target, and a stack whose accessed bit is clear.
fn return_beyond(entry: BlobLabel, stack: u32) -> &'static mut LegacyMachine {
    let (blob, m) = machine();
    m.gdt[FREE] = segment(0, 0xfff, tables::CODE | tables::USER | tables::BIG);
    m.gdt[FREE + 1] = segment(
        0,
        0xffff_ffff,
        tables::DATA & !1 | tables::USER | tables::BIG,
    );
    let mut start = BlobStart::at(LegacyMode::Protected32(0), entry);
    start.sp = BASE + 0xe000;
    let code = u32::from(sel::FREE | 3);
    // For RET the third doubleword is a parameter.
    let frame = [blob.linear(target), code, 2, USER_STACK, stack, 0];
    put32(start.sp, &frame);
    m.run(&blob, &start);
    m
}

case! {
    name: "return_beyond_the_limit", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0", "gd"],
    about: "RET and IRET to CPL 3 check SS before EIP, and write the descriptor of SS after both checks",
    fn body(_ctx) {
        for entry in [return_outer as BlobLabel, iret_outer] {
            let m = return_beyond(entry, sel::DATA32.into());
            check_eq!(m.last().code(), (13, sel::DATA32.into()), "SS of CPL 0, and EIP beyond the limit");
            let unused = u32::from((sel::FREE + 8) | 3);
            let m = return_beyond(entry, unused);
            check_eq!(m.last().code(), (13, 0), "EIP beyond the limit");
            check_eq!(m.gdt[FREE + 1] >> 40 & 1, 0, "accessed bit of SS");
        }
    }
}

case! {
    name: "iret_sizes", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0"],
    about: "IRET of 32 and 16 bits to the same level and to an outer one",
    fn body(_ctx) {
        let (blob, m) = return_by(iret_same, |b| [b.linear(target), sel::CODE32.into(), 0x0cd7, 0, 0, 0]);
        check_eq!(m.last().vector_and_eip(), (6, blob.linear(target_end)), "32 bits");
        check_eq!(m.last().registers.edi, BASE + 0xe000 + 12, "ESP");
        check_eq!(m.last().eflags & 0xfd5, 0x0cd5, "EFLAGS");
        // The frame is IP, CS, FLAGS, SP, SS in words. The segments have the blob's base, so that 16-bit
        // offsets reach the blob.
        let words = |a: u32, b: u32| a & 0xffff | b << 16;
        let short = |entry: BlobLabel, cs: u16, ss: u16| {
            let (blob, m) = machine();
            m.gdt[FREE] = segment(BASE, 0xffff, tables::CODE | tables::BIG);
            m.gdt[FREE + 1] = segment(BASE, 0xffff, tables::CODE | tables::BIG | tables::USER);
            let mut start = BlobStart::at(LegacyMode::Protected32(0), entry);
            start.sp = BASE + 0xe000;
            put32(start.sp, &[words(blob.offset(target), cs.into()), words(0x0003, 0xd000), ss.into()]);
            m.run(&blob, &start);
            (m.last().vector_and_eip(), blob.offset(target_end), m.last().registers.edi, m.last().ss)
        };
        let (found, end, esp, _) = short(iret_short, sel::FREE, 0);
        check_eq!((found, esp), ((6, end), BASE + 0xe000 + 6), "16 bits, same level");
        let (found, end, esp, ss) = short(iret_outer_short, sel::FREE + 8 + 3, sel::USER_DATA16);
        check_eq!((found, ss), ((6, end), sel::USER_DATA16.into()), "16 bits, to CPL 3");
        check_eq!(esp & 0xffff, 0xd000, "SP");
        let (found, end, esp, _) = short(return_short, sel::FREE, 0);
        check_eq!((found, esp), ((6, end), BASE + 0xe000 + 4), "RET of 16 bits");
    }
}

case! {
    name: "iret_64", cpl: [0], rules: [], needs: ["exceptions", "intn-cpl0", "iretd-cpl0"],
    about: "in 64-bit mode IRET of any size pops SS and RSP even if the level stays the same",
    fn body(_ctx) {
        let (mut wide, mut narrow) = (0_u64, 0_u64);
        let fault = catch(|| {
            // SAFETY: both frames return to the next label with these segments, and RSP is restored.
            unsafe {
                asm!(
                    "mov {saved}, rsp",
                    "mov {t:e}, ss", "push {t}", "lea {t}, [rsp - 0x100]", "push {t}",
                    "pushfq", "mov {t:e}, cs", "push {t}", "lea {t}, [rip + 2f]", "push {t}",
                    "mov {t}, rsp",
                    "iretq",
                    "2: sub {t}, rsp", "mov {wide}, {t}", "mov rsp, {saved}",
                    "sub rsp, 20",
                    "lea {t}, [rip + 3f]", "mov [rsp], {t:e}",
                    "mov {t:e}, cs", "mov [rsp + 4], {t:e}",
                    "mov dword ptr [rsp + 8], 2",
                    "lea {t}, [rsp - 0x200]", "mov [rsp + 12], {t:e}",
                    "mov {t:e}, ss", "mov [rsp + 16], {t:e}",
                    "mov {t}, rsp",
                    "iretd",
                    "3: sub {t}, rsp", "mov {narrow}, {t}", "mov rsp, {saved}",
                    saved = out(reg) _, t = out(reg) _, wide = out(reg) wide, narrow = out(reg) narrow,
                );
            }
        });
        check!(fault.is_none(), "no exception");
        // Above the frame are 32 bytes: SS and the values pushed after it.
        check_eq!(wide, 0x100 - 32, "RSP after IRETQ");
        check_eq!(narrow, 0x200, "RSP after IRET of 32 bits");
    }
}

case! {
    // Emulators clear the base.
    name: "return_keeps_bases", cpl: [3], rules: [], needs: ["guestbp-io"],
    about: "a return to CPL 3 nulls FS if it holds a segment of CPL 0, and keeps its base",
    fn body(ctx) {
        let base = 0x1234_5000;
        let selector: u16;
        // SAFETY: no code uses FS.
        unsafe { asm!("mov fs, {0:x}", in(reg) KERNEL_DATA, options(nomem, nostack)) };
        msr::write(IA32_FS_BASE, base);
        check!(ctx.run(|| {}).is_none(), "no exception");
        // SAFETY: as above.
        unsafe { asm!("mov {0:x}, fs", out(reg) selector, options(nomem, nostack)) };
        check_eq!((selector, msr::read(IA32_FS_BASE)), (0, base), "FS");
        msr::write(IA32_FS_BASE, 0);
    }
}
