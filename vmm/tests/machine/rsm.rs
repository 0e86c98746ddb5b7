//! RSM with a save area that the SMI handler has changed.

use std::time::Duration;

use hindsight_vmm::boot::EntryMode;
use hindsight_vmm::vcpu::crash::CrashCause;
use hindsight_vmm::vcpu::run_control::Outcome;
use iced_x86::code_asm::*;
use vm_memory::{Bytes, GuestAddress};

use super::guest::{assemble, exit, long, machine_with_model};

/// The entry point of the SMI handler after RESET: SMBASE + 8000H.
const ENTRY: u64 = 0x3_8000;
/// The address from which the manual counts the offsets of the save area: SMBASE + 8000H.
const SAVE_AREA: u64 = 0x3_8000;

/// Runs a guest that raises an SMI by port B2H, and exits with code 7 after it.
///
/// The SMI handler writes these doublewords to offsets of the manual's table, and executes RSM.
fn run_with_changed_save_area(writes: &[(u64, u32)]) -> Outcome {
    let handler = assemble(16, 0x8000, |a| {
        for &(offset, value) in writes {
            a.mov(esi, u32::try_from(SAVE_AREA + offset).unwrap())?;
            a.mov(dword_ptr(esi), value)?;
        }
        a.rsm()
    });
    let image = long(|a| {
        a.mov(al, 1)?;
        a.out(0xb2, al)?;
        exit(a, 7)
    });
    let machine = machine_with_model("+smm".parse().unwrap(), &image, EntryMode::Long);
    let memory = &machine.board().ram.map;
    memory.write_slice(&handler, GuestAddress(ENTRY)).unwrap();
    let limit = Duration::from_secs(60);
    machine.run(Some(limit), || {}).unwrap()
}

#[test]
fn rsm_loads_a_valid_save_area() {
    for writes in [&[][..], &[(0x7fc8, 0x400)]] {
        let outcome = run_with_changed_save_area(writes);
        assert!(matches!(outcome, Outcome::Exit(7)), "{outcome:?}");
    }
}

#[test]
fn rsm_with_an_invalid_save_area_shuts_the_processor_down() {
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
    for (case, writes) in rows {
        let outcome = run_with_changed_save_area(writes);
        let Outcome::Crash(crash) = outcome else {
            panic!("{case}: {outcome:?}");
        };
        assert_eq!(*crash.cause(), CrashCause::TripleFault, "{case}");
        assert!(crash.state().smm.active, "{case}: the guest left SMM");
        let text = crash.to_string();
        assert!(text.contains("RSM"), "{case}: {text}");
    }
    let all: Vec<_> = (0x7c00..0x8000)
        .step_by(4)
        .map(|at| (at, u32::MAX))
        .collect();
    let outcome = run_with_changed_save_area(&all);
    assert!(
        matches!(outcome, Outcome::Crash(_)),
        "all ones: {outcome:?}"
    );
}
