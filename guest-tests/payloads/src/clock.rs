//! Time: the frequency of the TSC by CPUID, the ACPI PM timer, and waits with a limit.

use hindsight_guest::regs::cpuid::LEAF_TSC;
use hindsight_guest::{insn, port};

/// Port of the ACPI PM timer, on Hindsight's machine and on QEMU's.
pub const PM_TIMER: u16 = 0x608;
/// Frequency of the PM timer in Hz.
pub const PM_HZ: u64 = 3_579_545;
/// A frequency above that of every TSC, for limits if CPUID does not report the frequency.
const TSC_HZ_MAX: u64 = 6_000_000_000;

/// The frequency of the TSC in Hz by CPUID leaf 15H, or `None` if CPUID does not report it.
pub fn tsc_hz() -> Option<u64> {
    let leaf = insn::cpuid(LEAF_TSC, 0);
    if insn::cpuid(0, 0).eax < LEAF_TSC || leaf.eax == 0 || leaf.ebx == 0 || leaf.ecx == 0 {
        return None;
    }
    Some(u64::from(leaf.ecx) * u64::from(leaf.ebx) / u64::from(leaf.eax))
}

/// The frequency of the crystal in Hz, or `None` if CPUID does not report it.
pub fn crystal_hz() -> Option<u64> {
    let hz = insn::cpuid(LEAF_TSC, 0).ecx;
    (insn::cpuid(0, 0).eax >= LEAF_TSC && hz != 0).then_some(u64::from(hz))
}

/// TSC ticks of at least `ms` milliseconds.
pub fn ticks(ms: u64) -> u64 {
    tsc_hz().unwrap_or(TSC_HZ_MAX) / 1000 * ms
}

/// Waits until `condition` holds; returns false if it does not within about `ms` milliseconds.
pub fn wait_until(ms: u64, condition: impl Fn() -> bool) -> bool {
    let limit = ticks(ms);
    let start = insn::rdtsc();
    while !condition() {
        if insn::rdtsc().wrapping_sub(start) > limit {
            return condition();
        }
        insn::pause();
    }
    true
}

/// Waits about `ms` milliseconds.
pub fn wait(ms: u64) {
    wait_until(ms, || false);
}

/// The PM timer, which has 24 bits.
pub fn pm_timer() -> u64 {
    u64::from(port::inl(PM_TIMER) & 0xff_ffff)
}

/// The frequency of `counter` in Hz, measured over `ms` milliseconds (at most 4000) of the PM timer.
pub fn rate_by_pm_timer(ms: u64, counter: impl Fn() -> u64) -> u64 {
    let length = PM_HZ * ms / 1000;
    let edge = pm_timer();
    let mut start = pm_timer();
    while start == edge {
        start = pm_timer();
    }
    let first = counter();
    loop {
        let elapsed = pm_timer().wrapping_sub(start) & 0xff_ffff;
        if elapsed >= length {
            let ticks = u128::from(counter().wrapping_sub(first));
            let rate = ticks * u128::from(PM_HZ) / u128::from(elapsed);
            return u64::try_from(rate).unwrap_or(u64::MAX);
        }
    }
}
