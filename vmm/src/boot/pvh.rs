//! The PVH protocol: an ELF image with a note that names a 32-bit entry point, entered in protected
//! mode with the address of a start info structure in EBX. Xen, "x86/HVM direct boot ABI".

use hindsight_cpu::state::{CpuState, gpr};
use linux_loader::loader::elf::start_info::{
    hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vm_memory::ByteValued;

use crate::boot::elf::Elf;
use crate::boot::place::{Places, Take};
use crate::boot::plan::{NamedModule, c_string};
use crate::boot::{BootError, Plan, entry};
use crate::memory::layout::{EXTENDED_START, Layout};

/// Magic at the start of the structure: "xEn3" with the 0x80 bit of the "E" set.
const MAGIC: u32 = 0x336e_c578;
/// The version that has the memory map.
const VERSION: u32 = 1;

/// Places a PVH image.
pub(super) fn place<'a>(
    places: &mut Places<'a>,
    layout: &Layout,
    plan: &Plan<'a>,
) -> Result<CpuState, BootError> {
    let elf = Elf::parse(plan.image)?;
    let at = entry_point(&elf)?;
    elf.place(places)?;
    let start_info = start_info(places, layout, plan)?;
    let mut state = entry::protected(places, at)?;
    state.gpr[gpr::RBX] = start_info;
    Ok(state)
}

fn entry_point(elf: &Elf<'_>) -> Result<u64, BootError> {
    let note = elf.pvh_entry.ok_or(BootError::PvhNoNote)?;
    let at = if let Ok(bytes) = note.try_into() {
        u64::from(u32::from_le_bytes(bytes))
    } else if let Ok(bytes) = note.try_into() {
        u64::from_le_bytes(bytes)
    } else {
        return Err(BootError::PvhNoteSize(note.len()));
    };
    if u32::try_from(at).is_err() {
        return Err(BootError::PvhEntry(at));
    }
    if !elf.loads(at) {
        return Err(BootError::EntryOutside { entry: at });
    }
    Ok(at)
}

/// Places the start info and all that it refers to, modules at the top of memory. Returns its
/// address.
pub(super) fn start_info<'a>(
    places: &mut Places<'a>,
    layout: &Layout,
    plan: &Plan<'a>,
) -> Result<u64, BootError> {
    let modules = modules(places, plan)?;
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
    info.memmap_paddr = places.structure("memory map", map, 8)?;
    if !modules.is_empty() {
        info.nr_modules = count(modules.len());
        let list: Vec<u8> = modules.iter().flat_map(|m| m.as_slice().to_vec()).collect();
        info.modlist_paddr = places.structure("module list", list, 8)?;
    }
    if !plan.cmdline.is_empty() {
        info.cmdline_paddr = places.structure("command line", plan.cmdline_string()?, 1)?;
    }
    places.structure("start info", info.as_slice().to_vec(), 8)
}

fn modules<'a>(
    places: &mut Places<'a>,
    plan: &Plan<'a>,
) -> Result<Vec<hvm_modlist_entry>, BootError> {
    let mut list = Vec::new();
    for NamedModule {
        name, data, args, ..
    } in plan.all_modules()
    {
        let mut entry = hvm_modlist_entry {
            size: data.len() as u64,
            ..Default::default()
        };
        if !args.is_empty() {
            let text = format!("command line of {name}");
            let args = c_string(&text, args)?;
            entry.cmdline_paddr = places.structure(text, args, 1)?;
        }
        let above = EXTENDED_START..places.ram_end();
        entry.paddr = places.fit(name, data, 0x1000, above, Take::Highest)?;
        list.push(entry);
    }
    Ok(list)
}

/// Counts here are a handful of map entries, and modules of which [`Plan`] allows 256.
#[expect(clippy::cast_possible_truncation, reason = "small by construction")]
const fn count(count: usize) -> u32 {
    count as u32
}
