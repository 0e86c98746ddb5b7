//! The DS management area and the BTS buffer in memory: page tables, faults, and what is written.

#![no_std]
#![no_main]

use hindsight_guest::catch::logged;
use hindsight_guest::insn;
use hindsight_guest::msr::{self, GP};
use hindsight_guest::paging::{self, A, D, P, PAGE, RW, US};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cr::Cr0;
use hindsight_guest::regs::dr::{BreakpointIndex, Condition, Dr7, Length};
use hindsight_guest::regs::msr::IA32_DS_AREA;
use hindsight_payloads::branch::sequences as seq;
use hindsight_payloads::branch::{BTINT, BTS, TR, run_sequence};
use hindsight_payloads::ds::{self, DsArea, DsPages, RECORD_BYTES};
use hindsight_payloads::{need_bts, sequence};

payload!("ds_area");

static PAGES: DsPages = DsPages::new();

/// A second linear address of the pages, in the upper half.
const HIGH: u64 = 0xffff_9000_0000_0000;
/// The first non-canonical address.
const NON_CANONICAL: u64 = 0x0000_8000_0000_0000;

fn run(level: u8, debugctl: u64) -> bool {
    run_sequence(level, seq::one_of_each(), debugctl).is_some()
}

/// Runs the sequence and checks that neither the buffer nor the area changed; `message` says why.
fn check_dropped(level: u8, area: DsArea, message: &'static str) -> bool {
    let mut unchanged = true;
    for bits in [0, BTINT] {
        let before = PAGES.area();
        unchanged &= check!(run(level, TR | BTS | bits), message);
        unchanged &= check!(PAGES.area() == before, message);
        unchanged &= check!((0..ds::BUFFER).all(|n| PAGES.byte(n) == ds::FILL), message);
    }
    PAGES.set_area(area);
    unchanged
}

case! {
    name: "address_register", cpl: [0], rules: ["DS-03", "MSR-23", "RST-09"], needs: [],
    about: "IA32_DS_AREA is 0 after RESET and takes canonical values; others raise #GP(0)",
    fn body(ctx) {
        need_feature!(ctx, DS);
        check_eq!(msr::read(IA32_DS_AREA), 0, "value after RESET");
        let last = 0xffff_9000_0000_0007;
        for value in [1, 0x1003, 0x7fff_ffff_ffff, 0xffff_8000_0000_0000, u64::MAX, last] {
            check_eq!(msr::write_safe(IA32_DS_AREA, value), Ok::<(), _>(()), "write, canonical value");
            check_eq!(msr::read(IA32_DS_AREA), value, "value read back");
        }
        for value in [NON_CANONICAL, 0xffff_7fff_ffff_ffff, 1 << 63, 0x8000_0000_0000_0000 - 1] {
            check_eq!(msr::write_safe(IA32_DS_AREA, value), Err(GP), "write, non-canonical value");
            check_eq!(msr::read(IA32_DS_AREA), last, "value after the write");
        }
        msr::write(IA32_DS_AREA, 0);
    }
}

case! {
    name: "unaligned_area", cpl: [0, 3], rules: ["DS-03", "BTS-22"], needs: [],
    about: "the management area may be at any address, and may cross a page boundary",
    fn body(ctx) {
        need_bts!(ctx);
        let all = seq::one_of_each().all(ctx.cpl);
        // The area is in the second page of the buffer, the records are in the first.
        for offset in [1, 7, 100, 4096 - 12, 4096 - 4] {
            let area = PAGES.arm(20);
            let address = PAGES.buffer_address() + 2000 + offset;
            // SAFETY: the area is inside the buffer, behind the records.
            unsafe { (address as *mut DsArea).write_unaligned(area) };
            msr::write(IA32_DS_AREA, address);
            require!(run(ctx.cpl, TR | BTS), "no unhandled exception");
            // SAFETY: as above.
            let after = unsafe { (address as *const DsArea).read_unaligned() };
            let index = area.base + all.items().len() as u64 * RECORD_BYTES;
            check!(after == DsArea { index, ..area }, "only the index changed");
            check_eq!(PAGES.record(area.base).to, all.items()[0].to, "target of the first record");
        }
    }
}

