//! Behaviour that the manual leaves open or to the model, and that no other payload asserts.

#![no_std]
#![no_main]

use core::sync::atomic::{AtomicU64, Ordering};

use hindsight_guest::apic;
use hindsight_guest::blob;
use hindsight_guest::catch::logged;
use hindsight_guest::insn;
use hindsight_guest::legacy::{self, BlobStart, LegacyMode};
use hindsight_guest::msr;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::apic::{ICR_ASSERT, ICR_SELF};
use hindsight_guest::regs::cr::Cr4;
use hindsight_guest::regs::dr::{Condition, Length};
use hindsight_guest::regs::msr as reg;
use hindsight_guest::regs::pmu::FixedControl;
use hindsight_guest::{smp, trap};
use hindsight_payloads::access::ScratchPage;
use hindsight_payloads::branch::sequences as seq;
use hindsight_payloads::debug::{self, DB, arm, event};
use hindsight_payloads::lbr::{self, LbrStack};
use hindsight_payloads::pmu::{self, ON};
use hindsight_payloads::{counted, need_lbr, need_pebs, need_pmu, snippet};

payload!("choices");

/// Eight elements of four bytes. As a mask, elements with the highest bit set are accessed.
#[repr(C, align(32))]
struct Mask([u32; 8]);

/// A mask, and offsets of a gather in elements, which are not in order.
static MASK_AND_OFFSETS: [Mask; 2] = [
    Mask([0, u32::MAX, 0, 1 << 31, 0, 0, u32::MAX, 0]),
    Mask([40, 3, 30, 60, 8, 9, 17, 1]),
];
static PAGE: ScratchPage = ScratchPage::new();

// RDI points to the memory, RSI to the mask.
snippet! { masked_load [] "vmovdqu ymm1, [rsi]", "vmaskmovps ymm0, ymm1, [rdi]", "vzeroupper", "ret" }
snippet! { masked_store [] "vmovdqu ymm1, [rsi]", "vpmaskmovd [rdi], ymm1, ymm0", "vzeroupper", "ret" }
snippet! { gather [] "vmovdqu ymm1, [rsi]", "vmovdqu ymm2, [rsi + 32]",
    "vpgatherdd ymm0, [rdi + ymm2 * 4], ymm1", "vzeroupper", "ret"
}

/// Enables YMM registers.
fn enable_avx() {
    insn::write_cr4(insn::read_cr4() | (Cr4::OSFXSR | Cr4::OSXSAVE).bits());
    // SAFETY: it enables x87, SSE and AVX state, which CPUID reports together with AVX.
    unsafe { core::arch::asm!("xsetbv", in("ecx") 0, in("eax") 7, in("edx") 0) };
}

/// Whether a masked access raises #DB with breakpoint 0 on `address`.
fn hits(ctx: &hindsight_guest::case::Ctx, code: debug::SnippetFn, address: u64, mask: u64) -> bool {
    arm(0, address, Condition::ReadWrite, Length::Four);
    let log = logged(DB, || {
        debug::run(ctx, code, PAGE.address(), mask);
    });
    debug::disarm();
    event(log, 0).1 != 0
}

case! {
    name: "masked_vector_accesses", cpl: [0, 3], rules: ["OP-09"], needs: ["guestbp-data", "avx-cpl0"],
    about: "masked loads, stores and gathers hit breakpoints only on the elements that they access",
    fn body(ctx) {
        need_feature!(ctx, AVX2);
        enable_avx();
        let mask = (&raw const MASK_AND_OFFSETS) as u64;
        let [masks, offsets] = &MASK_AND_OFFSETS;
        for (i, (bits, &offset)) in masks.0.iter().zip(&offsets.0).enumerate() {
            let accessed = bits >> 31 != 0;
            let in_order = PAGE.address() + 4 * i as u64;
            check_eq!(hits(ctx, masked_load, in_order, mask), accessed, "VMASKMOVPS, a load");
            check_eq!(hits(ctx, masked_store, in_order, mask), accessed, "VPMASKMOVD, a store");
            let gathered = PAGE.address() + 4 * u64::from(offset);
            check_eq!(hits(ctx, gather, gathered, mask), accessed, "VPGATHERDD");
        }
    }
}

const VECTOR: u8 = 0x63;
static WOKEN: AtomicU64 = AtomicU64::new(0);

case! {
    name: "halt_keeps_the_stack", cpl: [0], rules: ["OP-39", "LBR-32"], needs: ["hlt-exit", "interrupt"],
    about: "with LBR clear, HLT and the interrupt that ends it do not change the LBR stack",
    fn body(ctx) {
        need_lbr!(ctx);
        require!(lbr::record(0, seq::jumps()).is_some(), "no unhandled exception");
        let before = LbrStack::read();
        apic::enable();
        trap::set_handler(VECTOR, |_| {
            WOKEN.fetch_add(1, Ordering::AcqRel);
            apic::eoi();
        });
        apic::send(0, ICR_SELF | ICR_ASSERT | u32::from(VECTOR));
        insn::sti_hlt();
        insn::cli();
        apic::disable();
        check_eq!(WOKEN.load(Ordering::Acquire), 1, "count of interrupts");
        check!(LbrStack::read() == before, "LBR stack unchanged");
        lbr::check_list(&seq::jumps().all(0));
    }
}

