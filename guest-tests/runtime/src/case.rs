//! Cases: what a payload asserts, and how it is listed.

use crate::catch::{self, Exception};

/// One case, as [`case!`](crate::case!) registers it.
#[derive(Debug)]
pub struct Case {
    /// Its name, unique in the payload.
    pub name: &'static str,
    /// The privilege levels it runs at.
    pub cpls: &'static [u8],
    /// How many processors it needs.
    pub vcpus: u32,
    /// What it does.
    pub body: fn(&mut Ctx),
}

/// What a running case knows and can say.
#[derive(Debug)]
pub struct Ctx {
    /// The privilege level of this run.
    pub cpl: u8,
    /// How many processors the machine has; read only when the case needs more than one.
    pub vcpus: u32,
    pub(crate) skipped: Option<&'static str>,
}

impl Ctx {
    /// Runs `f` at this run's level, and returns the exception that ended it, if one did.
    pub fn run<F: FnOnce()>(&self, f: F) -> Option<Exception> {
        if self.cpl == 3 {
            catch::user(f)
        } else {
            catch::catch(f)
        }
    }

    /// Says that the case cannot hold here; the body then returns.
    pub fn skip(&mut self, reason: &'static str) {
        self.skipped = Some(reason);
    }
}

/// The bytes of a record, as an array that a `static` can hold.
#[doc(hidden)]
pub const fn record<const N: usize>(text: &str) -> [u8; N] {
    let bytes = text.as_bytes();
    let mut out = [0; N];
    let mut at = 0;
    while at < N {
        out[at] = bytes[at];
        at += 1;
    }
    out
}

/// Registers a case. See the crate's example; the fields come in this order:
///
/// - `name`, `cpl` (levels it runs at), `rules` (identifiers it asserts), `needs` (probes that must
///   hold), and optionally `needs_cpl0` and `needs_cpl3` (more of them, for one level only), `vcpus`
///   (default 1), `cpu` (the processor as a profile, such as `+l2cat`), `clock` (`virtual`: time that only the
///   processors move), `timeout_ms` (default 2000), then `about`;
/// - `fn body(ctx) { .. }`.
///
/// It also puts one line of text into the ELF section `.hindsight.cases`.
#[macro_export]
macro_rules! case {
    (
        name: $name:literal, cpl: [$cpl0:literal $(, $cpl:literal)*],
        rules: [$($rule0:literal $(, $rule:literal)* $(,)?)?],
        needs: [$($need0:literal $(, $need:literal)* $(,)?)?],
        $(needs_cpl0: [$kernel0:literal $(, $kernel:literal)* $(,)?],)?
        $(needs_cpl3: [$user0:literal $(, $user:literal)* $(,)?],)?
        $(vcpus: $vcpus:literal,)?
        $(cpu: $cpu:literal,)?
        $(clock: $clock:literal,)?
        $(timeout_ms: $timeout:literal,)?
        about: $about:literal,
        fn body($ctx:ident) $body:block
    ) => {
        const _: () = {
            const RECORD: &str = concat!(
                "case ", $name,
                " cpl=", $cpl0 $(, ",", $cpl)*,
                " rules=" $(, $rule0 $(, ",", $rule)*)?,
                " needs=" $(, $need0 $(, ",", $need)*)?,
                $(" needs_cpl0=", $kernel0 $(, ",", $kernel)*,)?
                $(" needs_cpl3=", $user0 $(, ",", $user)*,)?
                " vcpus=", $crate::case!(@or 1 $($vcpus)?),
                $(" cpu=", $cpu,)?
                $(" clock=", $clock,)?
                " timeout_ms=", $crate::case!(@or 2000 $($timeout)?),
                " about=", $about, "\n",
            );
            #[used]
            #[unsafe(link_section = ".hindsight.cases")]
            static TEXT: [u8; RECORD.len()] = $crate::case::record(RECORD);

            fn body($ctx: &mut $crate::case::Ctx) $body

            static CASE: $crate::case::Case = $crate::case::Case {
                name: $name,
                cpls: &[$cpl0 $(, $cpl)*],
                vcpus: $crate::case!(@or 1 $($vcpus)?),
                body,
            };
            #[used]
            #[unsafe(link_section = ".hindsight.table")]
            static ENTRY: &$crate::case::Case = &CASE;
        };
    };
    (@or $default:literal) => { $default };
    (@or $default:literal $value:literal) => { $value };
}

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

/// Makes `$main`, a `fn(StartInfo) -> !`, what runs first: with a stack and paging, but with no
/// exceptions set up. For payloads that do not use the case runner.
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