case! {
    name: "fields_are_read_when_used", cpl: [0, 3], rules: ["DS-09", "DS-10", "DS-15"], needs: [],
    about: "the next record uses base, index and maximum as they are in memory",
    fn body(ctx) {
        need_bts!(ctx);
        let all = seq::jumps().all(ctx.cpl);
        let n = all.items().len() as u64;
        let first = PAGES.arm(100);
        require!(run_sequence(ctx.cpl, seq::jumps(), TR | BTS).is_some(), "no unhandled exception");
        PAGES.check_stored(&first, all.items());
        // With the index reset, records are stored from the base again.
        PAGES.set_area(first);
        require!(run_sequence(ctx.cpl, seq::jumps(), TR | BTS).is_some(), "no unhandled exception");
        PAGES.check_stored(&first, all.items());
        // With another index and maximum, two more records are stored.
        let index = first.base + 50 * RECORD_BYTES;
        let moved = DsArea { index, maximum: index + 2 * RECORD_BYTES, ..first };
        PAGES.set_area(moved);
        require!(run_sequence(ctx.cpl, seq::jumps(), TR | BTS | BTINT).is_some(), "no unhandled exception");
        check_eq!(PAGES.area().index, moved.maximum, "index");
        let found = PAGES.record(moved.index + RECORD_BYTES);
        check_eq!((found.from, found.to), all.items()[1].pair(), "second record from the new index");
        check_eq!(PAGES.byte(usize::try_from(52 * RECORD_BYTES).unwrap_or(0)), ds::FILL, "byte at the maximum");
        check!(n > 2, "more than two branches");
    }
}

case! {
    name: "only_the_index_is_written", cpl: [0, 3], rules: ["DS-11"], needs: [],
    about: "only the BTS index of the area changes, not the reserved bytes and the PEBS fields",
    fn body(ctx) {
        need_bts!(ctx);
        let area = DsArea { pebs: [u64::MAX, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], ..PAGES.arm(100) };
        PAGES.set_area(area);
        require!(run(ctx.cpl, TR | BTS), "no unhandled exception");
        PAGES.check_stored(&area, seq::one_of_each().all(ctx.cpl).items());
    }
}

/// Maps the pages in the upper half with these flags for area and buffer, and arms BTS there.
fn arm_high(area_flags: u64, buffer_flags: u64) -> DsArea {
    let (area_page, buffer) = (PAGES.area_address(), PAGES.buffer_address());
    paging::map(HIGH, area_page, area_flags);
    paging::map(HIGH + PAGE, buffer, buffer_flags);
    paging::map(HIGH + 2 * PAGE, buffer + PAGE, buffer_flags);
    let area = PAGES.arm(100);
    let high = HIGH + PAGE;
    let area = DsArea {
        base: high,
        index: high,
        maximum: high + 100 * RECORD_BYTES,
        threshold: u64::MAX,
        ..area
    };
    PAGES.set_area(area);
    msr::write(IA32_DS_AREA, HIGH);
    area
}

/// Checks the records of [`arm_high`] through the other mapping.
fn check_high(level: u8, area: &DsArea) {
    let all = seq::one_of_each().all(level);
    let end = area.base + all.items().len() as u64 * RECORD_BYTES;
    check_eq!(PAGES.area().index, end, "index");
    for (n, item) in (0..).zip(all.items()) {
        let found = PAGES.record(PAGES.buffer_address() + n * RECORD_BYTES);
        check_eq!(
            (n, (found.from, found.to)),
            (n, item.pair()),
            "record: number, from, to"
        );
    }
}

case! {
    name: "through_the_page_tables", cpl: [0, 3], rules: ["DS-04", "DS-05"], needs: [],
    about: "area and buffer have linear addresses, and their pages may be for the supervisor only",
    fn body(ctx) {
        need_bts!(ctx);
        for flags in [P | RW | A | D, P | RW | US | A | D] {
            let area = arm_high(flags, flags);
            require!(run(ctx.cpl, TR | BTS), "no unhandled exception");
            check_high(ctx.cpl, &area);
        }
    }
}

