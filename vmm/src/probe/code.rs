//! Guest code, assembled with this crate and kept as data.
//!
//! [`code!`] names a piece of assembly text. Each piece may run at any address. The local label
//! `7:` in it is its *mark*: the place a probe cares about.

#![expect(
    unsafe_code,
    reason = "guest code is assembly text whose symbols Rust must declare"
)]

/// Length and mark, as the assembler lays them out in front of each piece.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Header {
    len: u64,
    mark: u64,
}

/// One piece of guest code.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Code {
    bytes: &'static [u8],
    mark: u64,
}

impl Code {
    /// The piece behind `header`.
    ///
    /// # Safety
    ///
    /// `header` is a static that [`code!`] has assembled, with its code directly behind it.
    pub(crate) unsafe fn new(header: *const Header) -> Self {
        // SAFETY: the caller says it is such a header.
        let &Header { len, mark } = unsafe { &*header };
        let len = usize::try_from(len).unwrap_or(0);
        // SAFETY: the assembler puts `len` bytes of read-only data behind each header.
        let bytes = unsafe { std::slice::from_raw_parts(header.add(1).cast::<u8>(), len) };
        Self { bytes, mark }
    }

    /// The machine code.
    pub(crate) fn bytes(self) -> &'static [u8] {
        self.bytes
    }

    /// Offset of the mark in bytes; 0 where there is none.
    pub(crate) fn mark(self) -> u64 {
        self.mark
    }
}

/// Defines functions that return a [`Code`] each, from assembly text in Intel syntax. Names are
/// unique in the crate. A piece with the label `7:` is written `name @ 7`.
macro_rules! code {
    ($($(#[$doc:meta])* fn $name:ident $(@ $mark:tt)? { $($line:expr),+ $(,)? })+) => {$(
        #[expect(unsafe_code, reason = "guest code is assembly text with a symbol to it")]
        mod $name {
            ::core::arch::global_asm!(
                ".pushsection .rodata.hindsight_doctor, \"a\"",
                ".balign 16",
                concat!(".globl hindsight_doctor_", stringify!($name)),
                concat!(".hidden hindsight_doctor_", stringify!($name)),
                concat!("hindsight_doctor_", stringify!($name), ":"),
                ".quad 9f - 8f",
                $crate::probe::code::code!(@mark $($mark)?),
                "8:",
                $($line,)+
                "9:",
                ".popsection",
            );
            unsafe extern "C" {
                #[link_name = concat!("hindsight_doctor_", stringify!($name))]
                static HEADER: $crate::probe::code::Header;
            }
            pub(crate) fn code() -> $crate::probe::code::Code {
                // SAFETY: the text above defines the symbol with its code behind it.
                unsafe { $crate::probe::code::Code::new(&raw const HEADER) }
            }
        }
        $(#[$doc])*
        fn $name() -> $crate::probe::code::Code {
            $name::code()
        }
    )+};
    (@mark 7) => { ".quad 7f - 8f" };
    (@mark) => { ".quad 0" };
}
pub(crate) use code;

/// From CPL0 to the label `2:` at CPL3, on the stack in R8, with I/O allowed and IF clear.
macro_rules! to_cpl3 {
    () => {
        "push 0x1b\n push r8\n push 0x3002\n push 0x23\n lea rax, [rip + 2f]\n push rax\n iretq"
    };
}
pub(crate) use to_cpl3;

#[cfg(test)]
mod tests {
    code! {
        fn marked @ 7 { "nop", "7:", "nop", "nop" }
        fn unmarked { "hlt" }
    }

    #[test]
    fn code_is_found_with_its_length_and_mark() {
        assert_eq!(marked().bytes(), [0x90, 0x90, 0x90]);
        assert_eq!(marked().mark(), 1);
        assert_eq!(unmarked().bytes(), [0xf4]);
        assert_eq!(unmarked().mark(), 0);
    }
}
