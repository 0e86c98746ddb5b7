//! RDRAND and RDSEED.

mod common;

use common::{CODE, Machine, Ram, long_mode, state, vcpu};
use hindsight_cpu::state::CpuState;
use hindsight_interp::Exit;

/// The state after one instruction, with random numbers from `random`.
fn after(code: &[u8], random: &[u64]) -> CpuState {
    let ram = Ram::new(4 << 20);
    let mut st = long_mode(&ram, 0);
    st.gpr[0] = u64::MAX;
    st.rflags |= 0x8d5;
    ram.write(CODE, &[code, &[0xf4]].concat());
    let mut machine = Machine {
        random: random.to_vec(),
        ..Machine::default()
    };
    let mut cpu = vcpu(&ram, &st);
    assert_eq!(cpu.run(&mut machine, 100), Exit::Halted);
    state(&mut cpu)
}

const RDRAND_RAX: &[u8] = &[0x48, 0x0f, 0xc7, 0xf0];
const RDSEED_EAX: &[u8] = &[0x0f, 0xc7, 0xf8];
const RDRAND_AX: &[u8] = &[0x66, 0x0f, 0xc7, 0xf0];

#[test]
fn random_number_sets_carry_alone() {
    let number = 0x1234_5678_9abc_def0;
    for (code, expected) in [
        (RDRAND_RAX, number),
        (RDSEED_EAX, 0x9abc_def0),
        (RDRAND_AX, 0xffff_ffff_ffff_def0),
    ] {
        let st = after(code, &[number]);
        assert_eq!((st.gpr[0], st.rflags & 0x8d5), (expected, 1), "{code:x?}");
    }
}

#[test]
fn missing_random_number_is_zero_without_carry() {
    for (code, expected) in [
        (RDRAND_RAX, 0),
        (RDSEED_EAX, 0),
        (RDRAND_AX, 0xffff_ffff_ffff_0000),
    ] {
        let st = after(code, &[]);
        assert_eq!((st.gpr[0], st.rflags & 0x8d5), (expected, 0), "{code:x?}");
    }
}
