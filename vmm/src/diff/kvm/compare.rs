//! What of two states must be the same.

use hindsight_cpu::state::{CpuState, Segment, XsaveArea, seg};
use hindsight_regs::rflags::Rflags;
use iced_x86::{Instruction, RflagsBits};

use crate::diff::runs::{Differences, hex};
use crate::state::PAGE;

/// RFLAGS.RF, which a debugger's stop may set, and TF, which KVM hides while it steps.
const HIDDEN: u64 = Rflags::RF.union(Rflags::TF).bits();
/// Accessed and dirty, in an entry of a page table.
const ACCESSED_DIRTY: u64 = 3 << 5;

/// How much is compared.
#[derive(Clone, Copy, Debug)]
pub(super) enum Look {
    /// General, segment and control registers, without these flags.
    Glance {
        /// Flags that the instruction leaves undefined.
        undefined: u64,
    },
    /// All registers.
    All,
}

/// The flags that an instruction leaves undefined. SDM Vol. 1, "EFLAGS Cross-Reference".
pub(super) fn undefined_flags(instruction: &Instruction) -> u64 {
    let undefined = instruction.rflags_undefined();
    [
        (RflagsBits::CF, 0),
        (RflagsBits::PF, 2),
        (RflagsBits::AF, 4),
        (RflagsBits::ZF, 6),
        (RflagsBits::SF, 7),
        (RflagsBits::OF, 11),
    ]
    .into_iter()
    .filter(|&(flag, _)| undefined & flag != 0)
    .fold(0, |flags, (_, bit)| flags | 1 << bit)
}

/// What differs between the interpreter's state and KVM's: the name, then both values.
pub(super) fn differences(
    ours: &CpuState,
    theirs: &CpuState,
    look: Look,
) -> Vec<(String, String, String)> {
    if same(ours, theirs, look) {
        return Vec::new();
    }
    let tree = |state: &CpuState| serde_json::to_value(state).unwrap_or_default();
    let mut list = Differences::default();
    let [ours, theirs] = [ours, theirs].map(|state| tree(&comparable(state, look)));
    list.walk(String::new(), &ours, &theirs);
    list.found
}

/// What differs between the vector registers alone.
pub(super) fn vectors(ours: &XsaveArea, theirs: &XsaveArea) -> Vec<(String, String, String)> {
    let state = |xsave: &XsaveArea| CpuState {
        xsave: xsave.clone(),
        ..CpuState::reset()
    };
    differences(&state(ours), &state(theirs), Look::All)
}

fn same(ours: &CpuState, theirs: &CpuState, look: Look) -> bool {
    // Nearly always, so without the copies.
    let glance = (ours.gpr, ours.rip) == (theirs.gpr, theirs.rip)
        && (ours.rflags | HIDDEN) == (theirs.rflags | HIDDEN)
        && ours.seg == theirs.seg
        && (ours.tr, ours.ldtr) == (theirs.tr, theirs.ldtr)
        && (ours.gdtr, ours.idtr) == (theirs.gdtr, theirs.idtr)
        && (ours.cr0, ours.cr2, ours.cr3) == (theirs.cr0, theirs.cr2, theirs.cr3)
        && (ours.cr4, ours.efer) == (theirs.cr4, theirs.efer);
    match look {
        Look::Glance { .. } if glance => true,
        _ => comparable(ours, look) == comparable(theirs, look),
    }
}

/// A state with all that may differ made the same.
fn comparable(state: &CpuState, look: Look) -> CpuState {
    let mut to = CpuState::reset();
    to.gpr = state.gpr;
    to.rip = state.rip;
    to.rflags = state.rflags & !HIDDEN;
    to.seg = state.seg;
    for (index, segment) in to.seg.iter_mut().enumerate() {
        hide_unusable(segment, index == seg::FS || index == seg::GS);
    }
    (to.tr, to.ldtr) = (state.tr, state.ldtr);
    hide_unusable(&mut to.ldtr, false);
    (to.gdtr, to.idtr) = (state.gdtr, state.idtr);
    (to.cr0, to.cr2, to.cr3) = (state.cr0, state.cr2, state.cr3);
    (to.cr4, to.efer) = (state.cr4, state.efer);
    match look {
        Look::Glance { undefined } => to.rflags &= !undefined,
        Look::All => {
            (to.dr, to.dr6, to.dr7) = (state.dr, state.dr6, state.dr7);
            to.msrs = state.msrs;
            // With the models.
            to.msrs.fmask = 0;
            to.xsave = comparable_vectors(&state.xsave);
        }
    }
    to
}

