//! Multiboot 2.

use crate::boot::tests::images::{ElfImage, multiboot2_header};
use crate::boot::tests::*;

const AT: u64 = 0x10_0000;

fn elf_image(tags: &[(u16, u16, &[u32])]) -> Vec<u8> {
    // The segment is at 84 in the file: the header is at a multiple of 8.
    let code = [&[0x90; 4], &multiboot2_header(tags)[..], &[0x90; 32]].concat();
    ElfImage::new(false, AT, &code).build()
}

/// The content of each tag of the information, by its type.
fn tags(guest: &BootedGuest) -> Vec<(u32, Vec<u8>)> {
    let info = guest.state().gpr[gpr::RBX];
    let total = u64::from(guest.u32(info));
    let (mut at, mut tags) = (8, Vec::new());
    while at < total {
        let (kind, size) = (guest.u32(info + at), guest.u32(info + at + 4));
        let len = usize::try_from(size).unwrap() - 8;
        tags.push((kind, guest.bytes(info + at + 8, len)));
        at += u64::from(size).next_multiple_of(8);
    }
    assert_eq!(at, total);
    tags
}

fn tag(guest: &BootedGuest, kind: u32) -> Option<Vec<u8>> {
    let found = tags(guest).into_iter().find(|tag| tag.0 == kind);
    found.map(|tag| tag.1)
}

