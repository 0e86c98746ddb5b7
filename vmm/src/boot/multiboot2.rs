//! Multiboot 2: "The Multiboot2 Specification version 2.0".
//!
//! The header is in the first 32 KiB of an ELF image, or of any image if the header has the addresses. The
//! image is entered in 32-bit protected mode with EAX = 0x36d76289 and the address of the information in EBX.
//!
//! Deviations: ELF64 images are accepted too, as in GRUB; a relocatable image stays at its addresses; there is
//! no EFI.

use hindsight_cpu::state::{CpuState, gpr};

use crate::boot::bytes::{address32, u16_at, u32_at};
use crate::boot::elf_file::Elf;
use crate::boot::multiboot::{LOADER_NAME, command_line, place_by_addresses};
use crate::boot::placement::{Fit, Placement};
use crate::boot::request::{NamedModule, c_string};
use crate::boot::{BootError, LoadRequest, elf_file, elf_sections, entry};
use crate::memory::layout::{CONVENTIONAL_END, EXTENDED_START, Layout};

const SEARCH: usize = 0x8000;
const HEADER_MAGIC: u32 = 0xe852_50d6;
const LOADER_MAGIC: u64 = 0x36d7_6289;
/// The only architecture: 32-bit protected mode of i386.
const I386: u32 = 0;
/// Bytes of the header without its tags, and the least of a tag.
const HEADER_SIZE: usize = 16;
const TAG_SIZE: usize = 8;
/// Tags begin at multiples of this.
const ALIGN: usize = 8;

/// Flag of a header's tag: the loader may ignore it.
const OPTIONAL: u16 = 1 << 0;
/// Console flag: there must be a console.
const CONSOLE_REQUIRED: u32 = 1 << 0;
/// A load address that means the start of the file.
const WHOLE_FILE: u32 = 0xffff_ffff;

/// Types of the header's tags.
mod header_tag {
    pub(super) const END: u16 = 0;
    pub(super) const INFORMATION_REQUEST: u16 = 1;
    pub(super) const ADDRESS: u16 = 2;
    pub(super) const ENTRY: u16 = 3;
    pub(super) const CONSOLE: u16 = 4;
    pub(super) const FRAMEBUFFER: u16 = 5;
    pub(super) const MODULE_ALIGN: u16 = 6;
    pub(super) const EFI_ENTRY_I386: u16 = 8;
    pub(super) const EFI_ENTRY_AMD64: u16 = 9;
    pub(super) const RELOCATABLE: u16 = 10;
}

/// Types of the information's tags.
mod info_tag {
    pub(super) const END: u32 = 0;
    pub(super) const CMDLINE: u32 = 1;
    pub(super) const LOADER_NAME: u32 = 2;
    pub(super) const MODULE: u32 = 3;
    pub(super) const MEMORY: u32 = 4;
    pub(super) const MEMORY_MAP: u32 = 6;
    pub(super) const FRAMEBUFFER: u32 = 8;
    pub(super) const ELF_SECTIONS: u32 = 9;
    pub(super) const RSDP_OLD: u32 = 14;
    pub(super) const RSDP_NEW: u32 = 15;
    /// The last type of the specification: the base address of the loaded image.
    pub(super) const LAST: u32 = 21;
}

/// The RSDP: 20 bytes in version 1 of ACPI, 36 since.
pub(super) struct Rsdp(pub(super) [u8; 36]);

impl Default for Rsdp {
    fn default() -> Self {
        Self([0; 36])
    }
}

const RSDP_OLD_SIZE: usize = 20;

/// The text screen: 80x25 cells of 16 bits at B8000H.
const TEXT_SCREEN: [u32; 4] = [0xb_8000, 160, 80, 25];
const TEXT_BITS: u8 = 16;
const TEXT_TYPE: u8 = 2;

/// The offset of a header with a valid checksum in the first 32 KiB, if there is one.
pub(super) fn find_header(image: &[u8]) -> Option<usize> {
    let search = &image[..image.len().min(SEARCH)];
    (0..search.len()).step_by(ALIGN).find(|&at| {
        let word = |index: usize| u32_at(search, at + 4 * index);
        match (word(0), word(1), word(2), word(3)) {
            (Some(HEADER_MAGIC), Some(arch), Some(length), Some(sum)) => {
                let sum = HEADER_MAGIC
                    .wrapping_add(arch)
                    .wrapping_add(length)
                    .wrapping_add(sum);
                sum == 0
            }
            _ => false,
        }
    })
}

/// What the header's tags ask for.
#[derive(Default)]
struct HeaderTags {
    /// The addresses of the header, of the image, of its end, and of the end of its BSS.
    addresses: Option<[u32; 4]>,
    entry: Option<u32>,
}

