//! Linux bzImage.

use crate::boot::tests::images::bzimage;
use crate::boot::tests::*;

#[test]
fn kernel_is_entered_at_its_preferred_address_with_boot_parameters() {
    let file = bzimage();
    let layout = Layout::new(128 * MIB)
        .unwrap()
        .with_acpi(0xe_0000..0xe_2000, 0xe_0010)
        .unwrap();
    let request = LoadRequest {
        initrd: Some(&[7; 0x1234]),
        cmdline: b"console=ttyS0".to_vec(),
        ..image(&file)
    };
    let guest = boot_in(&layout, &request).unwrap();
    assert_eq!(guest.loaded.protocol, Protocol::Linux);
    assert_long(&guest);
    assert_eq!(guest.state().rip, 0x100_0200);
    assert_eq!(guest.bytes(0x100_0000, 0x1000), file[0x600..]);
    assert_eq!(guest.placed("kernel"), 0x100_0000..0x120_0000);
    let params = guest.state().gpr[gpr::RSI];
    let field = |offset| u64::from(guest.u32(params + offset));
    assert_eq!(guest.string(field(0x228)), "console=ttyS0");
    assert_eq!((field(0x218), field(0x21c)), (0x7ff_e000, 0x1234));
    assert_eq!(guest.bytes(0x7ff_e000, 0x1234), [7; 0x1234]);
    assert_eq!(guest.u64(params + 0x70), 0xe_0010);
    assert_eq!(guest.bytes(params + 0x202, 4), b"HdrS");
    // Loader type, and the flags without CAN_USE_HEAP.
    assert_eq!(guest.bytes(params + 0x210, 2), [0xff, 1]);
    assert_eq!((field(0x214), guest.u64(params + 0x250)), (0x100_0000, 0));
    assert_eq!(guest.bytes(params + 0x1e8, 1), [3]);
    let e820 = |index: u64| {
        let at = params + 0x2d0 + 20 * index;
        (guest.u64(at), guest.u64(at + 8), guest.u32(at + 16))
    };
    assert_eq!(e820(0), (0, 0x9_fc00, 1));
    assert_eq!(e820(1), (0x9_fc00, 0x6_0400, 2));
    assert_eq!(e820(2), (0x10_0000, 127 * MIB, 1));
}

#[test]
fn kernel_without_a_64_bit_entry_is_entered_in_protected_mode() {
    // Without XLF_KERNEL_64, and of a version before the flag.
    for (at, byte) in [(0x236, 0x7e), (0x206, 11)] {
        let mut file = bzimage();
        file[at] = byte;
        let guest = boot(&image(&file));
        assert_protected(guest.state());
        assert_eq!(guest.state().rip, 0x100_0000);
        let params = guest.state().gpr[gpr::RSI];
        assert_eq!(guest.bytes(params + 0x202, 4), b"HdrS");
        assert_eq!(
            [gpr::RBP, gpr::RDI, gpr::RBX].map(|index| guest.state().gpr[index]),
            [0; 3]
        );
    }
}

#[test]
fn setup_header_ends_at_the_target_of_its_jump() {
    let mut file = bzimage();
    file[0x268..0x290].fill(0xaa);
    let guest = boot(&image(&file));
    let params = guest.state().gpr[gpr::RSI];
    assert_eq!(
        guest.bytes(params + 0x268, 8),
        [0xaa, 0xaa, 0xaa, 0xaa, 0, 0, 0, 0]
    );
    // A jump beyond the space for the header in the boot parameters.
    file[0x201] = 0xff;
    let guest = boot(&image(&file));
    assert_eq!(
        guest.bytes(params + 0x28c, 8),
        [0xaa, 0xaa, 0xaa, 0xaa, 0, 0, 0, 0]
    );
}

#[test]
fn initrd_stays_below_the_limit_of_the_kernel() {
    let mut file = bzimage();
    file[0x22c..0x230].copy_from_slice(&0x3ff_ffff_u32.to_le_bytes());
    let guest = boot(&LoadRequest {
        initrd: Some(&[7; 0x800]),
        ..image(&file)
    });
    assert_eq!(guest.placed("initrd"), 0x3ff_f000..0x3ff_f800);
}

