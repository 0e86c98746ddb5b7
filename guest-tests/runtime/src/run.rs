//! Runs cases and reports their results on the serial line.
//!
//! The command line selects: `case=NAME` and `cpl=N`. Without them all cases run, at all their
//! levels, if the machine has enough processors for them. The lines are:
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
//! A case has one `ok` or `skip` line, or one or more `fail` lines. A `note` line is a measurement.
//! The exit code is 0, or 1 if a case failed or the case named does not exist. The order of the
//! cases is not specified.

use hindsight_regs::dr::{Dr6, Dr7};

use crate::case::{Case, Ctx};
use crate::info::{self, StartInfo};
use crate::show::{TextBuffer, TextSink, decimal};
use crate::{cpu, exit, insn, pic, report, serial, smp, trap};

const PAGE: usize = 4096;

unsafe extern "C" {
    static hindsight_image_start: [u8; 0];
    static hindsight_data_start: [u8; 0];
    static hindsight_image_end: [u8; 0];
    static hindsight_cases_start: [usize; 1];
    static hindsight_cases_end: [usize; 1];
}

/// Counts of cases by result.
#[derive(Default)]
struct ResultCounts {
    passed: u64,
    failed: u64,
    skipped: u64,
}

/// The start info at the address that the monitor passed; for [`entry!`](crate::entry!).
#[doc(hidden)]
pub fn start_info(address: u32) -> StartInfo {
    StartInfo::at(address)
}

/// Does what [`run`] does first.
///
/// It sets up exceptions and the serial line, masks the lines of the 8259 pair, and copies the
/// command line.
pub fn init(info: StartInfo) {
    cpu::init(0);
    serial::init();
    pic::mask_all();
    info::copy_command_line(info);
}

/// Runs the selected cases of the payload `name` and ends the machine.
pub fn run(name: &str, info: StartInfo) -> ! {
    init(info);
    touch_image();
    line(&["payload ", name]);
    let mut counts = ResultCounts::default();
    let selected = info::option("case");
    let selected_cpl = info::option("cpl");
    for case in cases() {
        if selected.is_some_and(|selected| selected != case.name) {
            continue;
        }
        for &cpl in case.cpls {
            if selected_cpl.is_none_or(|selected| selected == cpl_text(cpl)) {
                run_case(case, cpl, selected.is_some(), &mut counts);
            }
        }
    }
    serial::write("end");
    for (key, count) in [
        (" passed=", counts.passed),
        (" failed=", counts.failed),
        (" skipped=", counts.skipped),
    ] {
        serial::write(key);
        decimal(count, &mut serial::Com1);
    }
    serial::write("\n");
    let none = selected.is_some() && counts.passed + counts.failed + counts.skipped == 0;
    exit::exit(u32::from(counts.failed != 0 || none));
}

/// Reads and writes every page of the image, except the memory of other CPUs.
///
/// The host has then mapped all of them, so that no instruction of a case exits for that.
fn touch_image() {
    let start = (&raw const hindsight_image_start) as usize;
    let written = (&raw const hindsight_data_start) as usize;
    let end = (&raw const hindsight_image_end) as usize;
    let own = cpu::area(0) as usize;
    let own = own & !(PAGE - 1)..own + size_of::<cpu::CpuArea>();
    for at in (start..end).step_by(PAGE).chain(own.step_by(PAGE)) {
        let byte = core::ptr::with_exposed_provenance_mut::<u8>(at);
        // SAFETY: the page belongs to the image and is mapped. Its byte gets the value that it had,
        // while no other CPU runs.
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
        // SAFETY: the linker script puts only references to cases between the two symbols.
        (at < end).then(|| unsafe {
            let case = *at;
            at = at.add(1);
            case
        })
    })
}

fn run_case(case: &'static Case, cpl: u8, selected: bool, counts: &mut ResultCounts) {
    let vcpus = if case.vcpus > 1 { smp::count() } else { 1 };
    if case.vcpus > vcpus && !selected {
        // It runs on a machine with enough processors.
        return;
    }
    report::start_case(case, cpl);
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
    report::flush_deferred();
    if report::has_failed() {
        counts.failed += 1;
    } else if let Some(reason) = ctx.skipped {
        counts.skipped += 1;
        line(&["skip ", case.name, " cpl=", cpl_text(cpl), " ", reason]);
    } else {
        counts.passed += 1;
        line(&["ok ", case.name, " cpl=", cpl_text(cpl)]);
    }
}

/// Disarms what a case may have left armed.
fn clean_up() {
    insn::cli();
    trap::clear_handlers();
    insn::write_dr7(Dr7::RESET.0);
    insn::write_dr6(Dr6::RESET);
    (0..4).for_each(|n| insn::write_dr(n, 0));
}

fn cpl_text(cpl: u8) -> &'static str {
    if cpl == 3 { "3" } else { "0" }
}

fn line(parts: &[&str]) {
    let mut text = TextBuffer::<256>::new();
    for part in parts {
        text.put(part);
    }
    serial::write(text.as_str());
    serial::write("\n");
}