impl HeaderTags {
    /// Reads the header at `at`.
    fn parse(image: &[u8], at: usize, request: &LoadRequest<'_>) -> Result<Self, BootError> {
        let truncated = BootError::MultibootTruncated {
            at,
            file_end: image.len(),
        };
        let word = |offset| u32_at(image, at + offset);
        let (Some(architecture), Some(length)) = (word(4), word(8)) else {
            return Err(truncated);
        };
        if architecture != I386 {
            return Err(BootError::Multiboot2Architecture(architecture));
        }
        let end = at.checked_add(crate::memory::layout::to_usize(length.into()));
        let Some(bytes) = end.and_then(|end| image.get(at..end)) else {
            return Err(truncated);
        };
        let mut header = Self::default();
        let mut rest = bytes.get(HEADER_SIZE..).unwrap_or_default();
        loop {
            let (Some(kind), Some(flags), Some(size)) =
                (u16_at(rest, 0), u16_at(rest, 2), u32_at(rest, 4))
            else {
                return Err(truncated);
            };
            if kind == header_tag::END {
                return Ok(header);
            }
            let size = crate::memory::layout::to_usize(size.into());
            let Some(content) = rest.get(TAG_SIZE..size) else {
                return Err(truncated);
            };
            header.add(kind, content, flags & OPTIONAL != 0, request)?;
            rest = rest.get(size.next_multiple_of(ALIGN)..).unwrap_or_default();
        }
    }

    /// Takes a tag into account.
    fn add(
        &mut self,
        kind: u16,
        content: &[u8],
        optional: bool,
        request: &LoadRequest<'_>,
    ) -> Result<(), BootError> {
        let word =
            |index: usize| u32_at(content, 4 * index).ok_or(BootError::Multiboot2ShortTag(kind));
        match kind {
            header_tag::INFORMATION_REQUEST if !optional => {
                let words = content.chunks_exact(4).filter_map(|bytes| u32_at(bytes, 0));
                let mut unknown = words.filter(|&kind| !is_known(kind));
                unknown
                    .next()
                    .map_or(Ok(()), |kind| Err(BootError::Multiboot2Information(kind)))
            }
            header_tag::ADDRESS => {
                self.addresses = Some([word(0)?, word(1)?, word(2)?, word(3)?]);
                Ok(())
            }
            header_tag::ENTRY => {
                self.entry = Some(word(0)?);
                Ok(())
            }
            header_tag::CONSOLE if word(0)? & CONSOLE_REQUIRED != 0 && !request.text_screen => {
                Err(BootError::Multiboot2Display)
            }
            // Width, height and depth are what the image prefers.
            header_tag::FRAMEBUFFER if !optional && !request.text_screen => {
                Err(BootError::Multiboot2Display)
            }
            header_tag::INFORMATION_REQUEST
            | header_tag::CONSOLE
            | header_tag::FRAMEBUFFER
            | header_tag::MODULE_ALIGN
            | header_tag::EFI_ENTRY_I386
            | header_tag::EFI_ENTRY_AMD64
            | header_tag::RELOCATABLE => Ok(()),
            _ if optional => Ok(()),
            _ => Err(BootError::Multiboot2Tag(kind)),
        }
    }
}

/// Whether the specification has an information tag of a type.
///
/// An image that requires one boots without it if this machine has nothing to say in it.
const fn is_known(kind: u32) -> bool {
    kind <= info_tag::LAST
}

/// Places a multiboot 2 image.
pub(super) fn load<'a>(
    placement: &mut Placement<'a>,
    layout: &Layout,
    request: &LoadRequest<'a>,
    rsdp: Option<Rsdp>,
) -> Result<CpuState, BootError> {
    let at = find_header(request.image).ok_or(BootError::Multiboot2NoHeader)?;
    let header = HeaderTags::parse(request.image, at, request)?;
    let (entry, end) = match (header.addresses, header.entry) {
        (Some(_), None) => return Err(BootError::Multiboot2Entry),
        (Some([header_address, load, load_end, bss_end]), Some(entry)) => {
            let header_address = u64::from(header_address);
            let load = match load {
                WHOLE_FILE => header_address.saturating_sub(at as u64),
                _ => load.into(),
            };
            let addresses = [header_address, load, load_end.into(), bss_end.into()];
            place_by_addresses(placement, request.image, at, addresses, entry.into())?
        }
        (None, entry) => {
            let elf = Elf::parse(request.image)?;
            elf.add_segments(placement)?;
            let entry = match entry {
                Some(entry) if !elf.loads(entry.into()) => {
                    return Err(BootError::EntryOutside {
                        entry: entry.into(),
                    });
                }
                Some(entry) => entry.into(),
                None => elf.entry()?,
            };
            (entry, elf.end())
        }
    };
    let info = information(placement, layout, request, (end, rsdp))?;
    let mut state = entry::protected(placement, entry)?;
    state.gpr[gpr::RAX] = LOADER_MAGIC;
    state.gpr[gpr::RBX] = info;
    Ok(state)
}

