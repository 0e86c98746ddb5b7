//! Cases: the assertions of a payload, and the list of them in the ELF file.

use crate::catch;
use crate::exception::CaughtException;

/// One case, as [`case!`](crate::case!) registers it.
#[derive(Debug)]
pub struct Case {
    /// The name, unique in the payload.
    pub name: &'static str,
    /// The privilege levels that it runs at.
    pub cpls: &'static [u8],
    /// How many processors it needs.
    pub vcpus: u32,
    /// The assertions.
    pub body: fn(&mut Ctx),
}

/// The run of a case: its conditions, and whether it is skipped.
#[derive(Debug)]
pub struct Ctx {
    /// The privilege level of this run.
    pub cpl: u8,
    /// How many processors the machine has; 1 if the case needs only one.
    pub vcpus: u32,
    pub(crate) skipped: Option<&'static str>,
}

impl Ctx {
    /// Runs `f` at the level of this run and returns the exception that ended it, if one did.
    pub fn run<F: FnOnce()>(&self, f: F) -> Option<CaughtException> {
        if self.cpl == 3 {
            catch::user(f)
        } else {
            catch::catch(f)
        }
    }

    /// Records that the case cannot run here; the body then returns.
    pub fn skip(&mut self, reason: &'static str) {
        self.skipped = Some(reason);
    }
}

/// The bytes of a line of the case list, as an array that a `static` can hold.
#[doc(hidden)]
pub const fn list_line<const N: usize>(text: &str) -> [u8; N] {
    let bytes = text.as_bytes();
    let mut out = [0; N];
    let mut at = 0;
    while at < N {
        out[at] = bytes[at];
        at += 1;
    }
    out
}

/// Registers a case and puts one line of text into the ELF section `.hindsight.cases`.
///
/// The crate's documentation has an example. The fields come in this order:
///
/// - `name`;
/// - `cpl`: the privilege levels that the case runs at;
/// - `rules`: identifiers of the rules that it asserts;
/// - `needs`: probes of the host that must hold;
/// - `needs_cpl0`, `needs_cpl3` (optional): more probes, for one level only;
/// - `vcpus` (default 1);
/// - `cpu` (optional): the CPU profile, such as `+l2cat`;
/// - `clock` (optional): `virtual` for time that only the vCPUs advance;
/// - `timeout_ms` (default 2000);
/// - `about`: one line of text;
/// - `fn body(ctx) { .. }`.
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
            const CASE_LIST_LINE: &str = concat!(
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
            static TEXT: [u8; CASE_LIST_LINE.len()] = $crate::case::list_line(CASE_LIST_LINE);

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
