//! The vector extensions after AVX512_VL, SHA and RDPID: #UD without their CPUID bit, and for
//! encodings that the manual reserves.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{CODE, Machine, Ram, gate, long_mode, state, vcpu};
use hindsight_cpu::state::CpuState;
use hindsight_interp::{Exit, supported_cpuid};
use iced_x86::{
    Code, CpuidFeature as F, Encoder, Instruction, OpCodeOperandKind, OpKind, Register,
};
use std::cell::Cell;

/// Each extension, and its bit in EBX or ECX of CPUID leaf 7.
const EXTENSIONS: [(F, usize, u32); 11] = [
    (F::AVX512_IFMA, 1, 1 << 21),
    (F::SHA, 1, 1 << 29),
    (F::AVX512_VBMI, 2, 1 << 1),
    (F::AVX512_VBMI2, 2, 1 << 6),
    (F::GFNI, 2, 1 << 8),
    (F::VAES, 2, 1 << 9),
    (F::VPCLMULQDQ, 2, 1 << 10),
    (F::AVX512_VNNI, 2, 1 << 11),
    (F::AVX512_BITALG, 2, 1 << 12),
    (F::AVX512_VPOPCNTDQ, 2, 1 << 14),
    (F::RDPID, 2, 1 << 22),
];

/// The handler of #UD: a HLT.
const HANDLER: usize = 0xf000;
/// The memory operand.
const DATA: u64 = 0x20_0000;

thread_local! {
    /// The register and the bit that CPUID leaf 7 lacks.
    static ABSENT: Cell<(usize, u32)> = const { Cell::new((0, 0)) };
}

fn cpuid(leaf: u32, subleaf: u32) -> [u32; 4] {
    let mut registers = supported_cpuid(leaf, subleaf);
    if (leaf, subleaf) == (7, 0) {
        let (register, bit) = ABSENT.get();
        registers[register] &= !bit;
    }
    registers
}

/// How a program ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Completed,
    Undefined,
}

/// Executes an instruction in 64-bit mode, with all state of AVX-512 enabled.
fn execute(code: &[u8], software: bool) -> (End, CpuState) {
    let ram = Ram::new(4 << 20);
    let mut st = long_mode(&ram, 0);
    ram.write(CODE, &[code, &[0xf4]].concat());
    ram.write(HANDLER, &[0xf4]);
    gate(&ram, 6, HANDLER as u64, 0);
    st.cr4 |= 1 << 18;
    st.xcr0 = 0xe7;
    st.gpr[0] = DATA;
    let mut cpu = vcpu(&ram, &st);
    cpu.set_software_vectors(software);
    let mut machine = Machine {
        cpuid: Some(cpuid),
        ..Machine::default()
    };
    assert_eq!(cpu.run(&mut machine, 10), Exit::Halted, "{code:02x?}");
    let st = state(&mut cpu);
    let end = if st.rip == HANDLER as u64 + 1 {
        End::Undefined
    } else {
        assert_eq!(st.rip, (CODE + code.len()) as u64 + 1, "{code:02x?}");
        End::Completed
    };
    (end, st)
}

/// Returns the register of an operand; `None` for an immediate.
fn register(kind: OpCodeOperandKind) -> Option<Register> {
    let name = format!("{kind:?}");
    match name.split('_').next().unwrap() {
        "xmm" => Some(Register::XMM3),
        "ymm" => Some(Register::YMM3),
        "zmm" => Some(Register::ZMM3),
        "k" => Some(Register::K3),
        "r32" => Some(Register::EBX),
        "r64" => Some(Register::RBX),
        "imm8" => None,
        _ => panic!("{name}"),
    }
}

/// Encodes an instruction with its operands in registers, or with one in memory.
fn encode(code: Code, memory: bool) -> Option<Vec<u8>> {
    let mut i = Instruction::default();
    i.set_code(code);
    let mut has_memory = false;
    for (n, &kind) in (0..).zip(code.op_code().op_kinds()) {
        if memory && format!("{kind:?}").ends_with("or_mem") {
            has_memory = true;
            i.set_op_kind(n, OpKind::Memory);
            i.set_memory_base(Register::RAX);
        } else if let Some(register) = register(kind) {
            i.set_op_kind(n, OpKind::Register);
            i.set_op_register(n, register);
        } else {
            i.set_op_kind(n, OpKind::Immediate8);
        }
    }
    let mut encoder = Encoder::new(64);
    encoder.encode(&i, 0).unwrap();
    (memory == has_memory).then(|| encoder.take_buffer())
}

