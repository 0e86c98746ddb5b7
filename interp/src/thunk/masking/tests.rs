//! Tests which elements masked instructions access, by kind of memory operand.

use super::*;
use iced_x86::{Code, EncodingKind, MemoryOperand, OpCodeOperandKind, Register};

const AT: MemoryOperand = MemoryOperand {
    segment_prefix: Register::None,
    base: Register::RAX,
    index: Register::None,
    scale: 1,
    displacement: 0,
    displ_size: 0,
    is_broadcast: false,
};
const BROADCAST: MemoryOperand = MemoryOperand {
    is_broadcast: true,
    ..AT
};

fn load(code: Code, to: Register, from: MemoryOperand) -> Instruction {
    under_k1(Instruction::with2(code, to, from).unwrap())
}

fn load_op(code: Code, to: Register, with: Register, from: MemoryOperand) -> Instruction {
    under_k1(Instruction::with3(code, to, with, from).unwrap())
}

fn store(code: Code, from: Register) -> Instruction {
    under_k1(Instruction::with2(code, AT, from).unwrap())
}

fn under_k1(mut i: Instruction) -> Instruction {
    i.set_op_mask(Register::K1);
    i
}

#[test]
fn mask_selects_the_elements_that_are_accessed() {
    use Code::*;
    use Register::{XMM1, XMM2, YMM1, YMM2, ZMM1, ZMM2};
    let compare = Instruction::with4(
        EVEX_Vcmppd_kr_k1_ymm_ymmm256b64_imm8,
        Register::K2,
        YMM1,
        BROADCAST,
        0,
    );
    let compare = under_k1(compare.unwrap());
    let top = 1 << 63;
    // Each row: instruction, mask, bytes of an element, accessed elements.
    let rows = [
        (
            load(EVEX_Vmovdqu8_zmm_k1z_zmmm512, ZMM1, AT),
            top | 1,
            1,
            top | 1,
        ),
        (
            load_op(EVEX_Vaddps_xmm_k1z_xmm_xmmm128b32, XMM1, XMM2, AT),
            0xf5,
            4,
            5,
        ),
        (
            load_op(EVEX_Vaddss_xmm_k1z_xmm_xmmm32_er, XMM1, XMM2, AT),
            2,
            4,
            0,
        ),
        (
            load_op(EVEX_Vaddss_xmm_k1z_xmm_xmmm32_er, XMM1, XMM2, AT),
            3,
            4,
            1,
        ),
        (store(EVEX_Vmovsd_m64_k1_xmm, XMM1), 6, 8, 0),
        // A broadcast: one element in memory for all elements of the result.
        (
            load_op(EVEX_Vaddpd_zmm_k1z_zmm_zmmm512b64_er, ZMM1, ZMM2, BROADCAST),
            0x80,
            8,
            1,
        ),
        (
            load_op(EVEX_Vaddpd_zmm_k1z_zmm_zmmm512b64_er, ZMM1, ZMM2, BROADCAST),
            0x100,
            8,
            0,
        ),
        (compare, 8, 8, 1),
        (compare, 0x10, 8, 0),
        (
            load(EVEX_Vcvtps2pd_zmm_k1z_ymmm256b32_sae, ZMM1, BROADCAST),
            0x100,
            4,
            0,
        ),
        (
            load(EVEX_Vcvtpd2ps_ymm_k1z_zmmm512b64_er, YMM1, BROADCAST),
            0x80,
            8,
            1,
        ),
        (
            load(EVEX_Vpbroadcastw_zmm_k1z_xmmm16, ZMM1, AT),
            1 << 31,
            2,
            1,
        ),
        (
            load(EVEX_Vpbroadcastw_zmm_k1z_xmmm16, ZMM1, AT),
            1 << 32,
            2,
            0,
        ),
        (
            load(EVEX_Vbroadcastf32x4_zmm_k1z_m128, ZMM1, AT),
            0x8210,
            4,
            0b1011,
        ),
        (
            load(EVEX_Vbroadcasti64x4_zmm_k1z_m256, ZMM1, AT),
            0x44,
            8,
            0b100,
        ),
        // Sums of products: one mask bit for each sum.
        (
            load_op(EVEX_Vpdpbusd_ymm_k1z_ymm_ymmm256b32, YMM1, YMM2, AT),
            0x181,
            4,
            0x81,
        ),
        // The elements are narrower in memory than in the register.
        (
            load(EVEX_Vpmovsxbq_zmm_k1z_xmmm64, ZMM1, AT),
            0x181,
            1,
            0x81,
        ),
        (store(EVEX_Vpmovqb_xmmm64_k1z_zmm, ZMM1), 0x181, 1, 0x81),
        (
            store(EVEX_Vpmovwb_ymmm256_k1z_zmm, ZMM1),
            1 << 31,
            1,
            1 << 31,
        ),
        // The elements are contiguous in memory.
        (
            store(EVEX_Vpcompressb_zmmm512_k1z_zmm, ZMM1),
            top | 0xf0,
            1,
            0x1f,
        ),
        (
            load(EVEX_Vpexpandd_xmm_k1z_xmmm128, XMM1, AT),
            0xfa,
            4,
            0b11,
        ),
    ];
    for (i, mask, element, elements) in rows {
        let masking = Masking::of(&i).unwrap();
        let mut vectors = Vectors::default();
        vectors.k[1] = mask;
        let found = (masking.element, masking.elements(&vectors));
        assert_eq!(found, (element, elements), "{:?} {mask:#x}", i.code());
        assert!(masking.suppresses, "{:?}", i.code());
    }
}