case! {
    name: "accessed_and_dirty", cpl: [0, 3], rules: ["DS-07"], needs: [],
    about: "the stores set A and D in the entries of the pages that they write, and in no other",
    fn body(ctx) {
        need_bts!(ctx);
        let area = arm_high(P | RW, P | RW);
        require!(run(ctx.cpl, TR | BTS), "no unhandled exception");
        check_high(ctx.cpl, &area);
        // SAFETY: `entry` returns the address of an entry of a mapped table.
        let flags = |page: u64| unsafe { paging::entry(HIGH + page * PAGE).read_volatile() } & (A | D);
        check_eq!(flags(0), A | D, "page of the area");
        check_eq!(flags(1), A | D, "first page of the buffer");
        check_eq!(flags(2), 0, "second page of the buffer");
    }
}

case! {
    name: "area_that_faults", cpl: [0, 3], rules: ["DS-06", "OP-17"], needs: [],
    about: "if the area is not mapped, read-only or not canonical, records are dropped without an exception",
    fn body(ctx) {
        need_bts!(ctx);
        let writable = P | RW | A | D;
        let area = arm_high(0, writable);
        check_dropped(ctx.cpl, area, "the area is not mapped");
        let area = arm_high(P | A, writable);
        check_dropped(ctx.cpl, area, "the area is read-only");
        // An area in the last canonical page of the lower half ends at non-canonical addresses.
        let area = arm_high(writable, writable);
        paging::map(NON_CANONICAL - PAGE, PAGES.area_address(), writable);
        for inside in [1, 8, 12, 16, 24, 31] {
            let copy = PAGES.area_address() + PAGE - inside;
            // SAFETY: the copy is inside the page of the area, behind the area itself.
            unsafe {
                let bytes = PAGES.area_address() as *const u8;
                core::ptr::copy_nonoverlapping(bytes, copy as *mut u8, usize::try_from(inside).unwrap_or(0));
            }
            msr::write(IA32_DS_AREA, NON_CANONICAL - inside);
            if !check_dropped(ctx.cpl, area, "the area ends beyond the canonical addresses") {
                hindsight_guest::report::measurement("bytes inside", inside);
            }
        }
    }
}

case! {
    name: "buffer_that_faults", cpl: [0, 3], rules: ["DS-06", "OP-17"], needs: [],
    about: "if the buffer is not mapped, read-only or not canonical, records are dropped and the index stays",
    fn body(ctx) {
        need_bts!(ctx);
        let writable = P | RW | A | D;
        let area = arm_high(writable, 0);
        check_dropped(ctx.cpl, area, "the buffer is not mapped");
        let area = arm_high(writable, P | A);
        check_dropped(ctx.cpl, area, "the buffer is read-only");
        for base in [NON_CANONICAL, NON_CANONICAL - 1, NON_CANONICAL - 23, 1 << 63, 0xffff_7fff_ffff_fff0] {
            let high = arm_high(writable, writable);
            let area = DsArea { base, index: base, maximum: base + 2400, threshold: u64::MAX, ..high };
            PAGES.set_area(area);
            check_dropped(ctx.cpl, area, "the buffer is not canonical");
        }
        // A record that wraps at the end of the address space.
        let base = u64::MAX - 10;
        let high = arm_high(writable, writable);
        let area = DsArea { base, index: base, maximum: u64::MAX, threshold: u64::MAX, ..high };
        PAGES.set_area(area);
        check_dropped(ctx.cpl, area, "the buffer wraps at the end of the address space");
    }
}

case! {
    name: "read_only_without_write_protection", cpl: [0], rules: ["DS-06", "DS-04"], needs: [],
    about: "with CR0.WP clear a read-only page is written, as by every supervisor access",
    fn body(ctx) {
        need_bts!(ctx);
        let cr0 = insn::read_cr0();
        let area = arm_high(P | A | D, P | A | D);
        insn::write_cr0(cr0 & !Cr0::WP.bits());
        let ended = run(0, TR | BTS);
        insn::write_cr0(cr0);
        require!(ended, "no unhandled exception");
        check_high(0, &area);
    }
}

