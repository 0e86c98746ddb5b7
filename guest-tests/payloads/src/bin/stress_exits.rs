//! Loops over one kind of exit, for measuring the exit path. `loops=N` on the command line sets
//! how often (default 1000); the cost is in a `note` line, in TSC ticks for one access.

#![no_std]
#![no_main]

use hindsight_guest::insn::rdtsc;
use hindsight_guest::prelude::*;
use hindsight_guest::regs::msr::IA32_DEBUGCTL;
use hindsight_guest::{info, msr, port, report};

payload!("stress_exits");

/// The 32-bit latch of the test device.
const LATCH: u16 = 0xe0;
/// The MMIO memory of the test device.
const MEMORY: *mut u32 = 0xff00_0000 as *mut u32;

fn measure(mut access: impl FnMut(u32)) {
    let loops: u32 = info::option("loops")
        .and_then(|n| n.parse().ok())
        .unwrap_or(1000);
    let start = rdtsc();
    for n in 0..loops {
        access(n);
    }
    let ticks = rdtsc().wrapping_sub(start);
    report::measurement("loops", u64::from(loops));
    report::measurement("ticks_each", ticks / u64::from(loops.max(1)));
}

case! {
    name: "empty", cpl: [0], rules: [], needs: [], timeout_ms: 20000,
    about: "the loop without an exit, to subtract",
    fn body(_ctx) {
        measure(|n| { core::hint::black_box(n); });
    }
}

case! {
    name: "pio_out", cpl: [0], rules: [], needs: ["io-exit"], timeout_ms: 20000,
    about: "32-bit OUT",
    fn body(_ctx) {
        measure(|n| port::outl(LATCH, n));
    }
}

case! {
    name: "pio_in", cpl: [0], rules: [], needs: ["io-exit"], timeout_ms: 20000,
    about: "32-bit IN",
    fn body(_ctx) {
        measure(|_| { port::inl(LATCH); });
    }
}

case! {
    name: "rdmsr", cpl: [0], rules: [], needs: ["msr-exit"], timeout_ms: 20000,
    about: "RDMSR of IA32_DEBUGCTL",
    fn body(_ctx) {
        measure(|_| { msr::read(IA32_DEBUGCTL); });
    }
}

case! {
    name: "wrmsr", cpl: [0], rules: [], needs: ["msr-exit"], timeout_ms: 20000,
    about: "WRMSR of 0 to IA32_DEBUGCTL",
    fn body(_ctx) {
        measure(|_| msr::write(IA32_DEBUGCTL, 0));
    }
}

case! {
    name: "mmio_write", cpl: [0], rules: [], needs: ["mmio-exit"], timeout_ms: 20000,
    about: "32-bit store to the test device's memory",
    fn body(_ctx) {
        // SAFETY: device memory.
        measure(|n| unsafe { MEMORY.write_volatile(n) });
    }
}

case! {
    name: "mmio_read", cpl: [0], rules: [], needs: ["mmio-exit"], timeout_ms: 20000,
    about: "32-bit load from the test device's memory",
    fn body(_ctx) {
        // SAFETY: device memory.
        measure(|_| { unsafe { MEMORY.read_volatile() }; });
    }
}

case! {
    name: "cpuid", cpl: [0, 3], rules: [], needs: [], needs_cpl3: ["iretq-cpl3"], timeout_ms: 20000,
    about: "CPUID, which KVM answers itself",
    fn body(ctx) {
        if ctx.cpl == 0 {
            measure(|_| { hindsight_guest::insn::cpuid(1, 0); });
        } else {
            let fault = ctx.run(|| (0..100).for_each(|_| { hindsight_guest::insn::cpuid(1, 0); }));
            check!(fault.is_none(), "CPUID raises nothing");
        }
    }
}
