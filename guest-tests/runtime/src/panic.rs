//! A panic ends the payload: it says where, and exits with code 1.

use core::fmt::Write;
use core::panic::PanicInfo;

use crate::{exit, run, serial};

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    run::start_failure_line(&mut serial::Serial);
    if let Some(place) = info.location() {
        // Writing to the serial line cannot fail.
        let _ = write!(serial::Serial, "{}:{} ", place.file(), place.line());
    }
    let _ = writeln!(serial::Serial, "panicked: {}", info.message());
    exit::exit(1);
}
