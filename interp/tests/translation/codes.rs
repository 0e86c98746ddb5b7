//! Instruction codes by operation, and by operand size: 1, 2, 4 and 8 bytes.

use iced_x86::Code;

macro_rules! codes {
    ($($suffix:ident: $($name:ident)*);* $(;)?) => { [$([$(Code::$name),*]),*] };
}

#[rustfmt::skip]
pub const RM_R: [[Code; 4]; 8] = codes!(
    a: Add_rm8_r8 Add_rm16_r16 Add_rm32_r32 Add_rm64_r64; b: Or_rm8_r8 Or_rm16_r16 Or_rm32_r32 Or_rm64_r64;
    c: Adc_rm8_r8 Adc_rm16_r16 Adc_rm32_r32 Adc_rm64_r64; d: Sbb_rm8_r8 Sbb_rm16_r16 Sbb_rm32_r32 Sbb_rm64_r64;
    e: And_rm8_r8 And_rm16_r16 And_rm32_r32 And_rm64_r64; f: Sub_rm8_r8 Sub_rm16_r16 Sub_rm32_r32 Sub_rm64_r64;
    g: Xor_rm8_r8 Xor_rm16_r16 Xor_rm32_r32 Xor_rm64_r64; h: Cmp_rm8_r8 Cmp_rm16_r16 Cmp_rm32_r32 Cmp_rm64_r64;
);
#[rustfmt::skip]
pub const R_RM: [[Code; 4]; 8] = codes!(
    a: Add_r8_rm8 Add_r16_rm16 Add_r32_rm32 Add_r64_rm64; b: Or_r8_rm8 Or_r16_rm16 Or_r32_rm32 Or_r64_rm64;
    c: Adc_r8_rm8 Adc_r16_rm16 Adc_r32_rm32 Adc_r64_rm64; d: Sbb_r8_rm8 Sbb_r16_rm16 Sbb_r32_rm32 Sbb_r64_rm64;
    e: And_r8_rm8 And_r16_rm16 And_r32_rm32 And_r64_rm64; f: Sub_r8_rm8 Sub_r16_rm16 Sub_r32_rm32 Sub_r64_rm64;
    g: Xor_r8_rm8 Xor_r16_rm16 Xor_r32_rm32 Xor_r64_rm64; h: Cmp_r8_rm8 Cmp_r16_rm16 Cmp_r32_rm32 Cmp_r64_rm64;
);
#[rustfmt::skip]
pub const RM_IMM: [[Code; 4]; 8] = codes!(
    a: Add_rm8_imm8 Add_rm16_imm8 Add_rm32_imm8 Add_rm64_imm8; b: Or_rm8_imm8 Or_rm16_imm8 Or_rm32_imm8 Or_rm64_imm8;
    c: Adc_rm8_imm8 Adc_rm16_imm8 Adc_rm32_imm8 Adc_rm64_imm8; d: Sbb_rm8_imm8 Sbb_rm16_imm8 Sbb_rm32_imm8 Sbb_rm64_imm8;
    e: And_rm8_imm8 And_rm16_imm8 And_rm32_imm8 And_rm64_imm8; f: Sub_rm8_imm8 Sub_rm16_imm8 Sub_rm32_imm8 Sub_rm64_imm8;
    g: Xor_rm8_imm8 Xor_rm16_imm8 Xor_rm32_imm8 Xor_rm64_imm8; h: Cmp_rm8_imm8 Cmp_rm16_imm8 Cmp_rm32_imm8 Cmp_rm64_imm32;
);
#[rustfmt::skip]
pub const UNARY: [[Code; 4]; 4] = codes!(
    a: Inc_rm8 Inc_rm16 Inc_rm32 Inc_rm64; b: Dec_rm8 Dec_rm16 Dec_rm32 Dec_rm64;
    c: Neg_rm8 Neg_rm16 Neg_rm32 Neg_rm64; d: Not_rm8 Not_rm16 Not_rm32 Not_rm64;
);
#[rustfmt::skip]
pub const SHIFT: [[Code; 4]; 5] = codes!(
    a: Shl_rm8_imm8 Shl_rm16_imm8 Shl_rm32_imm8 Shl_rm64_imm8; b: Shr_rm8_imm8 Shr_rm16_imm8 Shr_rm32_imm8 Shr_rm64_imm8;
    c: Sar_rm8_imm8 Sar_rm16_imm8 Sar_rm32_imm8 Sar_rm64_imm8; d: Rol_rm8_imm8 Rol_rm16_imm8 Rol_rm32_imm8 Rol_rm64_imm8;
    e: Ror_rm8_imm8 Ror_rm16_imm8 Ror_rm32_imm8 Ror_rm64_imm8;
);
#[rustfmt::skip]
pub const SHIFT_CL: [[Code; 4]; 5] = codes!(
    a: Shl_rm8_CL Shl_rm16_CL Shl_rm32_CL Shl_rm64_CL; b: Shr_rm8_CL Shr_rm16_CL Shr_rm32_CL Shr_rm64_CL;
    c: Sar_rm8_CL Sar_rm16_CL Sar_rm32_CL Sar_rm64_CL; d: Rol_rm8_CL Rol_rm16_CL Rol_rm32_CL Rol_rm64_CL;
    e: Ror_rm8_CL Ror_rm16_CL Ror_rm32_CL Ror_rm64_CL;
);
#[rustfmt::skip]
pub const SET: [Code; 16] = [
    Code::Seto_rm8, Code::Setno_rm8, Code::Setb_rm8, Code::Setae_rm8, Code::Sete_rm8, Code::Setne_rm8, Code::Setbe_rm8,
    Code::Seta_rm8, Code::Sets_rm8, Code::Setns_rm8, Code::Setp_rm8, Code::Setnp_rm8, Code::Setl_rm8, Code::Setge_rm8,
    Code::Setle_rm8, Code::Setg_rm8,
];
#[rustfmt::skip]
pub const CMOV: [Code; 16] = [
    Code::Cmovo_r64_rm64, Code::Cmovno_r64_rm64, Code::Cmovb_r64_rm64, Code::Cmovae_r64_rm64, Code::Cmove_r64_rm64,
    Code::Cmovne_r64_rm64, Code::Cmovbe_r64_rm64, Code::Cmova_r64_rm64, Code::Cmovs_r64_rm64, Code::Cmovns_r64_rm64,
    Code::Cmovp_r64_rm64, Code::Cmovnp_r64_rm64, Code::Cmovl_r64_rm64, Code::Cmovge_r64_rm64, Code::Cmovle_r64_rm64,
    Code::Cmovg_r64_rm64,
];

