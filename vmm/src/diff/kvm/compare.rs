//! Compares the interpreter's registers and memory with KVM's, except for what may differ.

use hindsight_cpu::state::{CpuState, Segment, XsaveArea, seg};
use hindsight_regs::rflags::Rflags;
use iced_x86::{Instruction, RflagsBits};

use crate::diff::difference::{Difference, DifferenceList, memory_difference};
use crate::state::PAGE;

/// RF, which KVM may set when it stops for a debugger, and TF, which it sets for single-steps.
const IGNORED_FLAGS: u64 = Rflags::RF.union(Rflags::TF).bits();
/// The P bit of a paging-structure entry.
const PTE_PRESENT: u64 = 1 << 0;
/// The A and D bits of a paging-structure entry.
const PTE_ACCESSED_DIRTY: u64 = 1 << 5 | 1 << 6;

/// Which registers are compared.
#[derive(Clone, Copy, Debug)]
pub(super) enum CompareDepth {
    /// General, segment and control registers.
    Registers {
        /// The flags of RFLAGS that the instruction leaves undefined; they are not compared.
        undefined: u64,
    },
    /// All registers.
    All,
}

/// The flags that an instruction leaves undefined. SDM Vol. 1, "EFLAGS Cross-Reference".
pub(super) fn undefined_flags(instruction: &Instruction) -> u64 {
    let undefined = instruction.rflags_undefined();
    [
        (RflagsBits::CF, Rflags::CF),
        (RflagsBits::PF, Rflags::PF),
        (RflagsBits::AF, Rflags::AF),
        (RflagsBits::ZF, Rflags::ZF),
        (RflagsBits::SF, Rflags::SF),
        (RflagsBits::OF, Rflags::OF),
    ]
    .into_iter()
    .filter(|&(bit, _)| undefined & bit != 0)
    .fold(0, |flags, (_, flag)| flags | flag.bits())
}

/// Returns the registers that differ; the values are the interpreter's and KVM's.
pub(super) fn registers(interp: &CpuState, kvm: &CpuState, depth: CompareDepth) -> Vec<Difference> {
    if registers_equal(interp, kvm, depth) {
        return Vec::new();
    }
    let [interp, kvm] = [interp, kvm].map(|state| comparable(state, depth));
    DifferenceList::of_states(&interp, &kvm).differences
}

/// Returns the x87, SSE and AVX registers that differ.
pub(super) fn vector_registers(interp: &XsaveArea, kvm: &XsaveArea) -> Vec<Difference> {
    let [interp, kvm] = [interp, kvm].map(|xsave| CpuState {
        xsave: xsave.clone(),
        ..CpuState::reset()
    });
    registers(&interp, &kvm, CompareDepth::All)
}

fn registers_equal(interp: &CpuState, kvm: &CpuState, depth: CompareDepth) -> bool {
    // This is true after nearly all instructions, and needs no copies of the states.
    let equal = (interp.gpr, interp.rip) == (kvm.gpr, kvm.rip)
        && (interp.rflags | IGNORED_FLAGS) == (kvm.rflags | IGNORED_FLAGS)
        && interp.seg == kvm.seg
        && (interp.tr, interp.ldtr) == (kvm.tr, kvm.ldtr)
        && (interp.gdtr, interp.idtr) == (kvm.gdtr, kvm.idtr)
        && (interp.cr0, interp.cr2, interp.cr3) == (kvm.cr0, kvm.cr2, kvm.cr3)
        && (interp.cr4, interp.efer) == (kvm.cr4, kvm.efer);
    match depth {
        CompareDepth::Registers { .. } if equal => true,
        _ => comparable(interp, depth) == comparable(kvm, depth),
    }
}

