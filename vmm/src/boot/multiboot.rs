//! Multiboot 1: "The Multiboot Specification version 0.6.96".
//!
//! The header is in the first 8 KiB of an ELF image, or of any image if the header has the
//! addresses. The image is entered in 32-bit protected mode with EAX = 0x2badb002 and the address
//! of the information structure in EBX.
//!
//! Deviation: ELF64 images are accepted too, with the same 32-bit entry, as in GRUB.

use hindsight_cpu::state::{CpuState, gpr};

use crate::boot::bytes::{address32, put, u32_at};
use crate::boot::elf_file::Elf;
use crate::boot::placement::{Fit, Placement};
use crate::boot::request::{NamedModule, c_string};
use crate::boot::{BootError, LoadRequest, entry};
use crate::memory::layout::{CONVENTIONAL_END, EXTENDED_START, Layout};

const SEARCH: usize = 0x2000;
const HEADER_MAGIC: u32 = 0x1bad_b002;
const LOADER_MAGIC: u64 = 0x2bad_b002;
pub(super) const LOADER_NAME: &[u8] = b"hindsight";

/// The header's flags. Modules are always page-aligned, and memory information is always passed.
const PAGE_ALIGN: u32 = 1 << 0;
const MEMORY_INFO: u32 = 1 << 1;
const VIDEO_MODE: u32 = 1 << 2;
const ADDRESSES: u32 = 1 << 16;
/// Flags that a loader must support or refuse.
const REQUIRED: u32 = 0xffff;

/// The information structure's size, up to and including the boot loader's name.
const INFO_SIZE: usize = 0x44;
/// The information structure's flags: mem_*, cmdline, mods_*, mmap_*, boot_loader_name.
const INFO_MEMORY: u32 = 1 << 0;
const INFO_CMDLINE: u32 = 1 << 2;
const INFO_MODULES: u32 = 1 << 3;
const INFO_MAP: u32 = 1 << 6;
const INFO_NAME: u32 = 1 << 9;

/// The offset of a header with a valid checksum in the first 8 KiB, if there is one.
pub(super) fn find_header(image: &[u8]) -> Option<usize> {
    let search = &image[..image.len().min(SEARCH)];
    (0..search.len()).step_by(4).find(|&at| {
        let (magic, flags, sum) = (
            u32_at(search, at),
            u32_at(search, at + 4),
            u32_at(search, at + 8),
        );
        match (magic, flags, sum) {
            (Some(HEADER_MAGIC), Some(flags), Some(sum)) => {
                HEADER_MAGIC.wrapping_add(flags).wrapping_add(sum) == 0
            }
            _ => false,
        }
    })
}

/// Places a multiboot image.
pub(super) fn load<'a>(
    placement: &mut Placement<'a>,
    layout: &Layout,
    request: &LoadRequest<'a>,
) -> Result<CpuState, BootError> {
    let at = find_header(request.image).ok_or(BootError::MultibootNoHeader)?;
    let flags = field(request.image, at, 1)?;
    let unknown = flags & REQUIRED & !(PAGE_ALIGN | MEMORY_INFO | VIDEO_MODE);
    if unknown != 0 {
        return Err(BootError::MultibootFlags(unknown));
    }
    // Mode type 1 is text, which a kernel can do without; 0 is graphics.
    if flags & VIDEO_MODE != 0 && field(request.image, at, 8)? == 0 {
        return Err(BootError::MultibootGraphics);
    }
    let (entry, end) = if flags & ADDRESSES != 0 {
        let address = |index| field(request.image, at, index).map(u64::from);
        let addresses = [address(3)?, address(4)?, address(5)?, address(6)?];
        place_by_addresses(placement, request.image, at, addresses, address(7)?)?
    } else {
        let elf = Elf::parse(request.image)?;
        elf.add_segments(placement)?;
        (elf.entry()?, elf.end())
    };
    let info = information(placement, layout, request, end)?;
    let mut state = entry::protected(placement, entry)?;
    state.gpr[gpr::RAX] = LOADER_MAGIC;
    state.gpr[gpr::RBX] = info;
    Ok(state)
}

/// The 32-bit field number `index` of the header at `at`.
fn field(image: &[u8], at: usize, index: usize) -> Result<u32, BootError> {
    u32_at(image, at + 4 * index).ok_or(BootError::MultibootTruncated {
        at,
        file_end: image.len(),
    })
}