/// MSRs of the PMU that INIT does not change, each with a value of its own.
const UNCHANGED: [(u32, u64); 6] = [
    (reg::IA32_PERFEVTSEL0, 0x0041_00c0),
    (reg::IA32_PERFEVTSEL0 + 3, 0x0042_00c4),
    (reg::IA32_A_PMC0 + 1, 0x1234_5678),
    (reg::IA32_FIXED_CTR0 + 2, 0x9abc),
    (reg::IA32_FIXED_CTR_CTRL, 0x0b0),
    (reg::IA32_PERF_GLOBAL_CTRL, 0),
];

static FOUND: [AtomicU64; UNCHANGED.len()] = [const { AtomicU64::new(0) }; UNCHANGED.len()];
static FOUND_PEBS: AtomicU64 = AtomicU64::new(0);

fn prepare(_index: usize) {
    for (index, value) in UNCHANGED {
        msr::write(index, value);
    }
    msr::write(reg::IA32_PEBS_ENABLE, 1);
}

fn report(_index: usize) {
    for ((index, _), found) in UNCHANGED.iter().zip(&FOUND) {
        found.store(msr::read(*index), Ordering::Release);
    }
    FOUND_PEBS.store(msr::read(reg::IA32_PEBS_ENABLE), Ordering::Release);
}

case! {
    name: "init_and_the_counters", cpl: [0], rules: ["PMU-04", "OP-24", "RST-09"], needs: [],
    vcpus: 2, timeout_ms: 10000,
    about: "INIT keeps the MSRs of the PMU, except IA32_PEBS_ENABLE, which it clears",
    fn body(ctx) {
        need_pmu!(ctx);
        need_pebs!(ctx);
        require!(smp::start(2), "the second CPU started");
        let run_on_second = |work| {
            smp::run(1, work);
            smp::wait(1);
        };
        run_on_second(prepare);
        run_on_second(report);
        check_eq!(FOUND_PEBS.load(Ordering::Acquire), 1, "IA32_PEBS_ENABLE before INIT");
        require!(smp::restart(1), "the second CPU started again");
        run_on_second(report);
        for ((index, value), found) in UNCHANGED.iter().zip(&FOUND) {
            check_eq!((*index, found.load(Ordering::Acquire)), (*index, *value), "MSR after INIT");
        }
        check_eq!(FOUND_PEBS.load(Ordering::Acquire), 0, "IA32_PEBS_ENABLE after INIT");
    }
}

/// Counts 50 NOPs with counter 0 and fixed counter 0.
fn count(any_thread: bool) -> (u64, u64) {
    pmu::reset();
    let (any, fixed) = if any_thread {
        (1 << 21, FixedControl::ANY_THREAD)
    } else {
        (0, 0)
    };
    pmu::select(0, 0xc0, 0, ON | any);
    msr::write(reg::IA32_FIXED_CTR_CTRL, FixedControl::OS | fixed);
    counted!(1 | 1 << 32, ".rept 50", "nop", ".endr");
    let counts = (pmu::get(0), pmu::fixed(0));
    pmu::reset();
    counts
}

case! {
    name: "any_thread", cpl: [0], rules: ["OP-20"], needs: [],
    about: "AnyThread is stored and changes no count",
    fn body(ctx) {
        need_pmu!(ctx);
        msr::write(reg::IA32_FIXED_CTR_CTRL, FixedControl::ANY_THREAD);
        check_eq!(msr::read(reg::IA32_FIXED_CTR_CTRL), FixedControl::ANY_THREAD, "AnyThread of a fixed counter");
        check_eq!(count(true), count(false), "counts with and without AnyThread");
    }
}

case! {
    name: "arch_capabilities", cpl: [0], rules: ["MSR-47"], needs: [],
    about: "CPUID reports IA32_ARCH_CAPABILITIES, which names immunities and is read-only",
    fn body(ctx) {
        need_feature!(ctx, ARCH_CAPABILITIES);
        let value = msr::read(reg::IA32_ARCH_CAPABILITIES);
        for (bit, name) in [(0, "RDCL_NO"), (5, "MDS_NO"), (8, "TAA_NO")] {
            check_eq!(value >> bit & 1, 1, name);
        }
        for wrong in [value, 0, u64::MAX] {
            check!(msr::write_safe(reg::IA32_ARCH_CAPABILITIES, wrong).is_err(), "write raises #GP(0)");
        }
        check_eq!(msr::read(reg::IA32_ARCH_CAPABILITIES), value, "value after the writes");
    }
}

blob! {
    fn code[16](v86_rdpmc, v86_end; v86_stop);
    "xorl %ecx, %ecx"
    "rdpmc"
    "v86_end: ud2"
}

const PCE: u32 = (Cr4::PCE.bits() & 0xffff_ffff) as u32;

case! {
    name: "rdpmc_in_virtual_8086_mode", cpl: [0], rules: ["RDP-05"], needs: ["exceptions", "intn-cpl0"],
    about: "virtual-8086 mode is CPL 3: RDPMC needs CR4.PCE",
    fn body(ctx) {
        need_pmu!(ctx);
        pmu::set(0, 0x1234);
        for (cr4, expected) in [(0, (13_u8, None)), (PCE, (6, Some(0x1234)))] {
            let blob = code();
            let m = legacy::machine(&blob);
            let mut start = BlobStart::at(LegacyMode::Virtual8086, v86_rdpmc);
            start.cr4 = cr4;
            m.run(&blob, &start);
            let last = m.last();
            check_eq!(last.vector, u32::from(expected.0), "vector");
            if let Some(counter) = expected.1 {
                check_eq!(last.vector_and_eip(), (6, blob.offset(v86_end)), "vector and EIP");
                check_eq!(last.registers.eax, counter, "counter");
            }
        }
        pmu::reset();
    }
}
