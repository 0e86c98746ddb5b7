//! The panic handler: it writes a `fail` line with the location, and exits with code 1.

use core::fmt::Write;
use core::panic::PanicInfo;

use crate::{exit, report, serial};

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    report::start_failure_line(&mut serial::Com1);
    if let Some(location) = info.location() {
        // Writing to the serial line cannot fail.
        let _ = write!(serial::Com1, "{}:{} ", location.file(), location.line());
    }
    let _ = writeln!(serial::Com1, "panicked: {}", info.message());
    exit::exit(1);
}
