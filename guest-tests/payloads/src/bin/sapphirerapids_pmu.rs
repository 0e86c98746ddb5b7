//! What Sapphire Rapids' performance monitor adds: six slots, the second level of the metrics, sampled
//! stores, two latencies, and the entries of architectural LBR in PEBS records.

#![no_std]
#![no_main]

use hindsight_guest::insn::{self, cpuid};
use hindsight_guest::msr;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::branch::{LbrCtl, arch_info};
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::pmu::pebs::{self, DataConfig, groups};
use hindsight_guest::regs::pmu::{EventSelect, Metrics, global};
use hindsight_payloads::counted;
use hindsight_payloads::pmu::{self, ON, PebsArea};

payload!("sapphirerapids_pmu");

/// Family 6 model 8FH stepping 8.
const SIGNATURE: u32 = 0x806f8;
/// Slots of a core cycle.
const SLOTS: u64 = 6;
/// Fixed counters 0, 1 and 3, the metrics, and general-purpose counters 0 to 4.
const METRICS: u64 = 0xb_0000_001f | global::PERF_METRICS;
/// A value of 64 bits, whose bits are the directions of branches.
const VALUE: u64 = 0x1111_2222_3333_4444;

/// Ends the case as skipped unless it runs on Hindsight's model with its performance monitor.
macro_rules! need_sapphire_rapids {
    ($ctx:expr) => {
        if cpuid(0x4000_0000, 0).ebx != u32::from_le_bytes(*b"Hind") {
            skip!($ctx, "models are Hindsight's");
        }
        require_eq!(cpuid(1, 0).eax, SIGNATURE, "the signature");
        if !insn::has(Feature::PDCM) {
            skip!($ctx, "KVM alone has no performance monitor");
        }
        disarm();
    };
}

/// Turns everything off.
fn disarm() {
    pmu::stop();
    for index in [
        reg::IA32_PEBS_ENABLE,
        reg::MSR_PEBS_DATA_CFG,
        reg::MSR_PERF_METRICS,
        reg::MSR_OFFCORE_RSP_0,
        reg::MSR_OFFCORE_RSP_1,
        reg::IA32_FIXED_CTR_CTRL,
        reg::IA32_DS_AREA,
    ] {
        msr::write(index, 0);
    }
    for n in 0..8 {
        pmu::select(n, 0, 0, 0);
        pmu::set(n, 0);
    }
    for n in 0..4 {
        msr::write(reg::IA32_FIXED_CTR0 + n, 0);
    }
    msr::write(reg::IA32_PERF_GLOBAL_STATUS_RESET, 1 << 62 | 0xf_0000_00ff);
}

/// Prepares the counters of a program whose metrics are checked.
fn prepare_metrics() {
    disarm();
    // Mispredicted branches, loads that missed the L1, near taken branches, far branches, and the near
    // taken branches that were mispredicted.
    let events = [
        (0xc5, 0x00),
        (0xd1, 0x08),
        (0xc4, 0x20),
        (0xc4, 0x40),
        (0xc5, 0x20),
    ];
    for (counter, (event, umask)) in (0..).zip(events) {
        pmu::select(counter, event, umask, ON);
    }
    msr::write(reg::IA32_FIXED_CTR_CTRL, 0x3333);
}

/// What the metrics of the counted cycles must be, by the pipeline of rules GEN-27 and GEN-35.
fn expected_metrics() -> Metrics {
    let (instructions, cycles) = (pmu::fixed(0), pmu::fixed(1));
    let (mispredicted, missed) = (pmu::get(0), pmu::get(1));
    let (near, far, mispredicted_taken) = (pmu::get(2), pmu::get(3), pmu::get(4));
    let slots = SLOTS * cycles;
    let lost = |count: u64| (SLOTS - 1) * count;
    let fraction = |part: u64| u8::try_from(part * 255 / slots).unwrap_or(255);
    let retiring = fraction(instructions);
    let bad_speculation = fraction(lost(mispredicted));
    let backend_bound = fraction(lost(missed) + SLOTS * (cycles - instructions));
    let frontend_bound = 255 - retiring - bad_speculation - backend_bound;
    Metrics {
        retiring,
        bad_speculation,
        frontend_bound,
        backend_bound,
        heavy_operations: fraction(far).min(retiring),
        branch_mispredicts: bad_speculation,
        fetch_latency: fraction(lost(near + far - mispredicted_taken)).min(frontend_bound),
        memory_bound: fraction(lost(missed)).min(backend_bound),
    }
}

