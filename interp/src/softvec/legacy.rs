//! Instructions of SSE3 to SSE4.2, AES, PCLMULQDQ and GFNI, by the VEX instructions that equal
//! them.

use iced_x86::Mnemonic as M;

/// How a legacy instruction corresponds to one with a VEX encoding.
#[derive(Clone, Copy, Debug)]
pub(super) struct Equivalent {
    pub(super) mnemonic: M,
    /// Whether the destination is the first source too.
    pub(super) destructive: bool,
}

/// Returns the equivalent of an instruction on XMM registers.
pub(super) fn equivalent(m: M) -> Option<Equivalent> {
    let make = |destructive| {
        move |mnemonic| Equivalent {
            mnemonic,
            destructive,
        }
    };
    two_sources(m)
        .map(make(true))
        .or_else(|| one_source(m).map(make(false)))
}

fn two_sources(m: M) -> Option<M> {
    Some(match m {
        M::Addsubpd => M::Vaddsubpd,
        M::Addsubps => M::Vaddsubps,
        M::Haddpd => M::Vhaddpd,
        M::Haddps => M::Vhaddps,
        M::Hsubpd => M::Vhsubpd,
        M::Hsubps => M::Vhsubps,
        M::Palignr => M::Vpalignr,
        M::Phaddd => M::Vphaddd,
        M::Phaddsw => M::Vphaddsw,
        M::Phaddw => M::Vphaddw,
        M::Phsubd => M::Vphsubd,
        M::Phsubsw => M::Vphsubsw,
        M::Phsubw => M::Vphsubw,
        M::Pmaddubsw => M::Vpmaddubsw,
        M::Pmulhrsw => M::Vpmulhrsw,
        M::Pshufb => M::Vpshufb,
        M::Psignb => M::Vpsignb,
        M::Psignd => M::Vpsignd,
        M::Psignw => M::Vpsignw,
        M::Blendpd => M::Vblendpd,
        M::Blendps => M::Vblendps,
        M::Blendvpd => M::Vblendvpd,
        M::Blendvps => M::Vblendvps,
        M::Dppd => M::Vdppd,
        M::Dpps => M::Vdpps,
        M::Insertps => M::Vinsertps,
        M::Mpsadbw => M::Vmpsadbw,
        M::Packusdw => M::Vpackusdw,
        M::Pblendvb => M::Vpblendvb,
        M::Pblendw => M::Vpblendw,
        M::Pcmpeqq => M::Vpcmpeqq,
        M::Pinsrb => M::Vpinsrb,
        M::Pinsrd => M::Vpinsrd,
        M::Pinsrq => M::Vpinsrq,
        M::Pmaxsb => M::Vpmaxsb,
        M::Pmaxsd => M::Vpmaxsd,
        M::Pmaxud => M::Vpmaxud,
        M::Pmaxuw => M::Vpmaxuw,
        M::Pminsb => M::Vpminsb,
        M::Pminsd => M::Vpminsd,
        M::Pminud => M::Vpminud,
        M::Pminuw => M::Vpminuw,
        M::Pmuldq => M::Vpmuldq,
        M::Pmulld => M::Vpmulld,
        M::Roundsd => M::Vroundsd,
        M::Roundss => M::Vroundss,
        M::Pcmpgtq => M::Vpcmpgtq,
        M::Aesdec => M::Vaesdec,
        M::Aesdeclast => M::Vaesdeclast,
        M::Aesenc => M::Vaesenc,
        M::Aesenclast => M::Vaesenclast,
        M::Gf2p8affineinvqb => M::Vgf2p8affineinvqb,
        M::Gf2p8affineqb => M::Vgf2p8affineqb,
        M::Gf2p8mulb => M::Vgf2p8mulb,
        M::Pclmulqdq => M::Vpclmulqdq,
        _ => return None,
    })
}

fn one_source(m: M) -> Option<M> {
    Some(match m {
        M::Lddqu => M::Vlddqu,
        M::Movddup => M::Vmovddup,
        M::Movshdup => M::Vmovshdup,
        M::Movsldup => M::Vmovsldup,
        M::Pabsb => M::Vpabsb,
        M::Pabsd => M::Vpabsd,
        M::Pabsw => M::Vpabsw,
        M::Extractps => M::Vextractps,
        M::Movntdqa => M::Vmovntdqa,
        M::Pextrb => M::Vpextrb,
        M::Pextrd => M::Vpextrd,
        M::Pextrq => M::Vpextrq,
        M::Pextrw => M::Vpextrw,
        M::Phminposuw => M::Vphminposuw,
        M::Pmovsxbd => M::Vpmovsxbd,
        M::Pmovsxbq => M::Vpmovsxbq,
        M::Pmovsxbw => M::Vpmovsxbw,
        M::Pmovsxdq => M::Vpmovsxdq,
        M::Pmovsxwd => M::Vpmovsxwd,
        M::Pmovsxwq => M::Vpmovsxwq,
        M::Pmovzxbd => M::Vpmovzxbd,
        M::Pmovzxbq => M::Vpmovzxbq,
        M::Pmovzxbw => M::Vpmovzxbw,
        M::Pmovzxdq => M::Vpmovzxdq,
        M::Pmovzxwd => M::Vpmovzxwd,
        M::Pmovzxwq => M::Vpmovzxwq,
        M::Ptest => M::Vptest,
        M::Roundpd => M::Vroundpd,
        M::Roundps => M::Vroundps,
        M::Pcmpestri => M::Vpcmpestri,
        M::Pcmpestri64 => M::Vpcmpestri64,
        M::Pcmpestrm => M::Vpcmpestrm,
        M::Pcmpestrm64 => M::Vpcmpestrm64,
        M::Pcmpistri => M::Vpcmpistri,
        M::Pcmpistrm => M::Vpcmpistrm,
        M::Aesimc => M::Vaesimc,
        M::Aeskeygenassist => M::Vaeskeygenassist,
        _ => return None,
    })
}
