//! Properties: no image, however malformed, panics the loader or writes out of bounds.

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use crate::boot::tests::images::{
    ElfImage, Load, bzimage, multiboot_by_addresses, multiboot_header, multiboot2_header,
};
use crate::boot::tests::*;

const ACPI: std::ops::Range<u64> = 0xe_0000..0xe_2000;

/// Loads into `mib` MiB with ACPI tables, and checks the result: all parts are within RAM, do not
/// overlap each other or the ACPI tables, and contain the entry; nothing else is written.
fn check(mib: u64, request: &LoadRequest<'_>) {
    let layout = Layout::new(mib * MIB)
        .unwrap()
        .with_acpi(ACPI, 0xe_0000)
        .unwrap();
    let memory = GuestMemoryMmap::from_ranges(&layout.ram()).unwrap();
    let result = load(&memory, &layout, request);
    let mut bytes = vec![0; usize::try_from(layout.memory()).unwrap()];
    memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
    let placed = match &result {
        Ok(loaded) => loaded.placed.as_slice(),
        Err(_) => &[],
    };
    let mut end = 0;
    for part in placed {
        assert!(part.range.start >= end, "overlap: {placed:x?}");
        assert!(part.range.end > part.range.start, "empty: {placed:x?}");
        let free = end..part.range.start;
        assert_zero(&bytes, free);
        end = part.range.end;
    }
    assert_zero(&bytes, end..layout.memory());
    assert_zero(&bytes, ACPI);
    if let Ok(loaded) = &result {
        let entry = loaded.state.seg[seg::CS].base + loaded.state.rip;
        assert!(
            placed.iter().any(|part| part.range.contains(&entry)),
            "{entry:#x}"
        );
    }
}

fn assert_zero(bytes: &[u8], range: std::ops::Range<u64>) {
    let start = usize::try_from(range.start).unwrap();
    let bytes = &bytes[start..usize::try_from(range.end).unwrap()];
    // Slices compare faster than bytes.
    let chunk = bytes
        .chunks(0x1000)
        .position(|chunk| chunk != &[0; 0x1000][..chunk.len()]);
    assert_eq!(chunk, None, "written to a page after {start:#x}");
}

fn valid_images() -> Vec<Vec<u8>> {
    let multi = multiboot_header(3, &[]);
    let multi2 = multiboot2_header(&[(1, 0, &[1, 6]), (6, 0, &[]), (10, 1, &[0, 9, 8, 1])]);
    let multi2 = [&[0x90; 4][..], &multi2].concat();
    let mut two = ElfImage::pvh(true, 0x10_0000, &[0x90; 64]);
    two.loads.push(Load {
        memory_size: 0x2000,
        ..Load::at(0x8000, &[0xf4; 128])
    });
    vec![
        two.build(),
        ElfImage::new(false, 0x1_0000, &[0xf4; 32]).build(),
        ElfImage::pvh(false, 0x10_0000, &[0xf4; 32]).build(),
        ElfImage::new(false, 0x10_0000, &multi).build(),
        ElfImage::new(false, 0x10_0000, &multi2).build(),
        multiboot_by_addresses(),
        bzimage(),
    ]
}

/// Values at and around the bounds that the loaders check.
fn interesting() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        select(vec![
            0, 1, 0xfff, 0x1000, 0x9_fc00, 0xe_0000, 0xf_ffff, 0x10_0000
        ]),
        select(vec![
            0x20_0000,
            0x7fff_ffff,
            0xffff_ffff,
            1 << 32,
            1 << 63,
            u64::MAX
        ]),
        0..0x200_0000_u64,
    ]
}

fn protocol() -> impl Strategy<Value = Option<Protocol>> {
    option::of(select(vec![
        Protocol::Flat,
        Protocol::Pvh,
        Protocol::Elf,
        Protocol::Multiboot,
        Protocol::Multiboot2,
        Protocol::Linux,
    ]))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_image_stays_in_bounds(
        bytes in vec(any::<u8>(), 0..0x1000),
        protocol in protocol(),
        load_address in option::of(interesting()),
    ) {
        let load_address = load_address.filter(|_| matches!(protocol, None | Some(Protocol::Flat)));
        check(2, &LoadRequest { protocol, load_address, ..image(&bytes) });
    }

    #[test]
    fn mutated_image_stays_in_bounds(
        mut bytes in select(valid_images()),
        changes in vec((any::<Index>(), interesting(), 1..=8_usize), 0..4),
        keep in any::<Index>(),
        truncate in prop::bool::weighted(0.2),
        mib in select(vec![1, 2, 20]),
        initrd in 0..0x3000_usize,
        cmdline in "[a-z]{0,40}",
    ) {
        // The first KiB holds all headers.
        for (at, value, size) in changes {
            let at = at.index(bytes.len().min(0x400));
            let end = (at + size).min(bytes.len());
            bytes[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
        }
        if truncate {
            bytes.truncate(keep.index(bytes.len()));
        }
        let initrd = vec![0xab; initrd];
        let request = LoadRequest {
            initrd: (!initrd.is_empty()).then_some(&initrd),
            cmdline: cmdline.into_bytes(),
            ..image(&bytes)
        };
        check(mib, &request);
    }

    #[test]
    fn multiboot_image_with_any_addresses_stays_in_bounds(fields in prop::array::uniform5(interesting())) {
        #[expect(clippy::cast_possible_truncation, reason = "any 32 bits do")]
        let fields = fields.map(|field| field as u32);
        let mut bytes = multiboot_header(0x1_0000, &fields);
        bytes.resize(0x800, 0x90);
        check(2, &image(&bytes));
    }

    #[test]
    fn elf_with_any_segments_stays_in_bounds(
        loads in vec((interesting(), interesting(), 0..64_usize, interesting()), 1..6),
        entry in interesting(),
    ) {
        let mut elf = ElfImage::pvh(true, 0, &[]);
        elf.entry = entry;
        elf.loads = loads
            .into_iter()
            .map(|(virtual_, physical, len, memory_size)| Load {
                virtual_,
                physical,
                data: vec![0xf4; len],
                memory_size,
            })
            .collect();
        let protocol = Some(Protocol::Elf);
        check(2, &LoadRequest { protocol, ..image(&elf.build()) });
    }

    #[test]
    fn flat_image_stays_in_bounds(
        len in 1..0x2_0000_usize,
        load_address in option::of(interesting()),
        entry in option::of(interesting()),
        mode in option::of(select(vec![EntryMode::Real, EntryMode::Protected, EntryMode::Long])),
    ) {
        let bytes = vec![0xf4; len];
        let protocol = Some(Protocol::Flat);
        check(2, &LoadRequest { protocol, load_address, entry, mode, ..image(&bytes) });
    }
}
