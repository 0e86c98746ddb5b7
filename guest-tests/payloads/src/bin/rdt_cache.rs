//! What resource monitoring and allocation mean: occupancy and traffic of a program that streams
//! through memory, and the masks that keep it in its ways.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use hindsight_guest::exception::TrapFrame;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ApicRegister, LVT_TIMER_DEADLINE};
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::rdt::{self, Association, QmEventSelect, counter, event};
use hindsight_guest::trap;
use hindsight_guest::{apic, insn, msr, report, smp};
use hindsight_payloads::pmu;

payload!("rdt_cache");

/// Start of memory that no other code uses. The streams use up to 12 MiB of it.
const STREAM_BASE: usize = 32 << 20;
const BYTES: usize = 6 << 20;
/// Occupancy of one way of the L3 in units, with one unit added for rounding.
const WAY: u64 = 352 / 11 + 1;

/// Units of [`BYTES`].
const UNITS: u64 = BYTES as u64 / rdt::UPSCALE as u64;
/// Bytes, lines and units of a short stream.
const SHORT: usize = 2 << 20;
const LINES: u64 = SHORT as u64 / 64;
const SHORT_UNITS: u64 = SHORT as u64 / rdt::UPSCALE as u64;

/// Reads one byte of each line.
fn read_lines(start: usize, bytes: usize) {
    for at in (start..start + bytes).step_by(64) {
        // SAFETY: RAM that is mapped one to one and that nothing else uses.
        unsafe { (at as *const u8).read_volatile() };
    }
}

/// Reads [`SHORT`] bytes at one of several places.
fn stream_at(index: usize) {
    read_lines(STREAM_BASE + index * SHORT, SHORT);
}

fn stream() {
    read_lines(STREAM_BASE, BYTES);
}

fn monitor(event: u8, rmid: u32) -> u64 {
    msr::write(reg::IA32_QM_EVTSEL, QmEventSelect::new(event, rmid).0);
    msr::read(reg::IA32_QM_CTR)
}

fn associate(rmid: u32, cos: u32) {
    msr::write(reg::IA32_PQR_ASSOC, Association::new(rmid, cos).0);
}

macro_rules! need_rdt {
    ($ctx:ident) => {
        if !insn::has(Feature::RDT_M) || !insn::has(Feature::RDT_A) {
            skip!($ctx, "no resource monitoring and allocation");
        }
    };
}

case! {
    name: "cold", cpl: [0], rules: ["CMT-05", "CMT-12", "CAT-12"], needs: ["msr-exit"],
    about: "before any association the counters say Unavailable",
    fn body(ctx) {
        need_rdt!(ctx);
        for event in [event::OCCUPANCY, event::TOTAL, event::LOCAL] {
            check_eq!(monitor(event, 1), counter::UNAVAILABLE, "the counter");
        }
    }
}

case! {
    name: "streaming", cpl: [0],
    rules: ["CMT-07", "CMT-08", "CMT-11", "CMT-14", "MBM-02", "MBM-04", "MBM-05", "MBM-06", "RDT-03"],
    needs: ["msr-exit"], timeout_ms: 60000,
    about: "lines and traffic are charged to the RMID of the time, and stay its own",
    fn body(ctx) {
        need_rdt!(ctx);
        associate(5, 0);
        stream();
        associate(6, 0);
        let held = monitor(event::OCCUPANCY, 5);
        check!((UNITS..=UNITS + 8).contains(&held), "what was read is held");
        let (total, local) = (monitor(event::TOTAL, 5), monitor(event::LOCAL, 5));
        check!((UNITS..=UNITS + 8).contains(&total), "what was read came from memory");
        check!(local <= total, "local traffic is part of it");
        check_eq!(monitor(event::OCCUPANCY, 7), 0, "an RMID that was never associated");
        stream();
        check!(monitor(event::OCCUPANCY, 5) + 4 >= UNITS, "hits leave lines with who filled them");
        check!(monitor(event::OCCUPANCY, 6) <= 4, "and give nothing to who hits");
        check_eq!(monitor(event::TOTAL, 5), total, "nothing more is charged to the first");
        associate(0, 0);
    }
}

