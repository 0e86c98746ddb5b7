//! The time-stamp counter, IA32_TSC_ADJUST, RDTSCP and IA32_TSC_AUX, on one processor.

#![no_std]
#![no_main]

use core::arch::asm;

use hindsight_guest::insn::{self, rdtsc};
use hindsight_guest::msr::{self, GP, MsrFault};
use hindsight_guest::prelude::*;
use hindsight_guest::regs::cpuid::Feature;
use hindsight_guest::regs::cr::Cr4;
use hindsight_guest::regs::msr::{IA32_TIME_STAMP_COUNTER, IA32_TSC_ADJUST, IA32_TSC_AUX};
use hindsight_payloads::clock;

payload!("tsc");

/// A step that no case takes long enough to make by itself.
const FAR: u64 = 1 << 44;

/// The counter that runs on whatever is written: TSC less TSC_ADJUST (rule ADJ-05).
fn undisturbed() -> u64 {
    rdtsc().wrapping_sub(msr::read(IA32_TSC_ADJUST))
}

/// Checks that no more than a few seconds passed since `before` on the undisturbed counter.
fn check_undisturbed(before: u64) {
    let elapsed = undisturbed().wrapping_sub(before);
    check!(
        elapsed < clock::ticks(5000),
        "TSC - TSC_ADJUST goes on undisturbed"
    );
}

/// Puts TSC_ADJUST back, and with it the TSC.
fn restore(adjust: u64) {
    msr::write(IA32_TSC_ADJUST, adjust);
}

case! {
    name: "announced", cpl: [0], rules: ["TSC-01", "TSC-07"], needs: [],
    about: "CPUID announces the TSC, and that it is invariant",
    fn body(ctx) {
        check!(insn::has(Feature::TSC), "CPUID.1:EDX[4]");
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG does not announce an invariant TSC");
        }
        check!(insn::has(Feature::INVARIANT_TSC), "CPUID.80000007H:EDX[8]");
    }
}

case! {
    name: "monotonic", cpl: [0, 3], rules: ["TSC-02", "TSC-05"], needs: [], needs_cpl3: ["iretq-cpl3"],
    about: "successive RDTSCs never go backwards",
    fn body(ctx) {
        let mut backwards = 0;
        let fault = ctx.run(|| {
            let mut last = rdtsc();
            for _ in 0..200 {
                let now = rdtsc();
                if now < last {
                    backwards += 1;
                }
                last = now;
            }
        });
        check!(fault.is_none(), "RDTSC raises nothing");
        check_eq!(backwards, 0, "steps backwards");
    }
}

case! {
    name: "registers", cpl: [0, 3], rules: ["TSC-03"], needs: [], needs_cpl3: ["iretq-cpl3"],
    about: "RDTSC clears bits 63:32 of RAX and RDX",
    fn body(ctx) {
        let mut upper = u64::MAX;
        let fault = ctx.run(|| {
            let (low, high): (u64, u64);
            // SAFETY: registers only.
            unsafe {
                asm!("rdtsc", inout("rax") u64::MAX => low, inout("rdx") u64::MAX => high,
                    options(nomem, nostack));
            }
            upper = (low | high) >> 32;
        });
        check!(fault.is_none(), "RDTSC raises nothing");
        check_eq!(upper, 0, "bits 63:32");
    }
}

case! {
    name: "since_reset", cpl: [0], rules: ["TSC-02"], needs: ["tsc-offset"],
    about: "the TSC was 0 at reset: it shows less than a minute",
    fn body(_ctx) {
        check!(rdtsc() < clock::ticks(60_000), "the TSC is young");
    }
}

case! {
    name: "lfence_orders", cpl: [0, 3], rules: ["TSC-06"], needs: [], needs_cpl3: ["iretq-cpl3"],
    about: "LFENCE; RDTSC reads after an earlier RDTSC",
    fn body(ctx) {
        let (mut first, mut second) = (1, 0);
        let fault = ctx.run(|| {
            first = rdtsc();
            insn::lfence();
            second = rdtsc();
        });
        check!(fault.is_none(), "no exception");
        check!(second >= first, "in order");
    }
}

case! {
    name: "disabled_for_users", cpl: [0, 3], rules: ["TSC-04", "TSC-13"], needs: [],
    needs_cpl3: ["tsd-cpl3", "iretq-cpl3"],
    about: "with CR4.TSD set, RDTSC raises #GP(0) at CPL 3 only, and RDMSR is not affected",
    fn body(ctx) {
        let cr4 = insn::read_cr4();
        insn::write_cr4(cr4 | Cr4::TSD.bits());
        let fault = ctx.run(|| { rdtsc(); });
        let by_msr = msr::read_safe(IA32_TIME_STAMP_COUNTER);
        insn::write_cr4(cr4);
        let expected: Option<MsrFault> = (ctx.cpl == 3).then_some(GP);
        check_eq!(fault.map(|e| e.code()), expected, "RDTSC with TSD");
        check!(by_msr.is_ok(), "RDMSR with TSD");
        let fault = ctx.run(|| { rdtsc(); });
        check!(fault.is_none(), "RDTSC without TSD");
    }
}

