//! Assertions. Each records file, line, what was expected and what was found.

use crate::run;
use crate::show::Show;

/// Records a failed comparison.
#[doc(hidden)]
#[cold]
#[inline(never)]
pub fn failed_eq(file: &str, line: u32, what: &str, found: &dyn Show, expected: &dyn Show) {
    run::record_failure(file, line, what, Some((expected, found)));
}

/// Records a failed condition.
#[doc(hidden)]
#[cold]
#[inline(never)]
pub fn failed(file: &str, line: u32, what: &str) {
    run::record_failure(file, line, what, None);
}

/// Checks that two values are equal, and goes on either way. The value of the expression says
/// whether they are.
#[macro_export]
macro_rules! check_eq {
    ($found:expr, $expected:expr, $what:expr $(,)?) => {
        match (&$found, &$expected) {
            (found, expected) if *found == *expected => true,
            (found, expected) => {
                $crate::check::failed_eq(file!(), line!(), $what, found, expected);
                false
            }
        }
    };
}

/// Checks a condition, and goes on either way. The value of the expression says whether it holds.
#[macro_export]
macro_rules! check {
    ($condition:expr, $what:expr $(,)?) => {
        if $condition {
            true
        } else {
            $crate::check::failed(file!(), line!(), $what);
            false
        }
    };
}

/// As [`check_eq!`](crate::check_eq!), but a failure returns from the function, so ends the case.
#[macro_export]
macro_rules! require_eq {
    ($found:expr, $expected:expr, $what:expr $(,)?) => {
        if !$crate::check_eq!($found, $expected, $what) {
            return;
        }
    };
}

/// As [`check!`](crate::check!), but a failure returns from the function, so ends the case.
#[macro_export]
macro_rules! require {
    ($condition:expr, $what:expr $(,)?) => {
        if !$crate::check!($condition, $what) {
            return;
        }
    };
}

/// Unwraps an `Option`; for `None` it records a failure and returns from the function.
#[macro_export]
macro_rules! require_some {
    ($value:expr, $what:expr $(,)?) => {
        match $value {
            Some(value) => value,
            None => {
                $crate::check::failed(file!(), line!(), $what);
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

/// Ends the case as skipped unless CPUID announces the feature.
#[macro_export]
macro_rules! need_feature {
    ($ctx:expr, $feature:ident) => {
        if !$crate::insn::has($crate::regs::cpuid::Feature::$feature) {
            $crate::skip!(
                $ctx,
                concat!("CPUID does not announce ", stringify!($feature))
            );
        }
    };
}
