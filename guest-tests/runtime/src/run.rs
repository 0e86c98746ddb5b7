//! Runs cases and reports them on the serial line.
//!
//! The command line selects: `case=NAME` and `cpl=N`; without them all cases run, at all their
//! levels, that the machine has processors for. The lines are:
//!
//! ```text
//! payload NAME
//! run CASE cpl=N
//! ok CASE cpl=N
//! fail CASE cpl=N FILE:LINE MESSAGE [expected=.. found=..]
//! skip CASE cpl=N REASON
//! note CASE cpl=N KEY=VALUE
//! end passed=P failed=F skipped=S
//! ```
//!
//! A case has one `ok` or `skip`, or one or more `fail`. A `note` tells a measurement.
//! Then the exit code is 0, or 1 if any case
//! failed, or the one named does not exist. Cases run in no promised order.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

use hindsight_regs::dr::{Dr6, Dr7};

use crate::case::{Case, Ctx};
use crate::info::{self, StartInfo};
use crate::show::{Show, Sink, Text, decimal};
use crate::{cpu, exit, insn, pic, serial, smp, trap};

/// Failures shown for one run of a case; later ones are only counted.
const FAILURES_SHOWN: u32 = 8;

const PAGE: usize = 4096;

unsafe extern "C" {
    static hindsight_image_start: [u8; 0];
    static hindsight_data_start: [u8; 0];
    static hindsight_image_end: [u8; 0];
    static hindsight_cases_start: [usize; 1];
    static hindsight_cases_end: [usize; 1];
}

struct Deferred(UnsafeCell<Text<4096>>);

// SAFETY: used under FAILURE_LOCK, or by the runner when no other processor works.
unsafe impl Sync for Deferred {}

/// Failures seen at CPL 3, which cannot write to the serial line.
static DEFERRED: Deferred = Deferred(UnsafeCell::new(Text::new()));
static FAILURE_LOCK: AtomicBool = AtomicBool::new(false);
static FAILURES: AtomicU32 = AtomicU32::new(0);
static CURRENT: AtomicPtr<Case> = AtomicPtr::new(core::ptr::null_mut());
static CURRENT_CPL: AtomicU32 = AtomicU32::new(0);

#[derive(Default)]
struct Tally {
    passed: u64,
    failed: u64,
    skipped: u64,
}

/// Wraps the address from the monitor; for [`entry!`](crate::entry!).
#[doc(hidden)]
pub fn start_info(address: u32) -> StartInfo {
    StartInfo::at(address)
}

/// Sets up exceptions and the serial line, masks the legacy interrupt lines, and keeps the command line: what [`run`] does first.
pub fn init(info: StartInfo) {
    cpu::init(0);
    serial::init();
    pic::mask_all();
    info::keep_command_line(info);
}

/// Runs the selected cases of the payload `name` and ends the machine.
pub fn run(name: &str, info: StartInfo) -> ! {
    init(info);
    touch_image();
    line(&["payload ", name]);
    let mut tally = Tally::default();
    let wanted = info::option("case");
    let wanted_cpl = info::option("cpl");
    for case in cases() {
        if wanted.is_some_and(|wanted| wanted != case.name) {
            continue;
        }
        for &cpl in case.cpls {
            if wanted_cpl.is_none_or(|wanted| wanted == cpl_text(cpl)) {
                run_case(case, cpl, wanted.is_some(), &mut tally);
            }
        }
    }
    serial::write("end");
    for (key, count) in [
        (" passed=", tally.passed),
        (" failed=", tally.failed),
        (" skipped=", tally.skipped),
    ] {
        serial::write(key);
        decimal(count, &mut serial::Serial);
    }
    serial::write("\n");
    let none = wanted.is_some() && tally.passed + tally.failed + tally.skipped == 0;
    exit::exit(u32::from(tally.failed != 0 || none));
}

/// Reads and writes every page of the image, but those of the other processors, so that the host has
/// given them all before a case begins: no instruction that a case looks at leaves the guest for that.
fn touch_image() {
    let start = (&raw const hindsight_image_start) as usize;
    let written = (&raw const hindsight_data_start) as usize;
    let end = (&raw const hindsight_image_end) as usize;
    let own = cpu::area(0) as usize;
    let own = own & !(PAGE - 1)..own + size_of::<cpu::Cpu>();
    for at in (start..end).step_by(PAGE).chain(own.step_by(PAGE)) {
        let byte = core::ptr::with_exposed_provenance_mut::<u8>(at);
        // SAFETY: the page is the image's, and mapped; one byte of it is written as it was read, while
        // nothing else runs.
        unsafe {
            let value = byte.read_volatile();
            if at >= written {
                byte.write_volatile(value);
            }
        }
    }
}

