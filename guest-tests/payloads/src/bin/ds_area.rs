//! The DS area as memory: page tables, faults, and what the processor writes.

#![no_std]
#![no_main]

use hindsight_guest::catch::logged;
use hindsight_guest::insn;
use hindsight_guest::msr::{self, GP};
use hindsight_guest::paging::{self, A, D, P, PAGE, RW, US};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cr::Cr0;
use hindsight_guest::regs::dr::{Condition, Dr7, Length, BreakpointIndex};
use hindsight_guest::regs::msr::IA32_DS_AREA;
use hindsight_payloads::branch::sequences as seq;
use hindsight_payloads::branch::{BTINT, BTS, TR, run_sequence};
use hindsight_payloads::ds::{self, Area, RECORD_BYTES, Store};
use hindsight_payloads::{need_bts, sequence};

payload!("ds_area");

static STORE: Store = Store::new();

/// Where the store is mapped a second time, in the upper half.
const HIGH: u64 = 0xffff_9000_0000_0000;
/// A non-canonical address.
const NOWHERE: u64 = 0x0000_8000_0000_0000;

fn run(level: u8, debugctl: u64) -> bool {
    run_sequence(level, seq::one_of_each(), debugctl).is_some()
}

/// Runs and checks that nothing was stored and nothing changed.
fn check_dropped(level: u8, area: Area, what: &'static str) -> bool {
    let mut good = true;
    for bits in [0, BTINT] {
        let before = STORE.area();
        good &= check!(run(level, TR | BTS | bits), what);
        good &= check!(STORE.area() == before, what);
        good &= check!((0..ds::BUFFER).all(|n| STORE.byte(n) == ds::FILL), what);
    }
    STORE.set_area(area);
    good
}

case! {
    name: "address_register", cpl: [0], rules: ["DS-03", "MSR-23", "RST-09"], needs: [],
    about: "IA32_DS_AREA: 0 after reset, any canonical value, #GP(0) for others",
    fn body(ctx) {
        need_feature!(ctx, DS);
        check_eq!(msr::read(IA32_DS_AREA), 0, "after reset");
        for value in [1, 0x1003, 0x7fff_ffff_ffff, 0xffff_8000_0000_0000, u64::MAX, 0xffff_9000_0000_0007] {
            check_eq!(msr::write_safe(IA32_DS_AREA, value), Ok::<(), _>(()), "a canonical value");
            check_eq!(msr::read(IA32_DS_AREA), value, "is kept");
        }
        for value in [NOWHERE, 0xffff_7fff_ffff_ffff, 1 << 63, 0x8000_0000_0000_0000 - 1] {
            check_eq!(msr::write_safe(IA32_DS_AREA, value), Err(GP), "a non-canonical value");
            check_eq!(msr::read(IA32_DS_AREA), 0xffff_9000_0000_0007, "changes nothing");
        }
        msr::write(IA32_DS_AREA, 0);
    }
}

case! {
    name: "unaligned_area", cpl: [0, 3], rules: ["DS-03", "BTS-22"], needs: [],
    about: "the management area may be at any address, also across a page",
    fn body(ctx) {
        need_bts!(ctx);
        let all = seq::one_of_each().all(ctx.cpl);
        // The area in the second page of the buffer, the records in the first.
        for offset in [1, 7, 100, 4096 - 12, 4096 - 4] {
            let area = STORE.arm(20);
            let place = STORE.buffer_address() + 2000 + offset;
            // SAFETY: inside the buffer, which nothing else uses there.
            unsafe { (place as *mut Area).write_unaligned(area) };
            msr::write(IA32_DS_AREA, place);
            require!(run(ctx.cpl, TR | BTS), "the run ended well");
            // SAFETY: as above.
            let after = unsafe { (place as *const Area).read_unaligned() };
            let index = area.base + all.items().len() as u64 * RECORD_BYTES;
            check!(after == Area { index, ..area }, "only the index has moved");
            check_eq!(STORE.record(area.base).to, all.items()[0].to, "the first record");
        }
    }
}

