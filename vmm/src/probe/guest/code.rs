//! Guest code, assembled with this crate and embedded as data.
//!
//! [`code!`] names a piece of assembly text. A piece can run at any address. The local label `7:`
//! in it is its *mark*: the address that a probe expects a stop at.

#![expect(
    unsafe_code,
    reason = "guest code is assembly text whose symbols Rust must declare"
)]

/// Length and mark, which the assembler emits before each piece.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct CodeHeader {
    len: u64,
    mark: u64,
}

/// One piece of guest code.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GuestCode {
    bytes: &'static [u8],
    mark: u64,
}

impl GuestCode {
    /// The piece that follows `header`.
    ///
    /// # Safety
    ///
    /// `header` is a static that [`code!`] has assembled, directly followed by its code.
    pub(crate) unsafe fn new(header: *const CodeHeader) -> Self {
        // SAFETY: the caller guarantees that `header` points to a header.
        let &CodeHeader { len, mark } = unsafe { &*header };
        let len = usize::try_from(len).unwrap_or(0);
        // SAFETY: the caller guarantees that the header is followed by `len` bytes of code, which
        // are in a read-only section of this program.
        let bytes = unsafe { std::slice::from_raw_parts(header.add(1).cast::<u8>(), len) };
        debug_assert!(mark <= len as u64, "the mark is inside of the piece");
        Self { bytes, mark }
    }

    /// The machine code.
    pub(crate) fn bytes(self) -> &'static [u8] {
        self.bytes
    }

    /// Offset of the mark in bytes; 0 if there is none.
    pub(crate) fn mark(self) -> u64 {
        self.mark
    }
}

/// Defines functions that return a [`GuestCode`] each, from assembly text in Intel syntax. Names
/// are unique in the crate. A piece with the label `7:` is written `name @ 7`.
macro_rules! code {
    ($($(#[$doc:meta])* fn $name:ident $(@ $mark:tt)? { $($line:expr),+ $(,)? })+) => {$(
        #[expect(unsafe_code, reason = "declares the symbol of the assembly text")]
        mod $name {
            ::core::arch::global_asm!(
                ".pushsection .rodata.hindsight_doctor, \"a\"",
                ".balign 16",
                concat!(".globl hindsight_doctor_", stringify!($name)),
                concat!(".hidden hindsight_doctor_", stringify!($name)),
                concat!("hindsight_doctor_", stringify!($name), ":"),
                ".quad 9f - 8f",
                $crate::probe::guest::code::code!(@mark $($mark)?),
                "8:",
                $($line,)+
                "9:",
                ".popsection",
            );
            unsafe extern "C" {
                #[link_name = concat!("hindsight_doctor_", stringify!($name))]
                static HEADER: $crate::probe::guest::code::CodeHeader;
            }
            pub(crate) fn code() -> $crate::probe::guest::code::GuestCode {
                // SAFETY: the text above defines the symbol, directly followed by its code.
                unsafe { $crate::probe::guest::code::GuestCode::new(&raw const HEADER) }
            }
        }
        $(#[$doc])*
        fn $name() -> $crate::probe::guest::code::GuestCode {
            $name::code()
        }
    )+};
    (@mark 7) => { ".quad 7f - 8f" };
    (@mark) => { ".quad 0" };
}
pub(crate) use code;

/// Goes from CPL0 to the label `2:` at CPL3, on the stack in R8, with I/O allowed and IF clear.
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
    fn assembled_code_has_its_length_and_mark() {
        assert_eq!(marked().bytes(), [0x90, 0x90, 0x90]);
        assert_eq!(marked().mark(), 1);
        assert_eq!(unmarked().bytes(), [0xf4]);
        assert_eq!(unmarked().mark(), 0);
    }
}
