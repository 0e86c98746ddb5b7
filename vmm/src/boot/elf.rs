//! The plain ELF protocol: a static executable is entered at its entry point, in the mode of its
//! class.
//!
//! RBX points to the same start info as in the PVH protocol.

use hindsight_cpu::state::{CpuState, gpr};

use crate::boot::elf_file::{Elf, ElfClass};
use crate::boot::placement::Placement;
use crate::boot::{BootError, LoadRequest, entry, start_info};
use crate::memory::layout::Layout;

/// Places a plain ELF image.
pub(super) fn load<'a>(
    placement: &mut Placement<'a>,
    layout: &Layout,
    request: &LoadRequest<'a>,
) -> Result<CpuState, BootError> {
    let elf = Elf::parse(request.image)?;
    elf.add_segments(placement)?;
    let at = elf.entry()?;
    let start_info = start_info::add(placement, layout, request)?;
    let mut state = match elf.class {
        ElfClass::Elf32 => entry::protected(placement, at)?,
        ElfClass::Elf64 => entry::long(placement, at)?,
    };
    state.gpr[gpr::RBX] = start_info;
    Ok(state)
}
