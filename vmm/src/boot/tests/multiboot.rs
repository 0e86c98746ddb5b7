//! Multiboot 1.

use crate::boot::tests::images::{ElfImage, multiboot_by_addresses, multiboot_header};
use crate::boot::tests::*;

const AT: u64 = 0x10_0000;

fn elf_image(header: &[u8]) -> Vec<u8> {
    ElfImage::new(false, AT, &[header, &[0x90; 32]].concat()).build()
}

#[test]
fn multiboot_elf_is_entered_with_magic_and_information() {
    let file = elf_image(&multiboot_header(3, &[]));
    let request = LoadRequest {
        cmdline: b"root=/dev/null".to_vec(),
        initrd: Some(b"first"),
        modules: vec![BootModule {
            data: b"second",
            args: b"b c".to_vec(),
            name: Vec::new(),
        }],
        ..image(&file)
    };
    let guest = boot(&request);
    assert_eq!(guest.loaded.protocol, Protocol::Multiboot);
    assert_protected(guest.state());
    assert_eq!(
        (guest.state().rip, guest.state().gpr[gpr::RAX]),
        (AT, 0x2bad_b002)
    );
    let info = guest.state().gpr[gpr::RBX];
    let field = |offset| u64::from(guest.u32(info + offset));
    assert_eq!(field(0), 0b10_0100_1101);
    assert_eq!((field(4), field(8)), (639, 127 * 1024));
    assert_eq!(guest.string(field(16)), "root=/dev/null");
    assert_eq!(guest.string(field(64)), "hindsight");
    assert_eq!(field(20), 2);
    let module = |index: u64, offset| u64::from(guest.u32(field(24) + 16 * index + offset));
    assert_eq!((module(0, 0), module(0, 4)), (0x10_1000, 0x10_1005));
    assert_eq!(guest.bytes(0x10_1000, 5), b"first");
    assert_eq!(guest.string(module(0, 8)), "");
    assert_eq!(guest.bytes(module(1, 0), 6), b"second");
    assert_eq!(guest.string(module(1, 8)), "b c");
    assert_eq!(field(44), 3 * 24);
    let map = field(48);
    assert_eq!(
        (guest.u32(map), guest.u64(map + 4), guest.u64(map + 12)),
        (20, 0, 0x9_fc00)
    );
    assert_eq!((guest.u32(map + 20), guest.u32(map + 44)), (1, 2));
}

#[test]
fn multiboot_command_lines_begin_with_file_names() {
    let file = elf_image(&multiboot_header(3, &[]));
    let module = |args: &[u8], name: &[u8]| BootModule {
        data: b"data",
        args: args.to_vec(),
        name: name.to_vec(),
    };
    let strings = |cmdline: &[u8]| {
        let guest = boot(&LoadRequest {
            cmdline: cmdline.to_vec(),
            name: b"kernel".to_vec(),
            initrd_name: b"initrd.gz".to_vec(),
            initrd: Some(b"first"),
            modules: vec![module(b"quiet", b"vmlinuz"), module(b"", b"table")],
            ..image(&file)
        });
        let field = |at| u64::from(guest.u32(at));
        let info = guest.state().gpr[gpr::RBX];
        let module = |n: u64| field(field(info + 24) + 16 * n + 8);
        [field(info + 16), module(0), module(1), module(2)].map(|at| guest.string(at))
    };
    assert_eq!(
        strings(b"console=com1"),
        ["kernel console=com1", "initrd.gz", "vmlinuz quiet", "table"]
    );
    assert_eq!(strings(b"")[0], "kernel");
}

#[test]
fn multiboot_header_addresses_place_the_image() {
    let file = multiboot_by_addresses();
    let guest = boot(&image(&file));
    assert_eq!(guest.state().rip, 0x10_0030);
    assert_eq!(guest.placed("image"), 0x10_0000..0x10_1080);
    assert_eq!(guest.bytes(0x10_0000, 0x80), file[..0x80]);
    assert_eq!(guest.bytes(0x10_0080, 0x80), [0; 0x80]);
}

