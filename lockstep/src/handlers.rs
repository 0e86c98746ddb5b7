//! What the kernels of the guests share: stubs of exceptions, and how memory and state are filled.

use hindsight_cpu::state::Segment;
use std::ops::Range;

/// Assembly of a stub for each exception, of 16 bytes each, under a label; all lead to one place with the vector on
/// the stack, and an error code or 0 above it.
macro_rules! stubs {
    ($label:literal, $to:literal) => {
        concat!(
            ".balign 16\n",
            $label,
            ":\n.set vector, 0\n.rept 32\n",
            // #DF, #TS, #NP, #SS, #GP, #PF, #AC push an error code.
            ".if vector != 8 && (vector < 10 || vector > 14) && vector != 17\npush 0\n.endif\n",
            "push vector\njmp ",
            $to,
            "\n.balign 16\n.set vector, vector + 1\n.endr"
        )
    };
}
pub(crate) use stubs;

/// Where the stub of each exception stands after the first one, and the DPL of its gate: that of Linux, which lets
/// users raise #BP and #OF.
pub(crate) fn gates() -> impl Iterator<Item = (usize, usize, u64)> {
    (0..32).map(|vector| {
        let dpl = if matches!(vector, 3 | 4) { 3 } else { 0 };
        (vector, vector * 16, dpl)
    })
}

/// Writes 8 bytes.
pub(crate) fn put(ram: &mut [u8], at: usize, v: u64) {
    ram[at..at + 8].copy_from_slice(&v.to_le_bytes());
}

/// Copies code that lies between two labels of one section.
///
/// # Safety
/// They are in order in one section, which holds initialised bytes.
#[expect(unsafe_code, reason = "code of this program is data of the guest")]
pub(crate) unsafe fn copy(ram: &mut [u8], at: usize, labels: Range<*const u8>) {
    let len = labels.end.addr() - labels.start.addr();
    // SAFETY: the caller vouches for the bytes between the labels.
    let code = unsafe { std::slice::from_raw_parts(labels.start, len) };
    ram[at..at + len].copy_from_slice(code);
}

/// A segment of 4 GiB from 0.
pub(crate) fn flat(selector: u16, access: u16) -> Segment {
    Segment {
        selector,
        base: 0,
        limit: 0xffff_ffff,
        access,
        unusable: false,
    }
}