case! {
    name: "masked", cpl: [0], rules: ["CAT-10", "CAT-13", "CMT-08", "CMT-13"], needs: ["msr-exit"], timeout_ms: 60000,
    about: "a class with one way fills no more than that",
    fn body(ctx) {
        need_rdt!(ctx);
        msr::write(reg::IA32_L3_QOS_MASK_0 + 3, 1 << 4);
        associate(9, 3);
        stream();
        let held = monitor(event::OCCUPANCY, 9);
        check!(held <= WAY, "no more than one way");
        check!(held >= WAY / 2, "and most of that");
        associate(0, 0);
        msr::write(reg::IA32_L3_QOS_MASK_0 + 3, 0x7ff);
        check_eq!(monitor(event::OCCUPANCY, 9), counter::UNAVAILABLE, "all set back: nobody keeps it");
    }
}

case! {
    name: "code_and_data_masks", cpl: [0], rules: ["CDP-03"], needs: ["msr-exit"], timeout_ms: 60000,
    about: "with CDP the even mask of the pair keeps data, and the odd one does not",
    fn body(ctx) {
        need_rdt!(ctx);
        msr::write(reg::IA32_L3_QOS_CFG, rdt::CDP_ENABLE);
        msr::write(reg::IA32_L3_QOS_MASK_0 + 4, 1);
        associate(10, 2);
        stream();
        check!(monitor(event::OCCUPANCY, 10) <= WAY + 4, "data in its one way");
        msr::write(reg::IA32_L3_QOS_MASK_0 + 4, 0x7ff);
        msr::write(reg::IA32_L3_QOS_MASK_0 + 5, 1);
        associate(11, 2);
        read_lines(STREAM_BASE + BYTES, BYTES);
        check!(monitor(event::OCCUPANCY, 11) > 2 * WAY, "the mask for code does not keep data");
        associate(0, 0);
        msr::write(reg::IA32_L3_QOS_MASK_0 + 5, 0x7ff);
        msr::write(reg::IA32_L3_QOS_CFG, 0);
    }
}

case! {
    name: "cumulative", cpl: [0], rules: ["MBM-01", "MBM-03", "MBM-05"], needs: ["msr-exit"], timeout_ms: 60000,
    about: "traffic adds up in counters of 24 bits, which one second cannot wrap twice",
    fn body(ctx) {
        need_rdt!(ctx);
        check_eq!(insn::cpuid(0xf, 1).eax & 0xff, 0, "the width is 24 bits");
        associate(15, 0);
        let mut before = 0;
        for index in 0..2 {
            let start = insn::rdtsc();
            stream_at(index);
            let ticks = insn::rdtsc() - start;
            let total = monitor(event::TOTAL, 15);
            check!(total < 1 << 24, "the counter is one of 24 bits");
            let moved = total - before;
            check!((SHORT_UNITS - 1..=SHORT_UNITS + 8).contains(&moved), "what came from memory is added");
            let a_second = u128::from(insn::cpuid(0x16, 0).eax) * 1_000_000;
            check!(u128::from(moved) * a_second / u128::from(ticks) < 1 << 24, "what comes in a second");
            before = total;
        }
        associate(0, 0);
    }
}

case! {
    name: "counters_beside", cpl: [0], rules: ["RDT-12"], needs: ["msr-exit"], timeout_ms: 60000,
    about: "performance counters count the same misses, and monitoring requests no interrupt",
    fn body(ctx) {
        need_rdt!(ctx);
        if !pmu::present() {
            skip!(ctx, "no performance counters");
        }
        pmu::reset();
        pmu::select(0, 0x2e, 0x41, pmu::ON);
        associate(16, 0);
        pmu::start(1);
        stream_at(0);
        pmu::stop();
        let (held, missed) = (monitor(event::OCCUPANCY, 16), pmu::get(0));
        associate(0, 0);
        check!((LINES..LINES + 1000).contains(&missed), "the counter of misses");
        check!((SHORT_UNITS..=SHORT_UNITS + 8).contains(&held), "the occupancy");
        check_eq!(pmu::status(), 0, "no overflow");
        pmu::reset();
    }
}

/// Computes with loads and stores: fills a small table, and returns its checksum.
fn checksum() -> u64 {
    let mut table = [0_u64; 64];
    for (n, entry) in (1..).zip(&mut table) {
        *entry = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(n);
    }
    table.iter().fold(0, |sum, &entry| {
        core::hint::black_box(sum ^ entry).rotate_left(7)
    })
}