case! {
    name: "fields_are_read_when_used", cpl: [0, 3], rules: ["DS-09", "DS-10", "DS-15"], needs: [],
    about: "a change of base, index or maximum in memory counts for the next record",
    fn body(ctx) {
        need_bts!(ctx);
        let all = seq::jumps().all(ctx.cpl);
        let n = all.items().len() as u64;
        let first = STORE.arm(100);
        require!(run_sequence(ctx.cpl, seq::jumps(), TR | BTS).is_some(), "the run ended well");
        STORE.check_stored(&first, all.items());
        // Drained: from the base again.
        STORE.set_area(first);
        require!(run_sequence(ctx.cpl, seq::jumps(), TR | BTS).is_some(), "the run ended well");
        STORE.check_stored(&first, all.items());
        // Moved on, with room for two more.
        let moved = Area { index: first.base + 50 * RECORD_BYTES, maximum: first.base + 52 * RECORD_BYTES, ..first };
        STORE.set_area(moved);
        require!(run_sequence(ctx.cpl, seq::jumps(), TR | BTS | BTINT).is_some(), "the run ended well");
        check_eq!(STORE.area().index, moved.maximum, "the index");
        let found = STORE.record(moved.index + RECORD_BYTES);
        check_eq!((found.from, found.to), all.items()[1].pair(), "the second record there");
        check_eq!(STORE.byte(usize::try_from(52 * RECORD_BYTES).unwrap_or(0)), ds::FILL, "the byte at the maximum");
        check!(n > 2, "there were more than two");
    }
}

case! {
    name: "only_the_index_is_written", cpl: [0, 3], rules: ["DS-11"], needs: [],
    about: "of the area only the BTS index changes; the reserved bytes and PEBS fields do not",
    fn body(ctx) {
        need_bts!(ctx);
        let area = Area { pebs: [u64::MAX, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], ..STORE.arm(100) };
        STORE.set_area(area);
        require!(run(ctx.cpl, TR | BTS), "the run ended well");
        STORE.check_stored(&area, seq::one_of_each().all(ctx.cpl).items());
    }
}

/// Maps the store in the upper half with these flags for its area and its buffer, and arms it there.
fn arm_high(area_flags: u64, buffer_flags: u64) -> Area {
    let (area_page, buffer) = (STORE.area_address(), STORE.buffer_address());
    paging::map(HIGH, area_page, area_flags);
    paging::map(HIGH + PAGE, buffer, buffer_flags);
    paging::map(HIGH + 2 * PAGE, buffer + PAGE, buffer_flags);
    let area = STORE.arm(100);
    let high = HIGH + PAGE;
    let area = Area {
        base: high,
        index: high,
        maximum: high + 100 * RECORD_BYTES,
        threshold: u64::MAX,
        ..area
    };
    STORE.set_area(area);
    msr::write(IA32_DS_AREA, HIGH);
    area
}

/// Checks the records of [`arm_high`]'s buffer by its other mapping.
fn check_high(level: u8, area: &Area) {
    let all = seq::one_of_each().all(level);
    let end = area.base + all.items().len() as u64 * RECORD_BYTES;
    check_eq!(STORE.area().index, end, "the index");
    for (n, item) in (0..).zip(all.items()) {
        let found = STORE.record(STORE.buffer_address() + n * RECORD_BYTES);
        check_eq!(
            (n, (found.from, found.to)),
            (n, item.pair()),
            "a record: number, from, to"
        );
    }
}

case! {
    name: "through_the_page_tables", cpl: [0, 3], rules: ["DS-04", "DS-05"], needs: [],
    about: "area and buffers are linear addresses: mapped in the upper half, for the supervisor only",
    fn body(ctx) {
        need_bts!(ctx);
        for flags in [P | RW | A | D, P | RW | US | A | D] {
            let area = arm_high(flags, flags);
            require!(run(ctx.cpl, TR | BTS), "the run ended well");
            check_high(ctx.cpl, &area);
        }
    }
}

case! {
    name: "accessed_and_dirty", cpl: [0, 3], rules: ["DS-07"], needs: [],
    about: "the stores set A and D of the pages that they touch, and of no other",
    fn body(ctx) {
        need_bts!(ctx);
        let area = arm_high(P | RW, P | RW);
        require!(run(ctx.cpl, TR | BTS), "the run ended well");
        check_high(ctx.cpl, &area);
        // SAFETY: `entry` returns a valid place.
        let flags = |page: u64| unsafe { paging::entry(HIGH + page * PAGE).read_volatile() } & (A | D);
        check_eq!(flags(0), A | D, "the area: read, and its index written");
        check_eq!(flags(1), A | D, "the first page of the buffer");
        check_eq!(flags(2), 0, "the second page of the buffer");
    }
}