#[rustfmt::skip]
pub const EXCHANGE: [[Code; 4]; 3] = codes!(
    a: Xchg_rm8_r8 Xchg_rm16_r16 Xchg_rm32_r32 Xchg_rm64_r64; b: Xadd_rm8_r8 Xadd_rm16_r16 Xadd_rm32_r32 Xadd_rm64_r64;
    c: Cmpxchg_rm8_r8 Cmpxchg_rm16_r16 Cmpxchg_rm32_r32 Cmpxchg_rm64_r64;
);
#[rustfmt::skip]
pub const BITS: [Code; 15] = [
    Code::Bsf_r32_rm32, Code::Bsf_r64_rm64, Code::Bsr_r32_rm32, Code::Bsr_r64_rm64, Code::Shld_rm64_r64_imm8,
    Code::Shrd_rm32_r32_imm8, Code::VEX_Andn_r64_r64_rm64, Code::VEX_Andn_r32_r32_rm32, Code::VEX_Blsr_r64_rm64,
    Code::VEX_Blsi_r64_rm64, Code::VEX_Blsmsk_r32_rm32, Code::VEX_Pdep_r64_r64_rm64, Code::VEX_Pext_r64_r64_rm64,
    Code::VEX_Mulx_r64_r64_rm64, Code::VEX_Pext_r32_r32_rm32,
];

/// BT, BTS, BTR and BTC by a constant, for operands of 2, 4 and 8 bytes.
pub const BIT_IMM: [[Code; 3]; 4] = [
    [Code::Bt_rm16_imm8, Code::Bt_rm32_imm8, Code::Bt_rm64_imm8],
    [
        Code::Bts_rm16_imm8,
        Code::Bts_rm32_imm8,
        Code::Bts_rm64_imm8,
    ],
    [
        Code::Btr_rm16_imm8,
        Code::Btr_rm32_imm8,
        Code::Btr_rm64_imm8,
    ],
    [
        Code::Btc_rm16_imm8,
        Code::Btc_rm32_imm8,
        Code::Btc_rm64_imm8,
    ],
];

/// The same by a register, for operands of 4 and 8 bytes.
pub const BIT_REGISTER: [[Code; 2]; 4] = [
    [Code::Bt_rm32_r32, Code::Bt_rm64_r64],
    [Code::Bts_rm32_r32, Code::Bts_rm64_r64],
    [Code::Btr_rm32_r32, Code::Btr_rm64_r64],
    [Code::Btc_rm32_r32, Code::Btc_rm64_r64],
];