case! {
    name: "results", cpl: [0], rules: ["RDT-09"], needs: ["msr-exit"], timeout_ms: 60000,
    about: "neither an RMID nor a class changes what instructions compute",
    fn body(ctx) {
        need_rdt!(ctx);
        let expected = checksum();
        for (cos, mask, delay) in [(1, 1, 0), (2, 0x700, 90), (3, 0x3c, 50)] {
            msr::write(reg::IA32_L3_QOS_MASK_0 + cos, mask);
            msr::write(reg::IA32_L2_QOS_EXT_BW_THRTL_0 + cos, delay);
            associate(20 + cos, cos);
            check_eq!(checksum(), expected, "the result");
            associate(0, 0);
            msr::write(reg::IA32_L3_QOS_MASK_0 + cos, 0x7ff);
            msr::write(reg::IA32_L2_QOS_EXT_BW_THRTL_0 + cos, 0);
        }
    }
}

static READY: AtomicBool = AtomicBool::new(false);
static GO: AtomicBool = AtomicBool::new(false);

/// Spins, without HLT or WRMSR, until the other processor requests a stream; then streams.
fn stream_on_request(_index: usize) {
    READY.store(true, Ordering::SeqCst);
    while !GO.load(Ordering::SeqCst) {
        core::hint::spin_loop();
    }
    stream_at(1);
}

case! {
    name: "other_processor", cpl: [0], rules: ["RDT-04", "RDT-10", "CMT-11"], needs: ["msr-exit"], vcpus: 2,
    timeout_ms: 60000,
    about: "use that one processor begins is in effect on the others; they may share an RMID",
    fn body(ctx) {
        need_rdt!(ctx);
        require!(smp::start(2), "the second CPU started");
        smp::run(1, stream_on_request);
        while !READY.load(Ordering::SeqCst) {
            core::hint::spin_loop();
        }
        associate(12, 0);
        GO.store(true, Ordering::SeqCst);
        smp::wait(1);
        // It never wrote an MSR of these: what it reads is RMID 0's.
        check!(monitor(event::OCCUPANCY, 0) + 8 >= SHORT_UNITS, "what the other processor read is held");
        check!(monitor(event::TOTAL, 0) + 8 >= SHORT_UNITS, "and came from memory");
        stream_at(0);
        let alone = monitor(event::OCCUPANCY, 12);
        check!(alone + 4 >= SHORT_UNITS && alone <= SHORT_UNITS + 8, "what the first one read");
        smp::run(1, |_| {
            associate(12, 0);
            stream_at(2);
            associate(0, 0);
        });
        smp::wait(1);
        let both = monitor(event::OCCUPANCY, 12);
        check!(both + 8 >= 2 * SHORT_UNITS && both <= 2 * SHORT_UNITS + 16, "what both read under one RMID");
        associate(0, 0);
    }
}

/// Lines that [`pass`] reads.
const PASS: usize = 1024;

/// Returns the TSC ticks for reading [`PASS`] lines from memory in class of service `cos`.
fn pass(cos: u32) -> u64 {
    associate(0, cos);
    insn::wbinvd();
    let start = insn::rdtsc();
    read_lines(STREAM_BASE, 64 * PASS);
    let ticks = insn::rdtsc() - start;
    associate(0, 0);
    ticks
}

case! {
    name: "delays", cpl: [0], rules: ["MBA-05", "MBA-06", "MBA-07", "MBA-08", "OP-21"], needs: ["msr-exit", "guestbp-io"],
    cpu: "portable-v1", clock: "virtual", timeout_ms: 60000,
    about: "on a virtual clock, the higher the delay value, the longer the same traffic takes",
    fn body(ctx) {
        need_rdt!(ctx);
        let delay = |cos: u32, value| msr::write(reg::IA32_L2_QOS_EXT_BW_THRTL_0 + cos, value);
        delay(1, 90);
        let free = pass(2);
        let mut before = free;
        for value in [10, 20, 50, 90] {
            delay(2, value);
            let ticks = pass(2);
            check!(ticks > before, "a higher value takes longer");
            before = ticks;
        }
        check!(before >= free + PASS as u64 * 9 * 200, "nine times as long at 90 and a miss of at least 200");
        for (value, acts_as) in [(9, 0), (12, 10), (19, 10), (89, 80)] {
            delay(2, value);
            let ticks = pass(2);
            check_eq!(msr::read(reg::IA32_L2_QOS_EXT_BW_THRTL_0 + 2), value, "the value as written");
            delay(2, acts_as);
            check_eq!(ticks, pass(2), "rounded down");
        }
        delay(2, 0);
        for cos in 0..rdt::MBA_COS {
            delay(cos, 90);
        }
        check_eq!(pass(8), free, "a class without a register");
        check_eq!(pass(15), free, "the last class");
        for cos in 0..rdt::MBA_COS {
            delay(cos, 0);
        }
    }
}

