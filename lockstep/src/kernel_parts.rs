//! Parts that the guests' kernels share: exception stubs, gates, and writes to guest memory.

#![expect(unsafe_code, reason = "code of this program is data of the guest")]

use hindsight_cpu::state::Segment;
use hindsight_regs::cr::{Cr0, Cr4, Efer};
use std::ops::Range;

/// CR0 of the kernels in 64-bit mode.
pub(crate) const CR0_64: u64 = Cr0::PG
    .union(Cr0::AM)
    .union(Cr0::WP)
    .union(Cr0::NE)
    .union(Cr0::ET)
    .union(Cr0::MP)
    .union(Cr0::PE)
    .bits();
/// CR4 of the kernels in 64-bit mode; the kernel of user code has more bits.
pub(crate) const CR4_64: u64 = Cr4::PSE
    .union(Cr4::PAE)
    .union(Cr4::PGE)
    .union(Cr4::OSFXSR)
    .union(Cr4::OSXMMEXCPT)
    .bits();
/// EFER of the kernels in 64-bit mode.
pub(crate) const EFER_64: u64 = Efer::SCE
    .union(Efer::LME)
    .union(Efer::LMA)
    .union(Efer::NXE)
    .bits();
/// Page-table entry: execute disable.
pub(crate) const NX: u64 = 1 << 63;

/// Assembly of the 32 exception stubs, of 16 bytes each, from a label on.
///
/// Each jumps to one handler with the vector on the stack, and above it the error code, or 0 if
/// there is none.
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

/// For each exception: its vector, the offset of its stub from the first stub, and the DPL of its
/// gate.
///
/// The DPLs are those of Linux, which lets users raise #BP and #OF.
pub(crate) fn exception_gates() -> impl Iterator<Item = (usize, usize, u64)> {
    (0..32).map(|vector| {
        let dpl = if matches!(vector, 3 | 4) { 3 } else { 0 };
        (vector, vector * 16, dpl)
    })
}

/// Writes 8 bytes.
pub(crate) fn put(ram: &mut [u8], at: usize, value: u64) {
    ram[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// Copies the code between two labels to guest memory.
///
/// # Safety
/// Both labels lie in order in one section, which holds initialised bytes.
pub(crate) unsafe fn copy_code(ram: &mut [u8], at: usize, labels: Range<*const u8>) {
    let len = labels.end.addr() - labels.start.addr();
    // SAFETY: the caller promises initialised bytes from one label to the other.
    let code = unsafe { std::slice::from_raw_parts(labels.start, len) };
    ram[at..at + len].copy_from_slice(code);
}

/// A segment from 0 to 4 GiB.
pub(crate) fn flat_segment(selector: u16, access: u16) -> Segment {
    Segment {
        selector,
        base: 0,
        limit: 0xffff_ffff,
        access,
        unusable: false,
    }
}
