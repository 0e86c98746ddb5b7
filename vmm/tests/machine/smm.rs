//! What RSM does with a save area that the handler has spoiled.

use std::time::Duration;

use hindsight_vmm::boot::EntryMode;
use hindsight_vmm::vcpu::crash::CrashCause;
use hindsight_vmm::vcpu::run_control::Outcome;
use iced_x86::code_asm::*;
use vm_memory::{Bytes, GuestAddress};

use super::guest::{assemble, exit, long, machine_with};

/// SMBASE after RESET, where the handler is entered, and the save area's end.
const ENTRY: u64 = 0x3_8000;
const MAP: u64 = 0x3_8000;

/// Runs a guest that raises an SMI by port B2H, whose handler writes these doublewords to offsets
/// of the manual's map, and leaves; then the guest ends with code 7.
fn spoiled(writes: &[(u64, u32)]) -> Outcome {
    let handler = assemble(16, 0x8000, |a| {
        for &(offset, value) in writes {
            a.mov(esi, u32::try_from(MAP + offset).unwrap())?;
            a.mov(dword_ptr(esi), value)?;
        }
        a.rsm()
    });
    let image = long(|a| {
        a.mov(al, 1)?;
        a.out(0xb2, al)?;
        exit(a, 7)
    });
    let machine = machine_with("+smm".parse().unwrap(), &image, EntryMode::Long);
    let memory = &machine.board().ram.map;
    memory.write_slice(&handler, GuestAddress(ENTRY)).unwrap();
    let limit = Duration::from_secs(60);
    machine.run(Some(limit), || {}).unwrap()
}

#[test]
fn save_area_that_a_processor_can_have_is_taken() {
    for writes in [&[][..], &[(0x7fc8, 0x400)]] {
        let outcome = spoiled(writes);
        assert!(matches!(outcome, Outcome::Exit(7)), "{outcome:?}");
    }
}

#[test]
fn save_area_of_no_possible_state_shuts_the_processor_down() {
    let rows: [(&str, &[(u64, u32)]); 7] = [
        ("CR0: paging without protection", &[(0x7ff8, 1 << 31)]),
        (
            "CR0: not write-through without cache disable",
            &[(0x7ff8, 0xa000_0011)],
        ),
        ("CR4: reserved bits", &[(0x7e40, u32::MAX)]),
        ("CR4: 64-bit mode without PAE", &[(0x7e40, 0)]),
        ("EFER: reserved bits", &[(0x7fe0, 0xf02)]),
        ("DR7: bits 63:32", &[(0x7fcc, 1)]),
        ("DR6: bits 63:32", &[(0x7fd4, 1)]),
    ];
    for (what, writes) in rows {
        let outcome = spoiled(writes);
        let Outcome::Crash(crash) = outcome else {
            panic!("{what}: {outcome:?}");
        };
        assert_eq!(*crash.cause(), CrashCause::TripleFault, "{what}");
        assert!(crash.state().smm.active, "{what}: still in the handler");
        let text = crash.to_string();
        assert!(text.contains("RSM"), "{what}: {text}");
    }
    let all: Vec<_> = (0x7c00..0x8000)
        .step_by(4)
        .map(|at| (at, u32::MAX))
        .collect();
    let outcome = spoiled(&all);
    assert!(
        matches!(outcome, Outcome::Crash(_)),
        "all ones: {outcome:?}"
    );
}
