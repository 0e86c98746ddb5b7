//! Random instructions and state.

use iced_x86::{
    Code, CpuidFeature as F, Decoder, DecoderOptions, FlowControl, Formatter, GasFormatter,
    Instruction, Mnemonic as M, OpKind, Register,
};

/// Linear address of the data pages, on the host and in the guest.
pub const DATA: u64 = 0x4000_0000;
/// How many there are.
pub const PAGES: usize = 2;

/// xorshift64*.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    pub fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 33) % n
    }
    fn byte(&mut self) -> u8 {
        (self.next() >> 40) as u8
    }
}

/// One instruction with the state it starts from.
pub struct Case {
    pub seed: u64,
    /// 64, or 32 for compatibility mode.
    pub bits: u32,
    pub insn: Instruction,
    pub bytes: Vec<u8>,
    pub gpr: [u64; 16],
    pub flags: u64,
    pub vectors: Vec<u8>,
    pub opmasks: [u64; 8],
    pub mxcsr: u32,
    pub x87: Vec<u8>,
    pub memory: Vec<u8>,
}

fn value(r: &mut Rng) -> u64 {
    let v = r.next();
    match r.below(12) {
        0 => 0,
        1 => u64::MAX,
        2 => 1 << r.below(64),
        3 => (1 << r.below(64)) - 1,
        4 => v & 0xff,
        5 => v & 0xffff_ffff,
        6 => 0x8000_0000,
        7 => 0x7fff_ffff,
        _ => v,
    }
}

/// An address in the data pages, often near the page boundary.
fn address(r: &mut Rng) -> u64 {
    DATA + match r.below(3) {
        0 => 0x1000 - 64 + r.below(128),
        _ => 0x400 + r.below(0x1800),
    }
}

fn float(r: &mut Rng, out: &mut [u8]) {
    let v = r.next();
    let bits = match r.below(6) {
        0 => (r.below(1000) as f64 - 500.0).to_bits(),
        1 => u64::from((r.below(1000) as f32 * 0.37 - 100.0).to_bits()) * 0x1_0000_0001,
        2 => [
            0,
            1 << 63,
            0x7ff0_0000_0000_0000,
            0x7ff8_0000_0000_0001,
            1,
            0x3ff0_0000_0000_0000,
        ][r.below(6) as usize],
        3 => {
            u64::from(
                [0_u32, 0x8000_0000, 0x7f80_0000, 0x7fc0_0001, 1, 0x7f7f_ffff][r.below(6) as usize],
            ) * 0x1_0000_0001
        }
        _ => v,
    };
    out.copy_from_slice(&bits.to_le_bytes());
}

impl Case {
    pub fn new(seed: u64, bits: u32) -> Self {
        let mut r = Rng(seed | 1);
        r.next();
        let (insn, bytes) = instruction(&mut r, bits);
        let mut gpr = [0; 16];
        for g in &mut gpr {
            *g = value(&mut r);
        }
        gpr[4] = DATA + 0x1000 + r.below(0x80) * 8;
        // Registers that make an address lead to the data, more often than not.
        if insn.op_kinds().any(|k| k == OpKind::Memory) && r.below(16) != 0 {
            let (base, index) = (insn.memory_base(), insn.memory_index());
            let mut sum = insn.memory_displacement64();
            if index.is_gpr() && index != base {
                let v = if bit_index(&insn) {
                    r.below(64)
                } else {
                    value(&mut r) & 0xff
                };
                gpr[index.full_register().number()] = v;
                sum = sum.wrapping_add(v.wrapping_mul(insn.memory_index_scale().into()));
            }
            let mut to = address(&mut r);
            if r.below(2) == 0 || insn.memory_size().size() >= 16 {
                to &= !63;
            }
            if base.is_gpr() && base.full_register() != Register::RSP {
                let scale = if base == index {
                    1 + u64::from(insn.memory_index_scale())
                } else {
                    1
                };
                gpr[base.full_register().number()] = to.wrapping_sub(sum) / scale;
            }
        }
        if bit_index(&insn) {
            let n = insn.op1_register().full_register().number();
            let base = insn.memory_base();
            if !base.is_gpr() || base.full_register().number() != n {
                gpr[n] %= 1024;
            }
        }
        if insn.is_string_instruction()
            || matches!(
                insn.mnemonic(),
                M::Xlatb | M::Maskmovdqu | M::Maskmovq | M::Vmaskmovdqu
            )
        {
            (gpr[6], gpr[7]) = (address(&mut r), address(&mut r));
            gpr[3] = address(&mut r);
            gpr[1] = r.below(20);
        }
        if insn.mnemonic() == M::Leave || insn.mnemonic() == M::Enter {
            gpr[5] = address(&mut r);
        }
        if bits == 32 {
            for g in &mut gpr {
                *g &= 0xffff_ffff;
            }
            gpr[8..].fill(0);
        }
        let flags = 0x202 | (r.next() & 0x8d5) | if r.below(4) == 0 { 0x400 } else { 0 };
        let mut memory = vec![0; PAGES * 0x1000];
        for chunk in memory.chunks_mut(8) {
            float(&mut r, chunk);
        }
        let mut vectors = vec![0; 32 * 64];
        for chunk in vectors.chunks_mut(8) {
            float(&mut r, chunk);
        }
        let mut opmasks = [0; 8];
        for k in &mut opmasks {
            *k = value(&mut r);
        }
        let mxcsr = if r.below(4) == 0 {
            0x1f80 | (r.next() as u32 & 0xe07f)
        } else {
            0x1f80
        };
        let mut x87 = vec![0; 160];
        x87[..2].copy_from_slice(&0x37f_u16.to_le_bytes());
        let top = r.below(8) as u8;
        x87[3] = top << 3;
        x87[4] = if r.below(8) == 0 { r.byte() } else { 0xff };
        for reg in x87[32..].chunks_mut(16) {
            let v = r.next() | 1 << 63;
            reg[..8].copy_from_slice(&v.to_le_bytes());
            let e = (0x3fff - 20 + r.below(40) as u16) | ((r.byte() as u16 & 1) << 15);
            reg[8..10].copy_from_slice(&e.to_le_bytes());
        }
        Self {
            seed,
            bits,
            insn,
            bytes,
            gpr,
            flags,
            vectors,
            opmasks,
            mxcsr,
            x87,
            memory,
        }
    }

