//! The host's time-stamp counter: what the machine's clock runs on.

use std::time::{Duration, Instant};

/// Reads the host's TSC.
#[expect(unsafe_code, reason = "the RDTSC intrinsic")]
pub fn read_tsc() -> u64 {
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

/// Both clocks at one moment: of a few readings the one that was disturbed least.
fn both() -> (Instant, u64) {
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

/// Every start of a guest waits for this. A reading is good to some 20 ns, so this span makes the
/// frequency good to some 20 parts in a million, as good as a crystal.
const SPAN: Duration = Duration::from_millis(2);

fn measure() -> u64 {
    let (start, first) = both();
    std::thread::sleep(SPAN);
    let (end, last) = both();
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
        let hz = measure();
        assert!((100_000_000..20_000_000_000).contains(&hz), "{hz}");
    }

    #[test]
    fn short_measurement_agrees_with_a_long_one() {
        let (start, first) = both();
        std::thread::sleep(Duration::from_millis(100));
        let (end, last) = both();
        let long = (last - first) as f64 / (end - start).as_secs_f64();
        // The best of a few: the machine is shared.
        let worst = (0..5).map(|_| (measure() as f64 / long - 1.0).abs());
        let error = worst.fold(f64::MAX, f64::min);
        assert!(error < 1e-3, "off by {error}");
    }
}