#[test]
fn relocatable_kernel_is_placed_at_its_preferred_address_rounded_up() {
    let mut file = bzimage();
    file[0x258..0x260].copy_from_slice(&0x123_4567_u64.to_le_bytes());
    assert_eq!(boot(&image(&file)).state().rip, 0x140_0200);
    file[0x258..0x260].fill(0);
    assert_eq!(boot(&image(&file)).state().rip, 0x20_0200);
    file[0x234] = 0;
    assert_eq!(
        refusal(&image(&file)),
        "the Linux image requires address 0x0, which is below 1 MiB"
    );
}

#[test]
fn trailing_signature_is_not_loaded() {
    let mut file = bzimage();
    file[0x1f4..0x1f8].copy_from_slice(&0xff_u32.to_le_bytes());
    let guest = boot(&image(&file));
    assert_eq!(guest.bytes(0x100_0ff0, 16), [0; 16]);
}

/// A malformed header: offset, new bytes, message.
type MalformedHeader = (usize, &'static [u8], &'static str);

#[test]
fn bad_headers_are_refused_with_a_reason() {
    let rows: [MalformedHeader; 9] = [
        (
            0x1fe,
            &[0],
            "the Linux image has no boot header: its boot flag or its magic (HdrS) is missing",
        ),
        (
            0x206,
            &[9],
            "the Linux image is too old: its boot protocol is 2.09, and the oldest that is \
             supported is 2.10, of Linux 2.6.31",
        ),
        (
            0x211,
            &[0],
            "the Linux image is a zImage, to be loaded below 1 MiB: only bzImage is supported",
        ),
        (
            0x1f4,
            &[2, 1],
            "the Linux image is truncated: it needs 0x1611 bytes and has 0x1600",
        ),
        (
            0x1f1,
            &[0xff],
            "the Linux image is truncated: it needs 0x20ff1 bytes and has 0x1600",
        ),
        (
            0x230,
            &[1],
            "the Linux image's kernel alignment 0x200001 is not a power of two of at least 0x1000",
        ),
        (
            0x260,
            &[0, 0, 0, 0xff],
            "kernel does not fit in guest memory: it needs 4 GiB from 16 MiB on, and only RAM \
             below 3 GiB is used",
        ),
        (
            0x260,
            &[0, 0x70, 0x9f, 7],
            "kernel does not fit in guest memory: it needs 122 MiB from 16 MiB on; use --memory \
             256M or more",
        ),
        (
            0x258,
            &[0xff; 8],
            "kernel does not fit in guest memory: it needs 2 MiB from 0xffffffffffffffff on, and \
             only RAM below 3 GiB is used",
        ),
    ];
    for (at, bytes, message) in rows {
        let mut file = bzimage();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        let request = LoadRequest {
            protocol: Some(Protocol::Linux),
            ..image(&file)
        };
        assert_eq!(refusal(&request), message);
    }
}

#[test]
fn command_line_that_is_too_long_or_has_a_nul_is_refused() {
    let file = bzimage();
    let request = |len| LoadRequest {
        cmdline: vec![b'a'; len],
        ..image(&file)
    };
    boot(&request(0x7ff));
    assert_eq!(
        refusal(&request(0x800)),
        "the command line has 2048 bytes, more than the 2047 that this kernel accepts"
    );
    assert_eq!(
        refusal(&LoadRequest {
            cmdline: b"a\0b".to_vec(),
            ..image(&file)
        }),
        "the command line contains a NUL byte at offset 0x1, which would end it"
    );
}

#[test]
fn bzimage_truncated_anywhere_is_refused() {
    let file = bzimage();
    for len in 0x206..file.len() - 15 {
        refusal(&image(&file[..len]));
    }
}

#[test]
fn initrd_that_does_not_fit_or_is_empty_is_refused() {
    let file = bzimage();
    let request = LoadRequest {
        initrd: Some(&[7; 0x20_0000]),
        ..image(&file)
    };
    let layout = Layout::new(19 * MIB).unwrap();
    // The kernel occupies 16 to 18 MiB, so the initrd goes below it.
    assert_eq!(
        boot_in(&layout, &request).unwrap().placed("initrd").start,
        0xe0_0000
    );
    let request = LoadRequest {
        initrd: Some(&[7; 0xf0_1000]),
        ..image(&file)
    };
    assert_eq!(
        boot_in(&layout, &request).err().unwrap().to_string(),
        "initrd does not fit in guest memory: it needs 15.1 MiB from 1 MiB on; use --memory 64M \
         or more"
    );
    assert_eq!(
        refusal(&LoadRequest {
            initrd: Some(&[]),
            ..image(&file)
        }),
        "initrd is empty"
    );
}
