//! Loads whole images by [`load()`], and checks guest memory and the entry state.

mod elf;
mod flat;
mod images;
mod linux;
mod multiboot;
mod multiboot2;
mod properties;

use hindsight_cpu::state::{CpuState, gpr, seg};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::boot::*;
use crate::memory::layout::Layout;

const MIB: u64 = 1 << 20;

/// A loaded image with its memory.
struct BootedGuest {
    memory: GuestMemoryMmap,
    loaded: LoadedImage,
}

impl BootedGuest {
    fn state(&self) -> &CpuState {
        &self.loaded.state
    }

    fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory
            .read_slice(&mut bytes, GuestAddress(at))
            .unwrap();
        bytes
    }

    fn u32(&self, at: u64) -> u32 {
        self.memory.read_obj(GuestAddress(at)).unwrap()
    }

    fn u64(&self, at: u64) -> u64 {
        self.memory.read_obj(GuestAddress(at)).unwrap()
    }

    /// The NUL-terminated string at `at`.
    fn string(&self, at: u64) -> String {
        let bytes = self.bytes(at, 0x100);
        let end = bytes.iter().position(|&byte| byte == 0).unwrap();
        String::from_utf8(bytes[..end].to_vec()).unwrap()
    }

    fn placed(&self, name: &str) -> std::ops::Range<u64> {
        let found = self.loaded.placed.iter().find(|placed| placed.name == name);
        found
            .unwrap_or_else(|| panic!("{name} was not placed"))
            .range
            .clone()
    }
}

fn boot_in(layout: &Layout, request: &LoadRequest<'_>) -> Result<BootedGuest, BootError> {
    let memory = GuestMemoryMmap::from_ranges(&layout.ram()).unwrap();
    let loaded = load(&memory, layout, request)?;
    Ok(BootedGuest { memory, loaded })
}

/// Loads into 128 MiB.
fn boot(request: &LoadRequest<'_>) -> BootedGuest {
    boot_in(&Layout::new(128 * MIB).unwrap(), request).unwrap()
}

/// The message with which a guest of 128 MiB refuses the request.
fn refusal(request: &LoadRequest<'_>) -> String {
    match boot_in(&Layout::new(128 * MIB).unwrap(), request) {
        Ok(_) => panic!("the image was loaded"),
        Err(error) => error.to_string(),
    }
}

fn image(image: &[u8]) -> LoadRequest<'_> {
    LoadRequest {
        image,
        ..LoadRequest::default()
    }
}

fn assert_protected(state: &CpuState) {
    assert_eq!((state.cr0, state.cr4, state.efer), (0x11, 0, 0));
    assert_eq!(state.rflags, 2);
    let code = state.seg[seg::CS];
    assert_eq!(
        (code.selector, code.base, code.limit),
        (0x10, 0, 0xffff_ffff)
    );
    assert_eq!(code.access, 0xc09b);
    let data = state.seg[seg::DS];
    assert_eq!(
        (data.selector, data.base, data.limit),
        (0x18, 0, 0xffff_ffff)
    );
    assert_eq!(data.access, 0xc093);
    assert_eq!(
        (state.tr.base, state.tr.limit, state.tr.access),
        (0, 0x67, 0x8b)
    );
}

fn assert_long(guest: &BootedGuest) {
    let state = guest.state();
    assert_eq!(
        (state.cr0, state.cr4, state.efer),
        (0x8000_0011, 0x20, 0x500)
    );
    assert_eq!(state.rflags, 2);
    assert_eq!(
        (state.seg[seg::CS].selector, state.seg[seg::CS].access),
        (0x10, 0xa09b)
    );
    for index in [seg::DS, seg::ES, seg::SS] {
        assert_eq!(
            (state.seg[index].selector, state.seg[index].access),
            (0x18, 0xc093)
        );
    }
    assert_eq!(guest.u64(state.gdtr.base + 0x10), 0x00af_9b00_0000_ffff);
    assert_eq!(guest.u64(state.gdtr.base + 0x18), 0x00cf_9300_0000_ffff);
    assert_eq!(state.gdtr.limit, 0x2f);
    // The descriptor of the TSS holds the address that TR has.
    let low = guest.u64(state.gdtr.base + 0x20);
    let base = (low >> 16 & 0xff_ffff) | (low >> 32 & 0xff00_0000);
    assert_eq!((base, low >> 40 & 0xff), (state.tr.base, 0x8b));
    assert_eq!(state.cr3, guest.placed("page tables").start);
    assert_eq!(guest.u64(state.cr3), state.cr3 + 0x1003);
}

