//! Decides which vector instructions need an aligned memory operand.

use iced_x86::{EncodingKind, Instruction, Mnemonic as M};

/// Whether a vector instruction needs its operand of `size` bytes aligned to `size`.
pub(crate) fn needs_alignment(i: &Instruction, size: usize) -> bool {
    match i.mnemonic() {
        M::Movups
        | M::Movupd
        | M::Movdqu
        | M::Lddqu
        | M::Pcmpestri
        | M::Pcmpestrm
        | M::Pcmpistri
        | M::Pcmpistrm
        | M::Pcmpestri64
        | M::Pcmpestrm64 => false,
        M::Movaps
        | M::Movapd
        | M::Movdqa
        | M::Movntdq
        | M::Movntdqa
        | M::Movntps
        | M::Movntpd
        | M::Vmovaps
        | M::Vmovapd
        | M::Vmovdqa
        | M::Vmovdqa32
        | M::Vmovdqa64
        | M::Vmovntdq
        | M::Vmovntdqa
        | M::Vmovntps
        | M::Vmovntpd => true,
        _ => size == 16 && i.encoding() == EncodingKind::Legacy,
    }
}
