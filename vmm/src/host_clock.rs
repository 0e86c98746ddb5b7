//! The host's time-stamp counter: what the machine's clock runs on.

use std::time::{Duration, Instant};

/// Reads the host's TSC.
pub fn read_tsc() -> u64 {
    // SAFETY note: RDTSC has no effect but its result; the intrinsic is safe where `sse2` exists.
    rdtsc()
}

#[expect(unsafe_code, reason = "the RDTSC intrinsic")]
fn rdtsc() -> u64 {
    // SAFETY: every x86-64 processor has RDTSC, and Linux leaves CR4.TSD clear.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Its frequency in Hz: what KVM says, or a measurement against the host's monotonic clock.
pub fn tsc_hz(kvm_khz: Option<u32>) -> u64 {
    match kvm_khz {
        Some(khz) => u64::from(khz) * 1000,
        None => measure(),
    }
}

fn measure() -> u64 {
    const SPAN: Duration = Duration::from_millis(20);
    let (start, first) = (Instant::now(), read_tsc());
    std::thread::sleep(SPAN);
    let (elapsed, last) = (start.elapsed(), read_tsc());
    let ticks = u128::from(last.wrapping_sub(first)) * 1_000_000_000;
    u64::try_from(ticks / elapsed.as_nanos().max(1))
        .unwrap_or(1_000_000_000)
        .max(1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_frequency_is_plausible() {
        let hz = measure();
        assert!((100_000_000..20_000_000_000).contains(&hz), "{hz}");
    }
}
