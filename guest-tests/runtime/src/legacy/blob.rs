//! Blobs: pieces of assembly for a legacy mode.

use crate::legacy::layout::BASE;

/// A label of a blob.
pub type BlobLabel = unsafe extern "C" fn();

/// A piece of code for a legacy mode: everything between two labels, at most 60 KiB.
#[derive(Clone, Copy, Debug)]
pub struct Blob {
    pub(super) start: u32,
    pub(super) len: usize,
}

fn address(label: BlobLabel) -> u32 {
    // Payloads are linked below 4 GiB.
    u32::try_from(label as usize).unwrap_or(0)
}

impl Blob {
    /// The code from `start` up to `end`.
    pub fn new(start: BlobLabel, end: BlobLabel) -> Self {
        let len = (end as usize).saturating_sub(start as usize);
        assert!(len <= 0xf000, "the blob is longer than 60 KiB");
        Self {
            start: address(start),
            len,
        }
    }

    /// The offset of `label` in the blob's segment.
    pub fn offset(&self, label: BlobLabel) -> u32 {
        address(label).wrapping_sub(self.start)
    }

    /// The linear address of `label`.
    pub fn linear(&self, label: BlobLabel) -> u32 {
        BASE + self.offset(label)
    }
}

/// Declares a blob: `fn name[bits](labels; end);`, then its text in AT&T syntax.
///
/// The function returns the [`Blob`](crate::legacy::Blob). `bits` is 16 or 32. The macro defines
/// the first label at the start and the last one at the end; the text defines the others.
#[macro_export]
macro_rules! blob {
    ($(#[$doc:meta])* fn $name:ident[$bits:literal]($start:ident $(, $label:ident)*; $end:ident); $($text:literal)*) => {
        core::arch::global_asm!(
            ".pushsection .rodata.hindsight.blob, \"a\"",
            concat!(".code", $bits),
            concat!(".global ", stringify!($start), ", ", stringify!($end) $(, ", ", stringify!($label))*),
            concat!(stringify!($start), ":"),
            $($text,)*
            concat!(stringify!($end), ":"),
            ".code64",
            ".popsection",
            options(att_syntax),
        );
        unsafe extern "C" {
            fn $start();
            $(fn $label();)*
            fn $end();
        }
        $(#[$doc])*
        fn $name() -> $crate::legacy::Blob {
            $crate::legacy::Blob::new($start, $end)
        }
    };
}