case! {
    name: "rdtscp_disabled_for_users", cpl: [3], rules: ["TSC-04"], needs: ["tsd-cpl3", "iretq-cpl3"],
    about: "with CR4.TSD set, RDTSCP at CPL 3 raises #GP(0)",
    fn body(ctx) {
        need_feature!(ctx, RDTSCP);
        let cr4 = insn::read_cr4();
        insn::write_cr4(cr4 | Cr4::TSD.bits());
        let fault = ctx.run(|| { insn::rdtscp(); });
        insn::write_cr4(cr4);
        check_eq!(fault.map(|e| e.code()), Some(GP), "RDTSCP with TSD");
    }
}

case! {
    name: "by_msr", cpl: [0], rules: ["TSC-10"], needs: ["msr-exit", "tsc-offset"],
    about: "RDMSR 10H reads the counter that RDTSC reads",
    fn body(ctx) {
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG reads the last value written");
        }
        let before = rdtsc();
        let by_msr = msr::read(IA32_TIME_STAMP_COUNTER);
        let after = rdtsc();
        check!(before <= by_msr && by_msr <= after, "RDMSR lies between two RDTSCs");
    }
}

case! {
    name: "write_all_bits", cpl: [0], rules: ["TSC-09", "MSR-01"], needs: ["msr-exit", "tsc-offset"],
    about: "WRMSR 10H sets all 64 bits, for RDTSC and RDMSR",
    fn body(ctx) {
        need_feature!(ctx, TSC_ADJUST);
        let adjust = msr::read(IA32_TSC_ADJUST);
        for value in [0xa5a5_5a5a_0000_0000_u64, 0, 0x5a5a_a5a5_0000_0000] {
            msr::write(IA32_TIME_STAMP_COUNTER, value);
            let (now, by_msr) = (rdtsc(), msr::read(IA32_TIME_STAMP_COUNTER));
            check!(now.wrapping_sub(value) < clock::ticks(2000), "RDTSC goes on from the value");
            check!(by_msr.wrapping_sub(value) < clock::ticks(2000), "RDMSR goes on from the value");
        }
        restore(adjust);
    }
}

case! {
    name: "wraps", cpl: [0], rules: ["TSC-16"], needs: ["msr-exit", "tsc-offset"],
    about: "above 2^63 the TSC counts on, and wraps to 0",
    fn body(ctx) {
        need_feature!(ctx, TSC_ADJUST);
        let adjust = msr::read(IA32_TSC_ADJUST);
        msr::write(IA32_TIME_STAMP_COUNTER, 1 << 63);
        check!(rdtsc() >= 1 << 63, "counts above 2^63");
        msr::write(IA32_TIME_STAMP_COUNTER, 0_u64.wrapping_sub(clock::ticks(1)));
        clock::wait(3);
        check!(rdtsc() < clock::ticks(5000), "has wrapped");
        restore(adjust);
    }
}

case! {
    name: "adjust_reset", cpl: [0], rules: ["ADJ-01"], needs: ["msr-exit"],
    about: "CPUID announces IA32_TSC_ADJUST, which is 0",
    fn body(ctx) {
        need_feature!(ctx, TSC_ADJUST);
        check_eq!(msr::read_safe(IA32_TSC_ADJUST), Ok::<u64, MsrFault>(0), "the value after reset");
    }
}

case! {
    name: "adjust_follows_tsc", cpl: [0], rules: ["ADJ-02", "ADJ-05", "ADJ-09"],
    needs: ["msr-exit", "tsc-offset"],
    about: "a write to the TSC that moves it by X moves IA32_TSC_ADJUST by X",
    fn body(ctx) {
        need_feature!(ctx, TSC_ADJUST);
        let adjust = msr::read(IA32_TSC_ADJUST);
        let before = undisturbed();
        let old = rdtsc();
        msr::write(IA32_TIME_STAMP_COUNTER, old.wrapping_add(FAR));
        let moved = msr::read(IA32_TSC_ADJUST).wrapping_sub(adjust);
        // The TSC ran on from `old` until the write, and by so much less it was moved.
        check!(moved <= FAR && moved > FAR - clock::ticks(2000), "ADJUST moved by X, less the time since");
        check_undisturbed(before);
        restore(adjust);
        check_undisturbed(before);
    }
}

case! {
    name: "adjust_moves_tsc", cpl: [0], rules: ["ADJ-03", "ADJ-05"], needs: ["msr-exit", "tsc-offset"],
    about: "a write to IA32_TSC_ADJUST that moves it by X moves the TSC by X",
    fn body(ctx) {
        need_feature!(ctx, TSC_ADJUST);
        let adjust = msr::read(IA32_TSC_ADJUST);
        let before = undisturbed();
        let old = rdtsc();
        msr::write(IA32_TSC_ADJUST, adjust.wrapping_add(FAR));
        let moved = rdtsc().wrapping_sub(old);
        check!(moved >= FAR && moved < FAR + clock::ticks(2000), "the TSC moved by X, and the time since");
        check_eq!(msr::read(IA32_TSC_ADJUST), adjust.wrapping_add(FAR), "ADJUST reads back");
        check_undisturbed(before);
        restore(adjust);
    }
}