#[test]
fn instruction_of_an_extension_needs_its_cpuid_bit() {
    let mut met = 0;
    for code in Code::values() {
        let features = code.cpuid_features();
        let own: Vec<_> = EXTENSIONS
            .iter()
            .filter(|row| features.contains(&row.0))
            .collect();
        if own.is_empty() || !code.op_code().mode64() {
            continue;
        }
        for memory in [false, true] {
            let Some(bytes) = encode(code, memory) else {
                continue;
            };
            for software in [false, true] {
                ABSENT.set((0, 0));
                assert_eq!(execute(&bytes, software).0, End::Completed, "{code:?}");
                met += 1;
                for &&(_, register, bit) in &own {
                    ABSENT.set((register, bit));
                    assert_eq!(execute(&bytes, software).0, End::Undefined, "{code:?}");
                }
            }
        }
    }
    println!("{met} executed");
    assert!(met > 500);
}

#[test]
fn reserved_encoding_raises_ud() {
    let rows: [(&str, &[u8]); 15] = [
        (
            "VAESENC zmm with a mask",
            &[0x62, 0xf2, 0x65, 0x49, 0xdc, 0xdb],
        ),
        (
            "VAESENC zmm with EVEX.z",
            &[0x62, 0xf2, 0x65, 0xc8, 0xdc, 0xdb],
        ),
        (
            "VAESENC ymm, VEX without 66",
            &[0xc4, 0xe2, 0x64, 0xdc, 0xdb],
        ),
        (
            "VPCLMULQDQ zmm with a broadcast",
            &[0x62, 0xf3, 0x65, 0x58, 0x44, 0x18, 0],
        ),
        (
            "VPOPCNTB with a broadcast",
            &[0x62, 0xf2, 0x7d, 0x58, 0x54, 0x18],
        ),
        (
            "VPOPCNTB with EVEX.vvvv",
            &[0x62, 0xf2, 0x65, 0x48, 0x54, 0xdb],
        ),
        (
            "VPOPCNTB with length 3",
            &[0x62, 0xf2, 0x7d, 0x68, 0x54, 0xdb],
        ),
        (
            "VPSHUFBITQMB with EVEX.z",
            &[0x62, 0xf2, 0x65, 0xc9, 0x8f, 0xdb],
        ),
        ("VPSHUFBITQMB to k8", &[0x62, 0x72, 0x65, 0x48, 0x8f, 0xdb]),
        (
            "VPSHUFBITQMB with W1",
            &[0x62, 0xf2, 0xe5, 0x48, 0x8f, 0xdb],
        ),
        ("VPMADD52LUQ with W0", &[0x62, 0xf2, 0x65, 0x48, 0xb4, 0xdb]),
        (
            "VPCOMPRESSB with EVEX.z to memory",
            &[0x62, 0xf2, 0x7d, 0xc9, 0x63, 0x18],
        ),
        (
            "VGF2P8AFFINEQB with VEX.W0",
            &[0xc4, 0xe3, 0x65, 0xce, 0xdb, 0],
        ),
        ("SHA256MSG1 with 66", &[0x66, 0x0f, 0x38, 0xcc, 0xdb]),
        ("RDPID with LOCK", &[0xf0, 0xf3, 0x0f, 0xc7, 0xf8]),
    ];
    for (name, bytes) in rows {
        for software in [false, true] {
            assert_eq!(execute(bytes, software).0, End::Undefined, "{name}");
        }
    }
}

#[test]
fn rdpid_reads_tsc_aux() {
    let (end, st) = execute(&[0xf3, 0x0f, 0xc7, 0xf8], false);
    assert_eq!((end, st.gpr[0]), (End::Completed, 7));
}
