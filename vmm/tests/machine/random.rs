//! RDRAND outside of deterministic mode.

use std::time::Duration;

use hindsight_cpu::profile::CpuProfile;
use hindsight_vmm::boot::EntryMode;
use hindsight_vmm::vcpu::run_control::Outcome;
use iced_x86::code_asm::*;

use crate::guest::{exit, long, machine_with_model};

/// A generator that adds the time to a linear congruence is predictable: the difference of one
/// number and the successor of another is then small.
#[test]
fn one_random_number_does_not_give_the_next() {
    const MULTIPLIER: u64 = 0x5851_f42d_4c95_7f2d;
    let image = long(|a| {
        let mut predictable = a.create_label();
        for register in [rbx, rsi] {
            a.rdrand(register)?;
            // The inverse of x ^ x >> 29.
            a.mov(rax, register)?;
            for _ in 0..2 {
                a.shr(rax, 29)?;
                a.xor(rax, register)?;
            }
            a.mov(register, rax)?;
        }
        a.mov(rax, MULTIPLIER)?;
        a.imul_2(rbx, rax)?;
        a.sub(rsi, rbx)?;
        a.shr(rsi, 44)?;
        a.jz(predictable)?;
        exit(a, 1)?;
        a.set_label(&mut predictable)?;
        exit(a, 2)
    });
    let machine = machine_with_model(CpuProfile::default(), &image, EntryMode::Long);
    let outcome = machine.run(Some(Duration::from_secs(10)), || {}).unwrap();
    assert!(matches!(outcome, Outcome::Exit(1)), "{outcome:?}");
}
