//! The timer thread: advances the interrupt controllers' timers as the machine's clock passes.

use std::time::Duration;

use crate::platform::WINDOW_POLL;
use crate::vcpu::board::Board;
use crate::vcpu::run_control::RunError;

/// The shortest sleep: a guest that programs timers of nanoseconds must not keep a host CPU busy.
/// Periods that pass during a sleep merge into one interrupt.
const SLEEP_MIN: Duration = Duration::from_micros(20);

/// Ends the machine if the timer thread panics: without timers, the guest would hang.
struct PanicGuard<'a>(&'a Board);

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("the timer thread panicked: ending the machine");
            self.0.run.finish(RunError::Panicked);
        }
    }
}

/// Fires due timers until the machine stops.
pub(super) fn thread(board: &Board) {
    let _guard = PanicGuard(board);
    let (clock, irq, bell) = (&board.time.clock, &board.buses.irq, &board.time.bell);
    while !board.run.vcpus.is_stopped() {
        irq.advance(clock.now());
        let windows = board.time.polled_windows();
        for id in (0..64).filter(|id| windows & 1 << id != 0) {
            board.run.vcpus.doorbell(id).ring();
        }
        // Nothing becomes due while the clock is paused; resuming it rings the bell.
        let next_event = irq.next_event().filter(|_| !clock.is_paused());
        let until = next_event.map(|due| {
            let ticks = due.saturating_sub(clock.now());
            Duration::from_nanos(clock.ns_from_ticks(ticks))
        });
        let poll = (windows != 0).then_some(WINDOW_POLL);
        let switch = board.run.engine.tick();
        let limit = until.into_iter().chain(poll).chain(switch).min();
        let long = limit.is_none_or(|limit| limit > WINDOW_POLL);
        bell.set_sleeps_long(long);
        if long && board.time.polled_windows() != windows {
            continue;
        }
        bell.sleep(limit.map(|limit| limit.max(SLEEP_MIN)));
    }
}
