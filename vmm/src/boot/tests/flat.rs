//! Flat images.

use crate::boot::tests::*;

#[test]
fn boot_sector_is_entered_at_7c00_with_disk_0x80_in_dl() {
    let mut sector = [0x90; 512];
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    let guest = boot(&LoadRequest {
        mode: Some(EntryMode::Real),
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
    let guest = boot(&LoadRequest {
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
    let request = LoadRequest {
        load_address: Some(0),
        ..image(&[0xf4; 0x1_0000])
    };
    let guest = boot_in(&Layout::new(MIB).unwrap(), &request).unwrap();
    assert_eq!(guest.loaded.placed.len(), 1);
    assert_eq!((guest.state().rip, guest.state().gpr[gpr::RSP]), (0, 0));
}

#[test]
fn protected_mode_image_has_flat_segments_and_starts_at_one_mib() {
    let guest = boot(&LoadRequest {
        mode: Some(EntryMode::Protected),
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
fn long_mode_image_fits_in_one_mib() {
    let request = LoadRequest {
        mode: Some(EntryMode::Long),
        load_address: Some(0x1_0000),
        entry: Some(0x1_0008),
        ..image(&[0xf4; 16])
    };
    let guest = boot_in(&Layout::new(MIB).unwrap(), &request).unwrap();
    assert_long(&guest);
    assert_eq!(guest.state().rip, 0x1_0008);
}

#[test]
fn impossible_addresses_are_refused() {
    let request = |mode, load, entry| LoadRequest {
        mode: Some(mode),
        load_address: Some(load),
        entry,
        ..image(&[0xf4; 16])
    };
    let rows = [
        (
            request(EntryMode::Long, u64::MAX, None),
            "image does not fit in guest memory: it needs 16 bytes at 0xffffffffffffffff, and only \
             RAM below 3 GiB is used",
        ),
        (
            request(EntryMode::Long, 0x7ff_fff8, None),
            "image does not fit in guest memory: it needs 16 bytes at 0x7fffff8; use --memory 256M \
             or more",
        ),
        (
            request(EntryMode::Protected, 0x10_0000, Some(0xf_ffff)),
            "the entry point 0xfffff is outside of the loaded image",
        ),
        (
            request(EntryMode::Protected, 0x10_0000, Some(0x10_0010)),
            "the entry point 0x100010 is outside of the loaded image",
        ),
        (
            request(EntryMode::Real, 0x10_0000, None),
            "the entry point 0x100000 cannot be reached in real mode, which ends at 0xfffff; use \
             --mode protected or --mode long",
        ),
    ];
    for (request, message) in rows {
        assert_eq!(refusal(&request), message);
    }
}

#[test]
fn image_that_fills_conventional_memory_is_refused_for_lack_of_tables() {
    let fill = vec![0xf4; 0x9_fc00];
    let request = LoadRequest {
        mode: Some(EntryMode::Long),
        load_address: Some(0),
        ..image(&fill)
    };
    assert_eq!(
        refusal(&request),
        "descriptor table does not fit: it needs 152 bytes of free memory within 0x1000-0x9fbff"
    );
}