case! {
    name: "buffer_that_ends_in_a_hole", cpl: [0, 3], rules: ["DS-06"], needs: [],
    about: "a record that extends into an unmapped page is dropped as a whole; those before it are stored",
    fn body(ctx) {
        need_bts!(ctx);
        let writable = P | RW | A | D;
        let mut area = arm_high(writable, writable);
        // Two and a half records fit before the second page.
        area.base = HIGH + 2 * PAGE - 60;
        area.index = area.base;
        area.maximum = area.base + 2400;
        PAGES.set_area(area);
        paging::unmap(HIGH + 2 * PAGE);
        require!(run(ctx.cpl, TR | BTS), "no unhandled exception");
        check_eq!(PAGES.area().index - area.base, 48, "offset of the index");
        let offset = 4096 - 60;
        check!((0..offset).all(|n| PAGES.byte(n) == ds::FILL), "bytes below the base unchanged");
        check!((offset + 48..ds::BUFFER).all(|n| PAGES.byte(n) == ds::FILL), "bytes of the third record unchanged");
        let all = seq::one_of_each().all(ctx.cpl);
        let second = PAGES.record(PAGES.buffer_address() + offset as u64 + 24);
        check_eq!((second.from, second.to), all.items()[1].pair(), "second record");
    }
}

case! {
    name: "recovers", cpl: [0, 3], rules: ["DS-06", "DS-10"], needs: [],
    about: "after the page is mapped again the next record is stored",
    fn body(ctx) {
        need_bts!(ctx);
        let writable = P | RW | A | D;
        let area = arm_high(writable, 0);
        check_dropped(ctx.cpl, area, "the buffer is not mapped");
        paging::map(HIGH + PAGE, PAGES.buffer_address(), writable);
        require!(run(ctx.cpl, TR | BTS), "no unhandled exception");
        check_high(ctx.cpl, &area);
    }
}

case! {
    name: "no_data_breakpoints", cpl: [0, 3], rules: ["DS-08"], needs: [],
    about: "stores of records and of the index hit no data breakpoint",
    fn body(ctx) {
        need_bts!(ctx);
        let area = PAGES.arm(100);
        insn::write_dr0(area.base);
        insn::write_dr1(PAGES.area_address() + 8);
        let dr7 = Dr7::RESET
            .with_breakpoint(BreakpointIndex(0), Condition::ReadWrite, Length::Eight)
            .with_breakpoint(BreakpointIndex(1), Condition::ReadWrite, Length::Eight);
        insn::write_dr7(dr7.0);
        let events = run_sequence(ctx.cpl, seq::one_of_each(), TR | BTS);
        insn::write_dr7(Dr7::RESET.0);
        check_eq!(events.map(|events| events.debugs), Some(0), "count of #DBs");
        PAGES.check_stored(&area, seq::one_of_each().all(ctx.cpl).items());
        // The same breakpoints do match accesses of instructions.
        insn::write_dr7(dr7.0);
        let log = logged(1 << 1, || { PAGES.byte(0); });
        insn::write_dr7(Dr7::RESET.0);
        check!(log.count() > 0, "#DB of a load");
    }
}

case! {
    name: "not_counted", cpl: [0, 3], rules: ["DS-08"], needs: [],
    about: "stores of records are no instructions: INST_RETIRED is equal with and without BTS",
    fn body(ctx) {
        need_bts!(ctx);
        if insn::cpuid(0xa, 0).eax & 0xff < 2 {
            skip!(ctx, "CPUID leaf 0AH reports no fixed counters");
        }
        PAGES.arm(100);
        let without = retired(ctx.cpl, 0);
        check_eq!(retired(ctx.cpl, TR | BTS), without, "instructions with BTS");
    }
}

/// Instructions of a run. It is not inlined, so that runs with all values execute the same ones.
#[inline(never)]
fn retired(cpl: u8, debugctl: u64) -> u64 {
    use hindsight_guest::regs::msr::{IA32_FIXED_CTR_CTRL, IA32_FIXED_CTR0, IA32_PERF_GLOBAL_CTRL};
    msr::write(IA32_FIXED_CTR0, 0);
    msr::write(IA32_FIXED_CTR_CTRL, 3);
    msr::write(IA32_PERF_GLOBAL_CTRL, 1 << 32);
    run(cpl, core::hint::black_box(debugctl));
    msr::write(IA32_PERF_GLOBAL_CTRL, 0);
    msr::read(IA32_FIXED_CTR0)
}