/// Checks MSR_PERF_METRICS against the counters, and returns it.
fn check_metrics() -> Metrics {
    let found = msr::read(reg::MSR_PERF_METRICS);
    check_eq!(found, expected_metrics().bits(), "the metrics");
    check_eq!(pmu::fixed(3), SLOTS * pmu::fixed(1), "the slots");
    Metrics::from_bits(found)
}

case! {
    name: "metrics", cpl: [0], rules: ["GEN-34", "GEN-35"], needs: ["msr-exit"], cpu: "sapphirerapids",
    about: "six slots in each cycle, and the second level of the metrics",
    fn body(ctx) {
        need_sapphire_rapids!(ctx);
        msr::write(reg::IA32_FIXED_CTR0 + 3, 1000);
        msr::write(reg::MSR_PERF_METRICS, 0x1122_0011_3399_0033);
        check_eq!(msr::read(reg::MSR_PERF_METRICS), 0x1122_0011_3399_0033, "what was written");
        let data = [0_u8; 256];
        let at = data.as_ptr() as u64;

        prepare_metrics();
        pmu::select(7, 0xa4, 0x01, ON);
        counted!(METRICS | 1 << 7, ".rept 96", "nop", ".endr");
        let found = check_metrics();
        check_eq!((found.fetch_latency, found.memory_bound), (0, 0), "of straight code");
        check_eq!(pmu::get(7), SLOTS * pmu::fixed(1), "slots in counter 7");

        prepare_metrics();
        counted!(METRICS, ".rept 30", "jmp 2f", "2: nop", ".endr");
        check!(check_metrics().fetch_latency > 50, "taken branches wait for a fetch");

        prepare_metrics();
        counted!(METRICS, ".rept 50", "clflush [r8]", "mov r9, [r8]", ".endr"; in("r8") at, out("r9") _,);
        check!(check_metrics().memory_bound > 90, "loads that miss wait for memory");

        prepare_metrics();
        counted!(METRICS, "mov r8, {number}", "mov r9d, 256",
            "2: imul r8, r8, 0x5851f42d", "add r8, 0x7f2d", "bt r8, 40", "jc 3f", "3: dec r9d", "jnz 2b";
            number = const VALUE, out("r8") _, out("r9") _,);
        check!(check_metrics().branch_mispredicts > 5, "mispredicted branches");

        prepare_metrics();
        counted!(METRICS, ".rept 20", "mov r8, rsp", "mov r9, ss", "push r9", "push r8", "pushfq",
            "mov r9, cs", "push r9", "lea r9, [rip + 2f]", "push r9", "iretq", "2: nop", ".endr";
            out("r8") _, out("r9") _,);
        check_eq!(pmu::get(3), 20, "far branches");
        check!(check_metrics().heavy_operations > 2, "far branches are heavy operations");
        disarm();
    }
}

/// An area for PEBS records, with a reset value that no counter reaches.
fn pebs_area() -> PebsArea {
    let reset = 1000_u64.wrapping_neg() & pmu::MAX;
    let ds = PebsArea::new(pmu::RECORDS, pmu::RECORDS, [reset; 4]);
    for offset in (pebs::RESET..pebs::RESET_FIXED + 32).step_by(8) {
        ds.put(offset, reset);
    }
    ds
}

/// Turns on a counter that records the second occurrence of its event.
fn arm(counter: u32, event: u8, umask: u8) {
    pmu::set(counter, pmu::MAX);
    pmu::select(counter, event, umask, ON | EventSelect::ADAPTIVE_RECORD);
    msr::write(reg::IA32_PEBS_ENABLE, 1 << counter);
}

case! {
    name: "store_sample", cpl: [0], rules: ["GEN-36"], needs: ["msr-exit"], cpu: "sapphirerapids",
    about: "CDH/02H samples stores in counter 0, and counts nothing in others",
    fn body(ctx) {
        need_sapphire_rapids!(ctx);
        let mut data = [0_u64; 3];
        let at = data.as_mut_ptr() as u64;
        for counter in [0, 1, 3] {
            let ds = pebs_area();
            msr::write(reg::MSR_PEBS_DATA_CFG, DataConfig::MEMORY);
            arm(counter, 0xcd, 0x02);
            counted!(1 << counter, "mov r8, [r9]", "mov [r9], r8", "mov [r9 + 8], r8", "nop";
                in("r9") at, out("r8") _,);
            let stored = ds.field(pebs::INDEX) - ds.base();
            if counter == 0 {
                check_eq!(stored, (groups::BASIC + groups::MEMORY) as u64, "bytes of the record");
                check_eq!(ds.record(0, groups::BASIC), at + 8, "the address of the store");
            } else {
                check_eq!((stored, pmu::get(counter)), (0, pmu::MAX), "another counter");
            }
            disarm();
        }
    }
}

