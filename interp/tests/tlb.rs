//! Tests how many page walks the software TLB saves.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{CODE, Machine, Ram, long_mode, vcpu};
use hindsight_interp::Exit;

const ROUNDS: u64 = 1000;

/// Fills of the TLBs while a loop reads one page and writes another, `distance` bytes apart.
fn fills(distance: u32) -> u64 {
    let ram = Ram::new(8 << 20);
    let mut st = long_mode(&ram, 0);
    st.gpr[1] = ROUNDS;
    st.gpr[6] = 0x20_0000;
    st.gpr[7] = 0x20_0000 + u64::from(distance);
    // mov eax, [rsi]; add eax, [rdi]; mov [rsi + 8], eax; mov [rdi + 8], eax; dec ecx; jnz; hlt
    ram.write(
        CODE,
        &[0x8b, 0x06, 0x03, 0x07, 0x89, 0x46, 8, 0x89, 0x47, 8],
    );
    ram.write(CODE + 10, &[0xff, 0xc9, 0x75, 0xf2, 0xf4]);
    ram.write(0x20_0000, &[1]);
    let mut cpu = vcpu(&ram, &st);
    let exit = cpu.run(&mut Machine::default(), 10 * ROUNDS);
    assert_eq!(exit, Exit::Halted);
    assert_eq!(ram.read(0x20_0008, 1), [1]);
    cpu.stats().tlb_fills
}

#[test]
fn two_hot_pages_2_mib_apart_do_not_thrash() {
    for distance in [0x1000, 0x20_0000, 0x40_0000] {
        let fills = fills(distance);
        assert!(fills < 20, "{fills} fills at distance {distance:#x}");
    }
}
