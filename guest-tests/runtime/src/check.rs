//! Assertions. A failure is recorded with file, line, and the values expected and found.

use crate::report;
use crate::show::Show;

/// Records a failed comparison.
#[doc(hidden)]
#[cold]
#[inline(never)]
pub fn failed_eq(file: &str, line: u32, message: &str, found: &dyn Show, expected: &dyn Show) {
    report::record_failure(file, line, message, Some((expected, found)));
}

/// Records a failed condition.
#[doc(hidden)]
#[cold]
#[inline(never)]
pub fn failed(file: &str, line: u32, message: &str) {
    report::record_failure(file, line, message, None);
}

/// Checks that two values are equal; the case continues if they are not.
///
/// The expression has the value `true` if they are equal.
#[macro_export]
macro_rules! check_eq {
    ($found:expr, $expected:expr, $message:expr $(,)?) => {
        match (&$found, &$expected) {
            (found, expected) if *found == *expected => true,
            (found, expected) => {
                $crate::check::failed_eq(file!(), line!(), $message, found, expected);
                false
            }
        }
    };
}

/// Checks a condition; the case continues if it does not hold.
///
/// The expression has the value of the condition.
#[macro_export]
macro_rules! check {
    ($condition:expr, $message:expr $(,)?) => {
        if $condition {
            true
        } else {
            $crate::check::failed(file!(), line!(), $message);
            false
        }
    };
}

/// Like [`check_eq!`](crate::check_eq!), but a failure returns from the function and ends the case.
#[macro_export]
macro_rules! require_eq {
    ($found:expr, $expected:expr, $message:expr $(,)?) => {
        if !$crate::check_eq!($found, $expected, $message) {
            return;
        }
    };
}

/// Like [`check!`](crate::check!), but a failure returns from the function and ends the case.
#[macro_export]
macro_rules! require {
    ($condition:expr, $message:expr $(,)?) => {
        if !$crate::check!($condition, $message) {
            return;
        }
    };
}

/// Unwraps an `Option`; `None` is a failure, which returns from the function and ends the case.
#[macro_export]
macro_rules! require_some {
    ($value:expr, $message:expr $(,)?) => {
        match $value {
            Some(value) => value,
            None => {
                $crate::check::failed(file!(), line!(), $message);
                return;
            }
        }
    };
}

/// Ends the case as skipped.
#[macro_export]
macro_rules! skip {
    ($ctx:expr, $reason:expr $(,)?) => {{
        $ctx.skip($reason);
        return;
    }};
}

/// Ends the case as skipped unless CPUID reports the feature.
#[macro_export]
macro_rules! need_feature {
    ($ctx:expr, $feature:ident) => {
        if !$crate::insn::has($crate::regs::cpuid::Feature::$feature) {
            $crate::skip!(
                $ctx,
                concat!("CPUID does not report ", stringify!($feature))
            );
        }
    };
}
