//! Plain ELF and PVH.

use crate::boot::tests::images::{ElfImage, Load, note};
use crate::boot::tests::*;

const AT: u64 = 0x20_0000;

#[test]
fn elf64_enters_long_mode_with_start_info() {
    let file = ElfImage::new(true, AT, b"\xf4code").build();
    let guest = boot(&LoadRequest {
        cmdline: b"quiet".to_vec(),
        ..image(&file)
    });
    assert_eq!(guest.loaded.protocol, Protocol::Elf);
    assert_long(&guest);
    assert_eq!(guest.state().rip, AT);
    assert_eq!(guest.bytes(AT, 5), b"\xf4code");
    let info = guest.state().gpr[gpr::RBX];
    assert_eq!(guest.u32(info), 0x336e_c578);
    assert_eq!(guest.string(guest.u64(info + 24)), "quiet");
}

#[test]
fn elf32_enters_protected_mode() {
    let file = ElfImage::new(false, AT, &[0xf4]).build();
    let guest = boot(&image(&file));
    assert_protected(guest.state());
    assert_eq!(
        (guest.loaded.protocol, guest.state().rip),
        (Protocol::Elf, AT)
    );
}

#[test]
fn bss_is_reserved_but_not_written() {
    let mut elf = ElfImage::new(true, AT, &[0xf4]);
    elf.loads[0].memory_size = 0x8000;
    elf.loads.push(Load {
        memory_size: 0x100,
        ..Load::at(0x40_0000, &[])
    });
    let file = elf.build();
    let guest = boot(&image(&file));
    assert_eq!(guest.placed("segment 0"), AT..AT + 0x8000);
    assert_eq!(guest.placed("segment 1"), 0x40_0000..0x40_0100);
}

#[test]
fn virtual_entry_point_is_translated_to_its_physical_address() {
    let mut elf = ElfImage::new(true, AT, &[0x90; 32]);
    elf.loads[0].virtual_ = 0xffff_ffff_8000_0000;
    elf.entry = 0xffff_ffff_8000_0010;
    assert_eq!(boot(&image(&elf.build())).state().rip, AT + 0x10);
    elf.entry = AT + 8;
    assert_eq!(boot(&image(&elf.build())).state().rip, AT + 8);
}

#[test]
fn pvh_start_info_has_memory_map_command_line_and_modules() {
    let file = ElfImage::pvh(true, AT, &[0xf4]).build();
    let request = LoadRequest {
        initrd: Some(b"initrd"),
        modules: vec![BootModule {
            data: b"module",
            args: b"key=value".to_vec(),
            name: Vec::new(),
        }],
        cmdline: b"console=ttyS0".to_vec(),
        ..image(&file)
    };
    let guest = boot(&request);
    assert_eq!(guest.loaded.protocol, Protocol::Pvh);
    assert_protected(guest.state());
    assert_eq!(guest.state().rip, AT);
    let info = guest.state().gpr[gpr::RBX];
    let words = |range: std::ops::Range<u64>| {
        range
            .map(|index| guest.u32(info + 4 * index))
            .collect::<Vec<_>>()
    };
    assert_eq!(words(0..4), [0x336e_c578, 1, 0, 2]);
    let list = guest.u64(info + 16);
    assert_eq!(guest.string(guest.u64(info + 24)), "console=ttyS0");
    assert_eq!(guest.u64(info + 32), 0);
    let map = guest.u64(info + 40);
    assert_eq!(guest.u32(info + 48), 3);
    assert_eq!(
        (guest.u64(map), guest.u64(map + 8), guest.u32(map + 16)),
        (0, 0x9_fc00, 1)
    );
    assert_eq!(guest.u32(map + 24 + 16), 2);
    assert_eq!(
        (guest.u64(map + 48), guest.u64(map + 56)),
        (0x10_0000, 127 * MIB)
    );
    assert_eq!((guest.u64(list + 8), guest.u64(list + 16)), (6, 0));
    assert_eq!(guest.bytes(guest.u64(list), 6), b"initrd");
    assert_eq!(guest.placed("initrd"), 0x7ff_f000..0x7ff_f006);
    assert_eq!(guest.bytes(guest.u64(list + 32), 6), b"module");
    assert_eq!(guest.string(guest.u64(list + 48)), "key=value");
}

#[test]
fn pvh_note_is_found_after_other_notes_and_in_elf32() {
    let mut elf = ElfImage::new(false, AT, &[0x90; 8]);
    let entry = u32::try_from(AT + 4).unwrap().to_le_bytes();
    let notes = [
        note(b"GNU\0", 18, b"1234"),
        note(b"Xen\0", 6, b"abcd"),
        note(b"Xen\0", 18, &entry),
    ];
    elf.others.push((4, note(b"GNU\0", 3, b"5678")));
    elf.others.push((4, notes.concat()));
    elf.others.push((4, note(b"GNU\0", 5, b"9012")));
    let file = elf.build();
    let guest = boot(&image(&file));
    assert_eq!(
        (guest.loaded.protocol, guest.state().rip),
        (Protocol::Pvh, AT + 4)
    );
}