/// Vector of the timer.
const VECTOR: u8 = 0x63;
/// TSC when the timer's interrupt was taken.
static TAKEN_AT: AtomicU64 = AtomicU64::new(0);

fn take(_: &mut TrapFrame) {
    TAKEN_AT.store(insn::rdtsc(), Ordering::SeqCst);
    apic::eoi();
}

case! {
    name: "timer_under_delay", cpl: [0], rules: [], needs: ["msr-exit", "guestbp-io"],
    cpu: "portable-v1", clock: "virtual", timeout_ms: 60000,
    about: "a timer is not late because requests are held back",
    fn body(ctx) {
        need_rdt!(ctx);
        msr::write(reg::IA32_L2_QOS_EXT_BW_THRTL_0 + 1, 90);
        let whole = pass(1);
        trap::set_handler(VECTOR, take);
        apic::enable();
        apic::write(ApicRegister::LVT_TIMER, LVT_TIMER_DEADLINE | u32::from(VECTOR));
        let deadline = insn::rdtsc() + whole / 2;
        msr::write(reg::IA32_TSC_DEADLINE, deadline);
        insn::sti();
        pass(1);
        insn::cli();
        apic::disable();
        msr::write(reg::IA32_L2_QOS_EXT_BW_THRTL_0 + 1, 0);
        let taken = TAKEN_AT.load(Ordering::SeqCst);
        // Delivery and handler miss some lines too, each of them held back.
        check!(taken >= deadline && taken < deadline + whole / 20, "when the interrupt is taken");
    }
}

/// Sets of the L3.
const SETS: usize = 36864;
/// Lines of the resident program: two in every second set, and one in each other set.
const RESIDENT: usize = SETS * 3 / 2;
/// Lines of the streaming program: three in each set, which fill all of its ways.
const STREAMING: usize = SETS * 3;
/// Maximum number of misses by other accesses: to code, and by the setup of the counters.
const FEW: u64 = 100;

/// Returns the misses of the resident program after the streaming program has run.
///
/// `resident` and `streaming` are the L3 masks of the programs.
fn misses_beside(resident: u64, streaming: u64) -> u64 {
    msr::write(reg::IA32_L3_QOS_MASK_0 + 1, resident);
    msr::write(reg::IA32_L3_QOS_MASK_0 + 2, streaming);
    insn::wbinvd();
    let reside = || read_lines(STREAM_BASE, 64 * RESIDENT);
    associate(1, 1);
    reside();
    associate(2, 2);
    read_lines(STREAM_BASE + 64 * RESIDENT, 64 * STREAMING);
    associate(1, 1);
    pmu::set(0, 0);
    pmu::start(1);
    reside();
    pmu::stop();
    associate(0, 0);
    pmu::get(0)
}

case! {
    name: "partition", cpl: [0], rules: ["CAT-10", "CAT-07", "CAT-13"], needs: ["msr-exit"], timeout_ms: 120000,
    about: "beside a streaming program, a resident one misses as often as its masks say",
    fn body(ctx) {
        need_rdt!(ctx);
        if !pmu::present() {
            skip!(ctx, "no performance counters");
        }
        pmu::reset();
        pmu::select(0, 0x2e, 0x41, pmu::ON);
        let lines = RESIDENT as u64;
        let shared = misses_beside(0b111, 0b111);
        check!((lines..lines + FEW).contains(&shared), "in ways that both fill: all lines are gone");
        let one_way = misses_beside(0b100, 0b011);
        // Two lines that need the same way evict each other.
        check!((SETS as u64..SETS as u64 + FEW).contains(&one_way), "in one way of its own: the lines of the full sets");
        let two_ways = misses_beside(0b110, 0b001);
        check!(two_ways < FEW, "in two ways of its own: none");
        for (key, misses) in [("shared", shared), ("one_way", one_way), ("two_ways", two_ways)] {
            report::measurement(key, misses);
        }
        pmu::reset();
        msr::write(reg::IA32_L3_QOS_MASK_0 + 1, 0x7ff);
        msr::write(reg::IA32_L3_QOS_MASK_0 + 2, 0x7ff);
    }
}