/// Adds a tag to the information, which ends at a multiple of 8.
fn add_tag(info: &mut Vec<u8>, kind: u32, content: &[u8]) {
    info.extend(kind.to_le_bytes());
    info.extend(address32((TAG_SIZE + content.len()) as u64));
    info.extend(content);
    info.resize(info.len().next_multiple_of(ALIGN), 0);
}

/// Places the information and everything that it refers to; modules go above `image_end`.
///
/// Returns the address of the information.
fn information<'a>(
    placement: &mut Placement<'a>,
    layout: &Layout,
    request: &LoadRequest<'a>,
    (image_end, rsdp): (u64, Option<Rsdp>),
) -> Result<u64, BootError> {
    // The total size, and a reserved field.
    let mut info = vec![0; 8];
    let cmdline = command_line(&request.name, &request.cmdline);
    let cmdline = c_string("the command line", &cmdline)?;
    add_tag(&mut info, info_tag::CMDLINE, &cmdline);
    let name = c_string("the loader's name", LOADER_NAME)?;
    add_tag(&mut info, info_tag::LOADER_NAME, &name);
    add_modules(&mut info, placement, request, image_end)?;
    // In KiB: conventional memory, and the memory from 1 MiB up to the first hole.
    let upper = (layout.low_end() - EXTENDED_START) / 1024;
    let memory = [address32(CONVENTIONAL_END / 1024), address32(upper)];
    add_tag(&mut info, info_tag::MEMORY, &memory.concat());
    add_tag(&mut info, info_tag::MEMORY_MAP, &memory_map(layout));
    if request.text_screen {
        add_tag(&mut info, info_tag::FRAMEBUFFER, &text_screen());
    }
    if elf_file::is_elf(request.image) {
        let above = image_end.max(EXTENDED_START)..placement.ram_end();
        if let Some(sections) = elf_sections::place_symbols(placement, request.image, &above) {
            add_tag(&mut info, info_tag::ELF_SECTIONS, &sections);
        }
    }
    if let Some(rsdp) = rsdp {
        add_tag(&mut info, info_tag::RSDP_OLD, &rsdp.0[..RSDP_OLD_SIZE]);
        add_tag(&mut info, info_tag::RSDP_NEW, &rsdp.0);
    }
    add_tag(&mut info, info_tag::END, &[]);
    let size = address32(info.len() as u64);
    info[..4].copy_from_slice(&size);
    placement.structure("multiboot information", info, ALIGN as u64)
}

/// The memory map: size and version of an entry, then base, length, type and a reserved field of each.
fn memory_map(layout: &Layout) -> Vec<u8> {
    let mut map = [24_u32.to_le_bytes(), [0; 4]].concat();
    for range in layout.memory_map() {
        map.extend(range.base.to_le_bytes());
        map.extend(range.size.to_le_bytes());
        map.extend((range.kind as u32).to_le_bytes());
        map.extend([0; 4]);
    }
    map
}

/// The text screen: address, bytes of a row, width, height, bits of a cell, type.
fn text_screen() -> Vec<u8> {
    let [address, pitch, width, height] = TEXT_SCREEN;
    let mut screen = u64::from(address).to_le_bytes().to_vec();
    for value in [pitch, width, height] {
        screen.extend(value.to_le_bytes());
    }
    screen.extend([TEXT_BITS, TEXT_TYPE, 0, 0]);
    screen
}

/// Places the modules and adds their tags: start, end, string.
fn add_modules<'a>(
    info: &mut Vec<u8>,
    placement: &mut Placement<'a>,
    request: &LoadRequest<'a>,
    image_end: u64,
) -> Result<(), BootError> {
    let above = image_end.max(EXTENDED_START)..placement.ram_end();
    for module in request.all_modules() {
        let NamedModule { name, data, .. } = module;
        let text = format!("command line of {name}");
        let args = c_string(&text, &command_line(module.file, module.args))?;
        let start = placement.fit(name, data, 0x1000, above.clone(), Fit::Lowest)?;
        let range = [address32(start), address32(start + data.len() as u64)];
        add_tag(
            info,
            info_tag::MODULE,
            &[&range.concat()[..], &args].concat(),
        );
    }
    Ok(())
}
