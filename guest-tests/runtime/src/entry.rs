//! Entry of a payload: with the case runner or without it.

/// Names the payload and makes it run its cases.
#[macro_export]
macro_rules! payload {
    ($name:literal) => {
        fn run_payload(info: $crate::info::StartInfo) -> ! {
            $crate::run::run($name, info)
        }
        $crate::entry!(run_payload);
    };
}

/// Makes `$main`, a `fn(StartInfo) -> !`, the entry of a payload that does not use the case runner.
///
/// It starts with a stack and paging, and without exception handling.
#[macro_export]
macro_rules! entry {
    ($main:path) => {
        #[unsafe(no_mangle)]
        extern "C" fn hindsight_start(info: u32) -> ! {
            let main: fn($crate::info::StartInfo) -> ! = $main;
            main($crate::run::start_info(info))
        }
    };
}