case! {
    name: "adjust_negative", cpl: [0], rules: ["ADJ-07", "ADJ-05"], needs: ["msr-exit", "tsc-offset"],
    about: "all 64 bits of IA32_TSC_ADJUST can be written, also negative values",
    fn body(ctx) {
        need_feature!(ctx, TSC_ADJUST);
        let adjust = msr::read(IA32_TSC_ADJUST);
        let before = undisturbed();
        for value in [u64::MAX, 1 << 63, 0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210] {
            let (old, was) = (rdtsc(), msr::read(IA32_TSC_ADJUST));
            msr::write(IA32_TSC_ADJUST, value);
            let step = rdtsc().wrapping_sub(old).wrapping_sub(value.wrapping_sub(was));
            check_eq!(msr::read(IA32_TSC_ADJUST), value, "reads back");
            check!(step < clock::ticks(2000), "the TSC moved by the same");
        }
        check_undisturbed(before);
        restore(adjust);
    }
}

case! {
    name: "adjust_unchanged", cpl: [0], rules: ["ADJ-04", "ADJ-08"], needs: ["msr-exit"],
    about: "IA32_TSC_ADJUST does not change with time; writing its own value disturbs nothing",
    fn body(ctx) {
        need_feature!(ctx, TSC_ADJUST);
        let adjust = msr::read(IA32_TSC_ADJUST);
        clock::wait(1);
        check_eq!(msr::read(IA32_TSC_ADJUST), adjust, "after a while");
        let before = rdtsc();
        msr::write(IA32_TSC_ADJUST, adjust);
        let elapsed = rdtsc().wrapping_sub(before);
        check!(elapsed < clock::ticks(2000), "the TSC goes on");
    }
}

case! {
    name: "aux_reserved", cpl: [0], rules: ["TAX-01", "TAX-03"], needs: ["msr-exit"],
    about: "bits 63:32 of IA32_TSC_AUX are reserved",
    fn body(ctx) {
        need_feature!(ctx, RDTSCP);
        if insn::is_qemu_tcg() {
            skip!(ctx, "QEMU TCG stores all 64 bits");
        }
        msr::write(IA32_TSC_AUX, 7);
        check_eq!(msr::write_safe(IA32_TSC_AUX, 1 << 32), Err(GP), "bit 32");
        check_eq!(msr::write_safe(IA32_TSC_AUX, 1 << 63), Err(GP), "bit 63");
        check_eq!(msr::read(IA32_TSC_AUX), 7, "the value stays");
        msr::write(IA32_TSC_AUX, 0);
    }
}

case! {
    name: "rdtscp", cpl: [0, 3], rules: ["TAX-02", "TAX-04"], needs: ["tsc-aux"],
    needs_cpl0: ["rdtscp-cpl0"], needs_cpl3: ["iretq-cpl3"],
    about: "RDTSCP reads the TSC and IA32_TSC_AUX, and clears the upper halves",
    fn body(ctx) {
        need_feature!(ctx, RDTSCP);
        msr::write(IA32_TSC_AUX, 0x89ab_cdef);
        let (mut tsc, mut aux, mut upper) = (0, 0, u64::MAX);
        let before = rdtsc();
        let fault = ctx.run(|| {
            let (low, high): (u64, u64);
            // SAFETY: registers only.
            unsafe {
                asm!("rdtscp", inout("rax") u64::MAX => low, inout("rdx") u64::MAX => high,
                    inout("rcx") u64::MAX => aux, options(nomem, nostack));
            }
            upper = (low | high | aux) >> 32;
            tsc = high << 32 | low & 0xffff_ffff;
        });
        let after = rdtsc();
        msr::write(IA32_TSC_AUX, 0);
        check!(fault.is_none(), "RDTSCP raises nothing");
        check_eq!(aux, 0x89ab_cdef, "ECX");
        check_eq!(upper, 0, "bits 63:32");
        check!(before <= tsc && tsc <= after, "the counter lies between two RDTSCs");
    }
}

// KVM cannot make a host's RDPID fault: asserted on an engine of our own, for which the need stands.
case! {
    name: "rdpid_is_undefined", cpl: [0, 3], rules: ["TAX-06"], needs: ["guestbp-io"],
    needs_cpl3: ["iretq-cpl3"],
    about: "RDPID is not announced, and raises #UD",
    fn body(ctx) {
        if insn::has(Feature::RDPID) {
            skip!(ctx, "CPUID announces RDPID");
        }
        let fault = ctx.run(|| {
            // SAFETY: registers only, if it executes at all.
            unsafe { asm!("rdpid rax", out("rax") _, options(nomem, nostack)) };
        });
        check_eq!(fault.map(|e| e.code()), Some((6, 0)), "vector and error code");
    }
}