    pub fn text(&self) -> String {
        let mut text = String::new();
        GasFormatter::new().format(&self.insn, &mut text);
        text
    }
}

/// BT and its relatives with a register bit number: it leads far from the operand.
fn bit_index(i: &Instruction) -> bool {
    matches!(i.mnemonic(), M::Bt | M::Bts | M::Btr | M::Btc) && i.op1_kind() == OpKind::Register
}

fn instruction(r: &mut Rng, bits: u32) -> (Instruction, Vec<u8>) {
    loop {
        let bytes = raw(r, bits);
        let mut d = Decoder::with_ip(bits, &bytes, super::RIP, DecoderOptions::NONE);
        let insn = d.decode();
        if insn.is_invalid() || !wanted(&insn) {
            continue;
        }
        return (insn, bytes[..insn.len()].to_vec());
    }
}

fn raw(r: &mut Rng, bits: u32) -> Vec<u8> {
    let mut b = Vec::new();
    if r.below(8) == 0 {
        b.push(0xf0);
    }
    if r.below(4) == 0 {
        b.push(0x66);
    }
    match r.below(8) {
        0 => b.push(0xf2),
        1 => b.push(0xf3),
        _ => {}
    }
    if r.below(20) == 0 {
        b.push(0x67);
    }
    let kind = r.below(8);
    match kind {
        0 => {
            // VEX.
            b.clear();
            b.extend([
                0xc4,
                (r.byte() & 0xe0) | (1 + r.below(3) as u8),
                r.byte(),
                r.byte(),
            ]);
        }
        1 => {
            // EVEX.
            b.clear();
            b.extend([
                0x62,
                (r.byte() & 0xf0) | (1 + r.below(3) as u8),
                r.byte() | 4,
                r.byte(),
                r.byte(),
            ]);
        }
        _ => {
            if bits == 64 && r.below(2) == 0 {
                b.push(0x40 | (r.byte() & 15));
            }
            match kind {
                2..=4 => b.push(r.byte()),
                5 | 6 => b.extend([0x0f, r.byte()]),
                _ => b.extend([0x0f, if r.below(2) == 0 { 0x38 } else { 0x3a }, r.byte()]),
            }
        }
    }
    // ModRM: prefer registers and short displacements.
    let modrm = r.byte();
    b.push(match r.below(4) {
        0 => modrm | 0xc0,
        1 => (modrm & 0x3f) | 0x40,
        _ => modrm,
    });
    for _ in 0..10 {
        let v = r.byte();
        b.push(v);
    }
    b
}