case! {
    name: "area_that_faults", cpl: [0, 3], rules: ["DS-06", "OP-17"], needs: [],
    about: "area not mapped, read-only or not canonical: records are dropped, no exception",
    fn body(ctx) {
        need_bts!(ctx);
        let good = P | RW | A | D;
        let area = arm_high(0, good);
        check_dropped(ctx.cpl, area, "the area is not mapped");
        let area = arm_high(P | A, good);
        check_dropped(ctx.cpl, area, "the area is read-only");
        // The last page below the hole in the addresses: what begins there ends in nowhere.
        let area = arm_high(good, good);
        paging::map(NOWHERE - PAGE, STORE.area_address(), good);
        for inside in [1, 8, 12, 16, 24, 31] {
            let place = STORE.area_address() + PAGE - inside;
            // SAFETY: inside the page of the area, beyond the area itself.
            unsafe {
                let bytes = STORE.area_address() as *const u8;
                core::ptr::copy_nonoverlapping(bytes, place as *mut u8, usize::try_from(inside).unwrap_or(0));
            }
            msr::write(IA32_DS_AREA, NOWHERE - inside);
            if !check_dropped(ctx.cpl, area, "the area ends beyond the canonical addresses") {
                hindsight_guest::run::note("bytes inside", inside);
            }
        }
    }
}

case! {
    name: "buffer_that_faults", cpl: [0, 3], rules: ["DS-06", "OP-17"], needs: [],
    about: "buffer not mapped, read-only or not canonical: records are dropped, the index stays",
    fn body(ctx) {
        need_bts!(ctx);
        let good = P | RW | A | D;
        let area = arm_high(good, 0);
        check_dropped(ctx.cpl, area, "the buffer is not mapped");
        let area = arm_high(good, P | A);
        check_dropped(ctx.cpl, area, "the buffer is read-only");
        for base in [NOWHERE, NOWHERE - 1, NOWHERE - 23, 1 << 63, 0xffff_7fff_ffff_fff0] {
            let area = Area { base, index: base, maximum: base + 2400, threshold: u64::MAX, ..arm_high(good, good) };
            STORE.set_area(area);
            check_dropped(ctx.cpl, area, "the buffer is not canonical");
        }
        // Round the end of the address space.
        let base = u64::MAX - 10;
        let area = Area { base, index: base, maximum: u64::MAX, threshold: u64::MAX, ..arm_high(good, good) };
        STORE.set_area(area);
        check_dropped(ctx.cpl, area, "the buffer goes round the end of the address space");
    }
}

case! {
    name: "read_only_without_write_protection", cpl: [0], rules: ["DS-06", "DS-04"], needs: [],
    about: "with CR0.WP clear a read-only page is written, as by any supervisor access",
    fn body(ctx) {
        need_bts!(ctx);
        let cr0 = insn::read_cr0();
        let area = arm_high(P | A | D, P | A | D);
        insn::write_cr0(cr0 & !Cr0::WP.bits());
        let good = run(0, TR | BTS);
        insn::write_cr0(cr0);
        require!(good, "the run ended well");
        check_high(0, &area);
    }
}

case! {
    name: "buffer_that_ends_in_a_hole", cpl: [0, 3], rules: ["DS-06"], needs: [],
    about: "a record that reaches into an unmapped page is dropped whole; those before it are kept",
    fn body(ctx) {
        need_bts!(ctx);
        let good = P | RW | A | D;
        let mut area = arm_high(good, good);
        // Room for two records and a half before the second page.
        area.base = HIGH + 2 * PAGE - 60;
        area.index = area.base;
        area.maximum = area.base + 2400;
        STORE.set_area(area);
        paging::unmap(HIGH + 2 * PAGE);
        require!(run(ctx.cpl, TR | BTS), "the run ended well");
        check_eq!(STORE.area().index - area.base, 48, "the index");
        let offset = 4096 - 60;
        check!((0..offset).all(|n| STORE.byte(n) == ds::FILL), "nothing below the base");
        check!((offset + 48..ds::BUFFER).all(|n| STORE.byte(n) == ds::FILL), "nothing of the third record");
        let all = seq::one_of_each().all(ctx.cpl);
        let second = STORE.record(STORE.buffer_address() + offset as u64 + 24);
        check_eq!((second.from, second.to), all.items()[1].pair(), "the second record");
    }
}

case! {
    name: "recovers", cpl: [0, 3], rules: ["DS-06", "DS-10"], needs: [],
    about: "after the page is mapped again the next record is stored",
    fn body(ctx) {
        need_bts!(ctx);
        let good = P | RW | A | D;
        let area = arm_high(good, 0);
        check_dropped(ctx.cpl, area, "the buffer is not mapped");
        paging::map(HIGH + PAGE, STORE.buffer_address(), good);
        require!(run(ctx.cpl, TR | BTS), "the run ended well");
        check_high(ctx.cpl, &area);
    }
}

