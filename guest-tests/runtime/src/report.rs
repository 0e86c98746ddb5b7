//! Lines about the running case: failures and measurements.
//!
//! A case may fail at CPL 3, which cannot write to the serial line. Such lines are kept and written
//! when the case is over.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

use crate::case::Case;
use crate::show::{Show, TextBuffer, TextSink, decimal};
use crate::{insn, serial};

/// Failures that are written for one run of a case; later ones are only counted.
const FAILURES_MAX: u32 = 8;

struct DeferredLines(UnsafeCell<TextBuffer<4096>>);

// SAFETY: it is used only under FAILURE_LOCK, or by the runner while no other CPU works.
unsafe impl Sync for DeferredLines {}

/// Lines of failures at CPL 3.
static DEFERRED: DeferredLines = DeferredLines(UnsafeCell::new(TextBuffer::new()));
static FAILURE_LOCK: AtomicBool = AtomicBool::new(false);
static FAILURES: AtomicU32 = AtomicU32::new(0);
static CURRENT: AtomicPtr<Case> = AtomicPtr::new(core::ptr::null_mut());
static CURRENT_CPL: AtomicU32 = AtomicU32::new(0);

/// Makes `case` at `cpl` the running case, without failures.
pub(crate) fn start_case(case: &'static Case, cpl: u8) {
    CURRENT.store(core::ptr::from_ref(case).cast_mut(), Ordering::Relaxed);
    CURRENT_CPL.store(u32::from(cpl), Ordering::Relaxed);
    FAILURES.store(0, Ordering::Relaxed);
}

/// Whether the running case has failed.
pub(crate) fn has_failed() -> bool {
    FAILURES.load(Ordering::Relaxed) != 0
}

/// Writes `note CASE cpl=N KEY=VALUE`: a measurement, which neither passes nor fails.
pub fn measurement(key: &str, value: u64) {
    serial::locked(|| {
        let out = &mut serial::Com1;
        out.put("note ");
        put_current(out);
        out.put(key);
        out.put("=");
        decimal(value, out);
        out.put("\n");
    });
}

/// Starts a `fail` line of the running case.
pub(crate) fn start_failure_line(out: &mut dyn TextSink) {
    out.put("fail ");
    put_current(out);
}

fn put_current(out: &mut dyn TextSink) {
    // SAFETY: only `start_case` stores a pointer here, and it stores references to statics.
    match unsafe { CURRENT.load(Ordering::Relaxed).as_ref() } {
        Some(case) => out.put(case.name),
        None => out.put("-"),
    }
    out.put(" cpl=");
    decimal(u64::from(CURRENT_CPL.load(Ordering::Relaxed)), out);
    out.put(" ");
}

/// Counts a failed check and writes its line; at CPL 3 keeps the line.
pub(crate) fn record_failure(
    file: &str,
    line: u32,
    message: &str,
    values: Option<(&dyn Show, &dyn Show)>,
) {
    while FAILURE_LOCK.swap(true, Ordering::Acquire) {
        core::hint::spin_loop();
    }
    if FAILURES.fetch_add(1, Ordering::Relaxed) < FAILURES_MAX {
        // SAFETY: this CPU holds the lock.
        let text = unsafe { &mut *DEFERRED.0.get() };
        start_failure_line(text);
        text.put(file);
        text.put(":");
        decimal(u64::from(line), text);
        text.put(" ");
        text.put(message);
        if let Some((expected, found)) = values {
            text.put(" expected=");
            expected.show(text);
            text.put(" found=");
            found.show(text);
        }
        text.put("\n");
        if insn::cpl() == 0 {
            write_and_clear(text);
        }
    }
    FAILURE_LOCK.store(false, Ordering::Release);
}

fn write_and_clear(text: &mut TextBuffer<4096>) {
    serial::locked(|| serial::write(text.as_str()));
    text.clear();
}

/// Writes the lines that were kept.
pub(crate) fn flush_deferred() {
    // SAFETY: the case is over, so no other CPU records failures.
    let text = unsafe { &mut *DEFERRED.0.get() };
    if !text.as_str().is_empty() {
        write_and_clear(text);
    }
}