case! {
    name: "latencies", cpl: [0], rules: ["GEN-36"], needs: ["msr-exit"], cpu: "sapphirerapids",
    about: "the memory group has the latency of the instruction and that of the cache",
    fn body(ctx) {
        need_sapphire_rapids!(ctx);
        let data = [0_u64; 32];
        let at = data.as_ptr() as u64;
        let ds = pebs_area();
        msr::write(reg::MSR_PEBS_DATA_CFG, DataConfig::MEMORY);
        msr::write(reg::MSR_PEBS_LD_LAT_THRESHOLD, 20);
        arm(5, 0xcd, 0x01);
        counted!(1 << 5, "mov r8, [r9]", "mov r8, [r9]", "clflush [r9]", "mov r8, [r9]", "mov r8, [r9]",
            "clflush [r9]", "mfence", "mov r8, [r9]", "nop"; in("r9") at, out("r8") _,);
        check_eq!(ds.field(pebs::INDEX) - ds.base(), (groups::BASIC + groups::MEMORY) as u64, "bytes of the record");
        check_eq!(ds.record(0, groups::BASIC), at, "the address");
        let latency = ds.record(0, groups::BASIC + 16);
        let (instruction, cache) = (latency & 0xffff, latency >> 32);
        check!(instruction > 20, "the load was late");
        check_eq!((cache, latency >> 16 & 0xffff), (instruction, 0), "the latency of the cache");
        msr::write(reg::MSR_PEBS_LD_LAT_THRESHOLD, 0);
        disarm();
    }
}

case! {
    name: "entries", cpl: [0], rules: ["GEN-36"], needs: ["msr-exit"], cpu: "sapphirerapids",
    about: "the LBR group has entries of architectural LBR, the newest first",
    fn body(ctx) {
        need_sapphire_rapids!(ctx);
        let ds = pebs_area();
        msr::write(reg::MSR_PEBS_DATA_CFG, DataConfig::LBRS | 8 << DataConfig::LBR_ENTRIES_SHIFT);
        msr::write(reg::IA32_LBR_DEPTH, 8);
        arm(2, 0xc0, 0x00);
        pmu::set(2, 3_u64.wrapping_neg() & pmu::MAX);
        msr::write(reg::IA32_LBR_CTL, (LbrCtl::PASS | LbrCtl::ENABLE).bits());
        let (from, to): (u64, u64);
        counted!(1 << 2, "2: jmp 3f", "nop", "3: nop", "nop", "nop", "nop",
            "lea r8, [rip + 2b]", "lea r9, [rip + 3b]"; out("r8") from, out("r9") to,);
        msr::write(reg::IA32_LBR_CTL, 0);
        check_eq!(ds.field(pebs::INDEX) - ds.base(), (groups::BASIC + 9 * 24) as u64, "bytes of the record");
        check_eq!((ds.record(0, groups::BASIC), ds.record(0, groups::BASIC + 8)), (from, to), "the newest entry");
        let kind = arch_info::CYC_CNT_VALID | arch_info::NEAR_REL_JMP << arch_info::BR_TYPE_SHIFT;
        check_eq!(ds.record(0, groups::BASIC + 16) >> 56 << 56, kind, "its INFO");
        // The stack has 8 entries.
        check_eq!(ds.record(0, groups::BASIC + 8 * 24), 0, "the ninth entry");
        msr::write(reg::IA32_LBR_DEPTH, 32);
        disarm();
    }
}

case! {
    name: "offcore", cpl: [0], rules: ["GEN-36"], needs: ["msr-exit"], cpu: "sapphirerapids",
    about: "events 2AH/01H and 2BH/01H count offcore responses; B7H/01H and BBH/01H count nothing",
    fn body(ctx) {
        need_sapphire_rapids!(ctx);
        let data = [0_u64; 32];
        let at = data.as_ptr() as u64;
        // Any response to a read of data, for the first register alone.
        msr::write(reg::MSR_OFFCORE_RSP_0, 1 << 16 | 1);
        for (counter, event) in [(0, 0x2a), (1, 0x2b), (2, 0xb7), (3, 0xbb)] {
            pmu::select(counter, event, 0x01, ON);
        }
        counted!(0xf, ".rept 10", "clflush [r9]", "mov r8, [r9]", ".endr"; in("r9") at, out("r8") _,);
        check_eq!((pmu::get(0), pmu::get(1)), (10, 0), "2AH and 2BH");
        check_eq!((pmu::get(2), pmu::get(3)), (0, 0), "B7H and BBH");
        disarm();
    }
}