#[test]
fn vmaskmov_selects_by_sign_bits() {
    let (to, mask) = (Register::YMM1, Register::YMM2);
    let code = Code::VEX_Vpmaskmovd_ymm_ymm_m256;
    let i = Instruction::with3(code, to, mask, AT).unwrap();
    let mut vectors = Vectors::default();
    (vectors.zmm[2][3], vectors.zmm[2][4], vectors.zmm[2][31]) = (0x80, 0xff, 0xff);
    let masking = Masking::of(&i).unwrap();
    assert_eq!((masking.element, masking.elements(&vectors)), (4, 0x81));
}

#[test]
fn unmasked_instruction_accesses_the_whole_operand() {
    let mut i = load(Code::EVEX_Vmovups_zmm_k1z_zmmm512, Register::ZMM1, AT);
    i.set_op_mask(Register::None);
    assert_eq!(Masking::of(&i), None);
}

#[test]
fn load_without_fault_suppression_accesses_the_whole_operand() {
    use Code::*;
    use Register::{XMM1, XMM2, ZMM1, ZMM2};
    let insert = Instruction::with4(
        EVEX_Vinserti32x4_zmm_k1z_zmm_xmmm128_imm8,
        ZMM1,
        ZMM2,
        AT,
        1,
    );
    let rows = [
        load_op(EVEX_Vpshufb_zmm_k1z_zmm_zmmm512, ZMM1, ZMM2, AT),
        load_op(EVEX_Vpmaddubsw_zmm_k1z_zmm_zmmm512, ZMM1, ZMM2, AT),
        load_op(EVEX_Vpermt2ps_zmm_k1z_zmm_zmmm512b32, ZMM1, ZMM2, BROADCAST),
        load_op(EVEX_Vpsllw_zmm_k1z_zmm_xmmm128, ZMM1, ZMM2, AT),
        load(EVEX_Vmovddup_xmm_k1z_xmmm64, XMM1, AT),
        load(EVEX_Vpconflictd_xmm_k1z_xmmm128b32, XMM2, AT),
        under_k1(insert.unwrap()),
    ];
    for i in rows {
        assert_eq!(Masking::of(&i), None, "{:?}", i.code());
    }
}

#[test]
fn shift_by_immediate_suppresses_faults() {
    let code = Code::EVEX_Vpsllw_zmm_k1z_zmmm512_imm8;
    let i = under_k1(Instruction::with3(code, Register::ZMM1, AT, 3).unwrap());
    assert!(Masking::of(&i).unwrap().suppresses);
}

#[test]
fn extraction_checks_the_whole_operand() {
    let code = Code::EVEX_Vextractf32x4_xmmm128_k1z_zmm_imm8;
    let i = under_k1(Instruction::with3(code, AT, Register::ZMM1, 3).unwrap());
    assert!(!Masking::of(&i).unwrap().suppresses);
}

/// Returns an instruction with this code and a memory operand, if there is one.
fn example(code: Code) -> Option<Instruction> {
    let mut i = Instruction::default();
    i.set_code(code);
    let mut memory = false;
    for n in 0..code.op_code().op_count() {
        let kind = format!("{:?}", code.op_code().op_kind(n));
        let register = [
            ("zmm", Register::ZMM1),
            ("ymm", Register::YMM1),
            ("xmm", Register::XMM1),
        ];
        if kind == "mem" || kind.ends_with("_or_mem") {
            i.set_op_kind(n, OpKind::Memory);
            memory = true;
        } else if code.op_code().op_kind(n) == OpCodeOperandKind::imm8 {
            i.set_op_kind(n, OpKind::Immediate8);
        } else {
            let found = register.iter().find(|(name, _)| kind.starts_with(name));
            i.set_op_kind(n, OpKind::Register);
            i.set_op_register(n, found.map_or(Register::K2, |f| f.1));
        }
    }
    memory.then(|| under_k1(i))
}

#[test]
fn elements_fill_every_masked_operand() {
    let masked = Code::values().filter(|c| {
        let op_code = c.op_code();
        op_code.encoding() == EncodingKind::EVEX && op_code.can_use_op_mask_register()
    });
    let mut tested = 0;
    for mut i in masked.filter_map(example) {
        for broadcast in [false, true] {
            if broadcast && !i.op_code().can_broadcast() {
                continue;
            }
            i.set_is_broadcast(broadcast);
            let Some(masking) = Masking::of(&i) else {
                continue;
            };
            let size = masking.element * masking.count;
            assert_eq!(size, i.memory_size().size(), "{:?}", i.code());
            assert_eq!(masking.lanes % masking.count, 0, "{:?}", i.code());
            assert!(masking.lanes <= 64, "{:?}", i.code());
            tested += 1;
        }
    }
    assert!(tested > 1000, "{tested}");
}
