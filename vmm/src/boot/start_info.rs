//! The start info structure, which an entry by PVH or plain ELF points to in EBX. Xen, "x86/HVM
//! direct boot ABI".

use linux_loader::loader::elf::start_info::{
    hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vm_memory::ByteValued;

use crate::boot::placement::{Fit, Placement};
use crate::boot::request::{NamedModule, c_string};
use crate::boot::{BootError, LoadRequest};
use crate::memory::layout::{EXTENDED_START, Layout};

/// Magic at the start of the structure: "xEn3" with the 0x80 bit of the "E" set.
const MAGIC: u32 = 0x336e_c578;
/// The version that has the memory map.
const VERSION: u32 = 1;

/// Places the start info and everything that it refers to; modules go to the top of memory.
///
/// Returns the address of the start info.
pub(super) fn add<'a>(
    placement: &mut Placement<'a>,
    layout: &Layout,
    request: &LoadRequest<'a>,
) -> Result<u64, BootError> {
    let modules = modules(placement, request)?;
    let map: Vec<u8> = layout
        .memory_map()
        .into_iter()
        .flat_map(|range| {
            let entry = hvm_memmap_table_entry {
                addr: range.base,
                size: range.size,
                type_: range.kind as u32,
                reserved: 0,
            };
            entry.as_slice().to_vec()
        })
        .collect();
    let mut info = hvm_start_info {
        magic: MAGIC,
        version: VERSION,
        rsdp_paddr: layout.rsdp().unwrap_or(0),
        ..Default::default()
    };
    info.memmap_entries = count(map.len() / size_of::<hvm_memmap_table_entry>());
    info.memmap_paddr = placement.structure("memory map", map, 8)?;
    if !modules.is_empty() {
        info.nr_modules = count(modules.len());
        let list: Vec<u8> = modules.iter().flat_map(|m| m.as_slice().to_vec()).collect();
        info.modlist_paddr = placement.structure("module list", list, 8)?;
    }
    if !request.cmdline.is_empty() {
        info.cmdline_paddr = placement.structure("command line", request.cmdline_string()?, 1)?;
    }
    placement.structure("start info", info.as_slice().to_vec(), 8)
}

fn modules<'a>(
    placement: &mut Placement<'a>,
    request: &LoadRequest<'a>,
) -> Result<Vec<hvm_modlist_entry>, BootError> {
    let mut list = Vec::new();
    for NamedModule {
        name, data, args, ..
    } in request.all_modules()
    {
        let mut entry = hvm_modlist_entry {
            size: data.len() as u64,
            ..Default::default()
        };
        if !args.is_empty() {
            let text = format!("command line of {name}");
            let args = c_string(&text, args)?;
            entry.cmdline_paddr = placement.structure(text, args, 1)?;
        }
        let extended = EXTENDED_START..placement.ram_end();
        entry.paddr = placement.fit(name, data, 0x1000, extended, Fit::Highest)?;
        list.push(entry);
    }
    Ok(list)
}

/// Converts a count of map entries or modules, of which there are at most 256.
#[expect(clippy::cast_possible_truncation, reason = "small by construction")]
const fn count(count: usize) -> u32 {
    count as u32
}