#[test]
fn multiboot2_elf_is_entered_with_magic_and_information() {
    let file = elf_image(&[(1, 0, &[1, 2, 3, 4, 6, 14, 15]), (6, 0, &[])]);
    let request = LoadRequest {
        cmdline: b"root=/dev/null".to_vec(),
        initrd: Some(b"first"),
        ..image(&file)
    };
    let guest = boot(&request);
    assert_eq!(guest.loaded.protocol, Protocol::Multiboot2);
    assert_protected(guest.state());
    assert_eq!(
        (guest.state().rip, guest.state().gpr[gpr::RAX]),
        (AT, 0x36d7_6289)
    );
    assert_eq!(guest.state().gpr[gpr::RBX] % 8, 0);
    assert_eq!(tag(&guest, 1).unwrap(), b"root=/dev/null\0");
    assert_eq!(tag(&guest, 2).unwrap(), b"hindsight\0");
    let module = tag(&guest, 3).unwrap();
    assert_eq!(module, [0, 0x10, 0x10, 0, 5, 0x10, 0x10, 0, 0]);
    assert_eq!(guest.bytes(0x10_1000, 5), b"first");
    let memory = tag(&guest, 4).unwrap();
    assert_eq!(memory, [0x7f, 2, 0, 0, 0, 0xfc, 1, 0]);
    let map = tag(&guest, 6).unwrap();
    assert_eq!(map[..8], [24, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(map.len(), 8 + 3 * 24);
    assert_eq!(
        map[8..32],
        [
            [0; 8],
            [0, 0xfc, 9, 0, 0, 0, 0, 0],
            [1, 0, 0, 0, 0, 0, 0, 0]
        ]
        .concat()
    );
    assert_eq!(tag(&guest, 8), None, "there is no screen");
    assert_eq!(tags(&guest).last().unwrap().0, 0);
}

#[test]
fn screen_is_a_framebuffer_of_text() {
    let file = elf_image(&[(4, 0, &[1]), (5, 0, &[1024, 768, 32])]);
    let request = LoadRequest {
        text_screen: true,
        ..image(&file)
    };
    let screen = tag(&boot(&request), 8).unwrap();
    let expected = [
        0, 0x80, 0x0b, 0, 0, 0, 0, 0, 160, 0, 0, 0, 80, 0, 0, 0, 25, 0, 0, 0, 16, 2, 0, 0,
    ];
    assert_eq!(screen, expected);
}

#[test]
fn required_tags_that_are_missing_are_refused_and_optional_ones_ignored() {
    type Tag<'a> = (u16, u16, &'a [u32]);
    let rows: [(Tag<'_>, &str); 7] = [
        ((1, 0, &[4, 22]), "information of type 22"),
        ((1, 0, &[u32::MAX]), "information of type 4294967295"),
        ((4, 0, &[1]), "--display"),
        ((5, 0, &[0, 0, 0]), "--display"),
        ((7, 0, &[]), "tag 7"),
        ((99, 0, &[]), "tag 99"),
        ((3, 0, &[]), "tag 3 is too short"),
    ];
    for ((kind, flags, words), expected) in rows {
        let file = elf_image(&[(kind, flags, words)]);
        let error = refusal(&image(&file));
        assert!(error.contains(expected), "{kind}: {error}");
    }
    for (kind, words) in [(1, &[12_u32][..]), (5, &[0, 0, 0]), (7, &[]), (99, &[1])] {
        boot(&image(&elf_image(&[(kind, 1, words)])));
    }
    // Known information that this machine does not have.
    boot(&image(&elf_image(&[(1, 0, &[5, 8, 12])])));
}

#[test]
fn image_by_addresses_is_placed_there_and_entered_at_its_entry_tag() {
    let addresses: [u32; 4] = [0x10_0000, 0xffff_ffff, 0, 0x10_2000];
    let mut file = multiboot2_header(&[(2, 0, &addresses), (3, 0, &[0x10_0060])]);
    file.resize(0x100, 0x90);
    let guest = boot(&image(&file));
    assert_eq!(guest.state().rip, 0x10_0060);
    assert_eq!(guest.bytes(0x10_0000, file.len()), file);
    let file = multiboot2_header(&[(2, 0, &addresses)]);
    let error = refusal(&image(&file));
    assert!(error.contains("entry"), "{error}");
}

#[test]
fn truncated_and_foreign_headers_are_refused() {
    let whole = multiboot2_header(&[(6, 0, &[])]);
    let short = &whole[..whole.len() - 8];
    assert!(refusal(&image(short)).contains("truncated"));
    let mut mips = whole;
    mips[4] = 4;
    let sum = u32::from_le_bytes(mips[12..16].try_into().unwrap()) - 4;
    mips[12..16].copy_from_slice(&sum.to_le_bytes());
    assert!(refusal(&image(&mips)).contains("architecture 4"));
}

#[test]
fn machine_with_acpi_tables_passes_its_rsdp() {
    let layout = Layout::new(128 * MIB).unwrap();
    let layout = layout.with_acpi(0xe_0000..0xe_1000, 0xe_0000).unwrap();
    let guest = boot_in(&layout, &image(&elf_image(&[]))).unwrap();
    assert_eq!(tag(&guest, 14).unwrap().len(), 20);
    assert_eq!(tag(&guest, 15).unwrap().len(), 36);
}

/// The image with section headers: an empty one, symbols, and strings that are beyond the file.
fn with_sections(mut file: Vec<u8>) -> Vec<u8> {
    let symbols = u32::try_from(file.len()).unwrap();
    file.extend(b"symbols!");
    let headers = u32::try_from(file.len()).unwrap();
    let section = |kind: u32, offset: u32, size: u32| {
        let words = [0, kind, 0, 0, offset, size, 0, 0, 0, 0];
        words
            .iter()
            .flat_map(|word: &u32| word.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let sections = [(0, 0, 0), (2, symbols, 8), (3, symbols, u32::MAX)];
    for (kind, offset, size) in sections {
        file.extend(section(kind, offset, size));
    }
    file[0x20..0x24].copy_from_slice(&headers.to_le_bytes());
    file[0x2e..0x34].copy_from_slice(&[40, 0, 3, 0, 2, 0]);
    file
}

#[test]
fn symbols_are_loaded_and_their_section_has_the_address() {
    let file = with_sections(elf_image(&[(1, 0, &[9])]));
    let guest = boot(&image(&file));
    let sections = tag(&guest, 9).unwrap();
    assert_eq!(sections[..12], [3, 0, 0, 0, 40, 0, 0, 0, 2, 0, 0, 0]);
    let address = |index: usize| {
        let at = 12 + 40 * index + 12;
        u32::from_le_bytes(sections[at..at + 4].try_into().unwrap())
    };
    assert_eq!((address(0), address(2)), (0, 0));
    assert_eq!(guest.bytes(address(1).into(), 8), b"symbols!");
}

#[test]
fn malformed_sections_are_left_out() {
    let good = with_sections(elf_image(&[]));
    // The offset of the headers, their size and their number.
    for (at, byte) in [(0x23, 0xff), (0x2e, 39), (0x31, 0xff)] {
        let mut file = good.clone();
        file[at] = byte;
        assert_eq!(tag(&boot(&image(&file)), 9), None, "{at:#x}");
    }
}