fn cases() -> impl Iterator<Item = &'static Case> {
    let mut at = (&raw const hindsight_cases_start).cast::<&'static Case>();
    let end = (&raw const hindsight_cases_end).cast::<&'static Case>();
    core::iter::from_fn(move || {
        // SAFETY: between the two symbols the linker script placed references to cases.
        (at < end).then(|| unsafe {
            let case = *at;
            at = at.add(1);
            case
        })
    })
}

fn run_case(case: &'static Case, cpl: u8, selected: bool, tally: &mut Tally) {
    let vcpus = if case.vcpus > 1 { smp::count() } else { 1 };
    if case.vcpus > vcpus && !selected {
        // Runs on a machine with enough processors.
        return;
    }
    CURRENT.store(core::ptr::from_ref(case).cast_mut(), Ordering::Relaxed);
    CURRENT_CPL.store(u32::from(cpl), Ordering::Relaxed);
    FAILURES.store(0, Ordering::Relaxed);
    line(&["run ", case.name, " cpl=", cpl_text(cpl)]);
    let mut ctx = Ctx {
        cpl,
        vcpus,
        skipped: None,
    };
    if case.vcpus > vcpus {
        ctx.skip("the machine has too few processors");
    } else {
        (case.body)(&mut ctx);
        clean_up();
    }
    flush_deferred();
    if FAILURES.load(Ordering::Relaxed) != 0 {
        tally.failed += 1;
    } else if let Some(reason) = ctx.skipped {
        tally.skipped += 1;
        line(&["skip ", case.name, " cpl=", cpl_text(cpl), " ", reason]);
    } else {
        tally.passed += 1;
        line(&["ok ", case.name, " cpl=", cpl_text(cpl)]);
    }
}

/// Brings back what a case may have left armed.
fn clean_up() {
    insn::cli();
    trap::clear_handlers();
    insn::write_dr7(Dr7::RESET.0);
    insn::write_dr6(Dr6::RESET);
    (0..4).for_each(|slot| insn::write_dr(slot, 0));
}

/// Writes `note CASE cpl=N KEY=VALUE`, a line that tells something and judges nothing.
pub fn note(key: &str, value: u64) {
    serial::locked(|| {
        let out = &mut serial::Serial;
        out.put("note ");
        put_current(out);
        out.put(key);
        out.put("=");
        decimal(value, out);
        out.put("\n");
    });
}

fn cpl_text(cpl: u8) -> &'static str {
    if cpl == 3 { "3" } else { "0" }
}

fn line(parts: &[&str]) {
    let mut text = Text::<256>::new();
    for part in parts {
        text.put(part);
    }
    serial::write(text.as_str());
    serial::write("\n");
}

/// Starts a `fail` line of the running case.
pub(crate) fn start_failure_line(out: &mut dyn Sink) {
    out.put("fail ");
    put_current(out);
}

fn put_current(out: &mut dyn Sink) {
    // SAFETY: only `run_case` stores here, references to statics.
    match unsafe { CURRENT.load(Ordering::Relaxed).as_ref() } {
        Some(case) => out.put(case.name),
        None => out.put("-"),
    }
    out.put(" cpl=");
    decimal(u64::from(CURRENT_CPL.load(Ordering::Relaxed)), out);
    out.put(" ");
}

/// Counts a failed check and writes its line, or keeps it until CPL 0.
pub(crate) fn record_failure(
    file: &str,
    line: u32,
    what: &str,
    values: Option<(&dyn Show, &dyn Show)>,
) {
    while FAILURE_LOCK.swap(true, Ordering::Acquire) {
        core::hint::spin_loop();
    }
    if FAILURES.fetch_add(1, Ordering::Relaxed) < FAILURES_SHOWN {
        // SAFETY: under the lock.
        let text = unsafe { &mut *DEFERRED.0.get() };
        start_failure_line(text);
        text.put(file);
        text.put(":");
        decimal(u64::from(line), text);
        text.put(" ");
        text.put(what);
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

fn write_and_clear(text: &mut Text<4096>) {
    serial::locked(|| serial::write(text.as_str()));
    text.clear();
}

fn flush_deferred() {
    // SAFETY: the case is over, no other processor records failures.
    let text = unsafe { &mut *DEFERRED.0.get() };
    if !text.as_str().is_empty() {
        write_and_clear(text);
    }
}
