//! The host's clocks: the time-stamp counter, on which machines run, and a thread's CPU time.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Reads the host's TSC, after all earlier loads.
///
/// Without that order, an interpreted guest that waits for another vCPU could then read an earlier time
/// than the other one read before.
#[expect(unsafe_code, reason = "the LFENCE and RDTSC intrinsics")]
pub fn read_tsc() -> u64 {
    // SAFETY: every x86-64 processor has LFENCE and RDTSC, and Linux leaves CR4.TSD clear.
    unsafe {
        core::arch::x86_64::_mm_lfence();
        core::arch::x86_64::_rdtsc()
    }
}

/// The CPU time that this thread has used, guests included.
pub fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let part = |value: i64| u64::try_from(value).unwrap_or(0);
    Duration::from_secs(part(time.tv_sec)) + Duration::from_nanos(part(time.tv_nsec))
}

/// The frequency of the TSC in Hz: KVM's value, or a measurement against the monotonic clock.
pub fn tsc_hz(kvm_khz: Option<u32>) -> u64 {
    match kvm_khz {
        Some(khz) => u64::from(khz) * 1000,
        None => measure_tsc_hz(),
    }
}

/// Reads the monotonic clock and the TSC at one moment: the least disturbed of several readings.
fn read_both_clocks() -> (Instant, u64) {
    let reading = || {
        let before = read_tsc();
        let time = Instant::now();
        let took = read_tsc().wrapping_sub(before);
        (took, time, before.wrapping_add(took / 2))
    };
    let (_, time, ticks) =
        (0..8).map(|_| reading()).fold(
            reading(),
            |best, next| {
                if next.0 < best.0 { next } else { best }
            },
        );
    (time, ticks)
}

/// How long a measurement takes; every start of a guest waits for it.
///
/// A reading is accurate to about 20 ns, so the frequency is accurate to about 20 parts in a
/// million, like a crystal.
const SPAN: Duration = Duration::from_millis(2);

fn measure_tsc_hz() -> u64 {
    let (start, first) = read_both_clocks();
    std::thread::sleep(SPAN);
    let (end, last) = read_both_clocks();
    let ticks = u128::from(last.wrapping_sub(first)) * 1_000_000_000;
    u64::try_from(ticks / (end - start).as_nanos().max(1))
        .unwrap_or(1_000_000_000)
        .max(1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_frequency_is_plausible() {
        let hz = measure_tsc_hz();
        assert!((100_000_000..20_000_000_000).contains(&hz), "{hz}");
    }

    #[test]
    fn short_measurement_agrees_with_a_long_one() {
        let (start, first) = read_both_clocks();
        std::thread::sleep(Duration::from_millis(100));
        let (end, last) = read_both_clocks();
        let long = (last - first) as f64 / (end - start).as_secs_f64();
        // The best of several, because other programs load the host.
        let errors = (0..5).map(|_| (measure_tsc_hz() as f64 / long - 1.0).abs());
        let error = errors.fold(f64::MAX, f64::min);
        assert!(error < 1e-3, "off by {error}");
    }
}