/// May be executed by both, with results that can be compared.
fn wanted(i: &Instruction) -> bool {
    if i.flow_control() != FlowControl::Next || i.is_privileged() || i.is_vsib() {
        return false;
    }
    let bad = matches!(
        i.mnemonic(),
        M::Popf
            | M::Popfd
            | M::Popfq
            | M::Rdtsc
            | M::Rdtscp
            | M::Rdpid
            | M::Rdrand
            | M::Rdseed
            | M::Rdpmc
            | M::Rdpru
            | M::Cpuid
            | M::Sgdt
            | M::Sidt
            | M::Sldt
            | M::Str
            | M::Smsw
            | M::Lar
            | M::Lsl
            | M::Verr
            | M::Verw
            | M::Rdfsbase
            | M::Rdgsbase
            | M::Wrfsbase
            | M::Wrgsbase
            | M::Xgetbv
            | M::Xsetbv
            | M::In
            | M::Out
            | M::Insb
            | M::Insw
            | M::Insd
            | M::Outsb
            | M::Outsw
            | M::Outsd
            | M::Lss
            | M::Lds
            | M::Les
            | M::Lfs
            | M::Lgs
            | M::Monitor
            | M::Mwait
            | M::Monitorx
            | M::Mwaitx
            | M::Rdpkru
            | M::Wrpkru
            | M::Clzero
            | M::Fxsave
            | M::Fxrstor
            | M::Fxsave64
            | M::Fxrstor64
            | M::Ldmxcsr
            | M::Vldmxcsr
            | M::Stac
            | M::Clac
            | M::Ptwrite
            | M::Rdsspd
            | M::Rdsspq
            | M::Incsspd
            | M::Incsspq
            | M::Wrussd
            | M::Wrussq
            | M::Wrssd
            | M::Wrssq
            | M::Saveprevssp
            | M::Rstorssp
            | M::Setssbsy
            | M::Clrssbsy
            | M::Umonitor
            | M::Umwait
            | M::Tpause
            | M::Enqcmd
            | M::Movdir64b
            | M::Cldemote
            | M::Maskmovq
            | M::Maskmovdqu
            | M::Vmaskmovdqu
            | M::Swapgs
            | M::Clui
            | M::Stui
            | M::Testui
            | M::Serialize
            | M::Fnsave
            | M::Frstor
            | M::Fldenv
            | M::Fnstenv
            | M::Fldcw
            | M::Fnstsw
            | M::Ud0
            | M::Ud1
            | M::Ud2
            | M::Ffreep
            | M::Fdisi
            | M::Feni
            | M::Fnsetpm
            | M::Llwpcb
            | M::Slwpcb
            | M::Lwpins
            | M::Lwpval
    );
    let features = i.cpuid_features().iter().any(|f| {
        matches!(
            f,
            F::PADLOCK_ACE
                | F::PADLOCK_PHE
                | F::PADLOCK_PMM
                | F::PADLOCK_RNG
                | F::PADLOCK_UNDOC
                | F::PADLOCK_GMI
                | F::RAO_INT
                | F::KL
                | F::WIDE_KL
                | F::XSAVE
                | F::XSAVEC
                | F::XSAVEOPT
                | F::XSAVES
                | F::RTM
                | F::XOP
                | F::FMA4
                | F::SSE4A
                | F::MPX
                | F::CET_SS
                | F::PKU
                | F::D3NOW
                | F::D3NOWEXT
                | F::AMX_TILE
                | F::TBM
                | F::FPU
                | F::FPU287
                | F::FPU387
        )
    }) && !x87(i);
    let segment = (0..i.op_count()).any(|n| i.op_register(n).is_segment_register());
    let tls = matches!(i.memory_segment(), Register::FS | Register::GS)
        && (0..i.op_count()).any(|n| {
            !matches!(
                i.op_kind(n),
                OpKind::Register | OpKind::Immediate8 | OpKind::Immediate32
            )
        });
    // RIP-relative data would be the code of one side only.
    let relative = i.is_ip_rel_memory_operand();
    let absolute = i.op_kinds().any(|k| k == OpKind::Memory) && i.memory_base() == Register::None;
    // Where AMD and Intel processors differ.
    let differs = i.mnemonic() == M::Pause
        || i.mnemonic() == M::Reservednop
        || i.cpuid_features().contains(&F::SHA);
    let undefined = matches!(i.code(), Code::Bswap_r16)
        || (matches!(i.mnemonic(), M::Shld | M::Shrd)
            && i.op0_kind() == OpKind::Register
            && i.op0_register().size() == 2)
        || (matches!(i.mnemonic(), M::Shld | M::Shrd) && i.memory_size().size() == 2);
    let rsp = (0..i.op_count()).any(|n| {
        i.op_kind(n) == OpKind::Register && i.op_register(n).full_register() == Register::RSP
    }) && i.is_stack_instruction();
    !bad && !features
        && !segment
        && !tls
        && !relative
        && !absolute
        && !undefined
        && !differs
        && !rsp
        && shown(i)
}

fn x87(i: &Instruction) -> bool {
    i.cpuid_features()
        .iter()
        .any(|f| matches!(f, F::FPU | F::FPU287 | F::FPU387))
}

/// The interpreter knows the extension.
fn shown(i: &Instruction) -> bool {
    i.cpuid_features().iter().all(|f| {
        !matches!(
            f,
            F::AVX512_BF16
                | F::AVX512_VP2INTERSECT
                | F::AVX512_FP16
                | F::AVX_VNNI
                | F::SM3
                | F::SM4
                | F::SHA512
                | F::AVX_IFMA
                | F::AVX_NE_CONVERT
                | F::AVX_VNNI_INT8
                | F::AVX_VNNI_INT16
                | F::CMPCCXADD
                | F::MOVDIRI
                | F::MOVDIR64B
                | F::AVX512ER
                | F::AVX512PF
                | F::AVX512_4FMAPS
                | F::AVX512_4VNNIW
                | F::WAITPKG
                | F::KNC
                | F::HRESET
                | F::SSE4A
                | F::MSR
        )
    })
}
