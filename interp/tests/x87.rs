//! The x87: transcendental functions in software against the host's, and unmasked exceptions.
#![allow(unsafe_code, reason = "the programs are assembly")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{CODE, Machine, Ram, between, gate, long_mode, state, vcpu};
use hindsight_cpu::state::CpuState;
use hindsight_interp::Exit;

// RAX: two operands of 16 bytes; RDI: two results. The function is patched in.
std::arch::global_asm!(
    ".global fp_unary, fp_unary_at, fp_binary, fp_binary_at, fp_double, fp_double_at, fp_unmasked, fp_store, fp_end",
    "fp_unary:",
    "fninit",
    "fld tbyte ptr [rax]",
    "fp_unary_at: fsin",
    "fstp tbyte ptr [rdi]",
    "hlt",
    "fp_binary:",
    "fninit",
    "fld tbyte ptr [rax + 16]",
    "fld tbyte ptr [rax]",
    "fp_binary_at: fyl2x",
    "fstp tbyte ptr [rdi]",
    "hlt",
    "fp_double:",
    "fninit",
    "fld tbyte ptr [rax]",
    "fp_double_at: fsincos",
    "fstp tbyte ptr [rdi]",
    "fstp tbyte ptr [rdi + 16]",
    "hlt",
    // 1/3 with the precision exception unmasked: the quotient is stored, then #MF.
    "fp_unmasked:",
    "fninit",
    "fldcw word ptr [rdi]",
    "fld tbyte ptr [rax]",
    "fdiv qword ptr [rax + 16]",
    "fwait",
    "hlt",
    // Too large for the target, overflow unmasked: nothing is stored, and nothing popped.
    "fp_store:",
    "fninit",
    "fldcw word ptr [rdi]",
    "fld tbyte ptr [rax]",
    "fstp dword ptr [rax + 16]",
    "fwait",
    "hlt",
    "fp_end:",
);

unsafe extern "C" {
    fn fp_unary();
    fn fp_unary_at();
    fn fp_binary();
    fn fp_binary_at();
    fn fp_double();
    fn fp_double_at();
    fn fp_unmasked();
    fn fp_store();
    static fp_end: u8;
}

const OPERANDS: usize = 0x20_0000;
const RESULTS: usize = 0x20_1000;
const HANDLER: usize = 0xf000;

fn offset(label: unsafe extern "C" fn()) -> usize {
    CODE + label as usize - fp_unary as *const () as usize
}

fn setup(entry: unsafe extern "C" fn(), operands: [[u8; 10]; 2]) -> (Ram, CpuState) {
    let ram = Ram::new(8 << 20);
    let mut st = long_mode(&ram, 0);
    let start = fp_unary as *const () as usize;
    // SAFETY: labels of one section.
    ram.write(CODE, unsafe {
        between(start as *const u8, &raw const fp_end)
    });
    ram.write(HANDLER, &[0xf4]);
    gate(&ram, 16, HANDLER as u64, 0);
    ram.write(OPERANDS, &operands[0]);
    ram.write(OPERANDS + 16, &operands[1]);
    st.rip = offset(entry) as u64;
    st.gpr[0] = OPERANDS as u64;
    st.gpr[7] = RESULTS as u64;
    (ram, st)
}

fn run(ram: &Ram, st: &CpuState, portable: bool) -> CpuState {
    let mut cpu = vcpu(ram, st);
    let mut machine = Machine {
        portable,
        ..Machine::default()
    };
    assert_eq!(cpu.run(&mut machine, 1000), Exit::Halted);
    state(&mut cpu)
}

fn extended(v: f64) -> [u8; 10] {
    let bits = v.to_bits();
    let exponent = u16::try_from(bits >> 52 & 0x7ff).unwrap();
    let mut b = [0; 10];
    if exponent != 0 {
        b[..8].copy_from_slice(&(1 << 63 | bits << 11).to_le_bytes());
        let head = (exponent + 16383 - 1023) | (u16::try_from(bits >> 63).unwrap() << 15);
        b[8..].copy_from_slice(&head.to_le_bytes());
    }
    b
}

/// Sign, exponent and significand as one ordered number.
fn order(b: &[u8]) -> i128 {
    let head = u16::from_le_bytes(b[8..10].try_into().unwrap());
    let significand = u64::from_le_bytes(b[..8].try_into().unwrap());
    let size = i128::from(head & 0x7fff) << 63 | i128::from(significand & !(1 << 63));
    if head >> 15 == 0 { size } else { -size }
}

/// Results of a function in software and on the host.
fn both(
    entry: unsafe extern "C" fn(),
    at: unsafe extern "C" fn(),
    opcode: u8,
    operands: [f64; 2],
) -> [Vec<u8>; 2] {
    [true, false].map(|portable| {
        let (ram, st) = setup(entry, operands.map(extended));
        ram.write(offset(at), &[0xd9, opcode]);
        run(&ram, &st, portable);
        ram.read(RESULTS, 32)
    })
}