/// Places the image at the addresses that its header, at `at`, has: of the header itself, of the image, of its
/// end, and of the end of its BSS. Returns the entry point and the end in memory.
pub(super) fn place_by_addresses<'a>(
    placement: &mut Placement<'a>,
    image: &'a [u8],
    at: usize,
    [header, load, load_end, bss_end]: [u64; 4],
    entry: u64,
) -> Result<(u64, u64), BootError> {
    let require = |holds, contradiction, value, limit| match holds {
        true => Ok(()),
        false => Err(BootError::MultibootAddresses {
            contradiction,
            value,
            limit,
        }),
    };
    require(
        load <= header,
        "load_addr is above header_addr",
        load,
        header,
    )?;
    let before = header - load;
    let header_at = at as u64;
    require(
        before <= header_at,
        "load_addr is before the file's start",
        before,
        header_at,
    )?;
    let available = &image[crate::memory::layout::to_usize(header_at - before)..];
    let available_end = load + available.len() as u64;
    // 0: the whole file is loaded, and there is no BSS.
    let load_end = if load_end == 0 {
        available_end
    } else {
        load_end
    };
    require(
        load_end > load,
        "load_end_addr is not above load_addr",
        load_end,
        load,
    )?;
    require(
        load_end <= available_end,
        "load_end_addr is beyond the file's end",
        load_end,
        available_end,
    )?;
    let end = if bss_end == 0 { load_end } else { bss_end };
    require(
        end >= load_end,
        "bss_end_addr is below load_end_addr",
        end,
        load_end,
    )?;
    let data = &available[..crate::memory::layout::to_usize(load_end - load)];
    placement.fixed("image", load, end - load, data)?;
    if !(load..end).contains(&entry) {
        return Err(BootError::EntryOutside { entry });
    }
    Ok((entry, end))
}

/// Places the information structure and everything that it refers to; modules go above `image_end`.
///
/// Returns the address of the structure.
fn information<'a>(
    placement: &mut Placement<'a>,
    layout: &Layout,
    request: &LoadRequest<'a>,
    image_end: u64,
) -> Result<u64, BootError> {
    let mut info = vec![0; INFO_SIZE];
    let mut flags = INFO_MEMORY | INFO_MAP | INFO_NAME;
    // In KiB: conventional memory, and the memory from 1 MiB up to the first hole.
    put(&mut info, 4, address32(CONVENTIONAL_END / 1024));
    put(
        &mut info,
        8,
        address32((layout.low_end() - EXTENDED_START) / 1024),
    );
    let cmdline = command_line(&request.name, &request.cmdline);
    if !cmdline.is_empty() {
        flags |= INFO_CMDLINE;
        let at = placement.structure("command line", c_string("the command line", &cmdline)?, 1)?;
        put(&mut info, 16, address32(at));
    }
    let list = modules(placement, request, image_end)?;
    if !list.is_empty() {
        flags |= INFO_MODULES;
        put(&mut info, 20, address32(list.len() as u64 / 16));
        put(
            &mut info,
            24,
            address32(placement.structure("module list", list, 4)?),
        );
    }
    let map = memory_map(layout);
    put(&mut info, 44, address32(map.len() as u64));
    put(
        &mut info,
        48,
        address32(placement.structure("memory map", map, 4)?),
    );
    let name = c_string("the loader's name", LOADER_NAME)?;
    put(
        &mut info,
        64,
        address32(placement.structure("loader name", name, 1)?),
    );
    put(&mut info, 0, flags.to_le_bytes());
    placement.structure("multiboot information", info, 4)
}

/// A command line as boot loaders pass it: the file's name, then the arguments.
pub(super) fn command_line(name: &[u8], args: &[u8]) -> Vec<u8> {
    let parts = [name, args].into_iter().filter(|part| !part.is_empty());
    parts.collect::<Vec<_>>().join(&b' ')
}

/// The entries of the memory map: size of the rest of the entry, base, length, type.
fn memory_map(layout: &Layout) -> Vec<u8> {
    let mut map = Vec::new();
    for range in layout.memory_map() {
        map.extend(20_u32.to_le_bytes());
        map.extend(range.base.to_le_bytes());
        map.extend(range.size.to_le_bytes());
        map.extend((range.kind as u32).to_le_bytes());
    }
    map
}

/// Places the modules and returns their list: start, end, string, 0.
fn modules<'a>(
    placement: &mut Placement<'a>,
    request: &LoadRequest<'a>,
    image_end: u64,
) -> Result<Vec<u8>, BootError> {
    let mut list = Vec::new();
    let above = image_end.max(EXTENDED_START)..placement.ram_end();
    for module in request.all_modules() {
        let NamedModule { name, data, .. } = module;
        let text = format!("command line of {name}");
        let args = c_string(&text, &command_line(module.file, module.args))?;
        let args = placement.structure(text, args, 1)?;
        let size = data.len() as u64;
        let start = placement.fit(name, data, 0x1000, above.clone(), Fit::Lowest)?;
        for value in [start, start + size, args, 0] {
            list.extend(address32(value));
        }
    }
    Ok(list)
}