#[test]
fn detection_prefers_multiboot_then_pvh_then_linux_then_elf() {
    let multiboot = images::multiboot_header(0, &[]);
    let mut pvh = images::ElfImage::pvh(true, 0x10_0000, &[0x90; 64]);
    assert_eq!(detect(&pvh.build()), Some(Protocol::Pvh));
    pvh.loads[0] = images::Load::at(0x10_0000, &multiboot);
    assert_eq!(detect(&pvh.build()), Some(Protocol::Multiboot));
    let elf = images::ElfImage::new(false, 0x10_0000, &[0x90; 64]).build();
    assert_eq!(detect(&elf), Some(Protocol::Elf));
    let mut linux = images::bzimage();
    assert_eq!(detect(&linux), Some(Protocol::Linux));
    linux[..4].copy_from_slice(b"\x7fELF");
    assert_eq!(detect(&linux), Some(Protocol::Linux));
    assert_eq!(detect(&[0x90; 0x4000]), None);
    assert_eq!(detect(&[]), None);
}

#[test]
fn unrecognised_image_is_refused_with_the_known_formats() {
    let message = refusal(&image(&[0x90; 100]));
    for part in [
        "multiboot",
        "ELF",
        "Linux",
        "--protocol flat",
        "--load-address",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert_eq!(refusal(&image(&[])), "the image is empty");
    assert_eq!(
        refusal(&image(b"\x1f\x8b\x08\0")),
        "the image is compressed with gzip: decompress it first"
    );
}

#[test]
fn options_that_the_protocol_would_ignore_are_refused() {
    let elf = images::ElfImage::new(true, 0x10_0000, &[0x90]).build();
    let linux = images::bzimage();
    let base = LoadRequest {
        protocol: Some(Protocol::Flat),
        ..image(&elf)
    };
    let rows = [
        (
            "--load-address",
            LoadRequest {
                load_address: Some(0),
                ..image(&elf)
            },
        ),
        (
            "--entry",
            LoadRequest {
                entry: Some(0),
                ..image(&elf)
            },
        ),
        (
            "--mode",
            LoadRequest {
                mode: Some(EntryMode::Long),
                ..image(&linux)
            },
        ),
        (
            "--initrd",
            LoadRequest {
                initrd: Some(&[1]),
                ..base.clone()
            },
        ),
        (
            "--module",
            LoadRequest {
                modules: vec![BootModule::default()],
                ..base.clone()
            },
        ),
        (
            "--cmdline",
            LoadRequest {
                cmdline: b"a".to_vec(),
                ..base.clone()
            },
        ),
        (
            "--module",
            LoadRequest {
                modules: vec![BootModule::default()],
                ..image(&linux)
            },
        ),
    ];
    for (option, request) in rows {
        let message = refusal(&request);
        assert!(
            message.starts_with(&format!("{option} cannot be used with")),
            "{message}"
        );
    }
}

#[test]
fn image_over_acpi_tables_is_refused_and_start_info_has_the_rsdp() {
    let layout = Layout::new(MIB)
        .unwrap()
        .with_acpi(0xe_0000..0xe_2000, 0xe_0000)
        .unwrap();
    let request = LoadRequest {
        load_address: Some(0xe_1fff),
        ..image(&[0xf4])
    };
    let error = boot_in(&layout, &request).err().unwrap();
    assert_eq!(
        error.to_string(),
        "image at 0xe1fff-0xe1fff overlaps the ACPI tables at 0xe0000-0xe1fff"
    );
    let pvh = images::ElfImage::pvh(true, 0x2_0000, &[0xf4]).build();
    let guest = boot_in(&layout, &image(&pvh)).unwrap();
    assert_eq!(guest.u64(guest.state().gpr[gpr::RBX] + 32), 0xe_0000);
}

#[test]
fn low_memory_has_bios_structures_unless_the_image_occupies_it() {
    let pvh = |address| images::ElfImage::pvh(true, address, &[0xf4; 0x500]).build();
    let guest = boot(&image(&pvh(0x10_0000)));
    assert_eq!(guest.bytes(0x40e, 2), 0x9fc0_u16.to_le_bytes());
    assert_eq!(guest.bytes(0x413, 2), 639_u16.to_le_bytes());
    // The timer's interrupt returns; INT 0 and INT 13H push AX, report their vector and fail.
    for (vector, code) in [(2, 0xcf), (8, 0xcf), (0, 0x50), (0x13, 0x50), (0xff, 0x50)] {
        let entry = u64::from(guest.u32(4 * vector));
        let handler = (entry >> 16 << 4) + (entry & 0xffff);
        assert_eq!(guest.bytes(handler, 1), [code], "vector {vector:#x}");
    }
    let real = boot(&LoadRequest {
        mode: Some(EntryMode::Real),
        ..image(&[0xf4])
    });
    assert_eq!(real.bytes(0, 0x500), guest.bytes(0, 0x500));
    // An image in low memory replaces the structures, and other flat images never get them.
    let guest = boot(&image(&pvh(0x300)));
    assert_eq!(guest.bytes(0x300, 0x500), [0xf4; 0x500]);
    assert_eq!(guest.bytes(0, 4), [0; 4]);
    let guest = boot(&LoadRequest {
        mode: Some(EntryMode::Protected),
        ..image(&[0xf4])
    });
    assert_eq!(guest.bytes(0, 0x500), [0; 0x500]);
}