/// Two roundings of nearly the same value: at most 2 apart, and both have an error of at most 1.
fn near(results: [Vec<u8>; 2], label: &str) {
    for at in [0, 16] {
        let apart = order(&results[0][at..]) - order(&results[1][at..]);
        assert!(apart.abs() <= 2, "{label}: {results:x?}");
    }
}

#[test]
fn functions_in_software_agree_with_the_hosts() {
    for n in (1..40).step_by(5) {
        let x = f64::from(n) * 0.019_37;
        for (name, opcode) in [("fsin", 0xfe), ("fcos", 0xff), ("f2xm1", 0xf0)] {
            for x in [x, -x] {
                near(
                    both(fp_unary, fp_unary_at, opcode, [x, 0.0]),
                    &format!("{name} {x}"),
                );
            }
        }
        for (name, opcode) in [("fptan", 0xf2), ("fsincos", 0xfb)] {
            near(
                both(fp_double, fp_double_at, opcode, [x, 0.0]),
                &format!("{name} {x}"),
            );
        }
        let y = 3.7 - f64::from(n) / 5.0;
        near(
            both(fp_binary, fp_binary_at, 0xf1, [x * 9.0, y]),
            &format!("fyl2x {x} {y}"),
        );
        near(
            both(fp_binary, fp_binary_at, 0xf9, [x / 3.0, y]),
            &format!("fyl2xp1 {x} {y}"),
        );
        for x in [x, -x] {
            near(
                both(fp_binary, fp_binary_at, 0xf3, [x, y]),
                &format!("fpatan {x} {y}"),
            );
        }
    }
}

#[test]
fn special_operands_agree_with_the_hosts() {
    let specials = [0.0, f64::MIN_POSITIVE, 1.0, -1.0, 0.5, 4.0];
    for x in specials {
        for (opcode, n) in [(0xfe, 1), (0xff, 1), (0xf0, 1), (0xf2, 2), (0xfb, 2)] {
            if opcode == 0xf0 && x > 1.0 {
                continue;
            }
            let (entry, at): (unsafe extern "C" fn(), unsafe extern "C" fn()) = match n {
                1 => (fp_unary, fp_unary_at),
                _ => (fp_double, fp_double_at),
            };
            near(
                both(entry, at, opcode, [x, 0.0]),
                &format!("{opcode:x} {x}"),
            );
        }
        for y in specials {
            near(
                both(fp_binary, fp_binary_at, 0xf3, [x, y]),
                &format!("fpatan {x} {y}"),
            );
            near(
                both(fp_binary, fp_binary_at, 0xf1, [x, y]),
                &format!("fyl2x {x} {y}"),
            );
        }
    }
}

#[test]
fn unmasked_precision_exception_stores_the_result_first() {
    let (ram, st) = setup(fp_unmasked, [extended(1.0), [0; 10]]);
    ram.write(OPERANDS + 16, &3.0_f64.to_le_bytes());
    ram.write(RESULTS, &0x35f_u16.to_le_bytes());
    let st = run(&ram, &st, false);
    assert_eq!(st.rip, HANDLER as u64 + 1, "#MF came");
    let x = &st.xsave.0;
    assert_eq!(
        u64::from_le_bytes(x[32..40].try_into().unwrap()),
        0xaaaa_aaaa_aaaa_aaab
    );
    let fsw = u16::from_le_bytes([x[2], x[3]]);
    assert_eq!(fsw & 0x80bf, 0x80a0, "PE, ES and B");
    // FDIV m64 [RAX+16] is DC /6: its ModRM is 70H.
    assert_eq!(u16::from_le_bytes([x[6], x[7]]), 0x470, "FOP");
    assert_eq!(
        u64::from_le_bytes(x[16..24].try_into().unwrap()),
        OPERANDS as u64 + 16,
        "FDP"
    );
}

#[test]
fn unmasked_overflow_of_a_store_stores_nothing() {
    let (ram, st) = setup(fp_store, [extended(1e300), [0; 10]]);
    ram.write_u64(OPERANDS + 16, 0x1234_5678);
    ram.write(RESULTS, &0x377_u16.to_le_bytes());
    let st = run(&ram, &st, false);
    assert_eq!(st.rip, HANDLER as u64 + 1, "#MF came");
    assert_eq!(ram.read_u64(OPERANDS + 16), 0x1234_5678);
    let fsw = u16::from_le_bytes([st.xsave.0[2], st.xsave.0[3]]);
    assert_eq!((fsw >> 11 & 7, fsw & 8), (7, 8), "TOP and OE");
}