#[test]
fn tables_are_placed_around_segments_in_low_memory() {
    let mut elf = ElfImage::pvh(true, 0x1000, &[0xf4; 0x8000]);
    elf.loads.push(Load::at(0x1_0000, &[0xf4; 0x8000]));
    let file = elf.build();
    let guest = boot(&image(&file));
    assert_eq!(guest.state().rip, 0x1000);
    assert_eq!(guest.bytes(0x1000, 0x8000), [0xf4; 0x8000]);
    assert_eq!(guest.bytes(0x1_0000, 0x8000), [0xf4; 0x8000]);
}

/// A malformed image: how it differs from a good one, and the message.
type MalformedElf = (fn(&mut ElfImage), &'static str);

#[test]
fn malformed_elf_is_refused_with_a_reason() {
    let rows: [MalformedElf; 12] = [
        (
            |elf| elf.kind = 1,
            "the ELF image's type is 0x1, not an executable (0x2, or 0x3 if it is static)",
        ),
        (
            |elf| elf.machine = 183,
            "the ELF image is for machine 0xb7, not for x86 (0x3e in its class)",
        ),
        (
            |elf| elf.entry = 0x10,
            "the entry point 0x10 is outside of the loaded image",
        ),
        (
            |elf| elf.entry = u64::MAX,
            "the entry point 0xffffffffffffffff is outside of the loaded image",
        ),
        (
            |elf| elf.loads.clear(),
            "the ELF image has no segments to load",
        ),
        (
            |elf| elf.loads[0].memory_size = 3,
            "ELF segment 0 has 0x40 bytes in the file but only 0x3 in memory",
        ),
        (
            |elf| elf.loads[0].memory_size = u64::MAX,
            "segment 0 does not fit in guest memory: it needs 16384 PiB at 0x200000, and only RAM \
             below 3 GiB is used",
        ),
        (
            |elf| elf.loads[0].physical = 0xc000_0000,
            "segment 0 does not fit in guest memory: it needs 64 bytes at 0xc0000000, and only \
             RAM below 3 GiB is used",
        ),
        (
            |elf| elf.loads[0].physical = 0x800_0000,
            "segment 0 does not fit in guest memory: it needs 64 bytes at 0x8000000; use --memory \
             256M or more",
        ),
        (
            |elf| elf.loads.push(Load::at(AT + 0x3f, &[1])),
            "segment 1 at 0x20003f-0x20003f overlaps segment 0 at 0x200000-0x20003f",
        ),
        (
            |elf| elf.others.push((3, b"/lib/ld.so\0".to_vec())),
            "the ELF image requests an interpreter: only static executables can be booted",
        ),
        (
            |elf| {
                elf.others
                    .push((2, [8_u64.to_le_bytes(), 24_u64.to_le_bytes()].concat()))
            },
            "the ELF image has relocations (0x18 bytes), which are not applied: link it to a \
             fixed address (-no-pie, or -C relocation-model=static)",
        ),
    ];
    for (change, message) in rows {
        let mut elf = ElfImage::new(true, AT, &[0x90; 0x40]);
        change(&mut elf);
        assert_eq!(refusal(&image(&elf.build())), message);
    }
}

#[test]
fn bad_pvh_notes_are_refused() {
    let rows: [(&[u8], &str); 3] = [
        (
            &[1, 2],
            "the ELF image's PVH note has 0x2 bytes, not the 4 or 8 of an address",
        ),
        (
            &[0, 0, 0x40, 0],
            "the entry point 0x400000 is outside of the loaded image",
        ),
        (
            &[0, 0, 0x20, 0, 1, 0, 0, 0],
            "the ELF image's PVH entry point 0x100200000 is not a 32-bit address",
        ),
    ];
    for (content, message) in rows {
        let mut elf = ElfImage::new(true, AT, &[0x90]);
        elf.others.push((4, note(b"Xen\0", 18, content)));
        assert_eq!(refusal(&image(&elf.build())), message);
    }
    let plain = ElfImage::new(true, AT, &[0x90]).build();
    let request = LoadRequest {
        protocol: Some(Protocol::Pvh),
        ..image(&plain)
    };
    assert_eq!(
        refusal(&request),
        "the ELF image has no PVH note (Xen, type 0x12) with its 32-bit entry point"
    );
}

#[test]
fn elf_truncated_anywhere_is_refused() {
    for bits64 in [false, true] {
        let file = ElfImage::new(bits64, AT, &[0x90; 0x40]).build();
        for len in 4..file.len() {
            refusal(&image(&file[..len]));
        }
    }
    let file = ElfImage::new(true, AT, &[0x90; 0x40]).build();
    assert_eq!(
        refusal(&image(&file[..0x80])),
        "ELF segment 0 ends at 0xb8 in the file, but the file ends at 0x80"
    );
}

#[test]
fn refused_image_leaves_memory_untouched() {
    let layout = Layout::new(8 * MIB).unwrap();
    let memory = GuestMemoryMmap::from_ranges(&layout.ram()).unwrap();
    let file = ElfImage::pvh(true, 0x10_0000, &[0xf4; 64]).build();
    let request = LoadRequest {
        initrd: Some(&[1; 0x70_0000]),
        ..image(&file)
    };
    let error = load(&memory, &layout, &request).err().unwrap();
    assert_eq!(
        error.to_string(),
        "initrd does not fit in guest memory: it needs 7 MiB from 1 MiB on; use --memory 16M or \
         more"
    );
    let mut bytes = vec![0; 8 << 20];
    memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0));
}