case! {
    name: "no_data_breakpoints", cpl: [0, 3], rules: ["DS-08"], needs: [],
    about: "stores of records and of the index match no data breakpoint",
    fn body(ctx) {
        need_bts!(ctx);
        let area = STORE.arm(100);
        insn::write_dr0(area.base);
        insn::write_dr1(STORE.area_address() + 8);
        let dr7 = Dr7::RESET
            .with_breakpoint(BreakpointIndex(0), Condition::ReadWrite, Length::Eight)
            .with_breakpoint(BreakpointIndex(1), Condition::ReadWrite, Length::Eight);
        insn::write_dr7(dr7.0);
        let seen = run_sequence(ctx.cpl, seq::one_of_each(), TR | BTS);
        insn::write_dr7(Dr7::RESET.0);
        check_eq!(seen.map(|seen| seen.debugs), Some(0), "#DBs");
        STORE.check_stored(&area, seq::one_of_each().all(ctx.cpl).items());
        // The same breakpoints do match this program's own accesses.
        insn::write_dr7(dr7.0);
        let log = logged(1 << 1, || { STORE.byte(0); });
        insn::write_dr7(Dr7::RESET.0);
        check!(log.count() > 0, "a load of the payload");
    }
}

case! {
    name: "not_counted", cpl: [0, 3], rules: ["DS-08"], needs: [],
    about: "stores are no retired instructions: INST_RETIRED is the same with and without BTS",
    fn body(ctx) {
        need_bts!(ctx);
        if insn::cpuid(0xa, 0).eax & 0xff < 2 {
            skip!(ctx, "CPUID leaf 0AH announces no fixed counters");
        }
        STORE.arm(100);
        let without = retired(ctx.cpl, 0);
        check_eq!(retired(ctx.cpl, TR | BTS), without, "instructions with BTS");
    }
}

/// Instructions of a run. One function for all values, so that all execute the same ones.
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

/// Guest-physical addresses with nothing behind them.
const HOLE: u64 = 0xd000_0000;
/// The local APIC's registers.
const APIC_PAGE: u64 = 0xfee0_0000;

case! {
    name: "nothing_behind_the_address", cpl: [0, 3], rules: ["DS-06"], needs: [],
    about: "an area or a buffer where there is no memory: records are dropped",
    fn body(ctx) {
        need_bts!(ctx);
        let good = P | RW | A | D;
        let area = arm_high(good, good);
        paging::map(HIGH + PAGE, HOLE, good);
        check_dropped(ctx.cpl, area, "the buffer is nowhere");
        paging::map(HIGH, HOLE, good);
        check!(run(ctx.cpl, TR | BTS), "with the area nowhere the run ends well");
        check!(run(ctx.cpl, TR | BTS | BTINT), "and with BTINT too");
        check!((0..ds::BUFFER).all(|n| STORE.byte(n) == ds::FILL), "nothing is stored");
    }
}

case! {
    name: "device_registers", cpl: [0, 3], rules: ["DS-06"], needs: [],
    about: "an area or a buffer over the APIC's registers does no harm to the program",
    fn body(ctx) {
        need_bts!(ctx);
        let area = STORE.arm(10);
        // Registers that are reserved.
        let base = APIC_PAGE + 0x400;
        STORE.set_area(Area { base, index: base, maximum: base + 480, ..area });
        check!(run(ctx.cpl, TR | BTS), "with the buffer there the run ends well");
        msr::write(IA32_DS_AREA, base);
        check!(run(ctx.cpl, TR | BTS), "with the area there too");
        check!((0..ds::BUFFER).all(|n| STORE.byte(n) == ds::FILL), "nothing is stored elsewhere");
    }
}

sequence! {
    /// Calls a function, and calls it again after a branch at an address that ends in C3H, the opcode of
    /// RET: where its record is stored over the function, that does nothing any more. EBX counts.
    overwritten:
        "xor ebx, ebx",
        "20: call 30f",
        "21: jmp 22f",
        ".balign 256, 0x90",
        // Room for the records before.
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
        check_eq!(records[3].from & 0xff, 0xc3, "the low byte of the branch");
        let function = records[0].to;
        // The fifth record, of the branch at C3H, is to lie over the function.
        let base = function - 4 * RECORD_BYTES;
        STORE.arm(10);
        let area = STORE.area();
        STORE.set_area(Area { base, index: base, maximum: base + 8 * RECORD_BYTES, ..area });
        let mark = (seq::UNMAPPED - 128) as *mut u32;
        // SAFETY: the page below that address is in no other use.
        unsafe { mark.write_volatile(99) };
        require!(run_sequence(ctx.cpl, sequence, TR | BTS).is_some(), "the run ended well");
        // SAFETY: as above.
        check_eq!(unsafe { mark.read_volatile() }, 1, "calls that counted");
        // SAFETY: the code is readable.
        let found = unsafe { (function as *const [u64; 3]).read_volatile() };
        check_eq!(found, [records[3].from, records[3].to, 0], "what is there now");
    }
}