/// Copies the registers that are compared at `depth`, and clears the bits that may differ.
fn comparable(state: &CpuState, depth: CompareDepth) -> CpuState {
    let mut copy = CpuState::reset();
    copy.gpr = state.gpr;
    copy.rip = state.rip;
    copy.rflags = state.rflags & !IGNORED_FLAGS;
    copy.seg = state.seg;
    for (index, segment) in copy.seg.iter_mut().enumerate() {
        clear_unusable(segment, index == seg::FS || index == seg::GS);
    }
    (copy.tr, copy.ldtr) = (state.tr, state.ldtr);
    clear_unusable(&mut copy.ldtr, false);
    (copy.gdtr, copy.idtr) = (state.gdtr, state.idtr);
    (copy.cr0, copy.cr2, copy.cr3) = (state.cr0, state.cr2, state.cr3);
    (copy.cr4, copy.efer) = (state.cr4, state.efer);
    match depth {
        CompareDepth::Registers { undefined } => copy.rflags &= !undefined,
        CompareDepth::All => {
            (copy.dr, copy.dr6, copy.dr7) = (state.dr, state.dr6, state.dr7);
            copy.msrs = state.msrs;
            // Our vCPU model holds the guest's IA32_FMASK, KVM holds another value.
            copy.msrs.fmask = 0;
            copy.xsave = comparable_xsave(&state.xsave);
        }
    }
    copy
}

/// Clears what processors keep in different ways in the descriptor cache of an unusable segment.
fn clear_unusable(segment: &mut Segment, keeps_base: bool) {
    if segment.unusable {
        (segment.limit, segment.access) = (0, 0);
        if !keeps_base {
            segment.base = 0;
        }
    }
}

/// Copies the x87, SSE and AVX registers.
///
/// Processors of different vendors store the rest of the area in different ways: the opcode and
/// pointers of the last x87 instruction, XSTATE_BV, and what is reserved.
fn comparable_xsave(area: &XsaveArea) -> XsaveArea {
    let mut to = XsaveArea::default();
    let mut copy =
        |range: std::ops::Range<usize>| to.0[range.clone()].copy_from_slice(&area.0[range]);
    // FCW, FSW and the abridged FTW.
    copy(0..5);
    // MXCSR.
    copy(24..28);
    // ST0 to ST7, of 10 bytes each.
    (0..8).for_each(|n| copy(32 + n * 16..42 + n * 16));
    // XMM0 to XMM15.
    copy(160..416);
    // The upper halves of YMM0 to YMM15.
    copy(576..832);
    to
}

/// Returns the 8-byte words of a page that differ.
///
/// The A and D bits of what may be a paging-structure entry are not compared, as a processor may
/// set them early.
pub(super) fn page(gpa: u64, interp: &[u8; PAGE], kvm: &[u8; PAGE]) -> Vec<Difference> {
    if interp == kvm {
        return Vec::new();
    }
    let number = |word: &[u8]| word.try_into().map_or(0, u64::from_le_bytes);
    let words = interp.chunks(8).zip(kvm.chunks(8));
    words
        .zip((gpa..).step_by(8))
        .filter_map(|((word_a, word_b), address)| {
            let (a, b) = (number(word_a), number(word_b));
            let early_update = a & b & PTE_PRESENT != 0 && (a ^ b) & !PTE_ACCESSED_DIRTY == 0;
            (a != b && !early_update).then(|| memory_difference(address, word_a, word_b))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_that_may_differ_are_ignored() {
        let interp = CpuState::reset();
        let mut kvm = interp.clone();
        kvm.rflags |= IGNORED_FLAGS | 1;
        kvm.xsave.0[8] = 1;
        let undefined = CompareDepth::Registers { undefined: 1 };
        assert!(registers(&interp, &kvm, undefined).is_empty());
        let expected = Difference {
            name: "rflags".to_owned(),
            values: ["0x2".to_owned(), "0x3".to_owned()],
        };
        assert_eq!(registers(&interp, &kvm, CompareDepth::All), [expected]);
        kvm.rflags = interp.rflags;
        kvm.xsave.0[160] = 1;
        assert!(registers(&interp, &kvm, undefined).is_empty());
        assert!(!registers(&interp, &kvm, CompareDepth::All).is_empty());
    }

    #[test]
    fn undefined_flags_match_the_manual() {
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
    fn accessed_and_dirty_bits_may_differ_in_memory() {
        let (mut interp, mut kvm) = ([0; PAGE], [0; PAGE]);
        (interp[8], kvm[8]) = (0x27, 0x67);
        assert!(page(0x1000, &interp, &kvm).is_empty());
        kvm[16] = 0x20;
        let found = page(0x1000, &interp, &kvm);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].name, "memory 0x1010");
    }
}