#[test]
fn zero_load_end_loads_the_rest_of_the_file() {
    let mut file = multiboot_header(0x1_0000, &[0x20_0000, 0x20_0000, 0, 0, 0x20_0020]);
    file.resize(0x50, 0x90);
    assert_eq!(boot(&image(&file)).placed("image"), 0x20_0000..0x20_0050);
}

#[test]
fn requested_text_mode_is_ignored_and_graphics_mode_refused() {
    let video = |mode| multiboot_header(4, &[0, 0, 0, 0, 0, mode, 80, 25, 0]);
    assert_eq!(boot(&image(&elf_image(&video(1)))).state().rip, AT);
    assert_eq!(
        refusal(&image(&elf_image(&video(0)))),
        "the multiboot header requires a graphics mode, and there is no display"
    );
}

#[test]
fn multiboot_header_beyond_8_kib_unaligned_or_with_wrong_sum_is_ignored() {
    let mut late = vec![0; 0x1ff8];
    late.extend(multiboot_header(0, &[]));
    assert_eq!(detect(&late), None);
    assert_eq!(detect(&late[4..]), Some(Protocol::Multiboot));
    assert_eq!(detect(&late[2..]), None);
    let mut sum = multiboot_header(0, &[]);
    sum[8] ^= 1;
    assert_eq!(detect(&sum), None);
}

#[test]
fn bad_headers_are_refused_with_a_reason() {
    let by_addresses = |fields: [u32; 5]| multiboot_header(0x1_0000, &fields);
    let rows = [
        (
            elf_image(&multiboot_header(0x48, &[])),
            "the multiboot header requires features 0x48, which are not supported",
        ),
        (
            by_addresses([0x1000, 0x1001, 0, 0, 0x1000]),
            "the multiboot header's addresses contradict each other: load_addr is above \
             header_addr (0x1001, limit 0x1000)",
        ),
        (
            by_addresses([0x1001, 0x1000, 0, 0, 0x1000]),
            "the multiboot header's addresses contradict each other: load_addr is before the \
             file's start (0x1, limit 0x0)",
        ),
        (
            by_addresses([0x1000, 0x1000, 0xfff, 0, 0x1000]),
            "the multiboot header's addresses contradict each other: load_end_addr is not above \
             load_addr (0xfff, limit 0x1000)",
        ),
        (
            by_addresses([0x1000, 0x1000, 0x1021, 0, 0x1000]),
            "the multiboot header's addresses contradict each other: load_end_addr is beyond the \
             file's end (0x1021, limit 0x1020)",
        ),
        (
            by_addresses([0x1000, 0x1000, 0x1020, 0x101f, 0x1000]),
            "the multiboot header's addresses contradict each other: bss_end_addr is below \
             load_end_addr (0x101f, limit 0x1020)",
        ),
        (
            by_addresses([0x1000, 0x1000, 0, 0, 0x1020]),
            "the entry point 0x1020 is outside of the loaded image",
        ),
        (
            by_addresses([u32::MAX; 5]),
            "the multiboot header's addresses contradict each other: load_end_addr is not above \
             load_addr (0xffffffff, limit 0xffffffff)",
        ),
        (
            multiboot_header(0x1_0000, &[0]),
            "the multiboot header at 0x0 is truncated: the file ends at 0x10",
        ),
        (
            multiboot_header(0, &[]),
            "the image is not ELF: it does not start with 7f 45 4c 46",
        ),
    ];
    for (file, message) in rows {
        assert_eq!(refusal(&image(&file)), message);
    }
    let request = LoadRequest {
        protocol: Some(Protocol::Multiboot),
        ..image(&[0; 64])
    };
    assert_eq!(
        refusal(&request),
        "the image has no multiboot header in its first 8 KiB"
    );
}

#[test]
fn module_that_does_not_fit_is_refused() {
    let file = elf_image(&multiboot_header(0, &[]));
    let request = LoadRequest {
        modules: vec![BootModule {
            data: &[1; 0x1_0000],
            args: vec![],
            name: Vec::new(),
        }],
        ..image(&file)
    };
    let layout = Layout::new(MIB + 0x1000).unwrap();
    let error = boot_in(&layout, &request).err().unwrap();
    assert_eq!(
        error.to_string(),
        "module 0 does not fit in guest memory: it needs 64 KiB from 0x10002c on; use --memory 2M \
         or more"
    );
}
