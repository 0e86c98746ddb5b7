//! The PVH protocol: an ELF image with a note that names a 32-bit entry point.
//!
//! It is entered in protected mode with the address of a start info structure in EBX. Xen, "x86/HVM
//! direct boot ABI".

use hindsight_cpu::state::{CpuState, gpr};

use crate::boot::elf_file::Elf;
use crate::boot::placement::Placement;
use crate::boot::{BootError, LoadRequest, entry, start_info};
use crate::memory::layout::Layout;

/// Places a PVH image.
pub(super) fn load<'a>(
    placement: &mut Placement<'a>,
    layout: &Layout,
    request: &LoadRequest<'a>,
) -> Result<CpuState, BootError> {
    let elf = Elf::parse(request.image)?;
    let at = entry_point(&elf)?;
    elf.add_segments(placement)?;
    let start_info = start_info::add(placement, layout, request)?;
    let mut state = entry::protected(placement, at)?;
    state.gpr[gpr::RBX] = start_info;
    Ok(state)
}

/// Reads the entry point from the PVH note.
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