/// Guest-physical addresses without memory.
const HOLE: u64 = 0xd000_0000;
/// Address of the local APIC's registers.
const APIC_PAGE: u64 = 0xfee0_0000;

case! {
    name: "nothing_behind_the_address", cpl: [0, 3], rules: ["DS-06"], needs: [],
    about: "an area or a buffer at an address without memory: records are dropped",
    fn body(ctx) {
        need_bts!(ctx);
        let writable = P | RW | A | D;
        let area = arm_high(writable, writable);
        paging::map(HIGH + PAGE, HOLE, writable);
        check_dropped(ctx.cpl, area, "the buffer has no memory");
        paging::map(HIGH, HOLE, writable);
        check!(run(ctx.cpl, TR | BTS), "no unhandled exception, area without memory");
        check!(run(ctx.cpl, TR | BTS | BTINT), "no unhandled exception, area without memory, BTINT");
        check!((0..ds::BUFFER).all(|n| PAGES.byte(n) == ds::FILL), "buffer unchanged");
    }
}

case! {
    name: "device_registers", cpl: [0, 3], rules: ["DS-06"], needs: [],
    about: "an area or a buffer at the APIC's registers does not disturb the program",
    fn body(ctx) {
        need_bts!(ctx);
        let area = PAGES.arm(10);
        // These registers are reserved.
        let base = APIC_PAGE + 0x400;
        PAGES.set_area(DsArea { base, index: base, maximum: base + 480, ..area });
        check!(run(ctx.cpl, TR | BTS), "no unhandled exception, buffer at the APIC");
        msr::write(IA32_DS_AREA, base);
        check!(run(ctx.cpl, TR | BTS), "no unhandled exception, area at the APIC");
        check!((0..ds::BUFFER).all(|n| PAGES.byte(n) == ds::FILL), "buffer unchanged");
    }
}

sequence! {
    /// Calls a function that counts in EBX, and calls it again after a branch at 22.
    ///
    /// The low byte of the branch's address is C3H, the opcode of RET. The record of the branch is
    /// stored over the function, which then returns at once.
    overwritten:
        "xor ebx, ebx",
        "20: call 30f",
        "21: jmp 22f",
        ".balign 256, 0x90",
        // Space for the records before it.
        ".skip 72, 0x90",
        "30: inc ebx",
        "31: ret",
        ".skip 0xc3 - 72 - 4, 0x90",
        ".byte 0x90",
        "22: jmp 23f",
        "23: call 30b",
        "24: mov eax, 0x03d00000",
        "mov [rax - 128], ebx",
    => ["20b", "30b", "REL_CALL"], ["31b", "21b", "RET_NEAR"], ["21b", "22b", "REL_JMP"],
        ["22b", "23b", "REL_JMP"], ["23b", "30b", "REL_CALL"], ["30b", "24b", "RET_NEAR"],
}

case! {
    name: "buffer_over_code", cpl: [0, 3], rules: ["DS-05", "BTS-01"], needs: [],
    about: "a record that is stored over an instruction changes what is executed next",
    fn body(ctx) {
        need_bts!(ctx);
        let sequence = overwritten();
        let records = sequence.records();
        check_eq!(records[3].from & 0xff, 0xc3, "low byte of the branch's address");
        let function = records[0].to;
        // The record of that branch is the fifth, with the branch into the sequence: put it over the function.
        let base = function - 4 * RECORD_BYTES;
        PAGES.arm(10);
        let area = PAGES.area();
        PAGES.set_area(DsArea { base, index: base, maximum: base + 8 * RECORD_BYTES, ..area });
        let mark = (seq::UNMAPPED - 128) as *mut u32;
        // SAFETY: the page below the unmapped address is RAM that nothing else uses.
        unsafe { mark.write_volatile(99) };
        require!(run_sequence(ctx.cpl, sequence, TR | BTS).is_some(), "no unhandled exception");
        // SAFETY: as above.
        check_eq!(unsafe { mark.read_volatile() }, 1, "count of calls before the record");
        // SAFETY: code is readable, and the function has the length of a record at least.
        let found = unsafe { (function as *const [u64; 3]).read_volatile() };
        check_eq!(found, [records[3].from, records[3].to, 0], "record over the function");
    }
}
