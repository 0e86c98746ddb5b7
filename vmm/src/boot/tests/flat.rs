//! Flat images.

use crate::boot::tests::*;

#[test]
fn boot_sector_is_entered_at_7c00_with_the_disk_in_dl() {
    let mut sector = [0x90; 512];
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    let guest = boot(&Plan {
        mode: Some(Mode::Real),
        ..image(&sector)
    });
    let state = guest.state();
    assert_eq!(
        (state.seg[seg::CS].selector, state.seg[seg::CS].base),
        (0, 0)
    );
    assert_eq!((state.rip, state.gpr[gpr::RDX]), (0x7c00, 0x80));
    assert_eq!(state.gpr[gpr::RSP], 0x7c00);
    assert_eq!(
        (state.cr0, state.rflags, state.idtr.limit),
        (0x10, 2, 0x3ff)
    );
    assert_eq!(guest.bytes(0x7c00, 512), sector);
}

#[test]
fn real_mode_entry_above_64_kib_gets_a_segment() {
    let guest = boot(&Plan {
        load_address: Some(0x2_0000),
        entry: Some(0x2_0013),
        ..image(&[0xf4; 32])
    });
    let code = guest.state().seg[seg::CS];
    assert_eq!(
        (code.selector, code.base, code.limit),
        (0x2001, 0x2_0010, 0xffff)
    );
    assert_eq!((code.access, guest.state().rip), (0x9b, 3));
}

#[test]
fn real_mode_image_of_64_kib_runs_in_one_mib_without_a_stack() {
    let plan = Plan {
        load_address: Some(0),
        ..image(&[0xf4; 0x1_0000])
    };
    let guest = boot_in(&Layout::new(MIB).unwrap(), &plan).unwrap();
    assert_eq!(guest.loaded.placed.len(), 1);
    assert_eq!((guest.state().rip, guest.state().gpr[gpr::RSP]), (0, 0));
}

#[test]
fn protected_mode_is_flat_and_at_one_mib() {
    let guest = boot(&Plan {
        mode: Some(Mode::Protected),
        ..image(&[0xf4])
    });
    assert_protected(guest.state());
    assert_eq!(guest.state().rip, 0x10_0000);
    assert_eq!(
        guest.u64(guest.state().gdtr.base + 0x10),
        0x00cf_9b00_0000_ffff
    );
}

#[test]
fn long_mode_runs_in_one_mib() {
    let plan = Plan {
        mode: Some(Mode::Long),
        load_address: Some(0x1_0000),
        entry: Some(0x1_0008),
        ..image(&[0xf4; 16])
    };
    let guest = boot_in(&Layout::new(MIB).unwrap(), &plan).unwrap();
    assert_long(&guest);
    assert_eq!(guest.state().rip, 0x1_0008);
}

#[test]
fn impossible_addresses_are_refused() {
    let plan = |mode, load, entry| Plan {
        mode: Some(mode),
        load_address: Some(load),
        entry,
        ..image(&[0xf4; 16])
    };
    let rows = [
        (
            plan(Mode::Long, u64::MAX, None),
            "image needs 0x10 bytes at 0xffffffffffffffff, which is not within the RAM below \
             3 GiB, that ends at 0x8000000",
        ),
        (
            plan(Mode::Long, 0x7ff_fff8, None),
            "image needs 0x10 bytes at 0x7fffff8, which is not within the RAM below 3 GiB, that \
             ends at 0x8000000",
        ),
        (
            plan(Mode::Protected, 0x10_0000, Some(0xf_ffff)),
            "the entry point 0xfffff is outside of what the image loads",
        ),
        (
            plan(Mode::Protected, 0x10_0000, Some(0x10_0010)),
            "the entry point 0x100010 is outside of what the image loads",
        ),
        (
            plan(Mode::Real, 0x10_0000, None),
            "the entry point 0x100000 is not one that real mode reaches: that ends at 0xfffff",
        ),
    ];
    for (plan, message) in rows {
        assert_eq!(refusal(&plan), message);
    }
}

#[test]
fn image_that_fills_conventional_memory_leaves_no_room_for_tables() {
    let fill = vec![0xf4; 0x9_fc00];
    let plan = Plan {
        mode: Some(Mode::Long),
        load_address: Some(0),
        ..image(&fill)
    };
    assert_eq!(
        refusal(&plan),
        "no room for the 0x98 bytes of descriptor table in 0x1000-0x9fbff"
    );
}