/// Of a segment that cannot be used, processors keep different things.
fn hide_unusable(segment: &mut Segment, keeps_base: bool) {
    if segment.unusable {
        (segment.limit, segment.access) = (0, 0);
        if !keeps_base {
            segment.base = 0;
        }
    }
}

/// The registers of x87, SSE and AVX without what processors of different makers store otherwise: the
/// last x87 instruction's code and addresses, which components are in use, and what is reserved.
fn comparable_vectors(area: &XsaveArea) -> XsaveArea {
    let mut to = XsaveArea::default();
    let mut copy =
        |range: std::ops::Range<usize>| to.0[range.clone()].copy_from_slice(&area.0[range]);
    copy(0..5);
    copy(24..28);
    (0..8).for_each(|n| copy(32 + n * 16..42 + n * 16));
    copy(160..416);
    copy(576..832);
    to
}

/// Adds the words of a page that differ, but for accessed and dirty bits of what may be an entry of a
/// page table: a processor may set them earlier.
pub(super) fn page(
    gpa: u64,
    ours: &[u8; PAGE],
    theirs: &[u8; PAGE],
    found: &mut Vec<(String, String, String)>,
) {
    if ours == theirs {
        return;
    }
    for (at, (a, b)) in (gpa..).step_by(8).zip(ours.chunks(8).zip(theirs.chunks(8))) {
        let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
        let (one, two) = (word(a), word(b));
        let entry = one & two & 1 != 0 && (one ^ two) & !ACCESSED_DIRTY == 0;
        if one != two && !entry {
            found.push((format!("memory {at:#x}"), hex(a), hex(b)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_differ_is_not_seen_and_all_else_is() {
        let ours = CpuState::reset();
        let mut theirs = ours.clone();
        theirs.rflags |= HIDDEN | 1;
        theirs.xsave.0[8] = 1;
        let undefined = Look::Glance { undefined: 1 };
        assert!(differences(&ours, &theirs, undefined).is_empty());
        let found = differences(&ours, &theirs, Look::All);
        assert_eq!(
            found,
            [("rflags".to_owned(), "0x2".to_owned(), "0x3".to_owned())]
        );
        theirs.rflags = ours.rflags;
        theirs.xsave.0[160] = 1;
        assert!(differences(&ours, &theirs, undefined).is_empty());
        assert!(!differences(&ours, &theirs, Look::All).is_empty());
    }

    #[test]
    fn undefined_flags_are_those_of_the_manual() {
        let flags = |code: &[u8]| {
            let mut decoder = iced_x86::Decoder::new(64, code, iced_x86::DecoderOptions::NONE);
            undefined_flags(&decoder.decode())
        };
        // mul rcx; and eax, ecx; add eax, ecx
        assert_eq!(flags(&[0x48, 0xf7, 0xe1]), 0xd4);
        assert_eq!(flags(&[0x21, 0xc8]), 0x10);
        assert_eq!(flags(&[0x01, 0xc8]), 0);
    }

    #[test]
    fn accessed_bits_of_entries_may_differ_in_memory() {
        let (mut ours, mut theirs) = ([0; PAGE], [0; PAGE]);
        (ours[8], theirs[8]) = (0x27, 0x67);
        let mut found = Vec::new();
        page(0x1000, &ours, &theirs, &mut found);
        assert!(found.is_empty());
        theirs[16] = 0x20;
        page(0x1000, &ours, &theirs, &mut found);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].0, "memory 0x1010");
    }
}
